"""A table that shows the same content as HTML and as aligned plain text."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Align = Literal["left", "right"]
COMPARISON = "comparison"
SHOWS = "workbench_shows"
"""Key in an output's metadata for the content of a table (`Table.about`)."""

# Colours are inherited, lines come from JupyterLab's theme, so light and dark both work; if a page
# strips styles (GitHub), a plain table remains.
_LINE = "1px solid var(--jp-border-color2, rgba(128, 128, 128, .35))"
_BOX = "max-width:100%;overflow-x:auto;color:inherit;font-size:13px;line-height:1.45"
_TABLE = (
    "border-collapse:collapse;border:none;margin:4px 0;color:inherit;background:transparent;"
    "font-size:inherit;font-variant-numeric:tabular-nums"
)
_CELL = (
    "padding:3px 9px 3px 0;border:none;white-space:{wrap};text-align:{align};"
    "vertical-align:top;color:inherit"
)
_MUTED = "opacity:.72;margin:2px 0"


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: Its heading, with the unit if all cells share one.
        align: Numbers are aligned right, words left.
        wrap: Largest line length in plain text, for prose; None never wraps.
    """

    title: str
    align: Align = "right"
    wrap: int | None = None


@dataclass(frozen=True)
class Table:
    """Rows of words, displayed by notebooks as HTML and elsewhere as text.

    Attributes:
        rows: Cells as text; each row has one cell per column.
        strong: Indices of emphasised rows.
        folded: Indices of columns that HTML shows in a second, folded table below, because the page
            is too narrow for all columns.
        notes: Sentences below the table.
        about: The kind of content, for programs that read a notebook's outputs (`COMPARISON`);
            empty: not marked.
    """

    columns: Sequence[Column]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = field(default=())
    strong: frozenset[int] = frozenset()
    about: str = ""
    folded: frozenset[int] = frozenset()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        return {"text/html": self.html(), "text/plain": self.text()}

    def __repr__(self) -> str:
        return self.text()

    def html(self) -> str:
        """Return the table as one scoped block of HTML without scripts or classes."""
        first = [k for k in range(len(self.columns)) if k not in self.folded]
        body = self._part(first)
        if self.folded:
            more = [first[0], *sorted(self.folded)]
            names = ", ".join(self.columns[k].title for k in more[1:])
            body += (
                f'<details><summary style="{_MUTED};cursor:pointer">More: {html.escape(names)}'
                f"</summary>{self._part(more)}</details>"
            )
        title = f'<div style="font-weight:600">{_words(self.title)}</div>' * bool(self.title)
        notes = "".join(f'<div style="{_MUTED}">{_words(note)}</div>' for note in self.notes)
        return f'<div style="{_BOX}">{title}{body}{notes}</div>'

    def _part(self, shown: Sequence[int]) -> str:
        """Return some of the columns as a table."""
        head = "".join(
            _cell("th", self.columns[k], self.columns[k].title, "font-weight:600") for k in shown
        )
        body = "".join(
            f'<tr style="background:transparent;border-top:{_LINE}">'
            + "".join(
                _cell("td", self.columns[k], row[k], "font-weight:600" if i in self.strong else "")
                for k in shown
            )
            + "</tr>"
            for i, row in enumerate(self.rows)
        )
        return (
            f'<table style="{_TABLE}"><thead><tr style="background:transparent">{head}</tr>'
            f"</thead><tbody>{body}</tbody></table>"
        )

    def text(self) -> str:
        """Return the table as aligned plain text."""
        cells = [[_wrap(cell, c.wrap) for cell, c in zip(row, self.columns, strict=True)]
                 for row in self.rows]  # fmt: skip
        widths = [
            max([len(c.title), *(len(line) for row in cells for line in row[i])])
            for i, c in enumerate(self.columns)
        ]
        lines = [self.title] if self.title else []
        lines.append(self._line([c.title for c in self.columns], widths))
        lines.append("  ".join("─" * width for width in widths))
        for row in cells:
            for k in range(max(len(cell) for cell in row)):
                part = [cell[k] if k < len(cell) else "" for cell in row]
                lines.append(self._line(part, widths))
        return "\n".join([*lines, *self.notes])

    def _line(self, cells: Sequence[str], widths: Sequence[int]) -> str:
        placed = (
            cell.rjust(width) if column.align == "right" else cell.ljust(width)
            for cell, width, column in zip(cells, widths, self.columns, strict=True)
        )
        return "  ".join(placed).rstrip()


def _cell(tag: str, column: Column, text: str, extra: str) -> str:
    # Headings of several words take two lines if the page is too narrow for the table.
    wraps = tag == "th" or column.wrap
    style = _CELL.format(wrap="normal" if wraps else "nowrap", align=column.align)
    return f'<{tag} style="{style};{extra}">{html.escape(text)}</{tag}>'


def _words(text: str) -> str:
    """Return HTML; what stands between backticks is code."""
    return re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(text))


def _wrap(text: str, width: int | None) -> list[str]:
    return (textwrap.wrap(text, width, break_long_words=False) if width else [text]) or [""]
