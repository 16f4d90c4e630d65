"""The text that a terminal would show of a stream: carriage returns, backspaces, colours, cursor
moves.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from html import escape
from typing import Any

_TOKEN = re.compile(
    r"\x1b\[[0-9;:?]*[ -/]*[@-~]"  # control sequences: colours, cursor, erase
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"  # titles, links
    r"|\r|\x08|[^\x1b\r\x08]+|\x1b"
)
_CONTROL = re.compile(r"[\x1b\r\x08]")

# Readable on white and on black pages alike.
_PALETTE = ("#5c6370", "#d64545", "#2e9e4f", "#b8860b", "#3b82d6", "#a855c9", "#1a9fa8", "#9aa1ab")
_BRIGHT = ("#7a828e", "#e8605f", "#3fb865", "#d0a020", "#5a9df0", "#c07be0", "#34bcc4", "#b4bac4")


@dataclass(frozen=True)
class Style:
    """The style of text; `fg` and `bg` are CSS colours or empty."""

    fg: str = ""
    bg: str = ""
    bold: bool = False
    italic: bool = False
    underline: bool = False

    def css(self) -> str:
        """Return the style as CSS declarations."""
        parts = [f"color:{self.fg}"] if self.fg else []
        parts += [f"background:{self.bg}"] if self.bg else []
        parts += ["font-weight:bold"] if self.bold else []
        parts += ["font-style:italic"] if self.italic else []
        parts += ["text-decoration:underline"] if self.underline else []
        return ";".join(parts)


PLAIN = Style()
Cell = tuple[str, Style]
Run = tuple[str, Style]


class Screen:
    """A growing page of styled lines; text is written to it as to an endless terminal."""

    def __init__(self) -> None:
        self._lines: list[list[Run]] = [[]]
        self._row = 0
        self._column = 0
        self._width = 0  # characters in the present line
        self._cells: list[Cell] | None = None  # the present line taken apart, while it is edited
        self._style = PLAIN
        self._rest = ""

    def write(self, text: str) -> None:
        """Write text with its control characters."""
        text = self._rest + text
        self._rest = ""
        cut = re.search(r"\x1b(?:\[[0-9;:?]*[ -/]*|\][^\x07\x1b]*)?$", text)
        if cut:  # a sequence that the next message completes
            text, self._rest = text[: cut.start()], text[cut.start() :]
        first = True
        for piece in text.split("\n"):
            if not first:
                self._newline()
            first = False
            if piece:
                self._write_piece(piece)

    def _write_piece(self, piece: str) -> None:
        if not _CONTROL.search(piece):
            self._put(piece)
            return
        for token in _TOKEN.findall(piece):
            if token == "\r":
                self._column = 0
            elif token == "\x08":
                self._column = max(0, self._column - 1)
            elif token[0] == "\x1b":
                self._control(token)
            else:
                self._put(token)

    def _put(self, text: str) -> None:
        if self._column == self._width and self._cells is None:
            line = self._lines[self._row]
            if line and line[-1][1] == self._style:
                line[-1] = (line[-1][0] + text, self._style)
            else:
                line.append((text, self._style))
        else:
            cells = self._edit()
            cells += [(" ", PLAIN)] * (self._column - len(cells))
            cells[self._column : self._column + len(text)] = [(c, self._style) for c in text]
        self._column += len(text)
        self._width = max(self._width, self._column)

    def _edit(self) -> list[Cell]:
        if self._cells is None:
            self._cells = [(c, s) for text, s in self._lines[self._row] for c in text]
        return self._cells

    def _settle(self) -> None:
        """Store an edited line as runs of equal style."""
        if self._cells is not None:
            self._lines[self._row] = _join(self._cells)
            self._cells = None

    def _newline(self) -> None:
        self._go(self._row + 1, 0)

    def _go(self, row: int, column: int) -> None:
        self._settle()
        self._row = max(0, row)
        while len(self._lines) <= self._row:
            self._lines.append([])
        self._column = column
        self._width = sum(len(text) for text, _ in self._lines[self._row])

    def _control(self, token: str) -> None:
        if not token.startswith("\x1b["):
            return
        kind, body = token[-1], token[2:-1]
        if kind == "m":
            self._style = _restyle(self._style, body)
            return
        count = int(body) if body.isdigit() else 0
        if kind == "K":
            self._erase(count)
        elif kind in "AB":
            self._go(self._row + (-1 if kind == "A" else 1) * max(1, count), self._column)
        elif kind in "CD":
            self._column = max(0, self._column + (1 if kind == "C" else -1) * max(1, count))
        elif kind == "G":
            self._column = max(0, count - 1)

    def _erase(self, mode: int) -> None:
        cells = self._edit()
        if mode == 2:
            cells.clear()
        elif mode == 1:
            cells[: self._column] = [(" ", PLAIN)] * min(self._column, len(cells))
        else:
            del cells[self._column :]
        self._width = len(cells)

    def lines(self) -> list[list[Run]]:
        """Return the lines as runs of equal style, without an empty one at the end."""
        self._settle()
        return self._lines if self._lines[-1] else self._lines[:-1]


def _join(cells: list[Cell]) -> list[Run]:
    runs: list[Run] = []
    for char, style in cells:
        if runs and runs[-1][1] == style:
            runs[-1] = (runs[-1][0] + char, style)
        else:
            runs.append((char, style))
    return runs


def _restyle(style: Style, body: str) -> Style:
    """Return the style after the codes of one colour sequence."""
    codes = [int(part) if part.isdigit() else 0 for part in re.split("[;:]", body or "0")]
    while codes:
        code = codes.pop(0)
        if code == 0:
            style = PLAIN
        elif code in (38, 48):
            color = _extended(codes)
            style = replace(style, fg=color) if code == 38 else replace(style, bg=color)
        else:
            style = _simple(style, code)
    return style


def _simple(style: Style, code: int) -> Style:
    changes: dict[int, dict[str, Any]] = {
        1: {"bold": True}, 3: {"italic": True}, 4: {"underline": True}, 22: {"bold": False},
        23: {"italic": False}, 24: {"underline": False}, 39: {"fg": ""}, 49: {"bg": ""},
    }  # fmt: skip
    for index in range(8):
        changes[30 + index], changes[40 + index] = {"fg": _PALETTE[index]}, {"bg": _PALETTE[index]}
        changes[90 + index], changes[100 + index] = {"fg": _BRIGHT[index]}, {"bg": _BRIGHT[index]}
    return replace(style, **changes.get(code, {}))


def _extended(codes: list[int]) -> str:
    """Remove a 256-colour or true-colour code from the front; return it as CSS."""
    kind = codes.pop(0) if codes else 0
    if kind == 2 and len(codes) >= 3:
        red, green, blue = (min(codes.pop(0), 255) for _ in range(3))
        return f"rgb({red},{green},{blue})"
    index = codes.pop(0) if kind == 5 and codes else 0
    if index < 8:
        return _PALETTE[index]
    if index < 16:
        return _BRIGHT[index - 8]
    if index >= 232:
        grey = 8 + 10 * (min(index, 255) - 232)
        return f"rgb({grey},{grey},{grey})"
    levels = (0, 95, 135, 175, 215, 255)
    cube = index - 16
    return f"rgb({levels[cube // 36]},{levels[cube // 6 % 6]},{levels[cube % 6]})"


def to_text(lines: list[list[Run]]) -> str:
    """Return lines as plain text."""
    return "\n".join("".join(text for text, _ in line) for line in lines)


def to_html(lines: list[list[Run]]) -> str:
    """Return lines as HTML for a `pre`; all text is escaped."""
    return "\n".join("".join(_span(text, style) for text, style in line) for line in lines)


def _span(text: str, style: Style) -> str:
    return escape(text) if style == PLAIN else f'<span style="{style.css()}">{escape(text)}</span>'


def render(text: str) -> list[list[Run]]:
    """Return the text that a terminal shows for a complete text."""
    screen = Screen()
    screen.write(text)
    return screen.lines()
