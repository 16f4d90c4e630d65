"""Puts a student's exercise cells into the lab as it was handed out.

What runs are the lab's own steps and checks; of the notebook that was handed in, the exercises'
cells are taken, and the student's own cells between such a cell and the lab's next cells.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Literal

from .reading import Book, Cell

_CHECK_LINE = re.compile(r"labs\.(check|progress)\([^()]*\)|#.*|")


@dataclass(frozen=True)
class Item:
    """What is run next.

    Attributes:
        place: The cell's position in the lab as it was handed out.
        exercise: The exercise it belongs to; empty for steps.
        sources: What to run: one cell; of an answer, also the student's own cells around it.
        stub: The exercise as it was handed out.
    """

    kind: Literal["step", "answer", "check"]
    place: int
    exercise: str
    sources: list[str]
    stub: str = ""


@dataclass(frozen=True)
class Merged:
    """A lab with a student's answers in it.

    Attributes:
        untouched: Exercises whose cell is as it was handed out, or missing.
        notes: What was changed or missing in the notebook, and is as handed out here.
    """

    items: list[Item]
    untouched: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    @property
    def exercises(self) -> list[str]:
        """Numbers of the exercises, in their order."""
        return [item.exercise for item in self.items if item.kind == "check"]


def role(cell: Cell) -> tuple[Literal["step", "answer", "check"], str]:
    """Return what a cell of a lab as handed out is, and the exercise it belongs to."""
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
    """The notebook that was handed in, beside the lab."""

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
        """The exercise whose answer a cell holds; what its line says goes before metadata."""
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
        """Return the cells that answer an exercise; none where it was left as it was."""
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
        """Say what was not as handed out, and which cells are not run."""
        said = [f"exercise {number} was missing" for number in self._missing]
        fixed = [cell for cell in self._lab.cells if role(cell)[0] != "answer"]
        theirs = {cell.plain for cell in self._cells}
        ids = {cell.id for cell in self._cells if cell.id}
        away = [cell for cell in fixed if cell.plain not in theirs]
        changed = [cell for cell in away if cell.id in ids]
        gone = [cell for cell in away if cell.id not in ids]
        for cells, words in ((changed, "changed"), (gone, "missing")):
            for kind in ("step", "check"):
                places = [cell.place for cell in cells if role(cell)[0] == kind]
                if places:
                    said.append(f"{_counted(len(places), kind)} {words} (cell {_listed(places)})")
        restored = [f"{words}: run as handed out" for words in said]
        idle = [
            cell.place
            for i, cell in enumerate(self._cells)
            if i not in self._taken and cell.plain and not self.is_fixed(cell)
            and not self.number(cell)
        ]  # fmt: skip
        if idle:
            words = f"{_counted(len(idle), 'cell')} beside no exercise"
            restored.append(f"{words} ({_listed(idle)}): not run")
        return restored


def _counted(count: int, word: str) -> str:
    return f"1 {word}" if count == 1 else f"{count} {word}s"


def _listed(places: list[int]) -> str:
    shown = ", ".join(map(str, places[:8]))
    return shown + (", ..." if len(places) > 8 else "")
