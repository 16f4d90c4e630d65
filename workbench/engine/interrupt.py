"""Makes SIGINT end a blocked collective.

A gloo collective waits in C++, where a signal does not reach Python: the handler runs only when the
call returns, and it may never return. But Python writes a byte to the wake-up descriptor at once. A
watchdog thread reads it, gives the main thread a moment to leave by itself, and then shuts the
group's sockets down: the collective raises and KeyboardInterrupt follows. If that is not enough,
the worker is waiting in the store for a peer that never came; then the store's connection is shut
down, too.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ..shared.events import BREAK_OUT_S, CLEARING_S


class InterruptWatch:
    """One watchdog thread for the engine's life; armed while a cell runs.

    Args:
        break_out: Called from the watchdog's thread if the main thread stays blocked; the second
            time with True, if the first was not enough.

    Attributes:
        on_terminate: Called from the watchdog's thread at a SIGTERM, if that has a handler.
    """

    def __init__(self, break_out: Callable[[bool], object]) -> None:
        self._break_out = break_out
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._left = threading.Event()
        self._left.set()
        self.broke_out = False
        self.on_terminate: Callable[[], object] = _nothing
        self._shields = 0
        self._deaf_until_s, self._whole = 0.0, False
        self._thread = threading.Thread(target=self._main, name="workbench-interrupt", daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Watch the main thread until the block is left; call it from the main thread.

        An interrupt that comes after the block finds nothing to end and is ignored.
        """
        self.broke_out = False
        self._deaf_until_s = 0.0
        self._left.clear()
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        handler = signal.signal(signal.SIGINT, self._handle)
        try:
            yield
        finally:
            self._left.set()
            signal.set_wakeup_fd(before)
            signal.signal(signal.SIGINT, handler)

    @contextlib.contextmanager
    def shielded(self) -> Iterator[None]:
        """Let interrupts only break collectives, not raise: the block must run to its end."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1

    def begin_clearing(self, whole: bool) -> None:
        """Ignore interrupts for `CLEARING_S` seconds, because the cell has ended as requested.

        They were sent to end the cell, and would now interrupt its cleanup: sockets would stay
        open, weights unsaved. A cleanup that takes longer is stuck.

        Args:
            whole: Whether all workers succeed; otherwise interrupts still break collectives.
        """
        self._deaf_until_s, self._whole = time.monotonic() + CLEARING_S, whole

    def close(self) -> None:
        """End the watchdog; no cell may run any more."""
        self._writer.close()
        self._thread.join(timeout=2 * BREAK_OUT_S + 2)

    @property
    def _clearing(self) -> bool:
        return time.monotonic() < self._deaf_until_s

    def _handle(self, number: int, frame: object) -> None:
        if not (self._left.is_set() or self._shields or self._clearing):
            raise KeyboardInterrupt

    def _main(self) -> None:
        while data := self._reader.recv(64):
            if signal.SIGTERM in data:
                self.on_terminate()
            if signal.SIGINT not in data or (self._whole and self._clearing):
                continue
            for harder in (False, True):
                if self._left.wait(BREAK_OUT_S):
                    break
                self.broke_out = True
                self._break_out(harder)
        self._reader.close()


def leave_signals_to_us(kernel: Any) -> None:
    """Let an engine ignore interrupts unless a cell runs; call it from the main thread.

    ipykernel lets interrupts raise while it handles a message. An interrupt that comes before the
    cell has begun would then end the handling itself: the request is lost, and never answered.
    """
    kernel.pre_handler_hook = kernel.post_handler_hook = _nothing
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _nothing() -> None:
    """Do nothing; in the place of ipykernel's hooks."""
