"""A run on its engines: submitted, started again if engines must be replaced, and settled.

A run whose engines died continues, with new engines or with fewer:

    running --an engine dies--> recovering --the cell has begun again--> running
                                    |
                                    +--cannot continue--> failed

The cell runs again on all workers. The remaining workers keep their processes and variables. The
training continues from the last checkpoint of this run, or from the start if it has none. Steps
that run a second time replace their first version in the history, so totals count each step once.
A run recovers only from the death of an engine, never from an error in the cell's code, and at
most `MOST` times.
"""

from __future__ import annotations

import functools
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError, PlanError, RunError, WorkbenchError
from ..history import disk
from ..shared import checkpoints
from ..shared.checkpoints import Checkpoint, at, faults, found, refusal
from ..shared.faults import parse_fault
from ..shared.messages import SERVER_GONE, WORKERS_DONE, Told
from ..shared.plan import Plan, check_fewer
from . import outcome
from .allocator import EngineAllocator, replacement_words, spent
from .outcome import Recovery, outcome_error, outcome_notes, recovery_words
from .requests import (
    ARGS,
    PUSH,
    RESULT,
    TAKE,
    FarFiles,
    check_arrived,
    members_of,
    run_requests,
    task_record,
    with_original_ranks,
)
from .task import Task
from .workers import hangs, replacing, scaling, silence
from .workers.departures import Departures
from .workers.healing import Healer

if TYPE_CHECKING:
    from ..devices.leases import Leases
    from ..shared.messages import Outcomes
    from .requests import Specs
    from .run import Run

log = logging.getLogger("workbench.session")


@dataclass
class RunExecution:
    """One run on the engines it was given.

    Attributes:
        servers: Engines of the run that do not run its cell.
        number: Of the cell, for tracebacks.
    """

    pool: EngineAllocator
    run: Run
    servers: Sequence[int]
    leases: Leases
    number: int = 1
    autoreload: str = ""
    renumber: Callable[[Run], int] = lambda run: run.number
    begun_again: bool = False

    def __post_init__(self) -> None:
        self.plan = self.run.plan  # the current plan; a run can continue with fewer workers
        self._recoverer = Recoverer(self)
        self._token = ""  # parts of unfinished checkpoints of its last submission
        self._specs: Specs = {}
        self._key = secrets.token_hex(32)
        self.healer: Healer | None = None
        self._lent: dict[str, bytes] = {}  # definitions of earlier cells that a new engine needs
        self._departures = Departures(self)

    @functools.cached_property
    def files(self) -> FarFiles:
        """The run's files on other machines."""
        return FarFiles(self.pool.engines, self.run, self.servers)

    def narrow(self, members: Sequence[int]) -> None:
        """Continue with these workers only, each on its previous device."""
        ranks = [self.run.members.index(engine) for engine in members]
        kept = tuple(self.leases.leases[rank] for rank in ranks)
        self.leases = replace(self.leases, leases=kept)
        self.plan = replace(self.plan, workers=len(members))

    def submit(self) -> None:
        """Start the run's cell on all its engines; returns at once."""
        pool, run = self.pool, self.run
        ids = [*run.members, *self.servers]
        if run.plan.recipe.function:
            pool.engines.call(run.members, PUSH, ({ARGS: run.plan.recipe.args},))
        prefix = pool.new_prefix(f"run-{run.number}")
        self.meets(prefix)
        framework = run.plan.framework
        before, self.leases = self.leases, pool.fitted(self.leases, ids, self.plan)
        if self.leases is not before and self.leases.warning:
            run.note(self.leases.warning)
        group = pool.run_group(ids[: self.plan.workers], self.leases, framework)
        specs = pool.specs(ids, self.plan, self.leases, prefix, framework, group)
        specs = self._specs = with_original_ranks(specs, run.engines)
        far = self.files.settings(again=run.task is not None)
        if self.plan.on_failure == "heal":
            # Requested now, because engines cannot answer while the cell runs.
            self._lent, self.healer = self.borrowed(run.members[0]), Healer(self)
        self._departures = Departures(self)
        key = "" if self.healer is None else self._key
        asked = run_requests(run, specs, self.number, self.autoreload, self.plan, far, key)
        about = {"number": self.number, "autoreload": self.autoreload}
        about |= {"run": run.number, "servers": list(self.servers)}
        members = members_of(specs, hosts=pool.hosts())
        pool.on_task(task_record(asked, members, **about))
        run.open_board(pool.engines.router.send, ids)
        task = Task(
            pool.engines,
            asked,
            members,
            self.settled,
            spare=self._spare(),
            least=1 if run.plan.entry.remote_workers else 0,
            mender=self.healer,
            listens=replacing.listener(
                run,
                pool.engines.router.send,
                self.healer,
                lambda engine: pool.engines.restart([engine], framework),
            ),
            on_loss=self.lose,
            chains=self.chains(),
            going=lambda: run.state not in ("starting", "recovering"),
            on_leaving=lambda engine, event: self._departures.hear(engine, event),
        )
        is_first = run.task is None
        run.begin(task)
        if is_first and self.plan.spares and self.healer is not None:
            recruit = functools.partial(self.recruit, self.plan.spares)
            scaling.keep_spares(recruit, self.healer.begin_replacing, run.note)
        hangs.watch(task, pool.engines.router.questions.ask, lambda: run.held)
        if self.healer is not None:
            silence.look_after(task, self.healer, pool.engines, lambda: run.held)

    def settle_healing(self) -> None:
        """Let no more engines join: the cell is over, and the next one starts engines itself."""
        if self.healer is not None:
            self.healer.settle()

    def meets(self, prefix: str) -> None:
        """Record the new name of its workers' process group."""
        self._token = checkpoints.token(prefix)

    def equip(self, engine: int) -> None:
        """Send a new engine the variables that the cell needs."""
        if self.plan.recipe.function:
            self.pool.engines.call([engine], PUSH, ({ARGS: self.plan.recipe.args},))
        self.lend([engine], self._lent)

    def borrowed(self, engine: int) -> dict[str, bytes]:
        """Return the variables of an engine that the cell needs, packed, by name."""
        source = self.plan.recipe.source
        return dict(self.pool.engines.call([engine], LEND, (source,), LOAN_TIMEOUT_S)[engine])

    def lend(self, fresh: Sequence[int], packed: Mapping[str, bytes]) -> None:
        """Give new engines the definitions of earlier cells that the cell needs."""
        if not packed:
            return
        missing = self.pool.engines.call(fresh, BORROW, (dict(packed),), LOAN_TIMEOUT_S)
        if names := sorted({name for one in missing.values() for name in one}):
            self.run.note(
                "Some variables of earlier cells are too large or cannot be copied, so the new "
                f"engines did not receive them: {', '.join(names)}. If the run fails with a "
                "NameError, define the missing name in the run's cell."
            )

    def request_to_join(self, engine: int) -> dict[str, Any]:
        """Return the request to an engine that replaces another one during the run."""
        run, engines = self.run, self.pool.engines
        mine = self._specs[engine]
        hosts = tuple(engines.engines[one].place for one in mine.ranks)
        # The active faults; a kill happens only once.
        plan = replace(self.plan, faults=tuple(parse_fault(text) for text in run.faults))
        far = self.files.settings(again=True)
        spec = {engine: replace(mine, hosts=hosts)}
        asked = run_requests(run, spec, self.number, self.autoreload, plan, far, self._key)[engine]
        asked["spec"] |= {"joins": True, "resume": "", "init_from": ""}
        return asked

    def recruit(self, count: int) -> list[int]:
        """Add engines to the run, starting new ones if needed; return the added engines.

        Each engine gets the next rank. The engines do not take part yet.

        Raises:
            PlanError: More engines than the administrator allows.
            RunError: There is no free GPU for them.
        """
        run, pool, framework = self.run, self.pool, self.plan.framework
        assert run.task is not None, "internal error: the run has not begun"
        wanted = len(run.members) + count
        plan = replace(self.plan, workers=wanted)
        if pool.lease(wanted, plan).backend != self.leases.backend:
            raise RunError(
                "There is no GPU for another worker, and the run's workers cannot share a GPU.",
                seen=f"workers in the run: {len(run.members)}, wanted: {wanted}",
                next_step="run %cluster free in another notebook that uses GPUs; or stop the run, "
                "and use CPUs in the next run: %cluster start --devices cpu",
                code="WB-RUN-144",
            )
        free = [one for one in pool.worker_ids if one not in run.members][:count]
        if len(free) < count:
            free += pool.add(count - len(free), framework)
        pool.bring(free, framework)
        ids = [*run.members, *free]
        leases, said = pool.hold(wanted, plan)
        leases = pool.fitted(leases, ids, plan)
        for text in said:
            run.note(text)
        run.grow(dict(zip(free, leases.words[-count:], strict=True)))
        first = self._specs[run.members[0]]
        specs = pool.specs(ids, plan, leases, first.prefix, framework, first.group)
        specs = with_original_ranks({one: specs[one] for one in free}, run.engines)
        self._specs = {**self._specs, **specs}
        run.task.recruit(members_of(specs, hosts=pool.hosts()))
        return free

    def _spare(self) -> Sequence[int]:
        """Return the engines that can die without a pause of the others."""
        entry = self.plan.entry
        if self.healer is not None:
            return ()
        if entry.remote_workers:
            return self.servers[: self.plan.workers]
        if entry.spares_workers and not self.plan.sync:
            return self.run.members[1:]
        return ()

    def spares(self, engine: int) -> bool:
        """Whether the others continue without a pause after this engine has died."""
        held_twice = any(engine in chain for chain in self.chains())
        return engine in self._spare() or held_twice

    def chains(self) -> list[list[int]]:
        """Return the engines that hold each part of the parameters, for parts with two holders."""
        plan = self.plan
        chains = plan.entry.chains(plan.options)
        return [[self.servers[one] for one in chain] for chain in chains if len(chain) > 1]

    def dismiss_servers(self) -> None:
        """Tell the servers that no further worker will connect."""
        told = Told(run=self.run.number, rank=-1, topic=WORKERS_DONE)
        for server in self.servers:
            self.pool.engines.router.send(server, told)

    def lose(self, text: str, engines: Sequence[int]) -> None:
        """Note engines that the others can do without; tell workers that wait for a lost server."""
        self.run.note(text, engines)
        for engine in set(engines).intersection(self.servers):
            server = self.servers.index(engine)
            told = Told(run=self.run.number, rank=-1, topic=SERVER_GONE, value=server)
            for one in {*self.run.members, *self.servers}.difference(engines):
                self.pool.engines.router.send(one, told)

    def settled(self, task: Task) -> None:
        """Settle the run; on the engines' message thread, so it must not wait for engines."""
        try:
            self._settle(task)
        except Exception as error:  # whatever the error is, a run whose engines are done is over
            log.exception("An error occurred at the end of run %r", self.run.name)
            self.run.finish(task.failure() or _unexpected(error))

    def _settle(self, task: Task) -> None:
        run = self.run
        run.begin(task)
        if task.group_broken:
            self.pool.drop_group()
        left = self._departures.left(task)
        ends = self._departures.settle(left)
        if self._replace(task.outcomes) or self._recoverer.begin(task, left):
            return
        if self.healer is not None:  # the next cell waits for engines that came too late for this
            self.pool.replacer.begin(self.pool.engines, self.healer.settle, run.plan.framework)
        shutil.rmtree(run.folder / RESCUED, ignore_errors=True)
        self._sweep(task.outcomes)
        error = task.failure()
        if run.state == "stopping" and error is not None and task.cause is None:
            error = None  # an agreed stop that needed an interrupt is still a stop
            for engine, text in task.ended.items():
                run.note(text, [engine])
        error = self._recoverer.explain(error) if error else ends
        error = error or outcome_error(run, task.outcomes)
        for text in outcome_notes(task.outcomes):
            run.note(text)
        if run.plan.recipe.function or self.files.hosts:
            threading.Thread(
                target=self._bring, args=(error, task.outcomes), name="workbench-results",
                daemon=True,
            ).start()  # fmt: skip
        else:
            run.finish(error)

    def _bring(self, error: RunError | None, outcomes: Outcomes) -> None:
        """Fetch the run's files from other hosts and the return values of its function."""
        self.files.fetch(outcomes)
        if self.run.plan.recipe.function:
            self._fetch_results(error)
        else:
            self.run.finish(error)

    def _sweep(self, outcomes: Outcomes) -> None:
        """Remove parts that were written after their checkpoint was abandoned.

        At this point no process writes any more. After a failure a slow write can still be running.
        """
        folder = self.plan.checkpoint
        if folder and all(one.is_well for one in outcomes.values()):
            checkpoints.sweep(folder, lambda _, token: token == self._token)

    def _replace(self, outcomes: Outcomes) -> bool:
        """Replace engines that must be replaced; return whether the run begins again on them."""
        found = spent(outcomes)
        if not found:
            return False
        run, ids = self.run, list(found)
        run.note(replacement_words(ids, found[ids[0]]))
        begins_again = run.state == "starting" and not self.begun_again
        self.begun_again = True
        then = [self._again] if begins_again else []
        self.pool.replacer.begin(self.pool.engines, lambda: ids, run.plan.framework, *then)
        return begins_again

    def _again(self, error: ClusterError | None) -> None:
        try:
            if error is not None:
                raise error
            self.submit()
        except WorkbenchError as failure:
            self.run.finish(RunError(str(failure), code="WB-RUN-070"))
        except Exception as failure:
            log.exception("Run %r could not be started again", self.run.name)
            self.run.finish(_unexpected(failure))

    def _fetch_results(self, error: RunError | None) -> None:
        """Copy a function's return values to `run.results`; remove its names from the engines."""
        run, engines = self.run, self.pool.engines
        try:
            living = [i for i in run.members if i in self.pool.ids]
            taken = engines.fetch(living, TAKE, ([RESULT, ARGS],))
            returned = {i: values.get(RESULT) for i, values in taken.items()}
            check_arrived({i: {"the result": value} for i, value in returned.items()})
            run.returned([returned.get(i) for i in run.members])
        except (ClusterError, RunError) as failure:
            why = f"{failure.what} {failure.seen or ''}".strip()
            run.note(f"The return values of the function could not be fetched: {why}")
        except Exception as failure:
            log.exception("The return values of a function could not be fetched")
            run.note(
                f"The return values of the function could not be fetched: {_unexpected(failure)}"
            )
        finally:
            run.finish(error)


def _unexpected(error: Exception) -> RunError:
    return RunError(f"Workbench itself failed: {type(error).__name__}: {error}", code="WB-RUN-071")


ANEW = ("replace", "heal")
"""The kinds of recovery that run the cell again on new engines."""
MOST = 3
"""Largest number of recoveries of one run; a cell with more deaths has a fault."""
LEND, BORROW = "workbench.engine.entry:lend", "workbench.engine.entry:borrow"
RESCUE = "workbench.engine.checkpoints.memory_snapshot:write"
RESCUED = "rescued"
"""Subfolder of the run for the survivors' state; removed at the end of the run."""
LOAN_TIMEOUT_S = 120.0
LEAVE_S = 5.0
"""Time that an engine may need to end after it has left."""


def lost(task: Task) -> list[int]:
    """Return the engines if only their death made the cell fail; otherwise none."""
    outcomes = task.outcomes
    dead = [i for i in outcome.dead_engines(outcomes) if not outcomes[i].ended]
    if task.first_failed is None:  # the others could do without them
        return []
    if task.interrupted or not any(outcomes[i].recoverable for i in dead):
        return []
    errors = [o for o in outcomes.values() if o.status == "error"]
    if any(not outcome.is_collateral(one) for one in errors):
        return []
    return outcome.dead_engines(outcomes)  # engines that Workbench had to end are dead too


class Recoverer:
    """Decides whether a run continues after a death, and continues it on a separate thread."""

    def __init__(self, launch: RunExecution) -> None:
        self._launch = launch
        self._origin = launch.run.resume_from
        self._why_not = ""

    def begin(self, task: Task, left: Mapping[int, str]) -> bool:
        """Return whether the run continues; if so, it is started again in the background.

        Args:
            left: Engines that made all others stop, and the message that they received.
        """
        launch, began = self._launch, time.perf_counter()
        run, dead = launch.run, lost(task) or list(left)
        if (
            not (left or set(dead) - task.spared)
            or launch.plan.on_failure == "stop"
            or run.state == "stopping"
        ):
            return False
        self._why_not = self._hopeless(dead)
        if self._why_not:
            return False
        how = "; ".join(
            f"{run.called(i)} left ({left[i]})"
            if i in left
            else f"{run.called(i)} died: {task.outcomes[i].how or 'the reason is unknown'}"
            for i in dead
        )
        run.advance("recover")
        threading.Thread(
            target=self._go, args=(dead, how, began), name="workbench-recover", daemon=True
        ).start()
        return True

    def explain(self, error: RunError) -> RunError:
        """Add to the error the reason why the run did not continue after the death."""
        if not self._why_not:
            return error
        told = RunError(
            f"{error.what}\n  {self._why_not}", next_step=error.next_step, code="WB-RUN-082"
        )
        vars(told).update({k: v for k, v in vars(error).items() if k == "outcome"})
        return told

    def _hopeless(self, dead: Sequence[int]) -> str:
        """Return why the run cannot continue without these engines; empty if it can."""
        launch = self._launch
        if sum(one.again for one in launch.run.recoveries) >= MOST:
            return f"Workbench has already run the cell again {MOST} times. This is the limit."
        if launch.plan.on_failure in ANEW:
            return ""
        left = [i for i in launch.run.members if i not in dead]
        try:
            if not left or set(dead) & set(launch.servers):
                raise PlanError(
                    "the run can start again with fewer workers only if at least one worker and "
                    "all servers are alive",
                    code="WB-PLAN-112",
                )
            check_fewer(launch.plan, len(left))
        except PlanError as error:
            return f"The run could not continue with fewer workers: {error.what}"
        return ""

    def _go(self, dead: Sequence[int], how: str, began: float) -> None:
        """Begin the run again; a death during the restart counts as a further recovery."""
        launch, run = self._launch, self._launch.run
        while True:
            try:
                self._go_once(dead, how, began)
                return
            except WorkbenchError as error:  # noqa: PERF203 - the loop ends after the last attempt
                needed = [*run.members, *launch.servers]
                dead = [i for i in needed if i not in launch.pool.ids]
                again = isinstance(error, ClusterError) and bool(dead)
                why = self._hopeless(dead) if again else "The run could not continue."
                if why:
                    run.finish(RunError(f"{how}.\n  {why}\n  {error}", code="WB-RUN-083"))
                    return
                how = "; ".join(map(self._died_meanwhile, dead))
            except Exception as error:  # otherwise the run would stay in recovery forever
                log.exception("Run %r could not continue", run.name)
                run.finish(
                    RunError(
                        f"{how}.\n  The run could not continue: {type(error).__name__}: {error}",
                        code="WB-RUN-084",
                    )
                )
                return

    def _go_once(self, dead: Sequence[int], how: str, began: float) -> None:
        launch, run = self._launch, self._launch.run
        launch.settle_healing()
        members = run.members[: launch.plan.workers]  # who came later is done without
        known = launch.pool.engines.engines
        launch.plan = without_kills(launch.plan, [run.engines.index(i) for i in dead
                                                  if i in run.engines])  # fmt: skip
        start = self._start()
        step = start.step if start else 0
        if launch.plan.on_failure == "continue":
            members = tuple(i for i in members if i not in dead)
            launch.narrow(members)
        run.go_on(launch.renumber(run), members, start.path if start else "", step)
        if launch.plan.on_failure in ANEW:
            self._await_end(dead)
            gone = [i for i in dead if i in known and known[i].state == "dead"]
            launch.pool.engines.restart(gone or dead, launch.plan.framework)
            self._lend(dead)
        ranks = [rank for rank, i in enumerate(run.engines) if i in members]
        for stale in run.folder.glob("weights*"):  # the survivors' state when they stopped
            stale.unlink()
        run.far.settle()
        lost_steps = run.history.rewind(step, run.folder, ranks)
        if _stopping(run):
            run.finish(None)
            return
        seconds = time.perf_counter() - began
        done = Recovery(tuple(dead), how, step, lost_steps, len(members), seconds)
        run.recoveries.append(done)
        run.note(recovery_words(done, launch.plan.on_failure, bool(start)), dead)
        launch.submit()
        if _stopping(run):  # Stop was pressed while no worker could receive it
            run.halt("stop")

    def _await_end(self, engines: Sequence[int]) -> None:
        """Wait until leaving engines have ended; kill those that have not ended in time."""
        known, end = self._launch.pool.engines.engines, time.monotonic() + LEAVE_S
        while time.monotonic() < end and any(known[i].state != "dead" for i in engines):
            time.sleep(0.02)

    def _died_meanwhile(self, engine: int) -> str:
        known = self._launch.pool.engines.engines.get(engine)  # none where the cluster was stopped
        how = f": {known.exit}" if known and known.exit else ""
        return f"{self._launch.run.called(engine)} died while the run was recovering{how}"

    def _start(self) -> Checkpoint | None:
        """Return the state to continue from: of survivors, the last checkpoint, or the first.

        Raises:
            RunError: All checkpoints are damaged, including the one that the run was resumed from.
        """
        own = self._last_own()
        if rescued := self._rescue(own.step if own else 0):
            return rescued
        if own:
            return own
        if self._launch.plan.on_failure == "heal" and self._launch.run.history.totals.steps:
            more = " and a smaller --checkpoint-every" if self._launch.plan.checkpoint else ""
            raise RunError(
                "The trained weights are lost: no surviving worker could save them, and there is "
                "no checkpoint from which the run can continue.",
                next_step=f"run the cell again with --checkpoint DIR{more}",
                code="WB-RUN-138",
            )
        if not self._origin:
            return None
        origin = at(self._origin)
        if damaged := faults(origin):
            raise refusal(origin, damaged)
        return origin

    def _last_own(self) -> Checkpoint | None:
        """Return the last complete checkpoint of this run, if there is one."""
        run, plan = self._launch.run, self._launch.plan
        if not plan.checkpoint:
            return None
        for one in reversed(found(plan.checkpoint)):
            if one.about and one.about.get("run") != run.folder.name:
                continue
            damaged = faults(one, own=plan.on_failure in ANEW)
            if not damaged:
                return one
            run.note(
                f"The checkpoint of step {one.step} is damaged ({one.path}: {damaged[0]}); the run "
                "does not continue from it."
            )
        return None

    def _rescue(self, beyond: int) -> Checkpoint | None:
        """Let the survivor with the most steps save its state, if these exceed `beyond`."""
        run, engines = self._launch.run, self._launch.pool.engines
        if run.task is None or not self._launch.files.can_send(run.members):
            return None
        files = self._launch.files
        kept = {i: o.kept_step for i, o in run.task.outcomes.items()}
        living = [i for i in kept if kept[i] > beyond and i in self._launch.pool.ids]
        if not living:
            return None
        furthest = max(living, key=lambda i: kept[i])
        try:
            where = str(Path(files.folder_of(furthest)) / RESCUED)
            path = engines.call([furthest], RESCUE, (where,), LOAN_TIMEOUT_S)[furthest]
            path = files.brought(furthest, str(path), run.folder / RESCUED)
        except (ClusterError, RunError, OSError) as error:
            why = error.what if isinstance(error, WorkbenchError) else disk.reason_of(error)
            run.note(f"The trained state of {run.called(furthest)} could not be written: {why}")
            return None
        return Checkpoint(path, kept[furthest])

    def _lend(self, fresh: Sequence[int]) -> None:
        """Give new engines the definitions of earlier cells that the cell needs."""
        launch, run = self._launch, self._launch.run
        living = [i for i in run.members if i not in fresh]
        needy = [i for i in fresh if i in run.members]
        if not living or not needy:
            return
        launch.lend(needy, launch.borrowed(living[0]))


def _stopping(run: Run) -> bool:
    return run.state == "stopping"


def without_kills(plan: Plan, ranks: Sequence[int]) -> Plan:
    """Return the plan without the faults that killed these ranks: a kill happens only once."""
    kept = tuple(f for f in plan.faults if f.kind != "kill" or f.rank not in ranks)
    return replace(plan, faults=kept)
