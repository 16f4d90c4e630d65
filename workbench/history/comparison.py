"""Several runs of one recipe side by side: what was gained, what it cost, is it a fair test.

Speed-up is throughput over that of `one_device` (Amdahl, 1967); efficiency is speed-up per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import RunError
from . import fairness
from .summary import LossCurve, RunSummary
from .verdict import verdict_of

BASELINE = "one_device"


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation over seeds (NaN for a single one)."""

    mean: float
    std: float = float("nan")
    count: int = 1

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Summarise values; those that are not finite were not measured."""
        known = np.array([v for v in values if np.isfinite(v)], float)
        if not len(known):
            return Spread(float("nan"), count=0)
        std = float(known.std(ddof=1)) if len(known) > 1 else float("nan")
        return Spread(float(known.mean()), std, len(known))


@dataclass(frozen=True)
class ComparisonRow:
    """One plan: a run, or the runs of one plan under several seeds.

    Attributes:
        names: Names of the runs in this row.
        speedup: Throughput over `one_device`'s; None where the comparison has no such run.
        relative: Throughput over the baseline's, whichever it is.
        efficiency: `speedup / workers`; None with `speedup`.
        parts_s: (5,) mean seconds per step in each of `metrics.PARTS`.
        share: (5,) fractions of step time in each of `metrics.PARTS`.
        evals: Metric -> values of the last evaluations.
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


@dataclass(frozen=True)
class NamedCurve:
    """The loss curve of one run; runs of one row share its index (and so its colour)."""

    name: str
    row: int
    curve: LossCurve


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes:
        rows: In the order in which the plans were first given.
        baseline: Name of the row that `relative` refers to.
        has_one_device: Whether that row is a one-device run, so that speed-ups exist.
        notes: What makes the comparison unfair or incomplete; empty for a fair one.
        verdict: One sentence from the measurements.
    """

    rows: tuple[ComparisonRow, ...]
    curves: tuple[NamedCurve, ...]
    baseline: str
    has_one_device: bool
    notes: tuple[str, ...] = ()
    verdict: str = ""
    metrics: tuple[str, ...] = field(default=())


def compare(runs: Sequence[RunSummary]) -> Comparison:
    """Put runs side by side; those that differ in their seed alone share a row.

    Raises:
        RunError: No run was given.
    """
    if not runs:
        raise RunError("There is nothing to compare.", allowed="one run or more")
    groups = _by_plan(runs)
    base = next((i for i, group in enumerate(groups) if group[0].strategy == BASELINE), None)
    index = 0 if base is None else base
    rate = Spread.of([run.samples_per_s for run in groups[index]]).mean
    rows = tuple(_row(group, rate, base is not None) for group in groups)
    notes = fairness.notes(groups)
    if base is None and len(rows) > 1:
        notes = (
            *notes,
            f"No {BASELINE} run is among them, so there is no speed-up; "
            f"throughput is relative to {rows[0].name}.",
        )
    return Comparison(
        rows=rows,
        curves=tuple(
            NamedCurve(run.name, i, run.curve) for i, group in enumerate(groups) for run in group
        ),
        baseline=rows[index].name,
        has_one_device=base is not None,
        notes=notes,
        verdict=verdict_of(rows, index),
        metrics=tuple(dict.fromkeys(name for row in rows for name in row.evals)),
    )


def _by_plan(runs: Sequence[RunSummary]) -> list[list[RunSummary]]:
    groups: dict[Any, list[RunSummary]] = {}
    for run in runs:
        options = tuple(sorted((k, repr(v)) for k, v in run.options.items()))
        key = (run.recipe, run.framework, run.strategy, run.workers, options, run.faults,
               run.batch_size, run.total_steps or run.steps)  # fmt: skip
        group = groups.setdefault(key, [])
        if any(run.seed == known.seed for known in group):
            # The same plan and seed twice: two runs to be told apart, not a sample over seeds.
            groups[(key, len(groups))] = [run]
        else:
            group.append(run)
    return list(groups.values())


def _row(group: list[RunSummary], base_rate: float, has_one_device: bool) -> ComparisonRow:
    first, rate = group[0], Spread.of([run.samples_per_s for run in group])
    relative = rate.mean / base_rate if base_rate > 0 else float("nan")
    names = dict.fromkeys(name for run in group for name in _metrics(run))
    return ComparisonRow(
        name=_common_name(group),
        names=tuple(run.name for run in group),
        strategy=first.strategy,
        framework=first.framework,
        workers=first.workers,
        steps=first.steps,
        samples_per_s=rate,
        relative=relative,
        speedup=relative if has_one_device else None,
        efficiency=relative / first.workers if has_one_device else None,
        step_s=float(np.mean([run.step_s for run in group])),
        parts_s=tuple(np.mean([run.parts_s for run in group], axis=0).tolist()),
        share=tuple(np.mean([run.share for run in group], axis=0).tolist()),
        unmeasured=first.unmeasured,
        final_loss=Spread.of([run.final_loss for run in group]),
        evals={
            name: Spread.of([_metrics(run).get(name, float("nan")) for run in group])
            for name in names
        },
        wall_s=Spread.of([run.wall_s for run in group]),
        sent_bytes=Spread.of([run.sent_bytes for run in group]).mean,
        seeds=tuple(run.seed for run in group if run.seed is not None),
    )


def _metrics(run: RunSummary) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in run.evals.items()
        if name not in ("step", "epoch") and isinstance(value, (int, float))
    }


def _common_name(group: list[RunSummary]) -> str:
    """Return `base` for `base-seed0`, `base-seed1`; the name itself for a single run."""
    first = group[0]
    return first.plan_name if len(group) > 1 else first.name or first.strategy
