"""Reads a notebook in any format of Jupyter's, or says why a file is not a notebook.

A student's exercise cells are put into the lab as it was handed out. The lab's own steps and checks
run, not those of the notebook that was handed in. From that notebook come only the exercises' cells
and the student's own cells between such a cell and the lab's next cells.
"""

from __future__ import annotations

import ast
import contextlib
import json
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ..limit import MARKER, exercise_of

MOST_BYTES = 50_000_000
MOST_CELLS = 5000
_NUMBER = re.compile(r"\d{1,3}\.\d{1,3}")


class Unreadable(Exception):
    """The file is not a notebook that can be graded; the message says why."""


@dataclass(frozen=True)
class Cell:
    """One code cell.

    Attributes:
        place: Its position among all cells, from 1.
        exercise: The exercise whose cell it is, by its metadata; empty for other cells.
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
        """The source for comparisons: without spaces at the ends of lines."""
        return "\n".join(line.rstrip() for line in self.source.strip().splitlines())

    @property
    def marked(self) -> str:
        """The number in its line `# YOUR CODE`; empty if there is none."""
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
        Unreadable: It is missing, too large, or not a notebook.
    """
    content = _content(path)
    if not isinstance(content, dict):
        raise Unreadable("The file is JSON, but not a notebook.")
    cells = content.get("cells")
    if cells is None:  # before format 4, cells were in worksheets
        sheets = content.get("worksheets")
        if not isinstance(sheets, list):
            raise Unreadable("The file is JSON, but not a notebook: it has no cells.")
        cells = [cell for sheet in sheets for cell in _list(_dict(sheet).get("cells"))]
    if not isinstance(cells, list):
        raise Unreadable("The file is JSON, but not a notebook: its cells are not a list.")
    if len(cells) > MOST_CELLS:
        raise Unreadable(f"The file has {len(cells)} cells, but at most {MOST_CELLS} are allowed.")
    ours = _dict(_dict(content.get("metadata")).get("workbench"))
    lab = ours.get("lab")
    whole = isinstance(lab, int) and not isinstance(lab, bool)
    found = (_cell(place, _dict(cell)) for place, cell in enumerate(cells, 1))
    kept = [cell for cell in found if cell is not None]
    return Book(kept, lab if whole else None, _word(ours.get("version")))


def _content(path: Path) -> Any:
    try:
        if path.is_dir():
            raise Unreadable(
                "This is a folder. Give the paths of the notebooks in this folder instead."
            )
        if not path.exists():
            raise Unreadable("There is no such file.")
        if not path.is_file():
            raise Unreadable("This is not a regular file.")
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise Unreadable(
                f"The file has {size / 1e6:.2f} MB, but at most {MOST_BYTES / 1e6:g} MB are "
                "allowed."
            )
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable(
            f"The file is not UTF-8 text: the byte at position {error.start} is not valid."
        ) from None
    except (OSError, ValueError) as error:
        raise Unreadable(f"The file cannot be read: {getattr(error, 'strerror', error)}.") from None
    if not text.strip():
        raise Unreadable("The file is empty.")
    try:
        return json.loads(text)
    except RecursionError:
        raise Unreadable("The file cannot be read: its JSON is nested too deeply.") from None
    except ValueError as error:
        raise Unreadable(f"The file is not JSON: {str(error)[:200]}.") from None


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


_CHECK_LINE = re.compile(r"labs\.(check|progress)\([^()]*\)|#.*|")


@dataclass(frozen=True)
class Item:
    """The next thing to run.

    Attributes:
        place: The cell's position in the lab as it was handed out.
        exercise: The exercise it belongs to; empty for steps.
        sources: The cells to run: one cell; for an answer, also the student's own cells around it.
        stub: The exercise as it was handed out.
    """

    kind: Literal["step", "answer", "check"]
    place: int
    exercise: str
    sources: list[str]
    stub: str = ""


def definitions(source: str) -> str:
    """Return the part of an answer that only defines something: imports, functions, constants.

    If a cell has ended its kernel, later exercises can still use its functions.

    Returns:
        Empty if the cell defines no function or class, or cannot be parsed.
    """
    lines = source.splitlines()
    head = [line for line in lines[:1] if line.startswith("%%")]
    body = "\n".join(line for line in lines[len(head) :] if not line.startswith(("%", "!")))
    try:
        tree = ast.parse(body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    if not any(isinstance(node, _DEFINED) for node in tree.body):
        return ""
    kept = [ast.unparse(node) for node in tree.body if _only_defines(node)]
    return "\n".join([*head, *kept])


_DEFINED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def _only_defines(node: ast.stmt) -> bool:
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
        with contextlib.suppress(ValueError, TypeError, RecursionError, MemoryError):
            ast.literal_eval(node.value)
            return True
    return isinstance(node, (*_DEFINED, ast.Import, ast.ImportFrom))


@dataclass(frozen=True)
class Merged:
    """A lab with a student's answers in it.

    Attributes:
        untouched: Exercises whose cell is unchanged or missing.
        notes: What was changed or missing in the notebook, and is restored here.
    """

    items: list[Item]
    untouched: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def exercises(self) -> list[str]:
        """Numbers of the exercises, in order."""
        return [item.exercise for item in self.items if item.kind == "check"]


def role(cell: Cell) -> tuple[Literal["step", "answer", "check"], str]:
    """Return the role of a cell of the original lab, and the exercise it belongs to."""
    if cell.check:
        return "check", cell.check
    number = cell.exercise or cell.marked
    return ("answer", number) if number else ("step", "")


def merge(lab: Book, handed_in: Book) -> Merged:
    """Return the lab with the answers of the notebook that was handed in."""
    student = _Student(lab, handed_in)
    merged = Merged([])
    for cell in lab.cells:
        kind, number = role(cell)
        sources = [cell.source]
        if kind == "answer":
            answer = student.answer(number, cell)
            if not answer:
                merged.untouched.add(number)
            sources = [one.source for one in answer] or sources
        merged.items.append(Item(kind, cell.place, number, sources, cell.source))
    merged.notes.extend(student.notes())
    return merged


class _Student:
    """The notebook that was handed in, compared with the lab."""

    def __init__(self, lab: Book, handed_in: Book) -> None:
        self._lab, self._cells = lab, handed_in.cells
        self._numbers = {number for kind, number in map(role, lab.cells) if kind == "answer"}
        fixed = [cell for cell in lab.cells if role(cell)[0] != "answer"]
        self._fixed_ids = {cell.id for cell in fixed if cell.id}
        self._fixed_sources = {cell.plain for cell in fixed}
        self._has_ids = any(cell.id in self._fixed_ids for cell in self._cells)
        self._taken: set[int] = set()
        self._missing: list[str] = []

    def number(self, cell: Cell) -> str:
        """Return the exercise that a cell answers: by its line `# YOUR CODE`, else by metadata."""
        if cell.marked in self._numbers:
            return cell.marked
        return cell.exercise if cell.exercise in self._numbers else ""

    def is_fixed(self, cell: Cell) -> bool:
        """Whether it is one of the lab's steps or checks, changed or not."""
        if self.number(cell):
            return False
        return (
            cell.plain in self._fixed_sources
            or bool(cell.check)
            or cell.id in self._fixed_ids
            or ("step" in cell.tags and not self._has_ids)
            or all(_CHECK_LINE.fullmatch(line.strip()) for line in cell.source.splitlines())
        )

    def answer(self, number: str, stub: Cell) -> list[Cell]:
        """Return the cells that answer an exercise; none if it was not changed."""
        mine = [i for i, cell in enumerate(self._cells) if self.number(cell) == number]
        if not mine:
            self._missing.append(number)
        written = [i for i in mine if self._cells[i].plain not in ("", stub.plain)]
        marked = [i for i in written if self._cells[i].marked]
        if not written:
            return []
        main = (marked or written)[-1]
        above = self._beside(range(main - 1, -1, -1), number)
        below = self._beside(range(main + 1, len(self._cells)), number)
        found = [*reversed(above), main, *below]
        self._taken.update(found)
        return [self._cells[i] for i in found]

    def _beside(self, places: range, number: str) -> list[int]:
        """Return the student's own cells up to the next cell of the lab."""
        found = []
        for i in places:
            cell = self._cells[i]
            theirs = self.number(cell)
            if self.is_fixed(cell) or theirs not in ("", number) or i in self._taken:
                break
            if not cell.marked:  # else an earlier attempt at the same exercise
                found.append(i)
        return found

    def notes(self) -> list[str]:
        """Say which parts differ from the original lab, and which cells are not run."""
        one, several = "the original cell was run instead", "the original cells were run instead"
        said = [f"exercise {number} was missing: {one}" for number in self._missing]
        fixed = [cell for cell in self._lab.cells if role(cell)[0] != "answer"]
        theirs = {cell.plain for cell in self._cells}
        ids = {cell.id for cell in self._cells if cell.id}
        away = [cell for cell in fixed if cell.plain not in theirs]
        changed = [cell for cell in away if cell.id in ids]
        gone = [cell for cell in away if cell.id not in ids]
        for cells, words in ((changed, "changed"), (gone, "missing")):
            for kind, word, of in (("step", "cell", " of the lab"), ("check", "check", "")):
                places = [cell.place for cell in cells if role(cell)[0] == kind]
                if places:
                    count = _counted(len(places), word) + of
                    where = f"{'cell' if len(places) == 1 else 'cells'} {_listed(places)}"
                    was, run = ("was", one) if len(places) == 1 else ("were", several)
                    said.append(f"{count} {was} {words} ({where} of the original notebook): {run}")
        idle = [
            cell.place
            for i, cell in enumerate(self._cells)
            if i not in self._taken and cell.plain and not self.is_fixed(cell)
            and not self.number(cell)
        ]  # fmt: skip
        if idle:
            words = f"{_counted(len(idle), 'cell')} outside all exercises"
            was, of = ("was", "cell") if len(idle) == 1 else ("were", "cells")
            said.append(f"{words} {was} not run ({of} {_listed(idle)} of this notebook)")
        return said


def _counted(count: int, word: str) -> str:
    return f"1 {word}" if count == 1 else f"{count} {word}s"


def _listed(places: list[int]) -> str:
    shown = ", ".join(map(str, places[:8]))
    return shown + (", ..." if len(places) > 8 else "")
