"""A run without its warm-up: its rate with an interval, and its typical step.

A run's first steps cost more than the others: they touch memory, choose GPU kernels and open links.
MSER-5 finds their number from the data (White, Cobb and Spratt, A Comparison of Five Steady-State
Truncation Heuristics for Simulation, WSC 2000). It takes the cut after which the rest of the series
has the smallest standard error of the mean. Steps are grouped by five; in short runs they stay
single. A single long step in mid-run is first bounded, so that it does not move the cut.

The steps of a single run already tell how reliable its rate is. The circular block bootstrap
(Politis and Romano, 1992) draws whole blocks of steps, because neighbours are alike, and computes
the rate from them. Steps do not show the difference between runs; seeds do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...shared.record import PARTS

if TYPE_CHECKING:
    from ..store import RunHistory

Floats = NDArray[np.float64]
LEAST_STEPS = 10
"""With fewer steps there is no typical step."""

LEAST_RATED = 5
"""With fewer steps there is no interval."""

MOST_WARM_UP = 0.25
"""Largest share of a run that can be warm-up: a longer slow start belongs to the run."""

_BATCH, _LONG = 5, 50
_CLIP, _SLOWER = 8.0, 1.02
_DRAWS, _SEED, _MOST_BLOCKED = 1000, 1907, 4096
_Z = 1.96
_COLUMNS = ("step", "rank", "step_s", "samples", *PARTS, "bubble_s")


@dataclass(frozen=True)
class Rate:
    """Samples per second of all workers after warm-up, with its 95 % interval.

    Attributes:
        low, high: Ends of the interval; NaN if there are too few steps.
        warm_up: Steps that were left out at the beginning.
        steps: Steps that were counted.
        step_s: Seconds of a worker's step.
        parts_s: (5,) seconds of that step in each of `record.PARTS`; unmeasured rows add nothing.
        bubble: Share of worker time that a pipeline's bubble took; NaN for other strategies.
    """

    mean: float
    low: float
    high: float
    warm_up: int
    steps: int
    step_s: float
    parts_s: tuple[float, ...]
    bubble: float = float("nan")


@dataclass(frozen=True)
class Steady:
    """The mean step after warm-up.

    If workers take each step together, `work_s` belongs to the worker that is busiest over all
    steps: a worker that is always slower makes the others wait in proportion to its work.
    If they do not, `work_s` is the mean over workers.

    Attributes:
        steps: Steps that were averaged.
        step_s: Seconds of a step.
        work_s: Seconds of the step in which a worker computes or waits for data.
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


def warm_up_of(step_s: Floats) -> int:
    """Return how many of the first steps are warm-up.

    First steps that are not slower than the steps after them are not warm-up.

    Args:
        step_s: (steps,) seconds of each step.
    """
    count = len(step_s)
    most = int(count * MOST_WARM_UP)
    if most < 1:
        return 0
    size = _BATCH if count >= _LONG else 1
    middle = float(np.median(step_s))
    spread = 1.4826 * float(np.median(np.abs(step_s - middle))) or 1e-3 * middle
    bounded = np.minimum(step_s, middle + _CLIP * spread)
    batches = bounded[: count // size * size].reshape(-1, size).mean(axis=1)
    left = np.arange(len(batches), 0, -1)
    sums, squares = batches[::-1].cumsum()[::-1], (batches**2)[::-1].cumsum()[::-1]
    errors = np.maximum(squares - sums**2 / left, 0.0) / left**2
    cut = int(errors[: most // size + 1].argmin()) * size
    return cut if cut and step_s[:cut].mean() > _SLOWER * step_s[cut:].mean() else 0


def interval(samples: Sequence[Floats], step_s: Sequence[Floats]) -> tuple[float, float]:
    """Return the ends of the 95 % interval of a rate, by a seeded circular block bootstrap.

    Args:
        samples, step_s: Samples and seconds of each step: one array each if workers take steps
            together, one per worker if each worker steps alone. Their rates add up, each for the
            part of the time in which its worker trained (`_rate`).
    """
    if min(map(len, step_s), default=0) < LEAST_RATED:
        return float("nan"), float("nan")
    rng = np.random.default_rng(_SEED)
    rates, longest_s = np.zeros(_DRAWS), max(spent.sum() for spent in step_s)
    for drawn, spent in zip(samples, step_s, strict=True):
        size = -(-len(spent) // _MOST_BLOCKED)
        drawn, spent = _binned(drawn, size), _binned(spent, size)
        trained = spent.sum() / longest_s
        count = len(spent)
        block = max(1, round(count ** (1 / 3)))
        starts = rng.integers(0, count, (_DRAWS, -(-count // block)))
        own = _blocks(drawn, block)[starts].sum(1) / _blocks(spent, block)[starts].sum(1)
        rates += trained * own
    mean = _rate(samples, step_s)
    low, high = (float(end) for end in np.quantile(rates, (0.025, 0.975)))
    # Intervals from few blocks are too narrow: widen them, as Student's t is wider than the normal.
    wide = _student(max(count / block - 1, 1.0)) / _Z
    return max(mean - wide * (mean - low), 0.0), mean + wide * (high - mean)


def _rate(samples: Sequence[Floats], step_s: Sequence[Floats]) -> float:
    """Return all samples by the time of the busiest worker.

    If each worker steps alone, a fast worker can end long before a slow one. The sum of the rates
    of both would be a rate that the run had only at its beginning.
    """
    return float(sum(s.sum() for s in samples) / max(t.sum() for t in step_s))


def rate_of(history: RunHistory) -> Rate | None:
    """Return a run's rate after warm-up; None before its first step.

    In very long runs not every step is stored. The rate is then that of all steps, which is exact;
    the warm-up has no weight there.
    """
    columns = history.together(*_COLUMNS)
    rank, step_s = columns["rank"], columns["step_s"]
    if not len(rank) or not step_s.sum() > 0:
        return None
    lanes, late = _lanes(history, columns)
    samples, spent = [lane[0] for lane in lanes], [lane[1] for lane in lanes]
    mean = _rate(samples, spent)
    low, high = interval(samples, spent)
    if history.stride > 1:
        exact = history.totals.samples_per_s
        mean, low, high = exact, low * exact / mean, high * exact / mean
    parts = [float(np.nansum(columns[name][late])) / int(late.sum()) for name in PARTS]
    bubble = columns["bubble_s"][late]
    piped = np.isfinite(bubble)
    return Rate(
        mean, low, high,
        warm_up=len(np.unique(columns["step"])) - max(map(len, spent)) if history.joined
        else int(np.bincount(rank).max()) - max(map(len, spent)),
        steps=max(map(len, spent)),
        step_s=float(step_s[late].mean()),
        parts_s=tuple(parts),
        bubble=float(bubble[piped].sum() / step_s[late][piped].sum()) if piped.any() else np.nan,
    )  # fmt: skip


def steady_of(history: RunHistory) -> Steady | None:
    """Return a run's typical step; None if steps are too few or compute was not measured."""
    columns = history.together(*_COLUMNS)
    rank = columns["rank"]
    if not len(rank):
        return None
    _, steady = _lanes(history, columns)
    work = columns["compute_s"] + np.nan_to_num(columns["data_wait_s"])
    late = steady & np.isfinite(work)
    by_rank = [work[late & (rank == r)] for r in np.unique(rank[late])]
    if not by_rank or min(map(len, by_rank)) < LEAST_STEPS:
        return None
    work_s, error_s = _work(by_rank, joined=history.joined)
    totals = history.totals
    return Steady(
        steps=min(map(len, by_rank)),
        step_s=float(columns["step_s"][late].mean()),
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


def _lanes(
    history: RunHistory, columns: dict[str, NDArray[np.float64]]
) -> tuple[list[tuple[Floats, Floats]], NDArray[np.bool_]]:
    """Return samples and seconds of the steps after warm-up, and which rows belong to them.

    One pair if workers take steps together; its time is that of the busiest worker. Otherwise one
    pair for each worker.
    """
    step, rank, step_s = columns["step"], columns["rank"], columns["step_s"]
    samples = columns["samples"].astype(float)
    cut = (lambda spent: 0) if history.stride > 1 else warm_up_of
    if not history.joined:
        late = np.zeros(len(rank), bool)
        lanes = []
        rows_of = [np.flatnonzero(rank == r) for r in np.unique(rank)]
        # The same share of all workers' steps: in the first seconds, a fast worker can take all of
        # its steps, and without them the rate would be that of the slow workers.
        slowest = max(rows_of, key=lambda rows: float(step_s[rows].sum()))
        share = cut(step_s[slowest]) / len(slowest)
        for own in rows_of:
            own = own[round(share * len(own)) :]
            late[own] = True
            lanes.append((samples[own], step_s[own]))
        return lanes, late
    numbers, index = np.unique(step, return_inverse=True)
    rows = np.bincount(rank)
    spent = np.where(rows == rows.max(), np.bincount(rank, step_s), -np.inf)
    busiest = np.flatnonzero(rank == int(spent.argmax()))
    shares = np.zeros(len(numbers))
    (np.add if history.data_parallel else np.maximum).at(shares, index, samples)
    first = cut(step_s[busiest])
    own = busiest[first:]
    return [(shares[index[own]], step_s[own])], index >= index[own[0]]


def _blocks(values: Floats, size: int) -> Floats:
    """Return the sum of the block that begins at each value; late blocks wrap to the start."""
    sums = np.concatenate([[0.0], np.concatenate([values, values[: size - 1]]).cumsum()])
    return np.asarray(sums[size:] - sums[:-size])


def _binned(values: Floats, size: int) -> Floats:
    if size == 1:
        return values
    return np.asarray(np.add.reduceat(values, np.arange(0, len(values), size)))


def _student(freedom: float) -> float:
    """Return Student's 97.5 % quantile (Cornish and Fisher's expansion, within 3 % from 3 on)."""
    z2 = _Z * _Z
    first = (z2 + 1) / (4 * freedom)
    second = (5 * z2 * z2 + 16 * z2 + 3) / (96 * freedom**2)
    return _Z * (1 + first + second)


def _work(by_rank: Sequence[NDArray[np.float64]], *, joined: bool) -> tuple[float, float]:
    means = np.array([own.mean() for own in by_rank])
    errors = np.array([own.std(ddof=1) / math.sqrt(len(own)) for own in by_rank])
    if joined:
        busiest = int(means.argmax())
        return float(means[busiest]), float(errors[busiest])
    return float(means.mean()), float(np.sqrt((errors**2).sum()) / len(errors))
