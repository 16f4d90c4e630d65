"""Ends what a student wrote and what never ends: the cell of an exercise, a call in a check."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

MARKER = re.compile(r"#\s*YOUR CODE\s+(\d+\.\d+)")
"""What marks the cell of an exercise; a student may write below it what they like."""


def exercise_of(source: str) -> str | None:
    """Return the number of the exercise whose cell this is, None for other cells."""
    found = MARKER.search(source)
    return found[1] if found else None


class Late(BaseException):
    """What a block did took longer than it may; no `except Exception` of an answer stops it."""


@contextmanager
def at_most(limit_s: float) -> Iterator[None]:
    """Raise `Late` in the block after so many seconds, and again each second while it goes on.

    Only the main thread can be reached; on another one there is no limit.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ended = False

    def strike(*unused: Any) -> None:
        if not ended:  # one that comes while the block's end is tidied up hits nobody
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
        self._timer: threading.Timer | None = None
        self._lock = threading.Lock()
        self._running: str | None = None
        self._struck = False

    def before(self, info: Any) -> None:
        """Begin to count, if the cell is an exercise's."""
        self.after()
        number = exercise_of(info.raw_cell or "")
        if number is None:
            return
        self._running, self._struck = number, False
        self._timer = threading.Timer(self.limit_s, self._strike, (number,))
        self._timer.daemon = True
        self._timer.start()

    def after(self, result: Any = None) -> None:
        """The cell is over."""
        with self._lock:  # a strike that has begun is waited for: it must not hit the next cell
            number, self._running = self._running, None
            struck, self._struck = self._struck, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if struck:
            print(  # noqa: T201 - the notebook's output
                f"The cell of exercise {number} took longer than {self.limit_s:g} s and was "
                "interrupted. Is there a loop that never ends, or a message that nobody sends? "
                "Change the cell and run it again; nothing else was lost."
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


def install(shell: Any, limit_s: float | None) -> None:
    """Watch the cells of a shell from now on, in place of what watched them before."""
    old = _installed.pop(id(shell), None)
    if old is not None:
        old.after()
        shell.events.unregister("pre_run_cell", old.before)
        shell.events.unregister("post_run_cell", old.after)
    if limit_s is not None:
        _installed[id(shell)] = new = Limit(limit_s)
        shell.events.register("pre_run_cell", new.before)
        shell.events.register("post_run_cell", new.after)
