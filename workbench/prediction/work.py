"""The own computation of any number of workers, drawn from that of a few.

A worker's seconds in a step are split as in a two-way analysis of variance without interaction
(Scheffe, The Analysis of Variance, 1959, chapter 4):

    own[step, worker] = mean + common part of this step + constant part of this worker + the rest

- The part common to all workers is found by their covariance over the steps. If the covariance
  could be chance, this part is zero.
- The part of a worker counts if workers differ by more than their steps explain. For another
  number of workers, this part is drawn from the measured workers.
- The rest is drawn for each worker and step. The time of the slowest of n workers is the largest
  of n such draws, so the largest measured values matter: above the 90th percentile they are
  smoothed by a generalized Pareto distribution (Pickands, Annals of Statistics 3(1), 1975;
  probability-weighted moments: Hosking and Wallis, Technometrics 29(3), 1987).

Each draw of a run begins with other steps and workers, drawn with replacement from the measured
ones, so few steps give a wider interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BEYOND = 0.9
"""Share of the draws that are measured values; the rest follows the fitted tail."""
LEAST_TAIL = 10
"""Fewer values than these say nothing about a tail."""
_SHAPES = (-0.4, 0.4)
_CHANCE_Z = 2.0


@dataclass(frozen=True, eq=False)
class Work:
    """The measured computation of the workers.

    Attributes:
        own_s: (steps, workers) seconds; steps after warm-up that all workers have.
        extra_s: Seconds by rank that a fault adds to a single worker.
        fixed_s: The part of `extra_s` that does not depend on the worker's number of samples.
        jitter_s: The longest random delay that faults added to each value of `own_s`; it does not
            depend on the number of samples either.
        alike: Whether workers differ only by chance.
        common: Share of the steps' variance that all workers have together.
    """

    own_s: Floats
    extra_s: dict[int, float]
    fixed_s: dict[int, float]
    jitter_s: float
    alike: bool
    common: float

    @staticmethod
    def of(
        own_s: Floats,
        extra_s: dict[int, float] | None = None,
        fixed_s: dict[int, float] | None = None,
        jitter_s: float = 0.0,
    ) -> Work:
        """Analyse rows."""
        offsets = own_s.mean(axis=0) - own_s.mean()
        return Work(
            own_s, extra_s or {}, fixed_s or {}, jitter_s, _alike(own_s, offsets), _common(own_s)
        )

    @property
    def seen(self) -> int:
        """Number of values for draws of the rest."""
        return int(self.own_s.size)

    @property
    def computed_s(self) -> float:
        """Mean seconds of `own_s` without the random delays of faults."""
        return max(float(self.own_s.mean()) - self.jitter_s / 2, 0.0)

    def injected(self, drawn: Floats) -> Floats:
        """Return the part of drawn seconds that faults added, whatever the number of samples.

        Args:
            drawn: What `draw` returned, (draws, steps, workers).
        """
        found = np.zeros_like(drawn)
        for rank in range(drawn.shape[2]):
            fixed_s, own = self.fixed_s.get(rank, 0.0), drawn[:, :, rank]
            random = own - self.extra_s.get(rank, 0.0) - self.computed_s
            found[:, :, rank] = fixed_s + np.clip(random, 0.0, self.jitter_s)
        return found

    def draw(
        self, rng: np.random.Generator, draws: int, steps: int, workers: int, *, again: bool = True
    ) -> Floats:
        """Return seconds of shape (draws, steps, workers).

        Args:
            again: Whether each draw resamples the measured steps and workers.
        """
        found = np.empty((draws, steps, workers))
        count, ranks = self.own_s.shape
        for d in range(draws):
            own = self.own_s
            if again:
                own = own[rng.integers(0, count, count)]
            offsets = np.zeros(ranks) if self.alike else own.mean(axis=0) - own.mean()
            if again and not self.alike and workers != ranks:
                offsets = offsets[rng.integers(0, ranks, ranks)]
            shared, rest = self._parts(own)
            found[d] = own.mean() + _quantiles(rest, rng.random((steps, workers)))
            if self.common > 0:
                found[d] += shared[rng.integers(0, count, steps)][:, None]
            if not self.alike:
                found[d] += (
                    offsets if workers == ranks else offsets[rng.integers(0, ranks, workers)]
                )
        for rank, extra_s in self.extra_s.items():
            if rank < workers:
                found[:, :, rank] += extra_s
        return np.maximum(found, 1e-6)

    def _parts(self, own: Floats) -> tuple[Floats, Floats]:
        """Return the common part of each step (steps,) and the rest (values,), both with mean 0."""
        ranks = own.shape[1]
        apart = own - (own.mean(axis=0) if not self.alike else own.mean())
        if self.common <= 0:
            return np.zeros(len(own)), apart.ravel()
        total = float(apart.var())
        mean = apart.mean(axis=1)
        wanted = math.sqrt(self.common * total)
        shared = mean * (wanted / max(float(mean.std()), 1e-12))
        known = self.common / (self.common + (1 - self.common) / ranks)
        rest = (apart - known * mean[:, None]).ravel()
        left = math.sqrt((1 - self.common) * total)
        return shared, rest * (left / max(float(rest.std()), 1e-12))


def _alike(own: Floats, offsets: Floats) -> bool:
    steps, ranks = own.shape
    if ranks < 2:
        return True
    # Differences within a step, because the common part does not show which worker is slow.
    rest = own - own.mean(axis=1, keepdims=True) - offsets
    error = float(rest.std()) * math.sqrt(ranks / max(ranks - 1, 1)) / math.sqrt(steps)
    spread = math.sqrt(float((offsets**2).sum()) / (ranks - 1))
    return bool(spread <= max(_CHANCE_Z * error, 0.005 * float(own.mean())))


def _common(own: Floats) -> float:
    """Return the share of the variance that workers have together: their mean correlation."""
    steps, ranks = own.shape
    if ranks < 2 or steps < 3:
        return 0.0
    # Uses ranks, not seconds, so that one long step of one worker does not cause a correlation.
    order = own.argsort(axis=0).argsort(axis=0).astype(float)
    if not float(own.std()) > 1e-9:
        return 0.0
    matrix = np.corrcoef(order.T)
    mean = float(matrix[np.triu_indices(ranks, 1)].mean())
    pairs = ranks * (ranks - 1) / 2
    return min(mean, 1.0) if mean > _CHANCE_Z / math.sqrt((steps - 2) * pairs) else 0.0


def _quantiles(values: Floats, at: Floats) -> Floats:
    """Return quantiles of the measured values, smoothed in the upper tail."""
    ordered = np.sort(values)
    count = len(ordered)
    plain = np.interp(at * count - 0.5, np.arange(count), ordered)
    first = math.ceil(BEYOND * count)
    start = float(ordered[min(first, count - 1)])
    over = ordered[first:] - start
    if len(over) < LEAST_TAIL or not over[-1] > 0:
        return np.asarray(plain)
    shape, scale = _pareto(over)
    share = np.clip((1 - at) / (1 - first / count), 1e-12, 1.0)
    if abs(shape) < 1e-6:
        tail = start - scale * np.log(share)
    else:
        tail = start + scale / shape * (share**-shape - 1)
    return np.where(at * count > first, tail, np.minimum(plain, start))


def _pareto(over: Floats) -> tuple[float, float]:
    """Return shape and scale of the tail, by probability-weighted moments; `over` is sorted."""
    n = len(over)
    mean = float(over.mean())
    weighted = float((over * (1 - (np.arange(1, n + 1) - 0.35) / n)).mean())
    gap = mean - 2 * weighted
    shape = 2 - mean / gap if gap > 1e-15 else _SHAPES[1]
    shape = min(max(shape, _SHAPES[0]), _SHAPES[1])
    return shape, mean * (1 - shape)
