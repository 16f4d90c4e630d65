"""A run whose engines are told to end by the system: they leave first, and it goes on as it can.

    an engine ── `Leaving` ──> how it leaves
        regroup    the others go on without it, from the step under way (`healing.py`)
        alone      it stops after its step; the others wait for nobody
        at once    another one has a copy of all that it holds
        together   all stop after the same step, with a checkpoint where there is a folder for it;
                   then the run goes on as `--on-failure` says

What it was told is in a note, in `run.events`, and in what the run ends in, where it must.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from ...errors import RunError
from ...shared.events import Departed
from ...shared.messages import HaltAt

if TYPE_CHECKING:
    from ...shared.events import Leaving
    from ...shared.plan import Plan
    from ..allocator import EngineAllocator
    from ..run import Run
    from ..task import Task

Way = Literal["regroup", "alone", "at once", "together"]


class Execution(Protocol):
    """What is needed of a run on its engines (`launch.RunExecution`)."""

    pool: EngineAllocator
    run: Run
    plan: Plan

    def spares(self, engine: int) -> bool:
        """Whether the others go on without a pause when this engine is gone."""

    def dismiss(self, engine: int, why: str, *, replace: bool) -> bool:
        """Have the others regroup without an engine; return whether they do."""


class Departures:
    """Decides how engines of one submission leave; told on the thread that hears the engines."""

    def __init__(self, launch: Execution) -> None:
        self._launch = launch
        self._told: dict[int, Leaving] = {}
        self._together = False  # all stop for the sake of who was told

    def hear(self, engine: int, event: Leaving) -> None:
        """Take in that an engine was told to end, and see to it that it may."""
        launch, run = self._launch, self._launch.run
        if engine in self._told or run.is_over:
            return
        self._told[engine] = event
        run.note(told_words(run.called(engine), event))
        if launch.dismiss(engine, reason_of(event), replace=not event.host):
            return
        if self._together or run.state == "stopping":
            return
        match way_of(works=engine in run.members, spared=launch.spares(engine)):
            case "alone":
                self._note(engine, event)
                message = HaltAt(run=run.number, purpose="leave_alone", step=-1)
                launch.pool.engines.router.send(engine, message)
            case "at once":
                self._note(engine, event)
                launch.pool.engines.signal(engine, signal.SIGTERM)
            case _:
                self._together = True
                run.advance("stop" if launch.plan.on_failure == "stop" else "recover")
                run.halt("leave")

    def _note(self, engine: int, event: Leaving) -> None:
        run = self._launch.run
        ranks = [rank for rank, one in enumerate(run.engines) if one == engine]
        left = len(run.members) - (engine in run.members)
        step = run.history.snapshot().step
        run.history.event(Departed(ranks=ranks, step=step, workers=left, reason=reason_of(event)))

    def left(self, task: Task) -> dict[int, str]:
        """Return for whose sake all have stopped, and what those were told; empty: for nobody's."""
        outcomes = task.outcomes
        if not self._together or not all(one.is_well for one in outcomes.values()):
            return {}
        return {engine: reason_of(self._told[engine]) for engine in sorted(self._told)}

    def settle(self, left: Collection[int]) -> RunError | None:
        """Take note that they have left; return what the run ends in where it does not go on."""
        run, plan = self._launch.run, self._launch.plan
        if not left:
            return None
        for engine in left:
            self._note(engine, self._told[engine])
        if plan.on_failure != "stop":  # its user has pressed Stop since
            return None
        step = run.history.snapshot().step
        return stopped_error([run.called(one) for one in left], self._told[min(left)], step,
                             plan.checkpoint)  # fmt: skip


def way_of(*, works: bool, spared: bool) -> Way:
    """Return how an engine leaves a run whose workers cannot regroup.

    Args:
        works: Whether it runs the cell; else it is a server.
        spared: Whether the others go on without it.
    """
    if not spared:
        return "together"
    return "alone" if works else "at once"


def reason_of(event: Leaving) -> str:
    """Return what an engine was told: `SIGTERM`, `spot notice, 120 s left`."""
    left = "" if event.seconds is None else f", {event.seconds:.0f} s left"
    return f"{event.reason}{left}"


def told_words(who: str, event: Leaving) -> str:
    """Tell the user that an engine is about to leave."""
    what = "its host goes" if event.host else "it was told to end"
    return f"{who} leaves: {what} ({reason_of(event)})."


def stopped_error(who: Sequence[str], event: Leaving, step: int, folder: str) -> RunError:
    """Return what a run ends in that has stopped for those who had to leave."""
    saved = f" Its checkpoint is in {folder}." if folder else ""
    return RunError(
        f"{', '.join(who)} had to leave ({reason_of(event)}), so the run stopped after "
        f"{step} steps.{saved}",
        next_step=f"wb.resume({folder!r}) goes on from there"
        if folder
        else "--checkpoint DIR keeps what is trained, and --on-failure replace or heal goes on",
        code="WB-RUN-165",
    )
