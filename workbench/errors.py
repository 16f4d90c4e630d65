"""Every error a user can meet: what happened, the value seen, what is allowed, the next step."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable


class WorkbenchError(Exception):
    """Base of all errors raised on purpose by Workbench.

    Args:
        what: One sentence that says what is wrong.
        seen: The value that was met, shown with `repr` unless it is a string with spaces.
        allowed: What would have been accepted.
        next_step: What the user can do now.
    """

    def __init__(
        self,
        what: str,
        *,
        seen: object = None,
        allowed: str | None = None,
        next_step: str | None = None,
    ) -> None:
        self.what, self.seen, self.allowed, self.next_step = what, seen, allowed, next_step
        lines = [what]
        if seen is not None:
            lines.append(f"  seen:    {seen!r}")
        if allowed is not None:
            lines.append(f"  allowed: {allowed}")
        if next_step is not None:
            lines.append(f"  next:    {next_step}")
        super().__init__("\n".join(lines))

    def _render_traceback_(self) -> list[str]:
        """IPython's hook: a mistake in a line needs the message, not our stack."""
        return [f"{type(self).__name__}: {self}"]


class PlanError(WorkbenchError, ValueError):
    """What was asked for cannot be run; raised before any engine is touched."""


class FitError(WorkbenchError, ValueError):
    """What `wb.fit` or `wb.prepare` was given cannot be trained; raised before any collective."""


class ClusterError(WorkbenchError, RuntimeError):
    """Engines are missing, could not start, or died."""


class EngineSpentError(ClusterError):
    """A framework's state in this engine cannot become what is needed: a fresh engine must."""


class RunError(WorkbenchError, RuntimeError):
    """A run failed or was interrupted; the cell that started it is marked as an error.

    Attributes:
        brief: What a notebook shows in place of the message where the failure stands above it.
        shown: Whether it does.
    """

    brief: str | None = None
    shown = False

    def _render_traceback_(self) -> list[str]:
        if self.brief is None or not self.shown:
            return super()._render_traceback_()
        return [f"{type(self).__name__}: {self.brief}"]


class DataError(WorkbenchError, ValueError):
    """A data set was asked for in a way that does not exist."""


class RunStopped(Exception):
    """Raised inside a user's own training loop when Stop was pressed; ends the cell quietly."""


class RunDamagedWarning(UserWarning):
    """A run was loaded from a folder that lacks a part of what was written there."""


_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(\.\d+)?(e[+-]?\d+)?")


def without_numbers(text: str) -> str:
    """Return what messages share that differ in numbers alone: sizes, samples, addresses."""
    return _NUMBERS.sub("#", text)


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the member of `names` that looks most like `name`, or None when none does."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return found[0] if found else None


def unknown(kind: str, name: str, names: Iterable[str], next_step: str | None = None) -> PlanError:
    """Build the error for a name that is not in a list: lists the names, suggests the nearest."""
    known = sorted(names)
    guess = nearest(name, known)
    step = f"did you mean {guess!r}?" if guess else next_step
    return PlanError(
        f"There is no {kind} of that name.", seen=name, allowed=", ".join(known), next_step=step
    )
