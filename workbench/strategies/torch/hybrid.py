"""Data and model parallelism together: several pipelines, each with a share of the batch.

Sources: Narayanan et al., PipeDream: Generalized Pipeline Parallelism for DNN Training, SOSP 2019,
section 3.1; Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters Using
Megatron-LM, SC 2021, section 3.

    4 workers, stages=2: a grid of 2 pipelines (rows) x 2 stages (columns)

    share 0 -> worker 0: stage 0 --> worker 1: stage 1 -> loss
                   |                     |
               all-reduce            all-reduce          gradients of the same stage
                   |                     |
    share 1 -> worker 2: stage 0 --> worker 3: stage 1 -> loss

Within a pipeline (a row of the grid), microbatches go through the stages as under `model_split`.
After the last microbatch, the workers that hold the same stage (a column of the grid) add up their
gradients, in one message for each data type. Pipeline i computes g_i, the gradient of the mean loss
over its share. The shares can have different sizes, so g_i is weighted by the number of samples in
the share:

    g = sum over pipelines of (samples of share i / samples of the batch) x g_i

Workbench adds up these gradients itself. DistributedDataParallel cannot do this, because it does
not know when the last microbatch has left a stage.

With its gradients, each worker also sends the time at which these gradients were ready. So sync
wait and transfer can be measured separately. Workbench names the worker that computed longest in a
step as the cause of all waits in this step. This includes waits in other pipelines and waits of
workers with other stages. In each step, a worker sends messages to other workers of its pipeline,
as under `model_split`. In a ring all-reduce over d pipelines it also sends 2 (d-1)/d times the size
of its stage's gradients. In each pipeline only the worker with the last stage counts samples, so
that the sum of the counts is the batch size.

When a worker dies (`--on-failure heal`), its pipeline stops. The other pipelines then compute the
share of this pipeline too. The size of a microbatch stays the same, but each pipeline has more
microbatches. The gradients of each stage are summed separately. So if a worker dies during a step,
some workers may have the sum for their stage, while other workers can never get the sum for theirs.
Therefore, with `--on-failure heal`, every worker updates only after it knows that all workers can
update:

    worker 0   sum of stage 0 --+--> in the row --+--> in the column --> optimizer
    worker 1   sum of stage 1 --+                 |
    worker 2   sum of stage 0 --+--> in the row --+--> in the column --> optimizer
    worker 3   sum of stage 1 --+

Before the update, the workers confirm to each other that every worker has the sum for its stage.
They exchange these confirmations first within each pipeline (a row of the grid), and then among the
workers with the same stage (a column of the grid). If a death interrupts the confirmation, some
workers may already have taken the step. In this case the other workers take the step too. They do
not need the dead worker for this, because each of them already has the sum for its own stage. If no
worker has taken the step, the workers begin the step again.
"""

from __future__ import annotations

import gc
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...catalog import schedules
from ...engine.contract import NAN
from ...engine.debugging.marks import ALL_REDUCE, waits_in
from ...engine.telemetry.recorder import StepResult
from ...engine.torch.data import map_batch
from ...engine.torch.group import control_wire, data_wire
from ...errors import FitError
from .model_split import ModelSplit, SharedGradients, naive_pipeline
from .parts.guard import Guard, KeptBuffers, broadcast
from .parts.layout import make_mesh, release_mesh
from .pipeline import cut as cuts
from .pipeline.program import program_of

if TYPE_CHECKING:
    from ...engine.contract import Job, Share
    from .pipeline.cut import Cut


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
        stages: The number of workers in each of the d pipelines; ranks 0 .. stages - 1 are the
            first pipeline.
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


Stands = Literal["whole", "begun", "ready", "taken"]
"""The states of a step: not begun; begun; everything it needs is here; the update is made."""


class Hybrid(ModelSplit):
    """Several pipelines that train together.

    Each stage is held by as many workers as there are pipelines. So whole pipelines can leave and
    join between two steps.
    """

    regroups = True
    split = True
    mesh: DeviceMesh | None = None
    sum: SummedGradients | None = None
    guard: Guard | None = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.workers = schedules.pipeline_workers(self.options, self.world_size)
        # the number of pipelines at the start of the run
        self._usual = self.world_size // self.workers
        self._cut: Cut | None = None
        self._stands: Stands = "whole"
        self._norm: float | None = None
        self._usual_microbatches = 0
        self._enters = False
        self._kept = KeptBuffers([])
        # state that was taken over before the stages were made
        self._owed: dict[str, Any] | None = None

    @property
    def shard(self) -> tuple[int, int]:
        """Each pipeline takes a share of the batch."""
        return self.rank // self.workers, self.world_size // self.workers

    @property
    def part(self) -> int:
        """This worker's stage, or the first of its stages."""
        return self.context.spec.rank % self.workers

    def arrange(self) -> None:
        """Arrange the workers in a grid: pipelines x stages. Collective.

        Raises:
            FitError: The workers do not fill a grid.
        """
        if self.world_size % self.workers:
            raise FitError(
                "The option `stages` is the number of workers in each pipeline. So the total "
                "number of workers must be a multiple of `stages`.",
                seen=f"stages={self.workers}, and -n {self.world_size}",
                allowed=f"a multiple of {self.workers} workers",
                next_step=f"use -n {-(-self.world_size // self.workers) * self.workers}",
                code="WB-FIT-114",
            )
        self.pipelines = self.world_size // self.workers
        self.place = self.rank % self.workers
        if self.context.membership.waits and not self._enters:
            return  # the others are met later
        device = torch.device(self.context.spec.device)
        shape = (self.pipelines, self.workers)
        self.mesh = make_mesh(device, shape, ("data", "stage"))
        self.group = self.mesh.get_group("stage")
        self.replicas: Any = self.mesh.get_group("data")

    def _share_size(self) -> int:
        """Return the largest number of samples per pipeline when the run began."""
        return math.ceil(self.job.batch_size / self._usual)

    def prepare(self, job: Job) -> None:
        """Cut the model in the same way in every pipeline; begin with the first one's values."""
        super().prepare(job)
        if self.pipeline is not None:
            self._begin()

    def _begin(self) -> None:
        self._equal(self._own)
        self._equal(self._buffers())
        self._add_up()

    def connect(self, decided: Cut) -> None:
        """Link this worker's stages to the other stages of the pipeline."""
        super().connect(decided)
        self._cut = decided

    def _add_up(self) -> None:
        """Prepare to add up gradients with the other holders of the stage."""
        self.sum = SummedGradients(self._own, self.replicas, self.device)
        self.guard = Guard(self.context, group=self.replicas)
        self.guard.add(self.job.model)
        self._kept = KeptBuffers(self._buffers())

    def step(self, share: Share) -> StepResult:
        """Send the share through the pipeline, add up with the other pipelines, update."""
        if self.context.membership.trains:
            self._kept.keep()
        self._loss, self._stands = None, "begun"
        result = super().step(share)
        assert self.sum is not None
        result.sent_bytes += self.sum.sent_bytes
        assert self.guard is not None
        result.aside_s = self.guard.tick()
        self._stands = "whole"
        return result if self._pipeline.holds_last else replace(result, samples=0)

    def update(self) -> None:
        """Take the step after all workers have confirmed that they can."""
        if not self.context.membership.trains:
            super().update()
            return
        self._stands = "ready"
        norm = self.norm()
        with self.timeline.blocked():
            self._await_all(row=norm is None)
        self._norm = norm
        self.apply(norm)
        self._stands = "taken"

    @waits_in(ALL_REDUCE)
    def _await_all(self, *, row: bool = True) -> None:
        """Return when all workers have arrived: first the pipeline's, then all pipelines'.

        Args:
            row: Whether the workers of the pipeline must still exchange a message.
        """
        for group in (self.group, self.replicas) if row else (self.replicas,):
            if dist.get_world_size(group) > 1:
                dist.all_reduce(
                    torch.zeros(1, device=control_wire(group, self.device)), group=group
                )

    def gradients_done(self, share: Share) -> None:
        """Add up the gradients of this stage over the pipelines."""
        if self.sum is None:  # a stream: the model was cut at the first batch
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
            # a worker that passes knows that all others are here
            if self.context.membership.trains:
                self._await_all()

    # -- with others -------------------------------------------------------------------------------

    def bound(self) -> str:
        """Return why the number of pipelines must not change; empty if it can."""
        if self.context.spec.backend != "gloo":
            return "on GPUs, Workbench cannot change the number of pipelines during a run"
        if self.pipeline is None or not self.pipeline.program.scored:
            return ""
        every = self.microbatches * self._usual
        if all(every % fewer == 0 for fewer in range(1, self._usual)):
            return ""
        return (
            "the model computes the loss itself, so all microbatches must have the same size. With "
            "fewer pipelines, the microbatches could have different sizes"
        )

    def leave_group(self) -> None:
        """Release stages and links; keep what was trained."""
        self.pipeline = self.sum = self.guard = None
        self.shared = SharedGradients({}, {}, 0, torch.device("cpu"), None)
        release_mesh(self.mesh)
        self.mesh = self.group = self.replicas = None
        # stages and schedules refer to each other, and hold messages that are being sent
        gc.collect()

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Build the pipelines again among the workers that are there now."""
        spec = self.context.spec
        self.rank, self.world_size = spec.rank, spec.world_size
        self._enters = True
        self.arrange()
        decided = self._cut or self._come(agreed)
        self.microbatches = self._microbatches(int(agreed["microbatches"]), decided.samples)
        self.connect(decided)
        self._norm, self._usual_microbatches = agreed["norm"], int(agreed["microbatches"])
        if self._owed is not None:
            self.build_optimizer()
            self._load(self._owed)
            self._owed = None
        self._add_up()
        self._stands = "whole"

    def _come(self, agreed: dict[str, Any]) -> Cut:
        """Take this worker's part of a model that the other workers have cut."""
        self.microbatches = int(agreed["microbatches"])
        program = program_of(self.job, self.microbatch_of(self._sample))
        decided = cuts.cut_as(
            self.job.model, program, agreed["cut"], device=self.device,
            split_at=self.options["split_at"] or "",
        )  # fmt: skip
        self.take_share(decided)
        self._sample = None
        return decided

    def _microbatches(self, usual: int, size: int) -> int:
        """Return how many microbatches of this size a share has: the usual number or more."""
        count = max(usual, -(-math.ceil(self.job.batch_size / self.pipelines) // size))
        if self.pipelines == self._usual:
            return usual
        return schedules.at_least(count, self.schedule, self.workers)

    def agreed(self) -> dict[str, Any]:
        """Return how the model is cut, and the norm used to clip the latest update."""
        if self._cut is None:
            return {}
        return {
            "cut": cuts.about(self._cut),
            "microbatches": self._usual_microbatches or self.microbatches,
            "norm": self._norm,
        }

    @property
    def ready(self) -> bool:
        """Whether everything that the step needs is here, although the step failed."""
        return self._stands == "ready"

    def complete_step(self, agreed: dict[str, Any]) -> None:
        """Take the step that another worker has taken."""
        self.apply(agreed["norm"])
        self._stands = "whole"

    def completes_alone(self) -> bool:
        """Whether the step was taken and only a later action failed."""
        taken = self._stands == "taken"
        self._stands = "whole" if taken else self._stands
        return taken

    def undo(self) -> None:
        """Undo a step that no worker has taken."""
        if self._stands != "whole":
            self._kept.restore()
            self._stands = "whole"

    def contributed(self, share: Share) -> StepResult:
        """Return the known results of a step that failed here."""
        last = self._loss is not None
        loss = NAN if self._loss is None else float(self._loss)
        return StepResult(share.samples if last else 0, loss, compute_s=NAN, has_loss=last)

    def member_state(self) -> dict[str, Any]:
        """Return copies of this worker's stages, and of their optimizer and scheduler."""
        if self._cut is None:
            return {}
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        state = {name: part.state_dict() for name, part in parts.items() if part is not None}
        model = self.job.model.state_dict()
        held = set(self._held or ())
        state["model"] = {name: tensor for name, tensor in model.items() if name in held}
        return dict(map_batch(lambda t: t.detach().to("cpu", copy=True), state))

    def load_member_state(self, state: dict[str, Any]) -> None:
        """Continue from the state of another worker with the same stages."""
        self._stands = "whole"
        if self._cut is None:
            self._owed = state  # there are no stages yet
        else:
            self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        self.job.model.load_state_dict(state["model"], strict=False)
        for name, part in (("optimizer", self.optimizer), ("scheduler", self.scheduler)):
            if part is not None:
                part.load_state_dict(state[name])

    def _buffers(self) -> list[torch.Tensor]:
        return [b for b in self.job.model.buffers() if not b.is_meta]

    def _equal(self, tensors: list[Any]) -> None:
        """Give all pipelines the first one's tensors of this stage."""
        if self.pipelines > 1:
            broadcast(tensors, self.device, self.replicas, source=self.place)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return this worker's parameters and buffers; those of the first pipeline represent all.

        If workers can leave, every worker must be able to represent its stage.
        """
        stands = self.rank < self.workers or self.context.spec.heals
        return super().weights() if stands else {}

    def close(self) -> None:
        """Drop the stages; the user's model keeps this worker's share."""
        super().close()
        release_mesh(self.mesh)
        self.sum = self.guard = self.mesh = self.group = self.replicas = None


class SummedGradients:
    """Adds up a stage's gradients over the pipelines, one message per dtype.

    The first message ends in a slot for each member. Each member writes its clock into its own slot
    only, so the sum contains all members' clocks. A clock is written as two numbers; the second is
    the rounding error of the first.

    Args:
        parameters: The trained parameters, the same in every member.
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
        if self._stamped:  # clocks are sent with the gradients, which saves a message
            self._flats[0] = torch.cat([self._flats[0], self._clocks.to(self._flats[0].dtype)])
        size_bytes = sum(flat.numel() * flat.element_size() for flat in self._flats)
        self.sent_bytes = 2 * (self._members - 1) / self._members * size_bytes

    def all_reduce(self, weight: float, came_s: float) -> float:
        """Replace gradients by their weighted sum; return when the last member was ready.

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
                # these parameters took no part in the loss, in any pipeline
                if parameter.grad is None:
                    continue
                parameter.grad = part.view_as(parameter).to(parameter.device, copy=True)
        clocks = tail.double().view(-1, 2).sum(dim=1)
        return float(clocks.max())

    def _tail(self) -> torch.Tensor:
        return self._flats[0][-2 * self._members :] if self._stamped else self._clocks
