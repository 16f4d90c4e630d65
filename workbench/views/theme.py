"""The colours that every view shares, safe for colour-blind readers, light and dark.

A PNG picture in a notebook can be shown on a light or a dark page. So it has no background and uses
the `any` colours, with a contrast of at least 3.4 on white and on dark.

The hues are Okabe and Ito's (Color Universal Design, 2008), lightened for dark backgrounds. Waiting
is also hatched, so that readers can recognise it without colour.
"""

from __future__ import annotations

import html
import textwrap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..shared.record import PARTS

Mode = Literal["light", "dark", "any"]

PHASE_COLORS_LIGHT: dict[str, str] = {
    "data_wait_s": "#E69F00",
    "compute_s": "#2C7BB6",
    "sync_wait_s": "#D55E00",
    "transfer_s": "#009E73",
    "other_s": "#A3A8B0",
}
PHASE_COLORS_DARK: dict[str, str] = {
    "data_wait_s": "#F2B632",
    "compute_s": "#56A8E0",
    "sync_wait_s": "#F07F4A",
    "transfer_s": "#2FBF98",
    "other_s": "#7C838D",
}
PHASE_COLORS = PHASE_COLORS_LIGHT
"""Colour of each of `record.PARTS`, for pictures on a white page."""

PHASE_NAMES: dict[str, str] = {
    "data_wait_s": "data wait",
    "compute_s": "compute",
    "sync_wait_s": "sync wait",
    "transfer_s": "transfer",
    "other_s": "other",
}
"""Names of the parts in legends."""

BUSY, HATCHED = "compute_s", "sync_wait_s"
"""The part for useful work, and the part that is hatched in every view."""

SERIES_LIGHT = (
    "#2C7BB6", "#D55E00", "#009E73", "#B8578F", "#B07C00", "#4A4E8C", "#5B8C2A", "#6B7079",
)  # fmt: skip
SERIES_DARK = (
    "#56A8E0", "#F07F4A", "#2FBF98", "#E08FBD", "#F2B632", "#9A9EE8", "#9CCB62", "#A9AFB8",
)  # fmt: skip
SERIES_ANY = tuple("#686DC4" if color == "#4A4E8C" else color for color in SERIES_LIGHT)
SERIES = SERIES_LIGHT
"""Colours of curves, in order; after the eighth they repeat from the start."""

_RUNS = (7, 5, 3, 6, 4, 0, 1, 2)
"""Index into `SERIES` by a run's colour number. Grey is for one device, the baseline of
comparisons. Colours that no phase of a step uses come first."""

INK = {"light": "#1F2328", "dark": "#E6E8EB", "any": "#757C86"}
MUTED = {"light": "#62676F", "dark": "#A4ABB5", "any": INK["any"]}
GRID = {"light": "#E4E7EB", "dark": "#383E47", "any": "#80879047"}
PAPER = {"light": "#FFFFFF", "dark": "#111418", "any": "none"}


def phase_colors(mode: Mode = "light") -> dict[str, str]:
    """Return the colour of each of `record.PARTS`, in drawing order."""
    table = PHASE_COLORS_DARK if mode == "dark" else PHASE_COLORS_LIGHT
    return {part: table[part] for part in PARTS}


def run_color(number: int, mode: Mode = "light") -> str:
    """Return a run's colour, by its number (`session.registry.Runs.color`)."""
    return series(_RUNS[number % len(_RUNS)], mode)


def series(index: int, mode: Mode = "light") -> str:
    """Return the colour of the `index`-th curve."""
    table = {"light": SERIES_LIGHT, "dark": SERIES_DARK, "any": SERIES_ANY}[mode]
    return table[index % len(table)]


KIND_COLORS: dict[str, str] = {
    "gradients": "#C2559D",
    "weights": "#0B9A75",
    "activations": "#B27A00",
    "average": "#6F74D8",
    "work": "#808791",
    "compute": "#3F8FCB",
    "wait": "#D9652B",
    "data": "#B98A12",
    "other": "#8B929C",
}
"""Colours with a contrast of at least 3 on white and on #111418."""

_STYLE = (
    ".wb-fig{color:var(--wb-ink,var(--jp-ui-font-color1,#1f2328));font-family:var("
    "--jp-ui-font-family,system-ui,-apple-system,'Segoe UI',sans-serif)}"
    "@media(prefers-color-scheme:dark){.wb-fig{color:var(--wb-ink,var(--jp-ui-font-color1,"
    "#e6e8eb))}}"
    ".wb-fig text{fill:currentColor}.wb-fig .m{opacity:.72}"
    ".wb-fig .l{stroke:currentColor;stroke-opacity:.3;fill:none}"
    ".wb-fig .b{stroke:currentColor;stroke-opacity:.6;fill:currentColor;fill-opacity:.06}"
    + "".join(
        f".wb-fig .k-{name}{{--k:var(--wb-{name},{color})}}" for name, color in KIND_COLORS.items()
    )
    + ".wb-fig .s{stroke:var(--k);fill:none}.wb-fig .f{fill:var(--k)}"
)
_PAPER = (
    "<style>svg.wb-fig{background:#fff;color:#1f2328}@media(prefers-color-scheme:dark)"
    "{svg.wb-fig{background:#111418;color:#e6e8eb}}</style>"
)
LETTER = 0.53
"""Mean width of a letter, as a multiple of the font's height."""


@dataclass(frozen=True)
class Canvas:
    """Pieces of SVG on a page with a phone's width; `height` is computed while drawing."""

    width: float
    height: float
    body: Sequence[str]
    title: str
    description: str

    def svg(self, *, alone: bool = False) -> str:
        """Return the document.

        Args:
            alone: For a file or an `<img>`, which has no page: adds a background.
        """
        key = f"wb{zlib.crc32(''.join(self.body).encode()):08x}"
        size = f'viewBox="0 0 {self.width:g} {self.height:.0f}"'
        fixed = f' width="{self.width * 1.5:.0f}" height="{self.height * 1.5:.0f}"' if alone else ""
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="wb-fig" {size}{fixed} role="img" '
            f'aria-labelledby="{key}t {key}d" '
            f'style="width:100%;height:auto;max-width:{self.width * 1.5:.0f}px" font-size="11">'
            f'<title id="{key}t">{html.escape(self.title)}</title>'
            f'<desc id="{key}d">{html.escape(self.description)}</desc>'
            f"<style>{_STYLE}</style>{_PAPER if alone else ''}{hatch(key)}"
            f"{''.join(self.body).replace('#HATCH', '#' + key + 'h')}</svg>"
        )


def hatch(key: str) -> str:
    """Return the pattern of waiting; `url(#HATCH)` in a canvas's body refers to it."""
    return (
        f'<defs><pattern id="{key}h" width="5" height="5" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)" class="k-wait"><rect width="5" height="5" class="f" '
        'fill-opacity=".22"/><path d="M1 0v5" class="s" stroke-width="1.6"/></pattern></defs>'
    )


class Picture(ABC):
    """Base class of content that notebooks show as SVG, HTML and text."""

    @abstractmethod
    def canvas(self) -> Canvas:
        """Return the drawing."""

    @abstractmethod
    def text(self) -> str:
        """Return the content as plain text."""

    def svg(self) -> str:
        """Return a complete SVG document, for a file."""
        return self.canvas().svg(alone=True)

    def html(self) -> str:
        """Return the drawing for a page, with its text in a fold."""
        return (
            f'<div style="max-width:100%">{self.canvas().svg()}'
            '<details style="font-size:12px"><summary>This figure as text</summary>'
            f'<pre style="white-space:pre-wrap">{html.escape(self.text())}</pre></details></div>'
        )

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {
            "text/html": self.html(), "image/svg+xml": self.svg(), "text/plain": self.text()
        }  # fmt: skip

    def __repr__(self) -> str:
        return self.text()


def svg_text(
    x: float, y: float, words: str, kind: str = "", *, size: float = 11, anchor: str = "start",
    bold: bool = False,
) -> str:  # fmt: skip
    """Return a line of words; `kind` `m` is muted."""
    weight = ' font-weight="600"' if bold else ""
    named = f' class="{kind}"' if kind else ""
    font = f' font-size="{size:g}"' if size != 11 else ""
    where = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{named}{font}{where}{weight}>{html.escape(words)}</text>'


def width_of(words: str, size: float = 11) -> float:
    """Return the approximate width of a line."""
    return len(words) * size * LETTER


def paragraph(
    x: float, y: float, words: str, width: float, kind: str = "m", *, size: float = 10.5
) -> tuple[list[str], float]:
    """Return wrapped lines and the y below them; `y` is the first baseline."""
    lines = textwrap.wrap(words, max(12, int(width / (size * LETTER)))) if words else []
    body = [svg_text(x, y + i * (size + 3), line, kind, size=size) for i, line in enumerate(lines)]
    return body, y + len(lines) * (size + 3)
