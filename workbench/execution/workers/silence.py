"""Ends workers that a signal has halted (SIGSTOP), so that the others continue without them.

A halted worker closes no connection. So no worker notices that it has stopped, and all wait for it.
This module reads the state of its process; it does not ask for an answer, because a worker in a
long call into C does not answer either. A worker at a prompt, in a debugger (state `t`, not `T`) or
in `pause` runs or sleeps, so it never counts as halted.

A worker may be halted for only a moment, to be sampled or moved. So a worker counts only after it
was halted for the time of several steps. The worker is ended, so it cannot wake up later and write:

    halted ──3 steps' time──> SIGKILL ──> reaped: handled as any other death (`healing.Healer`)

For engines on other hosts, their host's agent looks at them and reports a halt at once. If a host
sends nothing any more, `cluster/hosts/agents.py` gives it up; its engines then count as dead.
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
"""A worker is ended after it was halted for this many times the median step."""
LEAST_S, MOST_S = 0.2, 5.0
"""Bounds of this time, however short or long the run's steps are."""
WINDOW = 32
"""How many rows the median step is computed from."""


class Engine(Protocol):
    """The facts about an engine that this module needs (`cluster.engines.EngineInfo`)."""

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
        halted: Returns whether an engine is halted.
    """

    def __init__(self, halted: Callable[[int], bool]) -> None:
        self._halted = halted
        self._since_s: dict[tuple[int, int], float] = {}  # by engine and pid

    def look(self, workers: Mapping[int, Engine], now_s: float) -> dict[int, float]:
        """Return the halted workers that others wait for, with the seconds since each was found.

        If all workers are halted, no worker waits: a person has stopped the whole run.
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
        halted: How many seconds an engine had been halted before it was ended; reported once.
    """
    seconds = halted.pop(engine, None)
    if seconds is not None:
        return f"{run.called(engine)} {halted_words(seconds)}"
    return f"{run.called(engine)} died: {outcome.how or 'the reason is unknown'}"


class Watched(Protocol):
    """The object that decides which workers take part (`healing.Healer`)."""

    def watched(self) -> list[int]:
        """Return the engines that the others wait for, or that will soon take part."""

    def note_halted(self, engine: int, seconds: float) -> None:
        """Note that an engine is ended because it was halted for these seconds."""

    def latest_steps_s(self) -> list[float]:
        """Return how long the latest steps took."""


def look_after(task: Task, healer: Watched, engines: Engines, held: Callable[[], bool]) -> None:
    """End workers that are halted while the others wait, until the cell is over.

    Args:
        held: The same as for `watch`.
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
    """End halted workers until the cell is over.

    Args:
        workers: The engines that the others wait for, or that will soon take part.
        halted: Whether a signal has stopped an engine.
        steps_s: How long the latest steps took; called when an engine is halted.
        end: Called with an engine and the seconds for which it has been halted.
        held: Whether the user has paused the run: then no worker waits.
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
    """Return the note on why a worker was ended."""
    return f"was suspended (SIGSTOP) for {seconds:.1f} s, so Workbench killed it"
