"""What a thread waits in, read from its frames: collectives, links, a step of TensorFlow.

Functions of ours say so themselves (`marks.waits_in`); those of other libraries are known by their
modules. A collective blocks in C++, below the last frame of Python, where computing blocks too. So
a frame that may mean both counts as a wait only while its thread stands still.
"""

from __future__ import annotations

import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

from .marks import RULES

SAMPLES, SAMPLE_S = 4, 0.02
IDLE_CPU_S = 0.002
"""CPU time that a thread may use during the samples and still count as standing still."""


class Place(NamedTuple):
    """One frame of a stack."""

    file: str
    line: int
    name: str
    frame: FrameType | None = None


@dataclass(frozen=True)
class Wait:
    """What somebody waits in; `by_user`: because the user said so (a pause), not for others."""

    label: str
    by_user: bool = False


_CALLS_WAIT = re.compile(r"\b(\w+)\.wait\(")


def waiting_in(inner: list[Place], user: Place | None) -> Wait | None:
    """Return what a thread waits in, None while it works.

    Args:
        inner: Its frames below the user's innermost one, innermost first.
        user: That frame.
    """
    if any(place.file.startswith("<frozen importlib") for place in inner):
        return None  # it waits for the disk at most
    for rule in RULES:
        fitting = [p for p in inner if p.frame is not None and rule.fits(p.frame)]
        if fitting and _stands_still(rule.idle):
            place = fitting[-1] if rule.outermost else fitting[0]
            return Wait(rule.label.format(place.name.rpartition(".")[2]), rule.by_user)
    if not inner and user is not None and _waits_for_work(user) and _stands_still("thread"):
        return Wait("in wait")
    return None


def _waits_for_work(user: Place) -> bool:
    """Whether the user's line waits for a collective begun earlier: `work.wait()`."""
    import linecache

    match = _CALLS_WAIT.search(linecache.getline(user.file, user.line))
    if match is None or user.frame is None:
        return False
    found: Any = user.frame.f_locals.get(match[1], user.frame.f_globals.get(match[1]))
    return "distributed" in type(found).__module__


def _stands_still(who: Literal["", "thread", "process"]) -> bool:
    if not who:
        return True
    if who == "process":
        return process_is_idle()
    idle = is_idle(threading.main_thread())
    return True if idle is None else idle


def process_is_idle() -> bool:
    """Whether none of this process's threads computes."""
    before, began = time.process_time(), time.perf_counter()
    time.sleep(SAMPLES * SAMPLE_S)
    return time.process_time() - before < 0.2 * (time.perf_counter() - began)


def is_idle(thread: threading.Thread) -> bool | None:
    """Whether a thread stands still: it sleeps at every look, and uses no CPU meanwhile.

    A thread that only waits for a free core does not sleep, so a busy machine misleads nobody.

    Returns:
        None where the system does not say.
    """
    stat = Path(f"/proc/self/task/{thread.native_id}/stat")
    try:
        clock = time.pthread_getcpuclockid(thread.ident or 0)
        before_s = time.clock_gettime(clock)
        for _ in range(SAMPLES):
            if stat.read_text().rpartition(")")[2].split()[0] not in "SD":
                return False
            time.sleep(SAMPLE_S)
        return time.clock_gettime(clock) - before_s < IDLE_CPU_S
    except (OSError, AttributeError, IndexError):
        return None
