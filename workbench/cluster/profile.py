"""Private folders of clusters: connection files, logs, pids. Never the user's IPython profile."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import psutil

PREFIX = "workbench-"
FOLDER_VARIABLE = "IPP_PROFILE_DIR"  # in which ipyparallel tells a controller its folder
OWNER_FILE = "owner.json"
# psutil derives start times from the wall clock, which may be adjusted in between.
CLOCK_SLACK_S = 2.0
_PARTS = ("security", "log", "pid", "startup")


def create() -> Path:
    """Return a fresh profile folder for one cluster, readable by this user alone.

    Folders that dead processes left are removed on the way.

    It holds what ipyparallel expects of a profile (`security/`, `log/`, `pid/`, `startup/`) and
    `owner.json`, which names the process that must be alive for the folder to be in use.
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    for part in _PARTS:
        (folder / part).mkdir(mode=0o700)
    own(folder, os.getpid())
    return folder


def own(folder: Path, pid: int) -> None:
    """Say which process keeps the folder in use (the kernel; a kept cluster's warm parent)."""
    owner = {"pid": pid, "create_time": psutil.Process(pid).create_time()}
    (folder / OWNER_FILE).write_text(json.dumps(owner))


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a path is a folder that `create` may have made: the only ones ever removed."""
    folder = Path(path)
    root = Path(tempfile.gettempdir()).resolve()
    try:
        status = folder.lstat()
    except OSError:
        return False
    return (
        folder.name.startswith(PREFIX)
        and folder.parent.resolve() == root
        and folder.is_dir()
        and not folder.is_symlink()
        and status.st_uid == os.getuid()
    )


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a cluster's folder; anything that is not one is left alone."""
    if is_ours(path):
        shutil.rmtree(path, ignore_errors=True)


def controllers(path: str | os.PathLike[str]) -> list[int]:
    """Return this user's ipyparallel controllers that were started with a cluster's folder."""
    found, folder = [], os.fspath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.uids().real == os.getuid()
                and any("ipyparallel" in word for word in process.cmdline())
                and process.environ().get(FOLDER_VARIABLE) == folder
            ):
                found.append(process.pid)
    return found


def sweep() -> list[Path]:
    """Remove the folders whose owner is dead; return them."""
    stale = [
        folder
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
        if is_ours(folder) and not _owner_alive(folder)
    ]
    for folder in stale:
        remove(folder)
    return stale


def same_process(pid: int, create_time: float) -> bool:
    """Whether `pid` still is the process that was started at `create_time` (pids are reused)."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - create_time) < CLOCK_SLACK_S
        return bool(same and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _owner_alive(folder: Path) -> bool:
    try:
        owner: dict[str, Any] = json.loads((folder / OWNER_FILE).read_text())
        return same_process(int(owner["pid"]), float(owner["create_time"]))
    except FileNotFoundError:
        # Not written yet by a process that is just starting, or not ours after all: let it be.
        return True
    except (OSError, ValueError, KeyError, TypeError):
        return False
