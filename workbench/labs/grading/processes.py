"""Finds whatever a notebook has started, also what has left its family, and ends it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable

import psutil

MARK = "WORKBENCH_GRADING"
"""In the environment of every process of a graded notebook that has not cleared it."""

starting = threading.Lock()
"""Held while this process starts a kernel; who takes it for good may end all there are."""

_SET_PDEATHSIG, _GET_DUMPABLE, _SET_DUMPABLE, _SET_CHILD_SUBREAPER = 1, 3, 4, 36
_SWEEPS_S = 10.0


def adopt(on: bool = True) -> bool:
    """Become the parent of descendants whose own parent has ended (Linux); say whether it worked.

    A process that has forked twice and left its session is then still found among our children.
    """
    return _prctl(_SET_CHILD_SUBREAPER, int(on))


def die_with_parent() -> bool:
    """Have the system end this process when its parent ends (Linux); say whether it will."""
    return _prctl(_SET_PDEATHSIG, signal.SIGKILL)


def hide(on: bool = True) -> bool:
    """Keep other processes of this user from our memory, environment and open files (Linux).

    What we start is not hidden. Who may trace everything, as root often may, sees us all the same.

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
    """Whether a process runs: it is there and no zombie."""
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
    """End what `find` finds until it finds nothing; return what is left after all.

    All are halted first, so that none starts another while the others end.
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
    """Take note of the ends of those that became our children."""
    for process in processes:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(process.pid, os.WNOHANG)


def memory_bytes(processes: Iterable[psutil.Process], enough: int) -> int:
    """Return the memory that processes hold.

    Pages that engines share are counted once, which takes longer, so that is done only when a
    count of all pages comes to `enough` or more.
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
