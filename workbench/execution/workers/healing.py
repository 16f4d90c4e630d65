"""A run whose workers change while it trains: it continues without lost workers, and others join.

    a worker dies ──> announce g: the others ──> they regroup, and continue       `healed`
          └── in the background: a new engine runs the cell up to `wb.fit` ──> ready
    ready ──> announce g + 1: with it ──> it copies the state of a member         `joined`
    one must leave ──> announce g: the others ──> they regroup, and continue      `left`
          └── it waits meanwhile, in case all others die ──> let go: its cell ends

`engine/training/regrouping.py` has the part of the workers. This module decides which workers take
part. Each change makes a generation, and the newest generation counts. So a death during a change
is one more change. The processes that reap a dead worker report its death to the notebook. If a
worker lost its connection, the notebook also looks for dead processes itself.
If the others cannot continue alone (some have not begun to train, or none remains), the cell
fails because of the death. The run then continues in the way that `launch.Recoverer` can.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

from ...cluster.processes import lives
from ...errors import WorkbenchError
from ...shared.events import Regrouped, Standing
from ...shared.messages import CellOutcome
from ..outcome import is_collateral
from . import scaling, silence
from .change import ENDED, TRAINS, Change, Execution, announcement
from .copies import Copies

if TYPE_CHECKING:
    from ..task import Task

log = logging.getLogger("workbench.session")
LOOK_S, CUT_S = 0.05, 1.0
"""How often to look for dead members; how long one may be cut off before all members meet again."""
TRIES = 3
"""How many new engines in one worker's place may fail to join, one after the other."""


class Healer:
    """Decides which workers take part in one run; called on the engines' router threads.

    Attributes:
        generation: The newest generation that was announced; 0: none.
        members: Engines that take part, in the order of the run's ranks.
        failed: Why engines that the latest `scale` requested did not join.
    """

    def __init__(self, launch: Execution) -> None:
        self._launch, self._run = launch, launch.run
        self.generation = 0
        self.members = list(launch.run.members)
        self._met, self._number = 0, 0  # the newest generation that has met, and its size
        self._past: set[int] = set()  # have trained to the end
        self._in: set[int] = set()  # have begun to train
        self._asked: dict[int, str] = {}  # must leave after all members train
        self._leaving: list[int] = []  # are no longer members, and wait for their cell to end
        self._gone: set[int] = set()  # may end, and their cell is ending
        self._awaited: set[int] = set()  # are starting, or run the cell, and will join
        self._size = len(self.members)  # how many members the run should have
        self._at_door: list[int] = []  # wait to join
        self._unwanted: set[int] = set()  # waiting engines that must not join any more
        self._scaling, self._starting = threading.Lock(), threading.Lock()
        self._target: int | None = None
        self.failed: list[str] = []
        self._over, self._why_not = False, ""
        self._late: set[int] = set()  # dead engines whose replacement came too late
        self._reached = 0  # the first step of the present members
        self._keeper = self.members[0]  # whose weights are the run's
        self._ended: set[int] = set()  # their cells are over
        self._coming: dict[int, CellOutcome] = {}  # run the cell in its place
        self._tries: dict[int, int] = {}
        self._change, self._copies = Change(), Copies(launch)
        self._halted: dict[int, float] = {}  # ended because they were halted; the seconds
        self._lock = threading.RLock()

    @property
    def is_together(self) -> bool:
        """Whether all members train together and no change is in progress."""
        return self._met == self.generation

    @property
    def _task(self) -> Task | None:
        return self._run.task

    # -- what is heard -----------------------------------------------------------------------------

    def spares(self, engine: int, outcome: CellOutcome) -> CellOutcome | None:
        """Note an engine's end; return the outcome to use for it if the others continue."""
        with self._lock:
            if engine in self._launch.servers:
                spared = any(engine in chain for chain in self._launch.chains())
                self._over = self._over or not (outcome.is_well or spared)
                return None
            self._ended.add(engine)
            try:
                return self._spares(engine, outcome)
            finally:
                self._dismiss_servers()

    def _spares(self, engine: int, outcome: CellOutcome) -> CellOutcome | None:
        with self._lock:
            if engine in self._coming:
                return self._did_not_come(engine, outcome)
            if engine in self._gone or (engine in self._leaving and outcome.status == "died"):
                return self._has_left(engine, outcome)
            if outcome.status != "died":
                self._left(engine, outcome)
                return None
            words = silence.death_words(self._run, self._halted, engine, outcome)
            if self._change.how.get(engine) == "":  # the others had noticed the death before
                self._change.how[engine] = words
                self._conclude()
                self.begin_replacing(engine)
                return outcome
            if engine in self._copies.away:
                self._copies.tell_of(engine, words, self._reached, len(self.members))
                self.begin_replacing(engine)
                return outcome
            enough = self._copies.suffice(self._have_all - {engine}, self._past, self._keeper)
            if not (enough and self._goes_on and outcome.recoverable and engine in self.members):
                self._over = True
                return None
            self._do_without(engine, words)
            self._fill()
            self._announce()
        self.begin_replacing(engine)
        return outcome

    @property
    def _have_all(self) -> set[int]:
        """Return the engines that have the current state of training, as far as is known."""
        return {*self.members, *self._leaving, *self._copies.recent} - set(self._change.fresh)

    def _dismiss_servers(self) -> None:
        """Let servers end when no worker can ask them any more."""
        over = self._over or set(self.members) <= self._past
        if over and set(self._run.members) <= self._ended:
            self._launch.dismiss_servers()

    @property
    def _goes_on(self) -> bool:
        return not self._over and self._run.state in TRAINS

    def watched(self) -> list[int]:
        """Return the engines that the others wait for, or that will soon take part."""
        with self._lock:
            return [] if not self._goes_on else [*({*self.members, *self._coming} - self._past)]

    def latest_steps_s(self) -> list[float]:
        """Return how long the latest steps took."""
        return [float(step_s) for step_s in self._run.history["step_s"][-silence.WINDOW :]]

    def note_halted(self, engine: int, seconds: float) -> None:
        """Note that a halted engine is ended, before its death is reported."""
        with self._lock:
            self._halted[engine] = seconds

    def _do_without(self, engine: int, how: str) -> None:
        self.members.remove(engine)
        self._tries.pop(engine, None)
        self._change.lost.append(engine)
        self._change.how[engine] = how

    @property
    def can_regroup(self) -> bool:
        """Whether all members train, so that some of them can leave now without a loss."""
        with self._lock:
            all_in = self._goes_on and set(self.members) <= self._in
            return all_in and self._launch.plan.entry.replicated

    def expects(self, engine: int) -> bool:
        """Whether an engine has not joined yet: the others continue without it."""
        with self._lock:
            return engine in self._coming

    def settle(self) -> list[int]:
        """Let no worker join any more; wait for starting engines, return those still dead."""
        with self._lock:
            self._over = True
        with self._starting:
            known = self._launch.pool.engines.engines.items()  # none in a stopped cluster
            return [i for i, e in known if e.state == "dead" and i in self._awaited | self._late]

    def hear(self, engine: int, event: Standing | Regrouped) -> None:
        """Process an engine's position, or its report that it continues with the others."""
        ready = isinstance(event, Standing) and event.phase == "ready"
        with self._lock:
            if self._over and not ready:
                return
            match event:
                case Regrouped():
                    self._regrouped(engine, event)
                case Standing(phase="cut" | "ready") if engine in self.members:
                    if event.generation == self.generation:
                        self._later(CUT_S, self._meet_again)  # unless changed by then
                        self._look_for_dead()
                case Standing(phase="ready") if engine in self._coming:
                    self._let_in(engine)
                case Standing(phase="past") if engine in {*self.members, *self._leaving} or (
                    engine in self._copies.away
                ):
                    self._is_through(engine)
                case Standing(phase="apart"):
                    self._why_not = event.why
                    self._asked.clear()
                case Standing(phase="in"):
                    self._in.add(engine)
                    self._dismiss_asked()
                case Standing(phase="before") if engine in self.members:
                    self._give_up()

    def _is_through(self, engine: int) -> None:
        """Continue without an engine that trained to the end before the others meet."""
        self._past.add(engine)
        self.members = self._copies.recall(self.members, self._coming.keys() - {engine})
        (self.members if engine in self.members else self._leaving).remove(engine)
        for one in (*self.members, engine):
            self._change.left.pop(one, None)
        self._announce()
        self._send_home()
        if not self.members and self._keeper in self._change.lost:
            self._give_up()  # this engine had the weights

    def _let_in(self, engine: int) -> None:
        """Let a new engine take part that has reached the point where the others train."""
        if not (self.members and self._goes_on):
            self._launch.pool.engines.interrupt([engine])
            return
        if engine not in self._at_door:
            self._at_door.append(engine)
        if self._fill():
            self._announce()

    def _fill(self) -> bool:
        """Let waiting engines take part if the run has fewer members than it should have."""
        size = self._size if self._goes_on else 0
        self.members, chosen = self._copies.fill(
            self.members, self._at_door, size, self._past, self._change
        )
        return bool(chosen)

    def _turn_back(self, engine: int) -> None:
        """Continue without an engine that just joined; it may have taken steps with the others."""
        self.members.remove(engine)
        self._change.fresh.remove(engine)
        self._change.short = True

    def _look_for_dead(self) -> None:
        """Continue without members whose processes have ended, before their parents report this.

        The warm parent may be importing, and then it reaps no process for seconds.
        """
        known = self._launch.pool.engines.engines  # empty once the cluster has been stopped
        there = [one for one in self.members if one in known and known[one].is_here]
        gone = [one for one in there if not lives(known[one].pid)]
        left = self._have_all - {*gone}
        if self._goes_on and gone and left and self._copies.suffice(left, self._past):
            for engine in gone:
                if engine in self._change.fresh:  # the end of an engine that did not join
                    self._turn_back(engine)
                else:
                    self._do_without(engine, "")
            self._fill()
            self._announce()

    def _left(self, engine: int, outcome: CellOutcome) -> None:
        """Note that a member's cell is over; after a failed cell no engine joins any more."""
        if self._change.lost and is_collateral(outcome):
            self._give_up()  # it could not continue without the dead ones
        self._over = self._over or not outcome.is_well
        if engine in self.members and self._goes_on and not self.is_together:
            self._is_through(engine)  # it had ended before it was told that it must meet the others
            return
        self._past.add(engine)
        self.members = [one for one in self.members if one != engine]  # it does not answer any more
        self._send_home()

    def _did_not_come(self, engine: int, outcome: CellOutcome) -> CellOutcome:
        """Continue without an engine that should have joined."""
        death = self._coming.pop(engine)
        halted_s = self._halted.pop(engine, None)
        if engine in self.members:
            self._turn_back(engine)
            self._fill()
            self._announce()
        if engine in self._at_door:
            self._at_door.remove(engine)
        self._copies.drop(engine)
        self._awaited.discard(engine)
        if outcome.status not in ("error", "died") and engine not in self._unwanted:
            self.failed.append(f"{self._run.called(engine)}: {ENDED}")
        if not self._over and outcome.status in ("error", "died"):
            why = outcome.how if outcome.status == "died" else outcome.words
            why = why if halted_s is None else f"it {silence.halted_words(halted_s)}"
            self.failed.append(f"{self._run.called(engine)}: {why}")
            self._run.note(f"{self._run.called(engine)} could not join the run: {why}")
        if outcome.status == "died" and not self._over:
            self.begin_replacing(engine)
        return death

    # -- who is to leave, and to come --------------------------------------------------------------

    def dismiss(self, engines: Sequence[int], why: str) -> None:
        """Let members leave on purpose; returns at once.

        They leave between two steps, after all members train. The others continue with the current
        step, whose samples are divided among fewer. An event `left` names the first such step.
        The cell of an engine that leaves ends without an error; code after `wb.fit` does not run.

        Args:
            why: The reason, in words, for the note to the user.

        Raises:
            RunError: The run is over, they take no part, or no worker would remain.
        """
        with self._lock:
            self.check_scales()
            chosen = [one for one in engines if one in self.members]
            if not chosen or set(self.members) <= {*chosen, *self._asked, *self._change.fresh}:
                raise scaling.nobody_left(engines, self.members)
            self._asked.update(dict.fromkeys(chosen, why))
            self._size -= len(chosen)
            self._dismiss_asked()

    def admit(self, engines: Sequence[int]) -> None:
        """Let engines of the run that left or died take part again; returns at once.

        They run the cell up to `wb.fit` and then join. An event `joined` names the first step
        with them. A dead engine is started again.

        Raises:
            RunError: The run is over, or an engine is not part of the run, or already takes part.
        """
        with self._lock:
            self.check_scales()
            for engine in engines:
                if engine not in self._run.members or self._takes_part(engine):
                    raise scaling.not_away(engine, self.members)
            self._size += len(engines)
            for engine in engines:
                self.begin_replacing(engine)

    def scale(self, workers: int) -> None:
        """Continue with this many workers; returns when the change has begun, before it is done.

        Raises:
            PlanError: More engines than the administrator allows.
            RunError: The number cannot change, or another change is in progress.
        """
        if not self._scaling.acquire(blocking=False):
            raise scaling.busy(self._target)
        try:
            with self._lock:
                self.check_scales()
                if self._target is not None and self._is_changing:
                    raise scaling.busy(self._target)
                self.failed.clear()
                self._target = workers
                coming = self._awaited - set(self._at_door)
                there = self._in_order({*self.members, *coming} - set(self._asked))
                more = max(0, workers - len(there))
                if there[workers:]:
                    self._shrink(there[workers:])
                self._size = workers - more
                at_once = min(more, len(self._at_door))  # spares
                self._size += at_once
                if self._fill():
                    self._announce()
                more -= at_once
                away = [one for one in self._run.members if not self._takes_part(one)]
            try:
                again = away[:more]
                more -= len(again)
                here = self._launch.pool.engines.engines
                scaling.check_memory([here[one] for one in self.members], more + len(again))
                fresh = self._launch.recruit(more) if more else []
                self.admit([*again, *fresh])
            except BaseException:
                self._target = None
                raise
        finally:
            self._scaling.release()

    def _shrink(self, surplus: Sequence[int]) -> None:
        going = [one for one in surplus if one in self.members]
        coming = [one for one in surplus if one not in self.members]
        self._unwanted.update(coming)
        self._launch.pool.engines.interrupt([one for one in coming if one in self._coming])
        if going:
            self.dismiss(going, "the run was scaled to fewer workers")

    @property
    def target(self) -> int | None:
        """The number of workers that a change in progress leads to."""
        with self._lock:
            if not (self._is_changing or self._scaling.locked()):
                self._target = None
            return self._target

    @property
    def _is_changing(self) -> bool:
        change, coming = self._change, self._awaited - set(self._at_door)
        return bool(coming or self._asked or self._leaving or change.left or change.fresh)

    @property
    def waiting(self) -> tuple[int, ...]:
        """Return the spare engines that can take part at once."""
        return tuple(self._at_door)

    def check_scales(self) -> None:
        """Raise RunError if the run cannot have more or fewer workers."""
        if not self._goes_on or set(self.members) <= self._past:
            raise scaling.not_training(self._run.state)
        if self._why_not:
            raise scaling.kept(self._why_not)

    def _takes_part(self, engine: int) -> bool:
        return engine in {*self.members, *self._awaited, *self._past, *self._leaving}

    def _dismiss_asked(self) -> None:
        """Continue without the engines that must leave, after all members train."""
        if not self._asked or not self._goes_on or not self._in.issuperset(self.members):
            return
        chosen = [one for one in self._asked if one in self.members]
        if chosen and not set(self.members) <= {*chosen, *self._change.fresh}:
            for engine in chosen:
                self.members.remove(engine)
                self._leaving.append(engine)
                self._change.left[engine] = self._asked[engine]
                if engine in self._change.fresh:
                    self._change.fresh.remove(engine)
            self._announce()
        self._asked.clear()

    def _let_go(self) -> None:
        """Let the leaving engines end: the others are together, and have the whole state."""
        go = announcement(self._launch, self.generation, (), (), Change(), "")
        for engine in self._leaving:
            self._launch.pool.engines.router.send(engine, go)
        self._gone.update(self._leaving)
        self._leaving.clear()

    def _take_back(self) -> None:
        """Let the leaving engines take part again: no other engine can train."""
        self.members = self._in_order([*self.members, *self._leaving])
        self._leaving.clear()
        self._change.left.clear()

    def _has_left(self, engine: int, outcome: CellOutcome) -> CellOutcome:
        """Return the outcome to use for an engine that the others continue without."""
        self._gone.discard(engine)
        if engine in self._leaving:
            self._leaving.remove(engine)
        if outcome.status == "died":
            self._run.history.settle_before(self._reached)  # the rows that it had not sent are lost
            return outcome
        return CellOutcome(status="ok", trained=outcome.trained)

    # -- who takes part ----------------------------------------------------------------------------

    def _in_order(self, engines: Collection[int]) -> list[int]:
        return [one for one in self._run.members if one in engines]

    def _announce(self) -> None:
        """Tell the members which engines are members from now on."""
        run, pool = self._run, self._launch.pool
        self.generation += 1
        self._change.begin_anew()
        if self._leaving and set(self.members) <= set(self._change.fresh):
            self._take_back()
        if set(self.members) <= set(self._change.fresh):  # all others have trained to the end
            self.members, self._change.fresh = [], []
            run.history.release()
            return
        prefix = pool.new_prefix(f"run-{run.number}-regrouped")
        self._launch.meets(prefix)
        run.history.hold()  # a joining engine may send its rows last
        message = announcement(
            self._launch, self.generation, self.members, sorted(self._past), self._change, prefix
        )
        run.agree_among(message.places)
        for engine in (*self.members, *self._leaving, *self._copies.away):
            pool.engines.router.send(engine, message)
        self._watch(self.generation)

    def _later(self, seconds: float, act: Callable[[int], None]) -> None:
        timer = threading.Timer(seconds, act, (self.generation,))
        timer.daemon = True
        timer.start()

    def _watch(self, generation: int) -> None:
        """Look for dead members until all have met: a member that waits cannot notice a death."""
        with self._lock:
            if generation != self.generation or self._met == generation or self._over:
                return
            self._look_for_dead()
            if generation == self.generation:
                self._later(LOOK_S, self._watch)

    def _meet_again(self, generation: int) -> None:
        """Let the members meet again if one lost its connection to them and no member has died."""
        with self._lock:
            if generation == self.generation and self._goes_on:
                self._look_for_dead()
            if generation == self.generation and self._goes_on and self.members:
                self._announce()

    def _regrouped(self, engine: int, event: Regrouped) -> None:
        change, run = self._change, self._run
        if event.generation != self.generation or engine not in self.members:
            return
        if not change.heard and run.plan.sync:  # otherwise each worker's rows are complete alone
            run.history.regroup(event.step, [run.engines.index(one) for one in self.members])
        change.heard[engine] = event
        self._copies.recent.clear()  # the others have continued
        if set(change.heard) >= set(self.members):
            self._met, self._number = self.generation, len(self.members)
            self._reached = event.step
            self._keeper = self._in_order({*self.members, *self._past})[0]
            self._let_go()
        self._conclude()

    def _conclude(self) -> None:
        """Report the change after all members have reported and all deaths are known."""
        change, run = self._change, self._run
        if self._met != self.generation or not all(change.how.values()):
            return
        event = next(iter(change.heard.values()))
        if change.lost or change.short:
            # A member reports after its rows: rows of earlier steps that are missing are lost.
            run.history.settle_before(event.step)
        change.tell(run, event.step, self._number, self._launch.plan.entry.dies_with)
        for one in change.fresh:
            self._awaited.discard(one)
            self._coming.pop(one, None)
            self._tries.pop(one, None)
        self._change = Change()

    def _give_up(self) -> None:
        """Let the cell fail because of the deaths."""
        self._over = True
        task = self._task
        if task is not None:
            for engine in self._change.lost:
                task.condemn(engine)

    # -- in their places ---------------------------------------------------------------------------

    def begin_replacing(self, engine: int) -> None:
        """Let a new engine run the cell to the point where it can join; returns at once."""
        self._unwanted.discard(engine)
        self._tries[engine] = self._tries.get(engine, 0) + 1
        if self._tries[engine] > TRIES:
            died = f"{TRIES} new engines for {self._run.called(engine)} died."
            self._run.note(f"{died} The run continues without this worker.")
            return
        self._awaited.add(engine)
        threading.Thread(
            target=self._replace, args=(engine,), name="workbench-heal", daemon=True
        ).start()

    def _replace(self, engine: int) -> None:
        """Let a new engine run the cell up to the point where it can join."""
        try:
            with self._starting:
                self._start(engine)
        except Exception as error:  # the others continue in any case
            if not isinstance(error, WorkbenchError):
                log.exception("No engine could take the place of engine %d", engine)
            self._failed(engine, str(error))
            if not self._over:
                who = self._run.called(engine)
                self._run.note(f"The run continues without {who}, which could not start: {error}")

    def _failed(self, engine: int, why: str) -> None:
        with self._lock:
            self._awaited.discard(engine)
            self._late |= {engine} if why == ENDED else set()
            self.failed.append(f"{self._run.called(engine)}: {why}")

    def _start(self, engine: int) -> None:
        launch, task, engines = self._launch, self._task, self._launch.pool.engines
        if task is None or not self._ended_before(engine, task):
            self._failed(engine, ENDED)
            return
        if engines.engines[engine].state == "dead":
            engines.restart([engine], launch.plan.framework)
        launch.equip(engine)
        with self._lock:
            if engine in self._unwanted:
                self._awaited.discard(engine)
                return
            if self._over or set(self.members) <= self._past:
                self._failed(engine, ENDED)
                return
            self._coming[engine] = task.outcomes[engine]
            self._in.discard(engine)
            self._ended.discard(engine)
        if not task.rejoin(engine, launch.request_to_join(engine)):
            with self._lock:
                self._coming.pop(engine, None)
                self._failed(engine, ENDED)
                self._ended.add(engine)
                self._dismiss_servers()
        self._send_home()

    def _ended_before(self, engine: int, task: Task) -> bool:
        """Wait until the earlier cell of an engine has ended; return whether the run continues."""
        while engine in task.unfinished() and not self._over:
            time.sleep(LOOK_S)
        return not (self._over or task.is_over)

    def _send_home(self) -> None:
        """End the cell of engines that wait to join if no engine trains any more."""
        with self._lock:
            if set(self.members) <= self._past and self._copies.away:
                self._leaving += self._copies.release()
                self._let_go()
            waiting = [one for one in self._coming if one not in self.members]
            if not waiting or not (self._over or set(self.members) <= self._past):
                return
        self._launch.pool.engines.interrupt(waiting)
