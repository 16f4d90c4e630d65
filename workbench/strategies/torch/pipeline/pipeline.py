"""This worker's stages at work: a batch in microbatches through the schedule, or forward only.

Microbatches are all equally large, so that messages are. A batch that does not divide is dealt
evenly and filled up with repeated samples; what the filling gives is cut off before the loss, so it
has no part in it. Each microbatch's mean loss counts by its samples:

    loss = sum over microbatches of (samples of the microbatch / samples of the batch) x its mean

The schedules of torch.distributed.pipelining; `catalog/schedules.py` explains them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining

from ....catalog.schedules import SCHEDULES
from ....engine.torch.data import map_batch, slice_batch
from ....engine.torch.group import data_wire
from ....engine.training.shares import share_bounds
from ....errors import FitError
from .build import let_go, place, tensors_of
from .layers import tensor_names
from .stage import Stage, TimedStage, Timeline
from .trace import Piece

if TYPE_CHECKING:
    from .cut import Cut
    from .measure import Form


class Pipeline:
    """The stages that one worker holds.

    Args:
        microbatches: Microbatches of a batch, `size` samples each.
        rank, workers: Stage s is held by rank s modulo `workers` of the group.
        group: The workers of this pipeline; None: all.
    """

    def __init__(
        self,
        cut: Cut,
        timeline: Timeline,
        *,
        schedule: str,
        microbatches: int,
        rank: int,
        workers: int,
        device: torch.device,
        around: Any,
        group: Any = None,
    ) -> None:
        self.group = group
        self.cut, self.program, self.timeline = cut, cut.program, timeline
        self.microbatches, self.size = microbatches, cut.samples
        self.workers, self.device, self._around = workers, device, around
        self.indices = list(range(rank, cut.stages, workers))
        self.holds_last = cut.stages - 1 in self.indices
        self.modules = {index: self._module(index, training=True) for index in self.indices}
        self.evaluating = {index: self._module(index, training=False) for index in self.indices}
        self.stages = [
            TimedStage(self.modules[i], i, cut.stages, device, cut.forms(i), timeline, group)
            for i in self.indices
        ]
        self._run = build_schedule(schedule, self.stages, microbatches, self._weighted_loss)
        self._numbers = torch.arange(microbatches)
        self._target: Any = None
        self._samples = 0

    def _module(self, index: int, *, training: bool) -> Stage:
        layers = [layer.training if training else layer.evaluating for layer in self.cut.of(index)]
        last = index == self.cut.stages - 1
        return Stage(layers, self._around, first=index == 0, last=last)

    def train(self, batch: Any, samples: int) -> torch.Tensor | None:
        """Compute the gradients of a batch; return its mean loss where the last stage is."""
        self._samples = samples
        losses: list[torch.Tensor] = []
        inputs: tuple[torch.Tensor, ...] = ()
        given = self.program.given(batch, max(samples, 1))  # a share without samples holds one
        if self.program.scored and samples != self.microbatches * self.size:
            raise uneven(samples, self.microbatches * self.size)
        if 0 in self.indices:
            inputs = tuple(self._dealt(x, samples).to(self.device) for x in given)
        if self.holds_last:
            self._target = map_batch(lambda t: t.to(self.device), self.program.target(batch))
        self.timeline.begin()
        for stage in self.stages:
            stage.mail.expect()
        self._run(*inputs, target=self._numbers, losses=losses)
        for stage in self.stages:
            stage.mail.settle()
        self.timeline.end()
        self._target = None
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else None

    def sent_bytes(self) -> int:
        """Return the bytes of activations and gradients sent since the last call."""
        total = sum(stage.mail.sent_bytes for stage in self.stages)
        for stage in self.stages:
            stage.mail.sent_bytes = 0
        return total

    def _bounds(self, number: int) -> tuple[int, int]:
        return share_bounds(self._samples, number, self.microbatches)

    def _dealt(self, x: torch.Tensor, samples: int) -> torch.Tensor:
        """Return the batch in rows of equal microbatches, filled up where it does not divide."""
        if samples == self.microbatches * self.size:
            return x
        rows = []
        for number in range(self.microbatches):
            start, stop = self._bounds(number)
            filling = [max(stop - 1, 0)] * (self.size - (stop - start))
            rows += [*range(start, stop), *filling]
        return x.index_select(0, torch.tensor(rows, device=x.device))

    def _weighted_loss(self, output: Any, number: torch.Tensor) -> torch.Tensor:
        self.timeline.work("forward", None)
        start, stop = self._bounds(int(number))
        if self.program.loss is None:
            loss: torch.Tensor = output * ((stop - start) / self._samples)
        elif start == stop:  # nothing but filling: no loss, yet the stages expect a gradient
            parts = output if isinstance(output, tuple) else (output,)
            loss = torch.stack([(part * 0.0).sum() for part in parts]).sum()
        else:
            kept = self.cut.outputs[0].restore(slice_batch(output, 0, stop - start, self.size))
            target = slice_batch(self._target, start, stop, self._samples)
            with self._around():
                loss = self.program.loss(kept, target) * ((stop - start) / self._samples)
        self.timeline.rest()
        return loss

    def forward(self, batch: Any, samples: int) -> Any:
        """Return the model's output (or the loss) for a batch where the last stage is, else None.

        Each worker sends as soon as it is done, so microbatches follow each other here too.
        """
        given = self.program.given(batch, max(samples, 1))
        if self.program.scored and samples % self.size:
            raise uneven(samples, self.size)
        outputs = []
        for start in range(0, samples, self.size):
            stop = min(start + self.size, samples)
            rows = torch.arange(start, start + self.size).clamp_(max=stop - 1)
            values: Any = None
            for index, module in self.evaluating.items():
                if index == 0:
                    chosen = (x.index_select(0, rows.to(x.device)) for x in given)
                    values = tuple(x.to(self.device) for x in chosen)
                elif self.workers > 1:
                    values = self._receive(self.cut.evaluated(index), (index - 1) % self.workers)
                result = module(*values)
                values = result if isinstance(result, tuple) else (result,)
                if index == self.cut.stages - 1:
                    outputs.append(slice_batch(result, 0, stop - start, self.size))
                elif self.workers > 1:
                    self._send(values, (index + 1) % self.workers)
        if not outputs:
            return None
        if self.program.scored:  # microbatches are equally large
            return torch.stack(outputs).mean()
        whole: Any
        if isinstance(outputs[0], tuple):
            whole = tuple(torch.cat(parts) for parts in zip(*outputs, strict=True))
        else:
            whole = torch.cat(outputs)
        return self.cut.outputs[1].restore(whole)

    def _send(self, values: tuple[torch.Tensor, ...], rank: int) -> None:
        for value in values:
            dist.send(value.contiguous().to(self._wire), self._peer(rank), group=self.group)

    def _receive(self, forms: tuple[Form, ...], rank: int) -> tuple[torch.Tensor, ...]:
        values = []
        for form in forms:
            value = torch.empty(form.shape, dtype=form.dtype, device=self._wire)
            dist.recv(value, self._peer(rank), group=self.group)
            values.append(value.to(self.device))
        return tuple(values)

    def _peer(self, rank: int) -> int:
        """Return the rank in the run of a rank of this pipeline."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    @property
    def _wire(self) -> torch.device:
        """Where messages lie when they are sent."""
        return data_wire(self.group, self.device)


def uneven(samples: int, whole: int) -> FitError:
    """Return what to raise where a loss within the model would count repeated samples."""
    return FitError(
        "Where the model computes the loss itself, a batch must divide into equal microbatches.",
        seen=f"{samples} samples",
        allowed=f"a multiple of {whole}",
        next_step="leave the rest out (a DataLoader with drop_last=True), or let the model return "
        "its output and use loss=, which takes batches of any size",
        code="WB-FIT-144",
    )


def share_names(cut: Cut, rank: int, workers: int) -> list[str]:
    """Return the full names of all parameters and buffers of a worker's stages."""
    return [
        name
        for stage in range(rank, cut.stages, workers)
        for layer in cut.of(stage)
        for name in layer.names
    ]


def adopt_share(model: torch.nn.Module, cut: Cut, rank: int, workers: int) -> None:
    """Let traced pieces compute with the model's own parameters and buffers; free the others'."""
    for stage in range(cut.stages):
        for piece in (p for layer in cut.of(stage) for p in (layer.training, layer.evaluating)):
            if not isinstance(piece, Piece):
                continue
            if stage % workers != rank:
                let_go(piece.body, ())
                continue
            known = tensor_names(piece.body)
            for name, tensor in tensors_of(model, known).items():
                place(piece.body, name, tensor)


BUILDERS: dict[str, Callable[..., Any]] = {
    "naive": pipelining.ScheduleGPipe,  # of one microbatch
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def build_schedule(
    name: str, stages: list[Any], microbatches: int, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `run(x, target=..., losses=...)`: one pass of the schedule over a batch.

    Args:
        stages: This worker's stages.
        loss: `loss(output, target)` of a microbatch, already weighted.
    """
    looped = SCHEDULES[name].stages is not None
    schedule = BUILDERS[name](
        stages if looped else stages[0], microbatches, loss_fn=loss, scale_grads=False
    )
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        return lambda *args, **given: schedule.step(*args, return_outputs=False, **given)
    return schedule.step  # type: ignore[no-any-return]
