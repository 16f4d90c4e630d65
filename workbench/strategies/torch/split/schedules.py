"""The schedules of torch.distributed.pipelining; `workbench.pipelines` draws and explains them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch.distributed import pipelining

from ....pipelines import SCHEDULES

BUILDERS: dict[str, Callable[..., Any]] = {
    "naive": pipelining.ScheduleGPipe,  # of one microbatch
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleInterleavedZeroBubble,
}


def build_schedule(
    name: str, stages: list[Any], microbatches: int, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `run(x, target=..., losses=...)`: one pass of the schedule over a batch.

    Args:
        stages: This worker's stages.
        loss: `loss(output, target)` of a microbatch, already weighted.
    """
    looped = SCHEDULES[name].stages is not None
    schedule = BUILDERS[name](
        stages if looped else stages[0], microbatches, loss_fn=loss, scale_grads=False
    )
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        return lambda *args, **given: schedule.step(*args, return_outputs=False, **given)
    return schedule.step  # type: ignore[no-any-return]
