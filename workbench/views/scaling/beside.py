"""Your own efficiency next to published curves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...history.analysis.scaling.curves import efficiency
from ..drawing import TICK_PT, frame
from ..theme import MUTED, run_color
from .axes import End, color_of, label_ends, worker_axis

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from ...history.analysis.scaling.curves import Scaling
    from .published import Published

_MARKS = ("s", "^", "D", "v", "P", "X", "h")
_MOST_LABEL_IN = 3.6


def draw_beside(axes: Axes, scaling: Scaling, shown: Sequence[Published]) -> None:
    """Draw efficiency over workers: the user's curves next to published curves, with names."""
    frame(axes, "Efficiency beside published curves", "both")
    own = scaling.workers
    counts = {*own, *(workers for one in shown for workers, _ in one.points)}
    worker_axis(axes, sorted(counts))
    axes.set_ylim(0, 1.12)
    axes.axhline(1, color=MUTED["any"], lw=1.2, ls=(0, (5, 3)), zorder=2)
    ends: list[End] = []
    for index, one in enumerate(shown):
        x, y = zip(*one.points, strict=True)
        color = run_color(len(scaling.curves) + 1 + index, "any")
        axes.plot(x, y, color=color, lw=1.1, ls=(0, (1, 1.5)), marker=_MARKS[index % len(_MARKS)],
                  ms=4.5, alpha=0.9, zorder=3)  # fmt: skip
        over = f", relative to {one.relative_to} GPUs" if one.relative_to > 1 else ""
        ends.append(End(x[-1], y[-1], f"{one.name}{over} ({one.year})", color))
    for curve in scaling.curves:
        known = curve.known
        values = [efficiency(curve, point)[0] for point in known]
        if known:
            axes.plot([point.workers for point in known], values, "o-", color=color_of(curve),
                      lw=2.4, ms=6.5, zorder=6)  # fmt: skip
            words = f"yours: {curve.name}"
            ends.append(End(known[-1].workers, values[-1], words, color_of(curve), "bold"))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value * 100:.0f} %")
    axes.set_xlabel("workers (published: GPUs)", fontsize=TICK_PT, color=MUTED["any"])
    label_ends(axes, ends, _MOST_LABEL_IN, leaders=True)
