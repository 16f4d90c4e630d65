"""Exercises: what each is called, where its cell runs, and the function that looks at the answer.

The checks of lab N stand in `workbench/labs/checks/lab_N.py`, which is imported when one of them
is first asked for.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..errors import PlanError, unknown

if TYPE_CHECKING:
    from .answers import Check

Where = Literal["the notebook", "the engines"]

_NUMBER = re.compile(r"(\d+)\.(\d+)")
_CHECKS = "workbench.labs.checks"


@dataclass(frozen=True)
class Exercise:
    """One exercise of a lab.

    Attributes:
        number: Lab and exercise, such as `3.2`.
        title: What it is about, in a few words.
        where: Where its work is done.
        cell: Where its cell runs; one of the notebook may give the engines work.
        look: Looks at the answer and says what it finds.
    """

    number: str
    title: str
    where: Where
    look: Callable[[Check], None]
    cell: Where = "the notebook"


_known: dict[str, Exercise] = {}


def exercise(
    number: str, title: str, *, where: Where = "the notebook", cell: Where | None = None
) -> Callable[[Callable[[Check], None]], Exercise]:
    """Register the decorated function as the check of an exercise.

    Args:
        cell: Where its cell runs; by default where its work is done.
    """

    def register(look: Callable[[Check], None]) -> Exercise:
        _known[number] = found = Exercise(number, title, where, look, cell or where)
        return found

    return register


def labs() -> list[int]:
    """Return the numbers of the labs that have checks."""
    package = importlib.import_module(_CHECKS)
    names = [module.name for module in pkgutil.iter_modules(package.__path__)]
    return sorted(int(name[4:]) for name in names if re.fullmatch(r"lab_\d+", name))


def exercises(lab: int) -> list[Exercise]:
    """Return a lab's exercises in their order.

    Raises:
        PlanError: There is no such lab.
    """
    if lab not in labs():
        raise unknown("lab", str(lab), map(str, labs()))
    importlib.import_module(f"{_CHECKS}.lab_{lab}")
    mine = [found for found in _known.values() if found.number.startswith(f"{lab}.")]
    return sorted(mine, key=lambda found: int(found.number.partition(".")[2]))


def find(number: object) -> Exercise:
    """Return the exercise of that number.

    Raises:
        PlanError: There is none; says which there are.
    """
    text = str(number).strip()
    parts = _NUMBER.fullmatch(text)
    if parts is None:
        raise PlanError(
            "An exercise is named by its lab and its place there.",
            seen=number,
            allowed='a text such as "3.2"',
            next_step='labs.check("3.2")',
            code="WB-PLAN-048",
        )
    mine = {found.number: found for found in exercises(int(parts[1]))}
    if text not in mine:
        raise unknown("exercise", text, mine)
    return mine[text]
