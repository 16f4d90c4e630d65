"""Spends the delays a teacher injected, in the phase they were asked for."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterable

from ..faults import ON_LINKS, Fault, parse_fault


class FaultInjector:
    """This worker's faults; the control thread may replace them at any time.

    A delay without a phase is spent in forward, so it counts as the worker's own compute and shows
    as the others' sync wait.

    Args:
        rank: This worker; the first of them where the engine holds several replicas.
        held: How many replicas the engine holds.

    Attributes:
        replicas: One injector per replica held here, where there are several; a delay of the
            `forward` or `backward` of one of them is spent by it.
    """

    def __init__(self, rank: int, faults: Iterable[Fault | str] = (), held: int = 1) -> None:
        self._ranks = range(rank, rank + held)
        self.replicas = [FaultInjector(one) for one in self._ranks] if held > 1 else [self]
        self._random = random.Random(rank)
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
            time.sleep(delay)
        return delay

    def _delay(self, fault: Fault) -> float:
        if fault.kind == "jitter":
            return self._random.uniform(0.0, fault.delay_s)
        if fault.kind == "slow":
            return fault.delay_s + (fault.factor - 1.0) * self.compute_s
        return 0.0


def _phase(fault: Fault) -> str:
    return "forward" if fault.where == "step" else fault.where
