"""Synchronous data parallelism: every worker holds a copy and takes a share of each batch.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
VLDB 2020, section 3; PyTorch's DistributedDataParallel is the implementation.

    worker 0:  share 0 -> forward -> backward -> g0 --+                 +-> g -> optimizer
    worker 1:  share 1 -> forward -> backward -> g1 --+-- all-reduce ---+-> g -> optimizer
    worker 2:  share 2 -> forward -> backward -> g2 --+   g = mean(g_r) +-> g -> optimizer

At the beginning rank 0's parameters are broadcast, so all copies are equal. All workers take equal
steps, so the copies stay equal. In a ring all-reduce of n workers, every worker sends 2 (n-1)/n
times the gradient's size. Gradients are sent in buckets (groups of gradients) while the backward
pass is still running. When a worker's backward pass has ended, the worker waits for the rest of the
communication. This time has two parts. Until the backward passes of all workers have ended, it
counts as sync wait. After that, it counts as transfer.

Each worker computes the mean loss over its share. Without a correction, shares of different sizes
would have the same weight. So the loss of worker r is multiplied by `n * samples_r / samples`. Here
n is the number of workers, `samples_r` is the size of the worker's share, and `samples` is the size
of the batch. Let g_r be the gradient of the mean loss over this share. With the factor, the
gradient of worker r is
`n * samples_r / samples * g_r`. The mean of these gradients over the n workers is
`sum_r (samples_r / samples) * g_r`. This sum is the gradient of the mean loss over the whole batch.

BatchNorm's running statistics are buffers: they are not learnt from gradients. Training does not
read them. So Workbench does not broadcast rank 0's buffers in each step. With `wb.fit`, it
broadcasts them before each evaluation and at the end of the run. In your own loop, it broadcasts
them at the end of each epoch. DistributedDataParallel, with its default settings, broadcasts the
buffers in each forward pass. In such a broadcast the other workers wait for rank 0. If Workbench
did the same, each step would have two waits: the wait for rank 0's buffers and the wait in the
all-reduce. The measured times would not show which worker causes which wait.

The option `allreduce` selects the all-reduce algorithm (`allreduce/`), and the option `compress`
reduces the number of bytes that are sent (`allreduce/compression.py`). With compression, or with
any algorithm except `backend`, there are no buckets: all gradients are averaged together, after the
backward pass. DistributedDataParallel prepares the averaging when the loop calls `model(x)`.
Workbench prepares it when the backward pass begins (`parts/reduction.py`), so a loop does not have
to call `model(x)` and can compute the loss in any way.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from ...engine.contract import Job, Share, Strategy
from ...errors import FitError
from ...shared import events
from .parts.averaging import Averaging
from .parts.guard import Guard, broadcast_buffers
from .parts.reduction import Reduction, Reductions
from .parts.replica import Trainer, copied_state, held_bytes, load_parts
from .parts.user_loop import OwnLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...engine.telemetry.recorder import StepResult

NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)


def naive_step(model: Any, loss_fn: Any, optimizer: Any, x: Tensor, y: Tensor) -> float:
    """Take one step on this worker's share of the batch: x (B/n, ...). Return the share's loss.

    Every gradient is sent as a separate message when backward has ended. `Mirrored` sends few large
    messages while backward is running, and allows shares of unequal size.
    """
    optimizer.zero_grad()
    loss = loss_fn(model(x), y)  # mean over the share
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad)  # the sum over the workers, on all of them
        p.grad /= dist.get_world_size()
    optimizer.step()  # the same step everywhere
    return float(loss)


class Mirrored(Strategy):
    """Data parallelism with all-reduced gradients.

    Between steps every worker holds the whole state, so the set of workers can change between two
    steps. A step is completed on all workers or repeated (`engine/training/regrouping.py`).
    """

    regroups = True
    trainer: Trainer | None = None
    averaging: Averaging | None = None
    reductions: Reductions | None = None
    loop: OwnLoop | None = None
    sync_batchnorm: SyncedBatchNorm | None = None

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self._chosen: str | None = None  # the chosen all-reduce, which later groups use too
        self._unsent: dict[str, Any] = {}
        self._in_step = False  # whether a step has begun but is not completed here
        self._others = contextlib.ExitStack()  # cleanup functions of the cell's other models

    def prepare(self, job: Job) -> None:
        """Copy rank 0's model to all workers and hook the all-reduce into backward."""
        self.trainer = trainer = Trainer(self.context, job)
        self.sync_batchnorm = SyncedBatchNorm(trainer.model, self.options, trainer.device)
        if not job.compile:  # a compiled step has no Python between its kernels
            self.sync_batchnorm.time(trainer.timer)
        # a worker that joins later does this with the others at that time
        if not self.context.membership.waits:
            self._reduce()

    def _reduce(self, chosen: str | None = None, *, equal: bool = False) -> None:
        """Hook the all-reduce into backward; all workers together."""
        trainer, job = self._trainer, self._trainer.job
        reduction = self._average(trainer.model, chosen, equal=equal)
        trainer.wrap(trainer.model)
        if job.compile and job.step_fn is None and reduction.ddp is not None:
            # The compiler cuts the backward at the ends of DistributedDataParallel's buckets.
            reduction.rewrapped = lambda: trainer.wrap(reduction.ddp or trainer.model)
            reduction.rewrapped()

    def _average(
        self, model: torch.nn.Module, chosen: str | None = None, *, equal: bool = False
    ) -> Reduction:
        """Begin to average a model's gradients; the cell's first model decides in which way."""
        if self.averaging is None or self.reductions is None:
            self.averaging = Averaging(self.context, model, chosen)
            # Copies cannot differ before the second backward.
            guard = Guard(self.context, first=2, at_end=True)
            self.reductions = Reductions(self.context, self.averaging, guard)
        self._tell_of_batchnorm(model)
        return self.reductions.add(model, equal=equal)

    def _tell_of_batchnorm(self, model: torch.nn.Module) -> None:
        if self.rank or self.world_size == 1:
            return
        if any(isinstance(module, NORMS) for module in model.modules()):
            text = (
                "BatchNorm normalises over each worker's share of the batch, not over the whole "
                "batch, so the result differs from the result on one device."
            )
            self.context.emit(events.Noted(rank=0, text=text, topic=events.Topic.OWN_NORMS))

    def step(self, share: Share) -> StepResult:
        """Run backward on this worker's share; backward ends with the average.

        Then take the common step.
        """
        trainer, averaging = self._trainer, self.averaging
        assert averaging is not None
        weight = share.samples * self.world_size / share.global_samples
        if self.context.membership.trains:
            trainer.buffers.keep()
        self._in_step = True
        trainer.gradients(share, weight=weight, reductions=self.reductions)
        trainer.update()
        self._in_step = False
        return trainer.measured(share, averaging.sent_bytes())

    # -- with others -------------------------------------------------------------------------------

    def leave_group(self) -> None:
        """Release wrappers and links; keep the error that compression has not sent yet."""
        if self.averaging is not None:
            self._unsent = self.averaging.own_state()
            self._chosen = self._chosen or self.averaging.all_reduce.name
        self._close_reductions()
        if self._in_step:
            self._trainer.buffers.restore()
            self._in_step = False

    def enter_group(self, agreed: dict[str, Any]) -> None:
        """Average among the present workers, with the algorithm that was chosen first."""
        spec = self.context.spec
        self.rank, self.world_size = spec.rank, spec.world_size
        self._chosen = agreed["allreduce"]
        chosen = self._chosen if spec.world_size > 1 else None
        if self.loop is None:
            self._trainer.be_one_of(spec.world_size)
            self._reduce(chosen, equal=True)
        else:
            for model in (self.loop.model, *self.loop.others):
                self._average(model, chosen, equal=True)
            self._attach(self.loop)
        assert self.averaging is not None
        if self._unsent:
            self.averaging.load_own_state(self._unsent)

    def heal_loop(self, kept: tuple[Any, ...], regrouping: Callable[[Any], Any]) -> None:
        """Let the user's own loop continue with other workers."""
        assert self.loop is not None
        self.loop.heal(self, kept, regrouping)

    def agreed(self) -> dict[str, Any]:
        """Return which all-reduce was chosen."""
        return {"allreduce": self._chosen}

    def break_off(self) -> None:
        """Close Workbench's own links; called from another thread."""
        averaging = self.averaging
        if averaging is not None:
            averaging.break_off()

    def contributed(self, share: Share) -> StepResult:
        """Return the loss of this worker's share."""
        return self._trainer.contributed(share)

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each worker scores its share, the sums are all-reduced."""
        broadcast_buffers(self._trainer.model)
        return self._trainer.evaluate(shares, add_up=dist.all_reduce)

    def finish(self) -> None:
        """Make the buffers equal; all workers have done the same number of steps."""
        if self.trainer is not None and self.reductions is not None:
            self.reductions.guard.settle()
            broadcast_buffers(self.trainer.model)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name; equal on all workers."""
        return self._trainer.weights() if self.loop is None else self.loop.weights()

    def state(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler; they are equal on all workers."""
        return copied_state(self.loop or self._trainer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        load_parts(self.loop or self._trainer, state)

    def own_state(self) -> dict[str, Any]:
        """Return the error that compression has not sent yet; empty without compression."""
        return {} if self.averaging is None else self.averaging.own_state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Continue with the error that was not sent yet."""
        if self.averaging is not None:
            self.averaging.load_own_state(state)

    def wrap_loop(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Let a user's own loop train in parallel: each backward now ends in the average."""
        model.to(self.context.spec.device)
        device = torch.device(self.context.spec.device)
        self.sync_batchnorm = SyncedBatchNorm(model, self.options, device)
        # a worker that joins later does this with the others at that time
        waits = self.context.membership.waits
        if not waits:
            self._average(model)
        self.loop = OwnLoop(
            self.context, model, optimizer, loader, weighted=True, epoch_end=self._epoch_end
        )
        if not waits:
            self._attach(self.loop)
        self.sync_batchnorm.time(self.loop.timer)
        return model, optimizer, self.loop.loader

    def _attach(self, loop: OwnLoop) -> None:
        assert self.averaging is not None
        assert self.reductions is not None
        loop.average_by(self.reductions, self.averaging.sent_bytes)

    def wrap_another_loop(self, model: Any, optimizer: Any) -> tuple[Any, Any]:
        """Average another model of the loop; only the steps of the first pair are counted."""
        assert self.loop is not None
        model.to(self.context.spec.device)
        synced = SyncedBatchNorm(model, self.options, torch.device(self.context.spec.device))
        synced.time(self.loop.timer)
        self._others.callback(synced.undo)
        if not self.context.membership.waits:
            self._average(model)
        self.loop.wrap_another_loop(model, optimizer)
        return model, optimizer

    def _epoch_end(self) -> None:
        assert self.loop is not None
        assert self.reductions is not None
        self.reductions.guard.settle(last=False)
        for model in (self.loop.model, *self.loop.others):
            broadcast_buffers(model)

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer."""
        part = self.loop or self._trainer
        return held_bytes(part.model, part.optimizer)

    def close(self) -> None:
        """Restore the user's module; remove wrappers before the process group ends."""
        if self.loop is not None:
            self.loop.close()
        self._close_reductions()
        self._others.close()
        if self.sync_batchnorm is not None:
            self.sync_batchnorm.undo()
        self.trainer = self.loop = None
        gc.collect()

    def _close_reductions(self) -> None:
        if self.reductions is not None:
            self.reductions.close()
        if self.averaging is not None:
            self.averaging.close()
        self.reductions = self.averaging = None

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer


class SyncedBatchNorm:
    """BatchNorm over all workers during a run (option `sync_batchnorm`).

    The workers exchange statistics in forward and in backward. These collectives are timed as
    communication; otherwise a worker that waits in them for a slow one would seem to compute.

    Raises:
        FitError: PyTorch has no SyncBatchNorm for the kind of device.
    """

    def __init__(
        self, model: torch.nn.Module, options: dict[str, Any], device: torch.device
    ) -> None:
        self._before: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
        self._untime: list[tuple[str, Any]] = []
        if not options.get("sync_batchnorm", False):
            return
        # As its own forward says.
        kinds = ("cuda", "xpu", "hpu", torch._C._get_privateuse1_backend_name())
        if device.type not in kinds:
            raise FitError(
                "BatchNorm can be synchronised only on GPUs.",
                seen=str(device),
                allowed="a GPU (device cuda or xpu)",
                next_step="remove -o sync_batchnorm=true",
                code="WB-FIT-119",
            )
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, NORMS):
                    self._before.append((parent, name, child))
                    # Parameters and statistics are shared with the original module, which is
                    # restored later.
                    convert: Any = torch.nn.SyncBatchNorm.convert_sync_batchnorm
                    synced = convert(child)
                    setattr(parent, name, synced)

    def time(self, timer: Any) -> None:
        """Measure its collectives; its module calls `torch.distributed` under two names."""
        if not self._before or isinstance(_batchnorm.dist, _Timed):
            return
        timed = _Timed(dist, timer)
        for name, instead in (("dist", timed), ("torch", _With(torch, "distributed", timed))):
            self._untime.append((name, getattr(_batchnorm, name)))
            setattr(_batchnorm, name, instead)

    def undo(self) -> None:
        """Put the original modules back."""
        for name, original in self._untime:
            setattr(_batchnorm, name, original)
        for parent, name, child in self._before:
            setattr(parent, name, child)
        self._before.clear()
        self._untime.clear()


_batchnorm: Any = importlib.import_module("torch.nn.modules._functions")


class _With:
    """A module with one name replaced."""

    def __init__(self, module: Any, name: str, instead: Any) -> None:
        self._module = module
        setattr(self, name, instead)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


class _Timed:
    """`torch.distributed` with timed collectives: their time counts as blocked time."""

    def __init__(self, module: Any, timer: Any) -> None:
        self._module, self._timer = module, timer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._module, name)
        if not name.startswith(("all_gather", "_all_gather", "all_reduce")):
            return found

        def timed(*args: Any, **given: Any) -> Any:
            with self._timer.blocked():
                return found(*args, **given)

        return timed
