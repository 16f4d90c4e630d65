"""The errors of one cell: the reason first, and folded under it what only followed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from . import terminal

Names = Callable[[list[int]], str]


@dataclass(frozen=True)
class Failure:
    """An exception that ended the cell on some worker."""

    name: str
    value: str
    traceback: str

    @staticmethod
    def of(content: Mapping[str, Any]) -> Failure:
        """Return what a Jupyter `error` message says."""
        name, value = str(content.get("ename", "")), str(content.get("evalue", ""))
        lines = [str(line) for line in content.get("traceback") or [f"{name}: {value}"]]
        return Failure(name, value, "\n".join(lines))


class Failures:
    """What ended a cell, in the order in which it was added."""

    def __init__(self) -> None:
        self._shown: dict[Failure, list[int]] = {}
        self._folded: dict[Failure, list[int]] = {}
        self.headline = ""
        """One line on what is folded: `with it: ranks 0, 2: Connection closed by peer`."""

    def __bool__(self) -> bool:
        return bool(self._shown or self._folded or self.headline)

    def add(self, key: int, content: Mapping[str, Any], *, folded: bool = False) -> None:
        """Take in an error; equal ones of several workers are one."""
        keys = (self._folded if folded else self._shown).setdefault(Failure.of(content), [])
        if key not in keys:
            keys.append(key)

    @property
    def shown(self) -> list[tuple[Failure, list[int]]]:
        """Those that are no consequence of another one, with their workers."""
        return [(failure, sorted(keys)) for failure, keys in self._shown.items()]

    def lines(self, names: Names) -> list[str]:
        """Return them as text, each line with its ranks; of what is folded only the headline."""
        lines = []
        for failure, keys in self.shown:
            traceback = terminal.to_text(terminal.render(failure.traceback))
            lines += [f"[{names(keys)}] {line}" for line in traceback.split("\n")]
        return [*lines, self.headline] if self.headline else lines

    def html(self, heading: Names, block: Callable[[str, str, list[int]], str]) -> str:
        """Return them as HTML.

        Args:
            heading: Returns what stands above the error of some workers.
            block: Draws a heading, its traceback and the workers it belongs to.
        """

        def draw(failure: Failure, keys: list[int]) -> str:
            body = terminal.to_html(terminal.render(failure.traceback))
            return block(f"{heading(keys)} · {failure.name}", body, keys)

        text = "".join(draw(failure, keys) for failure, keys in self.shown)
        folded = "".join(draw(failure, sorted(keys)) for failure, keys in self._folded.items())
        if not folded:
            return text + (
                f'<div style="white-space:pre-wrap">{escape(self.headline)}</div>'
                if self.headline
                else ""
            )
        return (
            f'{text}<details style="margin:0 0 6px"><summary style="cursor:pointer;font-size:85%;'
            f'white-space:pre-wrap">'
            f"{escape(self.headline or 'with it')}</summary>{folded}</details>"
        )
