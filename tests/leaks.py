"""Finds the resources of this process that remain after a test: it compares before and after.

On Linux they are in `/proc`; on other systems only threads, variables and folders are compared.
"""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

Thing = tuple[str, Any]
"""Kind (`thread`, `file`, `link`, `child`, `shared`, `folder`, `env`, `cwd`) and which one."""
Held = Counter[Thing]

SETTLE_S = 2.0
LOOK_AGAIN_S = 0.02
SHARED = "/dev/shm"
OURS = "workbench-"
LINKS = ("socket:", "pipe:")

PYTESTS = frozenset({"PYTEST_CURRENT_TEST"})
"""Variables that pytest sets for each test."""
THREADS = {
    r"^pytest_timeout ": "pytest-timeout's alarm for the test under way",
    r"^asyncio_\d+$": "an event loop looks addresses up in them (Playwright's, Jupyter's client's)",
}
"""Threads, by pattern, that stay, and why."""
VARIABLES = {
    r"^KMP_(DUPLICATE_LIB_OK|INIT_AT_FORK)$": "scikit-learn sets it when it is imported",
    r"^(TF2_BEHAVIOR|TPU_ML_PLATFORM.*|HDF5_PLUGIN_PATH|ENABLE_RUNTIME_UPTIME_TELEMETRY)$": (
        "TensorFlow and h5py set them when they are imported"
    ),
    r"^TORCHINDUCTOR_CACHE_DIR$": "torch's compiler sets it when it is first used",
}
"""Variables, by pattern, that libraries set once for the process, and why."""
TRACKER = "multiprocessing.resource_tracker"
ENDED, GONE = "which has ended: nobody waits for it", "gone by now"
HELPERS = {
    TRACKER: "Python keeps one for the whole process",
    "multiprocessing.forkserver": "Python keeps one for the whole process",
}
"""Children, by a word of their command line, that stay, and why."""
FILES = {
    r"/history\.sqlite(-journal|-wal|-shm)?$": "of IPython's shell, the only one of the process",
    r"^/(dev|proc|sys)/": "a device is no file of a test's",
    r"/mpl-data/fonts/": "matplotlib keeps its fonts open",
    r"/(mlflow|bad)\.db$": "MLflow keeps an engine for each database as long as the process lives",
    r"^/memfd:": "memory that a library maps, for the process",
}
"""Open files, by pattern, that stay, and why."""
GROUND = re.compile(r"^workbench-(router|warm|warm-look|watch-\d+|engines|prewarm|idle|vitals)$")
"""Threads that serve a cluster as long as it lives, and come and go with its engines."""


@dataclass
class Kept:
    """Resources that are kept on purpose, and may change between two looks."""

    pids: set[int] = field(default_factory=set)
    folders: set[str] = field(default_factory=set)

    def add(self, about: Mapping[str, Any], folder: str) -> None:
        """Keep a cluster, as it describes itself: its processes, and its folder."""
        found = [about["controller"], *about["parents"].values(), *about["engines"].values()]
        self.pids |= {int(one["pid"]) for one in found if one} | {int(about["store_pid"])}
        self.folders.add(folder)


def look() -> Held:
    """Return the current resources of this process."""
    held: Held = Counter({("cwd", os.getcwd()): 1})
    for name, value in os.environ.items():
        if name not in PYTESTS:
            held["env", (name, value)] = 1
    for thread in threading.enumerate():
        if not thread.daemon or thread.name.startswith(OURS):
            held["thread", thread] = 1
    for target in _descriptors():
        if target.startswith("/"):
            held["file", target] += 1
        elif target.startswith(LINKS):
            held["link", target] += 1
    for pid in children():
        held["child", pid] = 1
    for name in _names(SHARED):
        held["shared", name] = 1
    for name in _names(tempfile.gettempdir()):
        if name.startswith(OURS):
            held["folder", os.path.join(tempfile.gettempdir(), name)] = 1
    return held


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _descriptors() -> Iterator[str]:
    """Return the target of each open descriptor."""
    for number in _names("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile, as the one that lists them
            yield os.readlink(f"/proc/self/fd/{number}")


def children() -> set[int]:
    """Return the processes that this one has started, including ended ones not yet waited for."""
    found: set[int] = set()
    for thread in _names("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found.update(map(int, file.read().split()))
    return found


def left(before: Held, allowed: Callable[[Thing], bool] = lambda thing: False) -> list[Thing]:
    """Return the resources that are new and that remain after a short time."""
    found = _new(before, look(), allowed)
    if found:
        gc.collect()
    end = time.monotonic() + SETTLE_S
    while found and time.monotonic() < end:
        threading.Event().wait(LOOK_AGAIN_S)
        found = _new(before, look(), allowed)
    return found


def _new(before: Held, after: Held, allowed: Callable[[Thing], bool]) -> list[Thing]:
    if before == after:
        return []
    names = {which[0] for kind, which in after if kind == "env"}
    lost = [("env", which) for kind, which in before if kind == "env" and which[0] not in names]
    return [
        *(thing for thing in after - before if not allowed(thing)),
        *(("unset", which) for kind, which in lost if not allowed((kind, which))),
    ]


def excuse(thing: Thing, kept: Kept, linked: bool) -> str:
    """Return why a resource may stay; empty if it must not.

    Args:
        kept: The resources that are kept on purpose.
        linked: Whether there are connections to kept processes, or to those of a wider fixture.
    """
    kind, which = thing
    if kind == "env":
        return _reason(VARIABLES, which[0])
    if kind == "thread":
        if linked and GROUND.match(which.name):
            return "it serves a cluster that stays"
        return _reason(THREADS, which.name)
    if kind == "link" and linked:
        return "who talks to processes that stay has connections that come and go"
    if kind == "link" and which in _of_helpers():
        return "it is kept for the whole process"
    if kind == "file":
        inside = any(which.startswith(folder) for folder in kept.folders)
        return "it is kept" if inside else _reason(FILES, which)
    if kind == "child":
        if which in kept.pids:
            return "it is kept"
        return _reason(HELPERS, _command(which))
    if kind == "folder":
        return "it is kept" if which in kept.folders else _whose(which)
    if kind == "shared":
        return _whose_memory(which)
    return ""


def is_talked_to(pid: int) -> bool:
    """Whether a process that was started here lives, and may have connections to this one."""
    command = _command(pid)
    return command not in (GONE, "") and not any(w in command for w in (ENDED, TRACKER))


def _reason(reasons: dict[str, str], name: str) -> str:
    return next((why for pattern, why in reasons.items() if re.search(pattern, name)), "")


def _of_helpers() -> set[str]:
    """Return the descriptors of Python's own helper processes, and of event loops that stay."""
    tracker = getattr(multiprocessing.resource_tracker, "_resource_tracker", None)
    server = getattr(multiprocessing.forkserver, "_forkserver", None)
    numbers = [getattr(tracker, "_fd", None), getattr(server, "_forkserver_alive_fd", None)]
    jupyter = getattr(sys.modules.get("jupyter_core.utils"), "_loop", None)
    ipython = getattr(sys.modules.get("IPython.core.async_helpers"), "_asyncio_event_loop", None)
    for loop in (ipython, jupyter.get(None) if jupyter is not None else None):
        for name in ("_ssock", "_csock"):
            end = getattr(loop, name, None)
            numbers.append(end.fileno() if end is not None else None)
    found = set()
    for number in numbers:
        with contextlib.suppress(OSError):
            if number is not None:
                found.add(os.readlink(f"/proc/self/fd/{number}"))
    return found


def _whose(folder: str) -> str:
    """Return the other process that owns a file or folder in the temporary folder; empty: ours."""
    if not os.path.isdir(folder):
        return "a log says nothing of whose it is, and other processes leave theirs here too"
    try:
        owner = int(json.loads(Path(folder, "owner.json").read_text())["pid"])
    except (OSError, ValueError, KeyError):
        return "nobody says that it is ours"
    return "" if owner == os.getpid() else f"it is of process {owner}"


def _whose_memory(name: str) -> str:
    """Return the other process that owns shared memory; empty: ours."""
    said = re.match(r"torch_(\d+)_", name)
    if said and int(said[1]) not in _family():
        return f"it is of process {said[1]}"
    return _used_by_others(os.path.join(SHARED, name))


def _used_by_others(path: str) -> str:
    """Return which process outside this one's family has a file open, or mapped."""
    family = _family()
    for pid in map(int, filter(str.isdigit, _names("/proc"))):
        if pid in family:
            continue
        with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as maps:
            if path in maps.read():
                return f"it is of process {pid}"
        with contextlib.suppress(OSError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                if os.readlink(f"/proc/{pid}/fd/{number}") == path:
                    return f"it is of process {pid}"
    return ""


def _family() -> set[int]:
    with contextlib.suppress(psutil.Error):
        return {os.getpid(), *(one.pid for one in psutil.Process().children(recursive=True))}
    return {os.getpid()}


def _command(pid: int) -> str:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return f"{process.name()}, {ENDED}"
        return " ".join(process.cmdline())
    except psutil.Error:
        return GONE


def described(things: Iterable[Thing], before: Held) -> list[str]:
    """Return the remaining resources in words."""
    was = dict(which for kind, which in before if kind == "env")
    return sorted(_words(kind, which, was) for kind, which in things)


def _words(kind: str, which: Any, was: dict[str, str]) -> str:
    if kind == "env":
        name, value = which
        old = repr(was[name]) if name in was else "unset"
        return f"variable {name}: {old} before, {value!r} now"
    if kind == "unset":
        return f"variable {which[0]}: {which[1]!r} before, unset now"
    if kind == "cwd":
        return f"working directory: {which}"
    if kind == "thread":
        return f"thread {which.name!r} ({'daemon' if which.daemon else 'not daemonic'})"
    if kind == "child":
        return f"process {which}: {_command(which)}"
    if kind == "shared":
        return f"shared memory {SHARED}/{which}"
    words = {"file": "open file", "link": "open", "folder": "in the temporary folder"}
    return f"{words[kind]} {which}"
