"""Where the training thread asks, before each step, whether it may continue.

If ranks of a synchronous run stop at different steps, they deadlock: the rank that continued waits
for the other in an all-reduce. So Stop and Pause are agreed. Each rank answers with the step c it
has begun, and starts no later step until the kernel names one common step. That is `max(c)`: no
rank can have started a later one, and all ranks may continue up to it.

A change of the workers' shares is agreed in the same way (`ask_to_deal`, `deal`). If some workers
took a step with the old shares and others with new ones, some samples would count twice and others
would be left out. All workers wait while the kernel's question and its answer travel.

Injected delays are spent here too, in the phase for which they were asked. If the host is ahead of
a device, the device's remaining work would hide a delay. So if there is a delay, and only then, the
device finishes first.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from ...shared.faults import ON_LINKS, Fault, parse_fault
from ..debugging.marks import PAUSE, waits_in

if TYPE_CHECKING:
    from ...shared.messages import Purpose

NO_LIMIT = 1 << 62
CANNOT = -2
"""In place of a step: this training's shares cannot be changed."""
LEAVES: tuple[Purpose, ...] = ("leave", "leave_alone")
"""A worker must leave: all end their cell, or it alone. What else is in the cell is not run."""
ENDS: tuple[Purpose, ...] = ("stop", *LEAVES)
"""Who was told so does not go on."""


class Gate:
    """Shared by the training thread (`enter`, `take_portions`) and the control thread (the rest).

    Attributes:
        deals: Whether the shares of the training under way can be changed.
        dealt: Whether the step that `enter` has just allowed is the first with new shares.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit = NO_LIMIT  # first step that may not start as if nothing had been asked for
        self._halt_at = NO_LIMIT  # first step that Stop or Pause holds back
        self._deal_at = NO_LIMIT  # first step that waits for new shares, or has them
        self._portions: tuple[int, ...] = ()  # those; none while asking
        self.deals = self.dealt = False
        self._purpose: Purpose | None = None  # agreed purpose of the limit; None while asking
        self._at = -1
        self.paused_s = 0.0
        self.on_pause = _nothing
        self.on_resume = _nothing

    def enter(self, step: int) -> bool:
        """Return True if `step` may start, False if the run stops before it.

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
            while step >= self._halt_at or (step >= self._deal_at and not self._portions):
                if self._purpose in ENDS and step >= self._halt_at:
                    return False
                if self._purpose == "pause" and not announced:
                    announced = True
                    self.on_pause(step)
                self._changed.wait(0.5)
            self._at = step
            self.dealt = step >= self._deal_at
        self.paused_s += time.perf_counter() - began
        if announced:
            self.on_resume(step)
        return True

    @property
    def stopping(self) -> bool:
        """Whether a stop was agreed, for whatever reason."""
        return self._purpose in ENDS

    @property
    def leaving(self) -> bool:
        """Whether the reason is that a worker must leave."""
        return self._purpose in LEAVES

    @property
    def leaves_alone(self) -> bool:
        """Whether this worker must leave, and the others continue without it."""
        return self._purpose == "leave_alone"

    def halt(self) -> int:
        """Hold the worker; return the step it has begun (-1: none yet)."""
        with self._changed:
            at = self._begun()
            if self._purpose is None:
                self._halt_at = min(self._halt_at, at + 1)
            self._set_limit()
            return at

    def _begun(self) -> int:
        """Return the step that has begun; who is about to begin another one waits for the lock."""
        self._limit = -1
        return self._at

    def _set_limit(self) -> None:
        self._limit = min(self._halt_at, self._deal_at)
        self._changed.notify_all()

    def halt_at(self, purpose: Purpose, step: int) -> None:
        """Allow steps up to and including `step`, then stop or pause."""
        with self._changed:
            if self._purpose not in ENDS:
                # Workers that agree with nobody are told no step: the one under way is the last.
                self._halt_at, self._purpose = max(step, self._begun()) + 1, purpose
            self._set_limit()

    def resume(self) -> None:
        """Lift a pause."""
        with self._changed:
            if self._purpose not in ENDS:
                self._halt_at, self._purpose = NO_LIMIT, None
            self._set_limit()

    def advance(self, steps: int) -> None:
        """Allow a paused worker `steps` more steps, then pause it again."""
        with self._changed:
            if self._purpose == "pause":
                self._halt_at += steps
            self._set_limit()

    def ask_to_deal(self) -> int:
        """Hold the worker until it hears of new shares; return the step it has begun.

        Returns:
            -1: none yet; `CANNOT`: its shares cannot be changed, and it does not wait.
        """
        with self._changed:
            if not self.deals:
                return CANNOT
            at = self._begun()
            self._deal_at, self._portions = at + 1, ()
            self._set_limit()
            return at

    def deal(self, step: int, portions: Sequence[int]) -> None:
        """Keep the old shares for steps before `step`; these are the shares from there on."""
        with self._changed:
            if self.deals:
                self._deal_at, self._portions = step, tuple(portions)
                self._set_limit()

    def drop_deal(self) -> None:
        """Let the worker continue with its shares: the set has changed, or all have answered."""
        with self._changed:
            self._deal_at, self._portions = NO_LIMIT, ()
            self._set_limit()

    def take_portions(self) -> tuple[int, ...]:
        """Return the shares from the current step on, by rank; none: unchanged."""
        with self._changed:
            portions, self.dealt = self._portions, False
            self._deal_at, self._portions = NO_LIMIT, ()
            self._set_limit()
            return portions


def _nothing(step: int) -> None:
    """Do nothing; the default of the gate's two callbacks."""


class FaultInjector:
    """This worker's faults; the control thread may replace them at any time.

    A delay without a phase is spent in forward, so it counts as the worker's own compute and
    appears as the others' sync wait.

    Args:
        rank: This worker; the first of them if the engine holds several replicas.
        held: How many replicas the engine holds.

    Attributes:
        settle: Waits until the device has finished its work.
        replicas: One injector per replica held here, if there are several; it spends the delays
            of that replica's `forward` and `backward`.
    """

    def __init__(self, rank: int, faults: Iterable[Fault | str] = (), held: int = 1) -> None:
        self._ranks = range(rank, rank + held)
        self.replicas = [FaultInjector(one) for one in self._ranks] if held > 1 else [self]
        self._random = random.Random(rank)
        self.settle: Callable[[], object] = _at_once
        self._active: tuple[Fault, ...] = ()
        self.compute_s = 0.0  # the latest step's own compute without faults, for `slow=1:3x`
        self.set(faults)

    def set(self, faults: Iterable[Fault | str]) -> None:
        """Replace the faults by these, or by those that texts say."""
        known = [parse_fault(one) if isinstance(one, str) else one for one in faults]
        self._active = tuple(
            f for f in known if f.kind != "clear" and (f.rank is None or f.rank in self._ranks)
        )
        for replica in self.replicas:
            if replica is not self:
                replica.set(known)

    @property
    def active(self) -> bool:
        """Whether any fault concerns this worker."""
        return bool(self._active)

    @property
    def on_links(self) -> bool:
        """Whether a link is simulated: `bandwidth`, `latency`."""
        return any(fault.kind in ON_LINKS for fault in self._active)

    def before_step(self, step: int) -> None:
        """End this process when a `kill` is due."""
        for fault in self._active:
            if fault.kind == "kill" and step >= fault.step:
                os.kill(os.getpid(), signal.SIGKILL)

    def spend(self, phase: str) -> float:
        """Sleep for the delays of a phase (`data`, `forward`, `backward`); return the seconds."""
        if not self._active:
            return 0.0
        delay = sum(self._delay(fault) for fault in self._active if _phase(fault) == phase)
        if delay > 0:
            self.settle()
            time.sleep(delay)
        return delay

    def travel(self, size_bytes: int) -> float:
        """Sleep for as long as a message would take on the simulated link; return the seconds."""
        delay = 0.0
        for fault in self._active:
            if fault.kind == "latency":
                delay += fault.delay_s
            elif fault.kind == "bandwidth":
                delay += size_bytes / fault.bytes_per_s
        if delay > 0:
            self.settle()
            time.sleep(delay)
        return delay

    def _delay(self, fault: Fault) -> float:
        if fault.kind == "jitter":
            return self._random.uniform(0.0, fault.delay_s)
        if fault.kind == "slow":
            return fault.delay_s + (fault.factor - 1.0) * self.compute_s
        return 0.0


def _at_once() -> None:
    """Do nothing: a CPU is done with all that it was given."""


def _phase(fault: Fault) -> str:
    return "forward" if fault.where == "step" else fault.where
