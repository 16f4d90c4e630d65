"""What a notebook may use while it is graded."""

from __future__ import annotations

import contextlib
import os
import resource
from dataclasses import dataclass
from pathlib import Path

CORES = os.cpu_count() or 1
GB = 10**9
FILES = 4096
FILE_BYTES = 2 * GB
MOST_FILES = 50_000
STEP_S = 120.0
"""A step of the lab may take so long even where an exercise's cell may not."""


@dataclass(frozen=True)
class Limits:
    """What one notebook may use.

    Attributes:
        cell_s: Seconds for a cell of the student, and for a check.
        total_s: Seconds for the notebook, restarts of its kernel included.
        memory_gb: Memory of all its processes together.
        disk_gb: All files in its folder together, as the disk holds them.
        processes: Processes at once, engines included.
        restarts: How often its kernel is started anew when a cell has brought it down.
        grace_s: Seconds for an interrupt to be heeded before the kernel is killed; an engine that
            heeds none is ended by the kernel after 8 s, which is the better way.
    """

    cell_s: float = 60.0
    total_s: float = 600.0
    memory_gb: float = 4.0
    disk_gb: float = 5.0
    processes: int = 150
    restarts: int = 3
    grace_s: float = 15.0

    @property
    def memory_bytes(self) -> int:
        """The memory, in bytes."""
        return int(self.memory_gb * GB)

    @property
    def disk_bytes(self) -> int:
        """The space on disk, in bytes."""
        return int(self.disk_gb * GB)


def bound_this_process(limits: Limits) -> None:
    """Set what the system itself enforces, for this process and all that it starts.

    Address space is not bounded: PyTorch reserves far more of it than it uses.
    """
    cpu_s = int(limits.total_s * CORES) + 60
    wanted = {"CORE": 0, "FSIZE": FILE_BYTES, "NOFILE": FILES, "CPU": cpu_s}
    if os.getuid() != 0:  # it counts all processes and threads of the user; root is exempt
        wanted["NPROC"] = _tasks_of_user() + limits.processes * 40
    for name, value in wanted.items():
        which = getattr(resource, f"RLIMIT_{name}", None)
        if which is None:
            continue
        hard = resource.getrlimit(which)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(which, (bound, bound))
    with contextlib.suppress(OSError):  # should memory run out, the system ends these first
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")


def _tasks_of_user() -> int:
    import psutil

    count = 0
    for process in psutil.process_iter(["uids", "num_threads"]):
        uids = process.info["uids"]
        if uids is not None and uids.real == os.getuid():
            count += process.info["num_threads"] or 1
    return count
