"""Watches what a kernel and all it has started use, and ends them when it is too much."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil

from . import processes
from .limits import GB, Limits

EVERY_S = 0.25
SOON_S = 0.05
"""The pause while more than half of the memory is used."""
SHARE = 3
"""A pause is at least so many times as long as the look before it."""


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
            if len(family) > self._limits.processes:  # weighing so many would take long
                most = self._limits.processes
                self.broken = f"it had {len(family)} processes: at most {most} are allowed"
            else:
                pause_s = self._weigh(family)
            if self.broken:
                self._end()
                return

    def _weigh(self, family: list[psutil.Process]) -> float:
        """See whether they hold too much memory; return the pause until the next look."""
        most_bytes, began = self._limits.memory_bytes, time.monotonic()
        held = processes.memory_bytes(family, most_bytes)
        if held > most_bytes:
            allowed = f"{self._limits.memory_gb:g} GB are allowed"
            self.broken = f"it used {held / GB:.1f} GB of memory: {allowed}"
        pause_s = SOON_S if held > most_bytes / 2 else EVERY_S
        return max(pause_s, SHARE * (time.monotonic() - began))  # labs measure times beside us
