"""Workers that are halted (SIGSTOP) instead of dead: they are ended, and so done without.

A halted worker closes no connection, so nobody feels that it is gone, and all wait for it. What
the system says of its process is asked, not whether it answers: a call into C that lasts answers
nobody either. A worker at a prompt, one that a debugger holds (`t`, not `T`) and one that `pause`
holds run or sleep, so they never count.

Some are halted for a moment only, to be sampled or moved. So one counts from when it has been
halted for as long as some steps take; whoever it was cannot wake up later and write:

    halted ──3 steps' time──> SIGKILL ──> reaped: a death as any other (`healing.Healer`)

Engines on other hosts are looked at by their host's agent, which says so at once. A host that
falls silent is given up by `cluster/hosts/agents.py`; its engines have died then.
"""

from __future__ import annotations

import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Protocol

from ...cluster.processes import is_halted

if TYPE_CHECKING:
    from ...cluster.engines import Engines
    from ...shared.messages import CellOutcome
    from ..run import Run
    from ..task import Task

LOOK_S = 0.05
STEPS = 3
"""Halted for as long as so many steps take at the median, a worker is done without."""
LEAST_S, MOST_S = 0.2, 5.0
"""However short or long a run's steps are."""
WINDOW = 32
"""So many rows tell how long steps take."""


class Engine(Protocol):
    """What is known of an engine (`cluster.engines.EngineInfo`)."""

    pid: int


def patience_s(steps_s: Iterable[float]) -> float:
    """Return for how long a worker may be halted.

    Args:
        steps_s: How long the latest steps took.
    """
    known = [step_s for step_s in steps_s if math.isfinite(step_s)]
    return min(MOST_S, max(LEAST_S, STEPS * statistics.median(known))) if known else MOST_S


class Halted:
    """Which workers are halted, and for how long.

    Args:
        halted: Says it of an engine.
    """

    def __init__(self, halted: Callable[[int], bool]) -> None:
        self._halted = halted
        self._since_s: dict[tuple[int, int], float] = {}  # by engine and pid

    def look(self, workers: Mapping[int, Engine], now_s: float) -> dict[int, float]:
        """Return the workers whom others wait for, with the seconds since each was found halted.

        Where all are halted nobody waits: somebody has put the run aside.
        """
        self._since_s = {
            (engine, info.pid): self._since_s.get((engine, info.pid), now_s)
            for engine, info in workers.items()
            if self._halted(engine)
        }
        if len(self._since_s) == len(workers):
            return {}
        return {engine: now_s - since_s for (engine, _), since_s in self._since_s.items()}

    def forget(self) -> None:
        """Start counting again."""
        self._since_s = {}


def death_words(
    run: Run, halted: MutableMapping[int, float], engine: int, outcome: CellOutcome
) -> str:
    """Return why an engine died.

    Args:
        halted: For how many seconds engines that were ended had been halted; told once.
    """
    seconds = halted.pop(engine, None)
    if seconds is not None:
        return f"{run.called(engine)} {halted_words(seconds)}"
    return f"{run.called(engine)} died: {outcome.how or 'how is not known'}"


class Watched(Protocol):
    """Who decides which workers take part (`healing.Healer`)."""

    def watched(self) -> list[int]:
        """Return those that the others wait for, or that are about to take part."""

    def note_halted(self, engine: int, seconds: float) -> None:
        """Take note that an engine is ended for that."""

    def latest_steps_s(self) -> list[float]:
        """Return how long the latest steps took."""


def look_after(task: Task, healer: Watched, engines: Engines, held: Callable[[], bool]) -> None:
    """End workers that are halted while the others wait, until the cell is over.

    Args:
        held: As for `watch`.
    """

    def workers() -> dict[int, Engine]:
        known = engines.engines
        return {one: known[one] for one in healer.watched() if known[one].state != "dead"}

    def halted(engine: int) -> bool:
        host, info = engines.host_of(engine), engines.engines[engine]
        return engine in host.halted if host is not None else info.is_here and is_halted(info.pid)

    def end(engine: int, seconds: float) -> None:
        healer.note_halted(engine, seconds)
        engines.signal(engine, signal.SIGKILL)

    watch(task.over, workers, halted, healer.latest_steps_s, end, held)


def watch(
    over: threading.Event,
    workers: Callable[[], Mapping[int, Engine]],
    halted: Callable[[int], bool],
    steps_s: Callable[[], Iterable[float]],
    end: Callable[[int, float], object],
    held: Callable[[], bool],
) -> None:
    """Have halted workers ended until the cell is over.

    Args:
        workers: Those that the others wait for, or that are about to take part.
        halted: Whether a signal has stopped an engine.
        steps_s: How long the latest steps took; asked where one is halted.
        end: Called with an engine and the seconds for which it has been halted.
        held: Whether the run stands still because its user wants it to: nobody waits then.
    """

    def main() -> None:
        known = Halted(halted)
        ended: set[tuple[int, int]] = set()
        while not over.wait(LOOK_S):
            if held():
                known.forget()
                continue
            there = workers()
            for engine, seconds in known.look(there, time.perf_counter()).items():
                one = engine, there[engine].pid
                if one not in ended and seconds >= patience_s(steps_s()):
                    ended.add(one)
                    end(engine, seconds)

    threading.Thread(target=main, name="workbench-silence", daemon=True).start()


def halted_words(seconds: float) -> str:
    """Tell the user why a worker was ended."""
    return f"was halted (SIGSTOP) for {seconds:.1f} s, so it was killed"
