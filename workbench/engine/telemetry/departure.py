"""A process that is told to end leaves its run first, and then ends itself.

The system tells it by SIGTERM (Slurm, Kubernetes, an administrator), or a notice says that its host
will end soon (`notices.py`). A process that takes part in a run reports this to the kernel, which
decides how it leaves:

    SIGTERM ──> `ToldToEnd` ──> the others regroup without it, ──> its cell is over ──> it ends
                                or all stop at a step, and save

Outside a run nobody waits for it, and a SIGTERM has its usual effect. A second SIGTERM ends the
process at once. SIGTERMs at the same moment count as one, because a platform may send several to
each process. The user's own handler is still called; nothing here replaces it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

clock = time.monotonic
REPLY_S = 0.5
"""A process lives this long after its cell, because the cell's result is still being sent, and the
kernel may request its state."""
TOGETHER_S = 1.0
"""Signals within this time count as one."""
ANSWER_S = 3.0
"""How long the kernel may take to answer; without one the process ends."""


class Loop(Protocol):
    """An event loop of asyncio."""

    def call_later(self, delay: float, callback: Callable[[], object]) -> object:
        """Call back after this number of seconds."""


@dataclass(frozen=True)
class Notice:
    """The reason for which a process was told to end.

    Attributes:
        reason: The cause in a few words.
        seconds: How much time is left; None: unknown.
        host: Whether its whole host goes.
    """

    reason: str
    seconds: float | None = None
    host: bool = False


class Departure:
    """One object for a process's life; threads report the order to end to it.

    Args:
        end: Ends this process.

    Attributes:
        notice: The notice that it got; None: no notice yet.
    """

    def __init__(self, end: Callable[[], object] | None = None) -> None:
        self._end = end or end_by_sigterm
        self.notice: Notice | None = None
        self._say: Callable[[Notice], object] | None = None
        self._said = self._answered = False
        self._first_s: float | None = None  # when there was a signal
        self._lock = threading.RLock()

    @contextlib.contextmanager
    def taking_part(self, say: Callable[[Notice], object]) -> Iterator[None]:
        """Use `say` to tell the kernel while a run is in progress."""
        with self._lock:
            self._say, self._said, self._answered = say, False, False
            self._tell()
        try:
            yield
        finally:
            with self._lock:
                self._say = None

    @property
    def takes_part(self) -> bool:
        """Whether others would wait for this process."""
        return self._say is not None

    def hear(self, notice: Notice) -> None:
        """Accept a notice; only the first counts."""
        with self._lock:
            if self.notice is None:
                self.notice = notice
                self._tell()

    def signalled(self) -> None:
        """Accept a SIGTERM; a second one ends the process."""
        with self._lock:
            first_s, now = self._first_s, clock()
            if first_s is None:
                self._first_s = now
                if self.takes_part:
                    self.hear(Notice(signal.Signals.SIGTERM.name))
        if first_s is not None and now - first_s >= TOGETHER_S:
            self._end()

    def answered(self) -> None:
        """Note that the kernel knows, and arranges that this process may leave."""
        self._answered = True

    @property
    def is_due(self) -> bool:
        """Whether the process should end, now that its cell is over."""
        return self._said

    def leave(self, loop: Loop) -> None:
        """End the process in a moment, on its main thread's loop: between two calls."""
        loop.call_later(REPLY_S, self._end)

    def leave_now(self) -> None:
        """End the process, whatever it does."""
        self._end()

    def install(self) -> None:
        """Let a SIGTERM end this process only if no other process would wait for it.

        Main thread.
        """
        before = signal.getsignal(signal.SIGTERM)

        def handle(number: int, frame: FrameType | None) -> Any:
            if not self.takes_part and callable(before):
                return before(number, frame)
            return None  # the thread that reads signals is told

        if callable(before):
            signal.signal(signal.SIGTERM, handle)

    def _tell(self) -> None:
        if self.notice is None or self._say is None or self._said:
            return
        self._said = True
        self._say(self.notice)
        timer = threading.Timer(ANSWER_S, self._end_unheard)
        timer.daemon = True
        timer.start()

    def _end_unheard(self) -> None:
        if not self._answered:
            self._end()


def end_by_sigterm() -> None:
    """End this process as a SIGTERM would; callable from any thread."""
    ctypes.CDLL(None).signal(signal.SIGTERM, None)  # Python's own `signal` works in only one thread
    os.kill(os.getpid(), signal.SIGTERM)
