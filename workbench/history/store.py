"""A run's history: rows from all ranks in, columns, exact totals and snapshots out.

New data waits in a queue until a reader needs it:

    append, event ── queue ── fold ──> Reducer, Story ──> columns, totals, snapshot
    rest: the rows are on disk only; wake or a reader loads them again
    rewind: a run continues from an earlier step, later steps are dropped
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import RunError
from ..shared.events import OVER, Event, Logged, Noted, Topic, UnknownEventError, read
from ..shared.record import RARE, RECORD
from . import disk, folders, take_snapshot
from . import events as history_events
from .analysis.blame import Waits
from .events import Story
from .reducer import LoggedColumn, Reducer, Rows, RowTable, unreduced
from .take_snapshot import COLUMNS

if TYPE_CHECKING:
    import pandas as pd

    from .snapshot import Snapshot
    from .totals import Totals

_FOLD_ROWS = 1 << 13
_FIRST_HEARD, _MOST_HEARD = 100, 20_000
"""If there are more events than both numbers together, the first and the newest are kept."""


class RunHistory(Mapping[str, NDArray[Any]]):
    """One row per worker and step, in bounded memory.

    To append rows only puts bytes into a queue. The rows of all ranks are joined and reduced in
    batches, when a reader needs them or after `_FOLD_ROWS` rows. All methods can be called from any
    thread. After `rest`, a history keeps its rows only on disk, and reads them again when they are
    needed.

    Args:
        ranks: The engine id of each rank.
        memory_limit_bytes: Largest size of the stored rows. Above this limit the rows of every
            second step are removed, then those of every second remaining step, and so on. `stride`
            shows the distance of the remaining steps, and `totals` stays exact.
        clock: The clock that gives a time to events without a time.
        joined: Whether all ranks take each step together. Rows of asynchronous strategies are not
            joined.
        data_parallel: Whether each worker takes a share of the batch; otherwise all workers use the
            same samples.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        memory_limit_bytes: int = 96 << 20,
        clock: Callable[[], float] = time.perf_counter,
        joined: bool = True,
        data_parallel: bool = True,
    ) -> None:
        self.engines = tuple(ranks)
        self.joined, self.data_parallel = joined, data_parallel
        self.story = Story()
        self._clock = clock
        self._lock = threading.RLock()
        self._queue: list[bytes] = []
        self._queued_rows = 0
        self._shape = (len(self.engines), memory_limit_bytes)
        self._live: Reducer | None = self._fresh()
        self._rests_in = Path()
        self._phases: list[history_events.Phase] = []  # where the run continued with fewer workers
        self._slow: tuple[int, tuple[int | None, float, int]] | None = None  # as of so many rows
        self._counted = 0  # rows of earlier steps are left out because they are already stored
        self._heard: list[tuple[str, dict[str, Any]]] = []  # data for a copy of the run

    # -- what it tells -----------------------------------------------------------------------------

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns."""
        with self._lock:
            self._fold()
            hidden = {name for name in RARE if self._reduced.curves[name].empty}
            return (*(c for c in take_snapshot.COLUMNS if c not in hidden), *self._logged)

    def __getitem__(self, name: str) -> NDArray[Any]:
        """Return one column, ordered by step and rank, as a fresh array of shape (rows,)."""
        with self._lock:
            if name not in self.columns:
                raise KeyError(f"{name!r}; columns: {', '.join(self.columns)}")
            return take_snapshot.column(name, self._reduced, self.engines)[self._table.order()]

    def together(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return several columns at the same moment, so their lengths are equal during training.

        If the history does not have a column, all values of this column are NaN.
        """
        with self._lock:
            rows = len(self)
            return {n: self[n] if n in self.columns else np.full(rows, np.nan) for n in names}

    def __len__(self) -> int:
        """Number of stored rows."""
        with self._lock:
            self._fold()
            return len(self._table)

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    def __eq__(self, other: object) -> bool:
        return self is other

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        kept = f", one of every {self.stride} steps kept" if self.stride > 1 else ""
        return f"RunHistory({len(self)} rows, {len(self.engines)} workers{kept})"

    @property
    def stride(self) -> int:
        """The distance between two stored steps; it is 1 if all steps are stored."""
        return self._table.stride

    @property
    def invalid_rows(self) -> int:
        """Number of ignored rows with a rank that the run does not have."""
        with self._lock:
            self._fold()
            return self._reduced.invalid_rows

    @property
    def totals(self) -> Totals:
        """The exact sums over all rows that were received, as a copy; independent of `stride`."""
        with self._lock:
            self._fold()
            return copy.deepcopy(self._reduced.totals)

    @property
    def unmeasured(self) -> dict[str, str]:
        """The columns without values, and the reason for each."""
        with self._lock:
            self._fold()
            names = self.columns if len(self._table) else ()
            empty = take_snapshot.empty(names, self._reduced, self.engines)
            unknown = "not measured by this strategy"
            return {name: self.story.unmeasured.get(name) or unknown for name in empty}

    @property
    def changes(self) -> list[dict[str, Any]]:
        """One mapping for each time that workers left or joined."""
        with self._lock:
            return [dict(one) for one in self.story.changes]

    @property
    def evals(self) -> list[dict[str, Any]]:
        """One mapping per evaluation, with the step, the epoch and the metrics."""
        with self._lock:
            return [dict(one) for one in self.story.evals]

    def since(self, last: NDArray[np.int64]) -> Rows:
        """Return the stored rows of steps beyond `last[rank]`, ordered by step and rank.

        Returns:
            Fresh `table.STORED` rows; `start_s` counts from the run's beginning, as in the columns.
        """
        with self._lock:
            self._fold()
            rows = self._table.since(last)
            rows["start_s"] -= self._reduced.origin_s()[rows["rank"]]
            return rows

    def logged_since(
        self, last: Mapping[str, NDArray[np.int64]]
    ) -> dict[str, list[tuple[int, int, float]]]:
        """Return values of `wb.log` after step `last[name][rank]`: step, rank, value by name."""
        none = np.full(len(self.engines), -1)
        with self._lock:
            return {name: one.since(last.get(name, none)) for name, one in self._logged.items()}

    def logged_at(self, rows: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
        """Return the values of `wb.log` at some `(step, rank)`; NaN where none was logged."""
        with self._lock:
            return {name: column.at(rows) for name, column in self._logged.items()}

    @property
    def origin_s(self) -> float:
        """Start of the first step on the clock of events; NaN before it."""
        with self._lock:
            self._fold()
            first = self._reduced.totals.first_s
            return float(first.min()) if np.isfinite(first).any() else float("nan")

    def to_pandas(self) -> pd.DataFrame:
        """Return all columns as a pandas `DataFrame`, with one row per worker and step."""
        import pandas as pd

        with self._lock:
            return pd.DataFrame({name: self[name] for name in self.columns})

    def write(self, folder: Path) -> None:
        """Write the data in memory to a folder, in the format of the engines.

        Values that could not be measured stay NaN. If the run is so long that memory has only every
        second step or fewer, only these steps are written, and a note says so.

        Raises:
            OSError: The folder cannot be written to.
        """
        with self._lock:
            self._fold()
            rows = unreduced(self._table, self._phases, skewed=self._reduced.skewed)
            events = [event for one in self._heard if (event := _of_copy(*one)) is not None]
            events += _logged_events(self._logged, rows)
            if note := self._reduced.health.note:  # the rows do not say that a NaN was returned
                lost = {"topic": Topic.LOSS_LOST, "value": self._reduced.health.step}
                events.append(("note", {"text": note, **lost}))
            if self.stride > 1:
                text = (
                    "During the run, Workbench could not write the steps to disk. Memory had room "
                    f"for only one of every {self.stride} steps, so the other steps are missing in "
                    "this saved run."
                )
                events.append(("note", {"text": text}))
        for rank in range(len(self.engines)):
            writer = disk.RunWriter(folder, rank)
            try:
                writer.append_records(rows[rows["rank"] == rank].tobytes())
                for name, fields in events if rank == 0 else ():
                    writer.append_event(name, fields)
            finally:
                writer.close()

    def snapshot(
        self,
        *,
        name: str = "",
        strategy: str = "",
        framework: str = "torch",
        state: str = "running",
        dropped: int = 0,
        plot_cpu: float = float("nan"),
    ) -> Snapshot:
        """Return a copy of the data for a view; takes about 0.3 ms for 4 workers.

        Args:
            name, strategy, framework, state: Of the run; state is one of `events.State`.
            dropped: Records lost on the way.
            plot_cpu: Share of one core that drawing took.
        """
        with self._lock:
            self._fold()
            label = take_snapshot.Label(name, strategy, framework, state, dropped, plot_cpu)
            whole = self._straggler() if state in OVER else None
            return take_snapshot.take(self._parts(), label, whole)

    def _straggler(self) -> tuple[int | None, float, int]:
        """Return the worker that delayed the others over the whole run, as in `Blame.worst`."""
        rows = len(self._table)
        if self._slow is None or self._slow[0] != rows:
            waits = Waits.of(self)
            rank = waits.culprit(len(self.engines))
            caused = waits.waited_s[waits.blamed == rank] if rank is not None else np.zeros(1)
            steps = len(np.unique(waits.step))
            self._slow = rows, (rank, float(np.nanmedian(caused)), steps)
        return self._slow[1]

    def _ipython_key_completions_(self) -> list[str]:
        return list(self.columns)

    def _parts(self) -> take_snapshot.Sources:
        reduced = self._reduced
        logged = {name: column.envelope for name, column in self._logged.items()}
        return take_snapshot.Sources(
            self.engines, self.joined, self.data_parallel, reduced.totals, reduced.recent,
            reduced.curves, reduced.throughput, logged, self.story, reduced.origin_s(),
            *reduced.last,
        )  # fmt: skip

    # -- what comes in -----------------------------------------------------------------------------

    def append(self, rows: Rows) -> None:
        """Add RECORD rows of shape (rows,), of any ranks and steps."""
        with self._lock:
            self._queue.append(rows.tobytes())
            self._queued_rows += len(rows)
            if self._queued_rows >= _FOLD_ROWS:
                self._fold()

    def event(self, event: Event) -> None:
        """Add an event; an event without a time gets the current time."""
        self.hear(event.name, event.to_wire())

    def hear(self, name: str, fields: Mapping[str, Any]) -> None:
        """Add an event from a message or from disk, of any version of Workbench."""
        try:
            event = read(name, fields)
        except UnknownEventError:  # a newer version's
            return
        t_s = float(fields.get("t_s") or self._clock())
        with self._lock:
            if isinstance(event, Logged):
                if self._live is not None:  # otherwise it is on disk and will be read there
                    self._log(event, t_s)
                return
            self.story.fold(event, t_s)
            self._keep(name, {**fields, "t_s": t_s})
            self._tell_totals()

    def read(self, folder: Path, phases: Sequence[history_events.Phase] = ()) -> None:
        """Read all rows and events of a run's folder.

        Args:
            phases: The workers of the run from each step at which they changed.
        """
        with self._lock:
            self._phases = list(phases)
            self._rebuild(folder)
            for name, fields in disk.read_events(folder):
                if name != "log":
                    self.hear(name, fields)

    @property
    def phases(self) -> list[history_events.Phase]:
        """The steps at which the workers changed, each with the ranks that train from then on."""
        return list(self._phases)

    def finish(self) -> None:
        """Stop waiting for missing rows; rows of incomplete steps are then used as single rows."""
        with self._lock:
            if self._live is not None:
                self._fold()
                self._reduced.finish()
                self._tell_health()

    def rest(self, folder: Path) -> bool:
        """Free the rows of an ended run if its folder has all of them.

        They are read again when they are needed. The folder is marked, so that no other notebook
        deletes it while this process lives.

        Returns:
            Whether the history rests now; rows that are not on disk stay in memory.
        """
        with self._lock:
            if self._live is None:
                return True
            if self._counted or not self.on_disk(folder):
                return False
            try:
                folders.mark(folder)
            except OSError:  # a full disk: another notebook can delete a folder without a mark
                return False
            self._live, self._rests_in = None, folder
            self._heard.clear()  # the disk has them
            return True

    def on_disk(self, folder: Path) -> bool:
        """Whether the run's folder has all received rows, as memory has them."""
        with self._lock:
            if self._live is None:
                return True
            self._fold()
            rows = int(self._live.totals.rows.sum()) + self._live.invalid_rows
            return disk.holds(folder, len(self.engines), rows)

    def wake(self) -> None:
        """Load the rows into memory again."""
        with self._lock:
            self._fold()

    @property
    def rests(self) -> bool:
        """Whether the rows are on disk only."""
        return self._live is None

    @property
    def nbytes(self) -> int:
        """Memory that its rows and curves take, in bytes."""
        with self._lock:
            queued = self._queued_rows * RECORD.itemsize
            return queued + (0 if self._live is None else self._live.nbytes)

    def rewind(self, step: int, folder: Path, ranks: Sequence[int] | None = None) -> int:
        """Let the run continue from `step`; its rows and events from this step on will arrive
        again.

        Args:
            folder: The run's folder, with all rows of the engines.
            ranks: Ranks of the workers that continue; None: all.

        Returns:
            The number of steps that will be repeated.
        """
        with self._lock:
            self._fold()
            lost_steps = max(0, self._reduced.reached + 1 - step)
            if self._cut(folder, step):
                self._phases = history_events.phases_before(self._phases, step)
                self._rebuild(folder)
                self._reduced.settle()
                self.story.rewind(step)
                self._heard = [one for one in self._heard if history_events.stays(*one, step)]
            else:
                self._counted = self._reduced.last[0] + 1
                step = max(step, self._counted)
            if ranks is not None:
                self._narrow(step, ranks)
            return lost_steps

    def hold(self) -> None:
        """Hold new rows until the workers that take part are known (`regroup`)."""
        with self._lock:
            if self.joined and self._live is not None:
                self._fold()
                self._live.hold()

    def release(self) -> None:
        """Stop holding rows, because no other worker takes part."""
        with self._lock:
            if self._live is not None:
                self._live.release()

    def grow(self, engines: Sequence[int]) -> None:
        """Add ranks for these engines; they take part after `regroup`."""
        with self._lock:
            self._fold()
            before = len(self.engines)
            self._phases = self._phases or [(0, tuple(range(before)))]
            self.engines = (*self.engines, *engines)
            self._shape = (len(self.engines), self._shape[1])
            self._reduced.grow(len(self.engines))

    def regroup(self, step: int, ranks: Sequence[int]) -> None:
        """Expect rows of only these ranks from `step` on; earlier rows can still arrive."""
        with self._lock:
            self._phases = [*history_events.phases_before(self._phases, step), (step, tuple(ranks))]
            self._fold()
            self._reduced.regroup(step, ranks)

    def settle_before(self, step: int) -> None:
        """Use steps before this step without their missing rows, which will not arrive."""
        with self._lock:
            self._fold()
            self._reduced.settle_before(step)

    # --- inside, under the lock ---------------------------------------------------------------

    @property
    def _reduced(self) -> Reducer:
        with self._lock:
            if self._live is None:
                self._live = self._awake()
            return self._live

    @property
    def _table(self) -> RowTable:
        return self._reduced.table

    @property
    def _logged(self) -> dict[str, LoggedColumn]:
        return self._reduced.logged

    def _fresh(self) -> Reducer:
        return Reducer(*self._shape, joined=self.joined, data_parallel=self.data_parallel)

    def _awake(self) -> Reducer:
        if not self._rests_in.is_dir():
            raise RunError(
                "The recorded steps of this run were on disk and have been deleted.",
                seen=str(self._rests_in),
                next_step="Workbench deletes old runs: to keep a later run, use run.save(path)",
                code="WB-RUN-045",
            )
        try:
            self._rebuild(self._rests_in)
            self._reduced.finish()
        except BaseException:
            self._live = None  # not half of it
            raise
        return self._reduced

    def _cut(self, folder: Path, step: int) -> bool:
        """Drop rows of `step` and later from the disk; False where not all of them are there."""
        if not self.on_disk(folder):
            return False
        writers = {self.engines.index(engine) for engine in self.engines}
        try:
            return history_events.cut(folder, writers, step)
        except OSError as error:
            self.event(disk.unwritten(folder, error))
            return False

    def _keep(self, name: str, fields: dict[str, Any]) -> None:
        """Keep an event while rows are in memory; of `epoch` events only the newest."""
        if self._live is None:
            return
        if name == "epoch":
            self._heard = [one for one in self._heard if one[0] != "epoch"]
        self._heard.append((name, fields))
        del self._heard[_FIRST_HEARD:-_MOST_HEARD]

    def _tell_totals(self) -> None:
        if self._live is not None:
            self._live.totals.eval_s = self.story.eval_s
            self._live.totals.pauses = tuple(self.story.pauses)

    def _fold(self) -> None:
        reduced = self._reduced  # read from disk, where it rested, with all later data
        if not self._queue:
            return
        rows = np.frombuffer(b"".join(self._queue), RECORD)
        self._queue, self._queued_rows = [], 0
        if self._counted:
            rows = rows[rows["step"] >= self._counted]
        reduced.add(rows)
        self._tell_health()

    def _tell_health(self) -> None:
        """Note the step from which the loss is lost, whether rows arrive or are read again."""
        health, last_s = self._reduced.health, self._reduced.totals.last_s
        if health.note:
            said = Noted(text=health.note, topic=Topic.LOSS_LOST, value=health.step)
            self.story.fold(said, max(float(last_s.max(initial=0.0)), 0.0))

    def _narrow(self, step: int, ranks: Sequence[int]) -> None:
        self._phases.append((step, tuple(ranks)))
        self._reduced.narrow(ranks)

    def _rebuild(self, folder: Path) -> None:
        """Read all data of a run's folder again, except the events about the whole run."""
        self._live = reduced = self._fresh()
        self._tell_totals()
        self._queue, self._queued_rows = [], 0
        for first, end, ranks in history_events.spans(self._phases):
            if ranks is not None:
                reduced.narrow(ranks)
            for rows in history_events.replay(folder, range(len(self.engines)), first, end):
                reduced.add(rows)
        for name, fields in disk.read_events(folder):
            if name == Logged.name and isinstance(event := read(name, fields), Logged):
                self._log(event, float(fields.get("t_s") or 0.0))
        self._tell_health()

    def _log(self, event: Logged, t_s: float) -> None:
        step, rank = int(event.step), int(event.rank)
        for name, value in dict(event.values or {}).items():
            if name in COLUMNS:
                self.story.fold(
                    Noted(
                        text=f"wb.log cannot use the name `{name}`, because the history already "
                        "has a column with this name: use another name"
                    ),
                    t_s,
                )
                continue
            if name == "memory_bytes":
                self.story.memory_bytes[rank] = float(value)
            column = self._logged.setdefault(str(name), LoggedColumn())
            column.add(step, rank, t_s, float(value))


def _of_copy(name: str, fields: Mapping[str, Any]) -> tuple[str, dict[str, Any]] | None:
    """Return an event as a complete copy has it; None if the copy does not need it."""
    if Topic.of(fields.get("topic")) is Topic.NOT_ON_DISK:  # the copy is
        fields = {key: value for key, value in fields.items() if key not in ("topic", "value")}
    return (name, dict(fields)) if name != "post" else None


def _logged_events(
    logged: Mapping[str, LoggedColumn], rows: Rows
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the values of `wb.log` as events, with the start times of their steps."""
    ranks = int(rows["rank"].max(initial=0)) + 1
    for name, column in logged.items():
        for step, rank, value in column.since(np.full(ranks, -1)):
            at = min(int(np.searchsorted(rows["step"], step)), len(rows) - 1)
            t_s = float(rows["start_s"][at])
            yield "log", {"rank": rank, "step": step, "values": {name: value}, "t_s": t_s}


def read_run(path: str | os.PathLike[str]) -> tuple[dict[str, Any], RunHistory]:
    """Rebuild a run from its folder, also if the last row is incomplete.

    Returns:
        The run's `run.json`, and its history as it was.

    Raises:
        RunError: There is no run in this folder, or another version wrote it.
    """
    folder, meta = Path(path), disk.read_meta(path)
    row_bytes = meta.pop(disk.ROW_BYTES, None)
    if meta and row_bytes != RECORD.itemsize:
        raise RunError(
            "The run was saved by another version of Workbench, in another format.",
            seen=f"records with {row_bytes or 'an unknown number of'} bytes for each step",
            allowed=f"records with {RECORD.itemsize} bytes for each step",
            next_step="load the run with the version of Workbench that saved the run. If the run "
            "was a job, the job folder contains the wheel file of that version",
            code="WB-RUN-039",
        )
    ranks = meta.get("ranks") or range(1 + max(disk.ranks_on_disk(folder), default=0))
    history = RunHistory(
        [int(engine) for engine in ranks],
        joined=bool(meta.get("joined", True)),
        data_parallel=bool(meta.get("data_parallel", True)),
    )
    history.read(folder, [(int(step), tuple(map(int, on))) for step, on in meta.get("phases", ())])
    history.finish()
    return meta, history
