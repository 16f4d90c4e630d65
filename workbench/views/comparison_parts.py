"""What the panels of a comparison's picture share: colours, frames, and how wide words are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ..history.comparison import Comparison
from .letters import readable
from .theme import GRID, INK, MUTED, PAPER, run_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LABEL_PT, TICK_PT, TITLE_PT = 8.5, 8.0, 10.0
BAR = 0.62
"""Height of a bar, in rows."""

_HINTED = 1.08
"""Letters that are fitted to pixels stand wider apart than their outlines by this much."""

_MOST_LETTERS = 300
"""More fit no line, however narrow they are."""

LINES = ("-", "--", "-.", ":")
"""Styles of lines: of rows beyond the eighth, which have the colour of an earlier one."""


def color_of(comparison: Comparison, row: int) -> str:
    """Return the colour of a row, the same in all panels."""
    return run_color(comparison.rows[row].color or 0, "any")


def line_of(comparison: Comparison, row: int) -> str:
    """Return the style of a row's line: another one for each earlier row of its colour."""
    colors = [one.color for one in comparison.rows[: row + 1]]
    return LINES[(colors.count(colors[-1]) - 1) % len(LINES)]


@lru_cache(maxsize=2048)
def width_in(text: str, size_pt: float, weight: str = "normal") -> float:
    """Return how wide a line of text is drawn at most, inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    # A dollar sign is no formula here, and a path has no use for what it would become.
    path = TextPath(
        (0, 0),
        readable(text).replace("$", "S"),
        prop=FontProperties(weight=weight, size=size_pt),
    )
    return _HINTED * float(path.get_extents().x1) / 72


def clipped(text: str, size_pt: float, most_in: float, weight: str = "normal") -> str:
    """Return text that fits a width: what is too much is left out of its middle."""
    if len(text) <= _MOST_LETTERS and width_in(text, size_pt, weight) <= most_in:
        return text

    def short(kept: int) -> str:
        head = (kept + 1) // 2
        return f"{text[:head]}…{text[len(text) - (kept - head) :]}"

    # Widths are measured glyph by glyph: to try every length would take seconds.
    fits, beyond = 2, min(len(text), _MOST_LETTERS + 1)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if width_in(short(middle), size_pt, weight) <= most_in:
            fits = middle
        else:
            beyond = middle
    return short(fits) if fits > 2 else "…"


def wrapped(text: str, size_pt: float, most_in: float, weight: str = "normal") -> list[str]:
    """Return text in lines that fit a width; a number keeps its unit with it."""
    lines: list[str] = []
    together = re.sub(r"(?<=\d) (?=(?:%|ms|s)(?!\w))", "\u00a0", " ".join(text.split()))
    for word in filter(None, together.split(" ")):
        joined = f"{lines[-1]} {word}" if lines else word
        if lines and width_in(joined, size_pt, weight) <= most_in:
            lines[-1] = joined
        else:
            lines.append(clipped(word, size_pt, most_in, weight))
    return lines


def frame(axes: Axes, title: str, grid: str = "x") -> None:
    """Give axes a title, muted ticks, and grid lines in one direction or `both`."""
    axes.set_title(title, loc="left", fontsize=TITLE_PT, fontweight="bold", color=INK["any"],
                   parse_math=False)  # fmt: skip
    axes.set_facecolor(PAPER["any"])
    axes.set_axisbelow(True)
    axes.grid(visible=False)
    axes.grid(visible=True, axis=grid, color=GRID["any"], lw=0.8)  # type: ignore[arg-type]
    axes.tick_params(colors=MUTED["any"], labelsize=TICK_PT, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def row_axis(axes: Axes, comparison: Comparison) -> None:
    """Make the vertical axis that of the rows, first on top; their names stand beside the band."""
    count = len(comparison.rows)
    axes.set_yticks([])
    axes.set_ylim(count - 0.5, -0.5)
    for between in range(1, count):
        axes.axhline(between - 0.5, color=GRID["any"], lw=0.6, zorder=0)


def tick(value: float, _: object = None) -> str:
    """Return a tick's number in short: `2.5k`, `0.25`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


def ticks_alike(axes: Axes, values: Sequence[float]) -> None:
    """Put ticks at values, written with equally many decimals: `1.79`, `1.80`."""
    words = [tick(value) for value in values]
    if all(word[-1:].isdigit() and "e" not in word for word in words):
        places = max((len(word.partition(".")[2]) for word in words), default=0)
        words = [f"{value:.{places}f}" for value in values]
    axes.set_xticks(values, words)


def panel_in(axes: Axes) -> float:
    """Return the width of axes, inches."""
    figure = axes.figure
    return float(axes.get_position().width * figure.get_figwidth())  # type: ignore[union-attr]


def say(axes: Axes, text: str = "not measured") -> None:
    """Write into axes that have nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center",
              fontsize=LABEL_PT, color=MUTED["any"])  # fmt: skip
