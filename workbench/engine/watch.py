"""`wb.watch`: the dashboard for loops that bring their own DDP or FSDP."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

from .. import events
from ..errors import FitError
from . import settings
from .context import require
from .initial import initialise
from .prepare import announce


def watch(model: Any, optimizer: Any, loader: Any = None) -> None:
    """Record the steps of a loop that distributes itself; nothing is wrapped or divided.

    A step begins when `loader` is asked for a batch (without a loader: with the first forward, and
    data waits are not measured) and ends with `optimizer.step()`. What is blocked at the end of
    backward counts as communication; gathers inside forward (FSDP) count as compute.

    Args:
        model: The module, plain or wrapped.
        optimizer: Its optimizer.
        loader: The loader the loop iterates over; timed in place.

    Raises:
        RunError: The cell lacks `%%distributed STRATEGY`.
        FitError: Another loop of this cell is watched already.
    """
    context = require("wb.watch")
    framework = context.spec.framework
    if context.spec.checkpoint or context.spec.resume:
        raise FitError(
            "Checkpoints of a loop that distributes itself are its own affair: only it knows what "
            "lies where.",
            seen="--checkpoint with wb.watch",
            allowed="--checkpoint with wb.fit or wb.prepare",
            next_step="leave --checkpoint out and save in the loop, or use wb.prepare",
            code="WB-FIT-068",
        )
    if importlib.util.find_spec(f"workbench.strategies.{framework}.watched") is None:
        raise FitError(
            f"wb.watch is not needed for {framework}: loops there are recorded by themselves.",
            next_step="leave it out; reduce the gradients with strategy.run and the optimizer",
            code="WB-FIT-069",
        )
    module = importlib.import_module(f"workbench.strategies.{framework}.watched")
    initialise(context, model)
    context.taken_over = "wb.watch"
    watched = module.watch(context, model, optimizer, loader)
    context.closers.append(watched.close)
    context.weights = watched.weights
    size = settings.data_module(framework).global_batch(loader, context.spec.world_size)
    announce(context, model, size)
    if loader is None:
        context.emit(events.Unmeasured(columns={"data_wait_s": "wb.watch was given no loader"}))
