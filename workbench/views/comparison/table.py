"""The table of several runs side by side."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...history.analysis.comparison import largest_memory, ordered
from ...history.analysis.rows import ASSUMED, SHARES, ComparisonRow, Spread
from ..table import COMPARISON, Align, Column, Table
from ..text import UNKNOWN, duration, milliseconds, number, percent, size
from ..theme import PHASE_NAMES

if TYPE_CHECKING:
    from ...history.analysis.comparison import Comparison

SHARE_NAMES = {**PHASE_NAMES, "bubble_s": "bubble"}
"""What each of `rows.SHARES` is called."""


FOLDED = frozenset({
    "framework", "steps", "95 % interval", "all steps", "data wait", "transfer", "other", "elapsed",
    "sent/step", "sent", "a worker holds",
})  # fmt: skip
"""Columns that notebooks show folded below the others: all together are wider than a page."""


@dataclass(frozen=True)
class _Shown:
    """One column: its heading, and a row's cell in words; `keys` are the figures it stands for."""

    title: str
    cell: Callable[[ComparisonRow], str]
    keys: tuple[str, ...] = ()
    align: Align = "right"


def comparison_table(
    comparison: Comparison, *, sort: str | None = None, descending: bool = True
) -> Table:
    """Return a row per plan, the verdict as title, and what is unfair about it as notes.

    Columns that no row has anything to say in are left out.

    Args:
        sort: Key of the figure to sort by (`history.fields`), or the heading of its column; by
            default rows stand in the order in which they were given.

    Raises:
        PlanError: There is no such figure.
    """
    columns = _columns(comparison)
    rows = list(comparison.rows)
    if sort is not None:
        titles = {column.title: column.keys[0] for column in columns if column.keys}
        key = titles.get(sort, sort)
        rows = ordered(rows, comparison.metrics, key, descending=descending)
    cells = [[column.cell(row) for column in columns] for row in rows]
    rates = [row.samples_per_s.mean for row in rows]
    known = [rate for rate in rates if math.isfinite(rate)]
    strong = frozenset([rates.index(max(known))]) if len(known) > 1 else frozenset[int]()
    heads = [Column(column.title, column.align) for column in columns]
    folded = frozenset(k for k, column in enumerate(columns) if column.title in FOLDED)
    return Table(heads, cells, comparison.verdict, notes(comparison), strong, COMPARISON, folded)


def notes(comparison: Comparison) -> list[str]:
    """Return what stands below the table: when distributing pays, what is unfair, what ± means."""
    found = [comparison.outlook] if comparison.outlook else []
    if any(row.payoff is not None and row.payoff.kind != "undivided" for row in comparison.rows):
        found += [ASSUMED] if comparison.outlook else []
    found += comparison.notes
    found.append(comparison.rates)
    if any(row.samples_per_s.count > 1 for row in comparison.rows):
        found.append("± is the standard deviation over seeds.")
    return [note for note in found if note]


def between(rate: Spread) -> str:
    """Return a rate's interval in words: `1.2k to 1.4k`."""
    known = math.isfinite(rate.low) and math.isfinite(rate.high)
    return f"{number(rate.low)} to {number(rate.high)}" if known else UNKNOWN


def loss(value: float | None) -> str:
    """Return a loss or metric in four significant digits; a dash where not measured."""
    if value is None or math.isnan(value):
        return UNKNOWN
    return f"{value:.4g}"


def relative_title(comparison: Comparison) -> str:
    """Return what throughput over the baseline's is called."""
    return "speed-up" if comparison.has_one_device else f"vs {comparison.baseline}"


def _columns(comparison: Comparison) -> list[_Shown]:
    rows = comparison.rows
    wanted = [
        _Shown("run", lambda row: row.name, ("run",), "left"),
        _Shown("strategy", lambda row: row.strategy, ("strategy",), "left"),
        _Shown("framework", lambda row: row.framework, ("framework",), "left"),
        _Shown("state", lambda row: row.state or UNKNOWN, ("state",), "left"),
        _Shown("workers", lambda row: str(row.workers), ("workers",)),
        _Shown("steps", lambda row: str(row.steps), ("steps",)),
        _Shown("samples/s", lambda row: number(row.samples_per_s.mean), ("samples_per_s",)),
        _Shown("95 % interval", lambda row: between(row.samples_per_s), ("samples_per_s_low",)),
        _Shown("all steps", lambda row: number(row.all_per_s), ("all_samples_per_s",)),
        _Shown(relative_title(comparison), lambda row: times(row.relative), ("relative",)),
        _Shown("efficiency", lambda row: _percent(row.efficiency), ("efficiency",)),
        _Shown("step", lambda row: milliseconds(row.step_s * 1e3), ("step_s",)),
        *(_share(part) for part in SHARES),
        _Shown("final loss", lambda row: _spread(row.final_loss, loss), ("final_loss",)),
        *(_metric(name) for name in comparison.metrics),
        _Shown("staleness", staleness, ("staleness_mean",)),
        _Shown("elapsed", lambda row: _spread(row.wall_s, duration), ("wall_s",)),
        _Shown("sent/step", lambda row: size(row.sent_step_bytes), ("sent_bytes_per_step",)),
        _Shown("sent", lambda row: size(row.sent_bytes), ("sent_bytes",)),
        _Shown("a worker holds", lambda row: size(largest_memory(row)),
               ("memory_bytes_per_worker",)),
    ]  # fmt: skip
    left_out = _left_out(rows)
    return [column for column in wanted if column.title not in left_out]


def _left_out(rows: Sequence[ComparisonRow]) -> set[str]:
    """Return the headings of columns that would tell the rows nothing."""
    left_out: set[str] = set()
    if len({row.framework for row in rows}) < 2:
        left_out.add("framework")
    if all(row.state in ("finished", "") for row in rows):
        left_out.add("state")
    if not any(math.isfinite(row.shares["bubble_s"]) for row in rows):
        left_out.add("bubble")
    if not any(row.efficiency is not None for row in rows):
        left_out.add("efficiency")
    if not any(math.isfinite(row.sent_bytes) for row in rows):
        left_out |= {"sent/step", "sent"}
    if not any(row.staleness for row in rows):
        left_out.add("staleness")
    if not any(row.memory_bytes for row in rows):
        left_out.add("a worker holds")
    return left_out


def staleness(row: ComparisonRow) -> str:
    """Return a row's staleness: its mean and its worst, in updates."""
    late = row.staleness
    return UNKNOWN if late is None else f"{late.mean:.1f}, at most {late.worst:.0f}"


def times(value: float | None) -> str:
    """Return a ratio: `1.73x`."""
    return UNKNOWN if value is None or not math.isfinite(value) else f"{value:.2f}x"


def _share(part: str) -> _Shown:
    def cell(row: ComparisonRow) -> str:
        share = row.shares[part]
        return percent(max(share, 0.0) if math.isfinite(share) else share)

    return _Shown(SHARE_NAMES[part], cell, (f"{part.removesuffix('_s')}_share",))


def _metric(name: str) -> _Shown:
    def cell(row: ComparisonRow) -> str:
        return _spread(row.evals[name], loss) if name in row.evals else UNKNOWN

    return _Shown(name, cell, (f"eval_{name}",))


def _percent(value: float | None) -> str:
    return UNKNOWN if value is None else percent(value)


def _spread(value: Spread, show: Callable[[float], str]) -> str:
    if math.isfinite(value.std):
        spread = f"{value.std:.2g}" if show is loss else show(value.std)
        return f"{show(value.mean)} ± {spread}"
    return show(value.mean)
