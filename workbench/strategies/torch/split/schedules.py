"""The orders in which stages work through their microbatches, from torch.distributed.pipelining.

F = forward, B = backward of a microbatch; two stages, four microbatches:

    naive (one microbatch)   stage 0  F . . B          the chain of the textbooks: one at a time
                             stage 1  . F B .
    gpipe                    stage 0  F0 F1 F2 F3 . . . B0 B1 B2 B3
                             stage 1  . F0 F1 F2 F3 B0 B1 B2 B3 .
    1f1b                     stage 0  F0 F1 . B0 F2 B1 F3 B2 . B3     at most `stages` in flight,
                             stage 1  . F0 B0 F1 B1 F2 B2 F3 B3 .     so less memory than gpipe
    interleaved              as 1f1b, each worker holds several thinner stages
    zero_bubble              backward in two parts: gradients of the inputs at once, those of the
                             weights where there would be a gap

The bubble is the share of the time in which a worker has nothing to do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed import pipelining

from ....errors import FitError


@dataclass(frozen=True)
class Kind:
    """One schedule.

    Attributes:
        source: Where it is described.
        looped: Whether a worker may hold several stages.
        least: Fewest microbatches for so many workers.
        rounds: Whether the microbatches must divide into equal rounds of about one per worker.
        ideal: Share of idle time with balanced stages, of (workers, microbatches, stages per
            worker).
    """

    source: str
    build: Callable[..., Any]
    looped: bool
    least: Callable[[int], int]
    rounds: bool
    ideal: Callable[[int, int, int], float]


def _fill_and_drain(workers: int, microbatches: int, virtual: int) -> float:
    return (workers - 1) / (virtual * microbatches + workers - 1)


def _weights_in_the_gaps(workers: int, microbatches: int, virtual: int) -> float:
    # ZB-H1, with forward, input backward and weight backward equally long: a third of 1F1B's gap.
    gap = (workers - 1) / 3
    return gap / (virtual * microbatches + gap)


SCHEDULES: dict[str, Kind] = {
    "naive": Kind(
        "the chain rule", pipelining.ScheduleGPipe, False, lambda p: 1, False, _fill_and_drain
    ),
    "gpipe": Kind(
        "Huang et al., GPipe, NeurIPS 2019, section 2.3",
        pipelining.ScheduleGPipe, False, lambda p: 1, False, _fill_and_drain,
    ),
    "1f1b": Kind(
        "Narayanan et al., PipeDream, SOSP 2019, section 3.2",
        pipelining.Schedule1F1B, False, lambda p: p, False, _fill_and_drain,
    ),
    "interleaved": Kind(
        "Narayanan et al., Megatron-LM, SC 2021, section 2.2",
        pipelining.ScheduleInterleaved1F1B, True, lambda p: p, True, _fill_and_drain,
    ),
    "zero_bubble": Kind(
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2",
        pipelining.ScheduleInterleavedZeroBubble, True, lambda p: p, True, _weights_in_the_gaps,
    ),
}  # fmt: skip


def chosen_microbatches(name: str, given: int | None, workers: int, batch_size: int) -> int:
    """Return how many microbatches to use: what was asked for, checked, or two per worker.

    Raises:
        FitError: The schedule cannot work with so many.
    """
    kind = SCHEDULES[name]
    least = kind.least(workers)
    count = given
    if count is None:
        count = 1 if name == "naive" else max(least, min(2 * workers, batch_size))
    if name == "naive" and count != 1:
        raise FitError(
            "The naive schedule passes the whole batch along: it has one microbatch.",
            seen=f"microbatches={count}",
            next_step=f"-o schedule=gpipe -o microbatches={count}",
        )
    if count < least:
        raise FitError(
            f"Schedule {name} needs at least one microbatch per worker.",
            seen=f"microbatches={count} on {workers} workers",
            allowed=f"{least} or more",
            next_step=f"-o microbatches={2 * workers}, or -o schedule=gpipe",
        )
    rounds = max(1, count // workers)
    if kind.rounds and count % rounds:
        raise FitError(
            f"Schedule {name} works in rounds, and the microbatches do not divide into them.",
            seen=f"microbatches={count} in {rounds} rounds on {workers} workers",
            allowed=f"a multiple of {workers}",
            next_step=f"-o microbatches={workers * rounds}",
        )
    if count > batch_size:
        raise FitError(
            "There are more microbatches than samples in a batch, so some would be empty.",
            seen=f"microbatches={count}, batch_size={batch_size}",
            allowed=f"at most {batch_size} microbatches",
            next_step="raise batch_size, or lower -o microbatches",
        )
    return count


def stages_per_worker(name: str, given: int | None) -> int:
    """Return how many stages each worker holds.

    Raises:
        FitError: The schedule has one stage per worker.
    """
    if SCHEDULES[name].looped:
        return given or (2 if name == "interleaved" else 1)
    if given not in (None, 1):
        looped = [other for other, kind in SCHEDULES.items() if kind.looped]
        raise FitError(
            f"Schedule {name} has one stage per worker.",
            seen=f"stages_per_worker={given}",
            next_step=f"-o schedule={looped[0]}",
        )
    return 1


def build_schedule(
    name: str, stages: list[Any], microbatches: int, loss: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `run(x, target=..., losses=...)`: one pass of the schedule over a batch.

    Args:
        stages: This worker's stages.
        loss: `loss(output, target)` of a microbatch, already weighted.
    """
    kind = SCHEDULES[name]
    schedule = kind.build(
        stages if kind.looped else stages[0], microbatches, loss_fn=loss, scale_grads=False
    )
    if "return_outputs" in inspect.signature(schedule.step).parameters:
        return lambda *args, **given: schedule.step(*args, return_outputs=False, **given)
    return schedule.step  # type: ignore[no-any-return]
