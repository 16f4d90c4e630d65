"""`wb.load`: a saved run, back with its history, evaluations and weights."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import RunDamagedWarning, RunError
from ..events import Noted, Topic
from ..history import disk, store
from ..plan import Plan
from .registry import runs
from .run import Run


def load(path: str | Path) -> Run:
    """Return a run from the folder that `run.save(path)` wrote.

    Also reads the folder of a run whose notebook died: the engines wrote every record there as it
    came. Where files are damaged or missing, a warning and a note of the run say which; what is
    left can be looked at.

    Raises:
        RunError: There is no run in that folder.
    """
    folder = Path(path)
    meta, history = store.read_run(folder)
    if "plan" not in meta:
        raise RunError(
            "The run was cut off before its plan was written.", seen=str(folder), code="WB-RUN-072"
        )
    run = Run(
        Plan.from_wire(meta["plan"]),
        number=int(meta.get("number", 0)),
        name=str(meta["name"]),
        engines=history.engines,
        devices=meta.get("devices", ()),
        folder=folder,
    )
    run.restore(history, meta)
    if damaged := _damage(run, meta):
        text = f"What was loaded is damaged: {'; '.join(damaged)}."
        history.event(Noted(rank=0, text=text, topic=Topic.DAMAGED, value=damaged))
        warnings.warn(RunDamagedWarning(_words(run, damaged), code="WB-WARN-002"), stacklevel=2)
    run.color = runs.color(run.plan)
    return run


def _damage(run: Run, meta: Mapping[str, Any]) -> list[str]:
    """Return what is damaged in a run's folder; an older version's may tell by its rows alone."""
    found = disk.faults(run.folder, meta)
    if not found and run.state == "finished":
        rows = run.history.totals.rows
        found = [f"there is no row of rank {rank}" for rank in range(len(rows)) if not rows[rank]]
    return found


def _words(run: Run, damaged: Sequence[str]) -> str:
    steps = run.history.totals.steps
    return (
        f"Run {run.name} is damaged on disk; figures, plots and comparisons show what is left.\n"
        f"  seen:    {run.folder}: {'; '.join(damaged)} ({steps} whole steps can be read)\n"
        "  allowed: the files as run.save(path) or the run's end left them\n"
        "  next:    load another copy of the folder, or train again: run.to_cell() gives the cell"
    )
