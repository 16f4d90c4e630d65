"""A run's typical step, without the first ones, as a comparison of costs needs it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from .store import RunHistory

LEAST_STEPS = 10
"""Fewer steps than these say nothing about a typical one."""

_MOST_WARM_UP = 5


@dataclass(frozen=True)
class Steady:
    """The mean step after warm-up: a tenth of the steps, at least one and at most five.

    Where workers take each step together, `work_s` is that of the worker that is busiest on the
    whole: a worker that is slower at every step makes the others wait in proportion to its work.
    Where they do not, it is the mean over workers.

    Attributes:
        steps: Steps that were averaged.
        step_s: Seconds of a step.
        work_s: Seconds of it in which a worker computes or waits for data.
        error_s: Standard error of `work_s`.
        samples: Samples of all workers in a step.
    """

    steps: int
    step_s: float
    work_s: float
    error_s: float
    samples: float

    @property
    def fixed_s(self) -> float:
        """Seconds of a step for everything else: waiting, communication, overheads."""
        return self.step_s - self.work_s


def steady_of(history: RunHistory) -> Steady | None:
    """Return a run's typical step; None with too few steps, or where compute was not measured."""
    step, rank = history["step"], history["rank"]
    numbers = np.unique(step)
    warm_up = min(max(len(numbers) // 10, 1), _MOST_WARM_UP)
    if len(numbers) - warm_up < LEAST_STEPS:
        return None
    work = history["compute_s"] + np.nan_to_num(history["data_wait_s"])
    late = (step >= numbers[warm_up]) & np.isfinite(work)
    by_rank = [work[late & (rank == r)] for r in np.unique(rank[late])]
    if not by_rank or min(map(len, by_rank)) < LEAST_STEPS:
        return None
    work_s, error_s = _work(by_rank, joined=history.joined)
    totals = history.totals
    return Steady(
        steps=min(map(len, by_rank)),
        step_s=float(history["step_s"][late].mean()),
        work_s=work_s,
        error_s=error_s,
        samples=totals.samples / totals.steps if totals.steps else float("nan"),
    )


def mean_of(parts: Sequence[Steady | None]) -> Steady | None:
    """Return the typical step over seeds; None unless every run has one."""
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        return None
    count = len(known)
    inside = math.sqrt(sum(part.error_s**2 for part in known)) / count
    works = np.array([part.work_s for part in known])
    between = float(works.std(ddof=1)) / math.sqrt(count) if count > 1 else 0.0
    return Steady(
        steps=min(part.steps for part in known),
        step_s=float(np.mean([part.step_s for part in known])),
        work_s=float(works.mean()),
        error_s=max(inside, between),
        samples=float(np.mean([part.samples for part in known])),
    )


def _work(by_rank: Sequence[NDArray[np.float64]], *, joined: bool) -> tuple[float, float]:
    means = np.array([own.mean() for own in by_rank])
    errors = np.array([own.std(ddof=1) / math.sqrt(len(own)) for own in by_rank])
    if joined:
        busiest = int(means.argmax())
        return float(means[busiest]), float(errors[busiest])
    return float(means.mean()), float(np.sqrt((errors**2).sum()) / len(errors))
