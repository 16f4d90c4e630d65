"""The common code of the scaling panels: the axis of workers, a curve's colour and line."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..drawing import LABEL_PT, TICK_PT, clipped
from ..theme import MUTED, run_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...history.analysis.scaling.curves import Curve

_LOG_FROM = 16
"""The axis is logarithmic if the most workers are at least this many times the fewest."""
_MOST_TICKS = 9
_LABEL_IN = 0.175
_LINES = ("-", "-.", (0, (7, 1, 1, 1, 1, 1)))  # dashes alone mean a prediction


def color_of(curve: Curve) -> str:
    """Return a curve's colour, the same in all panels."""
    return run_color(curve.color, "any")


def line_of(curve: Curve) -> Any:
    """Return the style of a curve's line: it changes when colours repeat, after seven."""
    return _LINES[(curve.color - 1) // 7 % len(_LINES)]


def worker_axis(axes: Axes, counts: Sequence[int], *, doublings: bool = False) -> None:
    """Let the horizontal axis show the numbers of workers.

    Args:
        doublings: Whether it is logarithmic in any case.
    """
    low, high = min(counts), max(counts)
    if (doublings and high > low) or high >= _LOG_FROM * low:
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
    """The end of a curve, and the words next to it."""

    x: float
    y: float
    words: str
    color: str
    weight: str = "normal"


def label_ends(axes: Axes, ends: Sequence[End], most_in: float, *, leaders: bool = False) -> None:
    """Write words next to the axes, each as near to its end as the other words allow.

    Args:
        most_in: Width of the room next to the axes, inches.
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
    for at in range(len(places) - 1, -1, -1):  # from the top, none above the axes
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


_AROUND = ((-7, 7), (7, -7), (-7, -7), (7, 7), (-7, 17), (7, -17), (-7, -17), (7, 17))
"""Positions of words next to their point: points to the right of it and up."""
_MISPLACED = 1000
"""Words on the wrong side are worse than words that cover this many places of the curves."""


def label_points(axes: Axes, ends: Sequence[End]) -> None:
    """Write words next to their points, where they cover no other words and least of the curves.

    If several points have one number of workers, the words of the higher point are above, so that
    a reader does not confuse them. Words without room are left out; the table has them.
    """
    renderer = axes.figure.canvas.get_renderer()  # type: ignore[attr-defined]
    drawn = _drawn(axes)
    inside = axes.get_window_extent(renderer)
    taken = [text.get_window_extent(renderer) for text in axes.texts if text.get_text()]
    for end in ends:
        best = None
        beside = [other.y for other in ends if other.x == end.x]
        height = sum(y < end.y for y in beside) - sum(y > end.y for y in beside)
        for right, up in _AROUND:
            words = axes.annotate(
                end.words, (end.x, end.y), xytext=(right, up), textcoords="offset points",
                ha="left" if right > 0 else "right", va="bottom" if up > 0 else "top",
                fontsize=LABEL_PT, color=end.color, weight=end.weight, parse_math=False, zorder=8,
            )  # fmt: skip
            box = words.get_window_extent(renderer)
            free = not any(box.overlaps(other) for other in taken)
            if free and inside.contains(box.x0, box.y0) and inside.contains(box.x1, box.y1):
                across = ((drawn >= box.min) & (drawn <= box.max)).all(axis=1).sum()
                across += _MISPLACED * (height * up < 0)
                if best is None or across < best[0]:
                    if best is not None:
                        best[1].remove()
                    best = (across, words, box)
                    continue
            words.remove()
        if best is not None:
            taken.append(best[2])


def _drawn(axes: Axes) -> Any:
    """Return places on the curves of some axes, close together, (places, 2) in pixels."""
    found = [np.empty((0, 2))]
    at = np.linspace(0, 1, 24)[:, None]
    for line in axes.lines:
        places = line.get_transform().transform(np.asarray(line.get_xydata(), float))
        for one, other in itertools.pairwise(places):
            found.append(one + at * (other - one))
        found.append(places)
    return np.concatenate(found)
