"""How old the parameters were that asynchronous pushes were computed from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MOST = 64
"""Pushes that are this many updates late or more are counted together."""


@dataclass(frozen=True)
class Staleness:
    """The distribution over pushes.

    Attributes:
        counts: Pushes by staleness in updates: 0, 1, 2, ...; the entry `MOST` is open upwards.
        mean, worst: In updates, over all pushes.
    """

    counts: tuple[int, ...]
    mean: float
    worst: float

    @staticmethod
    def of(values: NDArray[np.float64]) -> Staleness | None:
        """Count a history's column; NaN stands for rows without a push. None where none has one."""
        known = values[np.isfinite(values)]
        if not len(known):
            return None
        whole = np.clip(np.rint(known), 0, MOST).astype(int)
        counts = tuple(int(count) for count in np.bincount(whole))
        return Staleness(counts, float(known.mean()), float(known.max()))

    @staticmethod
    def merged(parts: Sequence[Staleness | None]) -> Staleness | None:
        """Return the distribution over several runs' pushes; None where no run has any."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        longest = max(len(part.counts) for part in known)
        counts = [0] * longest
        for part in known:
            for late, count in enumerate(part.counts):
                counts[late] += count
        pushes = [sum(part.counts) for part in known]
        mean = sum(p.mean * n for p, n in zip(known, pushes, strict=True)) / sum(pushes)
        return Staleness(tuple(counts), mean, max(part.worst for part in known))

    @property
    def shares(self) -> tuple[float, ...]:
        """Fractions of the pushes by staleness, 0, 1, 2, ...; they add up to 1."""
        pushes = sum(self.counts)
        return tuple(count / pushes for count in self.counts)
