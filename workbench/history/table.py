"""The rows of a run in bounded memory: beyond the limit every second step is dropped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import PARTS
from ..record import COLUMNS, FLAG_LOSS_SEEN, FLAG_SKEWED_CLOCK, RECORD

STORED = np.dtype(
    [
        *COLUMNS.items(),
        ("blamed_rank", "<i2"),
        *((part, "<f4") for part in PARTS[:-1]),
        ("step_s", "<f4"),
        ("loss", "<f8"),
    ]
)
"""One stored row (72 bytes): what was measured, and what is derived. `other_s` is the residual of
the others and is not stored."""

CHUNK_ROWS = 1 << 14
_FEW_ROWS = 64


class RowTable:
    """Append-only rows in chunks; whole steps are kept or dropped, never single ranks.

    Attributes:
        stride: Steps that are multiples of it are kept; 1 while nothing had to be dropped.
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
        """Memory that the rows take, and their order where it was asked for, in bytes."""
        return sum(chunk.nbytes for chunk in self._chunks) + self._sorted[1].nbytes

    def column(self, name: str) -> NDArray[Any]:
        """Return one column as a fresh array of shape (rows,)."""
        parts = [chunk[name] for chunk in self._filled()]
        return np.concatenate(parts) if parts else np.empty(0, STORED[name])

    def order(self) -> NDArray[np.intp]:
        """Return where the rows are, by step and rank: what sorts a column."""
        key = (self._rows, self.stride)
        if self._sorted[0] != key:
            self._sorted = (key, np.lexsort((self.column("rank"), self.column("step"))))
        return self._sorted[1]

    def since(self, last: NDArray[np.int64]) -> NDArray[Any]:
        """Return the rows of steps beyond `last[rank]`, as a fresh array ordered by step and rank.

        Looks no further back than the first chunk that holds none, so asking often costs little.
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
        """Have the last chunk hold `more` rows behind `used` ones; it grows as it fills."""
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
    """Return RECORD rows that reduce to what a table holds, ordered by step and rank.

    Waits and whom they were for are written down as measured by the strategy: the stamps that they
    were derived from are gone.

    Args:
        phases: From which step on the run had which ranks, where that changed: those whom somebody
            waited for are counted among them.
    """
    order = table.order()
    rows = np.zeros(len(order), RECORD)
    for name in (*COLUMNS, "data_wait_s", "compute_s"):
        rows[name] = table.column(name)[order]
    wait, transfer = (table.column(name)[order] for name in ("sync_wait_s", "transfer_s"))
    rows["end_s"] = rows["start_s"] + table.column("step_s")[order]
    rows["ready_s"], rows["wait_s"] = np.nan, wait
    rows["exposed_s"] = transfer + np.nan_to_num(wait)
    rows["flags"] = np.where(np.isnan(rows["local_loss"]), 0, FLAG_LOSS_SEEN)
    rows["flags"] |= FLAG_SKEWED_CLOCK if skewed else 0
    blamed = table.column("blamed_rank")[order].astype(np.int64)
    for first, ranks in phases:
        among = np.full(max(int(blamed.max(initial=0)), *ranks) + 2, -1)  # the last is for nobody
        among[list(ranks)] = np.arange(len(ranks))
        later = rows["step"] >= first
        blamed[later] = among[table.column("blamed_rank")[order][later]]
    rows["waited_for"] = blamed
    return rows
