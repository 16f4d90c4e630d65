"""Whether a picture that stays in a notebook can be read on white and on dark pages."""

from __future__ import annotations

import io
import re
from typing import Any

from matplotlib.colors import to_rgb
from matplotlib.image import imread
from matplotlib.text import Text

PAGES = ("#ffffff", "#111111")  # JupyterLab's light and dark one
LEAST = 3.4
_IN_A_BAR = re.compile(r"[+\-±]?\d+ %")


def illegible(figure: Any) -> list[str]:
    """Return the words with too little contrast to one of the pages."""
    return [
        f"{words.get_text()}: {words.get_color()}"
        for words in figure.findobj(Text)
        if words.get_text().strip() and not _stands_in_a_bar(words)
        for page in PAGES
        if contrast(words.get_color(), page) < LEAST
    ]


def is_transparent(png: bytes) -> bool:
    """Whether the edges of the picture are transparent."""
    alpha = imread(io.BytesIO(png))[..., 3]
    edges = (alpha[0], alpha[-1], alpha[:, 0], alpha[:, -1])
    return not any(edge.any() for edge in edges)


def is_on_paper(png: bytes) -> bool:
    """Whether the picture has its own background."""
    return bool((imread(io.BytesIO(png))[..., 3] == 1).all())


def contrast(one: Any, other: Any) -> float:
    """Return the contrast of two colours (WCAG 2.2)."""
    light, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(color: Any) -> float:
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _stands_in_a_bar(words: Text) -> bool:
    return words.get_weight() == "bold" and _IN_A_BAR.fullmatch(words.get_text()) is not None
