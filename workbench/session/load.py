"""`wb.load`: a saved run, back with its history, evaluations and weights."""

from __future__ import annotations

from pathlib import Path

from ..errors import RunError
from ..history import disk
from ..plan import Plan
from .registry import runs
from .run import Run


def load(path: str | Path) -> Run:
    """Return a run from the folder that `run.save(path)` wrote.

    Also reads the folder of a run whose notebook died: the engines wrote every record there as it
    came.

    Raises:
        RunError: There is no run in that folder.
    """
    folder = Path(path)
    meta, history = disk.read_run(folder)
    if "plan" not in meta:
        raise RunError("The run was cut off before its plan was written.", seen=str(folder))
    run = Run(
        Plan.from_wire(meta["plan"]),
        number=int(meta.get("number", 0)),
        name=str(meta["name"]),
        engines=history.engines,
        devices=meta.get("devices", ()),
        folder=folder,
    )
    run.restore(history, meta)
    run.color = runs.color(run.plan)
    return run
