"""Runs over the numbers of workers as a table."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...history.analysis.rows import SHARES
from ...history.analysis.scaling.curves import efficiency, lines_of, plan_of
from ..table import COMPARISON, Align, Column, Table
from ..tables import SHARE_NAMES, between, times
from ..text import UNKNOWN, milliseconds, number, percent

if TYPE_CHECKING:
    from ...history.analysis.scaling.curves import Cost, Curve, Point, Scaling

Cell = Callable[["Curve", "Point"], str]
FOLDED = frozenset({"batch", "95 % interval", "90 % of runs", "data wait", "other", "bubble"})
"""Columns that notebooks show folded below the other columns."""


def scaling_table(scaling: Scaling) -> Table:
    """Return a row per plan and number of workers, with the verdict as title and with notes.

    Columns that are empty in every row are left out.
    """
    pairs = lines_of(scaling)
    columns = [one for one in _columns(scaling) if any(one[2](*p) != UNKNOWN for p in pairs)]
    cells = [[cell(*pair) for _, _, cell in columns] for pair in pairs]
    speeds = [point.speedup if point.measured else -math.inf for _, point in pairs]
    strong = frozenset([speeds.index(max(speeds))]) if max(speeds) > -math.inf else frozenset[int]()
    return Table(
        [Column(title, align) for title, align, _ in columns],
        cells,
        scaling.verdict,
        scaling.notes,
        strong,
        COMPARISON,
        frozenset(k for k, (title, _, _) in enumerate(columns) if title in FOLDED),
    )


def _columns(scaling: Scaling) -> list[tuple[str, Align, Cell]]:
    speed = "speed-up" if scaling.one_worker else f"speed-up relative to {scaling.least} workers"
    found: list[tuple[str, Align, Cell]] = [
        ("plan", "left", lambda curve, point: plan_of(curve, point)),
        ("workers", "right", lambda curve, point: str(point.workers)),
        ("batch", "right", lambda curve, point: _whole(point.batch)),
        ("samples/s", "right", lambda curve, point: number(point.row.samples_per_s.mean)),
        ("95 % interval", "right", lambda curve, point: between(point.row.samples_per_s)),
        (speed, "right", lambda curve, point: times(point.speedup)),
        ("from", "right", lambda curve, point: times(point.low)),
        ("to", "right", lambda curve, point: times(point.high)),
        ("efficiency", "right", lambda curve, point: percent(efficiency(curve, point)[0])),
        ("predicted", "right", lambda curve, point: _expected(curve, point)),
        ("90 % of runs", "right", lambda curve, point: _expected_between(curve, point)),
        ("step", "right", lambda curve, point: milliseconds(point.row.step_s * 1e3)),
    ]
    found += [(SHARE_NAMES[part], "right", _share(part)) for part in SHARES]
    if scaling.price is not None:
        title = "cost of an epoch" if costs_are_of_epochs(scaling) else "cost of 1M samples"
        found.append((title, "right", lambda curve, point: cost_words(point.cost)))
    if any(point.missing or point.row.state not in ("finished", "")
           for _, point in lines_of(scaling)):  # fmt: skip
        found.append(("state", "left", lambda curve, point: point.missing or point.row.state))
    return found


def _expected(curve: Curve, point: Point) -> str:
    found = curve.expected(point.workers)
    return UNKNOWN if found is None else times(found.speedup)


def _expected_between(curve: Curve, point: Point) -> str:
    found = curve.expected(point.workers)
    return UNKNOWN if found is None else f"{times(found.low)} to {times(found.high)}"


def _whole(value: float) -> str:
    return f"{value:.0f}" if math.isfinite(value) else UNKNOWN


def _share(part: str) -> Cell:
    return lambda curve, point: percent(point.row.shares.get(part, float("nan")))


def costs_are_of_epochs(scaling: Scaling) -> bool:
    """Whether all costs are for an epoch; otherwise they are for a million samples."""
    costs = [point.cost for curve in scaling.curves for point in curve.points]
    return all(cost.is_epoch for cost in costs if cost is not None)


def cost_words(cost: Cost | None) -> str:
    """Return a cost with three digits."""
    if cost is None or not math.isfinite(cost.price):
        return UNKNOWN
    return f"{cost.price:.3g}"
