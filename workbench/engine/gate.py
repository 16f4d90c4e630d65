"""Where the training thread asks, before each step, whether it may go on.

Ranks of a synchronous run that stop at different steps deadlock: the one that went on waits for
the other in an all-reduce. So Stop and Pause are agreed: each rank answers with the step c it has
begun and starts no further one until the kernel names one common step. That is `max(c)`: nobody
can have started a later one, and all are let through up to it.
"""

from __future__ import annotations

import threading
import time

from ..messages import Purpose
from .marks import PAUSE, waits_in

NO_LIMIT = 1 << 62


class Gate:
    """Shared by the training thread (`enter`) and the control thread (the rest)."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit = NO_LIMIT  # first step that may not start
        self._purpose: Purpose | None = None  # agreed purpose of the limit; None while asking
        self._at = -1
        self.paused_s = 0.0
        self.on_pause = _nothing
        self.on_resume = _nothing

    def enter(self, step: int) -> bool:
        """Return True when `step` may start, False when the run is to stop before it.

        Blocks while paused. Costs one comparison when nothing was asked for.
        """
        self._at = step
        if step < self._limit:
            return True
        return self._wait(step)

    @waits_in(PAUSE)
    def _wait(self, step: int) -> bool:
        began = time.perf_counter()
        announced = False
        with self._changed:
            self._at = step - 1  # this step has not begun: a Stop now must not cost one more
            while step >= self._limit:
                if self._purpose == "stop":
                    return False
                if self._purpose == "pause" and not announced:
                    announced = True
                    self.on_pause(step)
                self._changed.wait(0.5)
            self._at = step
        self.paused_s += time.perf_counter() - began
        if announced:
            self.on_resume(step)
        return True

    @property
    def stopping(self) -> bool:
        """Whether a stop was agreed."""
        return self._purpose == "stop"

    def halt(self) -> int:
        """Hold the worker; return the step it has begun (-1: none yet)."""
        with self._changed:
            if self._purpose is None:
                self._limit = min(self._limit, self._at + 1)
            self._changed.notify_all()
            return self._at

    def halt_at(self, purpose: Purpose, step: int) -> None:
        """Let steps up to and including `step` happen, then stop or pause."""
        with self._changed:
            if self._purpose != "stop":
                # Workers that agree with nobody are told no step: the one under way is the last.
                self._limit, self._purpose = max(step, self._at) + 1, purpose
            self._changed.notify_all()

    def resume(self) -> None:
        """Lift a pause."""
        with self._changed:
            if self._purpose != "stop":
                self._limit, self._purpose = NO_LIMIT, None
            self._changed.notify_all()

    def advance(self, steps: int) -> None:
        """Let a paused worker do `steps` more, then pause it again."""
        with self._changed:
            if self._purpose == "pause":
                self._limit += steps
            self._changed.notify_all()


def _nothing(step: int) -> None:
    """Do nothing; the default of the gate's two callbacks."""
