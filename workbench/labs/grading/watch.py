"""Watches what a kernel and all it has started use, and ends them when it is too much."""

from __future__ import annotations

import threading
from collections.abc import Callable

import psutil

from . import processes
from .limits import GB, Limits

EVERY_S = 0.25
SOON_S = 0.05
"""The pause while more than half of the memory is used."""


class Watch:
    """A thread that looks at all descendants of this process.

    Args:
        end: Ends them all; called at most once, on the thread.
    """

    def __init__(self, limits: Limits, family: Callable[[], list[psutil.Process]],
                 end: Callable[[], None]) -> None:  # fmt: skip
        self._limits, self._family, self._end = limits, family, end
        self._over = threading.Event()
        self.broken = ""
        """Which limit was passed, in words; empty while none was."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Look no more."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        pause_s = EVERY_S
        while not self._over.wait(pause_s):
            family = self._family()
            held = processes.memory_bytes(family, self._limits.memory_bytes)
            pause_s = SOON_S if held > self._limits.memory_bytes / 2 else EVERY_S
            if len(family) > self._limits.processes:
                most = self._limits.processes
                self.broken = f"it had {len(family)} processes: at most {most} are allowed"
            elif held > self._limits.memory_bytes:
                most_gb = self._limits.memory_gb
                self.broken = f"it used {held / GB:.1f} GB of memory: {most_gb:g} GB are allowed"
            if self.broken:
                self._end()
                return
