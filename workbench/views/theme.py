"""The colours that every view shares, safe for colour-blind readers, light and dark.

Pictures that stay in a notebook as PNG cannot know on which page they will lie: they have no
background, and the colours of `any` page, with a contrast of at least 3.4 on white and on dark.

The hues are Okabe and Ito's (Color Universal Design, 2008), lightened for dark backgrounds.
Waiting is hatched as well, so that it can be told apart without colour.
"""

from __future__ import annotations

from typing import Literal

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
"""What the parts are called in legends."""

BUSY, HATCHED = "compute_s", "sync_wait_s"
"""The part that stands for work, and the one that is hatched in every view."""

SERIES_LIGHT = (
    "#2C7BB6", "#D55E00", "#009E73", "#B8578F", "#B07C00", "#4A4E8C", "#5B8C2A", "#6B7079",
)  # fmt: skip
SERIES_DARK = (
    "#56A8E0", "#F07F4A", "#2FBF98", "#E08FBD", "#F2B632", "#9A9EE8", "#9CCB62", "#A9AFB8",
)  # fmt: skip
SERIES_ANY = tuple("#686DC4" if color == "#4A4E8C" else color for color in SERIES_LIGHT)
SERIES = SERIES_LIGHT
"""Colours of curves, in order; repeat from the start beyond the eighth."""

_RUNS = (7, 5, 3, 6, 4, 0, 1, 2)
"""Which of `SERIES` is a run's, by the number of its colour: grey for one device, which others are
measured against, and first those that no phase of a step uses."""

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
