"""Private folders of clusters: connection files, logs, pids. Never the user's IPython profile.

The files that describe a cluster, for `workbench ps` and for a kernel that takes it over:

    cluster.json         who owns it, its engines and other processes
    task.jsonl           the request that is not yet completed: the last line counts
    control.json         where engines reach their owner
    doing/engine-<i>.jsonl  the activity of engine i (`engine/activity_log.py`)

The content is not trusted: after a crash, files can be incomplete and pids can be dead.

From these files follows which engines a user has on this machine, in all notebooks and kept
clusters.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..shared.cluster_env import MARK, TMP, last_page

PREFIX = "workbench-"
# the variable in which ipyparallel gives a controller its folder
FOLDER_VARIABLE = "IPP_PROFILE_DIR"
OWNER_FILE = "owner.json"
# psutil computes start times from the wall clock, which can be adjusted in between.
CLOCK_SLACK_S = 2.0
_PARTS = ("security", "log", "pid", "startup", TMP, "doing")
END_S = 2.0
POLL_S = 0.01
UNFINISHED_S = 600.0


def create() -> Path:
    """Return a fresh profile folder for one cluster, readable by this user alone.

    It also removes folders that dead processes left.

    It holds what ipyparallel expects of a profile (`security/`, `log/`, `pid/`, `startup/`),
    `owner.json`, which names the process that must be alive for the folder to be in use, `tmp/`
    for sockets of a run, and `doing/`, where engines write what they do (`engine/activity_log.py`).
    """
    sweep()
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    for part in _PARTS:
        (folder / part).mkdir(mode=0o700)
    own(folder, os.getpid())
    return folder


def own(folder: Path, pid: int) -> None:
    """Write which process keeps the folder in use (the kernel; a kept cluster's warm parent)."""
    write_json(folder / OWNER_FILE, identity(pid))


def owner(folder: Path) -> dict[str, Any] | None:
    """Return pid and start time of the process that keeps the folder in use, None if unknown."""
    found = read_json(folder / OWNER_FILE)
    return found if isinstance(found, dict) and "pid" in found else None


def identity(pid: int) -> dict[str, Any]:
    """Return the start time, which distinguishes a process from a later one with the same pid."""
    return {"pid": pid, "create_time": psutil.Process(pid).create_time()}


def write_json(path: Path, value: object) -> None:
    """Write a small JSON file in one operation, readable only by this user."""
    write_text(path, json.dumps(value))


def write_text(path: Path, text: str) -> None:
    """Write a small file in one operation, readable only by this user."""
    fresh = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
    fresh.replace(path)


def read_json(path: Path) -> Any:
    """Return the content of a small file; None if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def is_ours(path: str | os.PathLike[str]) -> bool:
    """Whether a path can be a folder made by `create`; only such folders are ever removed."""
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
    """Remove a cluster's folder; any other folder is not touched."""
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


def family(path: str | os.PathLike[str]) -> list[psutil.Process]:
    """Return this user's processes that belong to a cluster, without this one.

    Their environment contains its folder. They were started by the kernel, or by cells.
    """
    found, folder = [], os.fspath(path)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if (
                process.pid != os.getpid()
                and process.uids().real == os.getuid()
                and process.environ().get(MARK) == folder
            ):
                found.append(process)
    return found


def end_family(path: str | os.PathLike[str]) -> None:
    """SIGKILL a cluster's processes, twice, because a process may just have started another.

    Resource trackers get a moment to remove the shared memory of the others.
    """
    for _ in range(5):
        left = family(path)
        if not left:
            return
        for process in [one for one in left if not is_tracker(one)] or left:
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil compares start times first
        _await_end(left)


def _await_end(processes: list[psutil.Process]) -> None:
    """Wait until processes have ended, for `END_S` at most.

    Zombies count as ended, because in a container the first process may reap them late or never.
    """
    end = time.monotonic() + END_S
    while any(map(_lives, processes)) and time.monotonic() < end:
        time.sleep(POLL_S)


def _lives(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE and process.is_running())
    except psutil.Error:
        return False


def group(leader: int) -> list[psutil.Process]:
    """Return the other processes of a process group."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if pid != leader and os.getpgid(pid) == leader:
                found.append(psutil.Process(pid))
    return found


def is_tracker(process: psutil.Process) -> bool:
    """Whether a process is multiprocessing's resource tracker."""
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.Error:
        return False


def sweep() -> list[Path]:
    """Remove the folders whose owner is dead and end their remaining processes; return them."""
    stale = [
        folder
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
        if is_ours(folder) and not _owner_alive(folder)
    ]
    for folder in stale:
        end_family(folder)
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
        text = (folder / OWNER_FILE).read_text()
    except FileNotFoundError:
        # The process is just starting, or has just died, or is not Workbench's.
        return not _abandoned(folder)
    except (OSError, ValueError):
        return False
    try:
        found = json.loads(text)
        return same_process(int(found["pid"]), float(found["create_time"]))
    except (ValueError, KeyError, TypeError):
        return False


def _abandoned(folder: Path) -> bool:
    """Whether `create` began this folder without an owner long ago and never finished it."""
    try:
        names = {path.name for path in folder.iterdir()}
        age_s = time.time() - folder.stat().st_mtime
    except OSError:
        return False
    return age_s > UNFINISHED_S and names <= {*_PARTS} and "security" in names


ABOUT, TASK, CONTROL, DOING = "cluster.json", "task.jsonl", "control.json", "doing"
VERSION = 1
STOP_S = 5.0


@dataclass(frozen=True)
class Found:
    """A cluster of this user on this machine.

    Attributes:
        about: The content of `cluster.json`, with `task.jsonl` as `task`.
        doing: The activity of each living engine.
    """

    folder: Path
    about: Mapping[str, Any]
    doing: Mapping[int, Mapping[str, Any]]

    @property
    def id(self) -> str:
        """Its name for `%cluster attach` and `workbench stop`."""
        return cluster_id(self.folder)

    @property
    def kept(self) -> bool:
        """Whether it outlives its owner."""
        return bool(self.about.get("kept"))

    @property
    def owner(self) -> Mapping[str, Any] | None:
        """The notebook's kernel that owns it; None if there is none."""
        owner = self.about.get("owner")
        return owner if alive(owner) else None

    @property
    def engines(self) -> list[int]:
        """Ids of the living engines."""
        engines = self.about["engines"]
        return sorted(int(i) for i, one in engines.items() if alive(one))

    @property
    def busy(self) -> str:
        """The description of what is running on it; empty if nothing is."""
        return next((str(one["what"]) for one in self.doing.values() if one["busy"]), "")

    @property
    def idle_s(self) -> float:
        """For how long it has been idle; 0 while something runs."""
        if self.busy:
            return 0.0
        last = max((float(one["since"]) for one in self.doing.values()), default=0.0)
        return max(0.0, time.time() - max(last, float(self.about["since"])))


def cluster_id(folder: Path) -> str:
    """Return the short name of the cluster in a folder."""
    return folder.name.removeprefix(PREFIX)


def folder_of(cluster: str) -> Path:
    """Return the folder path for a cluster id; the folder may not exist."""
    return Path(tempfile.gettempdir()) / f"{PREFIX}{Path(cluster).name}"


def alive(who: Any) -> bool:
    """Whether exactly this process lives, by pid and start time."""
    try:
        return same_process(int(who["pid"]), float(who["create_time"]))
    except (KeyError, TypeError, ValueError):
        return False


def write(folder: Path, about: Mapping[str, Any]) -> None:
    """Write `cluster.json`."""
    write_json(folder / ABOUT, {"version": VERSION, **about})


def look(folder: Path) -> Found | None:
    """Return the cluster in a folder; None if no cluster lives there."""
    if not is_ours(folder):
        return None
    about = read_json(folder / ABOUT)
    try:
        if about["version"] != VERSION:
            return None
        engines = {int(i): one for i, one in about["engines"].items()}
        about = {**about, "task": last_page(folder / TASK)}
        found = Found(folder, about, dict(_doings(folder, engines)))
        parents = [*about["parents"].values(), about.get("controller")]
        float(about["since"])
    except (TypeError, KeyError, ValueError, AttributeError):
        return None
    return found if found.engines or any(map(alive, parents)) else None


def _doings(
    folder: Path, engines: Mapping[int, Mapping[str, Any]]
) -> Iterator[tuple[int, dict[str, Any]]]:
    for engine, about in engines.items():
        doing = last_page(folder / DOING / f"engine-{engine}.jsonl")
        with contextlib.suppress(TypeError, KeyError, ValueError):
            float(doing["since"])
            if doing["pid"] == about["pid"] and alive(about):
                yield engine, {"what": "", "busy": False, **doing}


def clusters() -> list[Found]:
    """Return this user's clusters that live, oldest first."""
    folders = Path(tempfile.gettempdir()).glob(f"{PREFIX}*")
    found = [one for one in map(look, folders) if one is not None]
    return sorted(found, key=lambda one: float(one.about["since"]))


def stop(found: Found) -> bool:
    """End a cluster regardless of its owner; return whether all its processes are gone.

    First its warm parents are asked to end, by pid and start time. Then the remaining processes are
    killed. SIGTERM is not used, because engines would then report their end first.
    """
    parents = [one for one in found.about["parents"].values() if alive(one)]
    for one in parents:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(one["pid"]), signal.SIGHUP)
    end = time.monotonic() + STOP_S
    while any(map(alive, parents)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [*parents, found.about.get("controller"), *found.about["engines"].values()]
    for one in left:
        if alive(one):
            with contextlib.suppress(psutil.Error):
                psutil.Process(int(one["pid"])).kill()
    end_family(found.folder)
    remove(found.folder)
    return not found.folder.exists() and not any(map(alive, left))


_FORKED = re.compile(r"engine-\d+")


def engines(uid: int | None = None) -> set[int]:
    """Return the pids of a user's engines on this machine.

    Args:
        uid: By default this process's user.
    """
    owner = os.getuid() if uid is None else uid
    found = set()
    for process in psutil.process_iter():
        # Other users' processes can be hidden, and any process can end while it is read.
        with contextlib.suppress(psutil.Error):
            if process.uids().real == owner and _is_engine(process):
                found.add(process.pid)
    return found


def elsewhere(own: Iterable[int]) -> int:
    """Return how many engines this user has in addition to those with the pids `own`."""
    return len(engines() - set(own))


def _is_engine(process: psutil.Process) -> bool:
    name, words = process.name(), process.cmdline()
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    if _FORKED.fullmatch(name):  # `warm_child` sets this name; its command line is its parent's
        return "workbench.cluster.forkserver.server" in words
    return any("ipyparallel.engine" in word for word in words) and any(
        f"/{PREFIX}" in word for word in words
    )
