"""Reads a notebook whatever is in it: any format of Jupyter's, or the reason why it is none."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..limit import MARKER, exercise_of

MOST_BYTES = 50_000_000
MOST_CELLS = 5000
_NUMBER = re.compile(r"\d{1,3}\.\d{1,3}")


class Unreadable(Exception):
    """The file is no notebook that could be graded; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One code cell.

    Attributes:
        place: Its position among all cells, from 1.
        exercise: The exercise whose cell it is by its metadata; empty for others.
        check: The exercise whose check it is.
    """

    place: int
    source: str
    id: str = ""
    exercise: str = ""
    check: str = ""
    tags: frozenset[str] = frozenset()

    @property
    def plain(self) -> str:
        """The source as it is compared: without space at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.source.strip().splitlines())

    @property
    def marked(self) -> str:
        """The number in its line `# YOUR CODE`, empty where there is none."""
        return exercise_of(self.source) or ""


@dataclass(frozen=True)
class Book:
    """The code cells of a notebook.

    Attributes:
        lab: Which lab it is by its metadata.
        version: `student` or `solved`, by its metadata.
    """

    cells: list[Cell] = field(default_factory=list)
    lab: int | None = None
    version: str = ""

    def guessed_lab(self) -> int | None:
        """The lab that most of its `# YOUR CODE` markers name."""
        numbers = Counter(
            found.partition(".")[0] for cell in self.cells for found in MARKER.findall(cell.source)
        )
        return int(numbers.most_common(1)[0][0]) if numbers else None


def read(path: Path) -> Book:
    """Return the code cells of a notebook.

    Raises:
        Unreadable: It is missing, too large, or no notebook.
    """
    content = _content(path)
    if not isinstance(content, dict):
        raise Unreadable("It is JSON, but no notebook.")
    cells = content.get("cells")
    if cells is None:  # before format 4, cells stood in worksheets
        sheets = content.get("worksheets")
        if not isinstance(sheets, list):
            raise Unreadable("It is JSON, but no notebook: it has no cells.")
        cells = [cell for sheet in sheets for cell in _list(_dict(sheet).get("cells"))]
    if not isinstance(cells, list):
        raise Unreadable("It is JSON, but no notebook: its cells are no list.")
    if len(cells) > MOST_CELLS:
        raise Unreadable(f"It has {len(cells)} cells: at most {MOST_CELLS} are read.")
    ours = _dict(_dict(content.get("metadata")).get("workbench"))
    lab = ours.get("lab")
    whole = isinstance(lab, int) and not isinstance(lab, bool)
    found = (_cell(place, _dict(cell)) for place, cell in enumerate(cells, 1))
    kept = [cell for cell in found if cell is not None]
    return Book(kept, lab if whole else None, _word(ours.get("version")))


def _content(path: Path) -> Any:
    try:
        if path.is_dir():
            raise Unreadable("It is a folder: name the notebooks in it.")
        if not path.exists():
            raise Unreadable("There is no such file.")
        if not path.is_file():
            raise Unreadable("It is no regular file.")
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Unreadable(
                f"It has {size / 1e6:.0f} MB: at most {MOST_BYTES / 1e6:.0f} are read."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(f"It is not UTF-8 text (byte {error.start}).") from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"It cannot be read: {getattr(error, 'strerror', error)}.") from None
    if not text.strip():
        raise Unreadable("The file is empty.")
    try:
        return json.loads(text)
    except RecursionError:
        raise Unreadable("It is not JSON that could be read: it is nested too deeply.") from None
    except ValueError as error:
        raise Unreadable(f"It is not JSON: {str(error)[:200]}.") from None


def _cell(place: int, cell: dict[str, Any]) -> Cell | None:
    if cell.get("cell_type") != "code":
        return None
    source = cell.get("source", cell.get("input", ""))
    if isinstance(source, list):
        source = "".join(part for part in source if isinstance(part, str))
    if not isinstance(source, str):
        source = ""
    metadata = _dict(cell.get("metadata"))
    ours = _dict(metadata.get("workbench"))
    return Cell(
        place,
        source.encode("utf-8", "replace").decode("utf-8"),  # half a surrogate cannot be sent
        id=_word(cell.get("id")),
        exercise=_number(ours.get("exercise")),
        check=_number(ours.get("check")),
        tags=frozenset(_word(tag) for tag in _list(metadata.get("tags"))),
    )


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _word(value: Any) -> str:
    return value if isinstance(value, str) else ""


def _number(value: Any) -> str:
    return value if isinstance(value, str) and _NUMBER.fullmatch(value) else ""
