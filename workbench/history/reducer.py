"""Reduces rows from all ranks to a history's data: totals, curves, latest and stored rows.

Ranks report independently, in batches and in any order, so the rows of one step are first joined.
Memory is bounded: above the limit, every second step is dropped. The same applies to the columns of
`wb.log`, which are sparse values by step and rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.record import (
    COLUMNS,
    CURVES,
    FLAG_KERNEL_CLOCK,
    FLAG_LOSS_SEEN,
    FLAG_SKEWED_CLOCK,
    MOMENTS,
    PARTS,
    RECORD,
    Derived,
    derive,
)
from .recent import Recent
from .totals import Blame, Envelope, LossWatch, Throughput, Totals, parts_of

Rows = NDArray[Any]


class Reducer:
    """Everything that is computed from rows; no lock, no events.

    Args:
        workers: Number of ranks.
        limit_bytes: Bound of the stored rows.
        joined: Whether ranks take each step together.
        data_parallel: Whether the samples of all ranks add up.

    Attributes:
        last: Latest step and its loss; -1 and NaN before the first.
        skewed: Whether the ranks read several clocks.
        health: The step from which the loss is not a number.
        invalid_rows: Rows of ranks that the run does not have; they are left out.
        logged: The values of `wb.log`, by column.
    """

    def __init__(
        self, workers: int, limit_bytes: int, *, joined: bool = True, data_parallel: bool = True
    ) -> None:
        self.table = RowTable(limit_bytes)
        self.totals = Totals(workers)
        self.recent = Recent(workers, joined=joined)
        self.curves = {name: Envelope() for name in ("loss", *CURVES)}
        self.skewed = False
        self._ahead_s: dict[int, float] = {}  # of each clock that was not compared, by rank
        self._began_s = np.nan
        self.last = (-1, float("nan"))
        self._newest_s = -np.inf  # end of the row whose loss is in `last`
        self.health = LossWatch()
        self.invalid_rows = 0
        self.logged: dict[str, LoggedColumn] = {}
        self._workers, self._joined, self._data_parallel = workers, joined, data_parallel
        self.throughput: Envelope | Throughput = Envelope() if joined else Throughput(workers)
        self._joiner = Joiner(workers)
        self._ranks = np.arange(workers)  # rank in the history of each current worker

    def add(self, rows: Rows) -> None:
        """Add RECORD rows of shape (rows,)."""
        known = rows["rank"] < self._workers
        if not known.all():
            self.invalid_rows += int((~known).sum())
            rows = rows[known]
        rows = self._on_one_clock(rows)
        if self._joined:
            complete, lost = self._joiner.add(rows)
            for steps in complete:
                self._take_steps(steps)
            self._take_alone(lost, lost=True)
        else:
            self._take_alone(rows[np.argsort(rows["step"], kind="stable")], lost=False)

    def _on_one_clock(self, rows: Rows) -> Rows:
        """Return rows on one clock; on a clock that was not compared, times count from the first
        row.

        The kernel compares clocks when rows arrive. Rows that engines of other hosts have written
        to disk use the clocks of these hosts.
        """
        if not len(rows):
            return rows
        flags = rows["flags"] & (FLAG_SKEWED_CLOCK | FLAG_KERNEL_CLOCK)
        self.skewed |= bool((flags & FLAG_SKEWED_CLOCK).any())
        clock_of = np.where(flags == FLAG_SKEWED_CLOCK, rows["rank"].astype(int), -1)
        for one in np.unique(clock_of):
            own = clock_of == one
            if one not in self._ahead_s:
                first_s = float(rows["start_s"][own].min())
                self._began_s = first_s if np.isnan(self._began_s) else self._began_s
                self._ahead_s[int(one)] = first_s - self._began_s
            if self._ahead_s[one]:
                rows = rows.copy()
                for name in MOMENTS:
                    rows[name][own] -= self._ahead_s[one]
        return rows

    @property
    def nbytes(self) -> int:
        """Memory of rows and curves in bytes, without rows that wait to be joined."""
        curves = [
            *self.curves.values(),
            self.throughput,
            *(column.envelope for column in self.logged.values()),
        ]
        return self.table.nbytes + self.recent.nbytes + sum(curve.nbytes for curve in curves)

    def settle(self) -> None:
        """Count steps that wait for a row as done, because a dead worker did not send its row."""
        rows = self._joiner.finish()
        self._take_alone(rows, lost=True)
        if self._joined:
            self.totals.steps += len(np.unique(rows["step"]))

    @property
    def reached(self) -> int:
        """Latest step that any worker has reported; -1 before the first."""
        return max(self.last[0], self._joiner.reached)

    def narrow(self, ranks: Sequence[int]) -> None:
        """Continue with fewer workers: those with these ranks, which their rows still contain."""
        self.settle()
        self._ranks = np.asarray(ranks)
        self._joiner.narrow(ranks)

    def grow(self, workers: int) -> None:
        """Add ranks; their rows are expected from the next `regroup` on."""
        self.totals.grow(workers)
        self.recent.grow(workers)
        if isinstance(self.throughput, Throughput):
            self.throughput.grow(workers)
        self._joiner.grow(workers)
        self._workers = workers

    def hold(self) -> None:
        """Treat no step as complete until its workers are known (`regroup`)."""
        self._joiner.held = True

    def release(self) -> None:
        """Treat steps as complete again, with the previous workers."""
        self._joiner.held = False
        self.add(np.empty(0, RECORD))  # what waited may be complete

    def regroup(self, step: int, ranks: Sequence[int]) -> None:
        """Continue with other workers from a step on, while rows of all steps still arrive."""
        self._joiner.regroup(step, ranks)
        self._ranks = np.asarray(ranks)
        self.add(np.empty(0, RECORD))  # what waited may be complete

    def settle_before(self, step: int) -> None:
        """Count steps before this step as done, because their missing rows will not arrive."""
        rows = self._joiner.give_up(step)
        self._take_alone(rows, lost=True)
        self.totals.steps += len(np.unique(rows["step"]))

    def _blame(self, columns: Derived, ranks: NDArray[Any] | None = None) -> Blame:
        """Return the blamed ranks as ranks in the history, because workers renumber themselves."""
        ranks = self._ranks if ranks is None else ranks
        known = (columns.blamed_rank >= 0) & (columns.blamed_rank < len(ranks))
        named = np.where(known, ranks[np.where(known, columns.blamed_rank, 0)], -1)
        return Blame(named.astype(np.int32), columns.blamed_s)

    def finish(self) -> None:
        """Use the rows of steps that some rank never reported."""
        self.release()
        self._take_alone(self._joiner.finish(), lost=True)

    def origin_s(self) -> NDArray[np.float64]:
        """Return (ranks,) the time that counts as 0, one for all."""
        first = self.totals.first_s
        seen = first[np.isfinite(first)]
        return np.full(len(first), seen.min() if len(seen) else 0.0)

    def _take_steps(self, rows: Rows) -> None:
        """Add complete steps: RECORD rows of shape (steps, ranks)."""
        if not len(rows):
            return
        columns, ranks = derive(rows), rows["rank"][0].astype(np.int64)
        parts_s, blame = parts_of(columns), self._blame(columns, ranks)
        step, start, end = rows["step"][:, 0], rows["start_s"], rows["end_s"]
        flat = rows.reshape(-1)
        samples = rows["samples"].sum(axis=1)
        if not self._data_parallel:
            samples = rows["samples"].max(axis=1)
        self.totals.steps += len(rows)
        self.totals.samples += int(samples.sum())
        self._count(flat, parts_s.reshape(-1, len(PARTS)), blame.flat())
        for at, rank in enumerate(ranks):
            self.recent.add(int(rank), rows[:, at], parts_s[:, at], blame[:, at])
        first, last = start.min(1), end.max(1)
        self.recent.tick(first, last, samples)
        spent = np.maximum(columns.step_s.max(axis=1), 1e-9)
        if isinstance(self.throughput, Envelope):
            self.throughput.add(step, first, samples / spent, spent)
        self.curves["loss"].add(step, first, columns.loss)
        seen = (rows["flags"] & FLAG_LOSS_SEEN) > 0
        self.health.look(step, columns.loss, np.asarray(seen.any(axis=1)))
        if int(step[-1]) >= self.last[0]:
            self.last = (int(step[-1]), float(columns.loss[-1]))
        self._store(flat, parts_s.reshape(-1, len(PARTS)), blame.rank.reshape(-1),
                    np.repeat(columns.loss, len(ranks)))  # fmt: skip

    def _take_alone(self, rows: Rows, *, lost: bool) -> None:
        """Add single RECORD rows (rows,): asynchronous rows, or rows whose step is incomplete."""
        if not len(rows):
            return
        columns = derive(rows[:, None], workers=len(self._ranks))
        parts_s, blame = parts_of(columns)[:, 0], self._blame(columns)[:, 0]
        step, start, end = rows["step"], rows["start_s"], rows["end_s"]
        loss = np.full(len(rows), np.nan) if lost else rows["local_loss"].copy()
        self._count(rows, parts_s, blame)
        for rank in np.unique(rows["rank"]):
            own = rows["rank"] == rank
            self.recent.add(int(rank), rows[own], parts_s[own], blame[own])
        if lost:
            self.totals.samples += int(rows["samples"].sum()) if self._data_parallel else 0
        else:
            self.totals.steps = int(self.totals.rows.max())
            self.totals.samples = int(self.totals.rank_samples.sum())
            self.recent.tick(start, end, rows["samples"])
            if isinstance(self.throughput, Throughput):
                self.throughput.add(rows)
            self.curves["loss"].add(step, start, loss)
            seen = (rows["flags"] & FLAG_LOSS_SEEN) > 0  # others say nothing about a loss
            self.health.look(step[seen], loss[seen], seen[seen])
            newest = int(end.argmax())
            reached = max(int(step.max()), self.last[0])
            # Rows come in batches by rank: the last row to arrive is not always the last in time.
            if end[newest] >= self._newest_s:
                self._newest_s, self.last = float(end[newest]), (reached, float(loss[newest]))
            self.last = (reached, self.last[1])
        self._store(rows, parts_s, blame.rank, loss)

    def _count(self, rows: Rows, parts_s: NDArray[np.float64], blame: Blame) -> None:
        self.totals.add_rows(rows, parts_s, blame)
        for name in CURVES:
            values = rows[name].astype(np.float64)
            if not np.isnan(values).all():
                self.curves[name].add(rows["step"], rows["start_s"], values)

    def _store(
        self, rows: Rows, parts_s: NDArray[np.float64], blamed: NDArray[Any], loss: NDArray[Any]
    ) -> None:
        stored = np.empty(len(rows), STORED)
        for name in COLUMNS:
            stored[name] = rows[name]
        for index, name in enumerate(PARTS[:-1]):
            stored[name] = parts_s[:, index]
        stored["step_s"] = rows["end_s"] - rows["start_s"]
        stored["blamed_rank"], stored["loss"] = blamed, loss
        self.table.append(stored)


JoinedRows = NDArray[Any]
PENDING_ROWS = 1 << 16


class Joiner:
    """Holds rows until every rank has sent its row of the step.

    The number of ranks in a step can change during the run (`regroup`). Just before a change
    (`held`) no step is complete, because a new worker's rows can arrive last. Rows of a rank that
    did not take part in the step are left out: a worker that died had sent them, and the step was
    repeated.

    Args:
        ranks: Number of workers.
        limit: Largest number of waiting rows (88 bytes each). Above it, the oldest steps are
            released incomplete, because some rank's row was lost.
    """

    def __init__(self, ranks: int, limit: int = PENDING_ROWS) -> None:
        self._ranks = ranks
        self.narrow(range(ranks))
        self._limit = max(limit, 4 * ranks)

    def narrow(self, ranks: Sequence[int]) -> None:
        """Expect rows of these ranks from now on; release waiting rows."""
        self._first, self._takes = np.zeros(1, np.int64), self._row_of(ranks)
        self._waiting: JoinedRows = np.empty(0, RECORD)
        self.held = False

    def grow(self, ranks: int) -> None:
        """Add ranks that have taken no step so far."""
        room = np.zeros((len(self._takes), ranks - self._ranks), np.bool_)
        self._takes, self._ranks = np.concatenate([self._takes, room], axis=1), ranks

    def regroup(self, step: int, ranks: Sequence[int]) -> None:
        """Expect rows of these ranks from this step on."""
        kept = self._first < step
        self._first = np.append(self._first[kept], step)
        self._takes = np.concatenate([self._takes[kept], self._row_of(ranks)])
        self.held = False

    def _row_of(self, ranks: Sequence[int]) -> NDArray[np.bool_]:
        """Return (1, ranks): whether each rank is one of these."""
        return np.isin(np.arange(self._ranks), np.asarray(ranks))[None]

    def _phase(self, steps: NDArray[Any]) -> NDArray[np.intp]:
        return np.searchsorted(self._first, steps, side="right") - 1

    def give_up(self, step: int) -> JoinedRows:
        """Stop waiting for rows of steps before this step; return the existing rows."""
        early = self._waiting["step"] < step
        rows, self._waiting = self._waiting[early], self._waiting[~early]
        return rows

    def add(self, rows: JoinedRows) -> tuple[list[JoinedRows], JoinedRows]:
        """Add rows; return the rows that can be used now.

        Args:
            rows: (rows,) RECORD rows.

        Returns:
            Complete steps in order, as RECORD rows of shape (steps, ranks), with one array per set
            of ranks. Also the rows of incomplete steps that are released, of shape (rows,).
        """
        rows, keys = self._sorted(np.concatenate([self._waiting, rows]))
        if not self.held:
            takes = self._takes[self._phase(rows["step"].astype(np.int64)), rows["rank"]]
            rows, keys = rows[takes], keys[takes]
        steps, count = np.unique(keys // self._ranks, return_counts=True)
        phase, expected = self._phase(steps), self._takes.sum(axis=1)
        is_whole = (count == expected[phase]) & (not self.held)
        whole = np.repeat(is_whole, count)
        phase = np.repeat(phase, count)
        complete = [
            rows[whole & (phase == one)].reshape(-1, expected[one])
            for one in np.unique(phase[whole])
        ]
        waiting = rows[~whole]
        excess = len(waiting) - self._limit
        if excess > 0:
            # Never cut inside a step: all its rows wait, or all are released.
            cut = int(np.searchsorted(waiting["step"], waiting["step"][excess]))
            lost, waiting = waiting[: max(cut, 1)], waiting[max(cut, 1) :]
        else:
            lost = waiting[:0]
        self._waiting = waiting
        return complete, lost

    def finish(self) -> JoinedRows:
        """Stop waiting: return the rows of all incomplete steps."""
        rows, self._waiting = self._waiting, np.empty(0, RECORD)
        return rows

    @property
    def reached(self) -> int:
        """Latest step with waiting rows; -1 if there is none."""
        return int(self._waiting["step"].max()) if len(self._waiting) else -1

    @property
    def waiting(self) -> int:
        """Rows that wait for other ranks."""
        return len(self._waiting)

    def _sorted(self, rows: JoinedRows) -> tuple[JoinedRows, NDArray[np.int64]]:
        """Sort by step and rank; if a row was sent twice, keep the later one."""
        keys = rows["step"].astype(np.int64) * self._ranks + rows["rank"]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        last = np.append(keys[1:] != keys[:-1], True) if len(keys) else np.empty(0, bool)
        return rows[order[last]], keys[last]


STORED = np.dtype(
    [
        *COLUMNS.items(),
        ("blamed_rank", "<i2"),
        *((part, "<f4") for part in PARTS[:-1]),
        ("step_s", "<f4"),
        ("loss", "<f8"),
    ]
)
"""One stored row (72 bytes): measured and derived values. `other_s` is the remainder of the other
parts and is not stored."""

CHUNK_ROWS = 1 << 14
_FEW_ROWS = 64


class RowTable:
    """Append-only rows in chunks; whole steps are kept or dropped, never single ranks.

    Attributes:
        stride: Steps that are multiples of it are kept; 1 until steps must be dropped.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_rows = max(limit_bytes // STORED.itemsize, 2 * CHUNK_ROWS)
        self._chunks: list[NDArray[Any]] = []
        self._rows = 0
        self.stride = 1
        self._sorted: tuple[tuple[int, int], NDArray[np.intp]] = ((0, 1), np.empty(0, np.intp))

    def __len__(self) -> int:
        return self._rows

    def append(self, rows: NDArray[Any]) -> None:
        """Store STORED rows of shape (rows,), or the share of them that `stride` leaves."""
        if self.stride > 1:
            rows = rows[rows["step"] % self.stride == 0]
        self._store(rows)
        while self._rows > self._limit_rows:
            self._halve()

    @property
    def nbytes(self) -> int:
        """Memory of the rows, and of their order if it was requested, in bytes."""
        return sum(chunk.nbytes for chunk in self._chunks) + self._sorted[1].nbytes

    def column(self, name: str) -> NDArray[Any]:
        """Return one column as a fresh array of shape (rows,)."""
        parts = [chunk[name] for chunk in self._filled()]
        return np.concatenate(parts) if parts else np.empty(0, STORED[name])

    def order(self) -> NDArray[np.intp]:
        """Return the order of the rows by step and rank, which sorts a column."""
        key = (self._rows, self.stride)
        if self._sorted[0] != key:
            self._sorted = (key, np.lexsort((self.column("rank"), self.column("step"))))
        return self._sorted[1]

    def since(self, last: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows of steps beyond `last[rank]`, as a fresh array ordered by step and rank.

        The search goes back only to the first chunk without such rows, so frequent calls are cheap.
        """
        found = [np.empty(0, STORED)]
        for chunk in reversed(self._filled()):
            fresh = chunk[chunk["step"].astype(np.int64) > last[chunk["rank"]]]
            if not len(fresh):
                break
            found.append(fresh)
        rows = np.concatenate(found)
        return rows[np.lexsort((rows["rank"], rows["step"]))]

    def _store(self, rows: NDArray[Any]) -> None:
        at = 0
        while at < len(rows):
            used = self._rows % CHUNK_ROWS
            take = min(CHUNK_ROWS - used, len(rows) - at)
            self._make_room(used, take)
            self._chunks[-1][used : used + take] = rows[at : at + take]
            self._rows += take
            at += take

    def _make_room(self, used: int, more: int) -> None:
        """Make room in the last chunk for `more` rows after `used` rows; it grows as it fills."""
        if used == 0:
            self._chunks.append(np.empty(0, STORED))
        last = self._chunks[-1]
        if used + more > len(last):
            fresh = np.empty(min(CHUNK_ROWS, max(2 * len(last), used + more, _FEW_ROWS)), STORED)
            fresh[:used] = last[:used]
            self._chunks[-1] = fresh

    def _halve(self) -> None:
        self.stride *= 2
        old, self._chunks = self._filled(), []
        self._rows = 0
        for i in range(len(old)):
            chunk, old[i] = old[i], np.empty(0, STORED)  # freed while the new ones fill
            self._store(chunk[chunk["step"] % self.stride == 0])

    def _filled(self) -> list[NDArray[Any]]:
        if not self._chunks:
            return []
        used = self._rows - (len(self._chunks) - 1) * CHUNK_ROWS
        return [*self._chunks[:-1], self._chunks[-1][:used]]


def unreduced(
    table: RowTable, phases: Sequence[tuple[int, tuple[int, ...]]], *, skewed: bool
) -> NDArray[Any]:
    """Return RECORD rows that reduce to a table's content, ordered by step and rank.

    Waits and their ranks are written as values measured by the strategy, because the time stamps
    that they were derived from are not stored.

    Args:
        phases: The ranks of the run from each step at which they changed; blamed ranks are numbered
            among them.
    """
    order = table.order()
    rows = np.zeros(len(order), RECORD)
    for name in (*COLUMNS, "data_wait_s", "compute_s"):
        rows[name] = table.column(name)[order]
    wait, transfer = (table.column(name)[order] for name in ("sync_wait_s", "transfer_s"))
    rows["end_s"] = rows["start_s"] + table.column("step_s")[order]
    rows["ready_s"], rows["wait_s"] = np.nan, wait
    rows["exposed_s"] = transfer + np.nan_to_num(wait)
    known = ~np.isnan(rows["local_loss"])
    # One NaN among losses is why the loss of the step is NaN; a stage's NaN leaves it as it is.
    lost = np.isnan(table.column("loss")[order]) & np.isin(rows["step"], rows["step"][known])
    rows["flags"] = np.where(known | lost, FLAG_LOSS_SEEN, 0)
    rows["flags"] |= FLAG_SKEWED_CLOCK | FLAG_KERNEL_CLOCK if skewed else 0  # one clock by now
    blamed = table.column("blamed_rank")[order].astype(np.int64)
    for first, ranks in phases:
        among = np.full(max(int(blamed.max(initial=0)), *ranks) + 2, -1)  # the last is for nobody
        among[list(ranks)] = np.arange(len(ranks))
        later = rows["step"] >= first
        blamed[later] = among[table.column("blamed_rank")[order][later]]
    rows["waited_for"] = blamed
    return rows


LIMIT = 1 << 19


class LoggedColumn:
    """The values logged under one name; above `LIMIT` every second step is dropped."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.envelope = Envelope()
        self._limit = limit
        self._stride = 1
        self._values: dict[tuple[int, int], float] = {}

    def add(self, step: int, rank: int, t_s: float, value: float) -> None:
        """Store one value; a value that is not a finite number is left out."""
        if not math.isfinite(value):
            return
        self.envelope.add(np.array([step]), np.array([t_s]), np.array([value]))
        if step % self._stride == 0:
            self._values[step, rank] = value
        if len(self._values) > self._limit:
            self._stride *= 2
            self._values = {k: v for k, v in self._values.items() if k[0] % self._stride == 0}

    def at(self, rows: Iterable[tuple[int, int]]) -> list[float]:
        """Return the values of some `(step, rank)`; NaN if none was logged."""
        return [self._values.get(row, math.nan) for row in rows]

    def since(self, last: NDArray[np.int64]) -> list[tuple[int, int, float]]:
        """Return the values logged after step `last[rank]`: step, rank, value, oldest first."""
        found = []
        for (step, rank), value in reversed(self._values.items()):
            if rank >= len(last) or step <= last[rank]:
                break
            found.append((step, rank, value))
        return found[::-1]

    def column(self, step: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the values at the rows `(step, rank)`, each (rows,); NaN if none was logged."""
        ranks = max((r for _, r in self._values), default=0) + 1
        keys = np.array([s * ranks + r for s, r in self._values], np.int64)
        values = np.array(list(self._values.values()), np.float64)
        order = np.argsort(keys)
        keys, values = keys[order], values[order]
        found = np.full(len(step), np.nan)
        if len(keys):
            wanted = step * ranks + rank
            at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
            hit = (keys[at] == wanted) & (rank < ranks)
            found[hit] = values[at[hit]]
        return found
