"""Every error a user can meet: what happened, the value seen, what is allowed, the next step."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from typing import Any

RETIRED: frozenset[str] = frozenset()
"""Codes of errors that no longer exist. Their numbers are never used again."""

_CODED = re.compile(r"\[(WB-[A-Z]+-\d{3})\]$")


def _coded(what: str, code: str) -> tuple[str, str]:
    """Return the message with the code at the end of its first line, and the code.

    A message may report another Workbench error (a rank's, a stored run's). It then ends in the
    code of that error.
    """
    first, *rest = what.split("\n")
    if told := _CODED.search(first):
        return what, told[1]
    if not code:
        return what, ""
    return "\n".join([f"{first} [{code}]", *rest]), code


def _shown(seen: object) -> str:
    """Return a value as it is shown; text of several lines begins on a new line."""
    if not isinstance(seen, str) or "\n" not in seen.strip():
        return repr(seen)
    return "".join(f"\n    {line}" for line in seen.strip().splitlines())


def _unmade(kind: type[BaseException], *args: object) -> BaseException:
    """Return an error without attributes; the code that copies or unpickles it sets them."""
    return kind.__new__(kind, *args)


class WorkbenchError(Exception):
    """Base class of all errors that Workbench raises on purpose.

    Args:
        what: One sentence that says what is wrong.
        code: The code of the error, such as `WB-PLAN-012`. It stays the same if the message
            changes. Each place in this package that raises an error has its own code;
            docs/error-codes.md lists all codes. If code outside of this package raises the error,
            such as a strategy of your own, there is no code.
        seen: The value that was found. It is shown with `repr`, unless it is a string with spaces.
        allowed: The values that are accepted.
        next_step: The action that the user can take now.

    Attributes:
        code: The code that is shown. If the error reports a `WorkbenchError` of a rank, it is the
            code of the rank's error.
    """

    def __init__(
        self,
        what: str,
        *,
        code: str = "",
        seen: object = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what, self.seen, self.allowed, self.next_step = what, seen, allowed, next_step
        shown, self.code = _coded(what, code)
        lines = [shown]
        if seen is not None:
            lines.append(f"  seen:    {_shown(seen)}".replace(":    \n", ":\n"))
        if allowed is not None:
            lines.append(f"  allowed: {allowed}")
        if next_step is not None:
            lines.append(f"  next:    {next_step}")
        super().__init__("\n".join(lines))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unmade, (type(self), *self.args), vars(self)

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: a mistake in a magic's line needs the message, not Workbench's stack."""
        return [f"{type(self).__name__}: {self}"]


class PlanError(WorkbenchError, ValueError):
    """The request cannot be run; raised before any engine is touched."""


class FitError(WorkbenchError, ValueError):
    """The arguments of `wb.fit` or `wb.prepare` cannot be trained; raised before any collective."""


class ClusterError(WorkbenchError, RuntimeError):
    """Engines are missing, could not start, or died."""


class EngineSpentError(ClusterError):
    """A framework's state in this engine cannot be changed as needed; a new engine is needed."""


class RunError(WorkbenchError, RuntimeError):
    """A run failed or was interrupted; the cell that started it is marked as an error.

    Attributes:
        brief: The text that a notebook shows instead of the message if the failure is already shown
            above.
        shown: Whether the failure is already shown above.
    """

    brief: str | None = None
    shown = False

    def _render_traceback_(self) -> list[str]:
        if self.brief is None or not self.shown:
            return super()._render_traceback_()
        return [f"{type(self).__name__}: {self.brief}"]


class DataError(WorkbenchError, ValueError):
    """A data set was requested in a way that does not exist."""


class RunStopped(Exception):
    """Raised in a user's own training loop after Stop was pressed. The cell ends without error."""


class WorkbenchWarning(UserWarning):
    """Base of all warnings given by Workbench; the message ends in the warning's code.

    Args:
        what: The message for the user.
        code: The warning's fixed name, such as `WB-WARN-001`.
    """

    def __init__(self, what: str, *, code: str) -> None:
        shown, self.code = _coded(what, code)
        super().__init__(shown)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unmade, (type(self), *self.args), vars(self)


class RunDamagedWarning(WorkbenchWarning):
    """A run was loaded from a folder in which some files are missing or damaged."""


_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")


def without_numbers(text: str) -> str:
    """Return the common form of messages that differ only in numbers: sizes, samples, addresses."""
    return _NUMBERS.sub("#", text)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the member of `names` that is most similar to `name`, or None."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(kind: str, name: str, names: Iterable[str], next_step: str | None = None) -> PlanError:
    """Build the error for a name that is not in a list: lists the names, suggests the nearest."""
    known = sorted(names)
    guess = nearest(name, known)
    step = f"did you mean {guess!r}?" if guess else next_step
    return PlanError(
        f"There is no {kind} with this name.",
        seen=name,
        allowed=", ".join(known),
        next_step=step,
        code="WB-PLAN-037",
    )
