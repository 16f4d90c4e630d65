"""How much memory everything holds that was started from here, and who holds it."""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import dataclass, field

import psutil

MARK = "WORKBENCH_BINDER_CHECK"
MB = 1e6
SAMPLE_EVERY_S = 0.4
WARM = "workbench.cluster.forkserver.server"


@dataclass
class Memory:
    """The proportional set size of everything that carries the mark, sampled in a thread.

    Shared pages are divided among those who share them, so the sum counts each page once.
    """

    mark: str
    peak_bytes: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    _over: threading.Event = field(default_factory=threading.Event)
    _sampled: threading.Condition = field(default_factory=threading.Condition)

    def __enter__(self) -> Memory:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def wait_for_sample(self) -> None:
        """Return when a sample has been taken that began after this call."""
        with self._sampled:
            self._sampled.wait()
            self._sampled.wait()

    def _watch(self) -> None:
        while not self._over.wait(SAMPLE_EVERY_S):
            parts: dict[str, int] = {}
            for process in marked(self.mark):
                with contextlib.suppress(psutil.Error):
                    held_bytes = process.memory_full_info().pss
                    role = role_of(process)
                    parts[role] = parts.get(role, 0) + held_bytes
            if sum(parts.values()) > self.peak_bytes:
                self.peak_bytes, self.parts = sum(parts.values()), parts
            with self._sampled:
                self._sampled.notify_all()


def marked(mark: str) -> list[psutil.Process]:
    """Return the living processes that were started, however indirectly, from here."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return found


def role_of(process: psutil.Process) -> str:
    """Say what a process is, by its command line: forked ones have that of their parent."""
    words = process.cmdline()
    if "ipykernel_launcher" in words:
        return "kernels"
    if any(word.endswith("jupyter-lab") for word in words):
        return "server"
    if any("ipyparallel.controller" in word for word in words):
        return "controller"
    if WARM in words:
        above = process.parent()
        return "engines" if above is not None and WARM in above.cmdline() else "warm parents"
    return "others"
