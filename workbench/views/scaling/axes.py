"""What the panels of scaling have in common: the axis of workers, a curve's colour and line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..drawing import TICK_PT
from ..theme import MUTED, run_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...history.analysis.scaling.curves import Curve

_LOG_FROM = 16
"""Where the most workers are so many times the fewest, the axis is logarithmic."""
_MOST_TICKS = 9
_LINES = ("-", "--", "-.")


def color_of(curve: Curve) -> str:
    """Return a curve's colour, the same in all panels."""
    return run_color(curve.color, "any")


def line_of(curve: Curve) -> str:
    """Return the style of a curve's line: beyond the seventh colours come again."""
    return _LINES[(curve.color - 1) // 7 % len(_LINES)]


def worker_axis(axes: Axes, counts: Sequence[int]) -> None:
    """Make the horizontal axis that of the numbers of workers."""
    low, high = min(counts), max(counts)
    if high >= _LOG_FROM * low:
        axes.set_xscale("log", base=2)
        pad = (high / low) ** 0.05
        axes.set_xlim(low / pad, high * pad)
    else:
        pad = 0.06 * max(high - low, 1)
        axes.set_xlim(low - pad, high + pad)
    shown = list(counts)
    while len(shown) > _MOST_TICKS:
        shown = [shown[0], *shown[2:-1:2], shown[-1]]
    axes.set_xticks(shown, [str(count) for count in shown])
    axes.minorticks_off()
    axes.set_xlabel("workers", fontsize=TICK_PT, color=MUTED["any"])
