"""What figures drawn as SVG have in common: their page, their colours, how notebooks show them.

A picture carries its own text, so it can be read where SVG is not shown, and by screen readers. It
takes the page's ink (`currentColor`) and the colours of the page's `--wb-*` variables where there
are any; the colours it brings along can be told apart on white and on dark pages alike.
"""

from __future__ import annotations

import html
import textwrap
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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
"""Mean width of a letter, in heights of the font."""


@dataclass(frozen=True)
class Canvas:
    """Pieces of SVG on a page as wide as a phone; `height` is found while drawing."""

    width: float
    height: float
    body: Sequence[str]
    title: str
    description: str

    def svg(self, *, alone: bool = False) -> str:
        """Return the document.

        Args:
            alone: For a file or an `<img>`, which knows no page: with a background of its own.
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
    """Base of what notebooks show as SVG, HTML and text of the same content."""

    @abstractmethod
    def canvas(self) -> Canvas:
        """Return the drawing."""

    @abstractmethod
    def text(self) -> str:
        """Return the content as plain text."""

    def svg(self) -> str:
        """Return an SVG document of its own, for a file."""
        return self.canvas().svg(alone=True)

    def html(self) -> str:
        """Return the drawing for a page, with its text to unfold."""
        return (
            f'<div style="max-width:100%">{self.canvas().svg()}'
            '<details style="font-size:12px"><summary>The same as text</summary>'
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
    """Return about how wide a line is."""
    return len(words) * size * LETTER


def paragraph(
    x: float, y: float, words: str, width: float, kind: str = "m", *, size: float = 10.5
) -> tuple[list[str], float]:
    """Return wrapped lines and the y below them; `y` is the first baseline."""
    lines = textwrap.wrap(words, max(12, int(width / (size * LETTER)))) if words else []
    body = [svg_text(x, y + i * (size + 3), line, kind, size=size) for i, line in enumerate(lines)]
    return body, y + len(lines) * (size + 3)
