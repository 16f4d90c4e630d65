"""Several runs of one recipe side by side: the gain, the cost, and whether the test is fair.

Throughput counts the steps after warm-up (`steady`). Speed-up is throughput divided by the
throughput of `one_device` (Amdahl, 1967); efficiency is speed-up per worker.

A comparison is also plain JSON, small enough for one message to a browser: its loss curves have
fewer points and keep their extremes. The figures of a row have names. Tables sort by these names,
and files use them as headings. Notes in plain text name all facts that make a comparison unfair.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import RunError, unknown
from ...shared.events import OVER
from .rows import (
    RUN_COLORS,
    SHARES,
    ComparisonRow,
    Spread,
    payoff_of,
    row_of,
    sentence_of,
    verdict_of,
)
from .summary import LossCurve, RunSummary

if TYPE_CHECKING:
    from .rows import ComparisonRow, Spread

__all__ = ["BASELINE", "Comparison", "ComparisonRow", "NamedCurve", "Spread", "compare"]

BASELINE = "one_device"


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
        rates: The steps that rates and shares count.
        outlook: When a distributed run begins to be worth it; empty if the runs do not show it.
        metrics: Names of the metrics that any run evaluated.
        labels: For each given run its name in notes and curves. No two runs have the same label.
    """

    rows: tuple[ComparisonRow, ...]
    curves: tuple[NamedCurve, ...]
    baseline: str
    has_one_device: bool
    notes: tuple[str, ...] = ()
    verdict: str = ""
    metrics: tuple[str, ...] = field(default=())
    outlook: str = ""
    rates: str = ""
    labels: tuple[str, ...] = ()

    def to_wire(self) -> dict[str, Any]:
        """Return everything a browser needs as plain JSON; see `pack`."""
        return pack(self)


def compare(runs: Sequence[RunSummary]) -> Comparison:
    """Put runs side by side; runs that differ only in their seed share a row.

    Raises:
        RunError: No run was given.
    """
    if not runs:
        raise RunError("There is no run to compare.", allowed="one run or more", code="WB-RUN-035")
    groups = by_plan(runs)
    base = next((i for i, group in enumerate(groups) if group[0].strategy == BASELINE), None)
    index = 0 if base is None else base
    rows = _told_apart(
        [row_of(group, groups[index], has_one_device=base is not None) for group in groups]
    )
    rows = _colored(rows, index)
    labelled = _labelled(groups, rows)
    notes = fairness_notes(labelled, [row.name for row in rows])
    if base is None and len(rows) > 1:
        notes = (
            *notes,
            f"A speed-up cannot be computed, because no run has the strategy {BASELINE}. "
            f"Throughput is relative to {rows[0].name}.",
        )
    if base is not None:
        rows = tuple(
            replace(row, payoff=payoff_of(rows[base], row)) if i != base else row
            for i, row in enumerate(rows)
        )
    notes = (*notes, *_too_fast(rows, rows[index]))
    whole = not any(run.damaged for run in runs)
    return Comparison(
        rows=rows,
        curves=tuple(
            NamedCurve(run.name, i, run.curve) for i, group in enumerate(labelled) for run in group
        ),
        baseline=rows[index].name,
        has_one_device=base is not None,
        notes=notes,
        verdict=verdict_of(rows, index) if whole else _no_verdict(itertools.chain(*labelled)),
        metrics=tuple(dict.fromkeys(name for row in rows for name in row.evals)),
        outlook=_outlook(rows, base) if whole and base is not None else "",
        rates=_rates(rows),
        labels=_labels(runs, groups, labelled),
    )


def _no_verdict(runs: Iterable[RunSummary]) -> str:
    """Return why there is no verdict on runs with missing parts."""
    names = [run.name for run in runs if run.damaged]
    are = "is" if len(names) == 1 else "are"
    return (
        f"No verdict, because {', '.join(names)} {are} damaged on disk. Compare undamaged copies, "
        "or train again."
    )


def _rates(rows: Sequence[ComparisonRow]) -> str:
    """Return which steps the rates count."""
    if not any(row.samples_per_s.count for row in rows):
        return ""
    cut = [
        f"the first {row.warm_up} step{'s' * (row.warm_up != 1)} of {row.name}"
        for row in rows
        if row.warm_up
    ]
    steps = ", ".join(cut) or "none"
    return (
        "Samples per second and the parts of the step time do not include the warm-up steps "
        f'(here: {steps}). The column "all steps" shows the samples per second with these steps.'
    )


def _told_apart(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    """Number the rows with equal names: runs that were loaded may have the same name."""
    used: set[str] = set()
    return tuple(replace(row, name=_free(row.name, used)) for row in rows)


def _free(name: str, used: set[str]) -> str:
    """Return `name`, `name (2)`, ...: the first that is not in use, which then is."""
    found = name
    for count in itertools.count(2):
        if found not in used:
            break
        found = f"{name} ({count})"
    used.add(found)
    return found


def _labelled(
    groups: Sequence[Sequence[RunSummary]], rows: Sequence[ComparisonRow]
) -> list[list[RunSummary]]:
    """Return the runs under names that mean one run each: alone in a row, under the row's."""
    used = {row.name for row, group in zip(rows, groups, strict=True) if len(group) == 1}
    return [
        [replace(group[0], name=row.name)]
        if len(group) == 1
        else [replace(run, name=_free(run.name or run.strategy, used)) for run in group]
        for row, group in zip(rows, groups, strict=True)
    ]


def _labels(
    runs: Sequence[RunSummary],
    groups: Sequence[Sequence[RunSummary]],
    labelled: Sequence[Sequence[RunSummary]],
) -> tuple[str, ...]:
    """Return the labels in the order in which the runs were given; a run can be given twice."""
    found: dict[int, list[str]] = {}
    for run, named in zip(itertools.chain(*groups), itertools.chain(*labelled), strict=True):
        found.setdefault(id(run), []).append(named.name)
    return tuple(found[id(run)].pop(0) for run in runs)


def _colored(rows: Sequence[ComparisonRow], base: int) -> tuple[ComparisonRow, ...]:
    """Keep each row's colour, but give two rows the same colour only if no other is free."""
    taken: set[int] = set()
    found = []
    for index, row in enumerate(rows):
        own = 0 if index == base else index + (index < base)
        color = own if row.color is None else row.color
        color %= RUN_COLORS
        if color in taken:
            free = [n for n in (*range(1, RUN_COLORS), 0) if n not in taken]
            color = free[0] if free else color
        taken.add(color)
        found.append(replace(row, color=color))
    return tuple(found)


def _outlook(rows: Sequence[ComparisonRow], base: int) -> str:
    """Return the main payoff: of the fastest plan, otherwise of the first plan that is worth it."""
    plans = [row for row in rows if row.payoff is not None]
    if not plans:
        return ""
    fastest = max(rows, key=lambda row: np.nan_to_num(row.samples_per_s.mean))
    pays = [row for row in plans if row.payoff is not None and row.payoff.kind == "pays"]
    if pays and fastest not in pays:
        return ""  # the fastest plan's limit is not known; the limit of another plan would mislead
    chosen = fastest if pays else min(plans, key=_comes_first)
    assert chosen.payoff is not None
    return sentence_of(chosen.payoff, rows[base], chosen)


def _comes_first(row: ComparisonRow) -> tuple[int, float]:
    assert row.payoff is not None
    order = ("begins", "far", "undivided", "pays").index(row.payoff.kind)
    return order, row.payoff.factor if order == 0 else -row.samples_per_s.mean


def by_plan(runs: Sequence[RunSummary]) -> list[list[RunSummary]]:
    """Return the runs of each plan, in the order in which the plans first appeared."""
    groups: dict[Any, list[RunSummary]] = {}
    for run in runs:
        options = tuple(sorted((k, repr(v)) for k, v in run.options.items()))
        key = (run.recipe, run.framework, run.strategy, run.workers, options, run.faults,
               run.batch_size, run.total_steps or run.steps)  # fmt: skip
        group = groups.setdefault(key, [])
        if any(run.seed == known.seed for known in group):
            # The same plan and seed twice: two separate runs, not a sample over seeds.
            groups[(key, len(groups))] = [run]
        else:
            group.append(run)
    return list(groups.values())


MOST_POINTS = 300
"""Largest number of points of a curve."""

ALL_POINTS = 3600
"""Largest number of points of all curves together: about 45 bytes each."""

_LEAST_POINTS = 16
_MOST_WORKERS = 64


def pack(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON-ready data; values that were not measured are null.

    The keys: `verdict`, `outlook`, `notes`, `rates`, `baseline` (an index into `rows`),
    `has_one_device`, `metrics`; `rows`: every figure of `fields` by its key, and `names`,
    `color` (its number), `spread` (name -> the values by seed), `memory_bytes` (by worker),
    `staleness` (counts of pushes by staleness in updates), `breaks_even` (see `rows.Payoff`);
    `curves`: `run`, `row` (index), and arrays `step`, `t_s`, `samples`, `loss`; also `low` and
    `high` if a point means several steps. One set of points serves all three axes, because they
    grow together.
    """
    curves = comparison.curves
    points = min(MOST_POINTS, max(ALL_POINTS // max(len(curves), 1), _LEAST_POINTS))
    plain = records(comparison.rows, comparison.metrics)
    names = [row.name for row in comparison.rows]
    return {
        "verdict": comparison.verdict,
        "outlook": comparison.outlook,
        "notes": list(comparison.notes),
        "rates": comparison.rates,
        "baseline": names.index(comparison.baseline),
        "has_one_device": comparison.has_one_device,
        "metrics": list(comparison.metrics),
        "rows": [
            {**{key: _value(value) for key, value in one.items()}, **_more(row)}
            for one, row in zip(plain, comparison.rows, strict=True)
        ],
        "curves": [_curve(named, points) for named in curves],
    }


def _more(row: ComparisonRow) -> dict[str, Any]:
    late, breaks_even = row.staleness, row.payoff
    spread: dict[str, Spread] = {
        "samples_per_s": row.samples_per_s,
        "final_loss": row.final_loss,
        **{f"eval_{name}": value for name, value in row.evals.items()},
    }
    return {
        "names": list(row.names),
        "color": row.color,
        "spread": {name: _numbers(one.values) for name, one in spread.items()},
        "memory_bytes": _numbers(row.memory_bytes[:_MOST_WORKERS]),
        "staleness": None if late is None else list(late.counts),
        "breaks_even": None
        if breaks_even is None
        else {key: _value(value) for key, value in asdict(breaks_even).items()},
    }


def _curve(named: NamedCurve, points: int) -> dict[str, Any]:
    curve = thinned(named.curve, points)
    arrays = {name: _numbers(getattr(curve, name)) for name in ("step", "t_s", "samples", "loss")}
    if not (np.array_equal(curve.low, curve.loss) and np.array_equal(curve.high, curve.loss)):
        arrays |= {"low": _numbers(curve.low, 4), "high": _numbers(curve.high, 4)}
    return {"run": named.name, "row": named.row, **arrays}


def _numbers(values: Sequence[float] | Any, digits: int = 6) -> list[float | int | None]:
    return [_number(float(value), digits) for value in values]


def _value(value: Any) -> Any:
    return _number(value, 9) if isinstance(value, float) else value


def _number(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


Value = str | int | float | None
"""None means that a value was not measured or does not apply."""


@dataclass(frozen=True)
class Field:
    """One figure.

    Attributes:
        key: Its name, with the unit: `step_s`, `sent_bytes`, `samples_per_s`. Shares are 0..1.
        value: A row's figure as a plain number or text.
    """

    key: str
    value: Callable[[ComparisonRow], Value]


def fields(metrics: Sequence[str] = ()) -> list[Field]:
    """Return all figures in the order of export; `eval_<name>` for each metric."""
    return [
        Field("run", lambda row: row.name),
        Field("strategy", lambda row: row.strategy),
        Field("framework", lambda row: row.framework),
        Field("state", lambda row: row.state),
        Field("workers", lambda row: row.workers),
        Field("seeds", lambda row: " ".join(map(str, row.seeds))),
        Field("steps", lambda row: row.steps),
        *_spread("samples_per_s", lambda row: row.samples_per_s),
        Field("samples_per_s_low", lambda row: _known(row.samples_per_s.low)),
        Field("samples_per_s_high", lambda row: _known(row.samples_per_s.high)),
        Field("all_samples_per_s", lambda row: _known(row.all_per_s)),
        Field("warm_up_steps", lambda row: row.warm_up),
        Field("relative", lambda row: _known(row.relative)),
        Field("relative_low", lambda row: _known(row.relative_low)),
        Field("relative_high", lambda row: _known(row.relative_high)),
        Field("speedup", lambda row: _known(row.speedup)),
        Field("efficiency", lambda row: _known(row.efficiency)),
        Field("step_s", lambda row: _known(row.step_s)),
        *(Field(f"{part.removesuffix('_s')}_share", _share(part)) for part in SHARES),
        Field("sent_bytes_per_step", lambda row: _known(row.sent_step_bytes)),
        Field("sent_bytes", lambda row: _known(row.sent_bytes)),
        Field("memory_bytes_per_worker", largest_memory),
        Field("staleness_mean", lambda row: None if row.staleness is None else row.staleness.mean),
        Field("staleness_max", lambda row: None if row.staleness is None else row.staleness.worst),
        *_spread("final_loss", lambda row: row.final_loss),
        *(field for name in metrics for field in _spread(f"eval_{name}", _metric(name))),
        *_spread("wall_s", lambda row: row.wall_s),
        Field("breaks_even_batch_factor", lambda row: _known(row.payoff and row.payoff.factor)),
        Field("breaks_even_step_s", lambda row: _known(row.payoff and row.payoff.step_s)),
    ]  # fmt: skip


def records(rows: Sequence[ComparisonRow], metrics: Sequence[str]) -> list[dict[str, Value]]:
    """Return the figures of each row by key."""
    every = fields(metrics)
    return [{field.key: field.value(row) for field in every} for row in rows]


def ordered(
    rows: Sequence[ComparisonRow], metrics: Sequence[str], sort: str, *, descending: bool
) -> list[ComparisonRow]:
    """Return the rows sorted by a figure; rows without it come last, equal rows keep their order.

    Raises:
        PlanError: There is no figure with this name.
    """
    every = {field.key: field for field in fields(metrics)}
    chosen = every.get(sort) or every.get(f"eval_{sort}")
    if chosen is None:
        raise unknown("column to sort by", sort, list(every))
    held = [(chosen.value(row), row) for row in rows]
    known = [pair for pair in held if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)  # type: ignore[arg-type,return-value]
    return [row for _, row in known] + [row for value, row in held if value is None]


def largest_memory(row: ComparisonRow) -> float | None:
    """Return the bytes of the worker with the largest memory; None if not measured."""
    return max(row.memory_bytes, default=None)


def _spread(key: str, spread: Callable[[ComparisonRow], Spread]) -> list[Field]:
    return [
        Field(key, lambda row: _known(spread(row).mean)),
        Field(f"{key}_std", lambda row: _known(spread(row).std)),
    ]


def _share(part: str) -> Callable[[ComparisonRow], Value]:
    return lambda row: _known(row.shares.get(part))


def _metric(name: str) -> Callable[[ComparisonRow], Spread]:
    missing = Spread.of([])
    return lambda row: row.evals.get(name, missing)


def _known(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


def thinned(curve: LossCurve, points: int) -> LossCurve:
    """Return at most this many points: means over neighbours, and their extremes.

    A point has the position of its first step. The last point has the position of its last step, so
    that a curve ends where the run ended on all axes.
    """
    count = len(curve.loss)
    if count <= points:
        return curve
    starts = np.unique(np.linspace(0, count, points, endpoint=False, dtype=int))
    at = np.append(starts[:-1], count - 1)
    return LossCurve(
        step=curve.step[at],
        t_s=curve.t_s[at],
        samples=curve.samples[at],
        loss=np.add.reduceat(curve.loss, starts) / np.diff(np.append(starts, count)),
        low=np.minimum.reduceat(curve.low, starts),
        high=np.maximum.reduceat(curve.high, starts),
    )


def fairness_notes(groups: Sequence[Sequence[RunSummary]], names: Sequence[str]) -> tuple[str, ...]:
    """Return one sentence for each thing that differs between runs but should not.

    Args:
        groups: The runs by plan; seeds may differ within a plan, but not between plans. No two
            runs have the same name.
        names: The name of each plan's row.
    """
    plans = dict(zip(names, groups, strict=True))
    runs = [run for group in groups for run in group]
    found = []
    if len({run.recipe for run in runs if run.recipe}) > 1:
        found.append("The recipes differ: these runs trained different code.")
    if len({run.batch_size for run in runs if run.batch_size is not None}) > 1:
        listed = ", ".join(f"{name} {_batch(group[0])}" for name, group in plans.items())
        found.append(f"The batch sizes differ: {listed}.")
    if len({_steps_asked(run) for run in runs}) > 1:
        listed = ", ".join(f"{name} {_steps(group)}" for name, group in plans.items())
        found.append(f"The numbers of steps differ: {listed}.")
    found += _seeds(plans)
    found += _devices(runs)
    found += _updates(plans)
    found += _norms(plans)
    for run in runs:
        found += _single(run)
    return tuple(found)


def _batch(run: RunSummary) -> str:
    return "not known" if run.batch_size is None else str(run.batch_size)


def _steps_asked(run: RunSummary) -> int:
    return run.total_steps or run.steps


def _steps(group: Sequence[RunSummary]) -> str:
    """Return how many steps a plan was to take, and what the table counts if that differs."""
    first, asked = group[0], _steps_asked(group[0])
    counted = max(run.steps for run in group)
    if counted == asked:
        return str(asked)
    if first.first_step:
        return f"{asked} ({counted} of them in this run)"
    if not first.joined and counted > asked:
        return f"{asked} requested per worker (the fastest worker completed {counted})"
    return f"{asked} ({counted} completed)"


def _seeds(plans: Mapping[str, Sequence[RunSummary]]) -> list[str]:
    sets = {
        name: frozenset(run.seed for run in group if run.seed is not None)
        for name, group in plans.items()
    }
    known = {name: seeds for name, seeds in sets.items() if seeds}
    if len(set(known.values())) < 2:
        return []
    listed = "; ".join(
        f"{name} {', '.join(map(str, sorted(seeds)))}" for name, seeds in known.items()
    )
    return [
        "The strategies were not trained with the same seeds, so their runs can begin with "
        f"different weights: {listed}."
    ]


def _devices(runs: Sequence[RunSummary]) -> list[str]:
    kinds = {
        run.name: sorted({_kind(worker.device) for worker in run.workers_table if worker.device})
        for run in runs
    }
    known = {name: ", ".join(kind) for name, kind in kinds.items() if kind}
    if len(set(known.values())) < 2:
        return []
    listed = "; ".join(f"{name} {kind}" for name, kind in known.items())
    return [f"The devices differ: {listed}."]


def _kind(device: str) -> str:
    """Return `NVIDIA H200` for `cuda:0 NVIDIA H200`, `cpu` for `cpu`."""
    place, _, name = device.partition(" ")
    return name or place.partition(":")[0]


def _updates(plans: Mapping[str, Sequence[RunSummary]]) -> list[str]:
    """Return a note if each worker's push is one update: these updates are more and smaller."""
    alone = [
        name
        for name, (run, *_) in plans.items()
        if not run.joined and run.workers > 1 and run.shares_batch
    ]
    if not alone or len(alone) == len(plans):
        return []
    which = ", ".join(alone)
    return [
        f"In {which}, each worker updates the parameters separately, with its share of the batch. "
        "So there is one update for each share. In the other runs, there is one update for the "
        "whole batch."
    ]


def _norms(plans: Mapping[str, Sequence[RunSummary]]) -> list[str]:
    """Return why the results of runs differ although their batches are equal."""
    own = [name for name, group in plans.items() if any(run.own_norms for run in group)]
    if not own or len(plans) < 2:
        return []
    return [
        f"In {', '.join(own)}, BatchNorm normalised over each worker's share of the batch, so the "
        "result differs from the result on one device."
    ]


def _too_fast(rows: Sequence[ComparisonRow], base: ComparisonRow) -> list[str]:
    """Return a doubt about each speed-up that is larger than the number of workers."""
    if base.faults or base.strategy != BASELINE:
        return []
    return [
        f"{row.name} is {row.relative:.2g} times as fast as {base.name}, with only {row.workers} "
        "workers. Usually this means that another program used the machine during the run of "
        f"{base.name}. Repeat the comparison, for example with --seeds 3."
        for row in rows
        if row.relative > row.workers > 1 and not row.relative_low <= row.workers
    ]


def _single(run: RunSummary) -> list[str]:
    found = []
    if run.trained_before:
        found.append(f"{run.name} started with a model that an earlier run had trained.")
    if run.first_step:
        found.append(
            f"{run.name} continued an earlier run from step {run.first_step} on. The column "
            f'"steps" counts only the {run.steps} steps of {run.name}.'
        )
    if run.state != "finished":
        of = f" of {run.total_steps}" if run.total_steps else ""
        after = f"{run.state} after {run.first_step + run.steps}{of} steps"
        ended = "did not finish" if run.state in OVER else "has not ended yet"
        found.append(f"{run.name} {ended}: {after}.")
    if run.diverged:
        found.append(
            f"{run.name} diverged: its loss became NaN or infinite. A mean over several seeds does "
            "not include such a loss."
        )
    if run.damaged:
        found.append(
            f"{run.name} is damaged on disk, and only its undamaged data is compared. Damage: "
            f"{'; '.join(run.damaged)}."
        )
    if run.faults:
        found.append(f"{run.name} ran with injected faults: {', '.join(run.faults)}.")
    return found
