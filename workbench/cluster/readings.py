"""What processes of this host use: CPU and memory of engines with all that they have started.

Read often and for many engines, so every reading has a price: times and resident set cost about
30 us a process; the proportional set size (PSS), which alone counts pages that forked engines
share, costs 2 to 5 ms an engine with PyTorch and is read in turn, within a budget (`PSS_BUDGET_S`).
In between, what the resident set has grown by is added to it: new pages are the engine's own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

PSS_BUDGET_S = 0.006
"""CPU time that one sample may spend on PSS; at least one engine is read."""
SAME_START_S = 1.0
"""Start times that differ by more belong to different processes with the same pid."""


@dataclass(frozen=True)
class Reading:
    """What one engine uses.

    Attributes:
        cpu_percent: Of one core, with its children, since the last reading; None at the first.
        memory_bytes: Of the engine alone; None where it was not read yet.
        memory_kind: `PSS`, or `RSS` where the system has no PSS: shared pages count fully then.
        pids: The engine and its children.
    """

    cpu_percent: float | None
    memory_bytes: int | None
    memory_kind: str
    pids: tuple[int, ...]


class Family:
    """Which processes descend from which engine; only processes that are new are looked at.

    Args:
        pids, parent_of: The system's processes, and a process's parent; replaced in tests.
    """

    def __init__(
        self,
        pids: Callable[[], list[int]] = psutil.pids,
        parent_of: Callable[[int], int | None] | None = None,
    ) -> None:
        self._pids, self._parent_of = pids, parent_of or _parent_of
        self._parents: dict[int, int | None] = {}

    def of(self, roots: set[int]) -> dict[int, list[int]]:
        """Return the living descendants of each root, without those below another root."""
        living = set(self._pids())
        for gone in self._parents.keys() - living:
            del self._parents[gone]
        for pid in living - self._parents.keys():
            self._parents[pid] = self._parent_of(pid)
        found: dict[int, list[int]] = {root: [] for root in roots}
        owners: dict[int, int | None] = dict.fromkeys(roots)
        owners.update({root: root for root in roots})
        for pid in living - roots:
            owner = self._owner(pid, owners)
            if owner is not None:
                found[owner].append(pid)
        return found

    def _owner(self, pid: int, owners: dict[int, int | None]) -> int | None:
        way = []
        at: int | None = pid
        while at is not None and at not in owners and at not in way:
            way.append(at)
            at = self._parents.get(at)
        owner = owners.get(at) if at is not None else None
        owners.update(dict.fromkeys(way, owner))
        return owner


def _parent_of(pid: int) -> int | None:
    try:
        return int(psutil.Process(pid).ppid())
    except (psutil.Error, OSError):
        return None


@dataclass
class _Seen:
    """What is remembered of a process between readings."""

    process: psutil.Process
    began: float
    cpu_s: float | None = None
    pss_bytes: int | None = None
    rss_then_bytes: int = 0  # when PSS was read
    read_at: float = field(default=-1.0)


class Processes:
    """Reads engines of this host, again and again.

    Args:
        family: Finds their children.
        open_process: Makes a `psutil.Process`; replaced in tests.
        clock: Seconds; CPU shares are taken between two of its readings.
    """

    def __init__(
        self,
        family: Family | None = None,
        open_process: Callable[[int], Any] = psutil.Process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._family, self._open, self._clock = family or Family(), open_process, clock
        self._seen: dict[int, _Seen] = {}
        self._last_s: float | None = None
        self._rounds = 0

    def read(
        self, engines: Mapping[int, float], *, all_memory: bool = False
    ) -> dict[int, Reading | None]:
        """Return what each engine uses, by pid; None of one that is not there.

        Args:
            engines: Pids, and when each began (seconds since 1970; 0: not known).
            all_memory: Read every engine's PSS, whatever that costs.
        """
        now = self._clock()
        span_s = None if self._last_s is None else now - self._last_s
        self._last_s = now
        families = self._family.of(set(engines))
        known = {pid for root, children in families.items() for pid in (root, *children)}
        for gone in self._seen.keys() - known:
            del self._seen[gone]
        spent = {pid: self._spent(pid, span_s, engines.get(pid, 0.0)) for pid in known}
        living = [pid for pid in engines if spent[pid] is not None]
        self._read_pss(living, all_memory)
        return {
            pid: self._reading(pid, families[pid], spent, span_s) if pid in living else None
            for pid in engines
        }

    def _reading(
        self,
        pid: int,
        children: list[int],
        spent: Mapping[int, tuple[float | None, int] | None],
        span_s: float | None,
    ) -> Reading:
        own, rss_bytes = spent[pid] or (None, 0)
        others = [found for child in children if (found := spent[child]) is not None]
        cpu = None
        if own is not None and span_s:
            cpu = 100.0 * (own + sum(one[0] or 0.0 for one in others)) / span_s
        seen, kind = self._seen[pid], "PSS"
        memory: int | None = None
        if seen.pss_bytes is not None:
            memory = max(0, seen.pss_bytes + rss_bytes - seen.rss_then_bytes)
        elif seen.read_at >= 0:
            memory, kind = rss_bytes, "RSS"
        return Reading(cpu, memory, kind, (pid, *children))

    def _spent(
        self, pid: int, span_s: float | None, began: float
    ) -> tuple[float | None, int] | None:
        """Return a process's CPU seconds since the last reading, and its resident set."""
        try:
            seen = self._seen.get(pid)
            if seen is None:
                process = self._open(pid)
                seen = self._seen[pid] = _Seen(process, float(process.create_time()))
            if began and abs(seen.began - began) > SAME_START_S:
                return None
            with seen.process.oneshot():
                times = seen.process.cpu_times()
                rss_bytes = int(seen.process.memory_info().rss)
        except (psutil.Error, OSError):
            self._seen.pop(pid, None)
            return None
        before, seen.cpu_s = seen.cpu_s, float(times.user + times.system)
        if before is not None:
            return max(0.0, seen.cpu_s - before), rss_bytes
        newborn = span_s is not None and not began and time.time() - seen.began <= span_s
        return (seen.cpu_s if newborn else None), rss_bytes

    def _read_pss(self, pids: list[int], everybody: bool) -> None:
        """Read the PSS of whom it was read longest ago."""
        self._rounds += 1
        begins = time.thread_time()
        for pid in sorted(pids, key=lambda pid: self._seen[pid].read_at):
            seen = self._seen[pid]
            try:
                full = seen.process.memory_full_info()
            except (psutil.Error, OSError):
                continue
            seen.read_at = float(self._rounds)
            pss = getattr(full, "pss", 0)
            seen.pss_bytes, seen.rss_then_bytes = (int(pss) if pss else None), int(full.rss)
            if not everybody and time.thread_time() - begins > PSS_BUDGET_S:
                break
