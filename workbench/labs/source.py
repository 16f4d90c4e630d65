"""A lab's source: a Markdown file with its text, steps, exercises, solutions and wrong answers.

Prose is Markdown. A fenced block of `python` is a cell. What follows the word says which kind:

    ```python                    a step: students get it as it is, and the figure it drew
    ```python unseen             a step whose output they are to see for themselves first
    ```python exercise 3.2       the cell that students fill in; it has a line `# YOUR CODE 3.2`
    ```python solution 3.2       what stands in its place in the instructor's notebook
    ```python right 3.2          another answer that the check must pass; none is needed
    ```python wrong 3.2          a mistake that the check must find; at least two
    ```python check 3.2          the cell with `labs.check("3.2")`; its body may be empty
    ```python lesson             a condition a line: what the cells above must have shown; it stands
                                 in no notebook, and outputs that do not show it are not stored

Solution, wrong answers and check follow their exercise, in this order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import PlanError
from .limit import exercise_of

Kind = Literal["text", "step", "exercise", "check"]

_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"lab_(\d+)\.md")
WRONG = 2
"""How many wrong answers each exercise must have, besides the empty one."""


@dataclass
class Piece:
    """One cell of a lab.

    Attributes:
        exercise: Number of the exercise it belongs to; empty for text and steps.
        unseen: Whether students get a step without its output: it gives an answer away.
        solution: What stands in an exercise's place when it is solved.
        right: Other answers that its check must pass.
        wrong: Mistakes that its check must find.
        lessons: What must be true once it has run: conditions in its own names.
    """

    kind: Kind
    source: str
    exercise: str = ""
    unseen: bool = False
    solution: str = ""
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lessons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lab:
    """A lab as its file tells it."""

    number: int
    pieces: list[Piece]

    @property
    def exercises(self) -> list[Piece]:
        """Its exercises in their order."""
        return [piece for piece in self.pieces if piece.kind == "exercise"]


def read(path: Path) -> Lab:
    """Return the lab that a file `lab_N.md` holds.

    Raises:
        PlanError: It cannot be read as one; says which block is not understood.
    """
    named = _NAME.fullmatch(path.name)
    if named is None or not path.is_file():
        raise PlanError(
            "There is no such lab.", seen=str(path), allowed="a file lab_N.md", code="WB-PLAN-051"
        )
    lab = Lab(int(named[1]), _pieces(path.read_text(encoding="utf-8")))
    _verify(lab, path)
    return lab


def _pieces(text: str) -> list[Piece]:
    found: list[Piece] = []
    for piece in _in_order(text):
        if not isinstance(piece, Piece):
            cells = [one for one in found if one.kind != "text"]
            if not cells:
                raise PlanError(
                    "A lesson stands before the first cell of its lab.",
                    seen=piece[0],
                    code="WB-PLAN-052",
                )
            cells[-1].lessons += piece
        else:
            found.append(piece)
    return found


def _in_order(text: str) -> Iterator[Piece | list[str]]:
    """Give the cells, and the conditions of each lesson as a list."""
    open_: dict[str, Piece] = {}
    at = 0
    for block in _BLOCK.finditer(text):
        if prose := text[at : block.start()].strip():
            yield Piece("text", prose)
        at = block.end()
        words, source = block[1].split(), block[2].rstrip("\n")
        kind, number = words if len(words) == 2 else (" ".join(words), "")
        if not words:
            yield Piece("step", source)
        elif words == ["lesson"]:
            yield [line for line in map(str.strip, source.splitlines()) if line]
        elif words == ["unseen"]:
            yield Piece("step", source, unseen=True)
        elif kind == "exercise" and number:
            yield (piece := Piece("exercise", source, number))
            open_[number] = piece
        elif kind == "solution" and number in open_:
            open_[number].solution = source
        elif kind == "right" and number in open_:
            open_[number].right.append(source)
        elif kind == "wrong" and number in open_:
            open_[number].wrong.append(source)
        elif kind == "check" and number in open_:
            yield Piece("check", source or f'labs.check("{number}")', number)
        else:
            raise PlanError(
                "A block of a lab is not understood.",
                seen=f"```python{block[1]}",
                allowed="unseen or lesson; exercise, solution, right, wrong or check, and the "
                "exercise's number; an exercise stands before what belongs to it",
                code="WB-PLAN-053",
            )
    if prose := text[at:].strip():
        yield Piece("text", prose)


def _verify(lab: Lab, path: Path) -> None:
    checked = {piece.exercise for piece in lab.pieces if piece.kind == "check"}
    for piece in lab.exercises:
        lacking = None
        if exercise_of(piece.source) != piece.exercise:
            lacking = f"a line `# YOUR CODE {piece.exercise}`"
        elif not piece.solution:
            lacking = "a solution"
        elif len(piece.wrong) < WRONG:
            lacking = f"{WRONG} wrong answers"
        elif piece.exercise not in checked:
            lacking = "a check"
        if lacking:
            raise PlanError(
                f"Exercise {piece.exercise} lacks {lacking}.", seen=str(path), code="WB-PLAN-054"
            )
