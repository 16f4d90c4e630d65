"""Limits how many notebooks import a framework at the same time, for example in a class.

An import keeps a core busy for seconds and takes hundreds of megabytes. If all of a user's
notebooks imported at the same time, all would be ready late. So a warm parent first takes one of a
few places (a locked file, which is free again when its holder dies). It imports nothing in advance
if memory is scarce. The wait is limited: after a timeout a parent imports without a place.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import platformdirs
import psutil

NEEDED_BYTES = {"torch": 500 << 20, "tensorflow": 900 << 20}
"""The memory of a warm parent after the import of the framework and of torch's second stage."""
SPARED = 0.05
"""Share of the machine's memory that must stay free when importing in advance."""
WAIT_S = 60.0
POLL_S = 0.05
_CGROUP = Path("/sys/fs/cgroup")


def places() -> int:
    """Return how many can import at the same time: one per core, which an import keeps busy."""
    return len(os.sched_getaffinity(0))


@contextlib.contextmanager
def turn(wait_s: float = WAIT_S, folder: Path | None = None) -> Iterator[bool]:
    """Hold a place in the block; yields whether a place was free in time."""
    import fcntl  # here: the notebook's side must import where this does not exist

    end = time.monotonic() + wait_s
    held, path = None, Path()
    try:
        while held is None:
            there_is_one = False
            for path in _files(folder):
                with contextlib.suppress(OSError):
                    held = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    there_is_one = True
                if held is not None:
                    break
            else:
                if not there_is_one or time.monotonic() >= end:
                    break
                time.sleep(POLL_S)
        if held is not None:
            _taken.append(path)
        yield held is not None
    finally:
        if held is not None:
            _taken.remove(path)
            _clear(path)
            os.close(held)


_taken: list[Path] = []
"""The files of the places that this process holds."""


def leave() -> None:
    """Remove the file if the process ends during its turn."""
    for path in _taken:
        _clear(path)


def _clear(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()
    with contextlib.suppress(OSError):  # it contains other files, or belongs to another user
        if path.parent == platformdirs.user_runtime_path() and not _given():
            path.parent.rmdir()


def _given() -> bool:
    """Whether the system has a runtime folder; otherwise platformdirs names a folder in TMPDIR."""
    return tempfile.gettempdir() not in map(str, platformdirs.user_runtime_path().parents)


def _files(folder: Path | None) -> list[Path]:
    root = platformdirs.user_runtime_path() if folder is None else folder
    with contextlib.suppress(OSError):
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return [root / f"distributed-workbench.{os.getuid()}.{n}.turn" for n in range(places())]


def _lock(path: Path, how: int) -> int | None:
    """Lock a file of this user; None if another process holds it.

    Raises:
        OSError: It cannot be created or opened: a full or read-only disk, a file of another user.
    """
    import fcntl

    held = -1
    try:
        held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        if os.fstat(held).st_uid != os.getuid():
            raise PermissionError(path)
        fcntl.flock(held, how)
        if os.path.samestat(os.fstat(held), path.stat()):
            return held
    except (BlockingIOError, FileNotFoundError):  # its holder may just have removed it
        if held < 0:
            raise
        os.close(held)
        return None
    except OSError:
        if held >= 0:
            os.close(held)
        raise
    os.close(held)
    return None


def too_little(framework: str) -> str:
    """Return why nothing is imported in advance, in words; empty if there is enough memory."""
    free, whole = memory()
    needed = NEEDED_BYTES[framework] + SPARED * whole
    if free >= needed:
        return ""
    return (
        f"the import needs {needed / 1e6:.0f} MB of memory, but only {free / 1e6:.0f} MB are free"
    )


def memory() -> tuple[int, int]:
    """Return free and total memory: the machine's, or the control group's."""
    system = psutil.virtual_memory()
    free, whole = int(system.available), int(system.total)
    with contextlib.suppress(OSError, ValueError):
        limit = int((_CGROUP / "memory.max").read_text())
        if limit < whole:
            used = int((_CGROUP / "memory.current").read_text()) - _inactive_bytes()
            free, whole = min(free, limit - used), limit
    return free, whole


def _inactive_bytes() -> int:
    """Return the control group's file cache, which it frees when memory is needed."""
    for line in (_CGROUP / "memory.stat").read_text().splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file":
            return int(value)
    return 0
