"""The picture of a comparison: loss by time and by samples, throughput, where the time went."""

from __future__ import annotations

import io
import math
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np

from ..history.comparison import Comparison, ComparisonRow
from ..history.summary import LossCurve
from ..metrics import PARTS
from .tables import comparison_table
from .theme import GRID, HATCHED, INK, MUTED, PAPER, PHASE_COLORS, PHASE_NAMES, series
from .units import UNKNOWN, milliseconds, number, percent

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DPI = 110
_LINES = ("-", "--", "-.", ":")
_RUN_COLORS = (5, 3, 6, 4, 0, 1, 2)
_BASE_COLOR = 7
"""Indices of the shared series: the baseline in grey, and first those that no phase uses."""
_LOSS_POINTS = 110
_LABELLED = 0.09
"""Shares of at least this much carry their percentage."""


def comparison_bundle(comparison: Comparison) -> dict[str, Any]:
    """Return `{"image/png": bytes, "text/plain": str}` of the same content."""
    return {
        "image/png": comparison_png(comparison),
        "text/plain": comparison_table(comparison).text(),
    }


def comparison_png(comparison: Comparison) -> bytes:
    """Return the picture as PNG bytes, on a white page."""
    buffer = io.BytesIO()
    draw(comparison).savefig(buffer, format="png", dpi=_DPI, facecolor=PAPER["light"])
    return buffer.getvalue()


def draw(comparison: Comparison) -> Figure:
    """Return the picture as a figure that no window or global state knows of."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = len(comparison.rows)
    bars_in = 0.95 + 0.42 * rows
    figure = Figure(figsize=(10.5, 4.0 + bars_in), layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.10, hspace=0.04, wspace=0.05)  # type: ignore[union-attr, call-arg]
    grid = figure.add_gridspec(2, 2, height_ratios=(3.2, bars_in))
    by_time, by_samples = figure.add_subplot(grid[0, 0]), figure.add_subplot(grid[0, 1])
    rates, shares = figure.add_subplot(grid[1, 0]), figure.add_subplot(grid[1, 1])
    if comparison.verdict:
        figure.suptitle(_wrapped(comparison.verdict), x=0.012, ha="left", fontsize=11.5,
                        fontweight="bold", color=INK["light"])  # fmt: skip
    _losses(by_time, comparison, "t_s", "Loss by time", "seconds of training")
    _losses(by_samples, comparison, "samples", "Loss by samples", "samples seen")
    by_samples.legend(frameon=False, fontsize=9, labelcolor=INK["light"], loc="upper right")
    _throughput(rates, comparison)
    _shares(shares, comparison)
    return figure


def _losses(axes: Axes, comparison: Comparison, field: str, title: str, unit: str) -> None:
    _frame(axes, title)
    seen: set[int] = set()
    drawn = []
    for named in comparison.curves:
        curve = _thinned(named.curve)
        x = getattr(curve, field)
        row = comparison.rows[named.row]
        color, style = _color(comparison, named.row), _LINES[named.row // 8 % len(_LINES)]
        label = None if named.row in seen else row.name
        seen.add(named.row)
        # Several seeds of one plan are thin lines of one colour.
        width = 2.0 if len(row.names) == 1 else 1.1
        axes.plot(x, curve.loss, style, color=color, lw=width, label=label, zorder=3)
        axes.fill_between(x, curve.low, curve.high, color=color, alpha=0.13, lw=0, zorder=2)
        drawn.append(curve.loss)
    values = np.concatenate(drawn) if drawn else np.empty(0)
    values = values[np.isfinite(values)]
    if len(values) and values.min() > 0 and values.max() / values.min() > 30:
        axes.set_yscale("log")
    elif not len(values):
        _say(axes, "not measured")
    axes.set_xlabel(unit, fontsize=9, color=MUTED["light"])
    if field == "samples":
        axes.xaxis.set_major_formatter(lambda value, _: number(value))
    axes.margins(x=0.01)


def _thinned(curve: LossCurve) -> LossCurve:
    """Return at most `_LOSS_POINTS` points: means over neighbours, and their extremes."""
    starts = np.unique(np.linspace(0, len(curve.loss), _LOSS_POINTS, endpoint=False, dtype=int))
    if len(curve.loss) <= _LOSS_POINTS:
        return curve
    counts = np.diff(np.append(starts, len(curve.loss)))
    return LossCurve(
        step=curve.step[starts],
        t_s=curve.t_s[starts],
        samples=curve.samples[starts],
        loss=np.add.reduceat(curve.loss, starts) / counts,
        low=np.minimum.reduceat(curve.low, starts),
        high=np.maximum.reduceat(curve.high, starts),
    )


def _color(comparison: Comparison, row: int) -> str:
    names = [one.name for one in comparison.rows]
    base = names.index(comparison.baseline)
    if row == base:
        return series(_BASE_COLOR)
    return series(_RUN_COLORS[(row - (row > base)) % len(_RUN_COLORS)])


def _throughput(axes: Axes, comparison: Comparison) -> None:
    _frame(axes, "Throughput, samples per second")
    rows = comparison.rows
    rates = [row.samples_per_s.mean for row in rows]
    spread = [row.samples_per_s.std for row in rows]
    errors = np.nan_to_num(np.array(spread))
    position = np.arange(len(rows))
    colors = [_color(comparison, at) for at in range(len(rows))]
    axes.barh(
        position, np.nan_to_num(rates), height=0.62, color=colors, zorder=3,
        xerr=errors if errors.any() else None,
        error_kw={"ecolor": INK["light"], "elinewidth": 1.2, "capsize": 3},
    )  # fmt: skip
    top = max([rate for rate in rates if math.isfinite(rate)], default=0.0)
    for at, row in enumerate(rows):
        rate = row.samples_per_s.mean
        end = (rate + errors[at]) if math.isfinite(rate) else 0.0
        axes.annotate(_rate_label(row, comparison), (end, at), xytext=(6, 0),
                      textcoords="offset points", va="center", fontsize=9,
                      color=INK["light"])  # fmt: skip
    axes.set_xlim(0, top * 1.8 or 1.0)  # room for the labels, without grid lines across them
    axes.set_xticks([tick for tick in axes.get_xticks() if 0 <= tick <= top])
    axes.xaxis.set_major_formatter(lambda value, _: number(value))
    _names(axes, comparison)


def _rate_label(row: ComparisonRow, comparison: Comparison) -> str:
    rate = number(row.samples_per_s.mean)
    if rate == UNKNOWN:
        return "not measured"
    if row.name == comparison.baseline and row.relative == 1.0:
        return rate
    kind = "" if comparison.has_one_device else f" of {comparison.baseline}"
    efficient = "" if row.efficiency is None else f", {percent(row.efficiency)} efficient"
    return f"{rate}   {row.relative:.2f}x{kind}{efficient}"


def _shares(axes: Axes, comparison: Comparison) -> None:
    _frame(axes, "Where a step's time goes")
    position = np.arange(len(comparison.rows))
    left = np.zeros(len(position))
    for index, part in enumerate(PARTS):
        widths = np.array([max(row.share[index], 0.0) for row in comparison.rows])
        axes.barh(
            position, widths, left=left, height=0.62, color=PHASE_COLORS[part],
            label=PHASE_NAMES[part], hatch="////" if part == HATCHED else None,
            edgecolor=PAPER["light"], lw=0.8, zorder=3,
        )  # fmt: skip
        for at in position[widths >= _LABELLED]:
            axes.text(
                left[at] + widths[at] / 2, at, percent(float(widths[at])), zorder=4, ha="center",
                va="center", fontsize=8.5, color="white", fontweight="bold",
                bbox={"facecolor": PHASE_COLORS[part], "edgecolor": "none", "pad": 1.6},
            )  # fmt: skip
        left += widths
    for at, row in enumerate(comparison.rows):
        axes.annotate(milliseconds(row.step_s * 1e3), (1.0, at), xytext=(6, 0), va="center",
                      textcoords="offset points", fontsize=9, color=INK["light"])  # fmt: skip
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _names(axes, comparison)
    axes.legend(
        ncols=len(PARTS), frameon=False, fontsize=8.5, labelcolor=INK["light"], handlelength=1.3,
        handletextpad=0.5, columnspacing=1.2, loc="upper center", bbox_to_anchor=(0.5, -0.14),
        borderaxespad=0.6,
    )  # fmt: skip


def _names(axes: Axes, comparison: Comparison) -> None:
    """Label the rows, first on top, as `name · 4 workers`."""
    labels = [
        f"{row.name}\n{row.workers} worker" + ("s" if row.workers > 1 else "")
        for row in comparison.rows
    ]
    axes.set_yticks(range(len(labels)), labels, fontsize=9, color=INK["light"])
    axes.set_ylim(len(labels) - 0.45, -0.55)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)


def _frame(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10, fontweight="bold", color=INK["light"])
    axes.set_facecolor(PAPER["light"])
    axes.grid(color=GRID["light"], lw=0.8, zorder=0)
    axes.tick_params(colors=MUTED["light"], labelsize=8.5, length=0)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(GRID["light"])


def _say(axes: Axes, text: str) -> None:
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", color=MUTED["light"])


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 98))
