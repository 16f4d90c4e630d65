"""Processes that do what a test says, as far as readings of them need it."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import psutil

from workbench.cluster.vitals import Family, Processes


class Process:
    """A process that does what a test says; `psutil.Process` as far as readings need it."""

    def __init__(self, pid: int, *, rss: int = 100, pss: int = 60, began: float = 5.0) -> None:
        self.pid, self.rss, self.pss, self.began, self.cpu_s = pid, rss, pss, began, 0.0
        self.read = self.full = 0

    def create_time(self) -> float:
        return self.began

    def oneshot(self) -> contextlib.AbstractContextManager[None]:
        self.read += 1
        return contextlib.nullcontext()

    def cpu_times(self) -> SimpleNamespace:
        return SimpleNamespace(user=self.cpu_s, system=0.0)

    def memory_info(self) -> SimpleNamespace:
        return SimpleNamespace(rss=self.rss)

    def memory_full_info(self) -> SimpleNamespace:
        self.full += 1
        return SimpleNamespace(rss=self.rss, pss=self.pss)


class System:
    """Processes by pid, who their parents are, and a clock."""

    def __init__(self, parents: dict[int, int]) -> None:
        self.parents = parents
        self.processes = {pid: Process(pid) for pid in parents}
        self.asked: list[int] = []
        self.now_s = 0.0

    def parent_of(self, pid: int) -> int | None:
        self.asked.append(pid)
        return self.parents.get(pid)

    def open(self, pid: int) -> Process:
        if pid not in self.parents:
            raise psutil.NoSuchProcess(pid)
        return self.processes.setdefault(pid, Process(pid))

    def processes_read(self) -> Processes:
        family = Family(lambda: list(self.parents), self.parent_of)
        return Processes(family, self.open, lambda: self.now_s)
