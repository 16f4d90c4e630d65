"""The gate where the training thread asks, before each step, whether it may continue.

If ranks of a synchronous run stop at different steps, they deadlock: a rank that continued waits in
an all-reduce for a rank that stopped. So all ranks agree on the step of a Stop or a Pause. Each
rank answers with the step c that it has begun. The rank starts no later step until the kernel names
one common step, `max(c)`. No rank can have started a later step, and all ranks may continue up to
this step.

A change of the workers' shares is agreed in the same way (`ask_to_deal`, `deal`). If some workers
took a step with the old shares and other workers with the new shares, some samples would count
twice and other samples would be left out. All workers wait until the kernel has their answers and
they have the kernel's decision.

The gate also spends injected delays, in the phase for which they were asked. If the host is ahead
of a device, the device's remaining computation would hide a delay. So the device finishes first,
but only if there is a delay.
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
"""Returned in place of a step: the shares of this training cannot be changed."""
LEAVES: tuple[Purpose, ...] = ("leave", "leave_alone")
"""A worker must leave: all workers end their cell, or only this one. The rest is not run."""
ENDS: tuple[Purpose, ...] = ("stop", *LEAVES)
"""A worker that receives one of these purposes does not continue."""


class Gate:
    """Shared by the training thread (`enter`, `take_portions`) and the control thread (the rest).

    Attributes:
        deals: Whether the shares of the running training can be changed.
        dealt: Whether the step that `enter` has just allowed is the first step with new shares.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._limit = NO_LIMIT  # first step that needs a check: it may have to stop, pause or wait
        self._halt_at = NO_LIMIT  # first step that Stop or Pause holds back
        self._deal_at = NO_LIMIT  # first step that waits for new shares, or has them
        self._portions: tuple[int, ...] = ()  # the new shares; empty while the workers are asked
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
        """Whether a stop was agreed, for any reason."""
        return self._purpose in ENDS

    @property
    def leaving(self) -> bool:
        """Whether the reason for the stop is that a worker must leave."""
        return self._purpose in LEAVES

    @property
    def leaves_alone(self) -> bool:
        """Whether this worker must leave, and the others continue without it."""
        return self._purpose == "leave_alone"

    def halt(self) -> int:
        """Hold the worker; return the step that it has begun (-1: no step yet)."""
        with self._changed:
            at = self._begun()
            if self._purpose is None:
                self._halt_at = min(self._halt_at, at + 1)
            self._set_limit()
            return at

    def _begun(self) -> int:
        """Return the step that has begun; a thread that begins the next step waits for the lock."""
        self._limit = -1
        return self._at

    def _set_limit(self) -> None:
        self._limit = min(self._halt_at, self._deal_at)
        self._changed.notify_all()

    def halt_at(self, purpose: Purpose, step: int) -> None:
        """Allow steps up to and including `step`, then stop or pause."""
        with self._changed:
            if self._purpose not in ENDS:
                # Workers that do not agree on a step get no step number: the running step is the
                # last.
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
        """Hold the worker until it receives new shares; return the step that it has begun.

        Returns:
            -1: no step yet; `CANNOT`: the worker's shares cannot be changed, and it does not wait.
        """
        with self._changed:
            if not self.deals:
                return CANNOT
            at = self._begun()
            self._deal_at, self._portions = at + 1, ()
            self._set_limit()
            return at

    def deal(self, step: int, portions: Sequence[int]) -> None:
        """Keep the old shares before `step`; from `step` on, use the given shares."""
        with self._changed:
            if self.deals:
                self._deal_at, self._portions = step, tuple(portions)
                self._set_limit()

    def drop_deal(self) -> None:
        """Let the worker continue with its shares: the workers changed, or all have answered."""
        with self._changed:
            self._deal_at, self._portions = NO_LIMIT, ()
            self._set_limit()

    def take_portions(self) -> tuple[int, ...]:
        """Return the shares from the current step on, by rank; empty if they did not change."""
        with self._changed:
            portions, self.dealt = self._portions, False
            self._deal_at, self._portions = NO_LIMIT, ()
            self._set_limit()
            return portions


def _nothing(step: int) -> None:
    """Do nothing; the default of the gate's two callbacks."""


class FaultInjector:
    """This worker's faults; the control thread may replace them at any time.

    A delay without a phase is spent in forward. So it counts as this worker's compute, and the
    other workers show it as sync wait.

    Args:
        rank: This worker; its first replica if the engine holds several replicas.
        held: How many replicas the engine holds.

    Attributes:
        settle: Waits until the device has finished its work.
        replicas: One injector per replica in this engine, if there are several. Each injector
            spends the delays of its replica's `forward` and `backward`.
    """

    def __init__(self, rank: int, faults: Iterable[Fault | str] = (), held: int = 1) -> None:
        self._ranks = range(rank, rank + held)
        self.replicas = [FaultInjector(one) for one in self._ranks] if held > 1 else [self]
        self._random = random.Random(rank)
        self.settle: Callable[[], object] = _at_once
        self._active: tuple[Fault, ...] = ()
        self.compute_s = 0.0  # compute time of the latest step without faults, for `slow=1:3x`
        self.set(faults)

    def set(self, faults: Iterable[Fault | str]) -> None:
        """Replace the faults with the given faults, which may be texts."""
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
        """Sleep for the time that a message takes on the simulated link; return the seconds."""
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
    """Do nothing: a CPU has always finished the computations that it was given."""


def _phase(fault: Fault) -> str:
    return "forward" if fault.where == "step" else fault.where
