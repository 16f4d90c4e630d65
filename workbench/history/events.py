"""What a run's events say: how it was started, evaluations, notes, how it ended.

When a run goes on from an earlier step, what came after that step is forgotten, then done again.
The rows on disk are whole and not decimated, so the history is built anew from them, and every
total stays exact: each step counts once, the way it was done last. Events of those steps
(evaluations, logged values) go with them. Where rows are out of reach (engines of another host keep
them there), the history keeps what it has, and rows of repeated steps are left out instead.
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
    """Something that happened once, for pictures with an axis of time.

    Attributes:
        t_s: When, on the clock of events.
        kind: `eval`, `note`, `warning`, `checkpoint`, `death`, `healed`, `joined`, `shed`,
            `inject`, `paused` or `resumed`.
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
        hosts: Name of its host by rank, of those on other machines.
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
        changes: Fields of `healed`, `joined`, `left`, `shed` and `replaced`, with the name as
            `event`.
        away: Ranks that died or left, and in whose places nobody has come.
        rewinds: The step from which the run went on, each time that it was set back.
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
            case Healed():  # workers that join or leave are told of so, too
                self.changes.append({"event": event.name, **event.to_wire()})
                gone = frozenset(map(int, event.ranks))
                if event.name in (Healed.name, Left.name):
                    self.away |= gone
                elif event.name != Shed.name:
                    self.away -= gone
                self._moment(t_s, event.name, _change_words(event))
            case Gained():
                for one in self.changes:
                    if one["event"] in (Shed.name, Replaced.name) and one["step"] == event.step:
                        one["after_s"] = event.after_s
            case RunFinished():
                self.finished[int(event.rank)] = event.to_wire()
            case ServerHolds():
                self.servers[int(event.server)] = event.to_wire()

    def rewind(self, step: int) -> None:
        """Forget evaluations of `step` and later, and how the run ended before it went on."""
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
            f"disk after {seconds:.2g} s; training paused for {stall_ms:.2g} ms "
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


def _change_words(event: Healed) -> str:
    """Say in short who went or came: `healed without rank 1 at step 60: 2 workers, after 9 ms`."""
    if isinstance(event, Shed):
        return f"shares {' + '.join(map(str, event.shares))} from step {event.step} on"
    ranks = f"rank{'s' if len(event.ranks) > 1 else ''} {', '.join(map(str, event.ranks))}"
    who = ranks if event.ranks else "a server"
    did = {
        Healed.name: "healed without", Joined.name: "joined by", Left.name: "left by",
        Replaced.name: "replaced",
    }  # fmt: skip
    return (
        f"{did[event.name]} {who} at step {event.step}: "
        f"{event.workers} workers, after {1e3 * event.seconds:.0f} ms"
    )


_CHUNK_ROWS = 4096
_OF_STEPS = frozenset({"eval", "log", "epoch"})
Phase = tuple[int, tuple[int, ...]]
"""From this step on, these ranks: a run that went on with fewer workers."""


def cut(folder: Path, ranks: Iterable[int], step: int) -> bool:
    """Drop the rows and events of `step` and later from a run's folder.

    Args:
        ranks: Those whose engines wrote files.

    Returns:
        Whether the rows of every rank are here; nothing is changed where they are not.

    Raises:
        OSError: Not all files could be written anew; each is as it was or as it should be.
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
    """Whether a line's event is still true of a run that goes on from `step`."""
    try:
        fields = json.loads(line)
        return stays(fields["name"], fields, step)
    except (ValueError, KeyError, TypeError):
        return False  # the line a killed engine was writing


def stays(name: str, fields: Mapping[str, Any], step: int) -> bool:
    """Whether an event is still true of a run that goes on from `step`."""
    return name != "run_finished" and (name not in _OF_STEPS or int(fields["step"]) < step)


def replay(folder: Path, ranks: Sequence[int], first: int, end: int | None) -> Iterator[Any]:
    """Yield the rows of steps from `first` to before `end`, of all ranks in turns.

    Steps so complete as they did in the run, and little waits for other ranks meanwhile.
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
    """Return the phases that are still true of a run that goes on from `step`."""
    return [phase for phase in phases if phase[0] < step]


def spans(phases: Sequence[Phase]) -> list[tuple[int, int | None, tuple[int, ...] | None]]:
    """Return (first step, step after the last, ranks) of each phase; None: all ranks, no end."""
    starts: list[tuple[int, tuple[int, ...] | None]] = [(0, None), *phases]
    ends: list[int | None] = [first for first, _ in starts[1:]]
    return [(first, end, ranks) for (first, ranks), end in zip(starts, [*ends, None], strict=True)]
