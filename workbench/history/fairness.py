"""What makes a comparison unfair, in plain words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .summary import RunSummary


def notes(groups: Sequence[Sequence[RunSummary]]) -> tuple[str, ...]:
    """Return one sentence for each thing that differs between runs but should not.

    Args:
        groups: The runs by plan; seeds may differ within a plan, but not between plans.
    """
    runs = [run for group in groups for run in group]
    found = []
    if len({run.recipe for run in runs if run.recipe}) > 1:
        found.append("The recipes differ: these runs did not train the same code.")
    found += _differs("batch sizes", runs, "batch_size")
    if len({run.total_steps or run.steps for run in runs}) > 1:
        listed = ", ".join(f"{run.name} {run.total_steps or run.steps}" for run in runs)
        found.append(f"The numbers of steps differ: {listed}.")
    found += _seeds(groups)
    found += _devices(runs)
    found += _updates(groups)
    for run in runs:
        found += _single(run)
    return tuple(found)


def _differs(what: str, runs: Sequence[RunSummary], field: str) -> list[str]:
    values: dict[str, Any] = {run.name: getattr(run, field) for run in runs}
    if len({value for value in values.values() if value is not None}) < 2:
        return []
    listed = ", ".join(f"{name} {value}" for name, value in values.items())
    return [f"The {what} differ: {listed}."]


def _seeds(groups: Sequence[Sequence[RunSummary]]) -> list[str]:
    sets = [frozenset(run.seed for run in group if run.seed is not None) for group in groups]
    known = [seeds for seeds in sets if seeds]
    if len(set(known)) < 2:
        return []
    listed = "; ".join(
        f"{group[0].plan_name} {', '.join(map(str, sorted(seeds)))}"
        for group, seeds in zip(groups, sets, strict=True)
        if seeds
    )
    return [f"The seeds differ, so the runs began at different weights: {listed}."]


def _devices(runs: Sequence[RunSummary]) -> list[str]:
    kinds = {
        run.name: sorted({_kind(worker.device) for worker in run.workers_table if worker.device})
        for run in runs
    }
    known = {name: ", ".join(kind) for name, kind in kinds.items() if kind}
    if len(set(known.values())) < 2:
        return []
    listed = "; ".join(f"{name} {kind}" for name, kind in known.items())
    return [f"The devices differ: {listed}."]


def _kind(device: str) -> str:
    """Return `NVIDIA H200` for `cuda:0 NVIDIA H200`, `cpu` for `cpu`."""
    place, _, name = device.partition(" ")
    return name or place.partition(":")[0]


def _updates(groups: Sequence[Sequence[RunSummary]]) -> list[str]:
    """Say where each worker's push is an update of its own: there are more of them, and smaller."""
    runs = [group[0] for group in groups]
    alone = [run.name for run in runs if not run.joined and run.workers > 1 and run.shares_batch]
    if not alone or len(alone) == len(runs):
        return []
    which = ", ".join(alone)
    return [
        f"In a step of {which} each worker's push is an update of its own, made from its share of "
        "the batch: there are as many updates as workers, where the others make one."
    ]


def _single(run: RunSummary) -> list[str]:
    found = []
    if run.trained_before:
        found.append(f"{run.name} began with a model that an earlier run had trained.")
    if run.state != "finished":
        of = f" of {run.total_steps}" if run.total_steps else ""
        found.append(f"{run.name} did not finish: {run.state} after {run.steps}{of} steps.")
    if run.diverged:
        found.append(f"{run.name} diverged: its last loss is no number, and in no mean.")
    if run.damaged:
        found.append(
            f"{run.name} is damaged on disk, and only what is left is compared: "
            f"{'; '.join(run.damaged)}."
        )
    if run.faults:
        found.append(f"{run.name} ran with injected faults: {', '.join(run.faults)}.")
    return found
