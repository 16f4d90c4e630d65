"""Shared parts of figures drawn with matplotlib: settings, letters, panels, bands.

Matplotlib's settings are global, so one thread draws at a time. If matplotlib's fonts lack a
letter, another font of this machine is used, otherwise a word. A run can be called 实验 or 🚀.
Fonts with such letters are used if this machine has them. A letter that no font has is spelled
(`:rocket:`, `ka`, `u5B9E`) instead of drawn as an empty box.

Panels of a comparison share colours, frames and text widths. Bands of a run's picture share titles,
the workers' axis and boxes.
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
    """Draw with matplotlib's defaults and these settings; restore the user's settings afterwards.

    Two threads that change and restore the settings at once could leave wrong settings.
    """
    _import_whole()
    import matplotlib.style

    # Warnings about letters that no font has (in SVG) do not concern the user.
    warnings.filterwarnings("ignore", "Glyph .* missing", module=r"workbench\.views")
    with _ONE, matplotlib.style.context(["default", {"font.family": families(), **settings}]):
        yield


def spell(figure: Figure) -> None:
    """Replace letters that no font of this machine has by words."""
    from matplotlib.text import Text

    for words in figure.findobj(Text):
        assert isinstance(words, Text)
        if (said := words.get_text()) != (drawn := readable(said)):
            words.set_text(drawn)


@functools.cache
def _import_whole() -> None:
    """Import the modules for pictures on a separate thread that interrupts do not reach.

    After an interrupt during an import, the module cannot be used and cannot be imported again.
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
"""Font families with more letters than matplotlib's own, in order of preference."""

_MARKS = frozenset({"Cc", "Cf", "Mn", "Me", "Cs", "Co", "Cn"})
"""Categories of characters without a shape; they are left out if no font has them."""
_SPELLED = (" LETTER ", " SYLLABLE ", " CHARACTER ")


@functools.cache
def families() -> tuple[str, ...]:
    """Return matplotlib's family and the families of `FONTS` that this machine has."""
    from matplotlib.font_manager import fontManager

    there = set(fontManager.get_font_names())
    return ("DejaVu Sans", *(name for name in FONTS if name in there))


@functools.cache
def _drawn() -> frozenset[int]:
    """Return the letters that one of the families has, both plain and bold."""
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
    """Return text with only letters that can be drawn here."""
    if text.isascii():
        return text
    drawn = _drawn()
    return "".join(one if ord(one) in drawn or one == "\n" else spelled(one) for one in text)


def spelled(letter: str) -> str:
    """Return the replacement for a letter that cannot be drawn: its sound, name or number."""
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
    """Return text of at most `most` letters; wide letters count twice, the middle is left out."""
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
"""Extra width of letters that are fitted to pixels."""

_MOST_LETTERS = 300
"""Most letters that fit into a line, even if they are narrow."""

LINES = ("-", "--", "-.", ":")
"""Line styles: rows after the eighth have the colour of an earlier row but another style."""


def color_of(comparison: Comparison, row: int) -> str:
    """Return the colour of a row, the same in all panels."""
    return run_color(comparison.rows[row].color or 0, "any")


def line_of(comparison: Comparison, row: int) -> str:
    """Return the line style of a row; it differs from that of earlier rows with the same colour."""
    colors = [one.color for one in comparison.rows[: row + 1]]
    return LINES[(colors.count(colors[-1]) - 1) % len(LINES)]


@lru_cache(maxsize=2048)
def width_in(text: str, size_pt: float, weight: str = "normal") -> float:
    """Return the largest width of a drawn line of text in inches."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    if not text.strip():
        return 0.0
    # A dollar sign does not begin a formula here, for example in a path.
    path = TextPath(
        (0, 0),
        readable(text).replace("$", "S"),
        prop=FontProperties(weight=weight, size=size_pt),
    )
    return _HINTED * float(path.get_extents().x1) / 72


def clipped(text: str, size_pt: float, most_in: float, weight: str = "normal") -> str:
    """Return text that fits a width; if it is too long, its middle is left out."""
    if len(text) <= _MOST_LETTERS and width_in(text, size_pt, weight) <= most_in:
        return text

    def short(kept: int) -> str:
        head = (kept + 1) // 2
        return f"{text[:head]}…{text[len(text) - (kept - head) :]}"

    # Widths are measured glyph by glyph, because trying every length would take seconds.
    fits, beyond = 2, min(len(text), _MOST_LETTERS + 1)
    while beyond - fits > 1:
        middle = (fits + beyond) // 2
        if width_in(short(middle), size_pt, weight) <= most_in:
            fits = middle
        else:
            beyond = middle
    return short(fits) if fits > 2 else "…"


def wrapped(text: str, size_pt: float, most_in: float, weight: str = "normal") -> list[str]:
    """Return text in lines that fit a width; a number and its unit stay on one line."""
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
    """Use the vertical axis for the rows, the first on top; their names are next to the band."""
    count = len(comparison.rows)
    axes.set_yticks([])
    axes.set_ylim(count - 0.5, -0.5)
    for between in range(1, count):
        axes.axhline(between - 0.5, color=GRID["any"], lw=0.6, zorder=0)


def tick(value: float, _: object = None) -> str:
    """Return a short form of a tick's number: `2.5k`, `0.25`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.4g}{suffix}"
    return f"{value:.4g}"


def ticks_alike(axes: Axes, values: Sequence[float]) -> None:
    """Put ticks at values, all with the same number of decimals: `1.79`, `1.80`."""
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
    """Write a text into axes without data."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center",
              fontsize=LABEL_PT, color=MUTED["any"])  # fmt: skip


def style(axes: Axes, title: str, value: str = "") -> None:
    """Give axes a title, and a text on its right; no frame, no ticks."""
    axes.set_title(title, loc="left", fontsize=9.5, weight="bold", color=INK["any"])
    axes.set_title(value, loc="right", fontsize=9, color=MUTED["any"])
    axes.tick_params(labelsize=8, length=0, colors=MUTED["any"])
    axes.spines[:].set_visible(False)
    axes.set_facecolor(PAPER["any"])
    axes.set_axisbelow(True)


def stack(axes: Axes, at: Any, widths: Any, left: Any, part: str) -> None:
    """Draw one phase's boxes; boxes of waiting are hatched."""
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
    """Write the workers' names at the side, the slow worker in colour."""
    axes.set_yticks(range(len(snapshot.workers)))
    axes.set_yticklabels([worker_label(w) for w in snapshot.workers])
    axes.set_ylim(len(snapshot.workers) - 0.4, -0.6)
    for label, worker in zip(axes.get_yticklabels(), snapshot.workers, strict=True):
        blamed = worker.rank == snapshot.slow_rank
        label.set_color(phase_colors()[HATCHED] if blamed else INK["any"])
        label.set_fontweight("bold" if blamed else "normal")


def draw_percent(axes: Axes, x: float, row: float, share: float, part: str) -> None:
    """Write a share into its box; in a hatched box it has a plain background."""
    plate = {"facecolor": "white", "edgecolor": "none", "pad": 1.2} if part == HATCHED else None
    dark = part in (HATCHED, "data_wait_s", "other_s")
    axes.text(
        x, row, text.percent(share), ha="center", va="center", fontsize=8, weight="bold",
        color=INK["light"] if dark else "white", bbox=plate,
    )  # fmt: skip
