"""When a worker's stages worked, stood idle, and waited for a message.

    this worker      |F0 |    |F1 |          |B0 |
    its neighbour    ......|sent F1    ......|sent B0
                          idle^^transfer

Between two pieces of work there is a gap. The sender's clock travels with each message, so the gap
falls apart into idle time (the message had not been sent yet: the bubble) and transfer (it was on
its way). All processes of a host read one clock; across hosts the gap is not divided.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ....engine.injector import FaultInjector
from ...base import NAN

clock = time.perf_counter


@dataclass
class Spent:
    """Seconds of one step of one worker.

    Attributes:
        busy_s: Forward, backward, loss.
        idle_s: Waiting for a message that was not sent yet; NaN where clocks differ.
        blocked_s: All gaps: idle, transfer and the schedule's own overhead.
    """

    busy_s: float = 0.0
    idle_s: float = 0.0
    blocked_s: float = 0.0


class Timeline:
    """What one worker's stages did in a step, gap by gap.

    Args:
        stamped: Whether the sender's clock travels with messages and can be compared.
    """

    def __init__(self, faults: FaultInjector, device: torch.device, *, stamped: bool) -> None:
        self.stamped = stamped
        self._faults, self._device = faults, device
        self._last = 0.0
        self._delayed: set[str] = set()
        self.injected_s = 0.0
        self.spent = Spent()

    def begin(self) -> None:
        """A step begins."""
        self._last = clock()
        self._delayed.clear()
        self.injected_s = 0.0
        self.spent = Spent(idle_s=0.0 if self.stamped else NAN)

    def work(self, phase: str, sent_s: float | None) -> None:
        """Work begins; since the last work there was a gap.

        Args:
            phase: `forward` or `backward`; its injected delay is spent in its first piece.
            sent_s: When the message it needed was sent; None where it needed none.
        """
        now = clock()
        gap = now - self._last
        self.spent.blocked_s += gap
        if sent_s is not None and self.stamped:
            self.spent.idle_s += min(max(sent_s - self._last, 0.0), gap)
        self._last = now
        if self._faults.active and phase not in self._delayed:
            self._delayed.add(phase)
            self.injected_s += self._faults.spend(phase)

    def travel(self, size_bytes: int) -> None:
        """Let a message take as long as the simulated link would; it has been stamped already."""
        if self._faults.on_links:
            self._faults.travel(size_bytes)

    def rest(self) -> None:
        """Work ends."""
        if self._device.type == "cuda":  # else the clock would show when it was enqueued
            torch.cuda.synchronize(self._device)
        now = clock()
        self.spent.busy_s += now - self._last
        self._last = now

    def end(self) -> None:
        """The schedule is done; what followed the last work was sending."""
        self.spent.blocked_s += clock() - self._last

    def blocked(self, came_s: float) -> None:
        """Since `came_s` this worker has exchanged messages with others."""
        self.spent.blocked_s += clock() - came_s

    def met(self, came_s: float, last_s: float) -> None:
        """All workers met in a collective: this one came at `came_s`, the last at `last_s`."""
        self.spent.blocked_s += clock() - came_s
        self.spent.idle_s += last_s - came_s  # NaN stays NaN
