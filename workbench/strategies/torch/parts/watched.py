"""A loop that does its own communication, recorded unchanged (`wb.watch`)."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import torch

from ....engine.contract import NAN
from ....engine.torch.horovod.gradients import averaging
from ....errors import FitError
from ....shared import events
from .averaging import ring_bytes
from .guard import Guard
from .user_loop import OwnLoop

if TYPE_CHECKING:
    from ....engine.context import RunContext


def watch(context: RunContext, model: Any, optimizer: Any, loader: Any) -> OwnLoop:
    """Begin to record a loop.

    Raises:
        FitError: model or optimizer has the wrong type, or a loop is already recorded.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        raise FitError(
            "wb.watch needs the model and the optimizer of the loop.",
            seen=f"{type(model).__name__}, {type(optimizer).__name__}",
            allowed="a torch.nn.Module and a torch.optim.Optimizer, in this order",
            next_step="call wb.watch(model, optimizer, loader)",
            code="WB-FIT-157",
        )
    if context.strategy is not None or context.weights is not None:
        raise FitError(
            "This cell already trains.",
            allowed="one wb.watch, wb.prepare or wb.fit in a cell",
            next_step="put this loop into its own cell",
            code="WB-FIT-158",
        )
    wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
    several = context.spec.world_size > 1
    inside, by_optimizer = _communicates(model), averaging(model)
    sent_bytes = ring_bytes(model, context.spec.world_size) if wrapped else NAN
    guard = None
    if isinstance(model, torch.nn.parallel.DistributedDataParallel):
        guard = _OfDdp(context, model) if several and _is_kept_equal(model) else None
    loop = OwnLoop(
        context,
        model,
        optimizer,
        None,
        watched=loader,
        sent_bytes=sent_bytes,
        communicates=several and inside,
        guard=guard,
    )
    if by_optimizer is not None:
        loop.hear_of_waits(by_optimizer)
    elif several and not inside:
        # Messages that the loop sends outside backward are not seen, so waits are unknown, not 0.
        loop.timer.blind()
        why = (
            "the loop exchanges gradients outside backward(), but wb.watch measures the exchange "
            "only inside backward()"
        )
        context.emit(events.Unmeasured(columns=dict.fromkeys(("sync_wait_s", "transfer_s"), why)))
        context.closers.append(_Silence(context).close)
    return loop


class _Silence:
    """Warns at the end if the workers sent each other nothing while they trained."""

    def __init__(self, context: RunContext) -> None:
        self._context, self._trained, self._calls = context, context.trained, _calls()

    def close(self) -> None:
        """Compare the numbers of calls; a group that does not count its calls is not judged."""
        calls, trained = _calls(), self._context.trained > self._trained
        if trained and calls is not None and calls == self._calls:
            self._context.emit(  # the same text on every worker, so it is shown once
                events.Warned(
                    rank=self._context.spec.rank,
                    text="The workers sent each other no messages while they trained, so each "
                    "worker trained a separate model. For an ordinary PyTorch loop, use wb.prepare "
                    "instead of wb.watch: model, optimizer, loader = wb.prepare(model, optimizer, "
                    "loader).",
                )
            )


def _calls() -> dict[Any, int] | None:
    """Return how many messages each process group has begun to send; None if unknown."""
    if "mpi4py.MPI" in sys.modules:  # its messages are in no process group
        return None
    groups: Any = torch.distributed.distributed_c10d._world.pg_map
    try:
        # A group with two backends, as on GPU engines, has a number for each, and none of its own.
        calls: dict[Any, int] = {
            (group, device.type): group._get_backend(device)._get_sequence_number_for_group()
            for group in groups
            for device in group._device_types
        }
    except RuntimeError:
        return None
    # NCCL's sequence number counts collectives alone; its flight recorder knows send and recv too.
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)
    entries = json.loads(dump(True, False)).get("entries", []) if dump else []
    return calls | {"p2p": max((one.get("p2p_seq_id", 0) for one in entries), default=0)}


class _OfDdp(Guard):
    """Compares the copies that the loop's DistributedDataParallel keeps equal."""

    def __init__(self, context: RunContext, model: torch.nn.parallel.DistributedDataParallel):
        super().__init__(context, first=2, group=model.process_group, at_end=True)
        self.add(model)
        self._ddp = model

    def due(self) -> bool:
        """Count only backwards in which the workers communicate; all workers have equally many."""
        alone = not self._ddp.require_backward_grad_sync or self._ddp._join_config.enable
        return not alone and super().due()


def _is_kept_equal(model: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Whether copies must stay equal; a user's own hook may make them differ."""
    return not getattr(model, "_comm_hooks", None)


def _communicates(model: torch.nn.Module) -> bool:
    """Whether backward through this module ends in communication."""
    from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

    kinds = (torch.nn.parallel.DistributedDataParallel, FSDPModule, FullyShardedDataParallel)
    return any(isinstance(module, kinds) for module in model.modules())
