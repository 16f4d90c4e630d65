"""An accelerator in simulated time: what real ones do to whoever measures them, in microseconds.

    host = HostClock()                     seconds, which stand still unless somebody moves them
    device = FakeAccelerator(host, ppm=15) its oscillator runs 15 millionths fast
    device.run(0.080)                      80 ms of work are enqueued; the host goes on at once
    device.wait_for(at_s)                  the stream waits for a message; the host does not
    host.go(0.005)                         the host is busy for 5 ms
    device.fail("device-side assert")      from now on every call raises, as CUDA's do
    device.hang()                          nothing enqueued from here on is ever passed

Events are the product's own (`engine.torch.accelerator.Event`); below them lie events of this file,
which count in single-precision milliseconds of the device's oscillator, and insist that whoever
asks them computes on their device, whatever thread it is: CUDA would make a context on the first
GPU for whoever does not.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from workbench.engine.torch.accelerator import Accelerator, Event

LAUNCH_S = 1e-5
"""How long an idle device takes to pass an event."""


class HostClock:
    """The host's clock; calling it tells the time."""

    def __init__(self, now_s: float = 1000.0) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s

    def go(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds

    def go_to(self, at_s: float) -> None:
        """Let time pass until then."""
        if at_s == math.inf:
            raise AssertionError("the host waits for ever for a device that hangs")
        self.now_s = max(self.now_s, at_s)


class FakeAccelerator(Accelerator):
    """One device with one stream.

    Args:
        ppm: By how many millionths its oscillator runs fast.
        index: Its number.
        lag_s: How long a poll of the host takes: time passes while it asks.

    Attributes:
        threads: Names of the threads that asked events of this device.
        syncs: How often the host waited for all of its work.
    """

    def __init__(
        self, host: HostClock, *, ppm: float = 0.0, index: int = 0, lag_s: float = 1e-6
    ) -> None:
        self.device, self.kind = torch.device("cuda", index), "fakegpu"
        self._room: Any = SimpleNamespace()  # what torch's module of that kind would have
        self.host, self.ppm, self.lag_s = host, ppm, lag_s
        self.free_s = 0.0  # when the stream has done all that it was given
        self.error = ""
        self.threads: set[str] = set()
        self.syncs = 0
        self._current = threading.local()

    # -- what a test does to it --------------------------------------------------------------------

    def run(self, seconds: float) -> None:
        """Enqueue work."""
        self._check()
        self.free_s = max(self.free_s, self.host.now_s) + seconds

    def wait_for(self, at_s: float) -> None:
        """Have the stream wait until then, as NCCL's `wait()` does; the host goes on."""
        self.free_s = max(self.free_s, at_s)

    def hang(self) -> None:
        """Never come to an end of what was enqueued."""
        self.free_s = math.inf

    def fail(self, words: str = "device-side assert triggered") -> None:
        """Raise in every call from now on."""
        self.error = words

    # -- an accelerator ----------------------------------------------------------------------------

    def _check(self) -> None:
        if self.error:
            raise RuntimeError(f"CUDA error: {self.error}\nCompile with TORCH_USE_CUDA_DSA")

    def is_current(self) -> bool:
        """Whether this thread computes on the device."""
        return bool(getattr(self._current, "depth", 0))

    def make_current(self) -> None:
        """Have this thread compute here from now on."""
        self._current.depth = 1

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Compute on the device within."""
        self._current.depth = getattr(self._current, "depth", 0) + 1
        try:
            yield
        finally:
            self._current.depth -= 1

    def current_stream(self) -> Any:
        """Return the only stream there is."""
        return self

    def side_stream(self) -> Any:
        """Return the only stream there is."""
        return self

    def event(self, *, timed: bool = True) -> Event:
        """Return one of the product's events, whose waits take simulated time."""
        return _Event(self, timed)

    def raw_event(self, *, timed: bool) -> Any:
        """Return what a `torch.Event` would be."""
        return RawEvent(self, timed)

    def synchronize(self) -> None:
        """Let the host wait for all work."""
        self._check()
        self.syncs += 1
        self.host.go_to(self.free_s)

    def synchronize_stream(self) -> None:
        """Let the host wait for the stream."""
        self.synchronize()

    @property
    def name(self) -> str:
        """What it is called."""
        return "Fake"

    def is_in_use(self) -> bool:
        """Return True."""
        return True


class RawEvent:
    """What lies below an event; refuses threads that compute elsewhere."""

    def __init__(self, device: FakeAccelerator, timed: bool) -> None:
        self._device, self._timed, self.at_s = device, timed, math.nan

    def _asked(self) -> None:
        device, name = self._device, threading.current_thread().name
        assert device.is_current(), f"thread {name} would make a context on the first GPU"
        device.threads.add(name)
        device._check()

    def record(self, stream: FakeAccelerator) -> None:
        """Stand at the end of the stream."""
        self._asked()
        assert stream is self._device, "recorded on another stream"
        self.at_s = max(stream.free_s, stream.host.now_s + LAUNCH_S)

    def query(self) -> bool:
        """Whether the device has passed it; asking takes time."""
        self._asked()
        self._device.host.go(self._device.lag_s)
        return self._device.host.now_s >= self.at_s

    def synchronize(self) -> None:
        """Let the host wait for it."""
        self._asked()
        self._device.host.go_to(self.at_s)

    def elapsed_time(self, later: RawEvent) -> float:
        """Return the milliseconds that the device's oscillator counts from here to there."""
        self._asked()
        assert self._timed
        assert later._timed
        now_s = self._device.host.now_s
        if not (self.at_s <= now_s and later.at_s <= now_s):
            raise RuntimeError("CUDA error: device not ready")
        seconds = (later.at_s - self.at_s) * (1 + self._device.ppm * 1e-6)
        return float(np.float32(seconds * 1e3))


class _Event(Event):
    def wait(self, within_s: float | None = None) -> bool:
        """Wait in simulated time."""
        device = self._accelerator
        assert isinstance(device, FakeAccelerator)
        if within_s is None:
            return super().wait()
        if self._event.at_s > device.host.now_s + within_s:
            device.host.go(within_s)
            return False
        return super().wait()
