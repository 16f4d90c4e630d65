"""Replaces methods for a time, and puts them back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Patches:
    """What was replaced; `undo` puts it back, the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put what `make` returns for the attribute in its place; an inherited one is shadowed."""
        before, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, make(before))
        self._undo.append(
            (lambda: setattr(owner, name, before)) if own else lambda: delattr(owner, name)
        )

    def undo(self) -> None:
        """Put everything back."""
        while self._undo:
            self._undo.pop()()
