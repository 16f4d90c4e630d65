"""Fully sharded data parallelism: each worker keeps 1/n of parameters, gradients and optimizer.

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
SC 2020, section 5; Zhao et al., PyTorch FSDP, VLDB 2023. PyTorch's `fully_shard` (FSDP2) is the
implementation.

    worker r keeps shard w_r of every layer's parameters w = [w_0 | w_1 | .. | w_n-1]

    forward   layer by layer:    w_r -- all-gather --> w -> activations -> w is freed
    backward  layer by layer:    w_r -- all-gather --> w -> g = full gradient of the own share
                                 g -- reduce-scatter --> g_r = mean over workers of shard r
    update                       optimizer: w_r, g_r -> w_r     (its state is sharded as well)

Every worker takes a share of the batch, as under `mirrored`, and the maths is the same: the mean
over workers is made a mean over samples by weighting worker r's loss with n x samples_r / samples.
Memory for parameters, gradients and Adam's two moments falls from 16 to 16/n bytes per float32
parameter, plus one gathered layer; bytes sent rise by half. `reshard=false` keeps gathered layers
from forward to backward: fewer bytes, more memory.

A unit is what is gathered at once: an element of a Sequential or ModuleList, or a plain layer, of
at least `unit_mb`; what is smaller travels with the whole.

Bytes sent are counted call by call: a ring all-gather or reduce-scatter of a unit of S bytes has
every worker send (n-1)/n S. Workers wait for each other in forward too, so the wait is read from
the clock of a worker's own work (`timing.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from ..base import NAN, Job, Share, StepResult, Strategy
from .layout import (
    Layout,
    clip_grad_norm,
    load_whole_state,
    make_mesh,
    release_mesh,
    whole_state,
)
from .replicas import begin_equal, broadcast
from .trainer import Trainer

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)


class Sharded(Strategy):
    """Data parallelism with sharded parameters, gradients and optimizer state."""

    trainer: Trainer | None = None
    layout: Layout | None = None
    traffic: Traffic | None = None
    mesh: DeviceMesh | None = None

    def prepare(self, job: Job) -> None:
        """Keep this worker's shard of every unit; the optimizer holds shards only."""
        self.trainer = Trainer(
            self.context, job, lay_out=lambda model: self._lay_out(model, job.optimizer), even=True
        )
        self.trainer.clip = clip_grad_norm
        self.traffic = Traffic(self.trainer, self.root)
        if not self.traffic.measured:
            self.context.emit("unmeasured", columns=self.traffic.unmeasured)

    def _lay_out(self, model: torch.nn.Module, optimizer: Any) -> None:
        device = torch.device(self.context.spec.device)
        begin_equal(model, device)
        self.mesh = mesh = make_mesh(device, (self.world_size,), ("shard",))

        def shard(model: torch.nn.Module) -> None:
            for unit in units(model, self.options["unit_mb"] * 1e6):
                fully_shard(unit, mesh=mesh, reshard_after_forward=self.options["reshard"])
            fully_shard(model, mesh=mesh)

        self.layout = Layout(model, optimizer, shard)

    def step(self, share: Share) -> StepResult:
        """Gather, compute, scatter layer by layer; update the own shard."""
        trainer, traffic = self._trainer, self.traffic
        assert traffic is not None
        traffic.sent_bytes = 0.0
        weight = share.samples * self.world_size / share.global_samples
        trainer.gradients(share, weight=weight, alone=self._alone)
        traffic.gradients_ready()
        trainer.update()
        return trainer.measured(share, traffic.sent_bytes if traffic.measured else NAN)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep a micro-batch's gradients until the last one's are there."""
        self.root.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.root.set_requires_gradient_sync(True)

    def evaluate(self, shares: Any) -> dict[str, float]:
        """Return loss and metrics; each worker scores its share with the gathered model."""
        self._equal_buffers()
        return self._trainer.evaluate(shares, add_up=dist.all_reduce)

    def _equal_buffers(self) -> None:
        """Give all workers rank 0's buffers (BatchNorm's statistics): training reads none."""
        trainer = self._trainer
        broadcast(trainer.model.buffers(), trainer.device)

    def finish(self) -> None:
        """Gather the trained model: on every worker, or on rank 0 (`gather=first`)."""
        if self.layout is not None:
            self._equal_buffers()
            self.layout.gather(everywhere=self.options["gather"] == "all")

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the gathered parameters and buffers by name; nothing before `finish`."""
        if self.layout is None or self.layout.laid_out:
            return {}  # shards of a run that failed: the others' are out of reach
        return self._trainer.weights()

    def state(self) -> dict[str, Any]:
        """Return model, optimizer and scheduler, whole: independent of the world size."""
        return whole_state(self._trainer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from what `state` gave: each worker takes its shards."""
        load_whole_state(self._trainer, state)

    def close(self) -> None:
        """Give the user's module back as it was."""
        if self.layout is not None and self.layout.laid_out:
            self.layout.abandon()
        release_mesh(self.mesh)
        self.trainer = self.layout = self.traffic = self.mesh = None

    @property
    def root(self) -> FSDPModule:
        """The whole model as `fully_shard` made it."""
        model = self._trainer.model
        assert isinstance(model, FSDPModule)
        return model

    @property
    def _trainer(self) -> Trainer:
        assert self.trainer is not None, "prepare comes first"
        return self.trainer


def units(model: torch.nn.Module, least_bytes: float) -> list[torch.nn.Module]:
    """Return the parts that are gathered on their own, inner ones first.

    A parameter that two modules share must be gathered with both, so it stays with the whole.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    found = []
    for module in model.modules():
        inside = isinstance(module, _CONTAINERS)
        for child in module.children():
            plain = module is model and not list(child.children())
            if not (inside or plain) or isinstance(child, _CONTAINERS) or child is model:
                continue
            parameters = list(child.parameters())
            size = sum(p.numel() * p.element_size() for p in parameters)
            shared = any(holders[id(p)] > 1 for p in parameters)
            if parameters and size >= least_bytes and not shared:
                found.append(child)
    return list(dict.fromkeys(reversed(found)))


class Traffic:
    """Counts the bytes of FSDP's collectives and times how long this worker stood in them.

    Takes the place of FSDP's own all-gather and reduce-scatter through the hooks that PyTorch
    offers for that. On CUDA they run on streams of their own beside the computation, where the
    time spent in them says nothing about waiting: there, and in a PyTorch without the hooks, the
    waits are not measured.
    """

    def __init__(self, trainer: Trainer, root: FSDPModule) -> None:
        self.sent_bytes = 0.0
        self.timer = trainer.timer
        hooks = hasattr(root, "set_custom_all_gather")
        self.measured = hooks and trainer.device.type == "cpu"
        why = "FSDP's collectives run beside the computation on CUDA"
        if not hooks:
            why = "this PyTorch does not let FSDP's collectives be timed"
        self.unmeasured = dict.fromkeys(("sync_wait_s", "transfer_s", "sent_bytes"), why)
        if not self.measured:
            self.timer.blind()
            return
        for module in [m for m in root.modules() if isinstance(m, FSDPModule)]:  # type: ignore[attr-defined]
            module.set_custom_all_gather(_AllGather(self))
            module.set_custom_reduce_scatter(_ReduceScatter(self))

    def gradients_ready(self) -> None:
        """Note the end of this worker's part of the gradients."""
        if self.measured:
            self.timer.ready()

    def count(self, whole: torch.Tensor, group: dist.ProcessGroup) -> Any:
        """Count a collective over the tensor `whole`; return the context to do it in."""
        workers = group.size()
        self.sent_bytes += whole.numel() * whole.element_size() * (workers - 1) / workers
        return self.timer.blocked()


class _Collective:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False
    ) -> None:
        with self._traffic.count(output_tensor, group):
            dist.all_gather_into_tensor(output_tensor, input_tensor, group=group)


class _ReduceScatter(_Collective):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> None:
        with self._traffic.count(input_tensor, group):
            dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)
