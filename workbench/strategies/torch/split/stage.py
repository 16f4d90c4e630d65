"""A stage that knows when it worked, when it stood idle, and when it waited for a message.

    this worker      |F0 |    |F1 |          |B0 |
    its neighbour    ......|sent F1    ......|sent B0
                          idle^^transfer

Between two pieces of work there is a gap. The sender's clock travels with each message, so the gap
falls apart into idle time (the message had not been sent yet: the bubble) and transfer (it was on
its way). All processes of a host read one clock; across hosts the gap is not divided.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ....engine.injector import FaultInjector
from ....errors import FitError
from ...base import NAN
from ..trainer import PRECISIONS
from .measure import Form

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

    def met(self, came_s: float, last_s: float) -> None:
        """All workers met in a collective: this one came at `came_s`, the last at `last_s`."""
        self.spent.blocked_s += clock() - came_s
        self.spent.idle_s += last_s - came_s  # NaN stays NaN


class Stage(torch.nn.Module):
    """Consecutive layers as one module.

    Args:
        layers: Each takes the values of the one before.
        around: Context of the forward pass (autocast).
        last: Whether the model's output leaves here.
    """

    def __init__(self, layers: Sequence[torch.nn.Module], around: Any, *, last: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self._around, self._last = around, last

    def forward(self, *values: Any) -> Any:
        """Run the layers on one microbatch."""
        with self._around():
            for layer in self.layers:
                result = layer(*values)
                values = result if isinstance(result, tuple) else (result,)
        if not self._last and torch.is_grad_enabled():
            # The next stage sends a gradient for every floating value, also where nothing before
            # it learns (a stage of Flatten alone).
            for value in values:
                if value.is_floating_point() and not value.requires_grad:
                    value.requires_grad_()
        return values if len(values) > 1 else values[0]


def autocast(precision: str | None, device: torch.device) -> Callable[[], Any]:
    """Return what the forward pass runs in.

    Raises:
        FitError: Precision fp16, whose loss scaling would have to be agreed between stages.
    """
    if precision is None:
        return contextlib.nullcontext
    if precision == "fp16":
        raise FitError(
            "Precision fp16 scales the loss, which a pipeline cannot do stage by stage.",
            seen=precision,
            allowed="None or 'bf16'",
            next_step="precision='bf16'",
        )
    return lambda: torch.autocast(device.type, dtype=PRECISIONS[precision])


class TimedStage(PipelineStage):
    """A pipeline stage whose messages carry the sender's clock.

    Where the device is CUDA and the group is not NCCL, messages go through the host's memory.
    """

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
        self.sent_bytes = 0
        self._stamps: dict[tuple[str, int], torch.Tensor] = {}
        self._through_host = device.type == "cuda" and dist.get_backend(group) != "nccl"
        self._landed: dict[tuple[str, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute a microbatch's forward."""
        self.timeline.work("forward", self._arrived("F", fwd_chunk_id))
        output = super().forward_one_chunk(fwd_chunk_id, *args, **given)
        self.timeline.rest()
        return output

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute a microbatch's backward, or the half of it that others wait for."""
        self.timeline.work("backward", self._arrived("B", bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, **given)
        self.timeline.rest()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute the other half: the gradients of the weights."""
        self.timeline.work("backward", None)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **given)
        self.timeline.rest()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives a microbatch's activations and their stamp."""
        return self._receiving("F", fwd_chunk_id, super().get_fwd_recv_ops(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what receives a microbatch's gradients and their stamp."""
        return self._receiving("B", bwd_chunk_id, super().get_bwd_recv_ops(bwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends a microbatch's activations and their stamp."""
        return self._sending("f", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what sends a microbatch's gradients and their stamp."""
        return self._sending("b", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))

    def _stamp(self, way: str, chunk: int) -> torch.Tensor:
        if (way, chunk) not in self._stamps:
            self._stamps[way, chunk] = torch.zeros(1, dtype=torch.float64)
        return self._stamps[way, chunk]

    def _receiving(self, way: str, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        if self._through_host and ops:
            landed = [(torch.empty_like(op.tensor, device="cpu"), op.tensor) for op in ops]
            self._landed[way, chunk] = landed
            ops = [_moved(op, host) for op, (host, _) in zip(ops, landed, strict=True)]
        if ops and self.timeline.stamped:
            ops.append(_moved(ops[0], self._stamp(way, chunk)))
        return ops

    def _sending(self, way: str, chunk: int, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        self.sent_bytes += sum(op.tensor.nbytes for op in ops)
        if self._through_host:
            ops = [_moved(op, op.tensor.cpu()) for op in ops]
        if ops and self.timeline.stamped:
            ops.append(_moved(ops[0], self._stamp(way, chunk).fill_(clock())))
        if ops:
            self.timeline.travel(sum(op.tensor.nbytes for op in ops))
        return ops

    def _arrived(self, way: str, chunk: int) -> float | None:
        """Bring what came through the host to the device; return when it was sent."""
        for host, buffer in self._landed.pop((way, chunk), ()):
            with torch.no_grad():
                buffer.copy_(host)
        stamp = self._stamps.get((way, chunk))
        return None if stamp is None else float(stamp)


def _moved(op: dist.P2POp, tensor: torch.Tensor) -> dist.P2POp:
    """Return the same operation for another tensor."""
    return dist.P2POp(op.op, tensor, op.peer, op.group, op.tag)
