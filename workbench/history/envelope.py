"""A curve of bounded size that never loses its extremes: buckets whose width doubles."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .snapshot import Curve

POINTS = 512
_FEW = 16


class Envelope:
    """Mean, least and greatest value over buckets of steps, in at most `POINTS` buckets.

    A value of step s goes to bucket `s // width`. When a step lies beyond the last bucket,
    neighbours are merged and `width` doubles, so any number of values in any order takes bounded
    memory, and a spike of one step stays visible for ever. Short curves take little of it.
    """

    def __init__(self) -> None:
        self.width = 1
        self._first = np.full(_FEW, np.inf)
        self._t_s = np.full(_FEW, np.inf)
        self._low = np.full(_FEW, np.inf)
        self._high = np.full(_FEW, -np.inf)
        self._sum = np.zeros(_FEW)
        self._weight = np.zeros(_FEW)

    def add(
        self,
        step: NDArray[Any],
        t_s: NDArray[Any],
        value: NDArray[Any],
        weight: NDArray[Any] | None = None,
    ) -> None:
        """Add values; those that are not finite were not measured and are left out.

        Args:
            step, t_s, value: (values,) step number, time and value.
            weight: (values,) weights of the mean, for means of rates; 1 where not given.
        """
        weights = np.ones(len(value)) if weight is None else np.asarray(weight, float)
        known = np.isfinite(value) & (weights > 0)
        if not known.all():
            step, t_s, value, weights = step[known], t_s[known], value[known], weights[known]
        if not len(value):
            return
        top = int(step.max())
        while top // self.width >= POINTS:
            self._double()
        while top // self.width >= len(self._sum):
            self._grow()
        bucket = step.astype(np.int64) // self.width
        self._sum += np.bincount(bucket, value * weights, len(self._sum))
        self._weight += np.bincount(bucket, weights, len(self._sum))
        np.minimum.at(self._first, bucket, step.astype(float))
        np.minimum.at(self._t_s, bucket, t_s)
        np.minimum.at(self._low, bucket, value)
        np.maximum.at(self._high, bucket, value)

    def curve(self, origin_s: float = 0.0) -> Curve:
        """Return a copy of the curve, its times counted from `origin_s`."""
        used = self._weight > 0
        return Curve(
            step=self._first[used],
            t_s=self._t_s[used] - origin_s,
            mean=self._sum[used] / self._weight[used],
            low=self._low[used],
            high=self._high[used],
        )

    @property
    def empty(self) -> bool:
        """Whether no value was measured so far."""
        return not self._weight.any()

    @property
    def nbytes(self) -> int:
        """Memory that the buckets take, in bytes."""
        return 6 * self._sum.nbytes

    def _grow(self) -> None:
        for name in ("_first", "_t_s", "_low"):
            setattr(self, name, _filled_up(getattr(self, name), np.inf))
        self._high = _filled_up(self._high, -np.inf)
        self._sum, self._weight = _filled_up(self._sum, 0.0), _filled_up(self._weight, 0.0)

    def _double(self) -> None:
        self.width *= 2
        for name in ("_first", "_t_s", "_low"):
            setattr(self, name, _merge(getattr(self, name).reshape(-1, 2).min(axis=1), np.inf))
        self._high = _merge(self._high.reshape(-1, 2).max(axis=1), -np.inf)
        self._sum = _merge(self._sum.reshape(-1, 2).sum(axis=1), 0.0)
        self._weight = _merge(self._weight.reshape(-1, 2).sum(axis=1), 0.0)


def _merge(half: NDArray[np.float64], fill: float) -> NDArray[np.float64]:
    return np.concatenate([half, np.full(len(half), fill)])


def _filled_up(values: NDArray[np.float64], fill: float) -> NDArray[np.float64]:
    """Return twice as many buckets; the new ones are empty."""
    return np.concatenate([values, np.full(len(values), fill)])
