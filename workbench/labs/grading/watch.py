"""Watches what a kernel and all it has started use: processes, memory, disk; ends the greedy."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from . import processes
from .limits import GB, MOST_FILES, Limits

EVERY_S = 0.25
SOON_S = 0.05
"""The pause while more than half of the memory is used."""
DISK_EVERY_S = 2.0
MOST_OWN_BYTES = GB
"""What answers may fill of the grader's own memory."""
MOST_PATH = 3500
"""Characters; the system takes 4096, and what lies deeper could not be counted."""
SHARE = 3
"""A pause is at least so many times as long as the look before it."""


class Watch:
    """A thread that looks at all descendants of this process.

    Args:
        end: Ends them all; called at most once, on the thread.
        folder: Where they keep their files.
    """

    def __init__(self, limits: Limits, family: Callable[[], list[psutil.Process]],
                 end: Callable[[], None], folder: Path) -> None:  # fmt: skip
        self._limits, self._family, self._end, self._folder = limits, family, end, folder
        self._disk_at = time.monotonic() + DISK_EVERY_S
        self._over = threading.Event()
        self._own_bytes = _own_bytes()
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
            if not self.broken and time.monotonic() > self._disk_at:
                pause_s = max(pause_s, self._measure())
            if self.broken:
                self._end()
                return

    def _weigh(self, family: list[psutil.Process]) -> float:
        """See whether they hold too much memory; return the pause until the next look."""
        most_bytes, began = self._limits.memory_bytes, time.monotonic()
        held = processes.memory_bytes(family, most_bytes)
        own = _own_bytes() - self._own_bytes
        if held > most_bytes:
            allowed = f"{self._limits.memory_gb:g} GB are allowed"
            self.broken = f"it used {held / GB:.1f} GB of memory: {allowed}"
        elif own > MOST_OWN_BYTES:
            self.broken = f"its answers filled {own / GB:.1f} GB of the grader's memory"
        soon = held > most_bytes / 2 or own > MOST_OWN_BYTES / 2
        pause_s = SOON_S if soon else EVERY_S
        return max(pause_s, SHARE * (time.monotonic() - began))  # labs measure times beside us

    def _measure(self) -> float:
        """See whether their files are too large or too many; return the pause afterwards."""
        began = time.monotonic()
        size_bytes, files = on_disk(self._folder, self._limits.disk_bytes, MOST_FILES)
        if size_bytes > self._limits.disk_bytes:
            allowed = f"{self._limits.disk_gb:g} GB are allowed"
            self.broken = f"its files held {size_bytes / GB:.1f} GB or more: {allowed}"
        elif files == TOO_DEEP:
            self.broken = f"its folders were nested deeper than {MOST_PATH} characters"
        elif files > MOST_FILES:
            self.broken = f"it had more than {MOST_FILES} files and folders"
        self._disk_at = time.monotonic() + DISK_EVERY_S
        return SHARE * (self._disk_at - DISK_EVERY_S - began)


TOO_DEEP = -1


def _own_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def on_disk(folder: Path, enough_bytes: int, enough_files: int) -> tuple[int, int]:
    """Return what the files below a folder hold on disk, and how many there are.

    A count ends when it comes to more than enough, so a look takes a bounded time; and where a
    folder lies too deep to be looked into, with `TOO_DEEP` files.
    """
    waiting, size_bytes, files = [os.fspath(folder)], 0, 0
    while waiting:
        with contextlib.suppress(OSError), os.scandir(waiting.pop()) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    size_bytes += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        if len(os.fsencode(entry.path)) > MOST_PATH:
                            return size_bytes, TOO_DEEP
                        waiting.append(entry.path)
                if size_bytes > enough_bytes or files > enough_files:
                    return size_bytes, files
    return size_bytes, files
