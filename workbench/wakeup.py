"""Wakes a thread that polls sockets, from any other thread; used on both sides."""

from __future__ import annotations

import contextlib
import socket


class Wakeup:
    """A pair of sockets, since zmq's poller takes no pipes on Windows; neither end ever blocks."""

    def __init__(self) -> None:
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)

    def fileno(self) -> int:
        """What the poller watches."""
        return self._read.fileno()

    def set(self) -> None:
        """Wake the poller; a wake-up that is still waiting stands for this one too."""
        with contextlib.suppress(OSError):
            self._write.send(b"x")

    def clear(self) -> None:
        """Forget the wake-ups that came so far."""
        with contextlib.suppress(OSError):
            while self._read.recv(4096):
                pass

    def close(self) -> None:
        """Close both ends; `set` does nothing from then on."""
        self._read.close()
        self._write.close()
