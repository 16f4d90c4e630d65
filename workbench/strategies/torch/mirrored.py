"""Synchronous data parallelism: every worker holds a copy and takes a share of each batch.

Source: Li et al., PyTorch Distributed: Experiences on Accelerating Data Parallel Training,
VLDB 2020, section 3; PyTorch's DistributedDataParallel is the implementation.

    worker 0:  share 0 -> forward -> backward -> g0 --+                 +-> g -> optimizer
    worker 1:  share 1 -> forward -> backward -> g1 --+-- all-reduce ---+-> g -> optimizer
    worker 2:  share 2 -> forward -> backward -> g2 --+   g = mean(g_r) +-> g -> optimizer

All copies begin equal (rank 0's are broadcast) and take equal steps, so they stay equal. A ring
all-reduce has every worker send 2 (n-1)/n times the gradient's size. Gradients travel in buckets
while backward still runs; what is left when it ends is exposed, and counts as wait and transfer.

The mean over workers is the mean over samples only if all shares are equally large. The loss of
worker r is therefore weighted by n x samples_r / samples: sum_r 1/n (n samples_r / samples) g_r.

Buffers (BatchNorm's running statistics) are not learnt from gradients. Training does not read
them, so rank 0's are broadcast before each evaluation and at the end, not in each forward pass as
DDP does by default: a broadcast there would hide who waits for whom.

Option `allreduce` exchanges the all-reduce (`allreduce/`), `compress` shortens what is sent
(`compression.py`); both average all gradients in one message after backward (`flat.py`).
"""

from __future__ import annotations

import gc
import inspect
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from ...errors import FitError
from ..base import Job, Share, StepResult, Strategy
from .averaging import Averaging
from .flat import FlatGradients
from .inplace import InPlace
from .loop import OwnLoop
from .memory import held_bytes
from .parts import copied_state, load_parts
from .replicas import broadcast_buffers, broadcast_model
from .trainer import Trainer

_parameters = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_FORWARD_SYNC: dict[str, Any] = (  # the argument was renamed in PyTorch 2.13
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _parameters
    else {"broadcast_buffers": False}
)


class Mirrored(Strategy):
    """Data parallelism with all-reduced gradients."""

    trainer: Trainer | None = None
    ddp: DistributedDataParallel | FlatGradients | None = None
    averaging: Averaging | None = None
    loop: OwnLoop | None = None
    in_place: InPlace | None = None
    sync_batchnorm: SyncedBatchNorm | None = None

    def prepare(self, job: Job) -> None:
        """Copy rank 0's model to all workers and hook the all-reduce into backward."""
        self.trainer = trainer = Trainer(self.context, job)
        self.sync_batchnorm = SyncedBatchNorm(trainer.model, self.options, trainer.device)
        self.averaging = Averaging(self.context, trainer.model)
        if job.step_fn is None:
            self.ddp = self._wrap(trainer.model)
            trainer.wrap(self.ddp)
        else:  # step_fn may use the model's own attributes, so it is given the model itself
            self.in_place = InPlace(trainer.model, self._wrap)
            self.ddp = self.in_place.ddp
            trainer.wrap(trainer.model)

    def step(self, share: Share) -> StepResult:
        """Backward on the own share ends in the average; every worker takes the same step."""
        trainer, ddp, averaging = self._trainer, self.ddp, self.averaging
        assert ddp is not None
        assert averaging is not None
        weight = share.samples * self.world_size / share.global_samples
        trainer.gradients(share, weight=weight, alone=ddp.no_sync, communicates=True)
        trainer.update()
        return trainer.measured(share, averaging.sent_bytes())

    def _wrap(self, model: torch.nn.Module) -> DistributedDataParallel | FlatGradients:
        """Put a module behind what averages its gradients."""
        averaging = self.averaging
        if averaging is not None and not averaging.overlapped:
            broadcast_model(model)
            return averaging.wrap(model)
        return DistributedDataParallel(
            model,
            bucket_cap_mb=self.options.get("bucket_mb", 25.0),
            find_unused_parameters=self.options.get("find_unused_parameters", False),
            **_NO_FORWARD_SYNC,
            gradient_as_bucket_view=True,
        )

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each worker scores its share, the sums are all-reduced."""
        broadcast_buffers(self._trainer.model)
        return self._trainer.evaluate(shares, add_up=dist.all_reduce)

    def finish(self) -> None:
        """Make the buffers equal; all workers have done the same number of steps."""
        if self.trainer is not None:
            broadcast_buffers(self.trainer.model)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return parameters and buffers by name; equal on all workers."""
        return self._trainer.weights() if self.loop is None else self.loop.weights()

    def state(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler; any worker's stands for all."""
        return copied_state(self.loop or self._trainer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave."""
        load_parts(self.loop or self._trainer, state)

    def own_state(self) -> dict[str, Any]:
        """Return what compression has not sent yet; nothing without."""
        return {} if self.averaging is None else self.averaging.own_state()

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Go on with what was not sent yet."""
        if self.averaging is not None:
            self.averaging.load_own_state(state)

    def adopt(self, model: Any, optimizer: Any, loader: Any) -> tuple[Any, Any, Any]:
        """Let a user's own loop train in parallel: its model's forward now ends in the average."""
        model.to(self.context.spec.device)
        device = torch.device(self.context.spec.device)
        self.sync_batchnorm = SyncedBatchNorm(model, self.options, device)
        self.averaging = Averaging(self.context, model)
        self.in_place = InPlace(model, self._wrap)
        self.ddp = self.in_place.ddp
        self.loop = OwnLoop(
            self.context,
            model,
            optimizer,
            loader,
            sent_bytes=self.averaging.sent_bytes,
            communicates=True,
            weighted=True,
            epoch_end=lambda: broadcast_buffers(model),
        )
        return model, optimizer, self.loop.loader

    def memory_bytes(self) -> float:
        """Return what this worker holds of model, gradients and optimizer."""
        part = self.loop or self._trainer
        return held_bytes(part.model, part.optimizer)

    def close(self) -> None:
        """Give the user's module back as it was; wrappers must go before the process group."""
        if self.loop is not None:
            self.loop.close()
        if self.in_place is not None:
            self.in_place.undo()
        if self.averaging is not None:
            self.averaging.close()
        if self.sync_batchnorm is not None:
            self.sync_batchnorm.undo()
        if self.ddp is not None:
            # A traceback may still hold the wrapper: empty it, so that its reducer goes now.
            self.ddp.__dict__.clear()
        self.trainer = self.loop = self.in_place = self.ddp = self.averaging = None
        gc.collect()

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer


class SyncedBatchNorm:
    """BatchNorm over all workers for the time of a run (option `sync_batchnorm`).

    Raises:
        FitError: The device is no CUDA device; PyTorch has SyncBatchNorm there only.
    """

    def __init__(
        self, model: torch.nn.Module, options: dict[str, Any], device: torch.device
    ) -> None:
        self._before: list[tuple[torch.nn.Module, str, torch.nn.Module]] = []
        if not options.get("sync_batchnorm", False):
            return
        if device.type != "cuda":
            raise FitError(
                "BatchNorm can be synchronised on CUDA devices only.",
                seen=str(device),
                next_step="leave out -o sync_batchnorm=true",
            )
        norms = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d)
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, norms):
                    self._before.append((parent, name, child))
                    # Parameters and statistics are shared with the original, which comes back.
                    convert: Any = torch.nn.SyncBatchNorm.convert_sync_batchnorm
                    synced = convert(child)
                    setattr(parent, name, synced)

    def undo(self) -> None:
        """Put the original modules back."""
        for parent, name, child in self._before:
            setattr(parent, name, child)
        self._before.clear()
