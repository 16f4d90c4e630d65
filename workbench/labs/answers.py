"""What a check can ask: names of the notebook, variables of the engines, code to run there.

A check sees a run as facts, which are taken once and which no later cell can change. A check says
that something is right, or that it is not right, with a hint; it never says the answer. Exercises
say what each is called, where its cell runs, and which function looks at the answer.
"""

from __future__ import annotations

import html
import importlib
import math
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError, RunError, unknown
from .plain import NamedRun, Other, pack, shown, unpack
from .side import Here, Side

LIMIT_S = 30.0
"""How long code of an answer may take on the engines."""

CALL_LIMIT_S = 10.0
"""How long a function of the notebook may take for one call."""

_ANSWER = "_labs_answer"


class Stuck(Exception):
    """The check cannot continue: it has said what is wrong."""


class Check:
    """An answer under examination: ask for its parts, say what is right and what is not.

    Args:
        number: The number of the exercise, for messages.
        asked: The side to ask, or the notebook's names if the notebook is this process.
    """

    def __init__(self, number: str, asked: Side | Mapping[str, Any]) -> None:
        self.number = number
        self._side: Side = Here(asked) if isinstance(asked, Mapping) else asked
        self.findings: list[Finding] = []
        self._lost: list[str] = []  # engines that had died before the latest `ask`

    # -- saying ------------------------------------------------------------------------------------

    def expect(self, right: bool, yes: str, no: str, hint: str = "") -> bool:
        """Say one of two sentences.

        Args:
            yes: Said when it is right; holds no measured number, so that it can be compared.
            no: Said when it is not; may show the value seen, never the answer.
            hint: Where to look next.
        """
        self.findings.append(Finding(True, yes) if right else Finding(False, no, hint))
        return right

    def need(self, right: bool, no: str, hint: str = "") -> None:
        """End the check here unless this holds."""
        if not right:
            self.wrong(no, hint)

    def wrong(self, words: str, hint: str = "") -> NoReturn:
        """Say that something is not right, and end the check."""
        self.findings.append(Finding(False, words, hint))
        raise Stuck

    # -- the notebook's names ----------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """Return the notebook's value of a name that the exercise asks for."""
        return self._value(name)[0]

    def _value(self, name: str) -> tuple[Any, str]:
        """Return a value, and how it is shown."""
        found = self._side.value(name)
        if "value" not in found:
            self.wrong(
                f"The notebook has no `{name}`.",
                f"run all cells above exercise {self.number} in order, then the cell of this "
                f"exercise, which must set `{name}`",
            )
        value = unpack(found["value"])
        if value is None or value is Ellipsis:
            self.wrong(
                f"`{name}` is still empty.",
                f"fill in the cell of exercise {self.number}, run it, and check again",
            )
        return value, str(found.get("words"))

    def number_of(self, name: str) -> float:
        """Return a number: Python's, NumPy's or a tensor of one element."""
        value, words = self._value(name)
        return self._number(value, f"`{name}` is {words}")

    def _number(self, value: Any, said: str) -> float:
        try:
            found = number(value)
        except (TypeError, ValueError, OverflowError):
            self.wrong(
                f"{said}, but it must be a number.",
                "a string is not a number, even if it has only digits: remove the quotes or str()"
                if isinstance(value, (str, bytes))
                else "give a single number of Python, NumPy or PyTorch",
            )
        if not math.isfinite(found):
            self.wrong(
                f"{said}, but it must be a finite number.",
                "look for a division by zero or by a very small number",
            )
        return found

    def whole(self, name: str) -> int:
        """Return a whole number, such as a rank."""
        number = self.number_of(name)
        self.need(
            number == int(number),
            f"`{name}` is {number:g}, but it must be a whole number.",
            "a count, a rank and the number of a step are never fractions",
        )
        return int(number)

    def text(self, name: str, allowed: Sequence[str] = ()) -> str:
        """Return a string; one of `allowed` if given (upper and lower case count as equal)."""
        value, words = self._value(name)
        if not isinstance(value, str):
            self.wrong(
                f"`{name}` is {words}, but it must be a string in quotes.",
                "put quotes around the value",
            )
        if allowed and value.strip().lower() not in [word.lower() for word in allowed]:
            self.wrong(f"`{name}` is {value!r}.", f"choose one of {', '.join(map(repr, allowed))}")
        return str(value).strip().lower() if allowed else str(value)

    def items(self, name: str, count: int | None = None) -> list[Any]:
        """Return a list, tuple, set or array as a list, of `count` items."""
        value, words = self._value(name)
        if isinstance(value, (str, Mapping)) or not hasattr(value, "__iter__"):
            self.wrong(
                f"`{name}` is {words}, but it must be a list.",
                "write the values in square brackets, with commas between them",
            )
        found = list(value)
        if count is not None:
            self.need(
                len(found) == count,
                f"`{name}` has {len(found)} items, but it must have {count}.",
                f"the text of exercise {self.number} says what each item is",
            )
        return found

    def array(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return an array of finite numbers, of that shape."""
        value = self.value(name)
        try:
            self.need(
                not any(
                    isinstance(one, (str, bytes)) for one in np.asarray(value, dtype=object).flat
                ),
                f"`{name}` has strings, but it must have numbers only.",
                "a string is not a number, even if it has only digits: remove the quotes or str()",
            )
            found = np.asarray(value, dtype=float)
        except (TypeError, ValueError):
            self.wrong(
                f"`{name}` cannot be read as an array of numbers.",
                "give a list, a tuple or an array of numbers",
            )
        if shape is not None and found.shape != shape:
            self.wrong(
                f"`{name}` has the shape {found.shape}, but the shape must be {shape}.",
                "a list of n numbers has the shape (n,), and one number has the shape ()",
            )
        self.need(
            bool(np.isfinite(found).all()),
            f"`{name}` has numbers that are not finite.",
            "look for a division by zero or by a very small number",
        )
        return found

    def _function(self, name: str) -> None:
        """End the check unless the notebook has a function of that name."""
        value, words = self._value(name)
        if not (isinstance(value, Other) and value.is_callable):
            self.wrong(f"`{name}` is {words}, but it must be a function.", f"write def {name}(...)")

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the notebook; an error, None or an endless loop ends the check.

        Args:
            args: Plain data, or a run that `run` has returned.
        """
        return self._call(name, args)[0]

    def _call(self, name: str, args: Sequence[Any], what: str = "") -> tuple[Any, str]:
        """Return what a function of the notebook returns, and how that is shown."""
        self._function(name)
        asked = _asked(name, args, what)
        given = [NamedRun(one.name) if isinstance(one, RunFacts) else one for one in args]
        found = self._side.call(name, [pack(one) for one in given], CALL_LIMIT_S)
        if "late" in found:
            self.wrong(
                f"{asked} did not end within {CALL_LIMIT_S:g} s and was interrupted.",
                "is there a loop that never ends, or a loop with very many rounds?",
            )
        if "raised" in found:
            self.wrong(
                f"{asked} raised {found['raised']}",
                f"which line raises the error? `{name}` must work for all values, and not only for "
                "the values of your runs"
                if what
                else f"call `{name}` with these values in a new cell: which line raises the error?",
            )
        value = unpack(found.get("value"))
        if value is None or value is NotImplemented or value is Ellipsis:
            self.wrong(
                f"{asked} returned {value}.",
                f"write the body of `{name}` in the cell of exercise {self.number}, and return the "
                "result",
            )
        return value, str(found.get("words"))

    def number_from(self, name: str, *args: Any, given: str = "") -> float:
        """Call a function of the notebook that must return one finite number.

        Args:
            given: What the arguments are, in words, if they are too long for a message.
        """
        value, words = self._call(name, args, given)
        return self._number(value, f"{_asked(name, args, given)} returned {words}")

    def known_run(self, name: str) -> RunFacts | None:
        """Return the newest run of that name, in any state; None if there is none."""
        found = self._side.run(name)
        return RunFacts.of(name, unpack(found["facts"])) if "facts" in found else None

    def run(self, name: str) -> RunFacts:
        """Return the newest run of that name that trained to its end."""
        found = self.known_run(name)
        if found is None:
            self.wrong(
                f"There is no run named {name!r}.",
                f"run all cells from the first cell to exercise {self.number}, in order: one of "
                f"them must train this run with --name {name}",
            )
        if found.state != "finished":
            self.wrong(
                f"The state of the run {name!r} is {found.state!r}, but it must be 'finished'.",
                "run the cell that trains this run again, and wait until the cell has ended",
            )
        return found

    def play(self, name: str) -> dict[str, Any] | None:
        """Return what was sealed and run of a blind case; None if it was not opened."""
        found = self._side.play(name)
        return dict(unpack(found["play"])) if "play" in found else None

    # -- the engines -------------------------------------------------------------------------------

    def engines(self, name: str) -> list[Any]:
        """Return a variable of the engines by rank; tensors as arrays."""
        found = self.ask(f"{_ANSWER} = globals().get({name!r}, '<missing>')")
        for rank, value in enumerate(found):
            if isinstance(value, str) and value == "<missing>":
                self.wrong(
                    f"Worker {rank} has no `{name}`.",
                    f"run the cell of exercise {self.number} on the engines, with %%distributed "
                    "in its first line",
                )
            if value is None:
                self.wrong(
                    f"`{name}` is still empty on worker {rank}.",
                    f"fill in the cell of exercise {self.number}, run it, and check again",
                )
        return found

    def need_all_engines(self) -> None:
        """End the check if engines had died before the latest `ask`: fewer workers answered it."""
        self.need(
            not self._lost,
            f"The check needs all engines, but these engines are dead: {', '.join(self._lost)}.",
            "run the lab's first cell (labs.begin) again, then all cells below it, in order",
        )

    def ask(
        self, source: str, *, limit_s: float = LIMIT_S, framework: str | None = None, hint: str = ""
    ) -> list[Any]:
        """Run code on every engine and return its `_labs_answer`, by rank.

        Code that hangs is interrupted after `limit_s` seconds. An exception in it ends the check
        with its words, and with `hint` unless the failure has its own next step.
        """
        found = self._side.ask(source, limit_s, framework)
        if "late" in found:
            self.wrong(
                f"The code on the engines did not end within {limit_s:g} s and was interrupted.",
                "does every loop end? Are the messages sent and received in the same order? "
                "If a worker waits for a message that nobody sends, it waits forever",
            )
        if "values" not in found:
            self.wrong(str(found.get("wrong")), str(found.get("hint") or hint))
        self._lost = [str(one) for one in found.get("lost") or ()]
        return [unpack(one) for one in found["values"]]


def _asked(name: str, args: Sequence[Any], what: str = "") -> str:
    if what:
        return f"For {what}, `{name}`"
    return f"{name}({', '.join(map(shown, args))})"


def number(value: Any) -> float:
    """Return a number of any kind as Python's.

    Raises:
        TypeError, ValueError, OverflowError: It is not a number; nor is a string of digits.
    """
    if isinstance(value, (bool, np.bool_, str, bytes)):
        raise TypeError
    return float(value.item() if isinstance(value, np.ndarray) and value.size == 1 else value)


def close(found: float, truth: float, share: float) -> bool:
    """Whether a number is within a share of the truth."""
    return math.isfinite(truth) and abs(found - truth) <= share * abs(truth)


def as_read(found: float, truth: float, least: int = 2) -> bool:
    """Whether a number is the positive truth, or the truth cut or rounded to some decimals.

    Args:
        least: The fewest decimals; the most are 6.
    """
    off = found - truth
    return abs(off) <= 1e-5 * truth or any(
        -(0.1**places) < off <= 0.1**places / 2 and abs(found - round(found, places)) < 1e-12
        for places in range(least, 7)
    )


@dataclass(frozen=True)
class PlanFacts:
    """How a run was requested."""

    strategy: str
    workers: int
    options: Mapping[str, Any]
    recipe: str | None = None


@dataclass(frozen=True)
class Figures:
    """A run's key figures, as `RunSummary` names them."""

    workers: int
    samples_per_s: float
    sent_step_bytes: float
    memory_bytes: tuple[float, ...]
    servers: tuple[Mapping[str, float], ...]


@dataclass(frozen=True)
class RunFacts:
    """One run: the part of `session.run.Run` that checks ask for.

    Attributes:
        engines: The processes that trained it, numbered.
        history: Columns of its rows, by name.
    """

    name: str
    state: str
    plan: PlanFacts
    engines: Sequence[int]
    history: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    began: float = float("nan")
    _figures: Figures | None = None
    _weights: Mapping[str, NDArray[Any]] | None = None

    @classmethod
    def of(cls, name: str, wire: Any) -> RunFacts:
        """Return the run that `side.facts` describes."""
        options = {str(key): value for key, value in dict(wire["options"]).items()}
        plan = PlanFacts(str(wire["strategy"]), int(wire["workers"]), options, wire.get("recipe"))
        columns = {str(key): np.asarray(one) for key, one in dict(wire.get("history", {})).items()}
        weights = wire.get("weights")
        figures = wire.get("figures")
        return cls(
            name, str(wire["state"]), plan, range(int(wire["engines"])), columns,
            float(wire["began"]),
            None if figures is None else _figures(figures),
            None if weights is None else {str(k): np.asarray(v) for k, v in weights.items()},
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"wb.runs[{self.name!r}]"

    def summarise(self) -> Figures:
        """The run's key figures.

        Raises:
            RunError: It has not finished.
        """
        if self._figures is None:
            raise RunError(f"Run {self.name} has no results.", seen=self.state, code="WB-RUN-050")
        return self._figures

    def weights(self) -> Mapping[str, NDArray[Any]]:
        """The final weights by parameter name.

        Raises:
            RunError: It has none.
        """
        if self._weights is None:
            raise RunError(f"Run {self.name} has no weights.", seen=self.state, code="WB-RUN-051")
        return self._weights


def _figures(wire: Any) -> Figures:
    return Figures(
        int(wire["workers"]),
        float(wire["samples_per_s"]),
        float(wire["sent_step_bytes"]),
        tuple(float(one) for one in wire["memory_bytes"] or ()),
        tuple({str(k): v for k, v in one.items()} for one in wire["servers"] or ()),
    )


PASSED = "workbench_passed"
"""Name in an output's metadata: whether the check has passed."""
MARKS = {True: "✓", False: "✗"}
_COLORS = {True: "#0B9A75", False: "#D9652B"}
"""Colours with a contrast of at least 3 on white and on dark pages."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        right: Whether it is as it should be.
        words: What was found, in a sentence.
        hint: Where to look next; empty if it is right.
    """

    right: bool
    words: str
    hint: str = ""

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {"right": self.right, "words": self.words, "hint": self.hint}


@dataclass(frozen=True)
class Report:
    """The result of one check; the notebook shows it below the cell.

    Attributes:
        exercise: Its number, such as `3.2`.
        title: What the exercise is about.
        where: Where its cell runs: `the notebook` or `the engines`.
    """

    exercise: str
    title: str
    where: str
    findings: Sequence[Finding]

    @property
    def passed(self) -> bool:
        """Whether all that was looked at is right."""
        return bool(self.findings) and all(finding.right for finding in self.findings)

    @property
    def ran(self) -> str:
        """Where its cell ran, in words."""
        return f"ran {'in' if self.where == 'the notebook' else 'on'} {self.where}"

    @property
    def verdict(self) -> str:
        """`right`, or `not yet`."""
        return "right" if self.passed else "not yet"

    def to_wire(self) -> dict[str, Any]:
        """The same, JSON-ready."""
        return {
            "exercise": self.exercise,
            "title": self.title,
            "passed": self.passed,
            "findings": [finding.to_wire() for finding in self.findings],
        }

    def text(self) -> str:
        """The report as plain text."""
        lines = [f"{self.exercise} {self.title}: {self.verdict} ({self.ran})"]
        for finding in self.findings:
            lines.append(f"  {MARKS[finding.right]} {finding.words}")
            if finding.hint:
                lines.append(f"    hint: {finding.hint}")
        return "\n".join(lines)

    def html(self) -> str:
        """The report as a block of HTML without classes or scripts."""
        body = "".join(_line(finding) for finding in self.findings)
        color = _COLORS[self.passed]
        return (
            f'<div style="border-left:4px solid {color};padding:4px 12px;color:inherit;'
            f'font-size:13px;line-height:1.5"><div style="font-weight:600">'
            f"{html.escape(self.exercise)} {html.escape(self.title)}: "
            f'<span style="color:{color}">{self.verdict}</span> <span style="opacity:.6;'
            f'font-weight:400">· {html.escape(self.ran)}</span></div>{body}</div>'
        )

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        return {"text/html": self.html(), "text/plain": self.text()}, {PASSED: self.passed}

    def __repr__(self) -> str:
        return self.text()


def _line(finding: Finding) -> str:
    mark = f'<span style="color:{_COLORS[finding.right]}">{MARKS[finding.right]}</span>'
    hint = f'<div style="opacity:.72;padding-left:1.2em">hint: {_code(finding.hint)}</div>'
    return f"<div>{mark} {_code(finding.words)}</div>{hint if finding.hint else ''}"


def _code(words: str) -> str:
    """Return words as HTML, with the parts in backticks as code."""
    return re.sub("`([^`]+)`", r"<code>\1</code>", html.escape(words))


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
        cell: Where its cell runs; a cell of the notebook may give work to the engines.
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
    return sorted(_modules())


def _modules() -> dict[int, str]:
    """Return the module with the checks of each lab; a grader's kernel has other modules there."""
    package = importlib.import_module(_CHECKS)
    names = [one.name for one in pkgutil.walk_packages(package.__path__, f"{_CHECKS}.")]
    return {int(found[1]): name for name in names if (found := re.search(r"\.lab_(\d+)$", name))}


def exercises(lab: int) -> list[Exercise]:
    """Return a lab's exercises in their order.

    Raises:
        PlanError: There is no such lab.
    """
    modules = _modules()
    if lab not in modules:
        raise unknown("lab", str(lab), map(str, sorted(modules)))
    importlib.import_module(modules[lab])
    mine = [found for found in _known.values() if found.number.startswith(f"{lab}.")]
    return sorted(mine, key=lambda found: int(found.number.partition(".")[2]))


def find(number: object) -> Exercise:
    """Return the exercise of that number.

    Raises:
        PlanError: There is no such exercise; the message lists those that exist.
    """
    text = str(number).strip()
    parts = _NUMBER.fullmatch(text)
    if parts is None:
        raise PlanError(
            "The number of an exercise must have the form LAB.EXERCISE.",
            seen=number,
            allowed='a string such as "3.2"',
            next_step='labs.check("3.2")',
            code="WB-PLAN-048",
        )
    mine = {found.number: found for found in exercises(int(parts[1]))}
    if text not in mine:
        raise unknown("exercise", text, mine)
    return mine[text]
