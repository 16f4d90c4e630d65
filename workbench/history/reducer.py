"""Turns rows from all ranks into what a history keeps: totals, curves, latest and stored rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import PARTS, Derived, derive
from ..record import COLUMNS, CURVES, FLAG_LOSS_SEEN, FLAG_SKEWED_CLOCK
from .envelope import Envelope
from .health import LossWatch
from .joiner import Joiner
from .logged import LoggedColumn
from .recent import Recent
from .table import STORED, RowTable
from .totals import Blame, Totals, parts_of

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
        skewed: Whether the ranks' clocks differ.
        health: Where the loss of a synchronous run stopped being a number.
        invalid_rows: Rows of ranks that the run does not have; they are left out.
        logged: What `wb.log` added, by column.
    """

    def __init__(
        self, workers: int, limit_bytes: int, *, joined: bool = True, data_parallel: bool = True
    ) -> None:
        self.table = RowTable(limit_bytes)
        self.totals = Totals(workers)
        self.recent = Recent(workers)
        self.curves = {name: Envelope() for name in ("loss", "samples_per_s", *CURVES)}
        self.skewed = False
        self.last = (-1, float("nan"))
        self._newest_s = -np.inf  # when the row ended whose loss is in `last`
        self.health = LossWatch()
        self.invalid_rows = 0
        self.logged: dict[str, LoggedColumn] = {}
        self._workers, self._joined, self._data_parallel = workers, joined, data_parallel
        self._joiner = Joiner(workers)
        self._ranks = np.arange(workers)  # rank in the history of each worker there is now

    def add(self, rows: Rows) -> None:
        """Take in RECORD rows of shape (rows,)."""
        known = rows["rank"] < self._workers
        if not known.all():
            self.invalid_rows += int((~known).sum())
            rows = rows[known]
        self.skewed |= bool((rows["flags"] & FLAG_SKEWED_CLOCK).any())
        if self._joined:
            complete, lost = self._joiner.add(rows)
            self._take_steps(complete)
            self._take_alone(lost, lost=True)
        else:
            self._take_alone(rows[np.argsort(rows["step"], kind="stable")], lost=False)

    @property
    def nbytes(self) -> int:
        """Memory that rows and curves take, in bytes; what waits to be joined is left out."""
        curves = [*self.curves.values(), *(column.envelope for column in self.logged.values())]
        return self.table.nbytes + self.recent.nbytes + sum(curve.nbytes for curve in curves)

    def settle(self) -> None:
        """Count the steps that wait for a row as done: who died had not sent it yet."""
        rows = self._joiner.finish()
        self._take_alone(rows, lost=True)
        if self._joined:
            self.totals.steps += len(np.unique(rows["step"]))

    @property
    def reached(self) -> int:
        """Latest step that any worker has reported; -1 before the first."""
        return max(self.last[0], self._joiner.reached)

    def narrow(self, ranks: Sequence[int]) -> None:
        """Go on with fewer workers: those that had these ranks, which their rows still name."""
        self.settle()
        self._ranks = np.asarray(ranks)
        self._joiner.narrow(len(ranks))

    def _blame(self, columns: Derived) -> Blame:
        """Return who is to blame, by rank in the history; workers count themselves anew."""
        known = (columns.blamed_rank >= 0) & (columns.blamed_rank < len(self._ranks))
        named = np.where(known, self._ranks[np.where(known, columns.blamed_rank, 0)], -1)
        return Blame(named.astype(np.int32), columns.blamed_s)

    def finish(self) -> None:
        """Take the rows of steps that some rank never reported."""
        self._take_alone(self._joiner.finish(), lost=True)

    def origin_s(self) -> NDArray[np.float64]:
        """Return (ranks,) the time that counts as 0: one for all unless clocks differ."""
        first = self.totals.first_s
        if self.skewed:
            return np.where(np.isfinite(first), first, 0.0)
        seen = first[np.isfinite(first)]
        return np.full(len(first), seen.min() if len(seen) else 0.0)

    def _take_steps(self, rows: Rows) -> None:
        """Take complete steps: RECORD rows of shape (steps, ranks)."""
        if not len(rows):
            return
        columns = derive(rows)
        parts_s, blame = parts_of(columns), self._blame(columns)
        step, start, end = rows["step"][:, 0], rows["start_s"], rows["end_s"]
        flat = rows.reshape(-1)
        samples = rows["samples"].sum(axis=1)
        if not self._data_parallel:
            samples = rows["samples"].max(axis=1)
        self.totals.steps += len(rows)
        self.totals.samples += int(samples.sum())
        self._count(flat, parts_s.reshape(-1, len(PARTS)), blame.flat())
        for at, rank in enumerate(self._ranks):
            self.recent.add(int(rank), rows[:, at], parts_s[:, at], blame[:, at])
        first, last = (start[:, 0], end[:, 0]) if self.skewed else (start.min(1), end.max(1))
        self.recent.tick(first, last, samples)
        spent = np.maximum(columns.step_s.max(axis=1), 1e-9)
        self.curves["samples_per_s"].add(step, first, samples / spent, spent)
        self.curves["loss"].add(step, first, columns.loss)
        seen = (rows["flags"] & FLAG_LOSS_SEEN) > 0
        self.health.look(step, columns.loss, np.asarray(seen.any(axis=1)))
        if int(step[-1]) >= self.last[0]:
            self.last = (int(step[-1]), float(columns.loss[-1]))
        self._store(flat, parts_s.reshape(-1, len(PARTS)), blame.rank.reshape(-1),
                    np.repeat(columns.loss, len(self._ranks)))  # fmt: skip

    def _take_alone(self, rows: Rows, *, lost: bool) -> None:
        """Take RECORD rows (rows,) that stand alone, or whose step's other rows are lost."""
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
            spent = np.maximum(end - start, 1e-9)
            self.curves["samples_per_s"].add(
                step, start, rows["samples"] * self._workers / spent, spent
            )
            self.curves["loss"].add(step, start, loss)
            newest = int(end.argmax())
            reached = max(int(step.max()), self.last[0])
            # Rows come in batches by rank: the last one to come need not be the last in time.
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
