"""What a check can ask: names of the notebook, variables of the engines, code to run there."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..errors import RunError, WorkbenchError
from ..session.registry import runs
from ..session.results import Results
from ..session.state import session
from .limit import Late, at_most
from .report import Finding

LIMIT_S = 30.0
"""How long code of an answer may take on the engines."""

CALL_LIMIT_S = 10.0
"""How long a function of the notebook may take for one call."""

_ANSWER = "_labs_answer"
_PLAIN = f"""
def _labs_plain(value):
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        return value.float().numpy() if str(value.dtype) == "torch.bfloat16" else value.numpy()
    if hasattr(value, "numpy") and not isinstance(value, type):
        return value.numpy()
    if isinstance(value, dict):
        return {{key: _labs_plain(v) for key, v in value.items()}}
    if isinstance(value, (list, tuple)):
        return [_labs_plain(v) for v in value]
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    import numpy
    if isinstance(value, (numpy.ndarray, numpy.generic)):
        return value
    return "<" + type(value).__name__ + ">"
{_ANSWER} = _labs_plain({_ANSWER})
del _labs_plain
"""


class Stuck(Exception):
    """The check cannot go on: what is wrong was said."""


class Check:
    """An answer under examination: ask for its parts, say what is right and what is not.

    Args:
        number: The exercise's, for messages.
        namespace: The notebook's names.
    """

    def __init__(self, number: str, namespace: Mapping[str, Any]) -> None:
        self.number = number
        self._names = namespace
        self.findings: list[Finding] = []

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

    def wrong(self, words: str, hint: str = "") -> None:
        """Say that something is not right, and end the check."""
        self.findings.append(Finding(False, words, hint))
        raise Stuck

    # -- the notebook's names ----------------------------------------------------------------------

    def value(self, name: str) -> Any:
        """Return the notebook's value of a name that the exercise asks for."""
        if name not in self._names:
            self.wrong(
                f"The notebook has no `{name}`.",
                f"run the cell of exercise {self.number}, and those above it in their order",
            )
        value = self._names[name]
        if value is None or value is Ellipsis:
            self.wrong(
                f"`{name}` is still empty.",
                f"write it in the cell of exercise {self.number}, run the cell, and check again",
            )
        return value

    def number_of(self, name: str) -> float:
        """Return a number: Python's, NumPy's or a tensor of one element."""
        value = self.value(name)
        return self._number(value, f"`{name}` is {_shown(value)}")

    def _number(self, value: Any, said: str) -> float:
        try:
            found = number(value)
        except (TypeError, ValueError, OverflowError):
            self.wrong(
                f"{said}: a number is asked for.",
                "a text is none, even one of digits: leave the quotes, or the str(), out"
                if isinstance(value, (str, bytes))
                else "a single one, of Python, NumPy or PyTorch",
            )
        if not math.isfinite(found):
            self.wrong(f"{said}: a finite number is asked for.")
        return found

    def whole(self, name: str) -> int:
        """Return a whole number, such as a rank."""
        number = self.number_of(name)
        self.need(number == int(number), f"`{name}` is {number:g}: a whole number is asked for.")
        return int(number)

    def text(self, name: str, allowed: Sequence[str] = ()) -> str:
        """Return a text, one of `allowed` where that is given (compared without regard to case)."""
        value = self.value(name)
        if not isinstance(value, str):
            self.wrong(f"`{name}` is {_shown(value)}: a text in quotes is asked for.")
        if allowed and value.strip().lower() not in [word.lower() for word in allowed]:
            choices = ", ".join(repr(word) for word in allowed)
            self.wrong(f"`{name}` is {value!r}.", f"choose one of {choices}")
        return str(value).strip().lower() if allowed else str(value)

    def items(self, name: str, count: int | None = None) -> list[Any]:
        """Return a list, tuple, set or array as a list, of `count` items."""
        value = self.value(name)
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__iter__"):
            self.wrong(f"`{name}` is {_shown(value)}: a list is asked for.")
        found = list(value)
        if count is not None:
            self.need(
                len(found) == count, f"`{name}` has {len(found)} items: {count} are asked for."
            )
        return found

    def array(self, name: str, shape: tuple[int, ...] | None = None) -> np.ndarray[Any, Any]:
        """Return an array of finite numbers, of that shape."""
        try:
            found = np.asarray(self.value(name), dtype=float)
        except (TypeError, ValueError):
            self.wrong(f"`{name}` cannot be read as an array of numbers.")
        if shape is not None and found.shape != shape:
            self.wrong(f"`{name}` has the shape {found.shape}: {shape} is asked for.")
        self.need(bool(np.isfinite(found).all()), f"`{name}` holds numbers that are not finite.")
        return found

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function that the notebook's cell defines; call it with `call`."""
        value = self.value(name)
        if not callable(value):
            self.wrong(f"`{name}` is {_shown(value)}: a function is asked for.")
        return value  # type: ignore[no-any-return]

    def call(self, name: str, *args: Any) -> Any:
        """Call a function of the notebook; what it raises, None, or no end of it ends the check."""
        function = self.function(name)
        asked = _asked(name, args)
        try:
            with at_most(CALL_LIMIT_S):
                found = function(*args)
        except Late:
            self.wrong(
                f"{asked} did not end within {CALL_LIMIT_S:g} s and was interrupted.",
                "is there a loop that never ends?",
            )
        except (Exception, SystemExit) as error:
            self.wrong(
                f"{asked} raised {type(error).__name__}: {error}",
                "call it with these values in a cell of its own, to see the line that raised it",
            )
        if found is None or found is NotImplemented or found is Ellipsis:
            self.wrong(
                f"{asked} returned {found}.",
                f"write its body in the cell of exercise {self.number}, and return the result",
            )
        return found

    def number_from(self, name: str, *args: Any) -> float:
        """Call a function of the notebook that is to return one finite number."""
        found = self.call(name, *args)
        return self._number(found, f"{_asked(name, args)} returned {_shown(found)}")

    def run(self, name: str) -> Results:
        """Return the newest run of that name that trained to its end."""
        if name not in runs:
            self.wrong(
                f"There is no run named {name!r}.",
                f"run the cells down to exercise {self.number} in their order; the one that trains "
                f"it names it: --name {name}",
            )
        found = runs[name]
        if found.state != "finished":
            self.wrong(f"The run {name!r} is {found.state}.", "run its cell again, to its end")
        return found

    # -- the engines -------------------------------------------------------------------------------

    def engines(self, name: str) -> list[Any]:
        """Return a variable of the engines by rank; tensors as arrays."""
        found = self.ask(f"{_ANSWER} = globals().get({name!r}, '<missing>')")
        for rank, value in enumerate(found):
            if isinstance(value, str) and value == "<missing>":
                self.wrong(
                    f"Worker {rank} has no `{name}`.",
                    f"run the cell of exercise {self.number} on the engines: it begins with "
                    "%%distributed",
                )
            if value is None:
                self.wrong(
                    f"`{name}` is still empty on worker {rank}.",
                    f"write it in the cell of exercise {self.number}, run the cell, and check "
                    "again",
                )
        return found

    def ask(
        self, source: str, *, limit_s: float = LIMIT_S, framework: str | None = None, hint: str = ""
    ) -> list[Any]:
        """Run code on every engine and return what it left in `_labs_answer`, by rank.

        Code that hangs is interrupted after `limit_s` seconds; an exception in it ends the check
        with its words, and `hint` unless the failure has a next step of its own.
        """
        try:
            cluster = session.need_cluster()
            task = cluster.execute(source + "\n" + _PLAIN, framework=framework)
        except WorkbenchError as error:
            self.wrong(error.what, error.next_step or "")
        in_time = False
        try:
            in_time = task.over.wait(limit_s)
        finally:  # also if the check is stopped: what nobody attends would keep the engines busy
            if not in_time:
                task.interrupt()
                task.over.wait()
        if not in_time:
            self.wrong(
                f"It did not end within {limit_s:g} s and was interrupted.",
                "do all workers send and receive in an order that fits? A worker that waits for a "
                "message nobody sends waits for ever",
            )
        if (failure := task.failure()) is not None:
            self.wrong(_failed(failure), failure.next_step or hint)
        found = cluster.pull([_ANSWER], task.ids)
        return [found[engine].get(_ANSWER) for engine in task.ids]


def _failed(error: RunError) -> str:
    return f"On the engines: {error.what.splitlines()[0]}"


def _asked(name: str, args: Sequence[Any]) -> str:
    return f"{name}({', '.join(map(_shown, args))})"


def _shown(value: Any) -> str:
    if isinstance(value, numbers.Number):
        return f"{value}"
    words = repr(value)
    return words if len(words) <= 40 else f"{type(value).__name__} {words[:36]}..."


def number(value: Any) -> float:
    """Return a number of any kind as Python's.

    Raises:
        TypeError, ValueError, OverflowError: It is none: a text that looks like one is not either.
    """
    if isinstance(value, (bool, str, bytes)):
        raise TypeError
    return float(value)


def close(found: float, truth: float, share: float) -> bool:
    """Whether a number is within a share of the truth."""
    return abs(found - truth) <= share * abs(truth)
