"""What a run's events say: how it was started, evaluations, notes, how it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..events import (
    CheckpointWritten,
    EngineDied,
    EpochBegan,
    Evaluated,
    Event,
    Injected,
    Noted,
    Paused,
    Resumed,
    RunFinished,
    RunStarted,
    ServerHolds,
    Topic,
    Unmeasured,
    WasCut,
)
from .snapshot import Split

MOST_NOTES = 100
MOST_EVALS = 10_000
MOST_MOMENTS = 10_000


@dataclass(frozen=True)
class Moment:
    """Something that happened once, for pictures with an axis of time.

    Attributes:
        t_s: When, on the clock of events.
        kind: `eval`, `note`, `warning`, `checkpoint`, `death`, `inject`, `paused` or
            `resumed`.
        rank: Whom it happened to; None: the run.
    """

    t_s: float
    kind: str
    text: str
    rank: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)


class Story:
    """Folds events, in any order, from all ranks.

    Attributes:
        started: Fields of `run_started` (of the lowest rank that sent it).
        finished: Fields of `run_finished` by rank.
        devices: Device by rank.
        evals: One mapping per evaluation: step, epoch, then the metrics; ordered by step.
        notes: Notes, warnings and deaths, each text once; a death stands there until a note says
            more of it.
        facts: What notes are about, by topic, as the first of each has it.
        checkpoints: How many were written.
        split: How a pipeline's model was cut.
        unmeasured: Column -> reason, as strategies declared it.
        memory_bytes: What each rank holds between steps.
        servers: Fields of `server` by number of the server.
        epoch: Latest epoch that began.
        pauses: When each pause ended, on the clock of events, and how many seconds it took.
        moments: What happened when, in the order in which it was heard of.
        rewinds: The step from which the run went on, each time that it was set back.
    """

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.finished: dict[int, dict[str, Any]] = {}
        self.devices: dict[int, str] = {}
        self.evals: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.facts: dict[Topic, Any] = {}
        self.moments: list[Moment] = []
        self.rewinds: list[int] = []
        self.checkpoints = 0
        self._last_checkpoint = ""
        self._deaths: dict[int, str] = {}
        self.split: Split | None = None
        self.unmeasured: dict[str, str] = {}
        self.memory_bytes: dict[int, float] = {}
        self.servers: dict[int, dict[str, Any]] = {}
        self.epoch = 0
        self.eval_s = 0.0
        self.pauses: list[tuple[float, float]] = []
        self._paused_at: float | None = None

    def fold(self, event: Event, t_s: float) -> None:
        """Take one event in; events that say nothing about the run as a whole are ignored.

        Args:
            t_s: When it happened; pauses are measured between events.
        """
        match event:
            case RunStarted():
                self._start(event)
            case Evaluated():
                self._evaluate(event, t_s)
            case Noted() | EngineDied():
                self._tell(event, t_s)
            case CheckpointWritten():
                self._checkpoint(event)
                self._moment(t_s, event.name, f"checkpoint at step {event.step}")
            case Injected():
                self._moment(t_s, event.name, ", ".join(event.faults) or "faults end")
            case EpochBegan():
                self.epoch = max(self.epoch, int(event.epoch))
            case WasCut():
                self.split = Split.of(event.to_wire())
            case Unmeasured():
                self._unmeasured(event)
            case Paused() if self._paused_at is None:
                self._paused_at = t_s
                self._moment(t_s, event.name, f"paused at step {event.step}")
            case Resumed() if self._paused_at is not None:
                if len(self.pauses) < MOST_MOMENTS:
                    self.pauses.append((t_s, max(t_s - self._paused_at, 0.0)))
                self._paused_at = None
                self._moment(t_s, event.name, "resumed")
            case RunFinished():
                self.finished[int(event.rank)] = event.to_wire()
            case ServerHolds():
                self.servers[int(event.server)] = event.to_wire()

    def rewind(self, step: int) -> None:
        """Forget evaluations of `step` and later, and how the run ended before it went on."""
        self.rewinds.append(step)
        self.moments = [
            m for m in self.moments if m.kind != "eval" or int(m.values.get("step", 0)) < step
        ]
        self.evals = [one for one in self.evals if one["step"] < step]
        self.finished.clear()

    def _start(self, event: RunStarted) -> None:
        rank = int(event.rank)
        if not self.started or rank <= int(self.started["rank"]):
            self.started = event.to_wire()
        if event.device is not None:
            self.devices[rank] = str(event.device)

    def _moment(
        self,
        t_s: float,
        kind: str,
        text: str,
        *,
        rank: int | None = None,
        values: Mapping[str, Any] | None = None,
    ) -> None:
        if t_s > 0 and len(self.moments) < MOST_MOMENTS:
            self.moments.append(Moment(t_s, kind, text, rank, values or {}))

    def _evaluate(self, event: Evaluated, t_s: float) -> None:
        step, epoch = int(event.step), event.epoch
        if any(known["step"] == step and known["epoch"] == epoch for known in self.evals):
            return  # another rank's report of the same evaluation
        self.evals.append({"step": step, "epoch": epoch, **dict(event.values or {})})
        self._moment(t_s, event.name, f"evaluation at step {step}", values=dict(self.evals[-1]))
        self.evals.sort(key=lambda one: one["step"])
        del self.evals[:-MOST_EVALS]
        self.eval_s += float(event.seconds or 0.0)

    def _checkpoint(self, event: CheckpointWritten) -> None:
        """Show the newest checkpoint, in the place of the one before."""
        self.checkpoints += 1
        stall_ms, seconds = 1e3 * float(event.stall_s), float(event.seconds)
        kib = int(event.size_bytes) / 1024
        size = f"{kib:.1f} KiB" if kib < 1024 else f"{kib / 1024:.1f} MiB"
        text = (
            f"Checkpoint at step {event.step}: {size}, on "
            f"the disk after {seconds:.2g} s; training stood still for {stall_ms:.2g} ms "
            f"({event.path})."
        )
        self.notes = [note for note in self.notes if note != self._last_checkpoint]
        self._last_checkpoint = text
        self._note(text)

    def _tell(self, event: Noted | EngineDied, t_s: float) -> None:
        """Take a note in; of a death it takes the place of what was said at first."""
        text, rank = str(event.text), None
        if isinstance(event, EngineDied):
            self._deaths[int(event.engine)] = text
            rank = event.rank
        else:
            if (topic := Topic.of(event.topic)) is not None:
                self.facts.setdefault(topic, event.value)
            said = {self._deaths.pop(engine, "") for engine in event.deaths or ()}
            self.notes = [note for note in self.notes if note not in said]
        if self._note(text):
            self._moment(t_s, event.name, text, rank=rank)

    def _note(self, text: str) -> bool:
        """Keep a note; return whether it is new."""
        fresh = bool(text) and text not in self.notes and len(self.notes) < MOST_NOTES
        if fresh:
            self.notes.append(text)
        return fresh

    def _unmeasured(self, event: Unmeasured) -> None:
        columns = event.columns or {}
        if isinstance(columns, Mapping):
            self.unmeasured.update({str(k): str(v) for k, v in columns.items()})
        else:
            reason = event.reason or "this strategy cannot measure it"
            self.unmeasured.update(dict.fromkeys(map(str, columns), reason))
