"""Where runs are kept between sessions: one folder per run under the user's data folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from ..shared import cluster_env

HOME_VARIABLE = "WORKBENCH_HOME"
KEEP_RUNS = 50
KEEP_BYTES = 2 << 30
_IN_USE_S = 3600.0
_FOREIGN_S = 7 * 86400.0
_MARK = ".in-use"


def runs_root() -> Path:
    """Return the private folder of the user for all runs; it is created if necessary.

    `WORKBENCH_HOME` overrides the user's data folder. If neither can be written (a container with a
    read-only HOME), it is a private folder in the temporary folder.
    """
    root = _root()
    _make_private(root)
    return root


def moved() -> str:
    """Return a line that runs are in the temporary folder, and why; "" if they are not."""
    wanted, root = _wanted(), _root()
    if root == wanted:
        return ""
    return (
        f"Runs are saved in {root}, because Workbench cannot write to {wanted}. The system may "
        f"delete the files in this temporary folder. To keep runs, set {HOME_VARIABLE} to a folder "
        "of your own, and restart the kernel."
    )


def _root() -> Path:
    wanted = _wanted()
    return wanted if _can_be_written(wanted) else _temporary() or wanted


def _can_be_written(folder: Path) -> bool:
    """Whether files can be created in a folder, or the folder itself; True also for a full disk."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """Return a private folder for runs in the temporary folder; None if there is none."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"distributed-workbench-runs-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o77:
            return folder
    return None  # do not write to a folder of another user


def _wanted() -> Path:
    home = os.environ.get(HOME_VARIABLE)
    if home:
        return Path(home).expanduser() / "runs"
    import platformdirs

    return Path(platformdirs.user_data_dir("workbench", appauthor=False)) / "runs"


def _make_private(folder: Path) -> None:
    """Create a folder and its parents, each private to the user, independent of the umask."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)


def new_run_dir(name: str) -> Path:
    """Make a folder for a run and return it; folder names sort by creation time.

    If it cannot be created (a full disk), only the path is returned, and the run continues without
    a folder.
    """
    slug = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")[:40] or "run"
    stamp = time.strftime("%Y%m%d-%H%M%S", time.gmtime())
    folder = _root() / f"{stamp}-{time.time_ns() % 10**9:09d}-{slug}-{secrets.token_hex(2)}"
    with contextlib.suppress(OSError):  # whoever writes into it says so
        _make_private(folder.parent)
        folder.mkdir(mode=0o700)
    return folder


def prune(
    keep: int = KEEP_RUNS,
    max_bytes: int = KEEP_BYTES,
    *,
    protect: Iterable[str | os.PathLike[str]] = (),
) -> list[Path]:
    """Delete the oldest runs until at most `keep` remain, with at most `max_bytes`.

    Args:
        protect: Folders of runs in use. A folder that was written to within the last hour is not
            deleted either, because another notebook can be training there. A folder that a living
            process has marked (`mark`) is not deleted.

    Returns:
        The deleted folders.
    """
    kept = {Path(path).resolve() for path in protect}
    folders = sorted(path for path in runs_root().iterdir() if path.is_dir())
    sizes = {path: size_bytes(path) for path in folders}
    left, total, gone = len(folders), sum(sizes.values()), []
    for path in folders:
        if left <= keep and total <= max_bytes:
            break
        if path.resolve() in kept or time.time() - _touched_s(path) < _IN_USE_S:
            continue
        if is_marked(path):
            continue
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            continue
        left, total = left - 1, total - sizes[path]
        gone.append(path)
    return gone


def mark(folder: Path) -> None:
    """Protect a folder from deletion until this process ends."""
    me = psutil.Process()
    about = {"host": cluster_env.host_token(), "pid": me.pid, "began": me.create_time()}
    path = folder / f"{_MARK}-{about['host']}-{me.pid}"
    if not path.exists():
        cluster_env.replace(path, json.dumps(about))


def is_marked(folder: Path) -> bool:
    """Whether a living process has marked a folder.

    Processes of other hosts cannot be seen, so their marks are valid for a week.
    """
    return any(_holds(path) for path in folder.glob(f"{_MARK}-*"))


def _holds(path: Path) -> bool:
    try:
        about = json.loads(path.read_text())
        if about["host"] != cluster_env.host_token():
            return time.time() - path.stat().st_mtime < _FOREIGN_S
        return bool(abs(psutil.Process(about["pid"]).create_time() - about["began"]) < 1.0)
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return False


def size_bytes(folder: Path) -> int:
    """Return the size of all files in a folder; 0 if it does not exist."""
    return sum(status.st_size for status in _statuses(folder) if stat.S_ISREG(status.st_mode))


def _touched_s(folder: Path) -> float:
    return max((status.st_mtime for status in _statuses(folder)), default=0.0)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    """Yield the existing entries; another notebook can be deleting the same folder."""
    with contextlib.suppress(FileNotFoundError):
        yield folder.stat()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(parent, name))
