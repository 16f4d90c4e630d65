"""The state of each engine, as data: CPU, memory, GPUs, and the last line of its log.

Processes of this host are read together with their child processes. Readings are frequent and
include many engines, so their cost matters: times and resident set cost about 30 us a process; the
proportional set size (PSS), which alone counts pages that forked engines share, costs 2 to 5 ms per
engine with PyTorch. So engines are read one after another, within a budget (`PSS_BUDGET_S`). In
between, the growth of the resident set is added, because new pages belong to the engine alone.

How busy each GPU is, and the memory of each process there, is read through NVML. Only NVML is used,
never CUDA; `devices/` explains why. Functions as in
https://docs.nvidia.com/deploy/nvml-api/group__nvmlDeviceQueries.html.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psutil

from ..devices.discovery import Device, discover

State: TypeAlias = Literal[
    "idle", "cell", "training", "serving", "busy", "waiting", "paused", "starting", "dead"
]

TAIL_BYTES = 4096
"""The most bytes read from a log at a time, because only the end matters."""
LINE_CHARACTERS = 200
_MACHINERY = re.compile(r"\[IPEngine[.\d]*\] ")
"""ipyparallel notes every request it handles, which would hide what the user's code says."""
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|[\x00-\x08\x0b-\x1f\x7f]")
"""Escape sequences of terminals (ECMA-48, CSI) and other control characters."""


@dataclass(frozen=True)
class EngineVitals:
    """One engine at one moment; None means not known.

    Attributes:
        engine: Permanent id.
        rank: Among the workers; None of a server, and of one that is not there.
        device: As in tables: `cpu`, `cuda:0 NVIDIA H200`.
        state: `idle`; in a `cell` without a strategy; `training`; `serving` parameters; `busy` with
            something short; `waiting` for others; `paused` by its user; `starting`; `dead`.
        doing: The same in words: `waiting in all_reduce`, `dead (SIGKILL)`.
        cpu_percent: Of one core, with its children (such as data loaders), since the last sample.
        memory_bytes: Its own, without its children's; `memory_kind` says whether as proportional
            set size (`PSS`) or, where the system has none, as resident set (`RSS`).
        processes: The engine and its children.
        gpu_percent: Share of the last moments in which its GPUs were busy, whoever used them.
        gpu_memory_bytes: What it and its children hold there.
        log_line: The last line of its log, without ipyparallel's notes.
        uptime_s: Since its process began.
    """

    engine: int
    rank: int | None
    pid: int
    host: str
    device: str
    state: State
    doing: str
    cpu_percent: float | None = None
    memory_bytes: int | None = None
    memory_kind: str = "PSS"
    processes: int | None = None
    gpu_percent: float | None = None
    gpu_memory_bytes: int | None = None
    log_line: str | None = None
    uptime_s: float | None = None

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON-ready data; what is not known is null."""
        found = asdict(self)
        for name, value in found.items():
            if isinstance(value, float):
                found[name] = round(value, 3) if math.isfinite(value) else None
        return found


class LastLine:
    """The last line of a log that grows; reads what was added, and of that no more than the end."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = self._at = 0
        self._text: str | None = None

    def read(self) -> str | None:
        """Return the last useful line, without control characters; None: there is none.

        A line that is still being written counts. One that does not fit in `TAIL_BYTES` is shown
        by its end.
        """
        try:
            status = self._path.stat()
            if (status.st_ino, status.st_size) == (self._inode, self._at):
                return self._text
            if status.st_ino != self._inode or status.st_size < self._at:
                self._text = None  # replaced or cut
            with self._path.open("rb") as file:
                # From the beginning of the last line on: it may have been incomplete.
                file.seek(max(0, status.st_size - TAIL_BYTES))
                data = file.read(TAIL_BYTES)
        except OSError:
            return self._text
        self._inode, self._at = status.st_ino, status.st_size
        for line in reversed(data.decode(errors="replace").splitlines()):
            clean = _CONTROL.sub("", line).strip()
            if clean and not _MACHINERY.search(clean):
                self._text = clean[-LINE_CHARACTERS:]
                break
        return self._text


def gpu_use(
    gpus: Iterable[GpuReading], uuid: str, pids: Iterable[int]
) -> tuple[float | None, int | None]:
    """Return how busy an engine's GPUs are (percent, the mean), and the memory it holds there.

    Args:
        uuid: Of the GPU it was given, empty for a CPU; its processes may use others too.
        pids: The engine and its children.
    """
    mine = set(pids)
    percents: list[float] = []
    held: int | None = None
    unknown = False
    for gpu in gpus:
        here = [used for pid, used in gpu.memory_bytes.items() if pid in mine]
        unknown |= None in here
        if here:
            held = (held or 0) + sum(used for used in here if used is not None)
        if (here or gpu.uuid == uuid) and gpu.percent is not None:
            percents.append(gpu.percent)
    mean = sum(percents) / len(percents) if percents else None
    return mean, None if unknown else held


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
        """Return the living descendants of each root, without descendants of other roots."""
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
    """The remembered values of a process between readings."""

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
        """Read the PSS of the engine whose last reading is oldest."""
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


@dataclass(frozen=True)
class GpuReading:
    """One GPU at one moment.

    Attributes:
        index: As `--devices` counts.
        percent: Share of the last moments in which some kernel ran, 0..100, whoever's; None where
            the driver does not say (MIG).
        used_bytes, total_bytes: Memory, whoever's.
        memory_bytes: By pid; None where the driver does not say. Empty in a container whose pids
            are not the driver's.
    """

    index: int
    percent: float | None
    used_bytes: int | None
    total_bytes: int | None
    memory_bytes: Mapping[int, int | None] = field(default_factory=dict)
    uuid: str = ""


class Gpus:
    """Reads the GPUs that this process may use; opened at the first reading.

    Args:
        find: Which there are.
        nvml: The bindings (`pynvml`); replaced in tests.
    """

    def __init__(self, find: Callable[[], list[Device]] = discover, nvml: Any = None) -> None:
        self._find, self._nvml = find, nvml
        self._handles: dict[tuple[int, str], Any] | None = None

    def read(self) -> list[GpuReading]:
        """Return a reading per GPU, ordered by index; empty where there is none."""
        if self._handles is None:
            self._handles = self._open()
        return [self._one(*which, handle) for which, handle in sorted(self._handles.items())]

    def close(self) -> None:
        """Close NVML; the next reading opens it again."""
        if self._handles:
            with contextlib.suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()
        self._handles = None

    def _open(self) -> dict[tuple[int, str], Any]:
        found = self._find()
        if not found:
            return {}
        if self._nvml is None:
            import pynvml

            self._nvml = pynvml
        nvml, handles = self._nvml, {}
        try:
            nvml.nvmlInit()
        except nvml.NVMLError:
            return {}
        for gpu in found:
            with contextlib.suppress(nvml.NVMLError):
                handles[gpu.index, gpu.uuid] = nvml.nvmlDeviceGetHandleByUUID(gpu.uuid)
        return handles

    def _one(self, index: int, uuid: str, handle: Any) -> GpuReading:
        nvml = self._nvml
        busy = self._ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        by_pid: dict[int, int | None] = {}
        for process in self._ask(nvml.nvmlDeviceGetComputeRunningProcesses, handle) or ():
            used = process.usedGpuMemory
            by_pid[int(process.pid)] = None if used is None else int(used)
        return GpuReading(
            index,
            None if busy is None else float(busy.gpu),
            None if memory is None else int(memory.used),
            None if memory is None else int(memory.total),
            by_pid,
            uuid,
        )

    def _ask(self, question: Callable[[Any], Any], handle: Any) -> Any:
        """Return NVML's answer; None if this GPU or driver has none."""
        try:
            return question(handle)
        except self._nvml.NVMLError:
            return None
