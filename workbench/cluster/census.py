"""Which engines a user has on this machine, whichever notebook or kept cluster they belong to."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable

import psutil

from . import profile

_FORKED = re.compile(r"engine-\d+")


def engines(uid: int | None = None) -> set[int]:
    """Return the pids of a user's engines on this machine.

    Args:
        uid: By default this process's user.
    """
    owner = os.getuid() if uid is None else uid
    found = set()
    for process in psutil.process_iter():
        # Others' processes may be hidden, and any may end while it is looked at.
        with contextlib.suppress(psutil.Error):
            if process.uids().real == owner and _is_engine(process):
                found.add(process.pid)
    return found


def elsewhere(own: Iterable[int]) -> int:
    """Return how many engines this user has besides those with the pids `own`."""
    return len(engines() - set(own))


def _is_engine(process: psutil.Process) -> bool:
    name, words = process.name(), process.cmdline()
    if process.status() == psutil.STATUS_ZOMBIE:
        return False
    if _FORKED.fullmatch(name):  # given to it by `warm_child`; its command line is its parent's
        return "workbench.cluster.warm" in words
    return any("ipyparallel.engine" in word for word in words) and any(
        f"/{profile.PREFIX}" in word for word in words
    )
