"""The page of a comparison's picture: its verdict, its keys, and where everything stands."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..history.comparison import Comparison
from ..history.rows import SHARES
from .comparison_panels import SHARE_STYLES
from .comparison_parts import LABEL_PT, clipped, color_of, line_of, width_in, wrapped
from .comparison_table import SHARE_NAMES
from .theme import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH_IN, EDGE_IN, KEYS_IN = 11.0, 0.22, 0.24
NAME_PT = 9.0

_VERDICT_PT, _OUTLOOK_PT = 11.5, 9.5
_MOST_KEY_IN = 3.2


@dataclass
class Page:
    """Places things in inches from the left and down from the top, so that nothing overlaps."""

    figure: Figure
    height_in: float
    down_in: float = 0.1

    def skip(self, inches: float) -> None:
        """Go on further down."""
        self.down_in += inches

    def text(
        self, left_in: float, up_in: float, words: str, *, size: float = LABEL_PT,
        weight: str = "normal", color: str = INK["any"], right: bool = False,
    ) -> None:  # fmt: skip
        """Write a line that stands `up_in` above where the page is."""
        self.figure.text(
            left_in / WIDTH_IN, 1 - (self.down_in - up_in) / self.height_in, words,
            fontsize=size, fontweight=weight, color=color, ha="right" if right else "left",
            va="baseline", parse_math=False,
        )  # fmt: skip

    def axes(self, left_in: float, width_in: float, height_in: float) -> Axes:
        """Return axes whose top is where the page is."""
        bottom = 1 - (self.down_in + height_in) / self.height_in
        return self.figure.add_axes(
            (left_in / WIDTH_IN, bottom, width_in / WIDTH_IN, height_in / self.height_in)
        )


@dataclass(frozen=True)
class Line:
    """One line of the head."""

    words: str
    size_pt: float
    weight: str
    height_in: float


@dataclass(frozen=True)
class Key:
    """One entry of the legend: how far from the left, in which line."""

    left_in: float
    line: int
    words: str
    color: str
    style: str


def head_of(comparison: Comparison) -> list[Line]:
    """Return the verdict, and when distributing pays, in lines that fit."""
    room_in = WIDTH_IN - 2 * EDGE_IN
    bold = wrapped(comparison.verdict, _VERDICT_PT, room_in, "bold")
    more = wrapped(comparison.outlook, _OUTLOOK_PT, room_in)
    return [
        *(Line(words, _VERDICT_PT, "bold", 0.23) for words in bold),
        *(Line(words, _OUTLOOK_PT, "normal", 0.2) for words in more),
    ]


def keys_of(comparison: Comparison) -> list[Key]:
    """Return a key for each row, flowed into lines."""
    placed: list[Key] = []
    left, line, room_in = 0.0, 0, WIDTH_IN - 2 * EDGE_IN
    for at, row in enumerate(comparison.rows):
        words = clipped(row.name, NAME_PT, _MOST_KEY_IN)
        need = 0.36 + width_in(words, NAME_PT) + 0.3
        if left and left + need > room_in:
            left, line = 0.0, line + 1
        placed.append(Key(left, line, words, color_of(comparison, at), line_of(comparison, at)))
        left += need
    return placed


def draw_keys(page: Page, keys: Sequence[Key]) -> None:
    """Draw the keys and go on below them."""
    from matplotlib.lines import Line2D

    top_in = page.down_in
    for key in keys:
        page.down_in = top_in + KEYS_IN * (key.line + 1)
        y = 1 - (page.down_in - 0.1) / page.height_in
        left_in = EDGE_IN + key.left_in
        x = [left_in / WIDTH_IN, (left_in + 0.28) / WIDTH_IN]
        page.figure.add_artist(Line2D(x, [y, y], color=key.color, lw=2.4, ls=key.style))
        page.text(left_in + 0.36, 0.06, key.words, size=NAME_PT)


def draw_shares_keys(page: Page, comparison: Comparison) -> None:
    """Draw the legend of the shares below their panel, flush right."""
    from matplotlib.patches import Rectangle

    used = [
        part for part in SHARES
        if any(np.nan_to_num(row.shares[part]) > 0 for row in comparison.rows)
    ]  # fmt: skip
    widths = [0.22 + width_in(SHARE_NAMES[part], LABEL_PT) + 0.2 for part in used]
    left_in = WIDTH_IN - EDGE_IN - sum(widths)
    for part, width in zip(used, widths, strict=True):
        color, hatch = SHARE_STYLES[part]
        page.figure.add_artist(
            Rectangle(
                (left_in / WIDTH_IN, 1 - page.down_in / page.height_in),
                0.16 / WIDTH_IN, 0.13 / page.height_in, lw=0, hatch=hatch or None,
                facecolor=(color, 0.22) if hatch else color, edgecolor=color if hatch else "none",
            )
        )  # fmt: skip
        page.text(left_in + 0.22, 0.015, SHARE_NAMES[part])
        left_in += width
    page.skip(0.1)
