"""The workers that take part in a running training, and the moment from which the set changes.

When a worker dies, joins or leaves, the kernel announces a generation: an ordered list of workers
with a new number. Collectives of the old generation are interrupted, because they may wait for a
worker that never arrives. Workers that are computing see the change before the next step. Then all
meet in the new generation (`training/regrouping.py`).

    control thread   announce(g) --> break collectives of g - 1 --> report this worker's state
    training thread  step ... error, or `stale` --> await_next --> g is this worker's generation

Only connections of a generation that the training thread has not left yet are broken. Leaving and
breaking exclude each other, so a connection of the new generation is never cut by a message that
was meant for the old one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from ...errors import RunStopped
from ..debugging.marks import GROUP, waits_in

if TYPE_CHECKING:
    from ...shared.messages import Regroup

clock = time.monotonic
LOOK_S, LOOKS = 1.0, 5
"""How often Workbench checks whether a worker hangs in an interrupted collective, and how often in
a row it must hang."""
HANGS = (
    "Workbench tried to interrupt a collective, but the collective still hangs. This worker ends "
    "itself, so that a new engine can replace it."
)
Phase = Literal["before", "ready", "cut", "past"]
"""The states of a worker: before or after a training; in a training; cut off from the others.

Waiting to join.
"""


class Membership:
    """Shared by the training thread and the control thread (`announce`).

    Args:
        place: This worker's rank in the run's tables, which stays when its rank changes.
        joins: Whether it joins a training that is in progress.

    Attributes:
        generation: That of the members it trains with; 0: those that the run began with.
        waits: Whether it has not joined yet.
        away: Whether it was left out of a generation after it had taken part.
        apart: Whether it never meets the others: it notices changes before one of its own steps.
        stale: Whether the set of workers changes from the next step on.
        tell: Reports this worker's state to the kernel.
        break_out: Ends what blocks the training thread in a collective; callable from any thread.
        hangs: Whether the training thread blocks in one; asked some time after it was broken.
        note: Tells the user.
        quit: Ends this process.
    """

    def __init__(self, place: int = 0, *, joins: bool = False) -> None:
        self.place, self.waits = place, joins
        self.generation = 0
        self.stale = self.apart = self.away = False
        self.tell: Callable[[Phase, int], object] = _nothing
        self.break_out: Callable[[], object] = _nothing
        self.hangs: Callable[[], bool] = lambda: False
        self.note: Callable[[str], object] = _nothing
        self.quit: Callable[[], object] = _nothing
        self._changed = threading.Condition(threading.RLock())
        self._latest: Regroup | None = None
        self._listens = False  # whether the training thread waits for the next word alone
        self._may_leave = False
        self._phase: Literal["before", "in", "past"] = "before"
        self._look_at_s, self._hung = 0.0, 0

    @property
    def trains(self) -> bool:
        """Whether this worker is in a training that can continue with others."""
        return self._phase == "in"

    @property
    def announced(self) -> int:
        """The newest generation that this worker has heard of."""
        return 0 if self._latest is None else self._latest.generation

    def begin(self) -> None:
        """Enter a training that can continue with others, from here to `end`."""
        with self._changed:
            self._phase = "in"

    def end(self) -> None:
        """Finish the training: no worker waits for this worker any more."""
        with self._changed:
            if self._phase == "in":
                self._phase = "past"
                self._answer()

    def withdraw(self) -> None:
        """Leave the training again, because it cannot continue with others."""
        with self._changed:
            if self._phase == "in":
                self._phase = "before"
                self._answer()

    def announce(self, message: Regroup) -> None:
        """Accept the new set of workers; the newest message counts."""
        with self._changed:
            if not message.places:
                self._may_leave = True
                self._changed.notify_all()
                return
            if self._latest is not None and message.generation <= self._latest.generation:
                return
            self._latest, self.stale = message, True
            self._changed.notify_all()
            if not self.trains:
                self._answer()
            elif self._can_be_blocked and not self._listens:
                self._look_at_s, self._hung = clock() + LOOK_S, 0
                self.break_out()

    @property
    def _can_be_blocked(self) -> bool:
        """Whether it may be waiting for a worker that no longer takes part."""
        return self.waits or not self.apart

    def remind(self) -> None:
        """Break the training thread out again, unless it already knows of the change.

        When it was broken out, it may have been about to connect to members of the old generation.
        Called from time to time while `stale`.
        """
        with self._changed:
            if not (self.stale and self.trains and self._can_be_blocked) or self._listens:
                return
            self.break_out()
        if clock() >= self._look_at_s:
            self._look()

    def _look(self) -> None:
        """End this process if its training thread cannot be interrupted.

        Gloo loses the end of a message whose connection closes just as it is sent; a wait for it
        (`UnboundBuffer::waitSend`) then lasts for the group's whole timeout, and cannot be aborted.
        """
        self._hung = self._hung + 1 if self.hangs() else 0
        self._look_at_s = clock() + LOOK_S
        if self._hung == LOOKS:
            self.note(HANGS)
        elif self._hung > LOOKS:  # by now that has been sent
            self.quit()

    def _answer(self) -> None:
        if self._latest is not None and self.stale and self._phase != "in":
            self.tell(self._phase, self._latest.generation)

    def waiting(self) -> None:
        """Report that this worker waits to join, or to learn which workers continue with it."""
        if self.waits or not self.stale:
            self.tell("ready" if self.waits else "cut", self.generation)

    @waits_in(GROUP)
    def await_next(self) -> Regroup:
        """Wait for a generation that this worker is not in yet; enter it, and return its members.

        The wait has no limit: if no worker will replace this one, and only it could continue, the
        kernel ends its cell. A worker that is about to leave waits too: it is needed again if all
        others have died or have finished training.

        Raises:
            RunStopped: It has left.
        """
        with self._changed:
            self._listens = True
            try:
                while True:
                    if self._may_leave:
                        raise RunStopped("The other workers continue without this worker.")
                    if self.stale:
                        assert self._latest is not None, (
                            "internal error: the set of workers changed, but the new set is unknown"
                        )
                        self.generation, self.stale = self._latest.generation, False
                        if self.place in self._latest.places:
                            return self._latest
                        self.away = True
                    self._changed.wait(0.5)
            finally:
                self._listens = False


def _nothing(*unused: object) -> None:
    """Do nothing; replaced by a real function later."""
