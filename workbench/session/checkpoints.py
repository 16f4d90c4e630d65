"""Checkpoints of runs, on the notebook's side: which run owns a folder, and the record in it."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, RunError
from ..shared import checkpoints, cluster_env
from ..shared.checkpoints import (
    RUN,
    VERSION,
    Checkpoint,
    at,
    faults,
    found,
    last_whole,
    latest,
    refusal,
)
from ..shared.plan import Plan

if TYPE_CHECKING:
    from ..history.run_data import RunData

__all__ = [
    "Checkpoint", "apart", "at", "claim", "describe", "described", "found", "latest", "verify",
]  # fmt: skip


def apart(plans: Sequence[Plan]) -> list[Plan]:
    """Give each of several plans a separate checkpoint folder below the named folder."""
    if len(plans) < 2:
        return list(plans)
    return [
        replace(plan, checkpoint=str(Path(plan.checkpoint) / (plan.name or plan.strategy)))
        if plan.checkpoint
        else plan
        for plan in plans
    ]


def verify(path: str, plan: Plan) -> None:
    """Refuse a checkpoint if a file that this plan would load is damaged.

    Raises:
        RunError: Names the damaged files and the last complete checkpoint.
    """
    one = at(path)
    alike = one.about["world_size"] == plan.workers and one.about["strategy"] == plan.strategy
    if damaged := faults(one, own=alike):
        raise refusal(one, damaged)


def claim(plan: Plan, resume_from: str = "") -> None:
    """Refuse a folder with checkpoints of another run, so that the two do not mix.

    Args:
        resume_from: The checkpoint that the run continues from.

    Raises:
        PlanError: Names the run that wrote them, and says how to continue or start again.
    """
    if not plan.checkpoint:
        return
    # The run writes damaged later checkpoints again when it reaches their steps.
    last = last_whole(plan.checkpoint) if resume_from else latest(plan.checkpoint)
    if last is None or (resume_from and Path(last.path) == Path(resume_from)):
        return
    name = _name(plan.checkpoint)
    if resume_from:
        raise PlanError(
            "The folder for new checkpoints already contains checkpoints, but this run does not "
            "continue from the last one. So old and new checkpoints would mix.",
            seen=f"{plan.checkpoint}: run {name or 'unknown'} at step {last.step}",
            next_step=f"wb.resume({plan.checkpoint!r}) continues from step {last.step}; or "
            "write to another folder with checkpoint='DIR'"
            if name
            else "write to another folder with checkpoint='DIR'",
            code="WB-PLAN-096",
        )
    raise PlanError(
        "The folder already contains checkpoints.",
        seen=f"{plan.checkpoint}: run {name or 'unknown'} at step {last.step}",
        next_step=f"wb.resume({plan.checkpoint!r}) continues run {name}; to start a new run, "
        "use another --checkpoint DIR"
        if name
        else "use another --checkpoint DIR",
        code="WB-PLAN-097",
    )


def describe(run: RunData) -> None:
    """Write what `wb.resume` needs next to the run's checkpoints.

    Raises:
        PlanError: The folder cannot be made or written to.
    """
    plan = run.plan
    if not plan.checkpoint:
        return
    folder = Path(plan.checkpoint)
    about = {
        "version": VERSION,
        "name": run.name,
        "plan": plan.to_wire(),
        "arguments": len(plan.recipe.args),
        "run": run.folder.name,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        cluster_env.replace(folder / RUN, json.dumps(checkpoints.sealed(about), indent=1))
    except OSError as error:
        raise PlanError(
            "Checkpoints cannot be written to this folder.",
            seen=f"{type(error).__name__}: {error}",
            next_step="use --checkpoint with another folder",
            code="WB-PLAN-098",
        ) from error


def described(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the record that `describe` wrote.

    Raises:
        RunError: The record is missing, damaged, or from another version.
    """
    whole = True
    try:
        about = json.loads((Path(folder) / RUN).read_text())
        if about["version"] != VERSION:
            raise ValueError(f"version {about['version']} instead of {VERSION}")
        whole = checkpoints.is_as_sealed(about)
        Plan.from_wire(about["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            "The record of the run that wrote these checkpoints is missing or unreadable.",
            seen=f"{Path(folder) / RUN}: {type(error).__name__}: {error}",
            next_step="run the cell again with %%distributed and another --checkpoint DIR",
            code="WB-RUN-060",
        ) from error
    if not whole:
        raise RunError(
            "The record of the run was changed or damaged (its checksum differs).",
            seen=str(Path(folder) / RUN),
            allowed="an unchanged file, as the run wrote it",
            next_step="restore the file from a copy. If you changed the file yourself, delete the "
            'entry "checksum". Also delete the comma before this entry',
            code="WB-RUN-061",
        )
    assert isinstance(about, dict)
    return about


def _name(folder: str) -> str:
    """Return the name of the run that wrote the checkpoints; empty if its record is unreadable."""
    try:
        return str(described(folder)["name"])
    except RunError:
        return ""
