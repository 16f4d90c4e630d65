"""A stage of a pipeline: its layers as one module, with timed computation.

A stage's messages are sent while it computes, and carry the sender's clock.

    the schedule asks for a message            here, with gloo

    receiver  |work|ask.......|work            ask|work     |work
    sender    |work|offer.....|work            |work|send|work

Gloo sends a message only after its receiver has requested it. PyTorch's schedules request a message
when they need it, so receiver and sender both wait while it is sent. Here all receives of a step
are posted before the step begins. A worker waits for its sends only at the end of the step. A tag
identifies each message. NCCL orders messages by its streams, so with NCCL PyTorch's way is used.

On CUDA devices without NCCL, messages go through the host's memory.

The measurements show when a worker's stages computed, were idle, and waited for a message:

    this worker      |F0 |    |F1 |          |B0 |
    its neighbour    ......|sent F1    ......|sent B0
                          idle^^transfer

Between two computations there is a gap. The sender's clock is sent with each message, so the gap
can be divided into idle time (the message had not been sent yet: the bubble) and transfer (the
message was being sent). All processes of a host read one clock; across hosts the gap is not
divided.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ....engine.contract import NAN
from ....engine.debugging.marks import RECEIVE, waits_in
from ....engine.telemetry.recorder import StepResult
from ....engine.torch import accelerator as accelerators
from ....engine.torch.group import backend_of
from ....errors import FitError
from ..parts.replica import PRECISIONS
from ..parts.timing import DeviceTimer

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.telemetry.step_gate import FaultInjector
    from ....engine.torch.accelerator import Accelerator
    from ..parts.timing import Stretch, Timed
    from .measure import Form


class Stage(torch.nn.Module):
    """Consecutive layers as one module.

    Args:
        layers: Each takes the values of the layer before.
        around: Context of the forward pass (autocast).
        first: Whether the model's input enters here.
        last: Whether the model's output leaves here.
    """

    def __init__(
        self, layers: Sequence[torch.nn.Module], around: Any, *, first: bool, last: bool
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self._around, self._first, self._last = around, first, last

    def forward(self, *values: Any) -> Any:
        """Run the layers on one microbatch."""
        if not self._first and torch.is_grad_enabled():
            # A received tensor is a leaf of the graph, which layers cannot change in place.
            values = tuple(value.clone() for value in values)
        with self._around():
            for layer in self.layers:
                result = layer(*values)
                values = result if isinstance(result, tuple) else (result,)
        if not self._last and torch.is_grad_enabled():
            # The next stage sends a gradient for every floating value, even if no earlier layer
            # learns (a stage with only Flatten).
            values = tuple(value.contiguous() for value in values)  # as they are sent
            for value in values:
                if value.is_floating_point() and not value.requires_grad:
                    value.requires_grad_()
        return values if len(values) > 1 else values[0]


def autocast(precision: str | None, device: torch.device) -> Callable[[], Any]:
    """Return the context of the forward pass.

    Raises:
        FitError: The precision is fp16: the stages would have to agree on its loss scaling.
    """
    if precision is None:
        return contextlib.nullcontext
    if precision == "fp16":
        raise FitError(
            "`precision` cannot be 'fp16' in a pipeline: 'fp16' needs a scaled loss, but a "
            "pipeline does not scale the loss.",
            seen=precision,
            allowed="None or 'bf16'",
            next_step="use precision='bf16'",
            code="WB-FIT-147",
        )
    return lambda: torch.autocast(device.type, dtype=PRECISIONS[precision])


class TimedStage(PipelineStage):
    """A pipeline stage that is timed, with its messages handled by `Mail`."""

    def __init__(
        self,
        module: Stage,
        index: int,
        count: int,
        device: torch.device,
        forms: tuple[Sequence[Form], Sequence[Form]],
        timeline: Timeline,
        group: Any = None,
    ) -> None:
        super().__init__(
            module, index, count, device,
            input_args=tuple(form.example() for form in forms[0]),
            output_args=tuple(form.example() for form in forms[1]),
            group=group,
        )  # fmt: skip
        self.timeline = timeline
        asks = {"F": super().get_fwd_recv_ops, "B": super().get_bwd_recv_ops}
        self.mail = Mail(asks, timeline, index, count, device, group)

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute a microbatch's forward."""
        self.timeline.work("forward", self.mail.arrived("F", fwd_chunk_id))
        output = super().forward_one_chunk(fwd_chunk_id, *args, **given)
        self.timeline.rest()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute a microbatch's backward, or only the half for which other workers wait."""
        self.timeline.work("backward", self.mail.arrived("B", bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, **given)
        self.timeline.rest()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute the other half: the gradients of the weights."""
        self.timeline.work("backward", None)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **given)
        self.timeline.rest()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the remaining operations to receive a microbatch's activations."""
        return self.mail.receive("F", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the remaining operations to receive a microbatch's gradients."""
        return self.mail.receive("B", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the remaining operations to send a microbatch's activations."""
        return self.mail.send("F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the remaining operations to send a microbatch's gradients."""
        return self.mail.send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))


MOST_CHUNKS = 1 << 14
Way = Literal["F", "B"]
"""The kinds: forward sends activations to the next stage, backward sends gradients back."""

Ops = list[dist.P2POp]
clock = time.perf_counter


@dataclass
class Sent:
    """A message that is being sent, and its memory."""

    work: Any
    tensor: torch.Tensor

    @waits_in(RECEIVE)
    def wait(self) -> None:
        """Block until the message has been received or sent."""
        self.work.wait()


class Mail:
    """One stage's messages.

    Args:
        asks: For each direction, torch's operation that receives a microbatch's message.
        stage: Number of the stage, of `count`.

    Attributes:
        sent_bytes: The bytes that were sent, without time stamps.
    """

    def __init__(
        self,
        asks: Mapping[str, Callable[[int], Ops]],
        timeline: Timeline,
        stage: int,
        count: int,
        device: torch.device,
        group: Any,
    ) -> None:
        self.sent_bytes = 0
        self._asks, self._timeline, self._stage = asks, timeline, stage
        backend = backend_of(group, device)
        self._ahead = backend == "gloo"
        self._through_host = device.type != "cpu" and backend == "gloo"
        self._stamps: dict[tuple[str, int], torch.Tensor] = {}
        self._landed: dict[tuple[Way, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        self._asked: list[tuple[Way, int]] = []
        self._coming: dict[tuple[Way, int], list[Sent]] = {}
        self._leaving: deque[Sent] = deque()
        self._most_leaving = 4 * (count + 1)

    def expect(self) -> None:
        """Post all receives of a step before it begins; they are known from the first step."""
        for way, chunk in self._asked:
            self._post(way, chunk)

    @waits_in(RECEIVE)
    def settle(self) -> None:
        """Wait until all sends have finished."""
        while self._leaving:
            self._leaving.popleft().wait()

    @waits_in(RECEIVE)
    def receive(self, way: Way, chunk: int) -> Ops:
        """Prepare the receive of a message; return the operations that remain for the schedule."""
        if not self._ahead:
            return self._receive_ops(way, chunk)
        if (way, chunk) not in self._coming:  # the first step
            self._asked.append((way, chunk))
            self._post(way, chunk)
        return []

    @waits_in(RECEIVE)
    def send(self, way: Way, chunk: int, ops: Ops) -> Ops:
        """Prepare the send of a message; return the operations that remain for the schedule."""
        self.sent_bytes += sum(op.tensor.nbytes for op in ops)
        ops = [
            op if op.tensor.is_contiguous() else _moved(op, op.tensor.contiguous()) for op in ops
        ]
        if self._through_host:
            ops = [_moved(op, op.tensor.cpu()) for op in ops]
        if ops and self._timeline.stamped:
            ops.append(_moved(ops[0], self._stamp(f"{way} sent", chunk).fill_(clock())))
        if ops:
            self._timeline.travel(sum(op.tensor.nbytes for op in ops))
        if not self._ahead:
            return ops
        receiver = self._stage + (1 if way == "F" else -1)
        self._leaving += [_begin(op, _tag(receiver, way, chunk)) for op in ops]
        while len(self._leaving) > self._most_leaving:  # messages that are being sent hold memory
            self._leaving.popleft().wait()
        return []

    @waits_in(RECEIVE)
    def arrived(self, way: Way, chunk: int) -> float | None:
        """Wait for a message, copy it to the device; return when it was sent."""
        for message in self._coming.pop((way, chunk), ()):
            message.wait()
        for host, buffer in self._landed.pop((way, chunk), ()):
            with torch.no_grad():
                buffer.copy_(host)
        stamp = self._stamps.get((way, chunk))
        return None if stamp is None else float(stamp)

    def _post(self, way: Way, chunk: int) -> None:
        tag = _tag(self._stage, way, chunk)
        self._coming[way, chunk] = [_begin(op, tag) for op in self._receive_ops(way, chunk)]

    def _receive_ops(self, way: Way, chunk: int) -> Ops:
        ops = self._asks[way](chunk)
        if self._through_host and ops:
            landed = [(torch.empty_like(op.tensor, device="cpu"), op.tensor) for op in ops]
            self._landed[way, chunk] = landed
            ops = [_moved(op, host) for op, (host, _) in zip(ops, landed, strict=True)]
        if ops and self._timeline.stamped:
            ops.append(_moved(ops[0], self._stamp(way, chunk)))
        return ops

    def _stamp(self, kind: str, chunk: int) -> torch.Tensor:
        if (kind, chunk) not in self._stamps:
            self._stamps[kind, chunk] = torch.zeros(1, dtype=torch.float64)
        return self._stamps[kind, chunk]


def _tag(receiver: int, way: Way, chunk: int) -> int:
    """Return the number by which a receive finds its message, independent of their order."""
    return 1 + (2 * receiver + (way == "B")) * MOST_CHUNKS + chunk


def _begin(op: dist.P2POp, tag: int) -> Sent:
    """Send or receive, without waiting."""
    return Sent(op.op(op.tensor, op.peer, op.group, tag), op.tensor)


def _moved(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    """Return the same operation for another tensor."""
    return dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)


@dataclass
class Spent:
    """Seconds of one step of one worker.

    Attributes:
        busy_s: Forward, backward, loss.
        idle_s: Waiting for a message that was not sent yet; NaN if clocks differ.
        blocked_s: All gaps: idle, transfer and the schedule's own overhead.
    """

    busy_s: float = 0.0
    idle_s: float = 0.0
    blocked_s: float = 0.0


class Timeline:
    """The timeline of one worker's stages in a step, gap by gap.

    Args:
        stamped: Whether messages carry the sender's clock, and the clocks can be compared.
        ends_together: Whether all workers meet at the end of a step. If so, the worker with the
            most computation is to blame for the others' wait.
    """

    def __init__(
        self, faults: FaultInjector, *, stamped: bool, ends_together: bool = False
    ) -> None:
        self.stamped, self._ends_together = stamped, ends_together
        self._faults = faults
        self._opened = self._last = 0.0
        self._delayed: set[str] = set()
        self._injected_s = 0.0
        self.spent = Spent()

    def open(self) -> None:
        """A step begins."""
        self._opened = clock()

    def begin(self) -> None:
        """The schedule begins."""
        self._last = clock()
        self._delayed.clear()
        self._injected_s = 0.0
        self.spent = Spent(idle_s=0.0 if self.stamped else NAN)

    def work(self, phase: str, sent_s: float | None) -> None:
        """A computation begins; since the last one there was a gap.

        Args:
            phase: `forward` or `backward`; its injected delay is added in its first computation.
            sent_s: When the needed message was sent; None if no message was needed.
        """
        now = clock()
        gap = now - self._last
        self.spent.blocked_s += gap
        if sent_s is not None and self.stamped:
            self.spent.idle_s += min(max(sent_s - self._last, 0.0), gap)
        self._last = now
        self._delay(phase)

    def _delay(self, phase: str) -> None:
        if self._faults.active and phase not in self._delayed:
            self._delayed.add(phase)
            self._injected_s += self._faults.spend(phase)

    def travel(self, size_bytes: int) -> None:
        """Delay a message for as long as the simulated link would take.

        The message already has its time stamp.
        """
        if self._faults.on_links:
            self._faults.travel(size_bytes)

    def rest(self) -> None:
        """Work ends."""
        now = clock()
        self.spent.busy_s += now - self._last
        self._last = now

    def end(self) -> None:
        """The schedule is done; after the last computation there was only sending."""
        self.spent.blocked_s += clock() - self._last

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """In this block the worker exchanges messages with other workers."""
        came_s = clock()
        yield
        self.spent.blocked_s += clock() - came_s

    def came(self) -> float:
        """This worker has reached the point where all meet; return the time."""
        return clock()

    def met(self, came_s: float, last_s: float) -> None:
        """All workers met in a collective: this worker came at `came_s`, the last at `last_s`."""
        self.spent.blocked_s += clock() - came_s
        self.spent.idle_s += last_s - came_s  # NaN stays NaN

    def finish(self, samples: int, loss: torch.Tensor | None, sent_bytes: float) -> StepResult:
        """Return the step's measurements; call it last.

        Args:
            loss: None if it is not computed here.
        """
        value = NAN if loss is None else float(loss)
        spent, now = self.spent, clock()
        compute_s = now - self._opened - spent.blocked_s
        self._faults.compute_s = compute_s - self._injected_s
        return StepResult(
            samples,
            value,
            compute_s,
            ready_s=now - spent.blocked_s if self._ends_together else NAN,
            exposed_s=spent.blocked_s,
            wait_s=spent.idle_s,
            sent_bytes=sent_bytes,
            bubble_s=spent.blocked_s,
            has_loss=loss is not None,
        )


class DeviceTimeline(Timeline):
    """The same on an accelerator, by events on the stream that computes.

    A message over the device's own backend stops the stream, but not the host, which runs ahead. So
    events mark the beginning and the end of each gap. They are read after the device has passed the
    step. Nothing waits for the device, and sending continues during the computation.
    """

    def __init__(
        self,
        faults: FaultInjector,
        timer: DeviceTimer,
        device: Accelerator,
        *,
        stamped: bool,
        ends_together: bool = False,
    ) -> None:
        super().__init__(faults, stamped=stamped, ends_together=ends_together)
        self._timer, self._device = timer, device
        self._gap: Stretch | None = None
        self._gaps: list[tuple[Stretch, float]] = []  # and when the message was sent
        self._idle_s = 0.0

    def open(self) -> None:
        """A step begins."""
        self._timer.begin()
        self._gaps, self._idle_s = [], 0.0

    def begin(self) -> None:
        """The schedule begins."""
        self._delayed.clear()
        self._gap = self._timer.block()

    def work(self, phase: str, sent_s: float | None) -> None:
        """A computation begins; since the last one there was a gap."""
        gap = self._close()
        if sent_s is not None and self.stamped and gap is not None:
            self._gaps.append((gap, sent_s))
        self._delay(phase)

    def _delay(self, phase: str) -> None:
        if self._faults.active and phase not in self._delayed:
            self._delayed.add(phase)
            self._timer.spend(phase)

    def _close(self) -> Stretch | None:
        gap, self._gap = self._gap, None
        if gap is not None:
            gap.ended = self._device.event()
        return gap

    def rest(self) -> None:
        """Work ends."""
        self._gap = self._timer.block()

    def end(self) -> None:
        """The schedule is done; after the last computation there was only sending."""
        self._close()

    @contextlib.contextmanager
    def blocked(self) -> Iterator[None]:
        """In this block the worker exchanges messages with other workers."""
        with self._timer.blocked():
            yield

    def came(self) -> float:
        """This worker has reached the point where all meet; return the time."""
        if self.stamped:  # the other workers compare it with their times
            self._device.synchronize_stream()
        self._gap = self._timer.block()
        return clock()

    def met(self, came_s: float, last_s: float) -> None:
        """All workers met in a collective: this worker came at `came_s`, the last at `last_s`."""
        self._close()
        self._idle_s += last_s - came_s

    def finish(self, samples: int, loss: torch.Tensor | None, sent_bytes: float) -> StepResult:
        """Return the known measurements; the times follow after the device has passed the step."""
        gaps, idle_s = self._gaps, self._idle_s if self.stamped else NAN

        def complete(timed: Timed) -> dict[str, float]:
            idle = idle_s
            for gap, sent_s in gaps:
                idle += min(max(sent_s - timed.at(gap.began), 0.0), timed.seconds(gap))
            bubble_s = timed.fields["exposed_s"]
            own = {"ready_s": timed.fields["end_s"] - bubble_s} if self._ends_together else {}
            return {"bubble_s": bubble_s, "wait_s": idle, **own}

        result = self._timer.finish(samples, loss, sent_bytes, complete=complete)
        result.has_loss = loss is not None
        return result


def make_timeline(
    context: RunContext, device: torch.device, *, stamped: bool, ends_together: bool = False
) -> Timeline:
    """Return the timeline of a worker on a device."""
    given = {"stamped": stamped, "ends_together": ends_together}
    if device.type == "cpu":
        return Timeline(context.faults, **given)
    timer = DeviceTimer(context, accelerators.of(device))
    return DeviceTimeline(context.faults, timer, accelerators.of(device), **given)
