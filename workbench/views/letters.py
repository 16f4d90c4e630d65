"""Letters that matplotlib's fonts may lack: other fonts of this machine, else words instead.

A run may be called 实验 or 🚀. Fonts with such letters are used where this machine has some; what
no font has is spelled (`:rocket:`, `ka`, `u5B9E`) instead of drawn as an empty box.
"""

from __future__ import annotations

import functools
import unicodedata

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
