"""The outputs of one cell on several workers: one block per rank; equal blocks are drawn once.

Errors: the cause first; errors that only followed from it are folded below.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from typing import Any

from ..errors import without_numbers
from ..shared.members import Member, called
from . import terminal
from .theme import series

Bundle = dict[str, Any]

TAIL_LINES = 200
"""Number of lines of one stream that are shown while the cell runs; at its end all are shown."""
_TAIL_CHARS = 20_000

_OWN_DISPLAY = re.compile(
    r"application/(?!pdf|json$|octet-stream).*|text/javascript|.*vega.*|.*plotly.*"
)
_RICH = ("text/html", "image/svg+xml", "image/png", "image/jpeg", "text/markdown", "text/latex")
_BANNER = "border-left:3px solid #d99000;padding:2px 8px;margin:0 0 6px;font-size:90%"
_BASE64 = re.compile(r"[^A-Za-z0-9+/=]")


@dataclass
class _Stream:
    """Consecutive text of one stream."""

    name: str
    screen: terminal.Screen = field(default_factory=terminal.Screen)


@dataclass
class _Rich:
    """A displayed object."""

    bundle: Bundle
    display_id: str | None
    own: bool  # shown in a separate display


@dataclass
class _Rank:
    """All outputs of one worker."""

    items: list[_Stream | _Rich] = field(default_factory=list)
    clear_next: bool = False


class OutputBoard:
    """Collects the outputs of a cell's workers and draws them as one bundle.

    Args:
        members: The member of each sender, in the order of the ranks. The keys are the senders that
            `message` gets (engine ids).
    """

    def __init__(self, members: Mapping[int, Member]) -> None:
        self._members = dict(members)
        self._ranks: dict[int, _Rank] = {key: _Rank() for key in self._members}
        self._republish: list[Bundle] = []
        self._failures = Failures()
        self._lock = threading.Lock()
        self.banner = ""  # the current reason for a delay; not part of the final output

    def expect(self, members: Mapping[int, Member]) -> None:
        """Accept output of further senders from now on."""
        with self._lock:
            self._members.update(members)
            for key in members:
                self._ranks.setdefault(key, _Rank())

    @property
    def empty(self) -> bool:
        """Whether the board is empty."""
        with self._lock:
            return not self._failures and not any(rank.items for rank in self._ranks.values())

    @property
    def only_text(self) -> bool:
        """Whether the board has only streams and text values, and no error."""
        with self._lock:
            items = [item for rank in self._ranks.values() for item in rank.items]
            return not self._failures and all(
                isinstance(item, _Stream) or set(item.bundle) <= {"text/plain"} for item in items
            )

    def message(self, rank: int, msg_type: str, content: Mapping[str, Any]) -> None:
        """Process one message of Jupyter's protocol; only outputs are used."""
        with self._lock:
            state = self._ranks.setdefault(rank, _Rank())
            if msg_type == "clear_output":
                state.clear_next = bool(content.get("wait"))
                if not state.clear_next:
                    state.items.clear()
                return
            if state.clear_next and msg_type != "update_display_data":
                state.items.clear()
                state.clear_next = False
            if msg_type == "stream":
                _add_text(state, str(content["name"]), str(content["text"]))
            elif msg_type in ("display_data", "execute_result"):
                state.items.append(self._rich(content))
            elif msg_type == "update_display_data":
                self._update(state, content)
            elif msg_type == "error":
                self._failures.add(rank, content)

    def fold(self, rank: int, content: Mapping[str, Any]) -> None:
        """Add an error that only followed from another error; it is folded."""
        with self._lock:
            self._failures.add(rank, content, folded=True)

    def say_with_it(self, headline: str) -> None:
        """Set the line about the folded errors."""
        with self._lock:
            self._failures.headline = headline

    def _rich(self, content: Mapping[str, Any]) -> _Rich:
        bundle = dict(content["data"])
        own = _needs_own_display(bundle)
        if own:
            self._republish.append(bundle)
        return _Rich(bundle, _display_id(content), own)

    def _update(self, state: _Rank, content: Mapping[str, Any]) -> None:
        wanted = _display_id(content)
        for item in state.items:
            if isinstance(item, _Rich) and wanted is not None and item.display_id == wanted:
                fresh = self._rich(content)
                item.bundle, item.own = fresh.bundle, fresh.own

    def take_republished(self) -> list[Bundle]:
        """Return outputs that need separate displays (widgets, scripts), each only once."""
        with self._lock:
            taken, self._republish = self._republish, []
            return taken

    def render(self, final: bool = False) -> Bundle:
        """Return the blocks as `text/html` and `text/plain`.

        Args:
            final: Draw everything; otherwise only the tail of long streams.
        """
        return {"text/html": self.html(final), "text/plain": self.text(final)}

    def text(self, final: bool = True) -> str:
        """Return all output as text, each line with its ranks: `[ranks 0-1] tensor([3.])`."""
        with self._lock:
            groups = self._groups(final)
            lines = [
                f"[{self._names(keys)}] {line}"
                for keys, (_, plain) in groups
                for line in plain.split("\n")
            ]
            lines += self._failures.lines(self._names)
        if self.banner and not final:
            lines.append(f"⏳ {self.banner}")
        return "\n".join(lines)

    def html(self, final: bool = True) -> str:
        """Return all output as HTML blocks, one per group of ranks with equal output."""
        with self._lock:
            blocks = [
                _block(self._heading(keys), body, self._place(keys[0]))
                for keys, (body, _) in self._groups(final)
            ]
            blocks.append(
                self._failures.html(
                    self._names,
                    lambda keys: self._heading(keys, failed=True),
                    lambda heading, body, keys: _block(
                        heading, _pre(body), self._place(keys[0]), failed=True
                    ),
                )
            )
        if self.banner and not final:
            blocks.append(f'<div role="status" style="{_BANNER}">⏳ {escape(self.banner)}</div>')
        return "".join(blocks)

    def _groups(self, final: bool) -> list[tuple[list[int], tuple[str, str]]]:
        """Return (ranks, (html, text)) for each different output, in the order of first ranks."""
        found: dict[tuple[str, str], list[int]] = {}
        for key, rank in self._ranks.items():
            if rank.items:
                found.setdefault(_draw_items(rank.items, final), []).append(key)
        return [(keys, drawn) for drawn, keys in found.items()]

    def _place(self, key: int) -> int:
        return list(self._ranks).index(key)

    def _names(self, keys: list[int]) -> str:
        """Return `rank 1` or `ranks 0-2, 5`; one name each if not all have a rank."""
        return called(self._member(key) for key in keys)

    def _member(self, key: int) -> Member:
        return self._members.get(key) or Member.of_ranks(key)

    def _heading(self, keys: list[int], failed: bool = False) -> str:
        if len(keys) == 1:
            return self._member(keys[0]).heading
        return (
            f"{self._names(keys)} · {'same error' if failed else 'same output'}, {len(keys)} times"
        )


def _add_text(state: _Rank, name: str, text: str) -> None:
    last = state.items[-1] if state.items else None
    if not (isinstance(last, _Stream) and last.name == name):
        last = _Stream(name)
        state.items.append(last)
    last.screen.write(text)


def _display_id(content: Mapping[str, Any]) -> str | None:
    found = (content.get("transient") or {}).get("display_id")
    return None if found is None else str(found)


def _needs_own_display(bundle: Bundle) -> bool:
    """Whether only the front end can draw the output: widgets, scripts, interactive charts."""
    if any(_OWN_DISPLAY.fullmatch(kind) for kind in bundle):
        return True
    return "<script" in _joined(bundle.get("text/html", "")).lower()


def _joined(value: Any) -> str:
    return "".join(value) if isinstance(value, list) else str(value)


def _draw_items(items: list[_Stream | _Rich], final: bool) -> tuple[str, str]:
    drawn = [
        _draw_stream(item, final) if isinstance(item, _Stream) else _draw_rich(item)
        for item in items
    ]
    return "".join(html for html, _ in drawn), "\n".join(text for _, text in drawn)


def _draw_stream(item: _Stream, final: bool) -> tuple[str, str]:
    lines = item.screen.lines()
    note = ""
    if not final:
        shown = _tail(lines)
        if len(shown) < len(lines):
            note = (
                f"… {len(lines) - len(shown)} earlier lines will be shown when the cell has ended\n"
            )
        lines = shown
    html = escape(note) + terminal.to_html(lines)
    return _pre(html, stderr=item.name == "stderr"), note + terminal.to_text(lines)


def _tail(lines: list[list[terminal.Run]]) -> list[list[terminal.Run]]:
    """Return the last lines that fit the limits, at least one."""
    size = 0
    for count, line in enumerate(reversed(lines[-TAIL_LINES:])):
        size += sum(len(text) for text, _ in line)
        if size > _TAIL_CHARS:
            return lines[len(lines) - max(1, count) :]
    return lines[-TAIL_LINES:]


def _draw_rich(item: _Rich) -> tuple[str, str]:
    bundle = item.bundle
    plain = _joined(bundle.get("text/plain", ""))
    kind = next((k for k in _RICH if k in bundle), None)
    if item.own:
        named = plain or next(iter(bundle), "")
        return _pre(f"{escape(named)}\n(shown in a separate output)"), named
    if kind is None:
        lines = terminal.render(plain)
        return _pre(terminal.to_html(lines)), terminal.to_text(lines)
    value = bundle[kind]
    if kind in ("image/png", "image/jpeg"):
        source = f"data:{kind};base64,{_base64(value)}"
        html = f'<img src="{source}" alt="{escape(plain, quote=True)}" style="max-width:100%">'
    elif kind in ("text/markdown", "text/latex"):
        html = _pre(escape(_joined(value)))
    else:
        html = f"<div>{_joined(value)}</div>"
    return html, plain or (_joined(value) if kind.startswith("text/m") else f"<{kind}>")


def _base64(value: Any) -> str:
    if isinstance(value, bytes):
        import base64

        return base64.b64encode(value).decode()
    return _BASE64.sub("", _joined(value))


def _pre(html: str, stderr: bool = False) -> str:
    shade = "background:rgba(214,69,69,.12);" if stderr else ""
    return (
        f'<pre style="margin:0;padding:1px 4px;{shade}max-height:32em;overflow:auto;'
        f'white-space:pre-wrap;overflow-wrap:anywhere">{html}</pre>'
    )


def _block(heading: str, body: str, place: int, failed: bool = False) -> str:
    color = "#d64545" if failed else series(place)
    return (
        f'<div style="border-left:3px solid {color};padding:0 0 2px 8px;margin:0 0 6px">'
        f'<div style="font-size:85%;font-weight:600;color:{color}">{escape(heading)}</div>'
        f"{body}</div>"
    )


Names = Callable[[list[int]], str]


@dataclass(frozen=True)
class Failure:
    """An exception that ended the cell on some worker."""

    name: str
    value: str
    traceback: str

    @staticmethod
    def of(content: Mapping[str, Any]) -> Failure:
        """Return the error of a Jupyter `error` message."""
        name, value = str(content.get("ename", "")), str(content.get("evalue", ""))
        lines = [str(line) for line in content.get("traceback") or [f"{name}: {value}"]]
        return Failure(name, value, "\n".join(lines))

    @property
    def kind(self) -> tuple[str, str, str]:
        """Equal for errors that differ only in numbers: sizes, samples, addresses."""
        plain = terminal.to_text(terminal.render(self.traceback))
        return self.name, without_numbers(self.value), without_numbers(plain)


class Failures:
    """The errors that ended a cell, in the order in which they were added."""

    def __init__(self) -> None:
        self._shown: dict[Failure, list[int]] = {}
        self._folded: dict[Failure, list[int]] = {}
        self.headline = ""
        """The line about folded errors: `Also failed: ranks 0, 2: Connection closed by peer`."""

    def __bool__(self) -> bool:
        return bool(self._shown or self._folded or self.headline)

    def add(self, key: int, content: Mapping[str, Any], *, folded: bool = False) -> None:
        """Add an error; equal errors of several workers are shown once."""
        keys = (self._folded if folded else self._shown).setdefault(Failure.of(content), [])
        if key not in keys:
            keys.append(key)

    def lines(self, names: Names) -> list[str]:
        """Return the errors as text, each line with its ranks; folded errors as a headline."""
        lines = []
        for failures, keys in _alike(self._shown):
            traceback = terminal.to_text(terminal.render(failures[0][0].traceback))
            told = [*traceback.split("\n"), *_others(failures, names)]
            lines += [f"[{names(keys)}] {line}" for line in told]
        return [*lines, self.headline] if self.headline else lines

    def html(
        self, names: Names, heading: Names, block: Callable[[str, str, list[int]], str]
    ) -> str:
        """Return the errors as HTML.

        Args:
            names: Returns the names of workers.
            heading: Returns the heading above an error.
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
            f"{escape(self.headline or 'Also failed')}</summary>{folded}</details>"
        )


Group = list[tuple[Failure, list[int]]]
"""Errors that differ only in numbers, each with its workers, in the order of arrival."""


def _alike(found: Mapping[Failure, list[int]]) -> list[tuple[Group, list[int]]]:
    """Return all errors of one kind, and all workers that they ended."""
    groups: dict[tuple[str, str, str], Group] = {}
    for failure, keys in found.items():
        groups.setdefault(failure.kind, []).append((failure, sorted(keys)))
    return [(group, sorted(key for _, keys in group for key in keys)) for group in groups.values()]


def _others(failures: Group, names: Names) -> list[str]:
    """Return the texts of errors that are not shown if they differ."""
    first = failures[0][0]
    return [
        f"{names(keys)}: {one.name}: {one.value}"
        for one, keys in failures[1:]
        if one.value != first.value
    ]
