"""Measures when a worker's gradients were ready, and how long it then waited for the others.

The wall time of backward cannot name a straggler, because backward ends on all workers when it ends
on the slowest. Autograd's final callbacks can name it. A callback is queued when backward begins,
before the callback in which DDP waits for its all-reduce. So it runs when this worker's own
computation is done:

    forward | backward . . . . . | A | DDP waits for the all-reduce | B | optimizer
                                 ready_s                            reduced

    compute = forward + backward + optimizer        exposed = B - A
    sync wait (`derive`) = latest A of all workers - own A

Communication can also happen earlier: layers are gathered in forward, activations are reduced
between layers, parameters are averaged after the update. Then each period in which this worker was
blocked is timed (`blocked`) and subtracted. The ready time is then read from a clock of the
worker's computation, which stops while the worker waits. So a straggler is found wherever its delay
was.

    own work ready = A - time blocked before A

On a CPU the callbacks read the clock. On an accelerator they record events on the stream, which are
read after the device has passed them; until then nothing waits for the device.

An accelerator counts time with its own oscillator, which is 10 to 100 parts per million faster or
slower than the host's: up to 360 ms in an hour. So the times of each step are converted to the
host's clock (`DeviceClock`). The sync wait compares workers to the microsecond, so it is computed
from durations only (`record.FLAG_DEVICE_CLOCK`).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ....engine.contract import NAN
from ....engine.debugging import stacks
from ....engine.debugging.stacks import DeviceWork
from ....engine.telemetry.recorder import StepResult
from ....engine.torch import accelerator as accelerators

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.torch.accelerator import Accelerator, Event

clock = time.perf_counter
_engine: Any = torch.autograd.Variable._execution_engine


class CpuTimer:
    """Times the steps of one worker on a CPU."""

    def __init__(self, context: RunContext) -> None:
        self._faults = context.faults
        self._began = self._ready = self._blocked_at = NAN
        self._exposed = self._injected = self._aside = 0.0
        self._exposed_known = True

    def begin(self) -> None:
        """Note that the step has its data."""
        self.begin_at(clock())

    def begin_at(self, at_s: float) -> None:
        """Note that the step had its data at this time."""
        self._began, self._ready = at_s, NAN
        self._exposed = self._injected = self._aside = 0.0

    def spend(self, phase: str) -> None:
        """Wait for the injected delay of a phase."""
        if self._faults.active:
            self._injected += self._faults.spend(phase)

    def watch_backward(self, loss: torch.Tensor) -> Any:
        """Time the backward that begins from `loss` and ends in communication.

        Returns:
            The hook, to be removed when backward has ended.
        """
        return loss.register_hook(self.backward_begins)  # type: ignore[no-untyped-call]

    def backward_begins(self, *unused: Any) -> None:
        """Note, from within backward, that backward is running and ends in communication."""
        _engine.queue_callback(self._own_work_done)
        self.spend("backward")

    def _own_work_done(self) -> None:
        self._blocked_at = clock()
        self._ready = self._blocked_at - self._exposed
        _engine.queue_callback(self._reduced)

    def _reduced(self) -> None:
        self._exposed += clock() - self._blocked_at

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Time a period in which this worker only communicates."""
        began = clock()
        try:
            yield
        finally:
            self._exposed += clock() - began

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out a period that is neither the strategy's computation nor its communication."""
        began = clock()
        try:
            yield
        finally:
            self._aside += clock() - began

    def ready(self) -> None:
        """Note that this worker's own part of the step, or of its gradients, is done."""
        self._ready = clock() - self._exposed

    def blind(self) -> None:
        """Note that communication cannot be measured: its time stays in the computation."""
        self._exposed_known = False

    def finish(
        self, samples: int, loss: torch.Tensor, sent_bytes: float, data_wait_s: float = 0.0
    ) -> StepResult:
        """Return the step's measurements; call it after the optimizer's step.

        Args:
            loss: The worker's mean loss, detached.
            data_wait_s: Time spent since `begin` in fetching more data.
        """
        value = loss.item()
        compute_s = clock() - self._began - self._exposed - self._aside - data_wait_s
        self._faults.compute_s = compute_s - self._injected
        exposed_s = self._exposed if self._exposed_known else NAN
        return StepResult(
            samples, value, compute_s, self._ready, exposed_s, sent_bytes=sent_bytes,
            aside_s=self._aside,
            has_loss=samples > 0,
        )  # fmt: skip


ANCHOR_EVERY_S = 1.0
"""How often a device's clock is read again, if the device is idle at this moment."""

ANCHOR_WITHIN_S = 1e-3
"""An idle device passes an event in about 10 µs. If it takes this long, it was not idle."""


class DeviceTimer:
    """Times the steps of one worker on an accelerator, by events on its stream.

    Args:
        now: The host's clock.
    """

    def __init__(
        self, context: RunContext, device: Accelerator, now: Callable[[], float] = clock
    ) -> None:
        self._context, self._faults, self._device = context, context.faults, device
        self._now = now
        self._exposed_known = True
        self.steps = OpenSteps(context, device, now)
        self._marks = Marks()
        self._last: DeviceStep | None = None
        self._anchored_s = now()
        context.settle = self._faults.settle = device.synchronize
        context.closers.append(stacks.ask_device(self.steps.under_way))

    def begin(self) -> None:
        """Note that the step has its data."""
        self._marks = self.steps.marks = marks = Marks()
        marks.step, marks.cpu_s = self._context.step, self._now()
        if marks.cpu_s - self._anchored_s >= ANCHOR_EVERY_S:
            self._anchor(marks)
        marks.began = self._device.event()

    def _anchor(self, marks: Marks) -> None:
        """Read the device's clock while the device is idle, which takes about 10 µs."""
        if self._last is not None and not self._last.ready():
            return
        before_s, event = self._now(), self._device.event()
        while not event.query():
            if self._now() - before_s > ANCHOR_WITHIN_S:
                return
        after_s = self._now()
        marks.anchor = event, (before_s + after_s) / 2
        marks.cpu_s = self._anchored_s = after_s

    def spend(self, phase: str) -> None:
        """Wait for an injected delay, after the device has finished its work."""
        if self._faults.active:
            self._marks.injected_s += self._faults.spend(phase)

    def watch_backward(self, loss: torch.Tensor) -> Any:
        """Time the backward that begins from `loss` and ends in communication.

        Returns:
            The hook, to be removed when backward has ended.
        """
        return loss.register_hook(self.backward_begins)  # type: ignore[no-untyped-call]

    def backward_begins(self, *unused: Any) -> None:
        """Note, from within backward, that backward is running and ends in communication."""
        _engine.queue_callback(self.own_work_done)
        self.spend("backward")

    def own_work_done(self) -> None:
        """Note that this worker's gradients are ready; what follows is communication."""
        marks = self._marks
        marks.ready.append((self._device.event(), len(marks.blocked)))
        _engine.queue_callback(self.reduced)

    def reduced(self) -> None:
        """Note that the gradients are averaged."""
        # DDP's callback has made this stream wait for the all-reduce: the event comes after it.
        self._marks.reduced.append(self._device.event())

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Time a period in which this worker's stream only communicates."""
        stretch = self.block()
        try:
            yield
        finally:
            stretch.ended = self._device.event()

    def block(self) -> Stretch:
        """Begin a period of communication; the caller ends it."""
        stretch = Stretch(self._device.event())
        self._marks.blocked.append(stretch)
        return stretch

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out a period that is neither the strategy's computation nor its communication."""
        stretch = Stretch(self._device.event())
        self._marks.aside.append(stretch)
        try:
            yield
        finally:
            stretch.ended = self._device.event()

    def ready(self) -> None:
        """Note that this worker's own part of the step, or of its gradients, is done."""
        self._marks.done = self._device.event(), len(self._marks.blocked)

    def blind(self) -> None:
        """Note that communication cannot be measured: its time stays in the computation."""
        self._exposed_known = False

    def finish(
        self,
        samples: int,
        loss: torch.Tensor | None,
        sent_bytes: float,
        data_wait_s: float = 0.0,
        *,
        complete: Callable[[Timed], dict[str, float]] | None = None,
    ) -> StepResult:
        """Return the known measurements; the times follow after the device has passed the step.

        Args:
            loss: The worker's mean loss, detached; None if it computes none.
            complete: Called with the times, to add fields to them or to change them.
        """
        marks = self._marks
        if loss is not None:
            marks.loss = loss.to("cpu", non_blocking=True)  # into pinned memory: does not wait
        marks.recorded_s = self._now()
        marks.ended = self._device.event()
        marks.fetch_s, marks.late_fetch_s = self._context.fetch_s, data_wait_s
        marks.exposed_known, marks.complete = self._exposed_known, complete
        step = self._last = self.steps.add(marks)
        has_loss = samples > 0 and loss is not None
        return StepResult(
            samples, NAN, NAN, exposed_s=NAN, sent_bytes=sent_bytes, deferred=step,
            has_loss=has_loss, device_clock=True,
        )  # fmt: skip


class Stretch:
    """Two events of a stream; the second can come later."""

    __slots__ = ("began", "ended")

    def __init__(self, began: Event) -> None:
        self.began, self.ended = began, None

    began: Event
    ended: Event | None


class Marks:
    """Events of one step."""

    def __init__(self) -> None:
        self.step = 0
        self.cpu_s = self.fetch_s = self.late_fetch_s = self.injected_s = self.recorded_s = 0.0
        self.exposed_known = True
        self.anchor: tuple[Event, float] | None = None  # and its time on the host's clock
        self.began: Event | None = None
        self.ready: list[tuple[Event, int]] = []  # and the number of blocked periods before it
        self.reduced: list[Event] = []
        self.blocked: list[Stretch] = []
        self.aside: list[Stretch] = []
        # own part done, number of blocked periods before it
        self.done: tuple[Event, int] | None = None
        self.ended: Event | None = None
        self.loss: torch.Tensor | None = None
        self.complete: Callable[[Timed], dict[str, float]] | None = None

    def communicates(self) -> bool:
        """Whether the device is communicating at this moment."""
        ready = [event for event, _ in self.ready]
        stretches = [(one.began, one.ended) for one in self.blocked]
        stretches += zip(ready, [*self.reduced, *[None] * len(ready)], strict=False)
        return any(a.query() and (b is None or not b.query()) for a, b in stretches)


class Timed:
    """The times of a step's events, on the host's clock.

    Attributes:
        fields: The known fields of the record.
    """

    def __init__(self, at: Callable[[Event], float], marks: Marks) -> None:
        self.at, self.marks = at, marks
        self.fields: dict[str, float] = {}

    def seconds(self, stretch: Stretch) -> float:
        """Return how long a period took."""
        assert stretch.ended is not None
        return self.at(stretch.ended) - self.at(stretch.began)


class DeviceStep:
    """One step's record, completed when its events have passed (`recorder.Deferred`)."""

    def __init__(self, steps: OpenSteps, marks: Marks, ended: Event) -> None:
        self._steps, self.ended = steps, ended
        self.marks: Marks | None = marks
        self.open_s = marks.recorded_s  # when the host last saw that the device had not finished
        self.seen_s: float | None = None  # when the host first saw that it had finished
        self.known: dict[str, float] = {}

    def ready(self) -> bool:
        """Whether the device has passed the step; raises the device's error."""
        if self.known:
            return True
        if self.seen_s is None:
            asked_s = self._steps.now()
            if self.ended.query():
                self.seen_s = self._steps.now()
            else:
                self.open_s = asked_s
        return self.seen_s is not None

    def values(self) -> dict[str, float]:
        """Return the fields of the record, waiting for the device when it must."""
        if not self.known:
            self._steps.resolve(self)
        return self.known


class OpenSteps:
    """The steps that the device has not yet passed, oldest first; and the device's clock.

    A step's times are the end of the step before plus the time that the device has counted since.
    The device counts in single-precision milliseconds, with its own oscillator, so errors stay
    small only over one step. The host's observations limit the error. A step ends after its last
    event was recorded and after the host saw it unfinished, and before the host saw it finished.
    About once a second the device's clock is read while the device is idle, which is accurate to
    about 10 µs.

    Attributes:
        marks: The marks of the current step.
        now: The host's clock.
    """

    def __init__(self, context: RunContext, device: Accelerator, now: Callable[[], float]) -> None:
        self._faults, self._device, self.now = context.faults, device, now
        self.marks: Marks | None = None
        self._lock = threading.Lock()
        self._open: deque[DeviceStep] = deque()
        device.synchronize()
        before_s = now()
        self._origin = device.event()
        self._origin.wait()
        self._origin_s = (before_s + now()) / 2

    def add(self, marks: Marks) -> DeviceStep:
        """Take a step whose events are all recorded."""
        assert marks.ended is not None
        step = DeviceStep(self, marks, marks.ended)
        self._open.append(step)
        return step

    def resolve(self, last: DeviceStep) -> None:
        """Complete all steps up to `last`, waiting for the device when it must."""
        # a waiting thread must not block others from the finished steps
        for step in list(self._open):
            if step is last or last.known:
                break
            step.ended.wait()
        last.ended.wait()
        with self._lock:
            while not last.known:
                step = self._open[0]
                step.known = self._measure(step)
                step.marks = None
                self._open.popleft()

    def under_way(self) -> DeviceWork | None:
        """Return the device's current work, if the host is ahead of it; called by any thread."""
        open_steps = list(self._open)
        marks = next((one.marks for one in open_steps if not one.ready()), self.marks)
        if marks is None or (marks.ended is not None and marks.ended.query()):
            return None
        if marks.communicates():
            return DeviceWork(True, f"in the communication of step {marks.step}, on the device")
        if marks.ended is None and all(event.query() for event, _ in marks.ready):
            return None  # the host is still issuing this step, and the device may be idle
        return DeviceWork(False, f"step {marks.step}, on the device")

    def _measure(self, step: DeviceStep) -> dict[str, float]:
        marks = step.marks
        assert marks is not None
        assert marks.began is not None
        previous_s = self._origin_s
        if marks.anchor is not None:
            self._origin, self._origin_s = marks.anchor
        origin, ended = self._origin, step.ended
        counted_s = self._origin_s + origin.seconds_to(ended)
        latest_s = self.now() if step.seen_s is None else step.seen_s
        end_s = min(max(counted_s, step.open_s), latest_s)
        base_s = self._origin_s + (end_s - counted_s)

        def at(event: Event) -> float:
            return base_s + origin.seconds_to(event)

        timed = Timed(at, marks)
        timed.fields = fields = self._fields(timed, previous_s, end_s)
        if marks.complete is not None:
            fields |= marks.complete(timed)
        self._faults.compute_s = fields["compute_s"] - marks.injected_s
        self._origin, self._origin_s = ended, end_s
        return fields

    @staticmethod
    def _fields(timed: Timed, previous_s: float, end_s: float) -> dict[str, float]:
        at, marks = timed.at, timed.marks
        assert marks.began is not None
        began_s = at(marks.began)
        # The host can run ahead of the device: on the device a step begins when the step before
        # ends.
        start_s = min(max(previous_s, marks.cpu_s - marks.fetch_s), began_s)
        ready = [event for event, _ in marks.ready]
        reduced_s = [at(b) - at(a) for a, b in zip(ready, marks.reduced, strict=True)]
        blocked_s = [timed.seconds(one) for one in marks.blocked]
        exposed_s = sum(reduced_s) + sum(blocked_s)
        ready_s = NAN
        if marks.ready:
            event, before = marks.ready[-1]
            ready_s = at(event) - sum(reduced_s[:-1]) - sum(blocked_s[:before])
        if marks.done is not None:
            event, before = marks.done
            ready_s = at(event) - sum(blocked_s[:before])
        aside_s = sum(timed.seconds(one) for one in marks.aside)
        # Fetching counts only for the time in which the device was idle.
        data_wait_s = min(marks.fetch_s, began_s - start_s) + marks.late_fetch_s
        compute_s = end_s - began_s - exposed_s - aside_s - marks.late_fetch_s
        return {
            "start_s": start_s + aside_s,
            "end_s": end_s,
            "ready_s": ready_s,
            "data_wait_s": data_wait_s,
            "compute_s": compute_s,
            "exposed_s": exposed_s if marks.exposed_known else NAN,
            "local_loss": NAN if marks.loss is None else float(marks.loss),
        }


def make_timer(context: RunContext, device: torch.device) -> CpuTimer | DeviceTimer:
    """Return the timer for a device."""
    if device.type == "cpu":
        return CpuTimer(context)
    return DeviceTimer(context, accelerators.of(device))
