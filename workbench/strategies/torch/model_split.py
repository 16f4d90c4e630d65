"""Model parallelism as a pipeline: the model is cut into stages, one or more per worker.

Sources: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism, NeurIPS 2019; Narayanan et al., PipeDream, SOSP 2019; the schedules are the same
as in torch.distributed.pipelining.

    worker 0:  x -> stage 0 --activations--> . . . <--gradients-- stage 0   -> optimizer
    worker 1:       . . . -> stage 1 --activations--> <--gradients-- stage 1 -> optimizer
    worker 2:              . . . . . -> stage 2 -> loss(y) -> backward       -> optimizer

Each worker holds only the parameters and the optimizer state of its own stages, so the model can be
larger than one worker's memory. While one stage computes a whole batch, the other stages have
nothing to do. So the batch is divided into m microbatches, and each microbatch goes from stage to
stage. Then the stages can work at the same time, on different microbatches. The idle time that
remains is the bubble. If all p stages take the same time, the bubble is (p - 1) / (m + p - 1) of
the step's time. It is smaller with interleaved or zero-bubble schedules.

All workers get the same batch: the first stage needs x, and the last stage needs y. In some steps,
Workbench checks that all workers have read the same targets (`engine/torch/same_batch.py`). The
gradients of the microbatches, each weighted by its number of samples, are added up before the
optimizer's step. So the result is the same as on one device. The exception is BatchNorm, which
normalises over a microbatch instead of the batch. Two stages can use the same parameter: for
example, the weight of the embedding can also be the weight of the output layer. In this case the
workers of both stages hold the parameter, and add up its gradients before the step.

The last stage's worker computes the loss from the output (`pipeline/program.py`). If the model
computes the loss itself, the workers send the targets from stage to stage, together with the
activations. In this case all microbatches must be equally large. Otherwise Workbench would have to
repeat samples in the smaller microbatches, and the loss would count these samples twice.

If you give `wb.fit` a function that builds the model, no worker ever holds the whole model
(`pipeline/pipeline.py`). The option `split_at` names the layers at which the model is cut. Without
it, Workbench measures the layers and chooses where to cut (`pipeline/cut.py`).
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...catalog import schedules
from ...engine.contract import Job, Share, Strategy
from ...engine.torch.data import batch_length, map_batch
from ...engine.torch.group import backend_of, control_wire, data_wire
from ...engine.torch.same_batch import SameBatch
from ...engine.torch.support import evaluating
from ...errors import FitError, PlanError
from ...shared import events
from .parts.replica import build_optimizer, build_scheduler, held_bytes, to_numpy
from .pipeline.cut import Cut, cut
from .pipeline.measure import batchnorm_warning
from .pipeline.pipeline import (
    Pipeline,
    adopt_share,
    fill,
    let_go,
    move,
    share_names,
    tensors_of,
    uneven,
)
from .pipeline.program import program_of
from .pipeline.stage import autocast, make_timeline

if TYPE_CHECKING:
    from ...engine.telemetry.recorder import StepResult


def own_optimizer(
    given: Any, own: Sequence[torch.Tensor], model: torch.nn.Module
) -> torch.optim.Optimizer | None:
    """Return the optimizer of this worker's parameters; an existing optimizer is limited to them.

    Returns:
        None if this worker's stages have nothing to train.
    """
    if isinstance(given, torch.optim.Optimizer):
        kept = {id(p) for p in own}
        for group in given.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in kept]
        return given
    return build_optimizer(lambda p: given(list(own)), model) if own else None


class SharedGradients:
    """Adds up the gradients of parameters that several workers of a pipeline hold.

    Args:
        holders: Names of the parameters, each with the places in the group that hold it.
        held: This worker's own, by name.
        place: This worker's place in the group.

    Attributes:
        counted_elsewhere: This worker's parameters whose gradient another worker counts in the
            norm.
        sent_bytes: The bytes that one call sends.
    """

    def __init__(
        self,
        holders: Mapping[str, Sequence[int]],
        held: Mapping[str, torch.Tensor],
        place: int,
        wire: torch.device,
        group: Any,
    ) -> None:
        self._place, self._wire, self._group = place, wire, group
        self._shared = [
            (held[name], sorted(set(places)))
            for name, places in holders.items()
            if len(set(places)) > 1 and place in places and held[name].requires_grad
        ]
        self.counted_elsewhere = {id(p) for p, places in self._shared if places[0] != place}
        self.sent_bytes = sum(
            p.nbytes * (len(places) - 1 if places[0] == place else 1) for p, places in self._shared
        )

    def begin_equal(self) -> None:
        """Give all holders the values of the first holder. Collective among them."""
        for parameter, (first, *others) in self._shared:
            value = parameter.detach().to(self._wire).contiguous()
            if self._place == first:
                for other in others:
                    dist.send(value, self._rank(other), group=self._group)
            else:
                dist.recv(value, self._rank(first), group=self._group)
                parameter.data.copy_(value)

    def add_up(self) -> None:
        """Give all holders the same sum. Collective among them."""
        for parameter, (first, *others) in self._shared:
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            own = own.detach().to_dense() if own.is_sparse else own.detach()
            own = own.to(self._wire).contiguous()
            if self._place == first:
                for other in others:
                    theirs = torch.empty_like(own)
                    dist.recv(theirs, self._rank(other), group=self._group)
                    own = own + theirs
                for other in others:
                    dist.send(own, self._rank(other), group=self._group)
            else:
                dist.send(own, self._rank(first), group=self._group)
                own = torch.empty_like(own)
                dist.recv(own, self._rank(first), group=self._group)
            parameter.grad = own.to(parameter.device)

    def _rank(self, place: int) -> int:
        return place if self._group is None else dist.get_global_rank(self._group, place)


def norm_over_stages(
    grads: Sequence[torch.Tensor], came_s: float, workers: int, wire: torch.device, group: Any
) -> tuple[float, float]:
    """Return the norm of the whole model's gradient, and when the last worker was ready.

    Collective.

    Args:
        grads: Gradients of this worker's stages.
        came_s: When this worker was ready.
        wire: The device from which messages are sent.
    """
    square = float(sum(g.double().square().sum() for g in grads))
    mine = torch.tensor([square, came_s], dtype=torch.float64, device=wire)
    every = [torch.empty_like(mine) for _ in range(workers)]
    dist.all_gather(every, mine, group=group)
    norm = math.sqrt(sum(float(their[0]) for their in every))
    return norm, max(float(their[1]) for their in every)


def scale(grads: Sequence[torch.Tensor], norm: float, clip_norm: float) -> None:
    """Scale gradients as `clip_grad_norm_` does on one device."""
    factor = min(1.0, clip_norm / (norm + 1e-6))
    for grad in grads:
        grad.mul_(factor)


def _positions(model: torch.nn.Module) -> dict[int, int]:
    learnt = [p for p in model.parameters() if p.requires_grad]
    return {id(parameter): index for index, parameter in enumerate(learnt)}


def gather(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> dict[str, Any]:
    """Return model, optimizer and scheduler of all stages, on the CPU. Collective."""
    position = _positions(model)
    own: dict[str, Any] = {
        "model": {n: t for n, t in model.state_dict().items() if not t.is_meta},
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "state": {},
        "groups": [],
    }
    if optimizer is not None:
        own["state"] = {position[id(p)]: kept for p, kept in optimizer.state.items()}
        own["groups"] = [
            {**group, "params": [position[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
    own = map_batch(lambda t: t.detach().cpu().clone(), own)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    merged: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    groups: list[dict[str, Any]] = merged["optimizer"]["param_groups"]
    for part in every:
        merged["model"].update({n: t for n, t in part["model"].items() if n not in merged["model"]})
        merged["optimizer"]["state"].update(part["state"])
        for at, group in enumerate(part["groups"]):
            if at == len(groups):
                groups.append({**group, "params": []})
            groups[at]["params"] = sorted({*groups[at]["params"], *group["params"]})
        if part["scheduler"] is not None:
            merged["scheduler"] = part["scheduler"]
    return merged


def take(
    state: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
) -> None:
    """Load this worker's part of the state that `gather`, or one device, returned."""
    held = {n for n, t in model.state_dict().items() if not t.is_meta}
    model.load_state_dict({n: t for n, t in state["model"].items() if n in held}, strict=False)
    if optimizer is None:
        return
    position, saved = _positions(model), state["optimizer"]
    group_of = {i: group for group in saved["param_groups"] for i in group["params"]}
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for group in optimizer.param_groups:
        places = [position[id(p)] for p in group["params"]]
        source = group_of.get(places[0], group) if places else group
        hyper = {key: value for key, value in source.items() if key != "params"}
        for place in places:
            if place in saved["state"]:
                states[index + places.index(place)] = saved["state"][place]
        groups.append({**hyper, "params": list(range(index, index + len(places)))})
        index += len(places)
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    if scheduler is not None and state.get("scheduler") is not None:
        scheduler.load_state_dict(state["scheduler"])


def naive_step(
    stage: Any, loss_fn: Any, optimizer: Any, microbatches: list[tuple[Tensor, Tensor]], width: int
) -> float | None:
    """Take one step on a batch, with a stage on each worker. Return the loss, on the last one."""
    rank, n = dist.get_rank(), dist.get_world_size()
    before, after = rank - 1 if rank else None, rank + 1 if rank + 1 < n else None
    optimizer.zero_grad()
    loss = naive_pipeline(stage, loss_fn, microbatches, width, before, after)
    optimizer.step()  # of this worker's stage
    return loss


def naive_pipeline(
    stage: Any,
    loss_fn: Any,
    microbatches: list[tuple[Tensor, Tensor]],
    width: int,
    before: int | None,
    after: int | None,
) -> float | None:
    """Add a batch's gradients to the stage's: GPipe, waiting for every message.

    Args:
        microbatches: m pairs of x (b, ...) for the first stage, and y (b, ...) for the last.
        width: The width of the activations that this stage receives: (b, width).
        before: Rank of the stage before; None at the first.
        after: Rank of the stage after; None at the last.
    """
    kept = []
    for x, y in microbatches:  # all forward passes ..
        if before is not None:
            x = x.new_empty(len(x), width)
            dist.recv(x, before)
            x.requires_grad_()
        out = stage(x)  # (b, width of the next stage)
        if after is None:
            out = loss_fn(out, y) / len(microbatches)  # (): a part of the batch's mean
        else:
            dist.send(out.detach(), after)
        kept.append((x, out))
    for x, out in kept:  # .. then all backward passes
        gradient = torch.ones_like(out)  # dL/dL
        if after is not None:
            dist.recv(gradient, after)
        out.backward(gradient)
        if before is not None:
            dist.send(cast("Tensor", x.grad), before)
    return sum(float(out) for _, out in kept) if after is None else None


class ModelSplit(Strategy):
    """Pipelined model parallelism."""

    job: Job
    pipeline: Pipeline | None = None
    optimizer: torch.optim.Optimizer | None = None
    scheduler: Any = None
    state_is_collective = True
    _sample: Any = None
    _left_over = 0
    _held: list[str] | None = None
    _loss: Tensor | None = None

    def shard_source(self, source: Any) -> Any:
        """Keep one sample, to measure the model with a microbatch of it."""
        self._sample = source.peek()
        self._left_over = (source.samples or 0) % source.batch_size
        return source

    def prepare(self, job: Job) -> None:
        """Check the options; cut the model, unless the cut needs the first batch."""
        self.job = job
        self._same = SameBatch(self.context)
        self.arrange()
        self.device = torch.device(self.context.spec.device)
        self.schedule = self.options["schedule"]
        self.per_worker = schedules.stages_per_worker(self.options)
        self.microbatches = schedules.microbatches(self.options, self.workers, self._share_size())
        self.around = autocast(job.precision, self.device)
        if self._sample is not None and not self.context.membership.waits:
            # a worker that joins later does this with the others at that time
            self._lay_out(self._sample)
            self._sample = None

    def arrange(self) -> None:
        """Return the workers of this pipeline (here all of them), and this worker's place in it."""
        self.place, self.workers, self.pipelines = self.rank, self.world_size, 1
        self.group: Any = None

    def _share_size(self) -> int:
        """Return the largest number of samples of a batch that one pipeline computes."""
        return math.ceil(self.job.batch_size / self.pipelines)

    def _equal_microbatches(self) -> int:
        """Return the number of equal microbatches into which a share is cut.

        Raises:
            FitError: The share cannot be divided.
        """
        job, usual, least = self.job, self.microbatches, 1
        for count in range(usual, 0, -1) if self.options["microbatches"] is None else [usual]:
            try:
                schedules.microbatches({**self.options, "microbatches": count}, self.workers)
            except PlanError:
                break
            least = count
            if job.batch_size % (count * self.pipelines) == 0:
                if self._left_over and job.total_steps >= job.steps_per_epoch:
                    raise uneven(self._left_over, job.batch_size)
                return count
        raise uneven(job.batch_size, least * self.pipelines, last=False)

    def gradients_done(self, share: Share) -> None:
        """Prepare the update; a single pipeline has its gradients already."""

    def step(self, share: Share) -> StepResult:
        """Send the batch through the pipeline; each worker updates its own stages."""
        if self.pipeline is None:  # a stream gives its first samples only now
            self._lay_out(share.data)
        pipeline = self._pipeline
        self._compare(share)
        self.timeline.open()
        if self.optimizer is not None:
            self.optimizer.zero_grad(set_to_none=True)
        self._loss = loss = pipeline.train(share.data, share.samples)
        self.gradients_done(share)
        with self.timeline.blocked():
            self.shared.add_up()
        self.update()
        sent_bytes = float(pipeline.sent_bytes() + self.shared.sent_bytes)
        return self.timeline.finish(share.samples, loss, sent_bytes)

    def _compare(self, share: Share) -> None:
        """Check that the target on the last stage belongs to the first stage's input.

        If both have read the same targets, their samples are the same, and it does no harm that
        random changes of x differ.

        Raises:
            FitError: The targets differ.
        """
        step, program = self.context.step, self._pipeline.program
        if program.scored:
            return  # the targets pass through the stages with their input
        needed, row = program.compared(share.data), self.shard[0]
        other = self._same.other(step, needed, about=f"pipeline {row}")
        if other is not None:
            raise FitError(
                "The workers of a pipeline read different samples. So the targets on the last "
                "stage do not belong to the inputs on the first stage.",
                seen=f"step {step}: the targets of rank {self.rank} and of rank {other} differ",
                allowed="the same samples on every worker of a pipeline",
                next_step="use the same random seeds on all ranks of a pipeline; on every rank, "
                "the data set must return the same target for the same index",
                code="WB-FIT-189",
            )

    def _lay_out(self, batch: Any) -> None:
        """Cut the model, keep this worker's stages and free the rest. Collective."""
        job, model = self.job, self.job.model
        stages = self.workers * self.per_worker
        program = program_of(job, self.microbatch_of(batch))
        if program.scored:
            self.microbatches = self._equal_microbatches()
            program = program_of(job, self.microbatch_of(batch))
        if self.rank == 0 and self.microbatches > 1:
            self._warn_of_batchnorm()
        decided = cut(
            model, program, stages=stages, workers=self.workers, rank=self.rank,
            device=self.device, split_at=self.options["split_at"] or "",
            around=self.around,
        )  # fmt: skip
        failed: Exception | None = None
        try:
            self.take_share(decided)
        except Exception as error:  # out of memory: the others must not wait for this worker
            failed = error
        self._agree(failed)
        self.connect(decided)
        self.shared.begin_equal()
        self.build_optimizer()
        self._describe(decided)

    def connect(self, decided: Cut) -> None:
        """Link this worker's stages to the other stages of the pipeline."""
        model = self.job.model
        self.timeline = make_timeline(
            self.context, self.device, stamped=self._clocks_agree(),
            ends_together=self.pipelines > 1,
        )  # fmt: skip
        self.pipeline = Pipeline(
            decided, self.timeline, schedule=self.schedule, microbatches=self.microbatches,
            rank=self.place, workers=self.workers, device=self.device, around=self.around,
            group=self.group,
        )  # fmt: skip
        self._own = [p for p in model.parameters() if p.requires_grad and not p.is_meta]
        holders = {n: [stage % self.workers for stage in at] for n, at in decided.shared.items()}
        wire = data_wire(self.group, self.device)
        known = tensors_of(model, holders)
        self.shared = SharedGradients(holders, known, self.place, wire, self.group)

    def build_optimizer(self) -> None:
        """Make the optimizer of this worker's stages."""
        self.optimizer = own_optimizer(self.job.optimizer, self._own, self.job.model)
        if self.optimizer is not None:
            self.scheduler = build_scheduler(self.job.scheduler, self.optimizer)

    def _clocks_agree(self) -> bool:
        """Whether the workers' clocks can be compared and sent with their messages."""
        one_host = len(set(self.context.spec.hosts)) <= 1
        return one_host and backend_of(None, self.device) == "gloo"

    def take_share(self, decided: Cut) -> None:
        """Give this worker's stages real memory on the device; free the rest."""
        job, model = self.job, self.job.model
        self._held = held = share_names(decided, self.place, self.workers)
        if job.build is not None:
            unit_of = {n: i for i, layer in enumerate(decided.layers) for n in layer.names}
            fill(model, job.build, held, unit_of)
        let_go(model, held)
        move(model, held, self.device)
        adopt_share(model, decided, self.place, self.workers)

    def _agree(self, failed: Exception | None) -> None:
        """Raise on every rank if one worker could not build its part. Collective.

        The objects are sent from host memory, over the group's CPU backend: a device that has just
        run out of memory has no room for them.
        """
        every: list[Any] = [None] * self.world_size
        dist.all_gather_object(every, failed and f"{type(failed).__name__}: {failed}")
        if failed is not None:
            raise failed
        for rank, text in enumerate(every):
            if text is not None:
                raise FitError(
                    f"Worker {rank} could not build its stages.",
                    seen=text.splitlines()[0],
                    next_step="correct the cause of this error. If the worker's memory was full, "
                    "use more workers. Or give this worker fewer layers with -o split_at=NAME,NAME "
                    "(each named layer begins a new stage)",
                    code="WB-FIT-120",
                )

    def microbatch_of(self, batch: Any) -> Any:
        """Return a microbatch made of the available samples."""
        size = math.ceil(self._share_size() / self.microbatches)
        samples = batch_length(batch)

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or len(tensor) != samples:
                return tensor
            many = math.ceil(size / samples)
            return tensor.repeat(many, *[1] * (tensor.dim() - 1))[:size].contiguous()

        return map_batch(fill, batch)

    def update(self) -> None:
        """Take the step of this worker's stages, whose gradients are complete."""
        self.apply(self.norm())

    def norm(self) -> float | None:
        """Return the norm of the whole model's gradient, if it is clipped. Collective."""
        if self.job.clip_norm is None:
            return None
        wire = control_wire(self.group, self.device)
        other = self.shared.counted_elsewhere
        counted = [p.grad for p in self._own if p.grad is not None and id(p) not in other]
        came_s = self.timeline.came()
        norm, last_s = norm_over_stages(counted, came_s, self.workers, wire, self.group)
        self.timeline.met(came_s, last_s)
        return norm

    def apply(self, norm: float | None) -> None:
        """Clip by this norm of the gradient, if it is given, and update."""
        if norm is not None and self.job.clip_norm is not None:
            grads = [p.grad for p in self._own if p.grad is not None]
            scale(grads, norm, self.job.clip_norm)
        if self.optimizer is not None:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; the last stage computes them and sends them to the others."""
        if self.pipeline is None:
            raise FitError(
                "The model cannot be evaluated yet: the first training step splits it into stages.",
                next_step="train at least one step before you evaluate",
                code="WB-FIT-121",
            )
        pipeline, job, program = self._pipeline, self.job, self._pipeline.program
        names = ["loss", *job.metrics]
        sums = torch.zeros(len(names) + 1, dtype=torch.float64)
        with contextlib.ExitStack() as around:
            for module in pipeline.evaluating.values():
                around.enter_context(evaluating(module))
            around.enter_context(torch.no_grad())
            for share in shares:
                output = pipeline.forward(share.data, share.samples)
                if output is None:
                    continue
                scores = [output]
                if program.loss is not None:
                    target = map_batch(lambda t: t.to(self.device), program.target(share.data))
                    with self.around():
                        scores = [f(output, target) for f in (program.loss, *job.metrics.values())]
                values = torch.tensor([float(score) for score in scores], dtype=torch.float64)
                sums[:-1] += values * share.samples
                sums[-1] += share.samples
        wire = control_wire(None, self.device)
        sums = sums.to(wire)
        dist.all_reduce(sums)  # only last stages have any
        means: list[float] = (sums[:-1] / sums[-1]).tolist()
        return dict(zip(names, means, strict=True))

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the parameters and buffers of this worker's stages, by name in the model."""
        held = set(self._held or ())
        return to_numpy({n: t for n, t in self.job.model.state_dict().items() if n in held})

    def state(self) -> dict[str, Any]:
        """Return the whole model and optimizer, gathered from all stages. Collective."""
        return gather(self.job.model, self.optimizer, self.scheduler)

    def load_state(self, state: dict[str, Any]) -> None:
        """Load the part of `state`'s result that belongs to this worker's stages.

        Raises:
            FitError: The data is a stream: the model is cut at its first batch only.
        """
        if self.pipeline is None:
            raise FitError(
                "A pipeline cannot continue from a checkpoint if its data is a stream.",
                allowed="data with len(data), whose samples are data[0], data[1], ...",
                next_step="give wb.fit a map-style dataset or arrays",
                code="WB-FIT-122",
            )
        take(state, self.job.model, self.optimizer, self.scheduler)

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer."""
        return held_bytes(self.job.model, self.optimizer)

    def close(self) -> None:
        """Drop the stages; the user's model keeps this worker's part."""
        self.pipeline = self.optimizer = self.scheduler = None
        self.shared = SharedGradients({}, {}, 0, torch.device("cpu"), None)
        gc.collect()

    def _warn_of_batchnorm(self) -> None:
        size = math.ceil(self._share_size() / self.microbatches)
        text = batchnorm_warning(self.job.model, size, self.job.batch_size, self.microbatches)
        if text:
            self.context.emit(events.Warned(rank=0, text=text))

    def _describe(self, decided: Cut) -> None:
        if not self._clocks_agree():
            why = "the workers' clocks cannot be compared, so bubble_s also contains the sync wait"
            self.context.emit(events.Unmeasured(columns={"sync_wait_s": why}))
        if self.rank:
            return
        ideal = schedules.ideal_bubble(
            self.schedule, self.workers, self.microbatches, self.per_worker
        )
        self.context.emit(
            events.WasCut(rank=0, stages=decided.table(self.workers), pipelines=self.pipelines,
            schedule=self.schedule, microbatches=self.microbatches,
            microbatch_samples=decided.samples, ideal_bubble=ideal))  # fmt: skip

    @property
    def _pipeline(self) -> Pipeline:
        assert self.pipeline is not None, "internal error: no stages yet"
        return self.pipeline
