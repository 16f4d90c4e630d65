"""More or fewer workers in a running run: begin the change, and wait for it.

    scale(n)   fewer: the workers with the highest ranks leave
               more: workers that had left join again, then free engines, then new engines

The rest is the same as for any other change of workers (`healing.py`).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import psutil

from ...cluster.forkserver.turns import memory
from ...errors import RunError, WorkbenchError
from ...history.snapshot import Staffing

if TYPE_CHECKING:
    from ...cluster.engines import EngineInfo
    from ...history.store import RunHistory
    from ...shared.plan import Plan
    from ..task import Mender, Task

LOOK_S = 0.02


class Scaled(Protocol):
    """The part of a run that this module needs (`run.Run`)."""

    task: Task | None
    plan: Plan
    history: RunHistory
    engines: tuple[int, ...]

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""


def scale(run: Scaled, workers: int, *, wait: bool = True) -> None:
    """Let a run continue with this many workers.

    Raises:
        PlanError: Its plan does not allow that.
        RunError: The run is over, is being scaled, or ended before it had this many workers.
    """
    run.plan.check_scales(workers, _batch(run))
    task, mender = _mender(run.task)
    mender.scale(workers)
    if not wait:
        return
    while mender.target is not None and not task.is_over:
        task.over.wait(LOOK_S)
    if mender.failed or mender.target is not None:
        raise RunError(
            f"The number of workers is {len(mender.members)} instead of {workers}.",
            seen="; ".join(mender.failed) or "the run ended before the change was complete",
            code="WB-RUN-147",
        )


def check(task: Task | None) -> None:
    """Raise RunError if the number of workers cannot change at the moment."""
    _mender(task)[1].check_scales()


def keep_spares(
    recruit: Callable[[], Sequence[int]],
    begin: Callable[[int], None],
    note: Callable[[str], object],
) -> None:
    """Let engines run the cell to the point where they can join and wait; returns at once.

    Args:
        recruit: Returns the engines.
        begin: Starts this on one engine.
        note: Tells the user that there are no spare engines.
    """

    def start() -> None:
        try:
            spares = recruit()
        except WorkbenchError as error:
            note(f"The spare engines could not be started: {error}")
            return
        for engine in spares:
            begin(engine)

    threading.Thread(target=start, name="workbench-spares", daemon=True).start()


def staffing(run: Scaled) -> Staffing | None:
    """Return how many workers a run has and can have; None if the number cannot change."""
    task, plan = run.task, run.plan
    if run.is_over or task is None or not (plan.entry.heals and plan.entry.replicated):
        return None
    mender = task.mender
    try:
        plan.check_scales()
        check(task)
    except WorkbenchError as error:
        workers = len(run.engines if mender is None else mender.members)
        why_not = f"{error.what} Next: {error.next_step}" if error.next_step else error.what
        return Staffing(workers, why_not=why_not)
    assert mender is not None
    return Staffing(len(mender.members), mender.target, _batch(run))


def _batch(run: Scaled) -> int | None:
    """Return the samples of a run's global batch; None if this number is not known."""
    found = run.history.story.started.get("batch_size")
    return None if found is None else int(found)


def check_memory(workers: Sequence[EngineInfo], more: int) -> None:
    """Raise RunError if this machine has too little memory for this many more workers.

    The function assumes that a further worker needs as much as the largest worker does not share.
    """
    if not more:
        return
    each = 0
    for one in workers:
        if one.is_here:
            with contextlib.suppress(psutil.Error, AttributeError):
                each = max(each, int(psutil.Process(one.pid).memory_full_info().uss))
    free, _ = memory()
    if more * each > free:
        raise RunError(
            "This machine has too little memory for so many workers.",
            seen=f"workers to add: {more}, {each / 1e6:.0f} MB each; free: {free / 1e6:.0f} MB",
            allowed=f"workers to add: at most {free // each}",
            next_step="call run.scale(n) with a smaller n, or free some memory",
            code="WB-RUN-151",
        )


def _mender(task: Task | None) -> tuple[Task, Mender]:
    """Return the object that decides about the workers of a run."""
    if task is None or task.mender is None:
        raise RunError(
            "This notebook cannot change the workers of this run.",
            seen="the run has ended, has not begun, or belongs to another notebook",
            next_step="call run.scale in the notebook that started the run, while the run trains",
            code="WB-RUN-148",
        )
    return task, task.mender


def nobody_left(engines: Sequence[int], members: Sequence[int]) -> RunError:
    """Return the error for a request that no worker stays, or that none of the run leaves."""
    if not set(engines) & set(members):
        return RunError(
            "None of these engines is a worker of the run.",
            seen=f"engines {list(engines)}",
            allowed=f"the run's engines: {', '.join(map(str, members))}",
            code="WB-RUN-152",
        )
    return RunError(
        "At least one worker must stay in the run.",
        seen=f"engines {list(engines)} would leave; the run has engines {list(members)}",
        allowed="some of the engines, but not all",
        next_step="run.stop() ends the run",
        code="WB-RUN-141",
    )


def not_away(engine: int, members: Sequence[int]) -> RunError:
    """Return the error if a worker to add already takes part, or is not a worker of the run."""
    return RunError(
        "The engine cannot join the run.",
        seen=f"engine {engine} is already training"
        if engine in members
        else f"engine {engine} is not an engine of this run, or is already joining or leaving, or "
        "has finished",
        allowed="an engine that has left this run, or that has died in it. Before a dead engine "
        f"joins, Workbench starts it again. The engines {list(members)} are training, so they "
        "cannot join",
        code="WB-RUN-142",
    )


def busy(target: int | None) -> RunError:
    """Return the error if another change of workers is in progress."""
    return RunError(
        "Workers are already joining or leaving this run.",
        seen="another change is in progress" if target is None else f"changing to {target} workers",
        next_step="wait until run.events shows that the workers have joined or left",
        code="WB-RUN-145",
    )


def kept(why: str) -> RunError:
    """Return the error if training cannot continue with other workers."""
    return RunError(
        "The number of workers cannot change in this training.", seen=why, code="WB-RUN-146"
    )


def not_training(state: str) -> RunError:
    """Return the error if no worker is training."""
    return RunError(
        "The number of workers can change only while the run trains.",
        seen=f"the run is {state}",
        code="WB-RUN-143",
    )
