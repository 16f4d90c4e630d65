"""Data and model parallelism together: several pipelines, each of which takes a share of the batch.

Sources: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019,
section 3.1; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, SC 2021, section 3.

    4 workers, stages=2: a grid of 2 pipelines (rows) x 2 stages (columns)

    share 0 -> worker 0: stage 0 --> worker 1: stage 1 -> loss
                   |                     |
               all-reduce            all-reduce          gradients of the same stage
                   |                     |
    share 1 -> worker 2: stage 0 --> worker 3: stage 1 -> loss

Within a row microbatches flow as under `model_split`; when its pipeline has drained, each worker
adds up gradients with the other holders of its stage, in one message. Pipeline d's gradient is that
of the mean loss over its share, so it counts by its samples:

    g = sum over pipelines of (samples of share d / samples of the batch) x g_d

Gradients are added up by hand, outside the pipeline: DistributedDataParallel around a stage does
not know when the last microbatch has passed.

The message carries each worker's clock, so waiting and transfer are told apart; blame goes to the
worker with the most work of its own in the step, wherever in the grid it stands. Bytes sent: the
pipeline's messages, and 2 (d-1)/d of the stage's gradients (a ring all-reduce over d pipelines).
Samples are counted by the worker that holds the last stage, so that they add up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...engine.torch.group import data_wire
from ...errors import FitError
from .model_split import ModelSplit, naive_pipeline
from .parts.guard import Guard, broadcast
from .parts.layout import make_mesh, release_mesh

if TYPE_CHECKING:
    from ...engine.contract import Job, Share
    from ...engine.telemetry.recorder import StepResult


def naive_step(
    stage: Any,
    loss_fn: Any,
    optimizer: Any,
    microbatches: list[tuple[Tensor, Tensor]],
    width: int,
    stages: int,
    replicas: Any,
) -> float | None:
    """Take one step on this pipeline's share of the batch. Return its loss, on the last stage.

    Args:
        microbatches: The share, B/d samples, as m pairs of x and y: see `naive_pipeline`.
        stages: Workers that form one of the d pipelines: ranks 0 .. stages - 1 the first one.
        replicas: The process group of the d workers that hold this stage.
    """
    rank = dist.get_rank()
    before = rank - 1 if rank % stages > 0 else None
    after = rank + 1 if rank % stages < stages - 1 else None
    optimizer.zero_grad()
    loss = naive_pipeline(stage, loss_fn, microbatches, width, before, after)  # along the row
    for p in stage.parameters():  # along the column
        dist.all_reduce(p.grad, group=replicas)
        p.grad /= dist.get_world_size(replicas)
    optimizer.step()
    return loss


class Hybrid(ModelSplit):
    """Pipelines side by side."""

    mesh: DeviceMesh | None = None
    sum: SummedGradients | None = None
    guard: Guard | None = None

    @property
    def stage_workers(self) -> int:
        """How many workers form a pipeline: as asked for, else 2 where they divide evenly."""
        return int(self.options["stages"] or (1 if self.world_size % 2 else 2))

    @property
    def shard(self) -> tuple[int, int]:
        """Each pipeline takes a share of the batch."""
        return self.rank // self.stage_workers, self.world_size // self.stage_workers

    def arrange(self) -> None:
        """Lay the workers out as a grid: pipelines x stages. Collective.

        Raises:
            FitError: The workers do not fill a grid.
        """
        self.workers = self.stage_workers
        if self.world_size % self.workers:
            raise FitError(
                "The workers do not fill whole pipelines.",
                seen=f"stages={self.workers} on {self.world_size} workers",
                allowed="a number of workers that stages divides",
                next_step=f"use -n {-(-self.world_size // self.workers) * self.workers}",
                code="WB-FIT-114",
            )
        self.pipelines = self.world_size // self.workers
        self.place = self.rank % self.workers
        device = torch.device(self.context.spec.device)
        shape = (self.pipelines, self.workers)
        self.mesh = make_mesh(device, shape, ("data", "stage"))
        self.group = self.mesh.get_group("stage")
        self.replicas: Any = self.mesh.get_group("data")

    def prepare(self, job: Job) -> None:
        """Cut the model alike in every pipeline; begin with the first pipeline's parameters."""
        super().prepare(job)
        if self.pipeline is not None:
            self._begin()

    def _begin(self) -> None:
        self._equal(self._own)
        self._equal(self._buffers())
        self.sum = SummedGradients(self._own, self.replicas, self.device)
        self.guard = Guard(self.context, group=self.replicas)
        self.guard.add(self.job.model)

    def step(self, share: Share) -> StepResult:
        """Send the share through the pipeline, add up with the other pipelines, update."""
        result = super().step(share)
        assert self.sum is not None
        result.sent_bytes += self.sum.sent_bytes
        assert self.guard is not None
        result.aside_s = self.guard.tick()
        return result if self._pipeline.holds_last else replace(result, samples=0)

    def gradients_done(self, share: Share) -> None:
        """Add up the gradients of this stage over the pipelines."""
        if self.sum is None:  # a stream: the model was laid out at the first batch
            self._begin()
        assert self.sum is not None
        came_s = self.timeline.came()
        self.context.faults.travel(round(self.sum.sent_bytes))
        last_s = self.sum.all_reduce(share.samples / share.global_samples, came_s)
        self.timeline.met(came_s, last_s)

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each pipeline scores its share."""
        self._equal(self._buffers())
        return super().evaluate(shares)

    def finish(self) -> None:
        """Make the pipelines' buffers equal."""
        if self.guard is not None:
            self.guard.settle()
            self._equal(self._buffers())

    def _buffers(self) -> list[torch.Tensor]:
        return [b for b in self.job.model.buffers() if not b.is_meta]

    def _equal(self, tensors: list[Any]) -> None:
        """Give all pipelines the first one's tensors of this stage."""
        if self.pipelines > 1:
            broadcast(tensors, self.device, self.replicas, source=self.place)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the own stages' parameters and buffers; the first pipeline's stand for all."""
        return super().weights() if self.rank < self.workers else {}

    def close(self) -> None:
        """Drop the stages; the user's model keeps this worker's share."""
        super().close()
        release_mesh(self.mesh)
        self.sum = self.guard = self.mesh = self.group = self.replicas = None


class SummedGradients:
    """Adds up a stage's gradients over the pipelines, one message per dtype.

    The first message ends in a slot for each member, in which it alone puts its clock: what comes
    back from the sum are all members' clocks. A clock is written as two numbers, the second being
    what the first rounded away.

    Args:
        parameters: What is learnt here, the same in every member.
        group: The holders of this stage.
    """

    def __init__(self, parameters: list[Any], group: Any, device: torch.device) -> None:
        self._group, self._members = group, dist.get_world_size(group)
        self._place = dist.get_rank(group)
        kinds: dict[torch.dtype, list[Any]] = {}
        for parameter in parameters:
            kinds.setdefault(parameter.dtype, []).append(parameter)
        self._kinds = list(kinds.values())
        wire = data_wire(group, device)
        self._flats = [
            torch.zeros(sum(p.numel() for p in group), dtype=dtype, device=wire)
            for dtype, group in kinds.items()
        ]
        self._clocks = torch.zeros(2 * self._members, dtype=torch.float64, device=wire)
        self._stamped = self._flats and self._flats[0].dtype in (torch.float32, torch.float64)
        if self._stamped:  # clocks travel with the gradients: one message less
            self._flats[0] = torch.cat([self._flats[0], self._clocks.to(self._flats[0].dtype)])
        size_bytes = sum(flat.numel() * flat.element_size() for flat in self._flats)
        self.sent_bytes = 2 * (self._members - 1) / self._members * size_bytes

    def all_reduce(self, weight: float, came_s: float) -> float:
        """Replace gradients by their weighted sum; return when the last member came.

        Args:
            weight: This member's factor.
            came_s: When this member was ready.
        """
        if self._members == 1 or not self._flats:
            return came_s
        tail = self._tail()
        for flat, parameters in zip(self._flats, self._kinds, strict=True):
            place = 0
            for parameter in parameters:
                part = flat[place : place + parameter.numel()]
                place += parameter.numel()
                if parameter.grad is None:
                    part.zero_()
                else:
                    part.copy_(parameter.grad.reshape(-1)).mul_(weight)
        tail.zero_()
        tail[2 * self._place] = came_s
        tail[2 * self._place + 1] = came_s - float(tail[2 * self._place])
        messages = self._flats if self._stamped else [*self._flats, tail]
        for flat in messages:
            dist.all_reduce(flat, group=self._group)
        for flat, parameters in zip(self._flats, self._kinds, strict=True):
            place = 0
            for parameter in parameters:
                part = flat[place : place + parameter.numel()]
                place += parameter.numel()
                if parameter.grad is None:  # no part of the loss, in any pipeline
                    continue
                parameter.grad = part.view_as(parameter).to(parameter.device, copy=True)
        clocks = tail.double().view(-1, 2).sum(dim=1)
        return float(clocks.max())

    def _tail(self) -> torch.Tensor:
        return self._flats[0][-2 * self._members :] if self._stamped else self._clocks
