"""Makes SIGINT end a blocked collective.

A gloo collective waits in C++, where a signal does not reach Python: the handler runs only when
the call returns, which may be never. Python does write a byte to the wake-up descriptor at once,
though. A watchdog thread reads it, gives the main thread a moment to leave by itself, and then
shuts the group's sockets down: the collective raises and KeyboardInterrupt follows. Where that is
not enough, the worker waits in the store for a peer that never came: then that goes too.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import threading
from collections.abc import Callable, Iterator

GRACE_S = 0.2


class InterruptWatch:
    """One watchdog thread for the engine's life; armed while a cell runs.

    Args:
        break_out: Called from the watchdog's thread when the main thread stays blocked; the second
            time with True, when the first was not enough.
    """

    def __init__(self, break_out: Callable[[bool], object]) -> None:
        self._break_out = break_out
        self._reader, self._writer = socket.socketpair()
        self._writer.setblocking(False)
        self._left = threading.Event()
        self._left.set()
        self.broke_out = False
        threading.Thread(target=self._main, name="workbench-interrupt", daemon=True).start()

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Watch the main thread until the block is left; call it from the main thread."""
        self.broke_out = False
        self._left.clear()
        before = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        try:
            yield
        finally:
            self._left.set()
            signal.set_wakeup_fd(before)

    def _main(self) -> None:
        while data := self._reader.recv(64):
            if signal.SIGINT not in data:
                continue
            for harder in (False, True):
                if self._left.wait(GRACE_S):
                    break
                self.broke_out = True
                self._break_out(harder)
