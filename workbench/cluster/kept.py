"""What a cluster's folder says about it, for `workbench ps` and whoever takes it over.

    cluster.json         who owns it, its engines and other processes
    task.jsonl           what it was asked to run and has not settled: the last line says it
    control.json         where engines reach their owner
    doing/engine-<i>.jsonl  what engine i does (`engine/diary.py`)

Everything is read with distrust: a crash may have left half of it, and any number of dead pids.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from ..scratch import last_page
from . import profile

ABOUT, TASK, CONTROL, DOING = "cluster.json", "task.jsonl", "control.json", "doing"
VERSION = 1
STOP_S = 5.0


@dataclass(frozen=True)
class Found:
    """A cluster of this user on this machine.

    Attributes:
        about: What `cluster.json` says, and `task.jsonl` as `task`.
        doing: What each living engine does.
    """

    folder: Path
    about: Mapping[str, Any]
    doing: Mapping[int, Mapping[str, Any]]

    @property
    def id(self) -> str:
        """What `%cluster attach` and `workbench stop` call it."""
        return cluster_id(self.folder)

    @property
    def kept(self) -> bool:
        """Whether it outlives its owner."""
        return bool(self.about.get("kept"))

    @property
    def owner(self) -> Mapping[str, Any] | None:
        """The notebook's kernel that has it, None when nobody has."""
        owner = self.about.get("owner")
        return owner if alive(owner) else None

    @property
    def engines(self) -> list[int]:
        """Ids of the living engines."""
        engines = self.about["engines"]
        return sorted(int(i) for i, one in engines.items() if alive(one))

    @property
    def busy(self) -> str:
        """What is running on it, empty for nothing."""
        return next((str(one["what"]) for one in self.doing.values() if one["busy"]), "")

    @property
    def idle_s(self) -> float:
        """For how long nothing has run on it; 0 while something does."""
        if self.busy:
            return 0.0
        last = max((float(one["since"]) for one in self.doing.values()), default=0.0)
        return max(0.0, time.time() - max(last, float(self.about["since"])))


def cluster_id(folder: Path) -> str:
    """Return the short name of the cluster in a folder."""
    return folder.name.removeprefix(profile.PREFIX)


def folder_of(cluster: str) -> Path:
    """Return where a cluster of that id would be; nothing is there perhaps."""
    return Path(tempfile.gettempdir()) / f"{profile.PREFIX}{Path(cluster).name}"


def alive(who: Any) -> bool:
    """Whether that very process lives, by pid and start time."""
    try:
        return profile.same_process(int(who["pid"]), float(who["create_time"]))
    except (KeyError, TypeError, ValueError):
        return False


def write(folder: Path, about: Mapping[str, Any]) -> None:
    """Write `cluster.json`."""
    profile.write_json(folder / ABOUT, {"version": VERSION, **about})


def look(folder: Path) -> Found | None:
    """Return the cluster in a folder, None where there is none that lives."""
    if not profile.is_ours(folder):
        return None
    about = profile.read_json(folder / ABOUT)
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
    folders = Path(tempfile.gettempdir()).glob(f"{profile.PREFIX}*")
    found = [one for one in map(look, folders) if one is not None]
    return sorted(found, key=lambda one: float(one.about["since"]))


def stop(found: Found) -> bool:
    """End a cluster, whoever owns it; return whether nothing of it is left.

    Its warm parents are asked, by pid and start time; what is left then is killed.
    """
    parents = [one for one in found.about["parents"].values() if alive(one)]
    for one in parents:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(int(one["pid"]), signal.SIGTERM)
    end = time.monotonic() + STOP_S
    while any(map(alive, parents)) and time.monotonic() < end:
        time.sleep(0.05)
    left = [*parents, found.about.get("controller"), *found.about["engines"].values()]
    for one in left:
        if alive(one):
            with contextlib.suppress(psutil.Error):
                psutil.Process(int(one["pid"])).kill()
    profile.end_family(found.folder)
    profile.remove(found.folder)
    return not found.folder.exists() and not any(map(alive, left))
