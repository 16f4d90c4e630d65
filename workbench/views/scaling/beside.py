"""One's own efficiency beside published curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...history.analysis.scaling.curves import efficiency
from ..drawing import LABEL_PT, TICK_PT, clipped, frame
from ..theme import MUTED, run_color
from .axes import color_of, worker_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...history.analysis.scaling.curves import Scaling
    from .published import Published

_MARKS = ("s", "^", "D", "v", "P", "X", "h")
_LABEL_IN = 0.175
_MOST_LABEL_IN = 3.6


def draw_beside(axes: Axes, scaling: Scaling, shown: Sequence[Published]) -> None:
    """Draw efficiency over workers, one's own curves beside published ones, named at their ends."""
    frame(axes, "Efficiency beside published curves", "both")
    own = scaling.workers
    counts = {*own, *(workers for one in shown for workers, _ in one.points)}
    worker_axis(axes, sorted(counts))
    axes.set_ylim(0, 1.12)
    axes.axhline(1, color=MUTED["any"], lw=1.2, ls=(0, (5, 3)), zorder=2)
    ends: list[tuple[float, float, str, str, str]] = []
    for index, one in enumerate(shown):
        x, y = zip(*one.points, strict=True)
        color = run_color(len(scaling.curves) + 1 + index, "any")
        axes.plot(x, y, color=color, lw=1.1, ls=(0, (1, 1.5)), marker=_MARKS[index % len(_MARKS)],
                  ms=4.5, alpha=0.9, zorder=3)  # fmt: skip
        over = f", over {one.relative_to}" if one.relative_to > 1 else ""
        ends.append((x[-1], y[-1], f"{one.name}{over} ({one.year})", color, "normal"))
    for curve in scaling.curves:
        known = curve.known
        values = [efficiency(curve, point)[0] for point in known]
        if known:
            axes.plot([point.workers for point in known], values, "o-", color=color_of(curve),
                      lw=2.4, ms=6.5, zorder=6)  # fmt: skip
            ends.append((known[-1].workers, values[-1], f"yours: {curve.name}", color_of(curve),
                         "bold"))  # fmt: skip
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    axes.set_xlabel("workers (published: GPUs)", fontsize=TICK_PT, color=MUTED["any"])
    _label(axes, ends)


def _label(axes: Axes, ends: Sequence[tuple[float, float, str, str, str]]) -> None:
    """Write names beside the axes, in the order of their ends, each with a line to its end."""
    height_in = axes.get_position().height * axes.figure.get_figheight()  # type: ignore[union-attr]
    low, high = axes.get_ylim()
    least = _LABEL_IN / height_in * (high - low)
    order = sorted(ends, key=lambda end: end[1])
    places: list[float] = []
    for _, y, *_ in order:
        places.append(max(y, places[-1] + least if places else low))
    for at in range(len(places) - 1, -1, -1):  # from the top, none beyond it
        most = high if at == len(places) - 1 else places[at + 1] - least
        places[at] = min(places[at], most)
    right = axes.get_xlim()[1]
    for (x, y, words, color, weight), place in zip(order, places, strict=True):
        axes.plot([x, right], [y, place], color=color, lw=0.5, alpha=0.5, clip_on=False, zorder=2)
        axes.annotate(
            clipped(words, LABEL_PT, _MOST_LABEL_IN, weight), xy=(right, place), xytext=(4, 0),
            textcoords="offset points", va="center", ha="left", fontsize=LABEL_PT, color=color,
            weight=weight, annotation_clip=False, parse_math=False,
        )  # fmt: skip
