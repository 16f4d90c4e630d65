"""What the panels of scaling have in common: the axis of workers, a curve's colour and line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..drawing import LABEL_PT, TICK_PT, clipped
from ..theme import MUTED, run_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...history.analysis.scaling.curves import Curve

_LOG_FROM = 16
"""Where the most workers are so many times the fewest, the axis is logarithmic."""
_MOST_TICKS = 9
_LABEL_IN = 0.175
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


@dataclass(frozen=True)
class End:
    """Where a curve ends, and what is written beside that."""

    x: float
    y: float
    words: str
    color: str
    weight: str = "normal"


def label_ends(axes: Axes, ends: Sequence[End], most_in: float, *, leaders: bool = False) -> None:
    """Write words beside the axes, each as near to its end as the others allow.

    Args:
        most_in: Width of the place beside the axes, inches.
        leaders: Whether a thin line leads from each end to its words.
    """
    height_in = axes.get_position().height * axes.figure.get_figheight()  # type: ignore[union-attr]
    least = _LABEL_IN / height_in
    place_of = axes.transData + axes.transAxes.inverted()
    order = sorted(
        ((tuple(place_of.transform((end.x, end.y))), end) for end in ends),
        key=lambda one: one[0][1],
    )
    places: list[float] = []
    for (_, up), _ in order:
        places.append(max(up, places[-1] + least if places else least / 3))
    for at in range(len(places) - 1, -1, -1):  # from the top, none beyond it
        most = 1.0 if at == len(places) - 1 else places[at + 1] - least
        places[at] = min(places[at], most)
    for ((x, up), end), place in zip(order, places, strict=True):
        if leaders:
            axes.plot([x, 1], [up, place], color=end.color, lw=0.5, alpha=0.5, clip_on=False,
                      zorder=2, transform=axes.transAxes)  # fmt: skip
        axes.annotate(
            clipped(end.words, LABEL_PT, most_in, end.weight), xy=(1, place),
            xycoords="axes fraction", xytext=(4, 0), textcoords="offset points", va="center",
            ha="left", fontsize=LABEL_PT, color=end.color, weight=end.weight,
            annotation_clip=False, parse_math=False,
        )  # fmt: skip
