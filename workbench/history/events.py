"""The events of a run: its start, evaluations, notes, its end.

When a run continues from an earlier step, the later steps are dropped and then repeated. The rows
on disk are complete and none are left out. So the history is built again from them, and every total
stays exact: each step counts once, with its last repetition. Events of the dropped steps
(evaluations, logged values) are dropped too. If the rows are on another host, the history keeps its
rows, and the rows of repeated steps are left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared import cluster_env
from ..shared.events import (
    CheckpointWritten,
    EngineDied,
    EpochBegan,
    Evaluated,
    Event,
    Gained,
    Healed,
    Injected,
    Joined,
    Left,
    Noted,
    Paused,
    Replaced,
    Resumed,
    RunFinished,
    RunStarted,
    ServerHolds,
    Shed,
    Topic,
    Unmeasured,
    WasCut,
)
from ..shared.record import RECORD
from .snapshot import Split

MOST_NOTES = 100
MOST_EVALS = 10_000
MOST_MOMENTS = 10_000


@dataclass(frozen=True)
class Moment:
    """A single event, for pictures with a time axis.

    Attributes:
        t_s: Its time, on the clock of events.
        kind: `eval`, `note`, `warning`, `checkpoint`, `death`, `healed`, `joined`, `shed`,
            `inject`, `paused` or `resumed`.
        rank: The rank that it concerns; None: the whole run.
        after, before: The last step before it, or the first step after it; None: not known. They
            tell more exactly when it happened, because `t_s` can be the time of its arrival.
    """

    t_s: float
    kind: str
    text: str
    rank: int | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    after: int | None = None
    before: int | None = None


class Story:
    """Collects events from all ranks, in any order.

    Attributes:
        started: Fields of `run_started` (of the lowest rank that sent it).
        finished: Fields of `run_finished` by rank.
        devices: Device by rank.
        hosts: Host name by rank, for ranks on other machines.
        evals: One mapping per evaluation: step, epoch, then the metrics; ordered by step.
        notes: Notes, warnings and deaths, each text once; a death is listed until a more detailed
            note replaces it.
        facts: Facts of the notes by topic, from the first note of each topic.
        checkpoints: Number of written checkpoints.
        split: How a pipeline's model was cut.
        unmeasured: Column -> reason, as strategies declared it.
        memory_bytes: Memory of each rank between steps.
        servers: Fields of `server` by number of the server.
        epoch: Latest epoch that began.
        pauses: The end of each pause on the clock of events, and its duration in seconds.
        moments: Single events, in the order of arrival.
        changes: Fields of `healed`, `joined`, `left`, `shed` and `replaced`, with the name as
            `event`.
        away: Ranks that died or left and were not replaced.
        rewinds: The step from which the run continued, for each time that it was set back.
    """

    def __init__(self) -> None:
        self.started: dict[str, Any] = {}
        self.finished: dict[int, dict[str, Any]] = {}
        self.devices: dict[int, str] = {}
        self.hosts: dict[int, str] = {}
        self.evals: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.facts: dict[Topic, Any] = {}
        self.moments: list[Moment] = []
        self.rewinds: list[int] = []
        self.changes: list[dict[str, Any]] = []
        self.away: frozenset[int] = frozenset()
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
        """Process one event; events that do not concern the whole run are ignored.

        Args:
            t_s: Its time; pauses are measured between events.
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
                text = f"checkpoint at step {event.step}"
                self._moment(t_s, event.name, text, after=int(event.step) - 1)
            case Injected():
                self._moment(t_s, event.name, ", ".join(event.faults) or "no more faults")
            case EpochBegan():
                self.epoch = max(self.epoch, int(event.epoch))
            case WasCut():
                self.split = Split.of(event.to_wire())
            case Unmeasured():
                self._unmeasured(event)
            case Paused() if self._paused_at is None:
                self._paused_at = t_s
                text = f"paused at step {event.step}"
                self._moment(t_s, event.name, text, after=int(event.step) - 1)
            case Resumed() if self._paused_at is not None:
                if len(self.pauses) < MOST_MOMENTS:
                    self.pauses.append((t_s, max(t_s - self._paused_at, 0.0)))
                self._paused_at = None
                self._moment(t_s, event.name, "resumed", before=int(event.step))
            case Healed():  # workers that join or leave are also announced in this way
                self.changes.append({"event": event.name, **event.to_wire()})
                gone = frozenset(map(int, event.ranks))
                if event.name in (Healed.name, Left.name):
                    self.away |= gone
                elif event.name != Shed.name:
                    self.away -= gone
                self._moment(t_s, event.name, _change_words(event), before=int(event.step))
            case Gained():
                for one in self.changes:
                    if one["event"] in (Shed.name, Replaced.name) and one["step"] == event.step:
                        one["after_s"] = event.after_s
            case RunFinished():
                self.finished[int(event.rank)] = event.to_wire()
            case ServerHolds():
                self.servers[int(event.server)] = event.to_wire()

    def rewind(self, step: int) -> None:
        """Drop the evaluations from `step` on, and the recorded ends: the run continues."""
        self.rewinds.append(step)
        self.away = frozenset()  # all begin again
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
        if event.host:
            self.hosts[rank] = str(event.host)

    def _moment(
        self,
        t_s: float,
        kind: str,
        text: str,
        *,
        rank: int | None = None,
        values: Mapping[str, Any] | None = None,
        after: int | None = None,
        before: int | None = None,
    ) -> None:
        if t_s > 0 and len(self.moments) < MOST_MOMENTS:
            self.moments.append(Moment(t_s, kind, text, rank, values or {}, after, before))

    def _evaluate(self, event: Evaluated, t_s: float) -> None:
        step, epoch = int(event.step), event.epoch
        if any(known["step"] == step and known["epoch"] == epoch for known in self.evals):
            return  # another rank's report of the same evaluation
        self.evals.append({"step": step, "epoch": epoch, **dict(event.values or {})})
        text = f"evaluation at step {step}"
        self._moment(t_s, event.name, text, values=dict(self.evals[-1]), after=step)
        self.evals.sort(key=lambda one: one["step"])
        del self.evals[:-MOST_EVALS]
        self.eval_s += float(event.seconds or 0.0)

    def _checkpoint(self, event: CheckpointWritten) -> None:
        """Show the newest checkpoint instead of the previous one."""
        self.checkpoints += 1
        stall_ms, seconds = 1e3 * float(event.stall_s), float(event.seconds)
        kib = int(event.size_bytes) / 1024
        size = f"{kib:.1f} KiB" if kib < 1024 else f"{kib / 1024:.1f} MiB"
        text = (
            f"Checkpoint at step {event.step} in {event.path}: {size}, written to disk in "
            f"{seconds:.2g} s; training paused for {stall_ms:.2g} ms."
        )
        self.notes = [note for note in self.notes if note != self._last_checkpoint]
        self._last_checkpoint = text
        self._note(text)

    def _tell(self, event: Noted | EngineDied, t_s: float) -> None:
        """Add a note; a note about a death replaces the first message about it."""
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
            reason = event.reason or "this strategy cannot measure this value"
            self.unmeasured.update(dict.fromkeys(map(str, columns), reason))


def _change_words(event: Healed) -> str:
    """Return a short text on workers that left or joined: `rank 1 died at step 60: 2 workers
    continued after 9 ms`.
    """
    if isinstance(event, Shed):
        shares = " + ".join(map(str, event.shares))
        return f"from step {event.step} on, the shares of the batch are {shares} samples"
    ranks = f"rank{'s' if len(event.ranks) > 1 else ''} {', '.join(map(str, event.ranks))}"
    who = ranks if event.ranks else "a server"
    did = {
        Healed.name: "died", Joined.name: "joined", Left.name: "left",
        Replaced.name: "were replaced" if len(event.ranks) > 1 else "was replaced",
    }  # fmt: skip
    return (
        f"{who} {did[event.name]} at step {event.step}: {event.workers} "
        f"worker{'s' * (event.workers != 1)} continued after {1e3 * event.seconds:.0f} ms"
    )


_CHUNK_ROWS = 4096
_OF_STEPS = frozenset({"eval", "log", "epoch"})
Phase = tuple[int, tuple[int, ...]]
"""A first step and the ranks from this step on, for a run that continued with fewer workers."""


def cut(folder: Path, ranks: Iterable[int], step: int) -> bool:
    """Drop the rows and events of `step` and later from a run's folder.

    Args:
        ranks: The ranks whose engines wrote files.

    Returns:
        Whether the rows of every rank are here; if not, nothing is changed.

    Raises:
        OSError: Not all files could be written again; each file is either unchanged or correct.
    """
    records = [folder / f"records-rank{rank}.bin" for rank in ranks]
    if not all(path.exists() for path in records):
        return False
    for path in records:
        packed = path.read_bytes()
        rows = np.frombuffer(packed, RECORD, count=len(packed) // RECORD.itemsize)
        cluster_env.replace(path, rows[rows["step"] < step].tobytes())
    for path in folder.glob("events-rank*.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        cluster_env.replace(path, b"".join(line for line in lines if _stays(line, step)))
    return True


def _stays(line: bytes, step: int) -> bool:
    """Whether a line's event is still valid for a run that continues from `step`."""
    try:
        fields = json.loads(line)
        return stays(fields["name"], fields, step)
    except (ValueError, KeyError, TypeError):
        return False  # the line a killed engine was writing


def stays(name: str, fields: Mapping[str, Any], step: int) -> bool:
    """Whether an event is still valid for a run that continues from `step`."""
    return name != "run_finished" and (name not in _OF_STEPS or int(fields["step"]) < step)


def replay(folder: Path, ranks: Sequence[int], first: int, end: int | None) -> Iterator[Any]:
    """Yield the rows of steps from `first` to before `end`, alternating between ranks.

    So steps complete as in the run, and few rows wait for other ranks.
    """
    sources = [_rows(folder / f"records-rank{rank}.bin", first, end) for rank in ranks]
    while sources:
        still = []
        for source in sources:
            rows = next(source, None)
            if rows is not None:
                yield rows
                still.append(source)
        sources = still


def _rows(path: Path, first: int, end: int | None) -> Iterator[NDArray[Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        while packed := file.read(_CHUNK_ROWS * RECORD.itemsize):
            rows = np.frombuffer(packed, RECORD, count=len(packed) // RECORD.itemsize)
            wanted = rows["step"] >= first
            if end is not None:
                wanted &= rows["step"] < end
            yield rows[wanted]


def phases_before(phases: Sequence[Phase], step: int) -> list[Phase]:
    """Return the phases that are still valid for a run that continues from `step`."""
    return [phase for phase in phases if phase[0] < step]


def spans(phases: Sequence[Phase]) -> list[tuple[int, int | None, tuple[int, ...] | None]]:
    """Return (first step, step after the last, ranks) of each phase; None: all ranks, no end."""
    starts: list[tuple[int, tuple[int, ...] | None]] = [(0, None), *phases]
    ends: list[int | None] = [first for first, _ in starts[1:]]
    return [(first, end, ranks) for (first, ranks), end in zip(starts, [*ends, None], strict=True)]
