"""Tensor parallelism: the weight matrices of a layer are divided over the workers.

Source: Shoeybi et al., Megatron-LM: Training Multi-Billion Parameter Language Models Using Model
Parallelism, 2019, section 3. Workbench uses PyTorch's DTensor and `parallelize_module` for it.

    y = act(x A) B      A = [A_0 | A_1] by columns, B = [B_0 ; B_1] by rows

    worker 0:  x -> act(x A_0) -> (..) B_0 --+                    +--> y -> loss -> backward
    worker 1:  x -> act(x A_1) -> (..) B_1 --+-- all-reduce (+) --+--> y -> loss -> backward

    backward: dL/dx = sum over workers of their parts, one more all-reduce per pair of layers

Every worker gets the whole batch and holds 1/n of the divided layers' parameters, gradients and
optimizer state. All workers hold the layers that are not divided (norms, convolutions) and update
them in the same way. Two layers can form a pair: the first is divided by columns (`col`), the
second by rows (`row`). The operations between these two layers work element by element, so each
worker can continue with its own columns. Therefore a pair needs only one communication in the
forward pass and one in the backward pass. A divided layer without a partner is `gathered`: it is
divided by columns, and its output is gathered immediately. Attention is a pair too: its heads are
divided among the workers (q, k and v by columns, the output by rows).

In a Sequential, the order of the layers shows which layers form pairs. In other models, Workbench
guesses the pairs from common names (`fc1` and `fc2`, `q_proj` to `o_proj`, ..). Before training it
tests these guesses with one sample: the loss and the gradient norm must be the same as on one
device. If the values differ, the guessed layers are `gathered`. They are also `gathered` if a
worker's device does not have enough free memory for this test.

Workers wait for each other during the forward pass and the backward pass. So for each worker,
Workbench computes the ready time: the time at which its gradients would be ready if communication
never blocked this worker (`parts/timing.py`). The worker with the latest ready time has no sync
wait; the other workers wait for this worker.
In the first step, Workbench counts the bytes that each collective operation sends, but not on GPUs.
A ring all-reduce of a tensor of S bytes counts as 2 S (n-1)/n bytes. An all-gather or a
reduce-scatter counts as S (n-1)/n bytes, where S is the size of the whole tensor. Workbench divides
the bytes of the first step by the number of samples of this step. For a later step, it multiplies
the result by the number of samples of the later step.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ...engine.contract import NAN, Job, Share
from ...engine.torch import accelerator
from ...engine.torch.data import map_batch, tensors_of
from ...engine.torch.same_batch import SameBatch
from ...engine.torch.support import evaluating
from ...errors import FitError
from ...shared import events
from .parts.guard import Guard, begin_equal
from .parts.layout import Layout, Partitioned, clip_grad_norm, grad_norm, make_mesh
from .parts.replica import Trainer, bytes_of

if TYPE_CHECKING:
    from ...engine.telemetry.recorder import StepResult

Plan = dict[str, str]
"""Maps the name of each layer to its style: `col`, `row`, `gathered`, `split_row`, `heads`."""

STYLES = {
    "col": "weights divided by columns; the output stays divided",
    "row": "weights divided by rows; the input must already be divided; the outputs of all "
    "workers are added up",
    "gathered": "weights divided by columns; every worker gets the whole output",
    "split_row": "weights divided by rows; the input is not divided",
    "heads": "weights divided as in col; for code that reshapes the output into attention heads",
}
ALONE = ("gathered", "split_row")


# Modules that can be between the two layers of a pair: they work on each number separately.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
    nn.Identity,
)  # fmt: skip

# Usual names of layers that work in pairs: (divided by columns), divided by rows, attention.
USUAL: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj", True),
    (("q_proj", "k_proj", "v_proj"), "out_proj", True),
    (("query", "key", "value"), "out", True),
    (("query", "key", "value"), "proj", True),
    (("to_q", "to_k", "to_v"), "to_out", True),
    (("wq", "wk", "wv"), "wo", True),
    (("gate_proj", "up_proj"), "down_proj", False),
    (("up_proj",), "down_proj", False),
    (("w1", "w3"), "w2", False),
    (("fc1",), "fc2", False),
    (("c_fc",), "c_proj", False),
    (("lin1",), "lin2", False),
    (("linear1",), "linear2", False),
    (("dense_h_to_4h",), "dense_4h_to_h", False),
)


def find_plan(model: nn.Module, workers: int) -> tuple[Plan, Plan]:
    """Return the plan with guesses from usual names, and the plan without guesses.

    Raises:
        FitError: No layer can be divided.
    """
    safe = {name: style for name, module in _layers(model) if (style := _alone(module, workers))}
    if not safe:
        raise FitError(
            "The model has no layer that can be divided among the workers.",
            seen=", ".join(sorted({type(module).__name__ for module in model.modules()})),
            allowed=f"Linear or Embedding layers with at least {workers} inputs or outputs",
            next_step="use the strategy `mirrored` or `sharded`",
            code="WB-FIT-151",
        )
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            for first, second in _neighbours(module):
                names = [_join(prefix, first)], _join(prefix, second)
                _pair(model, safe, *names, "col", workers)
    found = dict(safe)
    for prefix, module in model.named_modules():
        own = dict(module.named_children())
        for columns, row, attention in USUAL:
            if all(isinstance(own.get(name), nn.Linear) for name in (*columns, row)):
                names = [_join(prefix, name) for name in columns], _join(prefix, row)
                _pair(model, found, *names, "heads" if attention else "col", workers)
    return found, safe


def given_plan(model: nn.Module, text: str, workers: int) -> Plan:
    """Read `NAME=STYLE,..`; names may contain `*`.

    Raises:
        FitError: A name or style is unknown, or a layer cannot be divided that way.
    """
    layers = dict(_layers(model))
    plan: Plan = {}
    for part in text.split(","):
        pattern, _, style = part.strip().partition("=")
        if style not in STYLES:
            raise FitError(
                "`plan` must be a list of NAME=STYLE, separated by commas.",
                seen=part,
                allowed="NAME=STYLE, where STYLE is one of "
                + "; ".join(f"{name} ({what})" for name, what in STYLES.items()),
                code="WB-FIT-152",
            )
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise FitError(
                "`plan` names a layer that the model does not have.",
                seen=pattern,
                allowed=", ".join(layers)
                or ("no layer, because the model has no Linear or Embedding layer"),
                next_step="use the allowed names (* matches any text), or -o plan=auto"
                if layers
                else "use the strategy `mirrored` or `sharded`",
                code="WB-FIT-153",
            )
        plan.update(dict.fromkeys(names, style))
    return plan


def apply_plan(model: nn.Module, plan: Plan, mesh: Any) -> None:
    """Divide the layers, in place."""
    if "" in plan:  # the model is itself the layer
        parallelize_module(model, mesh, _style(plan[""], model))
        return
    layers = {name: model.get_submodule(name) for name in plan}
    parallelize_module(model, mesh, {name: _style(plan[name], m) for name, m in layers.items()})


def describe(model: nn.Module, plan: Plan) -> str:
    """Return the plan as text for the user."""
    divided = sum(p.numel() for name in plan for p in model.get_submodule(name).parameters())
    share = divided / max(sum(p.numel() for p in model.parameters()), 1)
    layers = ", ".join(f"{name or 'the model'}={style}" for name, style in plan.items())
    return f"Layers divided among the workers: {layers} ({share:.0%} of the parameters)."


def _style(style: str, module: nn.Module) -> ParallelStyle:
    if style == "col":
        return ColwiseParallel()
    if style == "heads":
        return ColwiseParallel(use_local_output=False)
    if style == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "split_row":
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel(input_layouts=Shard(-1))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can be divided.

    A weight that two modules share stays whole, and so does a weight that is computed from other
    parameters.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    attention = {
        id(inner)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)  # reads its layers' weights itself
        for inner in module.modules()
    }
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)) or id(module) in attention:
            continue
        if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            continue
        if (
            not set(module._parameters) <= {"weight", "bias"}
            or module._parameters.get("weight") is None
        ):
            continue  # its weight is computed from others (weight_norm, orthogonal)
        if all(holders[id(p)] == 1 for p in module.parameters(recurse=False)):
            yield name, module


def _alone(module: nn.Module, workers: int) -> str | None:
    """Return the style of a layer that has no partner."""
    if isinstance(module, nn.Embedding):
        return "gathered" if module.embedding_dim >= workers else None
    assert isinstance(module, nn.Linear)
    if module.out_features >= max(workers, 2):  # DTensor cannot divide a dimension of 1
        return "gathered"
    return "split_row" if module.in_features >= workers else None


def _neighbours(sequence: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Yield names of Linear layers with only elementwise functions between them."""
    waiting: str | None = None
    for name, module in sequence.named_children():
        if isinstance(module, nn.Linear):
            if waiting is None:
                waiting = name
                continue
            yield waiting, name
            waiting = None
        elif type(module) not in ELEMENTWISE:
            waiting = None


def _pair(
    model: nn.Module, plan: Plan, columns: list[str], row: str, style: str, workers: int
) -> None:
    """Make a pair if both layers are in the plan, are not paired yet, and divide evenly."""
    if not all(plan.get(name) in ALONE for name in (*columns, row)):
        return
    widths: list[Any] = [model.get_submodule(name).out_features for name in columns]
    if any(width % workers for width in widths):
        return
    plan.update(dict.fromkeys(columns, style))
    plan[row] = "row"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


TOLERANCE = 1e-3
TRIAL = 3
"""Memory of the trial on one device, as a multiple of the model's bytes: with gradients and
activations."""


def naive_step(
    column: Any, row: Any, bias: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor
) -> float:
    """Take one step of tanh(x A) B + bias on the whole batch: x (samples, d). Return its loss.

    If a layer comes before the pair, it receives dL/dx: x.grad, added up by one more all-reduce.
    `TensorParallel` finds the pairs of a whole model, and DTensor does the computation shown here.

    Args:
        column: Linear(d, h/n), whose columns A_r are this worker's part of A.
        row: Linear(h/n, k) without bias, whose rows B_r are this worker's part of B.
        bias: Shape (k,); all workers hold it, and each adds it once.
    """
    optimizer.zero_grad()
    part = row(torch.tanh(column(x)))  # (samples, k): tanh(x A_r) B_r
    out = part.detach().clone()
    dist.all_reduce(out)  # (samples, k): the sum over the workers
    out.requires_grad_()
    loss = loss_fn(out + bias, y)  # the same everywhere
    loss.backward()  # as far as `out`
    part.backward(out.grad)  # a sum passes its gradient to each of its parts
    optimizer.step()
    return float(loss)


class TensorParallel(Partitioned):
    """Layers divided over the workers."""

    waits: Waits | None = None
    guard: Guard | None = None
    sample: Any = None
    bytes_per_sample = NAN

    def shard_source(self, source: Any) -> Any:
        """Take a sample to test the plan; the data does not change."""
        self.sample = source.peek()
        return source

    def prepare(self, job: Job) -> None:
        """Divide the layers; the optimizer holds this worker's parts."""
        self._same = SameBatch(self.context)
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
        """Compute every layer together; update this worker's parts."""
        trainer, waits = self._trainer, self.waits
        assert waits is not None
        self._compare(share)
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

    def _compare(self, share: Share) -> None:
        """Check that all workers compute the same batch.

        Raises:
            FitError: Two workers have read different batches.
        """
        step = self.context.step
        other = self._same.other(step, tensors_of(share.data), about="tensor parallel")
        if other is not None:
            raise FitError(
                "The workers must read the same batch, because they compute every layer together.",
                seen=f"step {step}: the batches of rank {self.rank} and of rank {other} differ",
                allowed="the same batch on every worker",
                next_step="use the same random seeds on all ranks; on every rank, the data set "
                "must return the same sample for the same index",
                code="WB-FIT-190",
            )

    def finish(self) -> None:
        """Gather the trained model; the undivided parameters must still be equal."""
        if self.guard is not None:
            self.guard.settle()
        super().finish()

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; all workers compute every layer together."""
        return self._trainer.evaluate(shares)

    def _choose(self, job: Job) -> Plan:
        """Return the given plan, or the best plan with the same result as on one device."""
        if self.options["plan"] != "auto":
            return given_plan(job.model, self.options["plan"], self.world_size)
        found, safe = find_plan(job.model, self.world_size)
        if found == safe or self.sample is None or self.world_size == 1:
            return safe
        if not self._everywhere(self._has_room(job.model)):
            if self.rank == 0:
                text = (
                    "The names of some layers suggest that these layers form pairs. In a pair, the "
                    "second layer can use the divided output of the first layer. Workbench could "
                    "not test the pairs, because the device of at least one worker does not have "
                    "enough free memory. So Workbench gathers the outputs of these layers. If the "
                    "layers really form pairs, it is not necessary to gather these outputs. In "
                    "this case, give the pairs in the option `plan`: `-o plan=fc1=col,fc2=row` "
                    "(with the names of your layers)."
                )
                self.context.emit(events.Noted(rank=0, text=text))
            return safe
        model = job.model.to(self.device)
        truth = self._trial(model, job)
        layout = Layout(model, None, lambda m: apply_plan(m, found, self.mesh))
        try:
            tried = self._trial(model, job)
            same = torch.allclose(tried, truth, rtol=TOLERANCE, atol=TOLERANCE)
        except (RuntimeError, ValueError, NotImplementedError, AssertionError):
            same = False  # the guess does not fit the model's code
        layout.gather()
        return found if self._everywhere(same) else safe

    def _has_room(self, model: torch.nn.Module) -> bool:
        """Whether the whole model fits this worker's device for the test."""
        room = accelerator.of(self.device).memory()
        needed_bytes = TRIAL * bytes_of([*model.parameters(), *model.buffers()])
        return room is None or room.free_bytes > needed_bytes

    def _everywhere(self, true: bool) -> bool:
        """Whether a condition is true on all workers. Collective."""
        verdict = torch.tensor([float(true)], device=self.device)
        dist.all_reduce(verdict, dist.ReduceOp.MIN)
        return bool(verdict > 0)

    def _trial(self, model: torch.nn.Module, job: Job) -> torch.Tensor:
        """Return loss and gradient norm of one sample; nothing is changed."""
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
        """Restore the user's module."""
        self.sample = self.waits = self.guard = None
        super().close()


def one_by_one(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimizer step parameter by parameter if it has both divided and whole parameters."""
    for group in optimizer.param_groups:
        divided = {isinstance(parameter.data, DTensor) for parameter in group["params"]}
        if len(divided) > 1 and "foreach" in group:
            group["foreach"] = False


class Waits:
    """Times the periods in which this worker waits for a collective's result."""

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
    """Adds up the bytes that this worker sends in collectives."""

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
        """Count a collective; DTensors dispatch themselves, and their calls come back here."""
        if any(kind is DTensor for kind in types):
            return NotImplemented
        if func.namespace == "_c10d_functional":
            factor = self._factors.get(func._schema.name.partition("::")[2].rstrip("_"), 0)
            self.sent_bytes += factor * args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))
