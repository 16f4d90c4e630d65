"""How an engine finds its notebook, and what it does when the notebook has ended.

The engines of a kept cluster outlive their notebook: they look into the cluster's folder for the
address of the next one. Engines that the notebook did not fork end by themselves.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Protocol

import zmq
from zmq.utils.monitor import recv_monitor_message

CONTROL = "control.json"
LOOK_S = 0.3
HEARTBEAT_MS = 5000


class Home(Protocol):
    """The questions of the control link, on its thread."""

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Watch a socket that is about to be connected to the notebook."""

    def moved(self) -> str:
        """Return the notebook's new address, empty while it has none."""


class KeptHome:
    """The notebook of a kept cluster may be another one each time.

    Args:
        folder: The cluster's.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / CONTROL
        self._read = -1
        self._next_look = 0.0

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Do nothing, because the next notebook may connect days later."""

    def moved(self) -> str:
        """Return the address in the folder when it has changed, else an empty text."""
        now = time.monotonic()
        if now < self._next_look:
            return ""
        self._next_look = now + LOOK_S
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            changed = self._path.stat().st_mtime_ns
            if changed != self._read:
                url = str(json.loads(self._path.read_text())["url"])
                self._read = changed
                return url
        return ""


class LastHome:
    """A notebook on which this engine depends: the engine ends when the notebook has ended.

    A closed connection shows at once; heartbeats show a host that does not answer.

    Args:
        patience_s: How long a lost connection may take to come back.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._monitor: zmq.Socket[bytes] | None = None
        self._lost_at: float | None = None

    def watch(self, socket: zmq.Socket[bytes]) -> None:
        """Watch when the connection is made and lost."""
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3 * HEARTBEAT_MS)
        events = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED
        self._monitor = socket.get_monitor_socket(events)

    def moved(self) -> str:
        """End this process when the connection has been lost for too long."""
        while self._monitor is not None and self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            lost = event == zmq.EVENT_DISCONNECTED
            self._lost_at = (self._lost_at or time.monotonic()) if lost else None
        if self._lost_at is not None and time.monotonic() - self._lost_at > self._patience_s:
            _end()
        return ""


def _end() -> None:
    """End this process and, if it leads a group, the processes that it started."""
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
