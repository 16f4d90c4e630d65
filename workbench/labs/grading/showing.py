"""The result for people: a table; and for programs: JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...views.table import Column, Table
from .isolation import Isolation
from .outcome import MARKS, NOT_GRADED, RIGHT, Graded, Outcome, printable

_WRAP = 72
_FORMAT = 1
"""Of the JSON; grows when a field changes its meaning."""


def status(graded: Sequence[Graded]) -> int:
    """The exit status: 0 all right, 1 something is not, 2 something could not be graded."""
    return max((one.status for one in graded), default=RIGHT)


def text(graded: Sequence[Graded], isolation: Isolation | None = None) -> str:
    """Return a table for each lab, and what was found besides.

    Args:
        isolation: Said first: how far what follows can be believed.
    """
    labs = dict.fromkeys(_lab(one) for one in graded)
    names = names_of([one.file for one in graded])
    shown = [table([one for one in graded if _lab(one) == lab], names).text() for lab in labs]
    legend = ", ".join(f"{mark} {state}" for state, mark in MARKS.items())
    head = (
        ""
        if isolation is None
        else f"{_line(isolation.words[:1].upper())}{_line(isolation.words[1:])}.\n\n"
    )
    return head + "\n\n".join(shown) + "\n" + "\n".join([legend, *_notes(graded, names)])


def _lab(one: Graded) -> int | None:
    """The lab that it was graded as; none where it could not be."""
    return one.lab if one.outcomes else None


def names_of(files: Sequence[str]) -> dict[str, str]:
    """Return for each file the end of its path that no other has, as it may stand in a line."""
    ends = {file: _ends(file) for file in files}
    count = Counter(end for each in ends.values() for end in each)
    return {
        file: printable(next((end for end in each if count[end] == 1), each[-1]), also="")
        for file, each in ends.items()
    }


def _ends(file: str) -> list[str]:
    """The ends of a path, from its name alone to all of it."""
    parts = Path(file).parts or (file,)
    return [str(Path(*parts[i:])) for i in range(len(parts) - 1, -1, -1)]


def table(graded: Sequence[Graded], names: Mapping[str, str]) -> Table:
    """Return a row for each notebook of a lab, a column for each exercise, points, and reasons.

    Args:
        names: What each file is called.
    """
    numbers = sorted({o.exercise for one in graded for o in one.outcomes}, key=_order)
    columns = [Column("notebook", "left"), *(Column(number, "left") for number in numbers)]
    columns += [Column("points"), Column("s"), Column("what is not right", "left", _WRAP)]
    rows = [row for one in graded for row in _rows(one, numbers, names[one.file])]
    if not numbers:
        return Table(columns, rows, "Not graded")
    right = sum(one.status == RIGHT for one in graded)
    return Table(columns, rows, f"Lab {_lab(graded[0])}: {right} of {len(graded)} all right")


def _order(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))


def _rows(one: Graded, numbers: Sequence[str], name: str) -> list[list[str]]:
    mine = {outcome.exercise: outcome for outcome in one.outcomes}
    marks = [MARKS[mine[number].state] if number in mine else "" for number in numbers]
    points = f"{one.points}/{len(one.outcomes)}" if one.outcomes else "-"
    first = [name, *marks, points, f"{one.seconds:.0f}"]
    reasons = [_reason(outcome) for outcome in one.outcomes if not outcome.passed]
    reasons += [_line(problem) for problem in one.problems]
    blank = [""] * len(first)
    return [[*(blank if i else first), reason] for i, reason in enumerate(reasons or [""])]


def _reason(outcome: Outcome) -> str:
    return _line(f"{outcome.exercise}: {outcome.reason}")


def _line(words: str) -> str:
    """Return words that fit a table: one line, no word that widens it."""
    short = [w if len(w) <= _WRAP else w[: _WRAP - 3] + "..." for w in printable(words).split()]
    line = " ".join(short)
    return line if len(line) <= 4 * _WRAP else line[: 4 * _WRAP - 3] + "..."


def _notes(graded: Sequence[Graded], names: Mapping[str, str]) -> list[str]:
    found = []
    for one in graded:
        name = names[one.file]
        found += [f"{name}: {_line(note)}" for note in one.notes]
        found += [
            f"{name}: {outcome.exercise} had redefined {_line(', '.join(outcome.put_back))}: "
            "put back"
            for outcome in one.outcomes if outcome.put_back
        ]  # fmt: skip
        found += [
            f"{name}: look at {outcome.exercise}: it names {_line(', '.join(outcome.look_at))}"
            for outcome in one.outcomes if outcome.look_at
        ]  # fmt: skip
    return found


def to_json(
    graded: Sequence[Graded], limits: dict[str, Any], isolation: Isolation | None = None
) -> str:
    """Return everything that is known, as JSON."""
    content = {
        "format": _FORMAT,
        "status": status(graded),
        "ungraded": sum(one.status == NOT_GRADED for one in graded),
        "isolation": None if isolation is None else isolation.to_wire(),
        "limits": limits,
        "notebooks": [one.to_wire() for one in graded],
    }
    return json.dumps(content, indent=1) + "\n"
