"""Ends workers of a run that were halted: who is halted has not died, so nobody reaps it.

A halted process (SIGSTOP) keeps its connections open and answers nobody, so the others would wait
for it for ever. The system says which processes are halted (`T` in proc_pid_stat(5); ps has it on
macOS), so nothing needs to be guessed from silence, and slow steps are no halt. What a debugger has
stopped (`t`) is left alone, as is a worker whose user has paused it: that one sleeps.

Ended it is as dead as any other, and the run heals (`healing.py`): left alone it might wake up
later, and go on with what the others have long done.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from ...cluster.engines import Engines
    from ..task import Task

LOOK_S = 0.25
LOOKS = 4
"""How often in a row a worker must be seen halted: shells halt and continue within moments."""


def is_halted(pid: int) -> bool:
    """Whether a process of this machine is halted."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def watch(
    task: Task,
    engines: Engines,
    members: Callable[[], Sequence[int]],
    end: Callable[[int, float], object],
) -> None:
    """Look after a run's workers on this machine until its cell is over.

    Args:
        members: Engines that take part.
        end: Told of one that is about to be ended, and for how long it was seen halted.
    """

    def look_on() -> None:
        seen: dict[int, int] = {}
        while not task.over.wait(LOOK_S):
            seen = look(engines, members(), seen, end)

    threading.Thread(target=look_on, name="workbench-halts", daemon=True).start()


def look(
    engines: Engines,
    members: Sequence[int],
    seen: dict[int, int],
    end: Callable[[int, float], object],
) -> dict[int, int]:
    """Look once; return how often in a row each halted worker has been seen by now."""
    found: dict[int, int] = {}
    for engine in members:
        info = engines.engines.get(engine)
        if info is None or not info.is_here or info.state == "dead" or not is_halted(info.pid):
            continue
        found[engine] = seen.get(engine, 0) + 1
        if found[engine] == LOOKS:
            end(engine, LOOKS * LOOK_S)
            engines.signal(engine, signal.SIGKILL)
    return found
