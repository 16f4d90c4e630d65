"""The picture of scaling: speed-up and efficiency over workers, a step's time, and its price.

Dots are measured values, with their intervals. The dashed grey line is ideal. A dotted line is the
fitted law, up to the largest measured number of workers. Rings on dashes, in a band, are predicted
from a plan's run with the fewest workers. Where only predictions exist, the background is shaded.
Without a measurement nothing else is drawn.
"""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...history.analysis.rows import SHARES
from ...history.analysis.scaling.curves import efficiency, plan_of, rows_of
from ...history.analysis.scaling.words import not_predicted
from ..comparison.panels import SHARE_STYLES
from ..drawing import (
    BAR,
    LABEL_PT,
    clipped,
    draw_percent,
    empty_axes,
    frame,
    own_style,
    spell,
    tick,
    width_in,
    wrapped,
)
from ..tables import SHARE_NAMES, times
from ..text import milliseconds, percent
from ..theme import GRID, HATCHED, INK, MUTED, PAPER
from .axes import End, color_of, label_ends, label_points, line_of, worker_axis
from .beside import draw_beside
from .table import cost_words, costs_are_of_epochs, scaling_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ...history.analysis.scaling.curves import Curve, Point, PredictedPoint, Scaling
    from .published import Published

WIDTH_IN, EDGE_IN = 9.6, 0.2
_DPI = 110
Value = Callable[["Curve", Any], tuple[float, float, float]]
_STYLE = {"hatch.linewidth": 1.0, "svg.fonttype": "none", "svg.hashsalt": "workbench"}
_VERDICT_PT, _KEY_PT = 11.5, 9.0
_LEFT_IN, _GAP_IN, _CURVES_IN, _TITLE_IN, _TICKS_IN = 0.55, 0.6, 2.75, 0.34, 0.52
_ROW_IN, _KEY_IN = 0.27, 0.24
_LABELLED_IN = 0.42
_ENDS_IN = 0.58
_MOST_ROWS = 14
_BAND, _RING_PT, _PREDICTED_IN = 0.16, 10.0, 0.62
_LOG_FROM = 8
"""The axis is logarithmic if the largest speed-up is at least this many times the least."""


def scaling_bundle(scaling: Scaling, published: Sequence[Published] = ()) -> dict[str, Any]:
    """Return `{"image/png": bytes, "text/plain": str}` of the same content."""
    return {
        "image/png": scaling_png(scaling, PAPER["any"], published),
        "text/plain": scaling_table(scaling).text(),
    }


def scaling_png(
    scaling: Scaling, paper: str = PAPER["light"], published: Sequence[Published] = ()
) -> bytes:
    """Return the picture as PNG bytes; `paper` is its background colour."""
    return _written(scaling, "png", paper, published)


def scaling_svg(scaling: Scaling, published: Sequence[Published] = ()) -> bytes:
    """Return the picture as SVG; its words are text, so a reader can search and copy them."""
    return _written(scaling, "svg", PAPER["light"], published)


def _written(scaling: Scaling, form: str, paper: str, published: Sequence[Published]) -> bytes:
    buffer = io.BytesIO()
    with own_style(_STYLE):
        metadata = {"Date": None} if form == "svg" else None
        figure = draw(scaling, published)
        if form != "svg":
            spell(figure)
        figure.savefig(buffer, format=form, dpi=_DPI, metadata=metadata, facecolor=paper)
    return buffer.getvalue()


@dataclass
class _Page:
    """Places items in inches from the left and down from the top."""

    figure: Figure
    height_in: float
    down_in: float = 0.1

    def text(self, left_in: float, words: str, size: float, **how: Any) -> None:
        """Write a line whose baseline is at the page's position."""
        self.figure.text(
            left_in / WIDTH_IN, 1 - self.down_in / self.height_in, words, fontsize=size,
            va="baseline", parse_math=False, **{"color": INK["any"], **how},
        )  # fmt: skip

    def axes(self, left_in: float, width: float, height_in: float) -> Axes:
        """Return axes whose top is at the page's position."""
        bottom = 1 - (self.down_in + height_in) / self.height_in
        return self.figure.add_axes(
            (left_in / WIDTH_IN, bottom, width / WIDTH_IN, height_in / self.height_in)
        )


def draw(scaling: Scaling, published: Sequence[Published] = ()) -> Figure:
    """Return the picture as a figure that is in no window and in no global state."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    head = wrapped(scaling.verdict, _VERDICT_PT, WIDTH_IN - 2 * EDGE_IN, "bold")
    rows = _rows(scaling)
    bars_in = max(len(rows), 1) * _ROW_IN
    keys, words = _keys(scaling), _predicted_words(scaling)
    height_in = (
        0.1 + 0.24 * len(head) + 0.08 + _KEY_IN * (len(keys) + len(words))
        + _TITLE_IN + _CURVES_IN + _TICKS_IN + _TITLE_IN + bars_in + 0.62
        + (_TITLE_IN + _CURVES_IN + _TICKS_IN + 0.1 if published else 0)
    )  # fmt: skip
    figure = Figure(figsize=(WIDTH_IN, height_in))
    FigureCanvasAgg(figure)
    page = _Page(figure, height_in)
    for line in head:
        page.down_in += 0.24
        page.text(EDGE_IN, line, _VERDICT_PT, weight="bold")
    page.down_in += 0.08
    _draw_keys(page, keys)
    _draw_predicted_key(page, scaling, words)
    page.down_in += _TITLE_IN
    width = (WIDTH_IN - _LEFT_IN - _GAP_IN - EDGE_IN - 2 * _ENDS_IN) / 2
    _draw_speedups(page.axes(_LEFT_IN, width, _CURVES_IN), scaling)
    left_in = _LEFT_IN + width + _ENDS_IN + _GAP_IN
    _draw_efficiency(page.axes(left_in, width, _CURVES_IN), scaling)
    page.down_in += _CURVES_IN + _TICKS_IN + _TITLE_IN
    _draw_steps(page, scaling, rows, bars_in)
    page.down_in += bars_in + 0.62
    if published:
        page.down_in += _TITLE_IN
        draw_beside(page.axes(_LEFT_IN, 5.2, _CURVES_IN), scaling, published)
    return figure


# -- keys -------------------------------------------------------------------------------------


def _keys(scaling: Scaling) -> list[tuple[Curve, str]]:
    return [(curve, _law_words(curve)) for curve in scaling.curves]


def _law_words(curve: Curve) -> str:
    law = curve.law
    if not law.fits:
        return law.why_not
    low, high = (f"{value * 100:.1f}" for value in (law.low, law.high))
    share = f"serial share {law.serial * 100:.1f} % ({low} to {high})"
    return f"{law.name}'s law (dotted line), {share}"


def _draw_keys(page: _Page, keys: Sequence[tuple[Curve, str]]) -> None:
    from matplotlib.lines import Line2D

    names = [clipped(curve.name, _KEY_PT, 3.2, "bold") for curve, _ in keys]
    column_in = max(width_in(name, _KEY_PT, "bold") for name in names)
    for (curve, words), name in zip(keys, names, strict=True):
        page.down_in += _KEY_IN
        y = 1 - (page.down_in - 0.045) / page.height_in
        x = [EDGE_IN / WIDTH_IN, (EDGE_IN + 0.3) / WIDTH_IN]
        page.figure.add_artist(
            Line2D(x, [y, y], color=color_of(curve), lw=2, ls=line_of(curve), marker="o", ms=5,
                   markevery=[1])
        )  # fmt: skip
        page.text(EDGE_IN + 0.42, name, _KEY_PT, weight="bold", color=color_of(curve))
        left_in = EDGE_IN + 0.42 + column_in + 0.18
        room_in = WIDTH_IN - EDGE_IN - left_in
        page.text(left_in, clipped(words, _KEY_PT, room_in), _KEY_PT, color=MUTED["any"])


def _predicted_words(scaling: Scaling) -> list[str]:
    """Return lines on the meaning of the dashes, and on why some curves have no dashes."""
    made = [one for curve in scaling.curves if (one := curve.predicted) is not None and one.points]
    room_in = WIDTH_IN - 2 * EDGE_IN - _PREDICTED_IN
    found = []
    if made:
        counts = " and ".join(str(count) for count in sorted({one.workers for one in made}))
        said = f"Circles: predicted from runs with {counts} workers."
        said += " Band: should contain 90 % of runs."
        shaded = ""
        if max(scaling.axis) > max(scaling.workers):
            shaded = " Shaded area: no run with so many workers was measured."
        found += wrapped(f"{said} Dots: measured.{shaded}", _KEY_PT, room_in)
    for why in not_predicted(scaling.curves):
        found += wrapped(why, _KEY_PT, room_in)
    return found


def _draw_predicted_key(page: _Page, scaling: Scaling, words: Sequence[str]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Rectangle

    for at, line in enumerate(words):
        page.down_in += _KEY_IN
        page.text(EDGE_IN + _PREDICTED_IN, line, _KEY_PT, color=MUTED["any"])
        if at or not any(curve.ahead for curve in scaling.curves):
            continue
        y = 1 - (page.down_in - 0.045) / page.height_in
        left, width = EDGE_IN / WIDTH_IN, 0.5 / WIDTH_IN
        page.figure.add_artist(
            Rectangle((left, y - 0.07 / page.height_in), width, 0.14 / page.height_in, lw=0,
                      facecolor=(MUTED["any"], _BAND))
        )  # fmt: skip
        color = MUTED["any"]
        for start, end in ((0.0, 0.17), (0.33, 0.5)):
            x = [left + start / WIDTH_IN, left + end / WIDTH_IN]
            page.figure.add_artist(Line2D(x, [y, y], color=color, lw=1.6, ls=(0, (3, 1.5))))
        page.figure.add_artist(
            Line2D([left + 0.25 / WIDTH_IN], [y], color=color, marker="o", ms=_RING_PT, mfc="none",
                   mew=1.5, lw=0)
        )  # fmt: skip


# -- curves -----------------------------------------------------------------------------------


def _draw_speedups(axes: Axes, scaling: Scaling) -> None:
    title = "Speed-up" if scaling.one_worker else f"Speed-up relative to {scaling.least} workers"
    frame(axes, title, "both")
    counts, least = scaling.axis, scaling.least
    worker_axis(axes, counts, doublings=_has_ahead(scaling))
    if not any(len(curve.known) for curve in scaling.curves):
        empty_axes(axes)
        return
    lowest, reached = _reach(scaling, _speedup)
    top = max(counts) / least
    # An ideal line far above all measured curves would press these curves flat.
    if reached >= _LOG_FROM * min(lowest, 1):
        shown = min(top, 2 * reached)
        axes.set_yscale("log", base=2)
        axes.minorticks_off()
        axes.set_ylim(min(lowest, 1) / 1.2, shown * 1.1)
    else:
        shown = min(top, max(1.35 * reached, 1.4))
        axes.set_ylim(0, shown * 1.06)
    _shade(axes, scaling)
    ideal = np.geomspace(min(counts), max(counts), 80)
    axes.plot(ideal, ideal / least, color=MUTED["any"], lw=1.2, ls=(0, (5, 3)), zorder=2)
    at = min(shown * least, max(counts))
    axes.annotate(
        "ideal", (at, at / least), xytext=(-4, 1), textcoords="offset points", ha="right",
        va="center", fontsize=LABEL_PT, color=MUTED["any"],
    )  # fmt: skip
    axes.axhline(1, color=MUTED["any"], lw=0.8, zorder=1)
    for curve in scaling.curves:
        _draw_predicted(axes, curve, _speedup)
        _draw_curve(axes, curve, _speedup)
        if curve.law.fits:
            first, last = curve.known[0].workers, curve.known[-1].workers
            x = np.geomspace(first, last, 80)
            axes.plot(x, [curve.law.at(n) for n in x], color=color_of(curve), lw=1.6, ls=":",
                      zorder=3)  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: f"{tick(value)}x")
    _draw_missing(axes, scaling)
    _ends(axes, scaling, _speedup, times)


def _draw_efficiency(axes: Axes, scaling: Scaling) -> None:
    frame(axes, "Efficiency (speed-up per worker)", "both")
    worker_axis(axes, scaling.axis, doublings=_has_ahead(scaling))
    if not any(curve.known for curve in scaling.curves):
        empty_axes(axes)
        return
    _, top = _reach(scaling, efficiency)
    axes.axhline(1, color=MUTED["any"], lw=1.2, ls=(0, (5, 3)), zorder=2)
    axes.set_ylim(0, max(1.1, 1.06 * top))
    _shade(axes, scaling)
    axes.annotate(
        "ideal", (axes.get_xlim()[1], 1), xytext=(-2, 5), textcoords="offset points", ha="right",
        fontsize=LABEL_PT, color=MUTED["any"],
    )  # fmt: skip
    for curve in scaling.curves:
        _draw_predicted(axes, curve, efficiency)
        _draw_curve(axes, curve, efficiency)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    _draw_missing(axes, scaling)
    _ends(axes, scaling, efficiency, percent)


def _has_ahead(scaling: Scaling) -> bool:
    return any(curve.ahead for curve in scaling.curves)


def _reach(scaling: Scaling, value: Value) -> tuple[float, float]:
    """Return the least and the greatest value that the axis must show.

    For predictions these are the medians. A prediction from few data has a very wide interval,
    which would press all else flat, so the axis cuts it off.
    """
    measured = np.array([value(curve, one) for curve in scaling.curves for one in curve.known])
    ahead = [value(curve, one)[0] for curve in scaling.curves for one in curve.ahead]
    return (
        float(min([np.nanmin(measured[:, 0]), *ahead])),
        float(max([np.nanmax(measured), *ahead])),
    )


def _shade(axes: Axes, scaling: Scaling) -> None:
    """Shade the part of the axes without runs."""
    most = max(scaling.workers)
    more = [count for count in scaling.axis if count > most]
    if more:
        middle = math.sqrt(most * more[0])
        end = axes.get_xlim()[1]
        axes.axvspan(middle, end, color=MUTED["any"], alpha=0.07, lw=0, zorder=0)


def _speedup(curve: Curve, point: Point | PredictedPoint) -> tuple[float, float, float]:
    return point.speedup, point.low, point.high


def _draw_predicted(axes: Axes, curve: Curve, value: Value) -> None:
    """Draw the prediction, from the point from which it was made.

    Dashes end at the rings: the background's colour is unknown, so nothing can cover a line.
    """
    start = next((one for one in curve.known if curve.predicted is not None
                  and one.workers == curve.predicted.workers), None)  # fmt: skip
    if start is None or not curve.ahead:
        return
    color = color_of(curve)
    points: list[Any] = [start, *curve.ahead]
    x = np.array([one.workers for one in points], float)
    middle, low, high = np.array([value(curve, one) for one in points]).T
    low, high = np.where(np.isfinite(low), low, middle), np.where(np.isfinite(high), high, middle)
    axes.fill_between(x, low, high, color=color, alpha=_BAND, lw=0, zorder=2)
    place, back = axes.transData, axes.transData.inverted()
    radius = (_RING_PT + 1.5) / 2 * axes.figure.dpi / 72
    at = place.transform(np.column_stack([x, middle]))
    for one, other in itertools.pairwise(at):
        length = float(np.hypot(*(other - one)))
        cut = (other - one) * min(radius / length, 0.5)
        ends = back.transform([one + cut, other - cut])
        axes.plot(*ends.T, color=color, lw=1.6, ls=(0, (3, 1.5)), zorder=4)
    axes.plot(x[1:], middle[1:], "o", ms=_RING_PT, mfc="none", mec=color, mew=1.5, zorder=6)


def _draw_curve(axes: Axes, curve: Curve, value: Value) -> None:
    """Draw the measured values with their intervals; a gap where a value is missing."""
    color = color_of(curve)
    values = [value(curve, point) for point in curve.points]
    x = [point.workers for point in curve.points]
    mean = np.array([middle for middle, _, _ in values])
    axes.plot(x, mean, color=color, lw=1.8, ls=line_of(curve), zorder=4)
    for at, (middle, low, high) in zip(x, values, strict=True):
        if not math.isfinite(middle):
            continue
        if math.isfinite(low) and math.isfinite(high) and high > low:
            axes.errorbar([at], [middle], [[max(middle - low, 0)], [max(high - middle, 0)]],
                          color=color, lw=1.4, capsize=3.5, zorder=5)  # fmt: skip
        axes.plot([at], [middle], "o", ms=6, color=color, zorder=6)


def _ends(axes: Axes, scaling: Scaling, value: Value, words: Callable[[float], str]) -> None:
    """Write the value at each curve's end: next to the axes if it ends there, else at its point.

    Measured values are bold; predicted values begin with a sign for "about".
    """
    last, beside, within = max(scaling.axis), [], []
    for curve in scaling.curves:
        ends: list[tuple[Any, str, str]] = [(one, "", "bold") for one in curve.known[-1:]]
        ends += [(one, "≈", "normal") for one in curve.ahead[-1:]]
        for point, sign, weight in ends:
            middle = value(curve, point)[0]
            end = End(point.workers, middle, sign + words(middle), color_of(curve), weight)
            if point.workers == last:
                beside.append(end)
            elif not sign:
                within.append(end)
    label_ends(axes, beside, _ENDS_IN)
    label_points(axes, within)


def _draw_missing(axes: Axes, scaling: Scaling) -> None:
    """Mark at the foot of the axes where a number of workers has no measurement."""
    for curve in scaling.curves:
        for point in curve.points:
            if not point.measured:
                axes.plot([point.workers], [0.035], "x", ms=7, mew=2, color=color_of(curve),
                          transform=axes.get_xaxis_transform(), zorder=7)  # fmt: skip
                axes.annotate(
                    "missing", (point.workers, 0.035), xycoords=axes.get_xaxis_transform(),
                    xytext=(0, 6), textcoords="offset points", ha="center", fontsize=LABEL_PT,
                    color=color_of(curve),
                )  # fmt: skip


# -- rows -------------------------------------------------------------------------------------

Row = tuple["Curve", "Point"]


def _rows(scaling: Scaling) -> list[Row]:
    """Return the points that have a step; only the first of very many points."""
    return [one for one in rows_of(scaling) if one[1].measured][:_MOST_ROWS]


def _row_name(curve: Curve, point: Point) -> str:
    return f"{clipped(plan_of(curve, point), LABEL_PT, 1.6)} · {point.workers}"


def _draw_steps(page: _Page, scaling: Scaling, rows: Sequence[Row], bars_in: float) -> None:
    """Draw the parts of a step's time for each number of workers, and the cost of an epoch."""
    costs = scaling.price is not None and any(point.cost for _, point in rows)
    names = [_row_name(*row) for row in rows]
    gutter_in = max((width_in(name, LABEL_PT) for name in names), default=0.5) + 0.15
    left_in = EDGE_IN + gutter_in
    right_in = 3.1 if costs else 0.85
    width = WIDTH_IN - left_in - right_in - EDGE_IN
    axes = page.axes(left_in, width, bars_in)
    frame(axes, "Where a step's time goes, for each strategy and number of workers")
    _row_axis(axes, names)
    longest = max((point.row.step_s for _, point in rows), default=0.0)
    if not rows:
        empty_axes(axes)
        axes.set_xticks([])
        return
    axes.set_xlim(0, longest * 1e3)
    for at, (_, point) in enumerate(rows):
        _draw_step(axes, at, point, longest, width)
    axes.xaxis.set_major_formatter(lambda value, _: f"{tick(value)} ms")
    axes.locator_params(axis="x", nbins=6)
    _draw_share_keys(page, rows, bars_in, left_in)
    if costs:
        _draw_costs(page.axes(left_in + width + 0.95, right_in - 1.55, bars_in), scaling, rows)


def _row_axis(axes: Axes, names: Sequence[str]) -> None:
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", labelsize=LABEL_PT, labelcolor=INK["any"], length=0)


def _draw_step(axes: Axes, at: int, point: Point, longest_s: float, width: float) -> None:
    left = 0.0
    for part in SHARES:
        share = float(np.nan_to_num(point.row.shares.get(part, math.nan)))
        spent_ms = max(share, 0.0) * point.row.step_s * 1e3
        color, hatch = SHARE_STYLES[part]
        axes.barh(
            at, spent_ms, left=left, height=BAR, lw=0, hatch=hatch or None,
            color=(color, 0.22) if hatch else color, edgecolor=color if hatch else "none",
        )  # fmt: skip
        if spent_ms / (longest_s * 1e3) * width >= _LABELLED_IN:
            draw_percent(axes, left + spent_ms / 2, at, share, HATCHED if hatch else part)
        left += spent_ms
    axes.annotate(
        milliseconds(point.row.step_s * 1e3), (left, at), xytext=(5, 0), va="center",
        textcoords="offset points", fontsize=LABEL_PT, color=INK["any"], annotation_clip=False,
    )  # fmt: skip


def _draw_share_keys(page: _Page, rows: Sequence[Row], bars_in: float, left_in: float) -> None:
    from matplotlib.patches import Rectangle

    used = [
        part for part in SHARES
        if any(np.nan_to_num(point.row.shares.get(part, math.nan)) > 0 for _, point in rows)
    ]  # fmt: skip
    top_in = page.down_in
    page.down_in = top_in + bars_in + 0.46
    for part in used:
        color, hatch = SHARE_STYLES[part]
        page.figure.add_artist(
            Rectangle(
                (left_in / WIDTH_IN, 1 - page.down_in / page.height_in),
                0.16 / WIDTH_IN, 0.12 / page.height_in, lw=0, hatch=hatch or None,
                facecolor=(color, 0.22) if hatch else color, edgecolor=color if hatch else "none",
            )
        )  # fmt: skip
        page.text(left_in + 0.22, SHARE_NAMES[part], LABEL_PT)
        left_in += 0.22 + width_in(SHARE_NAMES[part], LABEL_PT) + 0.22
    page.down_in = top_in


def _draw_costs(axes: Axes, scaling: Scaling, rows: Sequence[Row]) -> None:
    frame(axes, "Cost of an epoch" if costs_are_of_epochs(scaling) else "Cost of 1M samples")
    _row_axis(axes, ["" for _ in rows])
    top = 0.0
    for at, (curve, point) in enumerate(rows):
        cost = point.cost
        if cost is None:
            continue
        axes.barh(at, cost.price, height=BAR, color=(color_of(curve), 0.75), lw=0)
        end = cost.price
        if math.isfinite(cost.low) and math.isfinite(cost.high) and cost.high > cost.low:
            axes.plot([cost.low, cost.high], [at, at], color=INK["any"], lw=1.6, zorder=5)
            end = cost.high
        top = max(top, end)
        axes.annotate(
            cost_words(cost), (end, at), xytext=(5, 0), va="center", textcoords="offset points",
            fontsize=LABEL_PT, color=INK["any"], annotation_clip=False,
        )  # fmt: skip
    axes.set_xlim(0, top or 1.0)
    axes.set_xticks([0, top], ["0", f"{top:.2g}"])
    axes.grid(visible=True, axis="x", color=GRID["any"], lw=0.8)
