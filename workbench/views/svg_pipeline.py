"""What the SVG shows of a pipeline: each worker's bubble, and the table of its stages."""

from __future__ import annotations

from ..history.snapshot import Snapshot, Split
from . import stages
from .svg_parts import GAP, GUTTER, MARGIN, ROW, WIDTH, box, label, say, say_percent
from .theme import BUSY, HATCHED, phase_colors

_BAR = WIDTH - MARGIN - GUTTER - 180
_BUBBLE_RIGHT = 96  # the column's right edge, counted from the right margin
_COLUMNS_AT = (MARGIN, 70, 170, 570, 710, WIDTH - MARGIN)
"""Where the columns of the stages' table are: the left edge of words, the right edge of numbers."""
_LINE = 17


def pipeline(snapshot: Snapshot, split: Split, y: float) -> tuple[list[str], float]:
    """Return a bar per worker and the stages, and where they end."""
    body, top = _bubbles(snapshot, split, y + 12)
    table, y = _stages(split, top)
    return [*body, *table], y


def _bubbles(snapshot: Snapshot, split: Split, y: float) -> tuple[list[str], float]:
    right = WIDTH - MARGIN
    body = [
        say(MARGIN, y, stages.TITLE, bold=True),
        say(right - _BUBBLE_RIGHT, y, "bubble", "m", anchor="end"),
        say(right, y, "beyond ideal", "m", anchor="end"),
    ]
    y += 8
    top = y
    for worker in snapshot.workers:
        found = stages.bubble(worker, split)
        body.append(label(worker, y, snapshot.slow_rank))
        if found.known:
            x = float(GUTTER)
            for size, part in (
                (found.ideal, HATCHED), (found.excess, ""), (1 - found.whole, BUSY),
            ):  # fmt: skip
                body.append(box(x, y, size * _BAR, part) if part else _full(x, y, size * _BAR))
                body += say_percent(x, y, size, size * _BAR)
                x += size * _BAR
        whole, beyond = found.words
        body.append(say(right - _BUBBLE_RIGHT, y + ROW - 6, whole, anchor="end"))
        body.append(say(right, y + ROW - 6, beyond, anchor="end"))
        y += ROW + GAP
    at = GUTTER + split.ideal_bubble * _BAR
    body.append(
        f'<path class="l" d="M{at:.1f} {top - 3:.1f}V{y:.1f}" stroke-dasharray="4 3" fill="none"/>'
    )
    return [*body, *_legend(y)], y + 40


def _full(x: float, y: float, width: float) -> str:
    return f'<rect class="w" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}"/>'


def _legend(y: float) -> list[str]:
    body, x = [], float(GUTTER)
    fills = ("url(#wb-hatch)", phase_colors()[HATCHED], phase_colors()[BUSY])
    for name, fill in zip(stages.NAMES, fills, strict=True):
        body.append(f'<rect x="{x:.1f}" y="{y + 4:.1f}" width="14" height="10" fill="{fill}"/>')
        body.append(say(x + 20, y + 13, name))
        x += 140
    return body


def _stages(split: Split, y: float) -> tuple[list[str], float]:
    body = [say(MARGIN, y, stages.caption(split), bold=True)]
    y += 20
    for index, cells in enumerate([stages.COLUMNS, *stages.rows(split)]):
        for x, name, cell in zip(_COLUMNS_AT, stages.COLUMNS, cells, strict=True):
            anchor = "end" if name in stages.NUMERIC else "start"
            body.append(say(x, y, cell, "m" if index == 0 else "i", anchor=anchor))
        y += _LINE
    return body, y + 12
