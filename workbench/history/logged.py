"""Columns that `wb.log` adds: sparse values by step and rank, in bounded memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from .envelope import Envelope

LIMIT = 1 << 19


class LoggedColumn:
    """The values logged under one name; beyond `LIMIT` every second step is dropped."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.envelope = Envelope()
        self._limit = limit
        self._stride = 1
        self._values: dict[tuple[int, int], float] = {}

    def add(self, step: int, rank: int, t_s: float, value: float) -> None:
        """Keep one value; what is no finite number is left out."""
        if not math.isfinite(value):
            return
        self.envelope.add(np.array([step]), np.array([t_s]), np.array([value]))
        if step % self._stride == 0:
            self._values[step, rank] = value
        if len(self._values) > self._limit:
            self._stride *= 2
            self._values = {k: v for k, v in self._values.items() if k[0] % self._stride == 0}

    def at(self, rows: Iterable[tuple[int, int]]) -> list[float]:
        """Return the values of some `(step, rank)`; NaN where none was logged."""
        return [self._values.get(row, math.nan) for row in rows]

    def since(self, last: NDArray[np.int64]) -> list[tuple[int, int, float]]:
        """Return what was logged beyond step `last[rank]`: step, rank, value, oldest first."""
        found = []
        for (step, rank), value in reversed(self._values.items()):
            if rank >= len(last) or step <= last[rank]:
                break
            found.append((step, rank, value))
        return found[::-1]

    def column(self, step: NDArray[np.int64], rank: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the values at the rows `(step, rank)`, each (rows,); NaN where none was logged."""
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
