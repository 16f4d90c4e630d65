"""Looks at a run that was queued every now and then: how far and how fast it is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from .lineup import Item
from .run import Run

TICK_S = 0.5
"""How often it is looked at."""


class PaceWatch:
    """Keeps an item's pace true until told to end, and tells when it was looked at."""

    def __init__(
        self, item: Item, run: Run, lock: threading.RLock, tell: Callable[[], None]
    ) -> None:
        self._item, self._run, self._lock, self._tell = item, run, lock, tell
        self._elapsed_s, self._seen_at = 0.0, time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._main, name="workbench-pace", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._end.wait(TICK_S):
            self._look()
            self._tell()

    def _look(self) -> None:
        now = time.monotonic()
        if self._run.state != "paused":
            self._elapsed_s += now - self._seen_at
        self._seen_at = now
        snapshot = self._run.snapshot()
        with self._lock:
            self._item.pace.update(
                snapshot.step, snapshot.total_steps, snapshot.elapsed_s, self._elapsed_s
            )

    def end(self) -> None:
        """Look a last time, and no more."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._look()
