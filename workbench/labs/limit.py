"""Watches the cells of exercises: interrupts endless ones, and knows how each one ended last."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ..execution.outcome import outcome_behind

MARKER = re.compile(r"#\s*YOUR CODE\s+(\d+\.\d+)")
"""Marks the cell of an exercise; below this line, students write what they like."""


def exercise_of(source: str) -> str | None:
    """Return the number of the exercise whose cell this is, None for other cells."""
    found = MARKER.search(source)
    return found[1] if found else None


_UNREADABLE = ("SyntaxError", "IndentationError", "TabError")
_ASKS = re.compile(r"\blabs\.")
_ENGINES = re.compile(r"\s*%%(?:distributed|rank)\b(?!.*--local\b)")


@dataclass(frozen=True)
class Ended:
    """How the cell of an exercise ended when it was last run.

    Attributes:
        on_engines: Whether it ran there, and not in the notebook.
        error: The name of the error that ended it, empty if there was none.
        unread: Whether none of it was run, because it is not Python.
    """

    on_engines: bool
    error: str
    unread: bool


def _ended(info: Any, result: Any) -> Ended:
    on_engines = _ENGINES.match(info.raw_cell) is not None
    error = result.error_before_exec or result.error_in_exec
    if error is None:
        return Ended(on_engines, "", False)
    outcome = outcome_behind(error)  # of an error on the engines
    name = (outcome.ename if outcome is not None else "") or type(error).__name__
    return Ended(on_engines, name, name in _UNREADABLE)


class Late(BaseException):
    """A block took longer than allowed; no `except Exception` of an answer stops this error."""


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Raise `Late` in the block after `limit_s` seconds, and again each second until it ends.

    Only the main thread can be reached; on another one there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ended = False

    def strike(*unused: Any) -> None:
        if not ended:  # a signal during the cleanup after the block raises nothing
            raise Late

    before = signal.signal(signal.SIGALRM, strike)
    left_s, again_s = signal.setitimer(signal.ITIMER_REAL, limit_s, 1.0)
    try:
        try:
            yield
        finally:
            ended = True
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, left_s, again_s)


class Limit:
    """Watches the cells of one notebook.

    Args:
        limit_s: Seconds a marked cell may take.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.ended: dict[str, Ended] = {}
        self._info: Any = None
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._running: str | None = None
        self._struck = False

    def before(self, info: Any) -> None:
        """Begin to count, if the cell is an exercise's."""
        self.after()
        number = exercise_of(info.raw_cell or "")
        self._info = info
        if number is None:
            return
        self._running, self._struck = number, False
        self._timer = threading.Timer(self.limit_s, self._strike, (number,))
        self._timer.daemon = True
        self._timer.start()

    def after(self, result: Any = None) -> None:
        """The cell is over."""
        with self._lock:  # wait for a strike that has begun: it must not hit the next cell
            number, self._running = self._running, None
            struck, self._struck = self._struck, False
        if result is not None and self._info is not None:
            if number is not None:
                self.ended[number] = _ended(self._info, result)
            elif result.success and not _ASKS.search(self._info.raw_cell or ""):
                self.ended.clear()  # an answer may be in a cell without its line
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if struck:
            print(  # noqa: T201 - the notebook's output
                f"The cell of exercise {number} took longer than {self.limit_s:g} s and was "
                "interrupted. Is there a loop that never ends, or a receive without a send? "
                "Change the cell and run it again. All runs and variables of other cells still "
                "exist."
            )

    def _strike(self, number: str) -> None:
        with self._lock:
            if self._running != number:
                return
            self._struck = True
            main = threading.main_thread().ident
            if main is not None:
                signal.pthread_kill(main, signal.SIGINT)


_installed: dict[int, Limit] = {}


def last_end(shell: Any, number: str) -> Ended | None:
    """Return how the cell of an exercise ended last; None if it never ran, or was not watched."""
    watch = _installed.get(id(shell))
    return None if watch is None else watch.ended.get(number)


def install(shell: Any, limit_s: float | None) -> None:
    """Watch the cells of a shell from now on, instead of an earlier watch."""
    old = _installed.pop(id(shell), None)
    if old is not None:
        old.after()
        shell.events.unregister("pre_run_cell", old.before)
        shell.events.unregister("post_run_cell", old.after)
    if limit_s is not None:
        _installed[id(shell)] = new = Limit(limit_s)
        shell.events.register("pre_run_cell", new.before)
        shell.events.register("post_run_cell", new.after)
