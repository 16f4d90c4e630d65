"""The order of a schedule's operations, as pure data that kernel and engines read.

It says what the pipeline schedules need and how long they idle, and in which step of a round each
fragment of the parameters is averaged (`turns`).

F = forward, B = backward of a microbatch; two stages, four microbatches:

    naive (one microbatch)   stage 0  F . . B          the chain of the textbooks: one at a time
                             stage 1  . F B .
    gpipe                    stage 0  F0 F1 F2 F3 .  .  B0 B1 B2 B3
                             stage 1  .  F0 F1 F2 F3 B0 B1 B2 B3 .
    1f1b                     stage 0  F0 F1 .  B0 F2 B1 F3 B2 .  B3    at most `stages` in flight,
                             stage 1  .  F0 B0 F1 B1 F2 B2 F3 B3 .     so less memory than gpipe
    interleaved              as 1f1b, each worker holds several thinner stages
    zero_bubble              backward in two parts: gradients of the inputs at once, those of the
    weights where there would be a gap

The bubble is the share of the time in which a worker has nothing to do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError


@dataclass(frozen=True)
class Schedule:
    """One schedule.

    Attributes:
        source: Where it is described.
        most: The highest number of microbatches; None if there is no limit.
        fills: Whether it needs at least one microbatch per worker, and equal rounds of about that
            many.
        rounds: Whether the number of microbatches must divide into such rounds.
        stages: Default number of stages per worker; None: always one.
        gap: Length of a worker's idle slot; the unit is forward + backward of a stage.
    """

    source: str
    most: int | None = None
    fills: bool = True
    rounds: bool = False
    stages: int | None = None
    gap: float = 1.0


SCHEDULES: dict[str, Schedule] = {
    "naive": Schedule("the chain rule", most=1, fills=False),
    "gpipe": Schedule("Huang et al., GPipe, NeurIPS 2019, section 2.3", fills=False),
    "1f1b": Schedule("Narayanan et al., PipeDream, SOSP 2019, section 3.2"),
    "interleaved": Schedule(
        "Narayanan et al., Megatron-LM, SC 2021, section 2.2", rounds=True, stages=2
    ),
    # ZB-H1. If forward and both halves of backward take equally long, the gap is a third of 1F1B's.
    "zero_bubble": Schedule(
        "Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section 2",
        rounds=True, stages=1, gap=1 / 3,
    ),
}  # fmt: skip


def ideal_bubble(name: str, workers: int, microbatches: int, stages_per_worker: int) -> float:
    """Return the idle share of the time with equal stages: (p - 1) / (m + p - 1) for plain ones."""
    gap = (workers - 1) * SCHEDULES[name].gap
    return gap / (stages_per_worker * microbatches + gap)


def stages_per_worker(options: Mapping[str, Any]) -> int:
    """Return how many stages each worker holds.

    Raises:
        PlanError: The schedule has one stage per worker.
    """
    name, given = options["schedule"], options["stages_per_worker"]
    usual = SCHEDULES[name].stages
    if usual is not None:
        return int(given or usual)
    if given not in (None, 1):
        raise PlanError(
            f"Schedule `{name}` has only one stage per worker.",
            seen=f"stages_per_worker={given}",
            next_step="use -o schedule=interleaved, or remove -o stages_per_worker",
            code="WB-PLAN-078",
        )
    return 1


def microbatches(options: Mapping[str, Any], workers: int, batch_size: int | None = None) -> int:
    """Return how many microbatches to use: the requested number, checked, or two per worker.

    Args:
        batch_size: Samples of a batch; None if it is not known yet.

    Raises:
        PlanError: The schedule cannot work with this number.
    """
    name, count = options["schedule"], options["microbatches"]
    schedule = SCHEDULES[name]
    least = workers if schedule.fills else 1
    if count is None:
        count = schedule.most or max(least, min(2 * workers, batch_size or 2 * workers))
        if schedule.rounds and count % max(1, count // workers):
            count = least
    if schedule.most is not None and count > schedule.most:
        raise PlanError(
            f"Schedule `{name}` sends the whole batch from stage to stage, so it allows only one "
            "microbatch.",
            seen=f"microbatches={count}",
            next_step=f"use -o schedule=gpipe -o microbatches={count}, or remove -o microbatches",
            code="WB-PLAN-079",
        )
    if count < least:
        raise PlanError(
            f"Schedule `{name}` needs at least one microbatch for each worker of a pipeline.",
            seen=f"microbatches={count} for a pipeline of {workers} workers",
            allowed=f"{least} or more microbatches",
            next_step=f"use -o microbatches={2 * workers}, or -o schedule=gpipe",
            code="WB-PLAN-080",
        )
    rounds = max(1, count // workers)
    if schedule.rounds and count % rounds:
        raise PlanError(
            f"Schedule `{name}` divides the microbatches into rounds, and all rounds must have "
            "the same number of microbatches.",
            seen=f"microbatches={count} in {rounds} rounds, for a pipeline of {workers} workers",
            allowed=f"for example every multiple of {workers}",
            next_step=f"use -o microbatches={workers * rounds}",
            code="WB-PLAN-081",
        )
    if batch_size is not None and count > batch_size:
        fewer = f"-o microbatches={least if schedule.rounds else batch_size}"
        if batch_size < least:
            fewer = f"-o schedule=gpipe -o microbatches={batch_size}"
        raise PlanError(
            "A pipeline has more microbatches than samples in a step, so some microbatches would "
            "be empty.",
            seen=f"microbatches={count}; a pipeline has {batch_size} samples in a step",
            allowed=f"at most {batch_size} microbatches",
            next_step=f"use a larger batch_size, or {fewer}",
            code="WB-PLAN-082",
        )
    return int(count)


def at_least(count: int, name: str, workers: int) -> int:
    """Return how many microbatches a schedule takes: `count`, or a few more to fill equal rounds.

    Args:
        count: Must be at least one per worker if the schedule needs that.
    """
    while SCHEDULES[name].rounds and count % max(1, count // workers):
        count += 1
    return count


def pipeline_workers(options: Mapping[str, Any], workers: int) -> int:
    """Return how many workers form a pipeline: as requested, otherwise 2 if they divide evenly."""
    return int(options["stages"] or (1 if workers % 2 else 2))


def check_schedule(options: Mapping[str, Any], workers: int, batch_size: int | None) -> None:
    """Raise PlanError if the options do not fit each other or the number of workers."""
    stages_per_worker(options)
    if "stages" in options:  # several pipelines, each with a share of the batch
        every, workers = workers, pipeline_workers(options, workers)
        if every % workers:
            below = every // workers * workers
            fits = f"-n {below}" if below else f"-o stages={every}"
            raise PlanError(
                "The option `stages` is the number of workers in each pipeline. So the total "
                "number of workers must be a multiple of `stages`.",
                seen=f"stages={workers} on {every} workers",
                allowed=f"a multiple of {workers} workers",
                next_step=f"use {fits}, or -n {below + workers}",
                code="WB-PLAN-083",
            )
        batch_size = None if batch_size is None else -(-batch_size * workers // every)
    microbatches(options, workers, batch_size)


def turns(options: Mapping[str, Any]) -> list[int]:
    """Return after which step of a round, 1 to `every`, each fragment is averaged.

    These steps are spread evenly; the last fragment is averaged at the end of the round.
    """
    every, fragments = int(options["every"]), int(options["fragments"])
    return [(place + 1) * every // fragments for place in range(fragments)]


def check_turns(options: Mapping[str, Any], workers: int, batch_size: int | None) -> None:
    """Raise PlanError if a round has fewer steps than fragments."""
    every, fragments = options["every"], options["fragments"]
    if fragments > every:
        raise PlanError(
            "`fragments` (the number of parts of the parameters) is larger than `every` (the "
            "number of steps in a round). In a round, no two parts are averaged after the same "
            "step.",
            seen=f"every={every}, fragments={fragments}",
            allowed=f"fragments from 1 to {every}",
            next_step=f"use -o fragments={every}, or -o every={fragments}",
            code="WB-PLAN-319",
        )
