"""The rows of a comparison: one plan per row, with mean and spread over its seeds.

The verdict is one plain sentence, made from the measurements alone.

A model with two measured terms gives the step size from which distributing is worth it. A step of
a plan takes `work + fixed`. Work is the time in which a worker computes and waits for its data
(`steady.Steady.work_s`); the model assumes that it grows in proportion to the batch. Fixed is the
rest: waiting, communication and overheads. The model assumes the same time for any batch, because
gradients are as large as the model. With a batch k times as large, one device and the plan take

    k * work_1 + fixed_1    and    k * work_n + fixed_n

and they take equally long at

    k = (fixed_n - fixed_1) / (work_1 - work_n).

`work_n` is measured; it is not `work_1 / n`. A worker may compute as long for a part of the batch
as one device for all of it: CPU engines share the cores that one device has alone, or most of
compute is a cost of each step that does not depend on the batch. Runs with one batch cannot tell
these two apart, so they give no k. The model has a serial part and a divided part (Amdahl, 1967);
both are measured.

The model is not used where it would not hold: if workers do not take shares of the batch (the
messages of pipelines and tensor parallelism grow with the batch), if faults were injected, if
batches, recipes or frameworks differ, or if the measured difference of work is less than four
times its standard error.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ...shared.record import PARTS
from ..totals import Staleness
from .steady import Steady, mean_of

if TYPE_CHECKING:
    from .summary import RunSummary

SHARES = ("data_wait_s", "compute_s", "sync_wait_s", "bubble_s", "transfer_s", "other_s")
"""The parts of step time in a comparison; pipelines have a bubble instead of sync wait."""

RUN_COLORS = 8
"""Colours of runs; number 0 is one device's (`views.theme.run_color`)."""

_NAN = float("nan")
_DATA, _COMPUTE, _WAIT, _TRANSFER, _OTHER = range(len(PARTS))


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds (NaN for a single seed).

    Attributes:
        count: How many seeds were measured.
        values: The measured value for each seed.
        low, high: Ends of the interval that contains the mean with 95 %; NaN if not known.
    """

    mean: float
    std: float = _NAN
    count: int = 1
    values: tuple[float, ...] = ()
    low: float = _NAN
    high: float = _NAN

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Summarise values; values that are not finite count as not measured."""
        known = np.array([v for v in values if np.isfinite(v)], float)
        if not len(known):
            return Spread(_NAN, count=0)
        std = float(known.std(ddof=1)) if len(known) > 1 else _NAN
        return Spread(float(known.mean()), std, len(known), tuple(known.tolist()))

    @staticmethod
    def of_rates(runs: Sequence[RunSummary]) -> Spread:
        """Summarise the rates of one plan, with the interval from the steps or from the seeds.

        The wider interval counts. The one from seeds is twice the standard error of their mean.
        """
        spread = Spread.of([run.samples_per_s for run in runs])
        known = [run for run in runs if np.isfinite(run.samples_per_s)]
        below = [run.samples_per_s - run.low_per_s for run in known]
        above = [run.high_per_s - run.samples_per_s for run in known]
        if not known or not np.isfinite([*below, *above]).all():
            return spread
        count = len(known)
        between = 2 * spread.std / count**0.5 if count > 1 else 0.0
        down, up = (max(float(np.linalg.norm(e)) / count, between) for e in (below, above))
        return replace(spread, low=max(spread.mean - down, 0.0), high=spread.mean + up)


@dataclass(frozen=True)
class ComparisonRow:
    """One plan: a run, or the runs of one plan under several seeds.

    Attributes:
        names: Names of the runs in this row.
        states: How each of the runs ended: finished, stopped, failed.
        samples_per_s: Throughput after warm-up, with its interval.
        all_per_s: Throughput over all steps, the first ones included.
        warm_up: Steps left out at the beginning; the largest number over the seeds.
        speedup: Throughput divided by `one_device`'s; None if the comparison has no such run.
        relative: Throughput divided by the baseline's.
        relative_low, relative_high: The least and greatest ratio that both intervals allow.
        efficiency: `speedup / workers`; None with `speedup`.
        parts_s: (5,) mean seconds per step in each of `record.PARTS`; 0 where not measured.
        share: (5,) fractions of step time in each of `record.PARTS`; 0 where not measured.
        unmeasured: Names of the parts that no run of the row measured.
        shares: Fraction of step time in each of `SHARES`; NaN if not measured or not applicable.
            The known fractions add up to 1.
        evals: Metric -> values of the last evaluations.
        sent_bytes: Bytes sent by all workers in the whole run.
        sent_step_bytes: Bytes sent by all workers in a step.
        memory_bytes: Memory of each worker, mean over seeds; empty if not measured.
        staleness: Staleness of asynchronous pushes, over all seeds; None if there are none.
        options: Options of the strategy, and the values that `--set` gave the cell.
        color: Number of its colour: the colour of its first run, or the next colour if an earlier
            row of the comparison has this one.
        payoff: Where this plan and `one_device` break even; None if the runs do not show it.
    """

    name: str
    names: tuple[str, ...]
    strategy: str
    framework: str
    workers: int
    steps: int
    samples_per_s: Spread
    relative: float
    speedup: float | None
    efficiency: float | None
    step_s: float
    parts_s: tuple[float, ...]
    share: tuple[float, ...]
    unmeasured: tuple[str, ...]
    final_loss: Spread
    evals: dict[str, Spread]
    wall_s: Spread
    sent_bytes: float
    seeds: tuple[int, ...] = ()
    states: tuple[str, ...] = ()
    shares: dict[str, float] = field(default_factory=dict)
    sent_step_bytes: float = _NAN
    memory_bytes: tuple[float, ...] = ()
    staleness: Staleness | None = None
    steady: Steady | None = None
    payoff: Payoff | None = None
    threads: int | None = None
    devices: tuple[str, ...] = ()
    shares_batch: bool = True
    faults: tuple[str, ...] = ()
    recipe: str = ""
    all_per_s: float = _NAN
    warm_up: int = 0
    relative_low: float = _NAN
    relative_high: float = _NAN
    color: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether all its workers are known to compute on the CPU."""
        return bool(self.devices) and all(d.lower().startswith("cpu") for d in self.devices)

    @property
    def state(self) -> str:
        """How its runs ended, in words: `finished`, `2 finished, 1 failed`."""
        kinds = dict.fromkeys(self.states)
        if len(kinds) < 2:
            return next(iter(kinds), "")
        return ", ".join(f"{self.states.count(kind)} {kind}" for kind in kinds)


def row_of(
    group: Sequence[RunSummary], base: Sequence[RunSummary], *, has_one_device: bool
) -> ComparisonRow:
    """Return the row of the runs of one plan.

    Args:
        base: The runs of the baseline.
        has_one_device: Whether the baseline is a one-device run.
    """
    first, rate, other = group[0], Spread.of_rates(group), Spread.of_rates(base)
    relative = Spread(1.0) if group is base and rate.mean > 0 else ratio_of(rate, other)
    names = dict.fromkeys(name for run in group for name in metrics_of(run))
    return ComparisonRow(
        name=_common_name(group),
        names=tuple(run.name for run in group),
        strategy=first.strategy,
        framework=first.framework,
        workers=first.workers,
        steps=max(run.steps for run in group),
        samples_per_s=rate,
        relative=relative.mean,
        relative_low=relative.low,
        relative_high=relative.high,
        speedup=relative.mean if has_one_device else None,
        efficiency=relative.mean / first.workers if has_one_device else None,
        step_s=mean(run.step_s for run in group),
        parts_s=_means([run.parts_s for run in group]),
        share=_means([run.share for run in group]),
        unmeasured=tuple(part for part in PARTS if all(part in run.unmeasured for run in group)),
        final_loss=Spread.of([run.final_loss for run in group]),
        evals={
            name: Spread.of([metrics_of(run).get(name, _NAN) for run in group]) for name in names
        },
        wall_s=Spread.of([run.wall_s for run in group]),
        sent_bytes=mean(run.sent_bytes for run in group),
        seeds=tuple(run.seed for run in group if run.seed is not None),
        states=tuple(run.state for run in group),
        shares=_mean_shares(group),
        sent_step_bytes=mean(run.sent_step_bytes for run in group),
        memory_bytes=_memory(group),
        staleness=Staleness.merged([run.staleness for run in group]),
        steady=mean_of([run.steady for run in group]),
        threads=first.threads,
        devices=tuple(w.device for run in group for w in run.workers_table if w.device),
        shares_batch=first.shares_batch and not np.isfinite(first.bubble),
        faults=first.faults,
        recipe=first.recipe,
        all_per_s=mean(run.all_per_s for run in group),
        warm_up=max(run.warm_up for run in group),
        color=first.color,
        options=first.options,
    )


def ratio_of(rate: Spread, base: Spread) -> Spread:
    """Return a ratio of rates, from the least to the greatest that both intervals allow."""
    if not base.mean > 0:
        return Spread(_NAN, count=0)
    low = rate.low / base.high if base.high > 0 else _NAN
    high = rate.high / base.low if base.low > 0 else _NAN
    return Spread(rate.mean / base.mean, low=low, high=high)


def metrics_of(run: RunSummary) -> dict[str, float]:
    """Return the metrics of a run's last evaluation."""
    return {
        name: float(value)
        for name, value in run.evals.items()
        if name not in ("step", "epoch") and isinstance(value, (int, float))
    }


def mean(values: Iterable[float]) -> float:
    """Return the mean of the measured values; NaN if no value was measured."""
    return Spread.of(list(values)).mean


def shares_of(run: RunSummary) -> dict[str, float]:
    """Return the fraction of a run's step time in each of `SHARES`.

    In a pipeline a worker is blocked by the bubble and by other communication. The measurement of
    the bubble separates the two.
    """
    share = [
        _NAN if part in run.unmeasured else value
        for part, value in zip(PARTS, run.share, strict=True)
    ]
    wait, transfer, bubble = share[_WAIT], share[_TRANSFER], _NAN
    if np.isfinite(run.bubble):
        blocked = float(np.nansum([wait, transfer]))
        wait, bubble, transfer = _NAN, run.bubble, max(blocked - run.bubble, 0.0)
    known = np.nansum([share[_DATA], share[_COMPUTE], wait, bubble, transfer])
    other = 1.0 - float(known) if np.isfinite(share[_OTHER]) else _NAN
    found = (share[_DATA], share[_COMPUTE], wait, bubble, transfer, other)
    return dict(zip(SHARES, found, strict=True))


def _mean_shares(group: Sequence[RunSummary]) -> dict[str, float]:
    each = [shares_of(run) for run in group]
    return {name: mean(one[name] for one in each) for name in SHARES}


def _means(each: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Return means over seeds; a run without a step adds nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN: the mean is NaN
        return tuple(float(value) for value in np.nanmean(np.array(each, float), axis=0))


def _memory(group: Sequence[RunSummary]) -> tuple[float, ...]:
    """Return the memory of each worker, mean over the seeds in which all were measured."""
    known = [run.memory_bytes for run in group if len(run.memory_bytes) == run.workers]
    return _means(known) if known else ()


def _common_name(group: Sequence[RunSummary]) -> str:
    """Return `base` for `base-seed0`, `base-seed1`; the name itself for a single run."""
    first = group[0]
    return first.plan_name if len(group) > 1 else first.name or first.strategy


EQUAL = 1.05
"""Throughputs whose ratio is known to be below this bound count as equal."""

LEAST_STEPS = 5
"""In shorter runs the first step, which costs more, has too much weight for a verdict."""

_SAYS = {
    "data_wait_s": "waits {} for data",
    "sync_wait_s": "waits {} for the slowest worker",
    "bubble_s": "has a bubble of {} on each worker",
    "transfer_s": "spends {} on communication",
    "other_s": "spends {} on other things",
}


def verdict_of(rows: Sequence[ComparisonRow], baseline: int) -> str:
    """Return which plan was fastest and why, in one sentence; empty for fewer than two plans.

    Args:
        baseline: Index of the row with which the others are compared.
    """
    rated = [row for row in rows if row.samples_per_s.mean > 0 and row.steps >= LEAST_STEPS]
    if len(rows) < 2:
        return ""
    if len(rated) < 2:
        return (
            "No verdict: fewer than two runs have enough measured steps to compare their "
            "throughput."
        )
    fastest = max(rated, key=lambda row: row.samples_per_s.mean)
    base = rows[baseline]
    other = base
    if fastest is base or base not in rated:
        other = max((row for row in rated if row is not fastest),
                    key=lambda row: row.samples_per_s.mean)  # fmt: skip
    ratio = fastest.samples_per_s.mean / other.samples_per_s.mean
    fast, slow = fastest.samples_per_s, other.samples_per_s
    if _within(fast, slow):
        return f"{fastest.name} and {other.name} are equally fast in these runs (within 5 %)."
    if not told_apart(fast, slow):
        return (
            f"It is not certain that {fastest.name} and {other.name} differ in speed "
            f"({fastest.name}: {_interval(fast)}; {other.name}: {_interval(slow)}). "
            "Train longer, or with more seeds."
        )
    if ratio < EQUAL:
        return (
            f"{fastest.name} ({_interval(fast)}) is faster than {other.name} "
            f"({_interval(slow)}) in these runs, but by less than 5 %."
        )
    head = f"{fastest.name} is {ratio:.1f} times as fast as {other.name} in these runs: "
    if fastest.workers > other.workers:
        return head + _gain(fastest, other)
    return head + _cost(other)


def told_apart(fast: Spread, slow: Spread) -> bool:
    """Whether the intervals of two rates do not overlap; an unknown interval overlaps all."""
    return fast.low > slow.high


def _within(fast: Spread, slow: Spread) -> bool:
    """Whether both rates are within `EQUAL`, at any place in their intervals."""
    return max(fast.high, slow.high) < EQUAL * min(fast.low, slow.low)


def _interval(rate: Spread) -> str:
    if not (math.isfinite(rate.low) and math.isfinite(rate.high)):
        return f"{_short(rate.mean)} samples/s, with too few steps for a 95 % interval"
    return f"{_short(rate.low)} to {_short(rate.high)} samples/s"


def _short(rate: float) -> str:
    """Return a rate with three digits, as in tables: `1.28k`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= scale * 0.9995:
            return f"{rate / scale:#.3g}".rstrip(".") + suffix
    return f"{rate:.3g}"


def _gain(fast: ComparisonRow, slow: ComparisonRow) -> str:
    """Return what changes in the faster plan's step, and which share of worker time it uses."""
    said = f"a step takes {milliseconds(fast.step_s)} instead of {milliseconds(slow.step_s)}"
    share = fast.shares["compute_s"]
    if not math.isfinite(share):
        return f"{said}."
    return f"{said}, and the {fast.workers} workers compute for {share * 100:.0f} % of the time."


def _cost(slow: ComparisonRow) -> str:
    """Return how long a slower plan's step computes, and its largest other part."""
    costs_s = {
        part: share * slow.step_s for part, share in slow.shares.items() if math.isfinite(share)
    }
    compute_s = costs_s.pop("compute_s", None)
    if compute_s is None:
        return f"each {slow.name} step takes {milliseconds(slow.step_s)}."
    does = f"each {slow.name} step computes for {milliseconds(compute_s)}"
    if not costs_s:
        return f"{does}."
    worst = max(costs_s, key=lambda part: costs_s[part])
    return f"{does} and {_SAYS[worst].format(milliseconds(costs_s[worst]))}."


def milliseconds(seconds: float) -> str:
    """Return `1.2 s`, `48 ms`, `2.1 ms` or `0.69 ms`, as all views write them."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    places = 0 if seconds >= 9.95e-3 or not seconds else 1 if seconds >= 0.995e-3 else 2
    return f"{seconds * 1e3:.{places}f} ms"


Kind = Literal["begins", "pays", "far", "undivided"]

FAR, NEAR = 30.0, 0.1
"""Batches more than this many times the present batch are not named: the model is too rough."""

_ERRORS = 4.0
_UNDIVIDED = 0.1
_EQUAL = 0.05
_SAME_BATCH = 0.02
ASSUMED = (
    "Workbench estimates how large the batch must be for several workers to be faster than one. "
    "The estimate assumes that the time for compute and data grows with the batch, and that the "
    "time for waiting and communication stays the same."
)


@dataclass(frozen=True)
class Payoff:
    """Where a plan and one device break even.

    Attributes:
        kind: `begins`: with a larger batch; `pays`: already with this batch; `far`: only with a
            batch more than `FAR` times as large; `undivided`: a worker computes as long for its
            share as one device for the whole batch, so these runs give no batch.
        factor: The batch at which they break even, in batches of these runs; NaN with the
            last two kinds.
        step_s: Time of one device's step with that batch.
        samples: That batch in samples.
        one_work_s, work_s: Time to compute and wait for data in a step: one device, a worker.
    """

    kind: Kind
    factor: float
    step_s: float
    samples: float
    one_work_s: float
    work_s: float


def payoff_of(one: ComparisonRow, plan: ComparisonRow) -> Payoff | None:
    """Return where a plan and a one-device run break even; None if the runs do not show it."""
    a, b = one.steady, plan.steady
    if a is None or b is None or not _comparable(one, plan):
        return None
    if not abs(a.samples - b.samples) <= _SAME_BATCH * a.samples or a.work_s <= 0:
        return None
    nan = float("nan")
    gained, cost = a.work_s - b.work_s, b.fixed_s - a.fixed_s
    error = math.hypot(a.error_s, b.error_s)
    if gained + 2 * error <= _UNDIVIDED * a.work_s:
        slower = b.step_s > a.step_s
        return Payoff("undivided", nan, nan, nan, a.work_s, b.work_s) if slower else None
    if gained < _ERRORS * error or gained <= _UNDIVIDED * a.work_s or cost <= 0:
        return None
    factor = cost / gained
    if factor > FAR:
        return Payoff("far", nan, nan, nan, a.work_s, b.work_s)
    if factor < NEAR or factor * a.samples < plan.workers:
        return None
    if abs(factor - 1) <= _EQUAL or (factor < 1) is not (_rate(plan) > _rate(one)):
        return None  # equal, or the rates do not confirm it: no sentence
    return Payoff(
        "begins" if factor > 1 else "pays", factor, factor * a.work_s + a.fixed_s,
        factor * a.samples, a.work_s, b.work_s,
    )  # fmt: skip


def sentence_of(payoff: Payoff, one: ComparisonRow, plan: ComparisonRow) -> str:
    """Return a payoff in plain words."""
    if payoff.kind == "undivided":
        return _undivided(payoff, one, plan)
    if payoff.kind == "far":
        return (
            f"{_IF_IT_GROWS} {plan.name} is faster than {one.name} only if the batch is more than "
            f"{FAR:.0f} times as large as in these runs."
        )
    return (
        f"{_IF_IT_GROWS} {plan.name} is faster than {one.name} with batches of "
        f"{_batch(payoff)}. With such a batch, a step of {one.name} takes more than about "
        f"{milliseconds(payoff.step_s)}."
    )


_IF_IT_GROWS = "If the compute time grows in proportion to the batch,"
"""The sentences hold only then, which runs with one batch cannot show."""


def _undivided(payoff: Payoff, one: ComparisonRow, plan: ComparisonRow) -> str:
    measured = (
        f"With {plan.name}, each worker computes 1/{plan.workers} of the batch. In a step, "
        f"the worker spends {milliseconds(payoff.work_s)} computing and waiting for data. With "
        f"{one.name}, one worker computes the whole batch. This worker spends "
        f"{milliseconds(payoff.one_work_s)} computing and waiting for data"
    )
    same = "a worker needs almost the same time for a small batch as for a large batch."
    why = f"Perhaps {same}"
    if share_cores(one, plan):
        why = f"There are two possible reasons: the workers share CPU cores, or {same}"
    return (
        f"With a larger batch, {plan.name} may be faster than {one.name}, but these runs do not "
        f"show how large this batch must be. {measured}. So a smaller share of the "
        f"batch saves little or no time. {why} Try a larger batch."
    )


def share_cores(one: ComparisonRow, plan: ComparisonRow) -> bool:
    """Whether all workers of the plan together have at most the threads of the one device."""
    if not (one.threads and plan.threads and one.on_cpu and plan.on_cpu):
        return False
    return plan.threads * plan.workers <= max(one.threads, plan.workers)


def _batch(payoff: Payoff) -> str:
    samples = float(f"{payoff.samples:.2g}")
    return f"more than about {samples:.0f} samples ({payoff.factor:.2g}x the batch of these runs)"


def _comparable(one: ComparisonRow, plan: ComparisonRow) -> bool:
    return (
        one.workers == 1
        and plan.workers > 1
        and plan.shares_batch
        and not (one.faults or plan.faults)
        and one.framework == plan.framework
        and one.recipe == plan.recipe
    )


def _rate(row: ComparisonRow) -> float:
    return row.samples_per_s.mean
