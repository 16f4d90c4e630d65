"""A run whose engines the system tells to exit: these engines leave first, the others continue.

    an engine ── `ToldToEnd` ──> how it leaves
        regroup    the others continue without it, from the current step (`healing.py`)
        alone      it stops after its step; the others do not wait for it
        at once    another engine has a copy of all its data
        together   all stop after the same step, and write a checkpoint if a folder is given;
                   then the run continues as `--on-failure` says

The reason is in a note and in `run.events`. If the run must end, it is also in the run's outcome.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, Protocol

from ...errors import RunError
from ...shared.events import Left
from ...shared.messages import HaltAt, Purpose

if TYPE_CHECKING:
    from ...shared.events import ToldToEnd
    from ...shared.plan import Plan
    from ..allocator import EngineAllocator
    from ..run import Run
    from ..task import Task
    from .healing import Healer

Way = Literal["regroup", "alone", "at once", "together"]
HOW: dict[Way, Purpose] = {"alone": "leave_alone", "at once": "leave_now"}
LOOK_S = 0.05
NO_ROOM = "{} is not replaced by a new engine, because its host is shutting down."


class Execution(Protocol):
    """The methods that this module needs of a run on its engines (`launch.RunExecution`)."""

    pool: EngineAllocator
    run: Run
    plan: Plan
    healer: Healer | None

    def spares(self, engine: int) -> bool:
        """Whether the others continue without a pause after this engine has ended."""


class Departures:
    """Decides how engines of one submission leave; called on the thread that receives messages."""

    def __init__(self, launch: Execution) -> None:
        self._launch = launch
        self._told: dict[int, ToldToEnd] = {}
        self._together = False  # all stop because of one engine that was told to exit

    def hear(self, engine: int, event: ToldToEnd) -> None:
        """Note that an engine was told to end, and let the engine leave."""
        launch, run = self._launch, self._launch.run
        if engine in self._told or run.is_over:
            return
        self._told[engine] = event
        run.note(told_words(run.called(engine), event))
        if self._together or run.state == "stopping":
            return
        match self._way(engine):
            case "regroup":
                self._replace_later(engine, event)
            case "alone" | "at once" as way:
                if not self._is_yet_to_come(engine):
                    self._note(engine)
                message = HaltAt(run=run.number, purpose=HOW[way], step=-1)
                launch.pool.engines.router.send(engine, message)
            case "together":
                self._together = True
                run.advance("stop" if launch.plan.on_failure == "stop" else "recover")
                run.halt("leave")

    def _is_yet_to_come(self, engine: int) -> bool:
        healer = self._launch.healer
        return healer is not None and healer.expects(engine)

    def _way(self, engine: int) -> Way:
        launch, healer = self._launch, self._launch.healer
        if self._is_yet_to_come(engine):
            return "at once"
        regroups = healer is not None and healer.can_regroup
        if healer is not None and regroups:
            try:
                healer.dismiss([engine], reason_of(self._told[engine]))
            except RunError:  # no other engine remains
                regroups = False
        works = engine in launch.run.members
        return way_of(regroups=regroups, works=works, spared=launch.spares(engine))

    def _note(self, engine: int) -> None:
        run = self._launch.run
        ranks = [rank for rank, one in enumerate(run.engines) if one == engine]
        left = len(run.members) - (engine in run.members)
        step, reason = run.history.snapshot().step, reason_of(self._told[engine])
        run.tell(Left(ranks=ranks, step=step, workers=left, reason=reason))

    def _replace_later(self, engine: int, event: ToldToEnd) -> None:
        """Start a new engine in its place after its process has ended, if the machine has room."""
        if event.host:
            self._launch.run.note(NO_ROOM.format(self._launch.run.called(engine)))
            return
        threading.Thread(
            target=self._replace, args=(engine,), name="workbench-replace", daemon=True
        ).start()

    def _replace(self, engine: int) -> None:
        run, healer = self._launch.run, self._launch.healer
        known = self._launch.pool.engines.engines
        while known[engine].state != "dead" or not self._has_left(engine):
            if run.over.wait(LOOK_S):
                return
        if healer is not None and run.task is not None:
            with contextlib.suppress(RunError):  # the run is over, or needed the engine again
                healer.admit([engine])

    def _has_left(self, engine: int) -> bool:
        """Whether the others continued without it. If all others died, the run needs it again."""
        run = self._launch.run
        return any(
            one["event"] == Left.name and run.engines.index(engine) in one["ranks"]
            for one in run.events
        )

    def left(self, task: Task) -> dict[int, str]:
        """Return the engines that made all others stop, and the reason; empty if there are none."""
        if not self._together or task.failure() is not None:
            return {}
        return {engine: reason_of(self._told[engine]) for engine in sorted(self._told)}

    def settle(self, left: Collection[int]) -> RunError | None:
        """Note that these engines have left; return the run's error if it cannot continue."""
        run, plan = self._launch.run, self._launch.plan
        for engine in left:
            self._note(engine)
        if not left or (plan.on_failure != "stop" and run.state == "stopping"):
            return None  # in the second case the user has pressed Stop since
        who = [run.called(one) for one in left]
        step = run.history.snapshot().step
        return stopped_error(who, self._told[min(left)], step, plan.checkpoint)


def way_of(*, regroups: bool, works: bool, spared: bool) -> Way:
    """Return how an engine leaves a run.

    Args:
        regroups: Whether the others continue without it, in a new group.
        works: Whether it runs the cell; otherwise it is a server.
        spared: Whether the others continue without it and without a pause.
    """
    if regroups:
        return "regroup"
    if not spared:
        return "together"
    return "alone" if works else "at once"


def reason_of(event: ToldToEnd) -> str:
    """Return the reason an engine must exit: `SIGTERM`, `spot notice, 120 s left`."""
    left = "" if event.seconds is None else f", {event.seconds:.0f} s left"
    return f"{event.reason}{left}"


def told_words(who: str, event: ToldToEnd) -> str:
    """Tell the user that an engine is about to leave."""
    what = "its host is shutting down" if event.host else "its process was asked to end"
    return f"{who} leaves: {what} ({reason_of(event)})."


def stopped_error(who: Sequence[str], event: ToldToEnd, step: int, folder: str) -> RunError:
    """Return the error of a run that stopped because engines had to leave."""
    saved = f" The run's checkpoint is in {folder}." if folder else ""
    return RunError(
        f"{', '.join(who)} had to leave ({reason_of(event)}), so the run stopped after "
        f"{step} steps.{saved}",
        next_step=f"continue from this checkpoint: wb.resume({folder!r})"
        if folder
        else "run the cell again with --checkpoint DIR or --on-failure heal. With --checkpoint "
        "DIR, you can continue the new run after it has stopped. With --on-failure heal (not under "
        "every strategy), the other workers continue when a worker has to leave",
        code="WB-RUN-149",
    )
