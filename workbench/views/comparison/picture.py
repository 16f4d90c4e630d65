"""The picture of a comparison: loss curves on top, then a row per plan in bands of panels.

The module also draws the page around them: the verdict, the keys, and all positions.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...history.analysis.comparison import Comparison, thinned
from ...history.analysis.rows import SHARES, ComparisonRow, Spread
from ..drawing import (
    LABEL_PT,
    TICK_PT,
    clipped,
    color_of,
    empty_axes,
    frame,
    line_of,
    own_style,
    spell,
    tick,
    width_in,
    wrapped,
)
from ..tables import SHARE_NAMES, comparison_table
from ..theme import INK, MUTED, PAPER
from . import panels
from .panels import SHARE_STYLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 110
_STYLE = {"hatch.linewidth": 1.0, "svg.fonttype": "none", "svg.hashsalt": "workbench"}
_SUBTITLE_PT = 7.5
_MOST_NAME_IN, _CURVES_IN, _TITLE_IN, _TICKS_IN = 1.9, 2.15, 0.34, 0.3
_LOSS_POINTS = 110
_MOST_METRICS = 3
_AXES = (("t_s", "Loss by time", "seconds"), ("samples", "by samples", "samples seen"),
         ("step", "by steps", "steps"))  # fmt: skip


def comparison_bundle(comparison: Comparison) -> dict[str, Any]:
    """Return `{"image/png": bytes, "text/plain": str}` of the same content."""
    return {
        "image/png": comparison_png(comparison, PAPER["any"]),
        "text/plain": comparison_table(comparison).text(),
    }


def comparison_png(comparison: Comparison, paper: str = PAPER["light"]) -> bytes:
    """Return the picture as PNG bytes; `paper` is its background colour."""
    return _written(comparison, "png", paper)


def comparison_svg(comparison: Comparison) -> bytes:
    """Return the picture as SVG; its words are text, so a reader can search and copy them."""
    return _written(comparison, "svg", PAPER["light"])


def draw(comparison: Comparison) -> Figure:
    """Return the picture as a figure that is in no window and in no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head = head_of(comparison)
    keys = keys_of(comparison)
    rows_in = len(comparison.rows) * (0.44 if len(comparison.rows) <= 4 else 0.37)
    bands = [_speed_band(comparison), *_small_bands(comparison)]
    band_in = _TITLE_IN + rows_in + _TICKS_IN
    legend_in = 0.1
    height_in = (
        sum(line.height_in for line in head) + KEYS_IN * (1 + keys[-1].line)
        + _TITLE_IN + _CURVES_IN + 0.48 + legend_in + len(bands) * (band_in + 0.12) + 0.15
    )  # fmt: skip
    figure = Figure(figsize=(WIDTH_IN, height_in))
    FigureCanvasAgg(figure)
    page = Page(figure, height_in)
    for line in head:
        page.skip(line.height_in)
        page.text(EDGE_IN, 0.06, line.words, size=line.size_pt, weight=line.weight)
    draw_keys(page, keys)
    _draw_curves(page, comparison)
    for index, band in enumerate(bands):
        _draw_band(page, comparison, band, rows_in)
        if index == 0:
            draw_shares_keys(page, comparison)
    return figure


# -- curves -----------------------------------------------------------------------------------


def _draw_curves(page: Page, comparison: Comparison) -> None:
    page.skip(_TITLE_IN)
    left_in, gap_in = 0.62, 0.2
    each_in = (WIDTH_IN - left_in - EDGE_IN - 2 * gap_in) / 3
    first: Axes | None = None
    for index, (field, title, unit) in enumerate(_AXES):
        axes = page.axes(left_in + index * (each_in + gap_in), each_in, _CURVES_IN)
        frame(axes, title, "both")
        _losses(axes, comparison, field)
        axes.set_xlabel(unit, fontsize=TICK_PT, color=MUTED["any"])
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter(tick)
        if first is not None:
            axes.sharey(first)
            axes.tick_params(labelleft=False)
        first = first or axes
    page.skip(_CURVES_IN + 0.48)


def _losses(axes: Axes, comparison: Comparison, field: str) -> None:
    drawn = []
    for named in comparison.curves:
        curve = thinned(named.curve, _LOSS_POINTS)
        if not np.isfinite(curve.loss).any():
            continue
        x, row = getattr(curve, field), comparison.rows[named.row]
        color, style = color_of(comparison, named.row), line_of(comparison, named.row)
        alone = len(row.names) == 1
        # Several seeds of one plan are thin lines of one colour. Plans that are equal by design
        # cover each other: the earlier lines are wider, so that they stay visible below.
        wide = 1.5 + 1.7 * (1 - (named.row + 1) / len(comparison.rows))
        marker = "o" if len(x) == 1 else None
        axes.plot(x, curve.loss, style, color=color, lw=wide if alone else 1.1, zorder=3,
                  alpha=1 if alone else 0.75, marker=marker, ms=5)  # fmt: skip
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.12, lw=0, zorder=2)
        drawn.append(curve.loss)
    values = np.concatenate(drawn) if drawn else np.empty(0)
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() / values.min() > 30:
        axes.set_yscale("log")
    elif not len(values):
        empty_axes(axes)
        axes.set_xticks([])
        axes.set_yticks([])
    axes.margins(x=0.015)


# -- bands of rows ----------------------------------------------------------------------------

Band = Sequence[tuple[panels.Draw, float]]
"""The function that draws each panel, and the panel's share of the width."""


def _speed_band(comparison: Comparison) -> Band:
    found: list[tuple[panels.Draw, float]] = [(panels.throughput, 2.1)]
    if len(comparison.rows) > 1:
        found.append((panels.relative, 1.5))
        if comparison.has_one_device:
            found.append((panels.efficiency, 1.35))
    return [*found, (panels.shares, 3.5)]


def _small_bands(comparison: Comparison) -> list[Band]:
    rows = comparison.rows
    found = [
        panels.outcome("Final loss", lambda row: row.final_loss),
        *(panels.outcome(f"Eval {name}"[:40], _metric(name))
          for name in comparison.metrics[:_MOST_METRICS]),
    ]  # fmt: skip
    if any(row.sent_step_bytes > 0 for row in rows):
        found.append(panels.sent)
    if any(row.memory_bytes for row in rows):
        found.append(panels.memory)
    if any(row.staleness for row in rows):
        found.append(panels.late)
    lines = math.ceil(len(found) / 3)
    each, extra = divmod(len(found), lines)
    bands: list[Band] = []
    for line in range(lines):
        count = each + (line < extra)
        bands.append([(draw, 1.0) for draw in found[:count]])
        found = found[count:]
    return bands


def _metric(name: str) -> Any:
    missing = Spread.of([])
    return lambda row: row.evals.get(name, missing)


def _draw_band(page: Page, comparison: Comparison, band: Band, rows_in: float) -> None:
    page.skip(_TITLE_IN)
    gutter_in = _names_in(comparison)
    _draw_names(page, comparison, gutter_in, rows_in)
    after_in = 0.68 if band[-1][0] is panels.shares else 0.05
    gap_in = 0.26
    left_in = EDGE_IN + gutter_in + 0.12
    room_in = WIDTH_IN - left_in - EDGE_IN - after_in - gap_in * (len(band) - 1)
    whole = sum(weight for _, weight in band)
    for draw_panel, weight in band:
        width = room_in * weight / whole
        draw_panel(page.axes(left_in, width, rows_in), comparison)
        left_in += width + gap_in
    page.skip(rows_in + _TICKS_IN + 0.12)


def _names_in(comparison: Comparison) -> float:
    widest = max(
        max(width_in(row.name, NAME_PT, "bold"), width_in(_subtitle(row), _SUBTITLE_PT))
        for row in comparison.rows
    )
    return min(max(widest, 0.7), _MOST_NAME_IN)


def _draw_names(page: Page, comparison: Comparison, gutter_in: float, rows_in: float) -> None:
    row_in, top_in = rows_in / len(comparison.rows), page.down_in
    for at, row in enumerate(comparison.rows):
        page.down_in = top_in + (at + 0.5) * row_in
        name = clipped(row.name, NAME_PT, gutter_in, "bold")
        right_in = EDGE_IN + gutter_in
        page.text(right_in, 0.03, name, size=NAME_PT, weight="bold",
                  color=color_of(comparison, at), right=True)  # fmt: skip
        page.text(right_in, -0.12, _subtitle(row), size=_SUBTITLE_PT, color=MUTED["any"],
                  right=True)  # fmt: skip
    page.down_in = top_in


def _subtitle(row: ComparisonRow) -> str:
    parts = [f"{row.workers} worker" + "s" * (row.workers != 1)]
    if len(row.names) > 1:
        parts.append(f"{len(row.names)} seeds")
    if row.state not in ("finished", ""):
        parts = [parts[0], row.state]
    return clipped(" · ".join(parts), _SUBTITLE_PT, _MOST_NAME_IN)


def _written(comparison: Comparison, form: str, paper: str) -> bytes:
    buffer = io.BytesIO()
    with own_style(_STYLE):
        metadata = {"Date": None} if form == "svg" else None
        figure = draw(comparison)
        if form != "svg":  # a browser finds more fonts than matplotlib
            spell(figure)
        figure.savefig(buffer, format=form, dpi=_DPI, metadata=metadata, facecolor=paper)
    return buffer.getvalue()


WIDTH_IN, EDGE_IN, KEYS_IN = 11.0, 0.22, 0.24
NAME_PT = 9.0

_VERDICT_PT, _OUTLOOK_PT = 11.5, 9.5
_MOST_KEY_IN = 3.2


@dataclass
class Page:
    """Places items in inches from the left and down from the top, so that they do not overlap."""

    figure: Figure
    height_in: float
    down_in: float = 0.1

    def skip(self, inches: float) -> None:
        """Move the position down."""
        self.down_in += inches

    def text(
        self, left_in: float, up_in: float, words: str, *, size: float = LABEL_PT,
        weight: str = "normal", color: str = INK["any"], right: bool = False,
    ) -> None:  # fmt: skip
        """Write a line that is `up_in` above the page's position."""
        self.figure.text(
            left_in / WIDTH_IN, 1 - (self.down_in - up_in) / self.height_in, words,
            fontsize=size, fontweight=weight, color=color, ha="right" if right else "left",
            va="baseline", parse_math=False,
        )  # fmt: skip

    def axes(self, left_in: float, width_in: float, height_in: float) -> Axes:
        """Return axes whose top is at the page's position."""
        bottom = 1 - (self.down_in + height_in) / self.height_in
        return self.figure.add_axes(
            (left_in / WIDTH_IN, bottom, width_in / WIDTH_IN, height_in / self.height_in)
        )


@dataclass(frozen=True)
class Line:
    """One line of the head."""

    words: str
    size_pt: float
    weight: str
    height_in: float


@dataclass(frozen=True)
class Key:
    """One entry of the legend: its distance from the left, and its line."""

    left_in: float
    line: int
    words: str
    color: str
    style: str


def head_of(comparison: Comparison) -> list[Line]:
    """Return the verdict, and when distributing is worth it, in lines that fit."""
    room_in = WIDTH_IN - 2 * EDGE_IN
    bold = wrapped(comparison.verdict, _VERDICT_PT, room_in, "bold")
    more = wrapped(comparison.outlook, _OUTLOOK_PT, room_in)
    return [
        *(Line(words, _VERDICT_PT, "bold", 0.23) for words in bold),
        *(Line(words, _OUTLOOK_PT, "normal", 0.2) for words in more),
    ]


def keys_of(comparison: Comparison) -> list[Key]:
    """Return a key for each row, flowed into lines."""
    placed: list[Key] = []
    left, line, room_in = 0.0, 0, WIDTH_IN - 2 * EDGE_IN
    for at, row in enumerate(comparison.rows):
        words = clipped(row.name, NAME_PT, _MOST_KEY_IN)
        need = 0.36 + width_in(words, NAME_PT) + 0.3
        if left and left + need > room_in:
            left, line = 0.0, line + 1
        placed.append(Key(left, line, words, color_of(comparison, at), line_of(comparison, at)))
        left += need
    return placed


def draw_keys(page: Page, keys: Sequence[Key]) -> None:
    """Draw the keys and move the position below them."""
    from matplotlib.lines import Line2D

    top_in = page.down_in
    for key in keys:
        page.down_in = top_in + KEYS_IN * (key.line + 1)
        y = 1 - (page.down_in - 0.1) / page.height_in
        left_in = EDGE_IN + key.left_in
        x = [left_in / WIDTH_IN, (left_in + 0.28) / WIDTH_IN]
        page.figure.add_artist(Line2D(x, [y, y], color=key.color, lw=2.4, ls=key.style))
        page.text(left_in + 0.36, 0.06, key.words, size=NAME_PT)


def draw_shares_keys(page: Page, comparison: Comparison) -> None:
    """Draw the legend of the shares below their panel, flush right."""
    from matplotlib.patches import Rectangle

    used = [
        part for part in SHARES
        if any(np.nan_to_num(row.shares[part]) > 0 for row in comparison.rows)
    ]  # fmt: skip
    widths = [0.22 + width_in(SHARE_NAMES[part], LABEL_PT) + 0.2 for part in used]
    left_in = WIDTH_IN - EDGE_IN - sum(widths)
    for part, width in zip(used, widths, strict=True):
        color, hatch = SHARE_STYLES[part]
        page.figure.add_artist(
            Rectangle(
                (left_in / WIDTH_IN, 1 - page.down_in / page.height_in),
                0.16 / WIDTH_IN, 0.13 / page.height_in, lw=0, hatch=hatch or None,
                facecolor=(color, 0.22) if hatch else color, edgecolor=color if hatch else "none",
            )
        )  # fmt: skip
        page.text(left_in + 0.22, 0.015, SHARE_NAMES[part])
        left_in += width
    page.skip(0.1)
