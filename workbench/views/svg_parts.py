"""What all bands of the SVG share: words, workers' labels, boxes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

from ..history.snapshot import Worker
from . import text, units
from .theme import HATCHED, phase_colors

WIDTH, MARGIN, GUTTER = 860, 14, 110
ROW, GAP = 20, 4

_LETTERS = 115
"""Letters of 12 points that fit the width at least: the fonts of pages differ in theirs."""
_BOLD_LETTERS = 103


def say(
    x: float, y: float, words: str, kind: str = "i", *, anchor: str = "start", bold: bool = False
) -> str:
    """Return a line of words."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def lines(parts: Sequence[str], *, bold: bool = False) -> list[str]:
    """Return parts with dots between them, in lines that fit; they break at a dot if possible."""
    most, found = _BOLD_LETTERS if bold else _LETTERS, list[str]()
    for part in parts:
        longer = f"{found[-1]} · {part}" if found else ""
        if longer and len(longer) <= most:
            found[-1] = longer
        else:
            found += textwrap.wrap(part, most) or [part]
    return found


def label(worker: Worker, y: float, slow_rank: int | None) -> str:
    """Return what stands before a worker's row."""
    slow = worker.rank == slow_rank
    return say(MARGIN, y + ROW - 6, text.worker_label(worker), "w" if slow else "i", bold=slow)


def box(x: float, y: float, width: float, part: str) -> str:
    """Return the box of one of `metrics.PARTS`."""
    fill = "url(#wb-hatch)" if part == HATCHED else phase_colors()[part]
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}" fill="{fill}"/>'


def say_percent(x: float, y: float, share: float, width: float) -> list[str]:
    """Return a share on a plate in the middle of its box, where it is wide enough."""
    if width < 34:
        return []
    middle = x + width / 2
    plate = [f'<rect class="p" x="{middle - 17:.1f}" y="{y + 3:.1f}" width="34" height="14"/>']
    words = say(middle, y + ROW - 6, units.percent(share), anchor="middle", bold=True)
    return [*plate, words]
