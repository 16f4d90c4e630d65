"""Several runs of one recipe side by side: what was gained, what it cost, is it a fair test.

Throughput is that of the steps after warm-up (`steady`). Speed-up is throughput over that of
`one_device` (Amdahl, 1967); efficiency is speed-up per worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ..errors import RunError
from . import fairness, payoff, wire
from .rows import RUN_COLORS, ComparisonRow, Spread, row_of
from .summary import LossCurve, RunSummary
from .verdict import verdict_of

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
        rates: Which steps rates and shares are of.
        outlook: When distributing begins to pay; empty where the runs do not say.
        metrics: Names of the metrics that any run evaluated.
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

    def to_wire(self) -> dict[str, Any]:
        """Return everything a browser needs as plain JSON; see `wire.pack`."""
        return wire.pack(self)


def compare(runs: Sequence[RunSummary]) -> Comparison:
    """Put runs side by side; those that differ in their seed alone share a row.

    Raises:
        RunError: No run was given.
    """
    if not runs:
        raise RunError("There is nothing to compare.", allowed="one run or more", code="WB-RUN-035")
    groups = _by_plan(runs)
    base = next((i for i, group in enumerate(groups) if group[0].strategy == BASELINE), None)
    index = 0 if base is None else base
    rows = _told_apart(
        [row_of(group, groups[index], has_one_device=base is not None) for group in groups]
    )
    rows = _colored(rows, index)
    notes = fairness.notes(groups)
    if base is None and len(rows) > 1:
        notes = (
            *notes,
            f"No {BASELINE} run is among them, so there is no speed-up; "
            f"throughput is relative to {rows[0].name}.",
        )
    if base is not None:
        rows = tuple(
            replace(row, payoff=payoff.payoff_of(rows[base], row)) if i != base else row
            for i, row in enumerate(rows)
        )
    whole = not any(run.damaged for run in runs)
    return Comparison(
        rows=rows,
        curves=tuple(
            NamedCurve(run.name, i, run.curve) for i, group in enumerate(groups) for run in group
        ),
        baseline=rows[index].name,
        has_one_device=base is not None,
        notes=notes,
        verdict=verdict_of(rows, index) if whole else _no_verdict(runs),
        metrics=tuple(dict.fromkeys(name for row in rows for name in row.evals)),
        outlook=_outlook(rows, base) if whole and base is not None else "",
        rates=_rates(rows),
    )


def _no_verdict(runs: Sequence[RunSummary]) -> str:
    """Say why nothing is concluded from runs of which a part is missing."""
    names = ", ".join(run.name for run in runs if run.damaged)
    return f"No verdict: {names} is damaged on disk; compare whole copies, or train again."


def _rates(rows: Sequence[ComparisonRow]) -> str:
    """Return which steps the rates are of."""
    if not any(row.samples_per_s.count for row in rows):
        return ""
    cut = [f"{row.name} {row.warm_up}" for row in rows if row.warm_up]
    out = f" (left out: the first steps of {', '.join(cut)})" if cut else " (none was seen)"
    return (
        f'Rates and shares are those after warm-up{out}; "all steps" is samples per second with '
        "every step."
    )


def _told_apart(rows: Sequence[ComparisonRow]) -> tuple[ComparisonRow, ...]:
    """Number the rows whose name another row has: runs that were loaded may bring the same."""
    used: dict[str, int] = {}
    found = []
    for row in rows:
        used[row.name] = count = used.get(row.name, 0) + 1
        found.append(replace(row, name=f"{row.name} ({count})") if count > 1 else row)
    return tuple(found)


def _colored(rows: Sequence[ComparisonRow], base: int) -> tuple[ComparisonRow, ...]:
    """Keep each row's colour, but give no two rows the same while there are others."""
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
    """Return the payoff that matters most: of the fastest plan, else of the first to pay."""
    plans = [row for row in rows if row.payoff is not None]
    if not plans:
        return ""
    fastest = max(rows, key=lambda row: np.nan_to_num(row.samples_per_s.mean))
    pays = [row for row in plans if row.payoff is not None and row.payoff.kind == "pays"]
    if pays and fastest not in pays:
        return ""  # the fastest plan's limit is not known, another one's would mislead
    chosen = fastest if pays else min(plans, key=_comes_first)
    assert chosen.payoff is not None
    return payoff.sentence_of(chosen.payoff, rows[base], chosen)


def _comes_first(row: ComparisonRow) -> tuple[int, float]:
    assert row.payoff is not None
    order = ("begins", "far", "undivided", "pays").index(row.payoff.kind)
    return order, row.payoff.factor if order == 0 else -row.samples_per_s.mean


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
