"""Puts the rows of one step together: ranks report on their own, in batches, in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..record import RECORD

Rows = NDArray[Any]
PENDING_ROWS = 1 << 16


class Joiner:
    """Holds rows until every rank has sent its row of the step.

    Args:
        ranks: Number of workers.
        limit: Most rows that may wait (88 bytes each). Beyond it the oldest steps are given up:
            some rank's row was lost on the way.
    """

    def __init__(self, ranks: int, limit: int = PENDING_ROWS) -> None:
        self._ranks = self._expected = ranks
        self._limit = max(limit, 4 * ranks)
        self._waiting: Rows = np.empty(0, RECORD)

    def narrow(self, expected: int) -> None:
        """Expect rows of so many ranks from now on; give up those that wait."""
        self._expected = expected
        self._waiting = self._waiting[:0]

    def add(self, rows: Rows) -> tuple[Rows, Rows]:
        """Take rows in; return what can be used now.

        Args:
            rows: (rows,) RECORD rows.

        Returns:
            Complete steps as RECORD rows of shape (steps, ranks), in the order of steps; and the
            rows of steps that are given up, of shape (rows,).
        """
        rows, keys = self._sorted(np.concatenate([self._waiting, rows]))
        count = np.unique(keys // self._ranks, return_counts=True)[1]
        whole = np.repeat(count == self._expected, count)
        complete = rows[whole].reshape(-1, self._expected)
        waiting = rows[~whole]
        excess = len(waiting) - self._limit
        if excess > 0:
            # Never cut inside a step: its rows wait or are given up together.
            cut = int(np.searchsorted(waiting["step"], waiting["step"][excess]))
            lost, waiting = waiting[: max(cut, 1)], waiting[max(cut, 1) :]
        else:
            lost = waiting[:0]
        self._waiting = waiting
        return complete, lost

    def finish(self) -> Rows:
        """Give up waiting: return the rows of all incomplete steps."""
        rows, self._waiting = self._waiting, np.empty(0, RECORD)
        return rows

    @property
    def reached(self) -> int:
        """Latest step of which rows wait; -1 where none do."""
        return int(self._waiting["step"].max()) if len(self._waiting) else -1

    @property
    def waiting(self) -> int:
        """Rows that wait for other ranks."""
        return len(self._waiting)

    def _sorted(self, rows: Rows) -> tuple[Rows, NDArray[np.int64]]:
        """Sort by step and rank; of a row that was sent twice keep the later one."""
        keys = rows["step"].astype(np.int64) * self._ranks + rows["rank"]
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        last = np.append(keys[1:] != keys[:-1], True) if len(keys) else np.empty(0, bool)
        return rows[order[last]], keys[last]
