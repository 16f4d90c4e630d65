"""The bands of the picture that only pipelines have: each worker's bubble, and the stages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..history.snapshot import Snapshot, Split
from . import stages
from .figure_parts import draw_percent, stack, style, worker_axis
from .theme import BUSY, HATCHED, INK, MUTED, phase_colors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import SubFigure

_LINE_IN, _TITLE_IN = 0.2, 0.44
_COLUMNS_AT = (0.012, 0.08, 0.2, 0.66, 0.81, 0.925)
"""Where the columns of the stages' table are: the left edge of words, the right edge of numbers."""
_LABEL = 0.06


def draw_bubbles(axes: Axes, snapshot: Snapshot, split: Split) -> None:
    """Draw a bar per worker: the schedule's share hatched, the excess full, then its work."""
    from matplotlib.patches import Patch

    style(axes, stages.TITLE, "bubble · beyond ideal")
    color, busy = phase_colors()[HATCHED], phase_colors()[BUSY]
    for row, worker in enumerate(snapshot.workers):
        found = stages.bubble(worker, split)
        if found.known:
            pieces = ((found.ideal, HATCHED), (found.excess, ""), (1 - found.whole, BUSY))
            begin = 0.0
            for size, part in pieces:
                if part:
                    stack(axes, row, size, begin, part)
                else:
                    axes.barh(row, size, left=begin, height=0.8, color=color, linewidth=0)
                if size >= _LABEL:
                    draw_percent(axes, begin + size / 2, row, size, part or "transfer_s")
                begin += size
        words = " · ".join(found.words)
        axes.text(1.01, row, words, va="center", fontsize=8, color=INK["any"])
    axes.axvline(split.ideal_bubble, color=INK["any"], linewidth=1, linestyle=(0, (3, 2)))
    axes.set_xlim(0, 1.17)
    axes.set_xticks([])
    worker_axis(axes, snapshot)
    keys = [
        Patch(facecolor=(color, 0.22), edgecolor=color, hatch="//////", linewidth=0),
        Patch(facecolor=color),
        Patch(facecolor=busy),
    ]
    axes.legend(
        handles=keys, labels=list(stages.NAMES), loc="upper left", bbox_to_anchor=(0, 0),
        ncols=len(keys), fontsize=8, frameon=False, borderaxespad=0.1, handlelength=1.3,
        columnspacing=1.4, labelcolor=INK["any"],
    )  # fmt: skip


def stages_height_in(split: Split) -> float:
    """Return the height of the stages' table, inches."""
    return _TITLE_IN + _LINE_IN * (1 + len(stages.rows(split)))


def draw_stages(band: SubFigure, split: Split) -> None:
    """Write the stages' table."""
    height_in = stages_height_in(split)

    def write(
        x: float, line: float, words: str, *, muted: bool = False, right: bool = False
    ) -> None:
        band.text(
            x, 1 - (0.06 + line * _LINE_IN) / height_in, words, fontsize=8, va="top",
            ha="right" if right else "left", color=MUTED["any"] if muted else INK["any"],
        )  # fmt: skip

    band.text(
        0.012, 1 - 0.04 / height_in, stages.caption(split), fontsize=9.5, weight="bold", va="top",
        color=INK["any"],
    )  # fmt: skip
    for line, cells in enumerate([stages.COLUMNS, *stages.rows(split)]):
        for x, name, cell in zip(_COLUMNS_AT, stages.COLUMNS, cells, strict=True):
            write(x, 1.3 + line, cell, muted=line == 0, right=name in stages.NUMERIC)
