"""The panels of a comparison's picture: one row per plan, one figure per panel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...history.analysis.comparison import Comparison, largest_memory
from ...history.analysis.rows import SHARES, ComparisonRow, Spread
from ..drawing import (
    BAR,
    LABEL_PT,
    TICK_PT,
    clipped,
    color_of,
    draw_percent,
    frame,
    panel_in,
    row_axis,
    tick,
    ticks_alike,
)
from ..drawing import width_in as words_in
from ..tables import loss, staleness, times
from ..text import milliseconds, number, percent, size
from ..theme import GRID, HATCHED, INK, MUTED, PAPER, PHASE_COLORS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", Comparison], None]

SHARE_STYLES = {
    part: (PHASE_COLORS[HATCHED if part == "bubble_s" else part], hatch)
    for part, hatch in zip(SHARES, ("", "", "//////", "xxxxx", "", ""), strict=True)
}
"""Colour and hatch of each of `rows.SHARES`: waiting is hatched."""

_LABELLED_IN, _WIDE_IN = 0.4, 3.2
_GAP_IN = 6 / 72
"""Distance between the end of a bar and its number."""
_APART = 0.05
"""Difference to the rate after warm-up from which on the rate of all steps is drawn."""
_MOST_BINS = 33
_LEAST_SPAN = 0.02
"""Relative difference below which final losses count as nearly equal: ticks have four digits."""


def throughput(axes: Axes, comparison: Comparison) -> None:
    """Draw samples per second with their 95 % interval; a ring is the rate of all steps."""
    frame(axes, "Samples per second")
    rates = [row.samples_per_s for row in comparison.rows]
    words = [number(rate.mean) if rate.count else "not measured" for rate in rates]
    ends = [(rate.low, rate.high) for rate in rates]
    _bars(axes, comparison, [rate.mean for rate in rates], words, ends)
    apart = [
        (row.all_per_s, at) for at, row in enumerate(comparison.rows)
        if abs(row.all_per_s - row.samples_per_s.mean) > _APART * row.samples_per_s.mean
    ]  # fmt: skip
    if apart:
        axes.plot(*zip(*apart, strict=True), "o", ms=5, color=PAPER["light"], mec=INK["light"],
                  mew=1.1, zorder=6)  # fmt: skip
        axes.set_xlabel("circle: rate, warm-up included", fontsize=TICK_PT, color=MUTED["any"])
    axes.xaxis.set_major_formatter(tick)


def relative(axes: Axes, comparison: Comparison) -> None:
    """Draw throughput divided by the baseline's; the dashed line is the baseline."""
    frame(axes, "Speed-up" if comparison.has_one_device else "Relative speed")
    values = [row.relative for row in comparison.rows]
    ends = [(row.relative_low, row.relative_high) for row in comparison.rows]
    words = [times(value) for value in values]
    _bars(axes, comparison, values, words, ends)
    per_in = axes.get_xlim()[1] / panel_in(axes)
    for at, (value, (_, high), text) in enumerate(zip(values, ends, words, strict=True)):
        begin = np.nanmax([value, high, 0.0]) + _GAP_IN * per_in
        if (
            not begin < 1 < begin + words_in(text, LABEL_PT) * per_in
        ):  # the line would cross a number
            axes.plot(
                [1, 1], [at - 0.5, at + 0.5], color=INK["any"], lw=1, ls=(0, (3, 2)), zorder=2
            )
    if not comparison.has_one_device:
        name = clipped(comparison.baseline, TICK_PT, panel_in(axes) - 0.3)
        axes.set_xlabel(f"1 = {name}", fontsize=TICK_PT, color=MUTED["any"], parse_math=False)


def efficiency(axes: Axes, comparison: Comparison) -> None:
    """Draw speed-up per worker, on tracks that end at 100 %."""
    frame(axes, "Efficiency")
    values = [_nan(row.efficiency) for row in comparison.rows]
    at = [index for index, value in enumerate(values) if math.isfinite(value)]
    axes.barh(at, [1.0] * len(at), height=BAR, color=GRID["any"], zorder=1)
    _bars(axes, comparison, values, [percent(value) for value in values], least=1.0)
    axes.set_xticks([0, 1.0], ["0", "100 %"])


def shares(axes: Axes, comparison: Comparison) -> None:
    """Draw the parts of a step's time, and how long the step takes."""
    frame(axes, "Where a step's time goes")
    row_axis(axes, comparison)
    axes.set_xlim(0, 1)
    room_in = panel_in(axes)
    for at, row in enumerate(comparison.rows):
        left = 0.0
        for part in SHARES:
            share = min(max(np.nan_to_num(row.shares[part]), 0.0), 1 - left)
            color, hatch = SHARE_STYLES[part]
            axes.barh(
                at, share, left=left, height=BAR, lw=0, hatch=hatch or None,
                color=(color, 0.22) if hatch else color, edgecolor=color if hatch else "none",
            )  # fmt: skip
            if share * room_in >= _LABELLED_IN:
                draw_percent(axes, left + share / 2, at, share, HATCHED if hatch else part)
            left += share
        words = milliseconds(row.step_s * 1e3) if left else "not measured"
        axes.annotate(
            words, (1.0 if left else 0.0, at), xytext=(6, 0), va="center",
            textcoords="offset points", fontsize=LABEL_PT, color=INK["any"],
        )  # fmt: skip
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0], ["0", "25 %", "50 %", "75 %", "100 %"])


def sent(axes: Axes, comparison: Comparison) -> None:
    """Draw the bytes that all workers together send in a step."""
    frame(axes, "Bytes sent: per step · whole run")
    values = [row.sent_step_bytes for row in comparison.rows]
    words = [
        f"{size(row.sent_step_bytes)} · {size(row.sent_bytes)}"
        if math.isfinite(row.sent_step_bytes)
        else "not measured"
        for row in comparison.rows
    ]
    _bars(axes, comparison, values, words)
    _size_ticks(axes, values)


def memory(axes: Axes, comparison: Comparison) -> None:
    """Draw the memory of the worker with the most; dots are the single workers."""
    wide = panel_in(axes) > _WIDE_IN
    frame(
        axes, "Memory of a worker (model, gradients, optimizer)" if wide else "Memory of a worker"
    )
    values = [_nan(largest_memory(row)) for row in comparison.rows]
    words = [size(v) if math.isfinite(v) else "not measured" for v in values]
    _bars(axes, comparison, values, words)
    for at, row in enumerate(comparison.rows):
        if len({round(held) for held in row.memory_bytes}) > 1:
            axes.plot(row.memory_bytes, [at] * len(row.memory_bytes), "o", ms=4.5, zorder=5,
                      color=PAPER["light"], mec=INK["light"], mew=0.9)  # fmt: skip
    _size_ticks(axes, values)


def late(axes: Axes, comparison: Comparison) -> None:
    """Draw a histogram of staleness in each row that has staleness."""
    frame(axes, "Staleness of pushes, in updates")
    row_axis(axes, comparison)
    known = [row.staleness.shares for row in comparison.rows if row.staleness is not None]
    longest = max(map(len, known), default=1)
    width = -(-longest // _MOST_BINS)
    words = [staleness(row) for row in comparison.rows]
    column_in = max(words_in(text, LABEL_PT) for text in words) + 0.12
    room = 1 - column_in / panel_in(axes)
    axes.set_xlim(-0.6 * width, longest / max(room, 0.3))
    for at, (row, text) in enumerate(zip(comparison.rows, words, strict=True)):
        axes.text(1, at, text, transform=axes.get_yaxis_transform(), ha="right", va="center",
                  fontsize=LABEL_PT, color=INK["any"])  # fmt: skip
        if row.staleness is None:
            continue
        found = row.staleness.shares
        bins = [sum(found[i : i + width]) for i in range(0, len(found), width)]
        heights = np.array(bins) / max(bins) * 0.8
        axes.bar(np.arange(len(bins)) * width + (width - 1) / 2, -heights, bottom=at + 0.4,
                 width=0.86 * width, color=color_of(comparison, at))  # fmt: skip
    axes.set_xticks([x for x in axes.get_xticks() if 0 <= x < longest and x % 1 == 0])


def outcome(title: str, pick: Callable[[ComparisonRow], Spread]) -> Draw:
    """Return a function that draws a loss or metric: seeds are dots, mean and spread a bar."""

    def draw(axes: Axes, comparison: Comparison) -> None:
        frame(axes, title)
        row_axis(axes, comparison)
        spreads = [pick(row) for row in comparison.rows]
        words = [_pm(one, loss) for one in spreads]
        _outcome_axis(axes, spreads, words)
        for at, (one, text) in enumerate(zip(spreads, words, strict=True)):
            color = color_of(comparison, at)
            axes.text(1, at, text, transform=axes.get_yaxis_transform(), ha="right", va="center",
                      fontsize=LABEL_PT, color=INK["any"])  # fmt: skip
            if one.count > 1:
                axes.errorbar(one.mean, at, xerr=one.std, color=color, lw=1.6, capsize=3, zorder=3)
                axes.plot(one.values, [at] * one.count, "o", ms=3.5, color=color, alpha=0.45, mew=0)
            if one.count:
                axes.plot(one.mean, at, "o", ms=7, color=color, mec=PAPER["any"], zorder=4)

    return draw


def _outcome_axis(axes: Axes, spreads: Sequence[Spread], words: Sequence[str]) -> None:
    ends = [
        one.mean + sign * np.nan_to_num(one.std) for one in spreads if one.count for sign in (-1, 1)
    ] + [value for one in spreads for value in one.values]
    if not ends:
        axes.set_xlim(0, 1)
        axes.set_xticks([])
        return
    low, high = min(ends), max(ends)
    # Values that are equal in four digits must not look far apart.
    least = _LEAST_SPAN * max(abs(low), abs(high)) or 1.0
    if high - low < least:
        middle = (low + high) / 2
        low, high = middle - least / 2, middle + least / 2
    span = high - low
    room = 1 - (max(words_in(text, LABEL_PT) for text in words) + 0.2) / panel_in(axes)
    low, high = low - 0.12 * span, high + 0.12 * span
    axes.set_xlim(low, low + (high - low) / max(room, 0.25))
    axes.locator_params(axis="x", nbins=6)
    ticks_alike(axes, [value for value in axes.get_xticks().tolist() if low <= value <= high])


def _bars(
    axes: Axes,
    comparison: Comparison,
    values: Sequence[float],
    words: Sequence[str],
    ends: Sequence[tuple[float, float]] = (),
    *,
    least: float = 0.0,
) -> None:
    """Draw a bar per row with words at its end, and leave room for these words.

    Args:
        ends: The least and the greatest possible value of each row; NaN where not known.
        least: The value that the axis reaches at least.
    """
    row_axis(axes, comparison)
    known = np.nan_to_num(np.array(values, float))
    spans = np.array(ends or [(np.nan, np.nan)] * len(known), float).T
    low, high = np.where(np.isfinite(spans), spans, known)
    axes.barh(
        np.arange(len(known)), known, height=BAR, zorder=3,
        color=[color_of(comparison, at) for at in range(len(known))],
    )  # fmt: skip
    has = np.flatnonzero(high > low)
    if len(has):
        errors = np.maximum([known[has] - low[has], high[has] - known[has]], 0.0)
        for ink, wide in ((PAPER["light"], 3.0), (INK["light"], 1.2)):  # visible on any background
            axes.errorbar(known[has], has, xerr=errors, fmt="none", ecolor=ink, capsize=3,
                          zorder=5, lw=wide, capthick=wide)  # fmt: skip
    tracks = np.maximum(high, [least if math.isfinite(value) else 0.0 for value in values])
    top = _top(tracks, words, panel_in(axes))
    axes.set_xlim(0, top)
    for at, (end, text) in enumerate(zip(tracks, words, strict=True)):
        axes.annotate(
            text, (end, at), xytext=(6, 0), textcoords="offset points", va="center", zorder=6,
            fontsize=LABEL_PT, color=INK["any"],
            bbox={"facecolor": PAPER["any"], "edgecolor": "none", "pad": 1.2},
        )  # fmt: skip
    axes.locator_params(axis="x", nbins=4)
    reached = float(tracks.max(initial=0.0))
    axes.set_xticks([value for value in axes.get_xticks() if 0 <= value <= reached])
    axes.xaxis.set_major_formatter(tick)


def _top(ends: np.ndarray, words: Sequence[str], room_in: float) -> float:
    """Return where an axis must end for all words to fit behind their bars."""
    needed = [
        end / max(1 - (words_in(text, LABEL_PT) + 0.12) / room_in, 0.2)
        for end, text in zip(ends, words, strict=True)
    ]
    return max(needed, default=0.0) or 1.0


def _size_ticks(axes: Axes, values: Sequence[float]) -> None:
    top = max((value for value in values if math.isfinite(value)), default=0.0)
    ticks = [0.0, top / 2, top] if top else [0.0]
    axes.set_xticks(ticks, ["0", *(size(value) for value in ticks[1:])])
    axes.get_xticklabels()[0].set_horizontalalignment("left")


def _pm(value: Spread, show: Callable[[float], str]) -> str:
    if not value.count:
        return "not measured"
    if not math.isfinite(value.std):
        return show(value.mean)
    spread = f"{value.std:.2g}" if show is loss else show(value.std)
    return f"{show(value.mean)} ± {spread}"


def _nan(value: float | None) -> float:
    return float("nan") if value is None else value
