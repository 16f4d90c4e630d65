"""Stop and Pause of a run: the workers agree on a step; if that fails, they are interrupted.

How the workers of a synchronous run agree on a step is a pure function: it takes their answers and
returns the common step. An interrupt of the kernel ends whatever is running on the engines,
wherever the kernel is at that moment.
"""

from __future__ import annotations

import contextlib
import math
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from ..errors import RunError
from ..shared.events import ANSWER_S, CLEAR_S, REACH_S, SETTLE_S
from ..shared.messages import Down, Halt, HaltAt, Purpose, Resume

Send = Callable[[Down], None]
"""Sends a message to every engine that runs the cell."""


class StopCoordinator:
    """Lets a run's workers stop after the same step, and interrupts them if that fails.

    Args:
        run: The run's number in messages.
        sync: Whether the workers take each step together; workers of other runs stop at their
            current step.
        workers: The ranks that must agree, or their number.
        interrupt: Ends the cell on all its engines.
        pace_s: Seconds per step; NaN if unknown.
    """

    def __init__(
        self,
        run: int,
        sync: bool,
        workers: int | Collection[int],
        send: Send,
        interrupt: Callable[[], None],
        pace_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._run, self._sync = run, sync
        self._workers = set(range(workers) if isinstance(workers, int) else workers)
        self._send, self._interrupt, self._pace_s = send, interrupt, pace_s
        self._agreement: Agreement | None = None
        self._arrived: set[int] = set()
        self._timers: list[threading.Timer] = []
        self._lock = threading.RLock()

    def halt(self, purpose: Purpose) -> None:
        """Have the workers stop or pause; returns at once."""
        with self._lock:
            if not self._sync:
                self._send(HaltAt(run=self._run, purpose=purpose, step=-1))
                self._expect_end(purpose)
                return
            self._agreement = Agreement(purpose, self._workers)
            self._send(Halt(run=self._run, purpose=purpose))
            if purpose == "stop":  # a worker that will leave soon ends in any case
                self._later(ANSWER_S, self._interrupt_unless_agreed)

    @property
    def asking(self) -> Purpose | None:
        """The request that workers currently agree on; None if there is none."""
        agreement = self._agreement
        return agreement.purpose if agreement is not None and agreement.silent else None

    def resume(self) -> None:
        """Let the workers continue after a pause."""
        with self._lock:
            self._agreement = None
            self._send(Resume(run=self._run))

    def position(self, rank: int, step: int) -> None:
        """Process a worker's answer: the step that it has begun."""
        with self._lock:
            agreement = self._agreement
            common = agreement.answer(rank, step) if agreement is not None else None
        if agreement is not None and common is not None:
            self._send(HaltAt(run=self._run, purpose=agreement.purpose, step=common))
            self._expect_end(agreement.purpose)

    def arrived(self, worker: int) -> None:
        """Note that a worker's cell has ended; its cleanup may still take some time."""
        with self._lock:
            self._arrived.add(worker)
            if self._arrived >= self._workers and self._timers:
                self.close()
                self._later(CLEAR_S, self._interrupt)

    def close(self) -> None:
        """Note that the run is over; from now on no worker is interrupted."""
        for timer in self._timers:
            timer.cancel()

    def _expect_end(self, purpose: Purpose) -> None:
        if purpose == "stop" and not self._arrived >= self._workers:
            self._later(reach_s(self._pace_s()), self._interrupt)

    def _interrupt_unless_agreed(self) -> None:
        if self._agreement is not None and self._agreement.silent:
            self._interrupt()

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()


def reach_s(pace_s: float) -> float:
    """Return the time limit for reaching the agreed step: about two steps, within `REACH_S`."""
    least, longest = REACH_S
    return longest if math.isnan(pace_s) else min(longest, max(least, 2 * pace_s))


class Agreement:
    """Collects each rank's position; meanwhile ranks do not begin another step (`engine.gate`).

    No rank has begun a step after the furthest position. Ranks that are behind continue up to this
    position, so it is the common step.
    """

    def __init__(self, purpose: Purpose, ranks: int | Collection[int]) -> None:
        self.purpose = purpose
        self._waiting = set(range(ranks) if isinstance(ranks, int) else ranks)
        self._highest = -1

    def answer(self, rank: int, step: int) -> int | None:
        """Process one rank's position; return the common step after the last rank has answered."""
        if rank not in self._waiting:
            return None
        self._waiting.remove(rank)
        self._highest = max(self._highest, step)
        return None if self._waiting else self._highest

    @property
    def silent(self) -> frozenset[int]:
        """Ranks that have not answered."""
        return frozenset(self._waiting)


class Ending(Protocol):
    """The methods that end a run or a cell."""

    over: threading.Event

    @property
    def is_over(self) -> bool:
        """Whether the task has ended."""

    def stop(self) -> None:
        """End the task."""

    def interrupt(self) -> None:
        """Interrupt the task's engines."""


class Occupied(Protocol):
    """An object that can run a task; a cluster."""

    @property
    def busy(self) -> Ending | None:
        """The current task, or the last one."""


def settle(over: threading.Event, again: Callable[[], None]) -> None:
    """Wait until the interrupted task has ended, even if a second interrupt comes."""
    end = time.monotonic() + SETTLE_S
    while not over.is_set() and time.monotonic() < end:
        try:
            over.wait(0.1)
        except KeyboardInterrupt:  # noqa: PERF203 - the wait takes most of the time
            again()


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Delay an interrupt until after the block, so that a task begun in the block is known."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pressed: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: pressed.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


@contextlib.contextmanager
def ending(cluster: Occupied) -> Iterator[None]:
    """End the cell or run that was started in the block if an interrupt ends the block.

    Raises:
        RunError: The block was interrupted.
    """
    try:
        yield
    except KeyboardInterrupt:
        busy = cluster.busy
        if busy is None or busy.is_over:
            raise
        busy.stop()
        settle(busy.over, busy.interrupt)
        raise RunError(
            "Interrupted: Workbench ended the cell on all engines.", code="WB-RUN-069"
        ) from None
