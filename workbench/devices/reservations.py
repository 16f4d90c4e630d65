"""Reservations of this machine's GPUs, so that notebooks choose different GPUs.

A cluster that uses GPUs has one file for each GPU in a folder that all users share. Each process of
the cluster has a shared lock (flock) on the file, which ends when the process ends. A process that
gets an exclusive lock knows that no cluster holds the GPU. Nothing is enforced: only notebooks that
check reservations respect them, and users can still name a reserved GPU.

Every user can write into the folder, so its content is not trusted. Links are not followed, the
system says who owns a file, and the content of a file is only shown.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path("/tmp/workbench-gpus")  # not $TMPDIR: it must be the same for all users
VARIABLE = "WORKBENCH_GPU_RESERVATIONS"
"""Another folder, for example one that several containers share; `off`: nothing is reserved."""
_FREE_FOR_ALL = 0o1777
_MAX_BYTES = 4096
_TRIES, _TRY_S = 5, 0.02
_MUTEX_S = 2.0
_CONTROL = re.compile(r"[^\x20-\x7e\u00a0-\U0010ffff]")


@dataclass(frozen=True)
class Holder:
    """Who holds a GPU.

    Attributes:
        user: As the system names the owner of the file.
        pid, notebook: As the holder wrote them.
        path: The path of the file.
    """

    user: str
    pid: int
    notebook: str
    path: Path

    def __str__(self) -> str:
        where = f", {self.notebook}" if self.notebook else ""
        return f"{self.user} (pid {self.pid}{where})"


class Reservations:
    """The GPUs that one cluster holds.

    Attributes:
        files: The lock files, by the GPU's permanent name.
    """

    def __init__(self, notebook: str = "") -> None:
        self.files: dict[str, Path] = {}
        self._notebook, self._token = notebook, secrets.token_hex(6)
        self._locks: dict[Path, int] = {}

    def take(self, gpus: Sequence[str], *, partly: bool = False) -> dict[str, Holder]:
        """Reserve these GPUs; return those that other clusters hold, with the holder.

        Args:
            partly: If some GPUs are taken, reserve the others; otherwise reserve none.
        """
        folder = _folder(make=True)
        wanted = [gpu for gpu in gpus if gpu not in self.files]
        if folder is None or not wanted:
            return {}
        with _alone(folder):
            taken = {gpu: who for gpu, who in holders().items() if gpu in wanted}
            for gpu in wanted if partly or not taken else ():
                if gpu in taken:
                    continue
                with contextlib.suppress(OSError):  # a full disk must not fail a run
                    path = folder / f"{_safe(gpu)}+{self._token}.json"
                    self._locks[path] = self._write(path, gpu)
                    self.files[gpu] = path
        return taken

    def take_over(self, files: Mapping[str, str]) -> None:
        """Reserve the GPUs that another kernel held for the same engines."""
        for gpu, path in files.items():
            if (lock := _share(Path(path))) is not None:
                self.files[gpu], self._locks[Path(path)] = Path(path), lock

    def drop(self) -> None:
        """Give the GPUs back; engines that hold the same files do so themselves."""
        for path in self.files.values():
            with contextlib.suppress(OSError):
                path.unlink()
        self.leave()

    def leave(self) -> None:
        """Stop holding them without giving them back: the engines of a kept cluster hold them."""
        for lock in self._locks.values():
            os.close(lock)
        self._locks, self.files = {}, {}

    def _write(self, path: Path, gpu: str) -> int:
        import fcntl

        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        hidden = path.with_name(
            f".{path.name}"
        )  # no other process must remove the file before it is locked
        lock = os.open(hidden, flags, 0o644)
        about = {"gpu": gpu, "pid": os.getpid(), "notebook": self._notebook, "since": time.time()}
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.fchmod(lock, 0o644)  # independent of the umask: other users must be able to read it
            os.write(lock, json.dumps(about).encode())
            hidden.rename(path)
        except OSError:
            os.close(lock)
            hidden.unlink(missing_ok=True)
            raise
        return lock


def holders(besides: Iterable[Path] = ()) -> dict[str, Holder]:
    """Return the holder of each GPU, by the GPU's permanent name.

    Args:
        besides: Files that do not count, because they are the caller's.
    """
    folder, mine = _folder(), set(besides)
    found: dict[str, Holder] = {}
    if folder is None:
        return found
    for path in sorted(folder.glob("*+*.json")):
        if path in mine:
            continue
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(lock)
                if not stat.S_ISREG(status.st_mode):
                    continue
                if not _is_held(lock):
                    if status.st_uid == os.getuid():
                        path.unlink()  # of a cluster that died
                    continue
                about = json.loads(os.read(lock, _MAX_BYTES))
            finally:
                os.close(lock)
            gpu, notebook = str(about["gpu"]), _CONTROL.sub("", str(about["notebook"]))[:80]
            if path.name.partition("+")[0] == _safe(gpu):
                found[gpu] = Holder(_user(status.st_uid), int(about["pid"]), notebook, path)
    return found


def trouble() -> str:
    """Return why nothing can be reserved here; empty if it can, or is switched off."""
    if os.environ.get(VARIABLE) == "off" or _folder(make=True) is not None:
        return ""
    return (
        "Workbench cannot reserve GPUs, so another notebook can use the GPUs of this notebook at "
        f"the same time. For reservations, the folder {_path()} must exist, and every user must "
        "be able to write to it (mode 1777). An administrator can create this folder or "
        "correct its mode."
    )


_held: dict[str, int] = {}  # of this engine: paths, and what locks them


def hold(paths: Sequence[str]) -> None:
    """Let an engine hold its cluster's GPUs in addition to the kernel, and no others.

    They stay reserved while an engine of a kept cluster lives, with no kernel.
    """
    for path in set(_held) - set(paths):
        os.close(_held.pop(path))
    for path in set(paths) - set(_held):
        if (lock := _share(Path(path))) is not None:
            _held[path] = lock


def _share(path: Path) -> int | None:
    """Return a descriptor with a shared lock on a file of this user; None if that fails."""
    try:
        import fcntl

        lock = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (ImportError, OSError):
        return None
    if os.fstat(lock).st_uid == os.getuid():
        for _ in range(_TRIES):
            with contextlib.suppress(OSError):
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return lock
            time.sleep(_TRY_S)  # another process is checking the lock
    os.close(lock)
    return None


def _is_held(lock: int) -> bool:
    import fcntl

    for _ in range(_TRIES):
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return False
        time.sleep(
            _TRY_S * secrets.randbelow(100) / 100
        )  # perhaps another process is only checking the lock
    return True


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Let only one notebook at a time choose, for a short time.

    If a process blocks this lock, only the order of choices is not guaranteed.
    """
    import fcntl

    lock = os.open(folder, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        until = time.monotonic() + _MUTEX_S
        while time.monotonic() < until:
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_TRY_S)
        yield
    finally:
        os.close(lock)


def _path() -> Path:
    return Path(os.environ.get(VARIABLE) or FOLDER)


def _folder(*, make: bool = False) -> Path | None:
    """Return the folder if it is safe as a folder for all users."""
    path = _path()
    if os.environ.get(VARIABLE) == "off" or not hasattr(os, "O_NOFOLLOW"):
        return None
    try:
        if make:
            with contextlib.suppress(FileExistsError):
                path.mkdir(_FREE_FOR_ALL)
                path.chmod(_FREE_FOR_ALL)  # whatever the umask is
        status = path.lstat()
    except OSError:
        return None
    everybodys = stat.S_IMODE(status.st_mode) & _FREE_FOR_ALL == _FREE_FOR_ALL
    return path if stat.S_ISDIR(status.st_mode) and everybodys else None


def _safe(gpu: str) -> str:
    return re.sub(r"[^0-9A-Za-z-]", "_", gpu)


def _user(uid: int) -> str:
    try:
        import pwd

        return pwd.getpwuid(uid).pw_name
    except (ImportError, KeyError):
        return f"user {uid}"
