"""A run on its engines: submitted, begun again where engines must give way, settled."""

from __future__ import annotations

import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from .. import checkpoints
from ..cluster.devices import Leases
from ..errors import ClusterError, RunError, WorkbenchError
from ..messages import Outcomes
from . import hangs
from .checks import check_arrived
from .pool import Pool
from .recover import RESCUED, Recoverer
from .replace import spent, words
from .requests import ARGS, PUSH, RESULT, TAKE, in_lanes, members_of, run_requests, task_record
from .run import Run
from .task import Task
from .verdicts import outcome_error, outcome_notes

log = logging.getLogger("workbench.session")


@dataclass
class Launch:
    """One run on the engines it was given.

    Attributes:
        servers: Engines of the run that do not run its cell.
        number: Of the cell, for tracebacks.
    """

    pool: Pool
    run: Run
    servers: Sequence[int]
    leases: Leases
    number: int = 1
    autoreload: str = ""
    renumber: Callable[[Run], int] = lambda run: run.number
    begun_again: bool = False

    def __post_init__(self) -> None:
        self.plan = self.run.plan  # under which it runs now; a run may go on with fewer workers
        self._recoverer = Recoverer(self)
        self._token = ""  # of the unfinished checkpoints of its last submission

    def narrow(self, members: Sequence[int]) -> None:
        """Go on with these workers only, each on the device it had."""
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
        self._token = checkpoints.token(prefix)
        specs = pool.specs(ids, self.plan, self.leases, prefix, run.plan.framework)
        specs = in_lanes(specs, run.engines)
        asked = run_requests(run, specs, self.number, self.autoreload, self.plan)
        pool.drop_group()
        about = {"number": self.number, "autoreload": self.autoreload}
        about |= {"run": run.number, "servers": list(self.servers)}
        pool.on_task(task_record(asked, members_of(specs), **about))
        run.open_board(pool.engines.router.send, ids)
        run.task = Task(
            pool.engines,
            asked,
            members_of(specs),
            self.settled,
            spare=self._spare(),
            least=1 if run.plan.entry.remote_workers else 0,
            on_loss=run.note,
        )
        hangs.watch(run.task, pool.engines.router.questions.ask, lambda: run.held)

    def _spare(self) -> Sequence[int]:
        """Return the engines whose death the others survive without a pause."""
        entry = self.plan.entry
        if entry.remote_workers:
            return self.servers[: self.plan.workers]
        if entry.spares_workers and not self.plan.sync:
            return self.run.members[1:]
        return ()

    def settled(self, task: Task) -> None:
        """Settle the run; on the thread that hears the engines, so it may not wait for them."""
        try:
            self._settle(task)
        except Exception as error:  # whatever it is, a run whose engines are done is over
            log.exception("The end of run %r went wrong", self.run.name)
            self.run.finish(task.failure() or _unexpected(error))

    def _settle(self, task: Task) -> None:
        run = self.run
        run.task = task
        if self._replace(task.outcomes) or self._recoverer.begin(task):
            return
        shutil.rmtree(run.folder / RESCUED, ignore_errors=True)
        self._sweep(task.outcomes)
        error = task.failure()
        if run.state == "stopping" and error is not None and task.cause is None:
            error = None  # an agreed stop that needed an interrupt is still a stop
            for engine, text in task.ended.items():
                run.note(text, [engine])
        error = self._recoverer.explain(error) if error else outcome_error(run, task.outcomes)
        for text in outcome_notes(task.outcomes):
            run.note(text)
        if run.plan.recipe.function:
            threading.Thread(
                target=self._fetch_results, args=(error,), name="workbench-results", daemon=True
            ).start()
        else:
            run.finish(error)

    def _sweep(self, outcomes: Outcomes) -> None:
        """Remove parts that came after their checkpoint had been given up.

        Only here is nobody writing any more; after a failure a slow write may still be under way.
        """
        folder = self.plan.checkpoint
        if folder and all(one.is_well for one in outcomes.values()):
            checkpoints.sweep(folder, lambda _, token: token == self._token)

    def _replace(self, outcomes: Outcomes) -> bool:
        """Replace engines that say they must be; return whether the run begins again on them."""
        found = spent(outcomes)
        if not found:
            return False
        run, ids = self.run, list(found)
        run.note(words(ids, found[ids[0]]))
        begins_again = run.state == "starting" and not self.begun_again
        self.begun_again = True
        begin = self.pool.replacer.begin
        if begins_again:
            begin(self.pool.engines, ids, run.plan.framework, self._again)
        else:
            begin(self.pool.engines, ids, run.plan.framework)
        return begins_again

    def _again(self, error: ClusterError | None) -> None:
        try:
            if error is not None:
                raise error
            self.submit()
        except WorkbenchError as failure:
            self.run.finish(RunError(str(failure), code="WB-RUN-070"))
        except Exception as failure:
            log.exception("Run %r could not begin again", self.run.name)
            self.run.finish(_unexpected(failure))

    def _fetch_results(self, error: RunError | None) -> None:
        """Bring a function's return values into `run.results`, and its names off the engines."""
        run, engines = self.run, self.pool.engines
        try:
            living = [i for i in run.members if i in self.pool.ids]
            taken = engines.fetch(living, TAKE, ([RESULT, ARGS],))
            returned = {i: values.get(RESULT) for i, values in taken.items()}
            check_arrived({i: {"the result": value} for i, value in returned.items()})
            run.results = [returned.get(i) for i in run.members]
        except (ClusterError, RunError) as failure:
            why = f"{failure.what} {failure.seen or ''}".strip()
            run.note(f"What the function returned could not be fetched: {why}")
        except Exception as failure:
            log.exception("What a function returned could not be fetched")
            run.note(f"What the function returned could not be fetched: {_unexpected(failure)}")
        finally:
            run.finish(error)


def _unexpected(error: Exception) -> RunError:
    return RunError(f"Workbench itself failed: {type(error).__name__}: {error}", code="WB-RUN-071")
