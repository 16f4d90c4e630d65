"""What came out: of an exercise, and of a notebook."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

State = Literal["right", "wrong", "untouched", "stopped", "not graded"]

RIGHT, SOMETHING_WRONG, NOT_GRADED = 0, 1, 2
"""Exit statuses of `workbench grade`."""

MARKS: dict[State, str] = {
    "right": "✓", "wrong": "✗", "untouched": "○", "stopped": "!", "not graded": "?",
}  # fmt: skip
_MOST_CHARACTERS = 2000

OVER = "over"
"""In the last line that a runner writes, in place of an exercise."""


def printable(text: object, also: str = "\n") -> str:
    """Return text without what a terminal would obey.

    Args:
        also: Characters that are kept though they are not printable; none for a name in a line.
    """
    cut = str(text)[:_MOST_CHARACTERS]
    return "".join(c if c.isprintable() or c in also else "\N{REPLACEMENT CHARACTER}" for c in cut)


@dataclass
class Outcome:
    """One exercise of one notebook.

    Attributes:
        state: `right` or `wrong` as the check says; `untouched`: wrong, and as it was handed out;
            `stopped`: its cell, or its check, passed a limit or ended the notebook's process;
            `not graded`: it was not reached.
        findings: What the check looked at: `right`, `words`, `hint`.
        error: What the cell raised, or why it was stopped.
        put_back: Names of the lab's that the cell had redefined.
        look_at: What in its cells no answer of the labs needs: a teacher should read them.
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
        """Forget what came out when its cells ran before."""
        self.state, self.error, self.seconds = "not graded", "", 0.0
        self.findings, self.put_back, self.look_at = [], [], []

    @property
    def reason(self) -> str:
        """Why it is not right, in one sentence; the hint where there is one."""
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
            said = "its cell is as it was handed out"
        raised = f"its cell raised {self.error.partition(chr(10))[0]}" if self.error else ""
        return "; ".join(filter(None, [raised, said])) or "the check said nothing"

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {**asdict(self), "passed": self.passed, "seconds": round(self.seconds, 3)}


@dataclass
class Graded:
    """One notebook.

    Attributes:
        lab: Its lab; None where that could not be found out.
        notes: What was restored, and which cells were not run.
        problems: Why it, or a part of it, could not be graded; steps of the lab that failed.
        restarts: How often its kernel was started anew.
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
        """How many exercises are right."""
        return sum(one.passed for one in self.outcomes)

    @property
    def is_graded(self) -> bool:
        """Whether every exercise was looked at."""
        return bool(self.outcomes) and all(one.state != "not graded" for one in self.outcomes)

    @property
    def status(self) -> int:
        """The exit status that this notebook alone would give."""
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
    """Return what `to_wire` has written.

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
    """Return these fields, once each is of its kind: a cell may have written in our name."""
    for name in names:
        value = wire[name]
        if not isinstance(value, _KINDS.get(name, (object,))):
            raise TypeError(f"{name} is of another kind")
        if name in _LISTS and not (
            isinstance(value, list) and all(isinstance(one, _LISTS[name]) for one in value)
        ):
            raise TypeError(f"{name} is no list of its kind")
    return {name: wire[name] for name in names}
