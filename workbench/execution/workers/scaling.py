"""More or fewer workers in a run that goes on: begun, and waited for.

    scale(n)   fewer: those of the highest ranks leave
               more: those who had left come again, then free engines, then ones started for it

What then happens is one change of workers like any other (`healing.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...errors import RunError

if TYPE_CHECKING:
    from ..task import Mender, Task

LOOK_S = 0.02


def scale(task: Task | None, workers: int, *, wait: bool = True) -> None:
    """Have a run go on with so many workers, which its plan allows.

    Raises:
        RunError: The run is over, is being scaled, or ended before it had so many.
    """
    task, mender = _mender(task)
    mender.scale(workers)
    if not wait:
        return
    while mender.target is not None and not task.is_over:
        task.over.wait(LOOK_S)
    if mender.failed or mender.target is not None:
        raise RunError(
            f"The run has {len(mender.members)} workers, and not {workers}.",
            seen="; ".join(mender.failed) or "the run ended before",
            code="WB-RUN-147",
        )


def check(task: Task | None) -> None:
    """Raise RunError where the workers of a run cannot be more or fewer at the moment."""
    _mender(task)[1].check_scales()


def _mender(task: Task | None) -> tuple[Task, Mender]:
    """Return who decides about the workers of a run."""
    if task is None or task.mender is None:
        raise RunError(
            "Nobody here decides about the workers of the run.",
            seen="it is over, has not begun, or belongs to another notebook",
            code="WB-RUN-148",
        )
    return task, task.mender
