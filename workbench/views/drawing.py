"""What figures drawn with matplotlib have in common: settings, letters, panels, bands.

Settings are matplotlib's and global: one thread draws at a time. For letters that its fonts may
lack there are other fonts of this machine, else words. A run may be called 实验 or 🚀. Fonts with
such letters are used where this machine has some; what no font has is spelled (`:rocket:`, `ka`,
`u5B9E`) instead of drawn as an empty box.

Panels of a comparison share colours, frames, and how wide words are; bands of a run's picture their
titles, the workers' axis, and boxes.
"""

from __future__ import annotations

import functools
import importlib
import re
import threading
import unicodedata
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from . import text
from .text import worker_label
from .theme import GRID, HATCHED, INK, MUTED, PAPER, phase_colors, run_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..history.analysis.comparison import Comparison
    from ..history.snapshot import Snapshot

_ONE = threading.Lock()
_NEEDED = (
    "matplotlib.style", "matplotlib.figure", "matplotlib.lines", "matplotlib.patches",
    "matplotlib.textpath", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg",
)  # fmt: skip


@contextmanager
def own_style(settings: Mapping[str, Any]) -> Iterator[None]:
    """Draw with matplotlib's defaults and these settings; the user's are back afterwards.

    Two threads that change and restore the settings at once could leave wrong settings.
    """
    _import_whole()
    import matplotlib.style

    # What is left of letters that no font has (in SVG) is no matter of the user's.
    warnings.filterwarnings("ignore", "Glyph .* missing", module=r"workbench\.views")
    with _ONE, matplotlib.style.context(["default", {"font.family": families(), **settings}]):
        yield


def spell(figure: Figure) -> None:
    """Put words in the place of letters that no font of this machine has."""
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        assert isinstance(words, Text)
        if (said := words.get_text()) != (drawn := readable(said)):
            words.set_text(drawn)


@functools.cache
def _import_whole() -> None:
    """Import what pictures need on a thread of its own, which no interrupt strikes.

    An interrupt in the midst of an import leaves a module that can neither be used nor imported.
    """
    failed: list[BaseException] = []

    def load() -> None:
        try:
            for name in _NEEDED:
                importlib.import_module(name)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=load, name="workbench-import", daemon=True)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


FONTS = (
    "Noto Sans CJK SC", "Noto Sans CJK JP", "Noto Sans SC", "Noto Sans JP", "Noto Sans KR",
    "Source Han Sans SC", "WenQuanYi Zen Hei", "WenQuanYi Micro Hei", "Droid Sans Fallback",
    "PingFang SC", "Hiragino Sans", "Hiragino Sans GB", "Apple SD Gothic Neo", "Arial Unicode MS",
    "Microsoft YaHei", "SimHei", "Yu Gothic", "Meiryo", "Malgun Gothic", "Segoe UI Symbol",
    "Segoe UI Emoji", "Noto Emoji", "Symbola", "IPAGothic", "NanumGothic",
)  # fmt: skip
"""Families that have more letters than matplotlib's own, in the order in which they are asked."""

_MARKS = frozenset({"Cc", "Cf", "Mn", "Me", "Cs", "Co", "Cn"})
"""Categories of what has no shape of its own: left out where no font has it."""
_SPELLED = (" LETTER ", " SYLLABLE ", " CHARACTER ")


@functools.cache
def families() -> tuple[str, ...]:
    """Return matplotlib's own family and those of `FONTS` that this machine has."""
    from matplotlib.font_manager import fontManager

    there = set(fontManager.get_font_names())
    return ("DejaVu Sans", *(name for name in FONTS if name in there))


@functools.cache
def _drawn() -> frozenset[int]:
    """Return the letters that some family has, in plain and in bold."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    found: list[set[int]] = []
    for weight in ("normal", "bold"):
        known: set[int] = set()
        for family in families():
            path = findfont(FontProperties(family=[family], weight=weight))
            known |= set(get_font(path).get_charmap())
        found.append(known)
    return frozenset(found[0] & found[1])


@functools.lru_cache(maxsize=2048)
def readable(text: str) -> str:
    """Return text in letters that can be drawn here."""
    if text.isascii():
        return text
    drawn = _drawn()
    return "".join(one if ord(one) in drawn or one == "\n" else spelled(one) for one in text)


def spelled(letter: str) -> str:
    """Return what stands for a letter that cannot be drawn: its sound, its name or its number."""
    category = unicodedata.category(letter)
    if category in _MARKS:
        return ""
    name = unicodedata.name(letter, "")
    for mark in _SPELLED:
        if mark in name:
            return name.partition(mark)[2].split(" ")[-1].lower()
    if category.startswith("S") and name:
        return f":{name.lower().replace(' ', '_')}:"
    return f"u{ord(letter):04X}"


def shortened(text: str, most: int) -> str:
    """Return text of at most `most` letters, wide ones counted twice; its middle is left out."""
    if _width(text) <= most:
        return text
    kept = min(len(text) - 1, most - 1)
    while kept > 1:
        head = (kept + 1) // 2
        short = f"{text[:head]}…{text[len(text) - (kept - head) :]}"
        if _width(short) <= most:
            return short
        kept -= 1
    return "…"


def _width(text: str) -> int:
    return sum(2 if unicodedata.east_asian_width(one) in "WF" else 1 for one in text)


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


def empty_axes(axes: Axes, text: str = "not measured") -> None:
    """Write into axes that have nothing to draw."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center",
              fontsize=LABEL_PT, color=MUTED["any"])  # fmt: skip


def style(axes: Axes, title: str, value: str = "") -> None:
    """Give axes a title, and what is said on its right; no frame, no ticks."""
    axes.set_title(title, loc="left", fontsize=9.5, weight="bold", color=INK["any"])
    axes.set_title(value, loc="right", fontsize=9, color=MUTED["any"])
    axes.tick_params(labelsize=8, length=0, colors=MUTED["any"])
    axes.spines[:].set_visible(False)
    axes.set_facecolor(PAPER["any"])
    axes.set_axisbelow(True)


def stack(axes: Axes, at: Any, widths: Any, left: Any, part: str) -> None:
    """Draw one phase's boxes; the waiting ones hatched."""
    color, hatched = phase_colors()[part], part == HATCHED
    axes.barh(
        at,
        widths,
        left=left,
        height=0.8,
        color=(color, 0.22) if hatched else color,
        edgecolor=color if hatched else "white",
        linewidth=0,
        hatch="//////" if hatched else None,
    )


def worker_axis(axes: Axes, snapshot: Snapshot) -> None:
    """Name the workers down the side, the slow one in colour."""
    axes.set_yticks(range(len(snapshot.workers)))
    axes.set_yticklabels([worker_label(w) for w in snapshot.workers])
    axes.set_ylim(len(snapshot.workers) - 0.4, -0.6)
    for label, worker in zip(axes.get_yticklabels(), snapshot.workers, strict=True):
        blamed = worker.rank == snapshot.slow_rank
        label.set_color(phase_colors()[HATCHED] if blamed else INK["any"])
        label.set_fontweight("bold" if blamed else "normal")


def draw_percent(axes: Axes, x: float, row: float, share: float, part: str) -> None:
    """Write a share into its box; on a hatched one it stands on a plate."""
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if part == HATCHED else None
    dark = part in (HATCHED, "data_wait_s", "other_s")
    axes.text(
        x, row, text.percent(share), ha="center", va="center", fontsize=8, weight="bold",
        color=INK["light"] if dark else "white", bbox=plate,
    )  # fmt: skip
