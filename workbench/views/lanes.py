"""Workers' time as rows of boxes, for pictures: one row per worker, one box per part of a step."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ..metrics import PARTS
from .picture import say, width_of
from .theme import PHASE_NAMES
from .units import milliseconds

ROW, GAP = 16.0, 5.0
_CLASSES = dict(zip(PARTS, ("data", "compute", "wait", "weights", "other"), strict=True))


def box(x: float, y: float, width: float, part: str, *, height: float = ROW) -> str:
    """Return the box of one of `metrics.PARTS`; waiting is hatched."""
    if part == "sync_wait_s":
        return (
            f'<rect class="k-wait s" stroke-width=".7" style="fill:url(#HATCH)" x="{x:.1f}" '
            f'y="{y:.1f}" width="{width:.2f}" height="{height:g}"/>'
        )
    return (
        f'<rect class="k-{_CLASSES[part]} f" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{height:g}"/>'
    )


def step_boxes(x: float, y: float, parts_s: Sequence[float], scale: float) -> str:
    """Return a step's boxes from x on; parts that are NaN or 0 have none.

    Args:
        scale: Units of the drawing per second.
    """
    found, words = [], []
    for part, seconds in zip(PARTS, parts_s, strict=True):
        if seconds > 0:
            found.append(box(x, y, seconds * scale, part))
            x += seconds * scale
        words.append(f"{PHASE_NAMES[part]} {milliseconds(seconds * 1e3)}")
    return f"<g><title>{html.escape(', '.join(words))}</title>{''.join(found)}</g>"


def legend(x: float, y: float, right: float) -> tuple[list[str], float]:
    """Return what the boxes mean, in as many lines as needed, and the y below."""
    body, left = [], x
    for part, name in PHASE_NAMES.items():
        wide = 17 + width_of(name, 10)
        if x > left and x + wide > right:
            x, y = left, y + 15
        body += [box(x, y - 8, 11, part, height=9), say(x + 15, y, name, size=10)]
        x += wide + 11
    return body, y + 15
