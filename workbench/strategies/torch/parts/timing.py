"""When a worker's gradients were ready, and how long it then stood waiting for the others.

The wall time of backward cannot name a straggler: everybody's backward ends when the slowest one's
does. Autograd's final callbacks can. One is queued when backward begins, before the one that DDP
queues to wait for its all-reduce, so it runs when this worker's own work is done:

    forward | backward . . . . . | A | DDP waits for the all-reduce | B | optimizer
                                 ready_s                            reduced

    compute = forward + backward + optimizer        exposed = B - A
    sync wait (`derive`) = latest A of all workers - own A

Where communication also happens earlier (layers gathered in forward, activations reduced between
layers, parameters averaged after the update), each stretch in which this worker stood blocked is
timed (`blocked`) and taken off: a worker's ready time is then read from the clock of its own work,
which stands still while it waits. A straggler is thus named wherever its delay fell.

    own work ready = A - what was blocked before A

On a CPU the callbacks read the clock. On CUDA they record events on the stream, which are read
once the device has passed them; nothing on the way waits for the device.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ....engine.contract import NAN
from ....engine.telemetry.recorder import StepResult

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.telemetry.step_gate import FaultInjector

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
        self._began = clock()
        self._ready = NAN
        self._exposed = self._injected = self._aside = 0.0

    def spend(self, phase: str) -> None:
        """Spend the injected delay of a phase."""
        if self._faults.active:
            self._injected += self._faults.spend(phase)

    def watch_backward(self, loss: torch.Tensor) -> Any:
        """Time the backward that `loss` is about to begin, which ends in communication.

        Returns:
            The hook, to be taken off when backward has ended.
        """
        return loss.register_hook(self.backward_begins)  # type: ignore[no-untyped-call]

    def backward_begins(self, *unused: Any) -> None:
        """Note, from within backward, that it is under way and ends in communication."""
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
        """Time a stretch in which this worker does nothing but communicate."""
        began = clock()
        try:
            yield
        finally:
            self._exposed += clock() - began

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out a stretch that is neither computation nor communication of the strategy's."""
        began = clock()
        try:
            yield
        finally:
            self._aside += clock() - began

    def ready(self) -> None:
        """Note that this worker's own part of the step, or of its gradients, is done."""
        self._ready = clock() - self._exposed

    def blind(self) -> None:
        """Say that communication cannot be seen: what it takes stays in the computation."""
        self._exposed_known = False

    def finish(
        self, samples: int, loss: torch.Tensor, sent_bytes: float, data_wait_s: float = 0.0
    ) -> StepResult:
        """Return what the step measured; call it after the optimizer's step.

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


class CudaTimer:
    """Times the steps of one worker on a CUDA device, by events on its stream."""

    def __init__(self, context: RunContext, device: torch.device) -> None:
        self._context, self._faults, self._device = context, context.faults, device
        self._exposed_known = True
        self._marks = _Marks()
        anchor = _event()
        torch.cuda.synchronize(device)
        self._last: _Fixed | CudaStep = _Fixed(anchor, clock())

    def begin(self) -> None:
        """Note that the step has its data."""
        self._marks = _Marks()
        self._marks.cpu_s = clock()
        self._marks.began = _event()

    def spend(self, phase: str) -> None:
        """Spend an injected delay; the device must be idle, or it would hide the delay."""
        if self._faults.active:
            torch.cuda.synchronize(self._device)
            self._marks.injected_s += self._faults.spend(phase)

    def watch_backward(self, loss: torch.Tensor) -> Any:
        """Time the backward that `loss` is about to begin, which ends in communication.

        Returns:
            The hook, to be taken off when backward has ended.
        """
        return loss.register_hook(self.backward_begins)  # type: ignore[no-untyped-call]

    def backward_begins(self, *unused: Any) -> None:
        """Note, from within backward, that it is under way and ends in communication."""
        _engine.queue_callback(self._own_work_done)
        self.spend("backward")

    def _own_work_done(self) -> None:
        self._marks.ready.append(_event())
        _engine.queue_callback(self._reduced)

    def _reduced(self) -> None:
        # DDP's callback has made this stream wait for the all-reduce: the event comes after it.
        self._marks.reduced.append(_event())

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """Time a stretch in which this worker's stream does nothing but communicate."""
        marks, began = self._marks, _event()
        try:
            yield
        finally:
            marks.blocked.append((began, _event()))

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Leave out a stretch that is neither computation nor communication of the strategy's."""
        marks, began = self._marks, _event()
        try:
            yield
        finally:
            marks.aside.append((began, _event()))

    def ready(self) -> None:
        """Note that this worker's own part of the step, or of its gradients, is done."""
        self._marks.done = _event(), len(self._marks.blocked)

    def blind(self) -> None:
        """Say that communication cannot be seen: what it takes stays in the computation."""
        self._exposed_known = False

    def finish(
        self, samples: int, loss: torch.Tensor, sent_bytes: float, data_wait_s: float = 0.0
    ) -> StepResult:
        """Return what is known already; the times follow once the device has passed the step."""
        marks = self._marks
        marks.loss = loss.to("cpu", non_blocking=True)  # into pinned memory: does not wait
        marks.ended = _event()
        marks.fetch_s, marks.late_fetch_s = self._context.fetch_s, data_wait_s
        marks.exposed_known = self._exposed_known
        step = CudaStep(marks, self._last, self._faults)
        self._last = step
        return StepResult(
            samples, NAN, NAN, exposed_s=NAN, sent_bytes=sent_bytes, deferred=step,
            has_loss=samples > 0,
        )  # fmt: skip


class _Marks:
    """Events of one step."""

    def __init__(self) -> None:
        self.cpu_s = self.fetch_s = self.late_fetch_s = self.injected_s = 0.0
        self.exposed_known = True
        self.began: Any = None
        self.ready: list[Any] = []
        self.reduced: list[Any] = []
        self.blocked: list[tuple[Any, Any]] = []
        self.aside: list[tuple[Any, Any]] = []
        self.done: tuple[Any, int] | None = None  # own part done, stretches blocked before it
        self.ended: Any = None
        self.loss: Any = None


class _Fixed:
    """An event whose time on the host's clock is known: the run's anchor."""

    def __init__(self, event: Any, at_s: float) -> None:
        self.ended, self._at_s = event, at_s

    def end_s(self) -> float:
        return self._at_s


class CudaStep:
    """One step's record, completed when its events have passed (`recorder.Deferred`).

    Steps are chained: each one's times are the previous one's end plus what the device measured,
    which keeps the error of the event clock (it counts single-precision milliseconds) small.
    """

    def __init__(self, marks: _Marks, previous: Any, faults: FaultInjector) -> None:
        self.ended = marks.ended
        self._faults = faults
        self._marks: _Marks | None = marks
        self._previous: Any = previous
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}

    def ready(self) -> bool:
        """Whether the device has passed the step."""
        return bool(self._values) or bool(self.ended.query())

    def end_s(self) -> float:
        """Return when the device ended the step, on the host's clock."""
        return self.values()["end_s"]

    def values(self) -> dict[str, float]:
        """Return the fields of the record, waiting for the device when it must."""
        with self._lock:
            if not self._values:
                self._values = self._measure()
                self._marks = self._previous = None
            return self._values

    def _measure(self) -> dict[str, float]:
        marks = self._marks
        assert marks is not None
        self.ended.synchronize()
        origin = self._previous
        base_s = origin.end_s()

        def at(event: Any) -> float:
            return float(base_s + origin.ended.elapsed_time(event) * 1e-3)

        began_s, end_s = at(marks.began), at(marks.ended)
        # The host may run ahead of the device: a step begins there when the previous one ends.
        start_s = min(max(base_s, marks.cpu_s - marks.fetch_s), began_s)
        reduced_s = [at(b) - at(a) for a, b in zip(marks.ready, marks.reduced, strict=True)]
        blocked_s = [at(b) - at(a) for a, b in marks.blocked]
        exposed_s = sum(reduced_s) + sum(blocked_s)
        ready_s = at(marks.ready[-1]) - sum(reduced_s[:-1]) if marks.ready else NAN
        if marks.done is not None:
            event, before = marks.done
            ready_s = at(event) - sum(blocked_s[:before])
        # Fetching counts as far as the device had nothing to do meanwhile.
        data_wait_s = min(marks.fetch_s, began_s - start_s) + marks.late_fetch_s
        aside_s = sum(at(b) - at(a) for a, b in marks.aside)
        compute_s = end_s - began_s - exposed_s - aside_s - marks.late_fetch_s
        self._faults.compute_s = compute_s - marks.injected_s
        return {
            "start_s": start_s + aside_s,
            "end_s": end_s,
            "ready_s": ready_s,
            "data_wait_s": data_wait_s,
            "compute_s": compute_s,
            "exposed_s": exposed_s if marks.exposed_known else NAN,
            "local_loss": float(marks.loss),
        }


def _event() -> Any:
    event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def make_timer(context: RunContext, device: torch.device) -> CpuTimer | CudaTimer:
    """Return the timer for a device."""
    return CudaTimer(context, device) if device.type == "cuda" else CpuTimer(context)
