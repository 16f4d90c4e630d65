"""A stage of a pipeline: its layers as one module, and its work, timed.

`timeline.py` says what is measured, `mail.py` how messages travel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage

from ....errors import FitError
from ..trainer import PRECISIONS
from .mail import Mail
from .measure import Form
from .timeline import Timeline


class Stage(torch.nn.Module):
    """Consecutive layers as one module.

    Args:
        layers: Each takes the values of the one before.
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
            # What has come is a leaf of the graph, which no layer could change in place.
            values = tuple(value.clone() for value in values)
        with self._around():
            for layer in self.layers:
                result = layer(*values)
                values = result if isinstance(result, tuple) else (result,)
        if not self._last and torch.is_grad_enabled():
            # The next stage sends a gradient for every floating value, also where nothing before
            # it learns (a stage of Flatten alone).
            values = tuple(value.contiguous() for value in values)  # as they are sent
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
            code="WB-FIT-147",
        )
    return lambda: torch.autocast(device.type, dtype=PRECISIONS[precision])


class TimedStage(PipelineStage):
    """A pipeline stage that is timed, and whose messages are seen to by `Mail`."""

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
        """Compute a microbatch's backward, or the half of it that others wait for."""
        self.timeline.work("backward", self.mail.arrived("B", bwd_chunk_id))
        super().backward_one_chunk(bwd_chunk_id, *args, **given)
        self.timeline.rest()

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **given: Any) -> Any:
        """Compute the other half: the gradients of the weights."""
        self.timeline.work("backward", None)
        super().backward_weight_one_chunk(bwd_chunk_id, *args, **given)
        self.timeline.rest()

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what is left to do to receive a microbatch's activations."""
        return self.mail.receive("F", fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what is left to do to receive a microbatch's gradients."""
        return self.mail.receive("B", bwd_chunk_id)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what is left to do to send a microbatch's activations."""
        return self.mail.send("F", fwd_chunk_id, super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return what is left to do to send a microbatch's gradients."""
        return self.mail.send("B", bwd_chunk_id, super().get_bwd_send_ops(bwd_chunk_id))
