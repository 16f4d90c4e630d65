"""The limits of a notebook while it is graded, and how its processes are ended.

All processes that a notebook has started are found and ended, even those that have left its process
tree. Their number, their memory and their files on disk are watched.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

CORES = os.cpu_count() or 1
GB = 10**9
FILES = 4096
FILE_BYTES = 2 * GB
MOST_FILES = 50_000
STEP_S = 120.0
"""A step of the lab may take this long even if an exercise's cell may not."""


@dataclass(frozen=True)
class Limits:
    """The limits of one notebook.

    Attributes:
        cell_s: Seconds for a cell of the student, and for a check.
        total_s: Seconds for the notebook, restarts of its kernel included.
        memory_gb: Memory of all its processes together.
        disk_gb: All files in its folder together, as the disk holds them.
        processes: Processes at once, engines included.
        restarts: How often its kernel is restarted after a cell has ended it.
        grace_s: Seconds after an interrupt before the kernel is killed. The kernel ends an engine
            that ignores the interrupt after 8 s, which is the better way.
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
    """Set the limits that the system enforces, for this process and all that it starts.

    Address space is not limited, because PyTorch reserves far more of it than it uses.
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


MARK = "WORKBENCH_GRADING"
"""In the environment of every process of a graded notebook, unless the process cleared it."""

starting = threading.Lock()
"""Held while this process starts a kernel; a thread that keeps it may end all kernels."""

_SET_PDEATHSIG, _GET_DUMPABLE, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 3, 4, 36
_SWEEPS_S = 10.0


def adopt(on: bool = True) -> bool:
    """Become the parent of descendants whose own parent has ended (Linux); return if it worked.

    A process that has forked twice and left its session is then still one of our children.
    """
    return _prctl(_SET_CHILD_SUBREAPER, int(on))


def die_with_parent() -> bool:
    """Let the system end this process when its parent ends (Linux); return whether it will."""
    return _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def hide(on: bool = True) -> bool:
    """Keep other processes of this user from our memory, environment and open files (Linux).

    Processes that we start are not hidden. A user who may trace everything, often root, still sees
    us.

    Returns:
        Whether anything was changed.
    """
    return _prctl(_GET_DUMPABLE, 0, int(on)) and _prctl(_SET_DUMPABLE, int(not on))


def _prctl(option: int, value: int, expected: int = 0) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        return int(libc.prctl(option, value, 0, 0, 0)) == expected
    except (OSError, AttributeError):
        return False


def lives(process: psutil.Process) -> bool:
    """Whether a process runs: it exists and is not a zombie."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def below(pid: int) -> list[psutil.Process]:
    """Return all living descendants of a process."""
    with contextlib.suppress(psutil.Error):
        return [p for p in psutil.Process(pid).children(recursive=True) if lives(p)]
    return []


def marked(mark: str) -> list[psutil.Process]:
    """Return the processes of this user whose environment carries a mark."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.pid != os.getpid() and process.environ().get(MARK) == mark:
                found.append(process)
    return [process for process in found if lives(process)]


def end(find: Callable[[], Iterable[psutil.Process]]) -> list[psutil.Process]:
    """End what `find` finds until it finds nothing; return what is still left at the end.

    All are stopped first, so that none starts another process while the others end.
    """
    until = time.monotonic() + _SWEEPS_S
    while found := [process for process in find() if process.pid != os.getpid()]:
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                with contextlib.suppress(psutil.Error, OSError):
                    process.send_signal(number)
        psutil.wait_procs(found, timeout=0.05)
        reap(found)
        if time.monotonic() > until:
            return [process for process in find() if process.pid != os.getpid()]
    return []


def reap(processes: Iterable[psutil.Process]) -> None:
    """Reap the ended processes that became our children."""
    for process in processes:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(process.pid, os.WNOHANG)


def memory_bytes(processes: Iterable[psutil.Process], enough: int) -> int:
    """Return the memory that processes hold.

    Pages that engines share should be counted once. This takes longer, so it is done only if a
    count of all pages gives `enough` or more.
    """
    known, resident = list(processes), 0
    for process in known:
        with contextlib.suppress(psutil.Error):
            resident += process.memory_info().rss
    if resident < enough:
        return resident
    total = 0
    for process in known:
        with contextlib.suppress(psutil.Error, OSError):
            full = process.memory_full_info()
            total += getattr(full, "pss", full.rss) or full.rss
    return total


EVERY_S = 0.25
SOON_S = 0.05
"""The pause if more than half of the memory is used."""
DISK_EVERY_S = 2.0
MOST_OWN_BYTES = GB
"""How much of the grader's own memory a notebook's data may fill."""
MOST_PATH = 3500
"""Characters; the system allows 4096, and files in deeper folders could not be counted."""
SHARE = 3
"""A pause is at least this many times as long as the check before it."""


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
        """The limit that was exceeded, in words; empty if none was."""
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        pause_s = EVERY_S
        while not self._over.wait(pause_s):
            family = self._family()
            if len(family) > self._limits.processes:  # weighing so many would take long
                most = self._limits.processes
                words = f"processes: at most {most} are allowed"
                self.broken = f"the notebook had {len(family)} {words}"
            else:
                pause_s = self._weigh(family)
            if not self.broken and time.monotonic() > self._disk_at:
                pause_s = max(pause_s, self._measure())
            if self.broken:
                self._end()
                return

    def _weigh(self, family: list[psutil.Process]) -> float:
        """Check whether they hold too much memory; return the pause until the next check."""
        most_bytes, began = self._limits.memory_bytes, time.monotonic()
        held = memory_bytes(family, most_bytes)
        own = _own_bytes() - self._own_bytes
        if held > most_bytes:
            allowed = f"{self._limits.memory_gb:g} GB are allowed"
            self.broken = f"the notebook used {held / GB:.1f} GB of memory: {allowed}"
        elif own > MOST_OWN_BYTES:
            allowed = f"at most {MOST_OWN_BYTES / GB:g} GB are allowed"
            self.broken = (
                f"data from the notebook used {own / GB:.1f} GB of the grader's own memory: "
                f"{allowed}"
            )
        soon = held > most_bytes / 2 or own > MOST_OWN_BYTES / 2
        pause_s = SOON_S if soon else EVERY_S
        return max(pause_s, SHARE * (time.monotonic() - began))  # labs measure times meanwhile

    def _measure(self) -> float:
        """Check whether their files are too large or too many; return the pause afterwards."""
        began = time.monotonic()
        size_bytes, files = on_disk(self._folder, self._limits.disk_bytes, MOST_FILES)
        if size_bytes > self._limits.disk_bytes:
            allowed_gb = f"{self._limits.disk_gb:g}"
            self.broken = f"the notebook's files took more than {allowed_gb} GB of disk space"
        elif files == TOO_DEEP:
            self.broken = f"paths of the notebook's folders had more than {MOST_PATH} characters"
        elif files > MOST_FILES:
            self.broken = f"the number of the notebook's files and folders was over {MOST_FILES}"
        self._disk_at = time.monotonic() + DISK_EVERY_S
        return SHARE * (self._disk_at - DISK_EVERY_S - began)


TOO_DEEP = -1


def _own_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def on_disk(folder: Path, enough_bytes: int, enough_files: int) -> tuple[int, int]:
    """Return the size on disk of the files below a folder, and their number.

    The count ends when a limit is exceeded, so it takes a limited time. If a folder is too deep to
    read, the number is `TOO_DEEP`.
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
