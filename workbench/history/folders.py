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
    """Return the folder that holds all runs, made if need be; private to the user.

    `WORKBENCH_HOME` overrides the user's data folder. Where neither can be written (a container
    whose HOME is read-only), it is a private folder of the temporary one.
    """
    root = _root()
    _make_private(root)
    return root


def moved() -> str:
    """Return in a line that runs are kept in the temporary folder, and why; "" where not."""
    wanted, root = _wanted(), _root()
    if root == wanted:
        return ""
    return (
        f"Runs are kept in {root}, because {wanted} cannot be written. Temporary folders are "
        f"emptied sooner or later: set {HOME_VARIABLE} to a permanent folder of yours, and "
        "restart the kernel."
    )


def _root() -> Path:
    wanted = _wanted()
    return wanted if _can_be_written(wanted) else _temporary() or wanted


def _can_be_written(folder: Path) -> bool:
    """Whether files may be made in a folder, or the folder itself; a full disk counts as such."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def _temporary() -> Path | None:
    """Return a folder for runs in the temporary one, this user's alone; None: there is none."""
    with contextlib.suppress(OSError):
        folder = Path(tempfile.gettempdir()) / f"distributed-workbench-runs-{os.getuid()}"
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        about = folder.lstat()
        if stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o77:
            return folder
    return None  # what another user made there is not ours to write to


def _wanted() -> Path:
    home = os.environ.get(HOME_VARIABLE)
    if home:
        return Path(home).expanduser() / "runs"
    import platformdirs

    return Path(platformdirs.user_data_dir("workbench", appauthor=False)) / "runs"


def _make_private(folder: Path) -> None:
    """Make a folder and those above it, each for the user alone, whatever the umask."""
    if not folder.is_dir():
        _make_private(folder.parent)
        folder.mkdir(exist_ok=True, mode=0o700)


def new_run_dir(name: str) -> Path:
    """Make a folder for a run and return it; folders sort by the time they were made.

    Where none can be made (a full disk), the path alone is returned: the run goes on without.
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
    """Delete the oldest runs until at most `keep` are left, in at most `max_bytes`.

    Args:
        protect: Folders of runs in use. A folder written to within the last hour is never
            deleted either: another notebook may be training there; nor is one that a process
            that lives has marked (`mark`).

    Returns:
        The folders that were deleted.
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
    """Keep a folder from being pruned for as long as this process lives."""
    me = psutil.Process()
    about = {"host": cluster_env.host_token(), "pid": me.pid, "began": me.create_time()}
    path = folder / f"{_MARK}-{about['host']}-{me.pid}"
    if not path.exists():
        cluster_env.replace(path, json.dumps(about))


def is_marked(folder: Path) -> bool:
    """Whether a process that lives has marked a folder.

    Processes of other hosts cannot be seen: their marks hold for a week.
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
    """Return the size of all files in a folder, 0 for one that is gone."""
    return sum(status.st_size for status in _statuses(folder) if stat.S_ISREG(status.st_mode))


def _touched_s(folder: Path) -> float:
    return max((status.st_mtime for status in _statuses(folder)), default=0.0)


def _statuses(folder: Path) -> Iterator[os.stat_result]:
    """Yield what is there; another notebook may be deleting the same folder right now."""
    with contextlib.suppress(FileNotFoundError):
        yield folder.stat()
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                yield os.stat(os.path.join(parent, name))
