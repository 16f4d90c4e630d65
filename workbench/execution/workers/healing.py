"""A run whose workers change while it trains: deaths are done without, fresh engines let in.

    a worker dies ──> announce g: the others ──> they regroup, and go on          `healed`
          └── in the background: a fresh engine runs the cell up to `wb.fit` ──> ready
    ready ──> announce g + 1: with it ──> it takes over from one of them          `joined`

What the workers do is in `engine/training/regrouping.py`. Here is decided who takes part: each
change makes a generation, and the newest counts, so a death in the middle of a change is just one
more. Nothing is timed: the kernel knows who has died from those who reap it, and looks at the
processes itself where somebody was cut off.

Where the others cannot go on by themselves (some have not begun to train, or nobody is left) the
cell fails for the death after all, and the run goes on as `launch.Recoverer` can.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...cluster.processes import lives
from ...errors import WorkbenchError
from ...shared.events import Healed, Joined, Regrouped, Standing
from ...shared.messages import CellOutcome, Regroup
from ..outcome import Recovery
from ..requests import ARGS, PUSH

if TYPE_CHECKING:
    from ...shared.plan import Plan
    from ..allocator import EngineAllocator
    from ..run import Run
    from ..task import Task

log = logging.getLogger("workbench.session")
BORROW = "workbench.engine.entry:borrow"
BORROW_S = 120.0
LOOK_S = 0.05
TRAINS = ("starting", "recovering", "running", "paused")
"""States of a run whose members may be training: a death can be heard before the news that they
have begun. Whoever has not says so, and the run fails for the death after all."""
TRIES = 3
"""Fresh engines in one worker's place that never come to take part, one after the other."""


class Execution(Protocol):
    """What is needed of a run on its engines (`launch.RunExecution`)."""

    pool: EngineAllocator
    run: Run
    plan: Plan
    servers: Sequence[int]

    def chains(self) -> list[list[int]]:
        """Return which servers hold the same, so that one of each may die."""

    def dismiss_servers(self) -> None:
        """Tell the servers that no worker comes any more."""

    def meets(self, prefix: str) -> None:
        """Take note under which name its workers meet from now on."""

    def request_to_join(self, engine: int) -> dict[str, Any]:
        """Return what an engine is asked that comes while the run goes on."""


@dataclass
class Change:
    """What the generation under way is to bring, until all its members have told.

    Attributes:
        lost, fresh: Engines that are done without, and that are let in.
        how: What became of the lost, in words, by engine; empty as long as it is not known.
        heard: What members have said, by engine.
    """

    lost: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    how: dict[int, str] = field(default_factory=dict)
    heard: dict[int, Regrouped] = field(default_factory=dict)


class Healer:
    """Decides who takes part in one run; asked on the threads that hear the engines.

    Args:
        lent: What the cell needs of earlier cells' variables, packed, by name.

    Attributes:
        generation: The newest that was announced; 0: none.
        members: Engines that take part, in the order of the run's ranks.
    """

    def __init__(self, launch: Execution, lent: Mapping[str, bytes]) -> None:
        self._launch, self._run, self._lent = launch, launch.run, lent
        self.generation = 0
        self.members = list(launch.run.members)
        self._met = 0  # the newest generation whose members are together
        self._past: set[int] = set()  # have trained to the end
        self._ended: set[int] = set()  # their cells are over
        self._coming: dict[int, CellOutcome] = {}  # run the cell, in the place of one that so ended
        self._tries: dict[int, int] = {}
        self._change = Change()
        self._over = False
        self._lock = threading.RLock()
        self._starting = threading.Lock()

    @property
    def _task(self) -> Task | None:
        return self._run.task

    # -- what is heard -----------------------------------------------------------------------------

    def spares(self, engine: int, outcome: CellOutcome) -> CellOutcome | None:
        """Take note of an engine's end; return what counts as it where the others go on."""
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
            if outcome.status != "died":
                self._left(engine, outcome)
                return None
            if self._change.how.get(engine) == "":  # the others had noticed before
                self._change.how[engine] = self._words(engine, outcome)
                self._conclude()
                self._begin_replacing(engine)
                return outcome
            rest = set(self.members) - {engine, *self._change.fresh}
            left = rest or self._run.members[0] in self._past  # who keeps the weights
            if not (left and self._goes_on and outcome.recoverable and engine in self.members):
                self._over = True
                return None
            self._do_without(engine, self._words(engine, outcome))
            self._announce()
        self._begin_replacing(engine)
        return outcome

    def _dismiss_servers(self) -> None:
        """Let servers end when they can have nobody to answer any more."""
        over = self._over or set(self.members) <= self._past
        if over and set(self._run.members) <= self._ended:
            self._launch.dismiss_servers()

    @property
    def _goes_on(self) -> bool:
        return not self._over and self._run.state in TRAINS

    def _words(self, engine: int, outcome: CellOutcome) -> str:
        return f"{self._run.called(engine)} died: {outcome.how or 'how is not known'}"

    def _do_without(self, engine: int, how: str) -> None:
        self.members.remove(engine)
        self._tries.pop(engine, None)
        self._change.lost.append(engine)
        self._change.how[engine] = how

    def expects(self, engine: int) -> bool:
        """Whether an engine has yet to come to take part: the others do without it."""
        with self._lock:
            return engine in self._coming

    def settle(self) -> None:
        """Let nobody in any more; return when no engine is being started."""
        with self._lock:
            self._over = True
        with self._starting:
            pass

    def hear(self, engine: int, event: Standing | Regrouped) -> None:
        """Take in where an engine stands, or that it goes on with the others."""
        ready = isinstance(event, Standing) and event.phase == "ready"
        with self._lock:
            if self._over and not ready:
                return
            match event:
                case Regrouped():
                    self._regrouped(engine, event)
                case Standing(phase="ready"):
                    self._let_in(engine)
                case Standing(phase="cut") if event.generation == self.generation:
                    self._look_for_dead()
                case Standing(phase="past") if engine in self.members:
                    self._past.add(engine)
                    self.members.remove(engine)
                    self._announce()
                    self._send_home()
                    if not self.members and self._run.members[0] in self._change.lost:
                        self._give_up()  # the weights went with it
                case Standing(phase="before") if engine in self.members:
                    self._give_up()

    def _let_in(self, engine: int) -> None:
        """Have a fresh engine take part that has come to where the others train."""
        if engine not in self._coming or engine in self.members:
            return
        if not (self.members and self._goes_on):
            self._launch.pool.engines.interrupt([engine])
            return
        self.members = self._in_order([*self.members, engine])
        self._change.fresh.append(engine)
        self._announce()

    def _look_for_dead(self) -> None:
        """Do without members whose processes are gone, before those who reap them say so.

        The warm parent may be importing, and then reaps nobody for seconds.
        """
        known = self._launch.pool.engines.engines
        gone = [one for one in self.members if known[one].is_here and not lives(known[one].pid)]
        left = set(self.members) - {*gone, *self._change.fresh}
        if self._goes_on and gone and left:
            for engine in gone:
                self._do_without(engine, "")
            self._announce()

    def _left(self, engine: int, outcome: CellOutcome) -> None:
        """Take note that a member's cell is over; nobody is let in once it has failed."""
        self._over = self._over or not outcome.is_well
        self._past.add(engine)
        self._send_home()

    def _did_not_come(self, engine: int, outcome: CellOutcome) -> CellOutcome:
        """Go on without an engine that was to be let in."""
        death = self._coming.pop(engine)
        if engine in self.members:
            self.members.remove(engine)
            self._change.fresh.remove(engine)
            self._announce()
        if not self._over and outcome.status in ("error", "died"):
            why = outcome.how if outcome.status == "died" else outcome.words
            self._run.note(
                f"A fresh engine in the place of {self._run.called(engine)} did not come to take "
                f"part: {why}"
            )
        if outcome.status == "died" and not self._over:
            self._begin_replacing(engine)
        return death

    # -- who takes part ----------------------------------------------------------------------------

    def _in_order(self, engines: Sequence[int]) -> list[int]:
        return [one for one in self._run.members if one in engines]

    def _announce(self) -> None:
        """Tell the members who they are from now on."""
        run, pool = self._run, self._launch.pool
        self.generation += 1
        self._change.heard.clear()
        if set(self.members) <= set(self._change.fresh):  # all others have trained to the end
            self.members, self._change.fresh = [], []
            run.history.release()
            return
        members = run.members
        places = tuple(members.index(one) for one in self.members)
        run.agree_among(places)
        prefix = pool.new_prefix(f"run-{run.number}-regrouped")
        self._launch.meets(prefix)
        run.history.hold()  # whoever comes may send its rows last; who went had done a step alone
        message = Regroup(
            run=run.number,
            generation=self.generation,
            places=places,
            ranks=tuple(self.members),
            hosts=tuple(pool.engines.engines[one].place for one in self.members),
            past=tuple(members.index(one) for one in sorted(self._past)),
            prefix=prefix,
            fresh=tuple(members.index(one) for one in self._change.fresh),
        )
        for engine in self.members:
            pool.engines.router.send(engine, message)
        self._watch(self.generation)

    def _watch(self, generation: int) -> None:
        """Look for dead members until all have come together: who waits for one cannot notice."""
        with self._lock:
            if generation != self.generation or self._met == generation or self._over:
                return
            self._look_for_dead()
            if generation == self.generation:
                timer = threading.Timer(LOOK_S, self._watch, (generation,))
                timer.daemon = True
                timer.start()

    def _regrouped(self, engine: int, event: Regrouped) -> None:
        change, run = self._change, self._run
        if event.generation != self.generation or engine not in self.members:
            return
        if not change.heard and run.plan.sync:  # else each worker's rows stand alone
            run.history.regroup(event.step, [run.engines.index(one) for one in self.members])
        change.heard[engine] = event
        if set(change.heard) >= set(self.members):
            self._met = self.generation
        self._conclude()

    def _conclude(self) -> None:
        """Say what the change has brought, once all members have told and all deaths are known."""
        change, run = self._change, self._run
        if self._met != self.generation or not all(change.how.values()):
            return
        event = next(iter(change.heard.values()))
        # Each tells after its rows: what is missing of earlier steps went with the dead.
        run.history.settle_before(event.step)
        there = [one.seconds for i, one in change.heard.items() if i not in change.fresh]
        seconds, workers = max(there, default=0.0), len(self.members)
        if change.lost:
            ranks = [run.engines.index(one) for one in change.lost]
            run.history.event(
                Healed(ranks=ranks, step=event.step, seconds=seconds, workers=workers)
            )
            how = "; ".join(change.how.values())
            done = Recovery(tuple(change.lost), how, event.step, 0, workers, seconds, again=False)
            run.recoveries.append(done)
            run.note(healed_words(done, joined=run.plan.sync), change.lost)
        if change.fresh:
            ranks = [run.engines.index(one) for one in change.fresh]
            run.history.event(
                Joined(ranks=ranks, step=event.step, seconds=seconds, workers=workers)
            )
            run.note(joined_words([run.called(i) for i in change.fresh], event.step, seconds))
            for one in change.fresh:
                self._coming.pop(one, None)
                self._tries.pop(one, None)
        self._change = Change()

    def _give_up(self) -> None:
        """Let the cell fail for the deaths after all."""
        self._over = True
        task = self._task
        if task is not None:
            for engine in self._change.lost:
                task.condemn(engine)

    # -- in their places ---------------------------------------------------------------------------

    def _begin_replacing(self, engine: int) -> None:
        self._tries[engine] = self._tries.get(engine, 0) + 1
        if self._tries[engine] > TRIES:
            self._run.note(f"{TRIES} fresh engines died in one place; the others go on without.")
            return
        threading.Thread(
            target=self._replace, args=(engine,), name="workbench-heal", daemon=True
        ).start()

    def _replace(self, engine: int) -> None:
        """Have a fresh engine run the cell up to where it can be let in."""
        try:
            with self._starting:
                self._start(engine)
        except WorkbenchError as error:
            if not self._over:
                self._run.note(f"No fresh engine took the place of a dead one: {error}")
        except Exception as error:  # the others go on in any case
            log.exception("No engine could take the place of engine %d", engine)
            self._run.note(f"No fresh engine took the place of a dead one: {error}")

    def _start(self, engine: int) -> None:
        launch, task = self._launch, self._task
        engines = launch.pool.engines
        if task is None or self._over or task.is_over:
            return
        if engines.engines[engine].state == "dead":
            engines.restart([engine], launch.plan.framework)
        if launch.run.plan.recipe.function:
            engines.call([engine], PUSH, ({ARGS: launch.run.plan.recipe.args},))
        missing = engines.call([engine], BORROW, (dict(self._lent),), BORROW_S)[engine]
        if missing:
            self._run.note(
                f"What earlier cells had defined was copied to a fresh engine, but not "
                f"{', '.join(sorted(missing))}: it cannot be copied."
            )
        with self._lock:
            if self._over or set(self.members) <= self._past:
                return
            self._coming[engine] = task.outcomes[engine]
            self._ended.discard(engine)
        if not task.rejoin(engine, launch.request_to_join(engine)):
            with self._lock:
                self._coming.pop(engine, None)
                self._ended.add(engine)
                self._dismiss_servers()
        self._send_home()

    def _send_home(self) -> None:
        """End the cell of engines that wait to be let in where nobody trains any more."""
        with self._lock:
            waiting = [one for one in self._coming if one not in self.members]
            if not waiting or not (self._over or set(self.members) <= self._past):
                return
        self._launch.pool.engines.interrupt(waiting)


def healed_words(done: Recovery, *, joined: bool = True) -> str:
    """Tell the user what happened and what it cost.

    Args:
        joined: Whether workers take each step together.
    """
    one = done.workers == 1
    if not joined:
        return (
            f"{done.how}. {done.workers} worker{' goes' if one else 's go'} on, and what is left "
            "of its share waits for a fresh engine."
        )
    return (
        f"{done.how}. {done.workers} worker{' goes' if one else 's go'} on from step {done.step}, "
        f"after {1e3 * done.seconds:.0f} ms; no step is lost."
    )


def joined_words(who: Sequence[str], step: int, seconds: float) -> str:
    """Tell the user who takes part again."""
    one = len(who) == 1
    return (
        f"{' and '.join(who)}: {'a fresh engine takes' if one else 'fresh engines take'} part from "
        f"step {step} on; the others stood still for {1e3 * seconds:.0f} ms."
    )
