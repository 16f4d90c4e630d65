"""How a recipe trains, read from its source without running it."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import lru_cache

from ..catalog.entry import FIT_FEATURES, Strategy, Way
from .recipe import framework_of

WORDS: dict[Way, str] = {
    "fit": "wb.fit",
    "prepare": "wb.prepare",
    "keras": "model.fit",
    "loop": "a loop of its own",
}


@dataclass(frozen=True)
class Use:
    """What a source calls.

    Attributes:
        way: How it trains; None where that cannot be read (a magic, a library's trainer).
        features: Arguments of `wb.fit`, of `FIT_FEATURES`, that it surely uses.
    """

    way: Way | None = None
    features: frozenset[str] = frozenset()


@lru_cache(maxsize=64)
def use_of(source: str) -> Use:
    """Return how a source trains. What it does not say plainly is left open, never guessed."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return Use()
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    ways = {way: call for call in calls if (way := _way(call))}
    if framework_of(source) != "tensorflow":  # a scaler and a trainer of Lightning have a fit too
        ways.pop("keras", None)
    if "fit" in ways:
        return Use("fit", _features(ways["fit"]))
    order: tuple[Way, ...] = ("prepare", "keras", "loop")
    return Use(next((way for way in order if way in ways), None))


def misfit(entry: Strategy, use: Use) -> str:
    """Return why a strategy cannot train what is used so, in one sentence; empty: it can."""
    if use.way is not None and use.way not in entry.ways:
        able = " or ".join(WORDS[way] for way in entry.ways)
        return f"This recipe trains with {WORDS[use.way]}; {entry.name} needs {able}."
    missing = sorted(use.features - entry.supports)
    if missing:
        return f"This recipe uses {', '.join(missing)}, which {entry.name} does not support."
    return ""


def _way(call: ast.Call) -> Way | None:
    if not isinstance(call.func, ast.Attribute):
        return None
    owner = call.func.value.id if isinstance(call.func.value, ast.Name) else ""
    name = call.func.attr
    if owner == "wb":
        ours: dict[str, Way] = {"fit": "fit", "prepare": "prepare"}
        return ours.get(name)
    if owner == "strategy":
        return "loop" if name == "run" else None
    return "keras" if name == "fit" and owner != "" else None


def _features(call: ast.Call) -> frozenset[str]:
    given = ((word.arg, word.value) for word in call.keywords if word.arg in FIT_FEATURES)
    return frozenset(name for name, value in given if name and not _unused(name, value))


def _unused(name: str, value: ast.expr) -> bool:
    """Whether an argument is given as what it is by default."""
    if not isinstance(value, ast.Constant):
        return False
    return value.value in (None, False) or (name == "accumulate" and value.value == 1)
