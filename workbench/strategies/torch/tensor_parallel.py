"""Tensor parallelism: the weight matrices of a layer are divided over the workers.

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3. PyTorch's DTensor and `parallelize_module` are the implementation.

    y = act(x A) B      A = [A_0 | A_1] by columns, B = [B_0 ; B_1] by rows

    worker 0:  x -> act(x A_0) -> (..) B_0 --+                    +--> y -> loss -> backward
    worker 1:  x -> act(x A_1) -> (..) B_1 --+-- all-reduce (+) --+--> y -> loss -> backward

    backward: dL/dx = sum over workers of their parts, one more all-reduce per pair of layers

Every worker sees the whole batch and holds 1/n of the divided layers' parameters, gradients and
optimizer state; what is not divided (norms, convolutions) all hold and update alike. A pair
(col, row) meets once per pass, whatever lies between being element by element; a layer that stands
alone is `gathered`: divided by columns, its output put together at once. Attention is a pair as
well: the heads are divided (q, k, v by columns, the output by rows).

Which layers pair is seen in a Sequential, and guessed from usual names elsewhere (fc1/fc2,
q_proj/../o_proj, ..). Guesses are put to the proof before training: loss and gradient norm of one
sample must be what they are on one device, else those layers are gathered. So they are where the
model has no room on one device to be tried there.

Workers wait for each other inside forward and backward; the wait is read from the clock of a
worker's own work (`parts/timing.py`). Bytes sent are counted by intercepting the first step's
collectives (ring all-reduce 2 (n-1)/n, all-gather and reduce-scatter (n-1)/n of the whole), and
follow the number of samples after that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.contract import NAN, Job, Share
from ...engine.torch import accelerator
from ...engine.torch.data import map_batch
from ...engine.torch.support import evaluating
from ...shared import events
from .parts.guard import Guard
from .parts.layout import Layout, Partitioned, clip_grad_norm, grad_norm, make_mesh
from .parts.replica import Trainer, bytes_of
from .parts.replicas import begin_equal
from .parts.tensor_plan import Plan, apply_plan, describe, find_plan, given_plan

if TYPE_CHECKING:
    from ...engine.telemetry.recorder import StepResult

TOLERANCE = 1e-3
TRIAL = 3
"""Times the model's bytes that its trial takes on one device: with gradients and activations."""


def naive_step(
    column: Any, row: Any, bias: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor
) -> float:
    """Take one step of tanh(x A) B + bias on the whole batch: x (samples, d). Return its loss.

    Where a layer stands before the pair, it is handed dL/dx: x.grad, added up by one more
    all-reduce. `TensorParallel` finds the pairs of a whole model, and leaves this to DTensor.

    Args:
        column: Linear(d, h/n), whose columns A_r are this worker's part of A.
        row: Linear(h/n, k) without bias, whose rows B_r are this worker's part of B.
        bias: Shape (k,); all workers hold it, and add it once.
    """
    optimizer.zero_grad()
    part = row(torch.tanh(column(x)))  # (samples, k): tanh(x A_r) B_r
    out = part.detach().clone()
    dist.all_reduce(out)  # (samples, k): the sum over the workers
    out.requires_grad_()
    loss = loss_fn(out + bias, y)  # the same everywhere
    loss.backward()  # as far as `out`
    part.backward(out.grad)  # a sum hands its gradient on to each of its parts
    optimizer.step()
    return float(loss)


class TensorParallel(Partitioned):
    """Layers divided over the workers."""

    waits: Waits | None = None
    guard: Guard | None = None
    sample: Any = None
    bytes_per_sample = NAN

    def shard_source(self, source: Any) -> Any:
        """Take a sample for the proof of the plan; the data stays as it is."""
        self.sample = source.peek()
        return source

    def prepare(self, job: Job) -> None:
        """Divide the layers; the optimizer holds this worker's parts."""
        begin_equal(job.model, self.device)
        self.mesh = make_mesh(self.device, (self.world_size,), ("tensor",))
        plan = self._choose(job)
        if self.rank == 0:
            self.context.emit(events.Noted(rank=0, text=describe(job.model, plan)))

        def lay_out(model: torch.nn.Module) -> None:
            self.layout = Layout(model, job.optimizer, lambda m: apply_plan(m, plan, self.mesh))

        self.trainer = trainer = Trainer(self.context, job, lay_out=lay_out, divided=True)
        trainer.clip = clip_grad_norm
        one_by_one(trainer.optimizer)
        self.waits = Waits(trainer.timer, self.context.faults)
        self.guard = Guard(self.context, "rounding")
        self.guard.add(trainer.model)

    def step(self, share: Share) -> StepResult:
        """Compute every layer together; update the own parts."""
        trainer, waits = self._trainer, self.waits
        assert waits is not None
        counter = None
        with waits:
            if self.bytes_per_sample != self.bytes_per_sample and trainer.device.type == "cpu":
                counter = BytesSent(self.world_size)
                with counter:
                    trainer.gradients(share)
                self.bytes_per_sample = counter.sent_bytes / share.samples
            else:
                trainer.gradients(share)
            trainer.timer.ready()
            trainer.update()
        result = trainer.measured(share, self.bytes_per_sample * share.samples)
        if self.guard is not None:
            result.aside_s = self.guard.tick()
        return result

    def finish(self) -> None:
        """Gather the trained model; what all workers hold must still be equal."""
        if self.guard is not None:
            self.guard.settle()
        super().finish()

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; all workers compute every layer together."""
        return self._trainer.evaluate(shares)

    def _choose(self, job: Job) -> Plan:
        """Return the plan given, or the best one that computes what one device computes."""
        if self.options["plan"] != "auto":
            return given_plan(job.model, self.options["plan"], self.world_size)
        found, safe = find_plan(job.model, self.world_size)
        if found == safe or self.sample is None or self.world_size == 1:
            return safe
        if not self._everywhere(self._has_room(job.model)):
            if self.rank == 0:
                text = "The model has no room on one device, so the layers that pair by their "
                text += "names were not tried; they are gathered. Say it with -o plan=NAME=col,.."
                self.context.emit(events.Noted(rank=0, text=text))
            return safe
        model = job.model.to(self.device)
        truth = self._trial(model, job)
        layout = Layout(model, None, lambda m: apply_plan(m, found, self.mesh))
        try:
            tried = self._trial(model, job)
            same = torch.allclose(tried, truth, rtol=TOLERANCE, atol=TOLERANCE)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError):
            same = False  # the guess does not suit the model's code
        layout.gather()
        return found if self._everywhere(same) else safe

    def _has_room(self, model: torch.nn.Module) -> bool:
        """Whether the whole model can be tried on this worker's device."""
        room = accelerator.of(self.device).memory()
        needed_bytes = TRIAL * bytes_of([*model.parameters(), *model.buffers()])
        return room is None or room.free_bytes > needed_bytes

    def _everywhere(self, true: bool) -> bool:
        """Whether something is true on all workers. Collective."""
        verdict = torch.tensor([float(true)], device=self.device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        return bool(verdict > 0)

    def _trial(self, model: torch.nn.Module, job: Job) -> torch.Tensor:
        """Return loss and gradient norm of one sample, without touching anything."""
        batch = map_batch(lambda t: t.to(self.device), self.sample)
        try:
            with evaluating(model):
                if job.step_fn is not None:
                    loss = job.step_fn(model, batch)
                else:
                    loss = job.loss(model(batch[0]), batch[1])
                loss.backward()
            return torch.stack([loss.detach().double(), grad_norm(model.parameters())])
        finally:
            for parameter in model.parameters():
                parameter.grad = None

    def close(self) -> None:
        """Give the user's module back as it was."""
        self.sample = self.waits = self.guard = None
        super().close()


def one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step parameter by parameter where divided and whole ones are mixed."""
    for group in optimizer.param_groups:
        divided = {isinstance(parameter.data, DTensor) for parameter in group["params"]}
        if len(divided) > 1 and "foreach" in group:
            group["foreach"] = False


class Waits:
    """Times the stretches in which this worker waits for a collective's result."""

    def __init__(self, timer: Any, faults: Any) -> None:
        self._timer, self._faults = timer, faults

    def __enter__(self) -> None:
        self._original = original = functional.wait_tensor

        def wait_tensor(tensor: torch.Tensor) -> torch.Tensor:
            with self._timer.blocked():
                if self._faults.on_links:
                    self._faults.travel(tensor.numel() * tensor.element_size())
                return original(tensor)  # type: ignore[no-any-return, no-untyped-call]

        functional.wait_tensor = wait_tensor

    def __exit__(self, *error: object) -> None:
        functional.wait_tensor = self._original


class BytesSent(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up what this worker sends in collectives."""

    def __init__(self, workers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sent_bytes = 0.0
        share = (workers - 1) / workers
        # Factor on the size of the collective's input.
        self._factors = {
            "all_reduce": 2 * share,
            "all_gather_into_tensor": workers - 1,
            "reduce_scatter_tensor": share,
            "all_to_all_single": share,
        }

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count a collective; DTensors are left to their own dispatch, which comes back here."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional":
            factor = self._factors.get(func._schema.name.partition("::")[2].rstrip("_"), 0)
            self.sent_bytes += factor * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))
