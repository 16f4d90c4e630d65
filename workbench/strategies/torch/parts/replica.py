"""One replica: the module, its optimizer, and how a share becomes gradients.

The common part of all strategies with replicas: microbatches, mixed precision, clipping, the
scheduler, evaluation, weights. The strategies differ in how gradients are averaged.

A replica is saved and loaded as its parts: model, optimizer, scheduler, loss scaler. They are the
same for a `wb.fit` and for a user's own loop (`user_loop.py`), so both can use a checkpoint of
either. A worker's memory between steps is counted over parameters, buffers, gradients and the
optimizer's state.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ....engine.contract import NAN, Job, Share, check_weights
from ....engine.telemetry.recorder import StepResult
from ....engine.torch import accelerator
from ....engine.torch.data import map_batch, slice_batch
from ....engine.torch.support import check_closure, evaluating
from ....errors import FitError
from .guard import KeptBuffers
from .timing import make_timer

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from .reduction import Reductions

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Trainer:
    """A replica on this worker's device.

    Args:
        lay_out: Re-partitions the model's parameters in place before the optimizer is made.
        even: Whether all workers must do the same number of forward passes, because they
            communicate in them. A worker with fewer samples then does extra passes that do not
            count.
        divided: Whether workers hold gradients of different parameters, so that they must agree
            which steps of fp16 are skipped.

    Attributes:
        model: The user's module, moved in place.
        forward: The callable for a batch; a strategy puts its wrapper here.
        optimizer: Built from the job.
    """

    def __init__(
        self,
        context: RunContext,
        job: Job,
        *,
        lay_out: Callable[[torch.nn.Module], None] | None = None,
        even: bool = False,
        divided: bool = False,
    ) -> None:
        self.job = job
        self.device = torch.device(context.spec.device)
        if lay_out is not None:
            # moves only this worker's part, because the whole model may not fit the device
            lay_out(job.model)
        self.model = job.model.to(self.device)
        self.clip: Callable[..., object] = torch.nn.utils.clip_grad_norm_
        self._workers, self._even = context.spec.world_size, even
        self.forward: Any = self.model
        self.timer = make_timer(context, self.device)
        self.optimizer = build_optimizer(job.optimizer, self.model)
        self.scheduler = build_scheduler(job.scheduler, self.optimizer)
        self._on_cpu = self.device.type == "cpu"
        self._dtype = PRECISIONS.get(job.precision or "")
        self.scaler: Any = None
        if job.precision == "fp16" and needs_scaling(self.device):
            kind = AgreedScaler if divided else torch.amp.GradScaler
            self.scaler = kind(self.device.type)
        self._clipped = [p for p in self.model.parameters() if p.requires_grad]
        self._loss: torch.Tensor = torch.tensor(NAN)
        self.buffers = KeptBuffers(self.model.buffers())
        several = self._workers > 1 and job.step_fn is not None
        self._around_step_fn: Any = NoBackward() if several else _NOTHING

    def be_one_of(self, workers: int) -> None:
        """Set the number of workers from now on."""
        self._workers = workers

    def contributed(self, share: Share) -> StepResult:
        """Return the known results of a step if this worker computed only its share."""
        loss = float(self._loss)
        return StepResult(share.samples, loss, compute_s=NAN, has_loss=True)

    def wrap(self, forward: Any) -> None:
        """Let batches go through `forward` (DDP around the model), compiled if requested."""
        self.forward = torch.compile(forward) if self.job.compile else forward

    def gradients(
        self,
        share: Share,
        *,
        weight: float = 1.0,
        alone: Callable[[], Any] = contextlib.nullcontext,
        reductions: Reductions | None = None,
    ) -> None:
        """Compute the gradients of a share: forward and backward over its micro-batches.

        Args:
            weight: Factor on the share's mean loss in backward.
            alone: Context for all microbatches except the last, without communication.
            reductions: Averages the gradients of the last backward, if that is done.
        """
        self.timer.begin()
        self.optimizer.zero_grad(set_to_none=True)
        self.timer.spend("forward")
        parts = self._micro_batches(share)
        total: torch.Tensor | None = None
        for data, fraction in parts[:-1]:
            with alone():
                loss = self.loss(data)
                self._backward(loss, weight * fraction)
            total = _add(total, loss.detach(), fraction)
        data, fraction = parts[-1]
        loss = self.loss(data)
        # Before backward, because backward fails if another worker has died.
        self._loss = _add(total, loss.detach(), fraction)
        self._backward(loss, weight * fraction, last=True, reductions=reductions)

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean loss of a collated batch."""
        with self._precision():
            if self.job.step_fn is not None:
                with self._around_step_fn:
                    loss = self.job.step_fn(self.forward, batch)
                if not isinstance(loss, torch.Tensor):
                    raise FitError(
                        "`step_fn` must return the mean loss of the batch.",
                        seen=type(loss).__name__
                        + (f" with the keys {', '.join(loss)}" if isinstance(loss, dict) else ""),
                        allowed="a tensor with one number",
                        next_step=_how_to_return(loss),
                        code="WB-FIT-192",
                    )
            else:
                x, y = batch
                loss = self.job.loss(self.forward(x), y)
        return loss  # type: ignore[no-any-return]

    def update(self) -> None:
        """Clip, step the optimizer, step the scheduler."""
        clip_norm = self.job.clip_norm
        if self.scaler is None:
            if clip_norm is not None:
                self.clip(self._clipped, clip_norm)
            self.optimizer.step()
        else:
            if clip_norm is not None:
                self.scaler.unscale_(self.optimizer)
                self.clip(self._clipped, clip_norm)
            self.scaler.step(self.optimizer)
            self.scaler.update()
        if self.scheduler is not None:
            self.scheduler.step()

    def sit_out(self) -> None:
        """Skip training for a step; the learning rate's schedule continues."""
        self.timer.begin()
        self._loss = torch.tensor(NAN)
        self.schedule()

    def schedule(self) -> None:
        """Advance the learning rate's schedule by a step that this worker did not take."""
        if self.scheduler is not None:
            with warnings.catch_warnings():  # it expects the optimizer to have stepped
                warnings.simplefilter("ignore", UserWarning)
                self.scheduler.step()

    def measured(self, share: Share, sent_bytes: float = 0.0) -> StepResult:
        """Return the step's measurements; call it last."""
        return self.timer.finish(share.samples, self._loss, sent_bytes)

    def _backward(
        self,
        loss: torch.Tensor,
        weight: float,
        *,
        last: bool = False,
        reductions: Reductions | None = None,
    ) -> None:
        if weight != 1.0:
            loss = loss * weight
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        if reductions is not None:
            (loss,) = reductions.before_backward([loss])
        if reductions is not None and reductions.overlapped:
            self.timer.watch_backward(loss)
        elif last:
            self.timer.spend("backward")
        loss.backward()  # type: ignore[no-untyped-call]
        if reductions is not None:
            reductions.after_backward(self.timer)

    def _precision(self) -> Any:
        if self._dtype is None:
            return _NOTHING
        return torch.autocast(self.device.type, dtype=self._dtype)

    def _micro_batches(self, share: Share) -> list[tuple[Any, float]]:
        """Return (data on the device, fraction of the share) of each micro-batch."""
        data = share.data if self._on_cpu else self.to_device(share.data)
        most = -(-share.global_samples // self._workers) if self._even else share.samples
        count = min(self.job.accumulate, most)
        if count <= 1:
            return [(data, 1.0)]
        held = max(share.samples, 1)  # a share without samples holds one sample that does not count
        cuts = [i * held // count for i in range(count + 1)]
        return [
            (slice_batch(data, a, max(b, a + 1), held), (b - a) / held) for a, b in pairwise(cuts)
        ]

    def to_device(self, data: Any) -> Any:
        """Return a batch on this worker's device."""
        return map_batch(lambda t: t.to(self.device, non_blocking=True), data)

    def evaluate(
        self,
        shares: Iterable[Share],
        add_up: Callable[[torch.Tensor], None] = lambda sums: None,
    ) -> dict[str, float]:
        """Return loss and metrics over an evaluation set, each a mean over its samples.

        Args:
            add_up: Adds a tensor (metrics + 2,) of sums over all workers, in place.
        """
        names = ["loss", *self.job.metrics]
        sums = torch.zeros(len(names) + 1, dtype=torch.float64, device=self.device)
        with evaluating(self.model), torch.no_grad():
            for share in shares:
                if share.samples or self._even:
                    sums[:-1] += self._scores(self.to_device(share.data)) * share.samples
                    sums[-1] += share.samples
        add_up(sums)
        means = (sums[:-1] / sums[-1]).tolist()
        return dict(zip(names, means, strict=True))

    def _scores(self, batch: Any) -> torch.Tensor:
        job = self.job
        with self._precision():
            if job.step_fn is not None:
                values = [job.step_fn(self.model, batch)]
            else:
                x, y = batch
                out = self.model(x)
                values = [job.loss(out, y), *(metric(out, y) for metric in job.metrics.values())]
        return torch.stack(
            [torch.as_tensor(v, dtype=torch.float64, device=self.device) for v in values]
        )

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name."""
        return to_numpy(self.model.state_dict())

    def state(self) -> dict[str, Any]:
        """Return model, optimizer, scheduler and scaler, on the CPU."""
        return copied_state(self)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        load_parts(self, state)


class BeforeStep:
    """A copy of a replica, for a step that can fail after it has changed the replica."""

    def __init__(self, trainer: Trainer, more: Iterable[torch.Tensor] = ()) -> None:
        self._trainer = trainer
        model = trainer.model
        self._tensors = [t for t in (*model.parameters(), *model.buffers(), *more) if t.numel()]
        self._copies: list[torch.Tensor] = []
        self._rest: dict[str, Any] = {}

    def take(self) -> None:
        """Take the copy, replacing the last one."""
        with torch.no_grad():
            if not self._copies:
                self._copies = [torch.empty_like(tensor) for tensor in self._tensors]
            torch._foreach_copy_(self._copies, self._tensors)
        self._rest = map_batch(lambda t: t.detach().clone(), steps_state(self._trainer))

    def put_back(self) -> None:
        """Restore the replica."""
        with torch.no_grad():
            torch._foreach_copy_(self._tensors, self._copies)
        load_steps(self._trainer, self._rest)


def needs_scaling(device: torch.device) -> bool:
    """Whether losses are scaled with fp16; on a CPU this is only useful to try a recipe."""
    return device.type != "cpu"


class AgreedScaler(torch.amp.GradScaler):
    """Scales losses if parameters are divided over the workers.

    Each worker checks its own part of each gradient (whole tensors and parts cannot be checked in
    one call). All workers skip a step if any of them met an overflow.
    """

    def _unscale_grads_(
        self, optimizer: Any, inv_scale: Any, found_inf: Any, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for group in optimizer.param_groups:
            for gradient in (p.grad for p in group["params"] if p.grad is not None):
                own = gradient.to_local() if hasattr(gradient, "to_local") else gradient
                kinds.setdefault(own.dtype, []).append(own)
        for gradients in kinds.values():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found_inf, inv_scale)
        dist.all_reduce(found_inf, dist.ReduceOp.MAX)
        return {found_inf.device: found_inf}


class NoBackward:
    """Refuses backward while entered, because these gradients would not be averaged.

    Attributes:
        refused: The error of the last refused backward.
    """

    refused: FitError | None = None

    def __enter__(self) -> NoBackward:
        self._original = torch.autograd.backward  # that of tensors calls it
        torch.autograd.backward = self._refuse
        return self

    def __exit__(self, *error: object) -> None:
        torch.autograd.backward = self._original

    def _refuse(self, *_: Any, **__: Any) -> None:
        self.refused = FitError(
            "`step_fn` must not call backward(), because each worker would then train only with "
            "the gradients of its own share.",
            seen="backward() in step_fn",
            allowed="a step_fn that only returns the loss; wb.fit then calls backward() and "
            "averages the gradients",
            next_step="return the loss (or the sum of several losses), or write your own loop "
            "with wb.prepare",
            code="WB-FIT-155",
        )
        raise self.refused


def _how_to_return(loss: Any) -> str:
    """Return the next step if this is what `step_fn` returned instead of a tensor."""
    if isinstance(loss, (dict, list, tuple)):
        return 'return only the loss, for example result["loss"] or result[0]'
    if loss is None:
        return "end step_fn with `return loss`"
    return "return the tensor that the loss function gives, without .item() or float()"


_NOTHING = contextlib.nullcontext()


def _add(total: torch.Tensor | None, loss: torch.Tensor, fraction: float) -> torch.Tensor:
    if fraction == 1.0:
        return loss
    return loss * fraction if total is None else total + loss * fraction


def to_numpy(tensors: dict[str, Any]) -> dict[str, NDArray[np.generic]]:
    """Return copies as NumPy; bfloat16, which NumPy lacks, is widened to float32.

    Raises:
        WeightsTooLargeError: They are too large; nothing was copied.
    """
    plain: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor):
            own: Any = tensor.detach()  # of a DTensor this worker's part
            plain[name] = own.to_local() if hasattr(own, "to_local") else own
    wide = {torch.bfloat16: torch.float32}
    check_weights(sum(t.numel() * wide.get(t.dtype, t.dtype).itemsize for t in plain.values()))
    copies = on_host(plain)
    return {name: t.float().numpy() if t.dtype in wide else t.numpy() for name, t in copies.items()}


def on_host(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies on the CPU."""
    copies: dict[str, torch.Tensor] = {}
    away: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        own = tensor.detach()
        if own.device.type == "cpu" or not own.is_contiguous():
            copies[name] = own.to("cpu", copy=True)
        else:
            copies[name] = torch.empty(own.shape, dtype=own.dtype)
            away.setdefault(own.device, []).append((own, copies[name]))
    for device, pairs in away.items():
        accelerator.Staged(accelerator.of(device)).to_host(pairs)
    return copies


def build_optimizer(optimizer: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return a built optimizer unchanged, or the result of a function of the parameters.

    Raises:
        FitError: The function returned something else, or its step needs a closure.
    """
    if isinstance(optimizer, torch.optim.Optimizer):
        return optimizer
    built = optimizer([p for p in model.parameters() if p.requires_grad])
    if not isinstance(built, torch.optim.Optimizer):
        raise FitError(
            "`optimizer` is a function, but it does not return a torch.optim.Optimizer.",
            seen=type(built).__name__,
            next_step="pass optimizer=lambda p: torch.optim.SGD(p, 0.1)",
            code="WB-FIT-156",
        )
    check_closure(built)
    return built


def build_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return a built scheduler unchanged, or the result of a function of the optimizer."""
    if scheduler is None or isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler):
        return scheduler
    return scheduler(optimizer)


class Parts(Protocol):
    """A replica; `scheduler` and `scaler` are None if there is none, or if the user keeps them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any


def parts_state(parts: Parts) -> dict[str, Any]:
    """Return the state without copying: on the device, divided if the model is divided."""
    return {**steps_state(parts), "model": parts.model.state_dict()}


def steps_state(parts: Parts) -> dict[str, Any]:
    """Return the state of optimizer, scheduler and scaler, without copying."""
    every = {
        "optimizer": parts.optimizer,
        "scheduler": parts.scheduler,
        "scaler": parts.scaler,
    }
    return {name: part.state_dict() for name, part in every.items() if part is not None}


def copied_state(parts: Parts) -> dict[str, Any]:
    """Return copies of the state, on the CPU."""
    return map_batch(lambda t: t.detach().to("cpu", copy=True), parts_state(parts))  # type: ignore[no-any-return]


def load_parts(parts: Parts, state: dict[str, Any]) -> None:
    """Continue from what `parts_state` returned."""
    parts.model.load_state_dict(state["model"])
    load_steps(parts, state)


def load_steps(parts: Parts, state: dict[str, Any]) -> None:
    """Continue from what `steps_state` returned."""
    parts.optimizer.load_state_dict(state["optimizer"])
    for name, part in (("scheduler", parts.scheduler), ("scaler", parts.scaler)):
        if part is not None and state.get(name) is not None:
            part.load_state_dict(state[name])


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a worker's part of the model and of its training state.

    A divided tensor counts only with this worker's part; a tensor without memory (device `meta`)
    counts as 0.
    """
    return bytes_of(_tensors(model, optimizer))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors on this worker; shared memory counts once."""
    parts: dict[int, int] = {}
    for tensor in tensors:
        for part in _here(tensor):
            parts[part.data_ptr()] = max(part.nbytes, parts.get(part.data_ptr(), 0))
    return sum(parts.values())


def _tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _here(tensor: Any) -> Iterator[torch.Tensor]:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if part.layout is torch.sparse_coo:  # it has no data pointer
        yield from (part._indices(), part._values())
    elif not part.is_meta:
        yield part
