"""The results of an exercise and of a notebook.

They are shown as a table for people and as JSON for programs. From the first notebook on, the JSON
file has all results so far.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ...views.table import Column, Table

if TYPE_CHECKING:
    from .isolation import Isolation

State = Literal["right", "wrong", "untouched", "stopped", "not graded"]

RIGHT, SOMETHING_WRONG, NOT_GRADED = 0, 1, 2
"""Exit statuses of `workbench grade`."""

MARKS: dict[State, str] = {
    "right": "✓", "wrong": "✗", "untouched": "○", "stopped": "!", "not graded": "?",
}  # fmt: skip
_MOST_CHARACTERS = 2000

OVER = "over"
"""In the last line that a runner writes, instead of an exercise."""


def printable(text: object, also: str = "\n") -> str:
    """Return text without control characters for a terminal.

    Args:
        also: Characters that are kept although they are not printable; none for a name in a line.
    """
    cut = str(text)[:_MOST_CHARACTERS]
    return "".join(c if c.isprintable() or c in also else "\N{REPLACEMENT CHARACTER}" for c in cut)


@dataclass
class Outcome:
    """One exercise of one notebook.

    Attributes:
        state: `right` or `wrong` by the check; `untouched`: wrong, and its cell was not changed;
            `stopped`: its cell, or its check, exceeded a limit or ended the notebook's process;
            `not graded`: it was not reached.
        findings: What the check looked at: `right`, `words`, `hint`.
        error: The error that the cell raised, or why it was stopped.
        put_back: Names of the lab that the cell had redefined.
        look_at: Parts of its cells that no answer of the labs needs: a teacher should read them.
        seconds: Time of its cells and its check.
    """

    exercise: str
    title: str = ""
    state: State = "not graded"
    findings: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""
    put_back: list[str] = field(default_factory=list)
    look_at: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether it is right."""
        return self.state == "right"

    def begin_anew(self) -> None:
        """Forget the results of an earlier run of its cells."""
        self.state, self.error, self.seconds = "not graded", "", 0.0
        self.findings, self.put_back, self.look_at = [], [], []

    @property
    def reason(self) -> str:
        """Why it is not right, in one sentence, with the hint if there is one."""
        if self.passed:
            return ""
        if self.state in ("stopped", "not graded"):
            return self.error.partition("\n")[0]
        wrong = [one for one in self.findings if not one.get("right")]
        said = ""
        if wrong:
            hint = wrong[0].get("hint", "")
            said = str(wrong[0].get("words", "")) + (f" (hint: {hint})" if hint else "")
        if not wrong and self.state == "untouched":
            said = "the cell was not changed"
        raised = f"the cell raised {self.error.partition(chr(10))[0]}" if self.error else ""
        return "; ".join(filter(None, [raised, said])) or "the check gave no reason"

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {**asdict(self), "passed": self.passed, "seconds": round(self.seconds, 3)}


@dataclass
class Graded:
    """One notebook.

    Attributes:
        lab: Its lab; None if that is not known.
        notes: What was restored, and which cells were not run.
        problems: Why it, or a part of it, could not be graded; steps of the lab that failed.
        restarts: How often its kernel was restarted.
    """

    file: str
    lab: int | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    restarts: int = 0
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def points(self) -> int:
        """The number of right exercises."""
        return sum(one.passed for one in self.outcomes)

    @property
    def is_graded(self) -> bool:
        """Whether every exercise was graded."""
        return bool(self.outcomes) and all(one.state != "not graded" for one in self.outcomes)

    @property
    def status(self) -> int:
        """The exit status for this notebook alone."""
        if not self.is_graded:
            return NOT_GRADED
        return RIGHT if self.points == len(self.outcomes) else SOMETHING_WRONG

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {
            "file": self.file, "lab": self.lab, "graded": self.is_graded,
            "points": self.points, "of": len(self.outcomes),
            "exercises": [one.to_wire() for one in self.outcomes],
            "notes": self.notes, "problems": self.problems, "restarts": self.restarts,
            "seconds": round(self.seconds, 3), "versions": self.versions,
        }  # fmt: skip


_KINDS: dict[str, tuple[type, ...]] = {
    "title": (str,), "error": (str,), "seconds": (int, float), "file": (str,),
    "lab": (int, type(None)), "restarts": (int,), "versions": (dict,),
}  # fmt: skip
_LISTS: dict[str, type] = {
    "findings": dict,
    "put_back": str,
    "look_at": str,
    "notes": str,
    "problems": str,
}


def from_wire(wire: Mapping[str, Any]) -> Graded:
    """Return the result that `to_wire` has written.

    Raises:
        KeyError, TypeError or ValueError: It is something else.
    """
    names: tuple[str, ...] = (
        "exercise",
        "title",
        "state",
        "findings",
        "error",
        "put_back",
        "look_at",
        "seconds",
    )
    outcomes = [Outcome(**_checked(one, names)) for one in wire["exercises"]]
    if any(one.state not in MARKS for one in outcomes):
        raise ValueError("an exercise has a state that is unknown")
    if any(not re.fullmatch(r"\d{1,3}\.\d{1,3}", one.exercise) for one in outcomes):
        raise ValueError("an exercise has no number")
    names = ("file", "lab", "notes", "problems", "restarts", "seconds", "versions")
    return Graded(outcomes=outcomes, **_checked(wire, names))


def _checked(wire: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """Return these fields if each has the right type: a cell may have written them in our name."""
    for name in names:
        value = wire[name]
        if not isinstance(value, _KINDS.get(name, (object,))):
            raise TypeError(f"{name} has the wrong type")
        if name in _LISTS and not (
            isinstance(value, list) and all(isinstance(one, _LISTS[name]) for one in value)
        ):
            raise TypeError(f"{name} must be a list, and all its items must have the right type")
    return {name: wire[name] for name in names}


_WRAP = 72
_FORMAT = 1
"""The version of the JSON; it grows when a field changes its meaning."""


def status(graded: Sequence[Graded]) -> int:
    """The exit status: 0 all right, 1 something is not, 2 something could not be graded."""
    return max((one.status for one in graded), default=RIGHT)


def text(graded: Sequence[Graded], isolation: Isolation | None = None) -> str:
    """Return a table for each lab, and the notes.

    Args:
        isolation: Comes first, because it says how far the results can be trusted.
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
    """The lab for which it was graded; none if it could not be graded."""
    return one.lab if one.outcomes else None


def names_of(files: Sequence[str]) -> dict[str, str]:
    """Return for each file the end of its path that no other file has, fit for one line."""
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
    """Return a row for each notebook of a lab, the exercises, how many are right, and reasons.

    Args:
        names: The name of each file.
    """
    numbers = sorted({o.exercise for one in graded for o in one.outcomes}, key=_order)
    columns = [Column("notebook", "left"), *(Column(number, "left") for number in numbers)]
    columns += [Column("right"), Column("s"), Column("what is not right", "left", _WRAP)]
    rows = [row for one in graded for row in _rows(one, numbers, names[one.file])]
    if not numbers:
        return Table(columns, rows, "Not graded")
    right = sum(one.status == RIGHT for one in graded)
    title = f"Lab {_lab(graded[0])}: {right} of {len(graded)} notebooks completely right"
    return Table(columns, rows, title)


def _order(number: str) -> tuple[int, ...]:
    return tuple(int(part) for part in number.split("."))


def _rows(one: Graded, numbers: Sequence[str], name: str) -> list[list[str]]:
    mine = {outcome.exercise: outcome for outcome in one.outcomes}
    marks = [MARKS[mine[number].state] if number in mine else "" for number in numbers]
    right = f"{one.points}/{len(one.outcomes)}" if one.outcomes else "-"
    first = [name, *marks, right, f"{one.seconds:.0f}"]
    reasons = [_reason(outcome) for outcome in one.outcomes if not outcome.passed]
    reasons += [_line(problem) for problem in one.problems]
    blank = [""] * len(first)
    return [[*(blank if i else first), reason] for i, reason in enumerate(reasons or [""])]


def _reason(outcome: Outcome) -> str:
    return _line(f"{outcome.exercise}: {outcome.reason}")


def _line(words: str) -> str:
    """Return words that fit in a table: one line, without words that are too wide."""
    short = [w if len(w) <= _WRAP else w[: _WRAP - 3] + "..." for w in printable(words).split()]
    line = " ".join(short)
    return line if len(line) <= 4 * _WRAP else line[: 4 * _WRAP - 3] + "..."


def _notes(graded: Sequence[Graded], names: Mapping[str, str]) -> list[str]:
    found = []
    for one in graded:
        name = names[one.file]
        found += [f"{name}: {_line(note)}" for note in one.notes]
        found += [
            f"{name}: a cell of exercise {outcome.exercise} redefined names that the lab needs. "
            f"The grader restored these names: {_line(', '.join(outcome.put_back))}"
            for outcome in one.outcomes if outcome.put_back
        ]  # fmt: skip
        found += [
            f"{name}: look at the cells of exercise {outcome.exercise}. They use something that "
            "no answer of this lab needs: "
            f"{_line(', '.join(outcome.look_at))}"
            for outcome in one.outcomes if outcome.look_at
        ]  # fmt: skip
    return found


def to_json(
    graded: Sequence[Graded], limits: dict[str, Any], isolation: Isolation | None = None
) -> str:
    """Return all results as JSON."""
    content = {
        "format": _FORMAT,
        "status": status(graded),
        "ungraded": sum(one.status == NOT_GRADED for one in graded),
        "isolation": None if isolation is None else isolation.to_wire(),
        "limits": limits,
        "notebooks": [one.to_wire() for one in graded],
    }
    return json.dumps(content, indent=1) + "\n"


class Saved:
    """A JSON file that is complete at any time, and written again whenever a notebook is graded.

    Args:
        file: Its path; if it is not a regular file, such as a pipe, it is written only at the end.
        paths: All notebooks to grade, in the order of the file.
        limits, isolation: As they are in the file.
    """

    def __init__(
        self,
        file: Path,
        paths: Sequence[Path],
        limits: dict[str, Any],
        isolation: Isolation | None = None,
    ) -> None:
        self._file, self._limits = Path(os.path.realpath(file)), limits
        self._isolation = isolation
        self._known = [Graded(str(path), problems=["It was not reached."]) for path in paths]
        self._waiting = list(range(len(self._known)))
        self._lock = threading.Lock()

    def add(self, graded: Graded) -> None:
        """Add the result of a notebook.

        Raises:
            OSError: It could not be written; the old content stays.
        """
        with self._lock:
            for i in self._waiting:
                if self._known[i].file == graded.file:
                    self._known[i] = graded
                    self._waiting.remove(i)
                    break
            if not self._file.exists() or self._file.is_file():
                self._write(to_json(self._known, self._limits, self._isolation))

    def finish(self, content: str) -> None:
        """Write the results of all notebooks.

        Raises:
            OSError: It could not be written; the old content stays.
        """
        with self._lock:
            self._write(content)

    def _write(self, content: str) -> None:
        if self._file.exists() and not self._file.is_file():
            self._file.write_text(content, encoding="utf-8")
            return
        beside = self._file.with_name(f".{self._file.name[:200]}.{os.getpid()}")
        try:
            beside.write_text(content, encoding="utf-8")
            beside.replace(self._file)
        finally:
            beside.unlink(missing_ok=True)
