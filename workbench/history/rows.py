"""The rows of a comparison: one plan each, with mean and spread over its seeds."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ..metrics import PARTS
from .payoff import Payoff
from .staleness import Staleness
from .steady import Steady, mean_of
from .summary import RunSummary

SHARES = ("data_wait_s", "compute_s", "sync_wait_s", "bubble_s", "transfer_s", "other_s")
"""What a comparison divides step time into; pipelines have a bubble in the place of sync wait."""

RUN_COLORS = 8
"""Colours of runs; number 0 is one device's (`views.theme.run_color`)."""

_NAN = float("nan")
_DATA, _COMPUTE, _WAIT, _TRANSFER, _OTHER = range(len(PARTS))


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds (NaN for a single one).

    Attributes:
        count: How many seeds were measured.
        values: What was measured for each.
        low, high: Ends of the interval that holds the mean with 95 %; NaN where not known.
    """

    mean: float
    std: float = _NAN
    count: int = 1
    values: tuple[float, ...] = ()
    low: float = _NAN
    high: float = _NAN

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Summarise values; those that are not finite were not measured."""
        known = np.array([v for v in values if np.isfinite(v)], float)
        if not len(known):
            return Spread(_NAN, count=0)
        std = float(known.std(ddof=1)) if len(known) > 1 else _NAN
        return Spread(float(known.mean()), std, len(known), tuple(known.tolist()))

    @staticmethod
    def of_rates(runs: Sequence[RunSummary]) -> Spread:
        """Summarise the rates of one plan: the interval is that of the steps, or of the seeds.

        Of both the wider one is taken. Seeds count twice the standard error of their mean.
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
        states: How each of them ended: finished, stopped, failed.
        samples_per_s: Throughput after warm-up, with its interval.
        all_per_s: Throughput over all steps, the first ones included.
        warm_up: Steps left out at the beginning, of the seed in which they were most.
        speedup: Throughput over `one_device`'s; None where the comparison has no such run.
        relative: Throughput over the baseline's, whichever it is.
        relative_low, relative_high: The least and the greatest that both intervals allow.
        efficiency: `speedup / workers`; None with `speedup`.
        parts_s: (5,) mean seconds per step in each of `metrics.PARTS`; 0 where not measured.
        share: (5,) fractions of step time in each of `metrics.PARTS`; 0 where not measured.
        unmeasured: Names of the parts that no run of the row measured.
        shares: Fraction of step time in each of `SHARES`; NaN for what was not measured or does
            not apply. What is known adds up to 1.
        evals: Metric -> values of the last evaluations.
        sent_bytes: Bytes sent by all workers in the whole run.
        sent_step_bytes: Bytes sent by all workers in a step.
        memory_bytes: What each worker holds, mean over seeds; empty where not measured.
        staleness: Of asynchronous pushes, over all seeds; None where there are none.
        color: Number of its colour: that of its first run, or the next one where an earlier row of
            the comparison has it.
        payoff: Where this plan and `one_device` break even; None where the runs do not say.
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
    relative = Spread(1.0) if group is base and rate.mean > 0 else _over(rate, other)
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
    )


def _over(rate: Spread, base: Spread) -> Spread:
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
    """Return the mean of what was measured, NaN where nothing was."""
    return Spread.of(list(values)).mean


def shares_of(run: RunSummary) -> dict[str, float]:
    """Return the fraction of a run's step time in each of `SHARES`.

    In a pipeline a worker is blocked in the bubble, and for what else it communicates: both are
    told apart by the bubble's own measurement.
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
    """Return means over seeds; a run without a step has nothing to add."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # all NaN: the mean is NaN
        return tuple(float(value) for value in np.nanmean(np.array(each, float), axis=0))


def _memory(group: Sequence[RunSummary]) -> tuple[float, ...]:
    """Return what each worker holds, mean over the seeds in which all were measured."""
    known = [run.memory_bytes for run in group if len(run.memory_bytes) == run.workers]
    return _means(known) if known else ()


def _common_name(group: Sequence[RunSummary]) -> str:
    """Return `base` for `base-seed0`, `base-seed1`; the name itself for a single run."""
    first = group[0]
    return first.plan_name if len(group) > 1 else first.name or first.strategy
