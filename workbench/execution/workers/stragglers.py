"""Finds workers that are slow for a long time, and shares of the batch that balance the workers.

Pure decisions on rows; `shedding.py` carries them out.

A worker's own time in a step is its time for computing and fetching data, without waiting for
others. A worker is a straggler if its own time is more than `Rule.factor` times the median of the
others'. This must hold in the median and in `Rule.most` of the steps, over a window of at least
`Rule.steps` steps and `Rule.seconds`. So a worker that is late only now and then (as under random
delays) is not a straggler, and there is none if all are slow. Up to 1 ms of difference is ignored.

    own time per sample c_r = median own time / samples    measured under the present shares
    shares n_r              least max_r c_r n_r; whole numbers, their sum is the batch
    within                  1 <= n_r <= `MOST` times an equal share; a larger one needs more memory

If no worker's c_r differs from the others' by `Rule.factor`, the shares are equal. New shares are
used only if the longest own time shrinks by `Rule.gain`. A fixed delay per step looks like
slowness per sample. So the module measures again after each change, and changes the shares again
if this helps. A worker that is no longer slow is soon ready first, and then gets its share back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...shared.record import REAL_WAIT_S

MOST = 2.0
"""A worker's share is at most this many times an equal share."""
MOST_STEPS = 1024
"""The module looks at this many steps at most: the latest steps."""

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Rule:
    """When a worker counts as slow for a long time.

    Attributes:
        factor: Limit for the worker's own time, in times the others' own time.
        steps, seconds: Least length of the window.
        most: Share of the steps in which the worker must exceed the factor.
        gain: Least share by which the longest own time must shrink to be worth a change.
    """

    factor: float = 1.3
    steps: int = 30
    seconds: float = 3.0
    most: float = 0.85
    gain: float = 0.05


@dataclass(frozen=True)
class Pace:
    """How fast each worker was over a window; values are in the order of the workers.

    Attributes:
        own_s: Median own time of a step.
        samples: How many samples each worker's share has.
        ratio: Own time divided by the median of the others' own time; median over the steps.
        slow, quick: Whether the worker was slower, or quicker, than the others for the window.
        step_s: Median time of a step.
        seconds: Length of the window.
    """

    own_s: tuple[float, ...]
    samples: tuple[int, ...]
    ratio: tuple[float, ...]
    slow: tuple[bool, ...]
    quick: tuple[bool, ...]
    step_s: float
    seconds: float

    @property
    def slowest(self) -> int:
        """Return the slowest worker, by ratio."""
        return int(np.argmax(self.ratio))


class Watch:
    """Collects the rows of workers that take each step together.

    Args:
        ranks: The workers' ranks, as rows name them.
        first: Steps before this one are left out.
    """

    def __init__(self, ranks: Sequence[int], rule: Rule, first: int = 0) -> None:
        self._place = {rank: place for place, rank in enumerate(ranks)}
        self._began_s = float("nan")  # when the first of them ended
        self.rule, self._first = rule, first
        self._open: dict[int, dict[int, tuple[float, int, float, float]]] = {}
        self._steps: deque[tuple[int, Floats, tuple[int, ...], float, float]] = deque(
            maxlen=MOST_STEPS
        )

    def take(self, rows: NDArray[Any]) -> None:
        """Add RECORD rows of shape (rows,), of any ranks and steps."""
        own_s = np.asarray(rows["data_wait_s"], np.float64) + rows["compute_s"]
        values = zip(
            rows["step"].tolist(), rows["rank"].tolist(), own_s.tolist(),
            rows["samples"].tolist(), rows["start_s"].tolist(), rows["end_s"].tolist(),
            strict=True,
        )  # fmt: skip
        for step, rank, own, samples, start_s, end_s in values:
            place = self._place.get(rank)
            if step < self._first or place is None:
                continue
            found = self._open.setdefault(step, {})
            found[place] = own, samples, start_s, end_s
            if len(found) == len(self._place):
                self._complete(step, self._open.pop(step))
        while len(self._open) > 64:  # a row of these was lost
            self._open.pop(min(self._open))

    def _complete(self, step: int, found: dict[int, tuple[float, int, float, float]]) -> None:
        own, samples, start_s, end_s = zip(*(found[i] for i in range(len(found))), strict=True)
        last = self._steps[-1] if self._steps else None
        if last is not None and sum(samples) != sum(last[2]):
            if sum(samples) < sum(last[2]):
                return  # the smaller batch at an epoch's end
            self._steps.clear()
        if not self._steps:
            self._began_s = float(np.mean(end_s))
        lasted_s = float(np.mean(end_s) - np.mean(start_s))
        if np.isfinite(own).all():
            self._steps.append((step, np.array(own), samples, lasted_s, float(np.mean(end_s))))

    def pace(self) -> Pace | None:
        """Return how fast each worker was in the latest steps; None if there are too few steps."""
        rule, steps = self.rule, list(self._steps)
        if len(self._place) < 2 or len(steps) < rule.steps:
            return None
        ends_s = np.array([one[4] for one in steps])
        if ends_s[-1] - self._began_s < rule.seconds:
            return None
        enough = int(np.searchsorted(ends_s, ends_s[-1] - rule.seconds, side="right")) - 1
        steps = steps[max(0, min(enough, len(steps) - rule.steps)) :]
        own = np.stack([one[1] for one in steps])  # (steps, workers)
        others = median_of_others(own)
        median, beside = np.median(own, axis=0), np.median(others, axis=0)
        real = np.abs(median - beside) > REAL_WAIT_S
        slow = (own > rule.factor * others).mean(axis=0) >= rule.most
        quick = (rule.factor * own < others).mean(axis=0) >= rule.most
        ratio = median / np.maximum(beside, 1e-9)
        return Pace(
            own_s=tuple(median.tolist()),
            samples=steps[-1][2],
            ratio=tuple(ratio.tolist()),
            slow=tuple((slow & real & (ratio > rule.factor)).tolist()),
            quick=tuple((quick & real & (ratio * rule.factor < 1)).tolist()),
            step_s=float(np.median([one[3] for one in steps])),
            seconds=float(steps[-1][4] - steps[0][4]),
        )


def median_of_others(values: Floats) -> Floats:
    """Return for each value of a row the median of the row's others: shapes (rows, n)."""
    count = values.shape[1]
    placed = np.argsort(np.argsort(values, axis=1), axis=1)  # where each stands in its row
    ordered = np.sort(values, axis=1)
    low, high = (count - 2) // 2, (count - 1) // 2  # of those that are left
    below = np.take_along_axis(ordered, low + (placed <= low), axis=1)
    above = np.take_along_axis(ordered, high + (placed <= high), axis=1)
    return np.asarray((below + above) / 2)


def equal_shares(batch: int, workers: int) -> tuple[int, ...]:
    """Return the shares that differ by at most one sample."""
    ends = [(place + 1) * batch // workers for place in range(workers)]
    return tuple(end - begin for begin, end in zip([0, *ends], ends, strict=False))


def better_shares(pace: Pace, rule: Rule) -> tuple[int, ...] | None:
    """Return shares, in samples, that are worth a change; None if there are no such shares."""
    batch, count = sum(pace.samples), len(pace.samples)
    equal = equal_shares(batch, count)
    less = [share < even for share, even in zip(pace.samples, equal, strict=True)]
    due = any(pace.slow) or any(a and b for a, b in zip(pace.quick, less, strict=True))
    if not due or batch <= count or not all(pace.samples):
        return None
    cost_s = np.array(pace.own_s) / np.array(pace.samples)
    shares = equal if _alike(cost_s, rule.factor) else best_shares(cost_s.tolist(), batch)
    return shares if max(cost_s * shares) <= (1 - rule.gain) * max(pace.own_s) else None


def _alike(cost_s: Floats, factor: float) -> bool:
    """Whether every worker's cost is within this factor of the median of the others'."""
    others = median_of_others(cost_s[None])[0]
    return bool(((others <= factor * cost_s) & (cost_s <= factor * others)).all())


def best_shares(cost_s: Sequence[float], batch: int) -> tuple[int, ...]:
    """Return the shares with which the slowest worker finishes as early as possible.

    Args:
        cost_s: Each worker's time for one sample.
        batch: Samples; at least as many as workers.
    """
    cost = np.maximum(np.array(cost_s, np.float64), 1e-12)
    most = max(1, int(MOST * batch / len(cost)))
    speed = 1 / cost
    shares = np.clip(np.floor(batch * speed / speed.sum()), 1, most).astype(np.int64)
    while (left := batch - int(shares.sum())) > 0:
        open_to = np.where(shares < most, (shares + 1) * cost, np.inf)
        first = int(np.argmin(open_to))
        second = np.partition(open_to, 1)[1]  # until then it is the one to be given more
        more = int((second - open_to[first]) / cost[first]) + 1 if np.isfinite(second) else left
        shares[first] += max(1, min(left, more, most - int(shares[first])))
    while shares.sum() > batch:
        shares[int(np.argmax(np.where(shares > 1, shares * cost, -1.0)))] -= 1
    return tuple(shares.tolist())
