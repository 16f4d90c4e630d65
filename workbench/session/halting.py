"""Stop and Pause of a run: agreed on where its workers take steps together, enforced in the end."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

from ..escalation import ANSWER_S, CLEAR_S, REACH_S
from ..messages import Down, Halt, HaltAt, Purpose, Resume
from .agreement import Agreement

Send = Callable[[Down], None]
"""Sends a message to every engine that runs the cell."""


class Halting:
    """Brings a run's workers to one step, and interrupts them where that does not work.

    Args:
        run: The run's number, which messages name.
        sync: Whether the workers take each step together; others stop where they are.
        interrupt: Ends the cell on all its engines.
        pace_s: Seconds that a step takes, as far as is known (NaN: not).
    """

    def __init__(
        self,
        run: int,
        sync: bool,
        workers: int,
        send: Send,
        interrupt: Callable[[], None],
        pace_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._run, self._sync, self._workers = run, sync, workers
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
            if purpose == "stop":
                self._later(ANSWER_S, self._interrupt_unless_agreed)

    def resume(self) -> None:
        """Let the workers go on after a pause."""
        with self._lock:
            self._agreement = None
            self._send(Resume(run=self._run))

    def position(self, rank: int, step: int) -> None:
        """Take a worker's answer: the step it has begun."""
        with self._lock:
            agreement = self._agreement
            common = agreement.answer(rank, step) if agreement is not None else None
        if agreement is not None and common is not None:
            self._send(HaltAt(run=self._run, purpose=agreement.purpose, step=common))
            self._expect_end(agreement.purpose)

    def arrived(self, worker: int) -> None:
        """Take note that a worker's cell is through; what it still clears away takes its time."""
        with self._lock:
            self._arrived.add(worker)
            if len(self._arrived) == self._workers and self._timers:
                self.close()
                self._later(CLEAR_S, self._interrupt)

    def close(self) -> None:
        """The run is over: nobody is interrupted any more."""
        for timer in self._timers:
            timer.cancel()

    def _expect_end(self, purpose: Purpose) -> None:
        if purpose == "stop" and len(self._arrived) < self._workers:
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
    """Return how long workers may take to the agreed step: about two steps, within `REACH_S`."""
    least, longest = REACH_S
    return longest if math.isnan(pace_s) else min(longest, max(least, 2 * pace_s))
