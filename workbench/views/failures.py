"""The errors of one cell: the reason first, and folded under it what only followed from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any

from ..errors import without_numbers
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

    @property
    def kind(self) -> tuple[str, str, str]:
        """The same of errors that differ in numbers alone: sizes, samples, addresses."""
        plain = terminal.to_text(terminal.render(self.traceback))
        return self.name, without_numbers(self.value), without_numbers(plain)


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

    def lines(self, names: Names) -> list[str]:
        """Return them as text, each line with its ranks; of what is folded only the headline."""
        lines = []
        for failures, keys in _alike(self._shown):
            traceback = terminal.to_text(terminal.render(failures[0][0].traceback))
            told = [*traceback.split("\n"), *_others(failures, names)]
            lines += [f"[{names(keys)}] {line}" for line in told]
        return [*lines, self.headline] if self.headline else lines

    def html(
        self, names: Names, heading: Names, block: Callable[[str, str, list[int]], str]
    ) -> str:
        """Return them as HTML.

        Args:
            names: Returns how some workers are called.
            heading: Returns what stands above their error.
            block: Draws a heading, its traceback and the workers it belongs to.
        """

        def draw(failures: Group, keys: list[int]) -> str:
            body = terminal.to_html(terminal.render(failures[0][0].traceback))
            body += "".join(f"\n{escape(line)}" for line in _others(failures, names))
            return block(f"{heading(keys)} · {failures[0][0].name}", body, keys)

        text = "".join(draw(failures, keys) for failures, keys in _alike(self._shown))
        folded = "".join(draw(failures, keys) for failures, keys in _alike(self._folded))
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


Group = list[tuple[Failure, list[int]]]
"""Errors that differ in numbers alone, each with its workers, in the order in which they came."""


def _alike(found: Mapping[Failure, list[int]]) -> list[tuple[Group, list[int]]]:
    """Return errors of one kind together, and all the workers that they ended."""
    groups: dict[tuple[str, str, str], Group] = {}
    for failure, keys in found.items():
        groups.setdefault(failure.kind, []).append((failure, sorted(keys)))
    return [(group, sorted(key for _, keys in group for key in keys)) for group in groups.values()]


def _others(failures: Group, names: Names) -> list[str]:
    """Return what the errors say that are not shown, where that is something else."""
    first = failures[0][0]
    return [
        f"{names(keys)}: {one.name}: {one.value}"
        for one, keys in failures[1:]
        if one.value != first.value
    ]
