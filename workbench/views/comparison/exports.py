"""A comparison as text for other tools: CSV, Markdown, HTML, and files by their suffix."""

from __future__ import annotations

import base64
import csv
import html
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import PlanError
from ...history.analysis.comparison import fields, records
from ...shared.cluster_env import export
from ..tables import comparison_table
from ..theme import PAPER

if TYPE_CHECKING:
    import pandas as pd

    from ...history.analysis.comparison import Comparison
    from ..table import Table

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>body{{font-family:system-ui,sans-serif;margin:2rem auto;max-width:82rem;padding:0 1rem;\
color:#1F2328;background:#FFFFFF}}img{{max-width:100%;margin-top:1.5rem}}</style></head>
<body>{table}<img alt="{title}" src="data:image/svg+xml;base64,{picture}"></body></html>
"""

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_of(comparison: Comparison) -> str:
    """Return a line per plan: plain numbers, units in the headings, empty where not measured.

    The headings are the keys of `history.fields`: `step_s` is in seconds, `sent_bytes` in bytes,
    and shares are fractions of 1.
    """
    target = io.StringIO()
    keys = [field.key for field in fields(comparison.metrics)]
    writer = csv.DictWriter(target, keys, lineterminator="\n")
    writer.writeheader()
    for record in records(comparison.rows, comparison.metrics):
        writer.writerow({key: csv_cell(value) for key, value in record.items()})
    return target.getvalue()


def csv_cell(value: object) -> object:
    """Return a cell that is safe for a spreadsheet: it would calculate a name that looks like code.

    https://owasp.org/www-community/attacks/CSV_Injection
    """
    if isinstance(value, str) and value[:1] in _FORMULA:
        return f"'{value}"
    return "" if value is None else value


def frame_of(comparison: Comparison) -> pd.DataFrame:
    """Return the table of `csv_of` as a DataFrame; NaN where not measured."""
    import pandas as pd

    made = pd.DataFrame(records(comparison.rows, comparison.metrics))
    whole = {"run", "strategy", "framework", "state", "seeds", "workers", "steps"}
    return made.astype({key: float for key in made.columns if key not in whole})


def markdown_of(table: Table) -> str:
    """Return a table in GitHub's Markdown, with its title above and its notes below."""
    rules = ["---:" if column.align == "right" else ":---" for column in table.columns]
    lines = [_line([_escaped(column.title) for column in table.columns]), _line(rules)]
    for index, row in enumerate(table.rows):
        cells = [_escaped(cell) for cell in row]
        lines.append(_line([f"**{c}**" if index in table.strong and c else c for c in cells]))
    parts = [f"**{_escaped(table.title)}**"] if table.title else []
    parts.append("\n".join(lines))
    parts += [f"- {_escaped(note)}" for note in table.notes[:1]]
    text = "\n\n".join(parts)
    return "\n".join([text, *(f"- {_escaped(note)}" for note in table.notes[1:])]) + "\n"


def page_of(comparison: Comparison) -> str:
    """Return a complete page with the table and the picture, which loads nothing from the net."""
    from .picture import comparison_svg

    table = comparison_table(comparison)
    names = ", ".join(row.name for row in comparison.rows)
    return PAGE.format(
        title=html.escape(f"Comparison: {names}", quote=True),
        table=table.html(),
        picture=base64.b64encode(comparison_svg(comparison)).decode(),
    )


def kept_bundle(comparison: Comparison) -> dict[str, str]:
    """Return table and picture, folded; a saved notebook shows them instead of the widget."""
    from .picture import comparison_png

    table, names = comparison_table(comparison), ", ".join(row.name for row in comparison.rows)
    picture = base64.b64encode(comparison_png(comparison, PAPER["any"])).decode()
    return {
        "text/html": "<details><summary>Saved comparison (table and picture): "
        f"{html.escape(names)}</summary>"
        f'{table.html()}<img alt="Comparison of {html.escape(names, quote=True)}" '
        f'style="max-width:100%" src="data:image/png;base64,{picture}"></details>',
        "text/plain": table.text(),
    }


def save(comparison: Comparison, path: str | Path) -> Path:
    """Write a comparison to a file, in the form of its suffix; return its path.

    Raises:
        PlanError: There is no form for this suffix.
        RunError: The file cannot be written.
    """
    target = Path(path).expanduser()
    # Newlines are written unchanged, on every system.
    return export(target, as_bytes(comparison, target.suffix.lower() or str(path)))


def as_bytes(comparison: Comparison, suffix: str) -> bytes:
    """Return the contents of a file with this suffix (`.csv`).

    Raises:
        PlanError: There is no form for this suffix.
    """
    make = _FORMS.get(suffix)
    if make is None:
        raise PlanError(
            "A comparison cannot be saved in a file with this suffix.",
            seen=suffix,
            allowed=", ".join(_FORMS),
            code="WB-PLAN-149",
        )
    made = make(comparison)
    return made if isinstance(made, bytes) else made.encode()


def _png(comparison: Comparison) -> bytes:
    from .picture import comparison_png

    return comparison_png(comparison)


def _svg(comparison: Comparison) -> bytes:
    from .picture import comparison_svg

    return comparison_svg(comparison)


def _markdown(comparison: Comparison) -> str:
    return markdown_of(comparison_table(comparison))


def _json(comparison: Comparison) -> str:
    return json.dumps(comparison.to_wire(), allow_nan=False) + "\n"


_FORMS: dict[str, Callable[[Comparison], str | bytes]] = {
    ".csv": csv_of, ".md": _markdown, ".html": page_of, ".png": _png, ".svg": _svg, ".json": _json,
}  # fmt: skip
"""The function that saves a comparison under each suffix."""


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    """Return text that Markdown shows unchanged; it may contain names from outside."""
    flat = html.escape(" ".join(text.split()), quote=False)
    flat = re.sub(r"([\\`*\[\]|~#])", r"\\\1", flat)
    return re.sub(r"(?<![^\W_])_|_(?![^\W_])", r"\\_", flat)
