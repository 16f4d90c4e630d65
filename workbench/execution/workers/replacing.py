"""Replaces a worker that is slow for a long time, and tells which remedy a run has chosen.

    slow for long ──> it leaves at a step boundary; the others share its part        `left`
    its process ends; a new one with the same id runs the cell up to `wb.fit`        `joined`
    all workers continue together                                                    `replaced`

Meanwhile the others continue training. Each worker is replaced at most once, and a run replaces at
most `MOST` workers. If the new engine is slow too, the cause is not the process but, for example,
the device or the host.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...errors import WorkbenchError
from ...shared.events import Joined, Replaced
from .shedding import Shedding, Watching
from .stragglers import Pace, Rule

if TYPE_CHECKING:
    from ...shared.events import Event
    from ...shared.messages import Down, Happened, Position, Records
    from ..run import Run
    from .healing import Healer

log = logging.getLogger("workbench.session")
PATIENT = Rule(seconds=10.0)
"""A new engine costs more than a change of the shares."""
MOST = 3
LOOK_S = 0.05


class Replacing(Watching):
    """Replaces slow workers of one run.

    Args:
        restart: Starts a new engine in an engine's place, with the same id.
    """

    def __init__(
        self,
        run: Run,
        send: Callable[[int, Down], object],
        healer: Healer,
        restart: Callable[[int], object],
    ) -> None:
        super().__init__(run, send, healer)
        self._mender, self._restart = healer, restart
        self._replaced: list[int] = []  # engines, in the order of replacement
        self._coming: tuple[int, Replaced] | None = None
        self._since = 0  # how many changes there had been when that began

    @property
    def rule(self) -> Rule:
        """When a worker counts as slow for a long time."""
        return PATIENT

    def _decide(self, pace: Pace) -> None:
        self._come_together()  # the news of a change may arrive late
        engine = self._members[pace.slowest]
        if self._coming is not None or not pace.slow[pace.slowest]:
            return
        who = self._called(pace)
        slow = (
            f"{pace.ratio[pace.slowest]:.1f} times as long as the other workers to finish a share"
        )
        if engine in self._replaced or len(self._replaced) >= MOST:
            again = engine in self._replaced
            why = f"this worker, because at most {MOST} workers of a run are replaced"
            if again:
                why = "this worker again, because a worker is replaced at most once"
            self._over = True
            self._run.note(
                f"{who} takes {slow}. Workbench does not replace {why}. In the rest of this run, "
                "Workbench replaces no slow worker."
            )
            return
        self._replaced.append(engine)
        rank = self._run.engines.index(engine)
        event = Replaced(
            ranks=[rank], ratio=pace.ratio[pace.slowest], slow_s=pace.seconds, before_s=pace.step_s,
        )  # fmt: skip
        self._coming, self._since = (engine, event), len(self._run.history.changes)
        why = f"for {pace.seconds:.0f} s, it took {slow}"
        threading.Thread(
            target=self._replace, args=(engine, why), name="workbench-replace", daemon=True
        ).start()

    def _replace(self, engine: int, why: str) -> None:
        """Let the slow worker leave and a new worker join."""
        run = self._run
        try:
            self._mender.dismiss([engine], why)
            while self._is_at_it(engine):
                if run.is_over:
                    return
                time.sleep(LOOK_S)
            self._restart(engine)
            self._mender.admit([engine])
        except WorkbenchError as error:
            self._coming = None
            if not run.is_over:
                run.note(f"{run.called(engine)} could not be replaced: {error}")
        except Exception as error:  # the others continue in any case
            self._coming = None
            log.exception("Engine %d could not be replaced", engine)
            run.note(f"{run.called(engine)} could not be replaced: {error}")

    def _is_at_it(self, engine: int) -> bool:
        task = self._run.task
        return engine in self._mender.members or (task is not None and engine in task.unfinished())

    def _come_together(self) -> None:
        if self._coming is None or self._coming[0] not in self._members:
            return
        engine, event = self._coming
        changes = self._run.history.changes[self._since :]
        joined = [one for one in changes if one["event"] == Joined.name]
        last = next((one for one in joined if event.ranks[0] in one["ranks"]), None)
        if last is None:
            return
        self._coming = None
        event = Replaced(
            ranks=event.ranks, step=last["step"], seconds=last["seconds"],
            workers=len(self._members), ratio=event.ratio, slow_s=event.slow_s,
            before_s=event.before_s,
        )  # fmt: skip
        self._run.tell(event)
        self._run.note(replaced_words(event, self._run.called(engine)), [engine])
        self._done = event


def replaced_words(event: Replaced, who: str) -> str:
    """Return the note on the replaced worker and on the reason."""
    return (
        f"{who} was slow for {event.slow_s:.0f} s: it took {event.ratio:.1f} times as long as the "
        f"other workers to finish a share. A new engine replaces this worker from step "
        f"{event.step} on."
    )


def listener(
    run: Run,
    send: Callable[[int, Down], object],
    healer: Healer | None = None,
    restart: Callable[[int], object] = lambda engine: None,
    tell: Callable[[Event], object] | None = None,
) -> Callable[[int, Records | Happened | Position], object]:
    """Return the listener for all messages of a run's engines, by its `--on-straggler`.

    Args:
        restart: Starts a new engine in an engine's place, with the same id.
        tell: Receives what has happened; by default the run.
    """
    what = run.plan.on_straggler
    if what == "replace" and healer is not None:
        return Replacing(run, send, healer, restart).hear
    if what == "replace":
        run.note("--on-straggler replace has no effect, because a job cannot start new engines.")
    if what == "shed":
        return Shedding(run, send, healer, tell).hear
    return lambda engine, message: None
