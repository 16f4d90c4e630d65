"""Tells the kernel that training begins: once per replica that this engine holds."""

from __future__ import annotations

import time

from .. import events
from . import settings
from .context import RunContext


def announce(
    context: RunContext,
    parameters: int,
    *,
    batch_size: int | None,
    total_steps: int | None = None,
    epochs: int | None = None,
) -> None:
    """Emit `run_started` for each replica.

    Args:
        parameters: How many numbers the model learns.
        batch_size: Global batch size; None where it is not known.
    """
    spec = context.spec
    label = settings.support(spec.framework).device_label
    workers = spec.world_size if context.entry.data_parallel else 1
    devices = spec.devices or (spec.device,)
    for rank, device in zip(spec.held, devices, strict=True):
        context.emit(
            events.RunStarted(
                rank=rank,
                t_s=time.perf_counter(),
                total_steps=total_steps,
                epochs=epochs,
                batch_size=batch_size,
                local_batch=None if batch_size is None else -(-batch_size // workers),
                parameters=parameters,
                device=label(device),
                threads=spec.threads,
            )
        )
