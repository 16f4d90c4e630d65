"""Several plans, one run after the other: in the background, or in the cell that asked for them.

The list itself is in `queue_state.py`. This module has its public methods and the thread that works
through it and measures the progress of the current run. `%%distributed` with several
strategies or seeds is also split into plans here.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from .. import catalog
from ..errors import ClusterError, PlanError, RunError, WorkbenchError
from ..execution.requests import BusyError, to_recipe
from ..execution.run import Run
from ..execution.stop import deferred
from ..shared.flags.several import check_runs, several_in
from ..shared.plan import Plan, check_count, check_seed, plans_of
from ..shared.run_request import from_arguments
from .checkpoints import apart
from .queue_state import Item, Outcome, QueueState

if TYPE_CHECKING:
    from ..cookbook.recipe import Recipe
    from .access import ClusterAccess

log = logging.getLogger("workbench.session")

POLL_S = 0.05
Conduct = Callable[[Plan, Callable[[Run], None]], Run]
"""Runs a plan to its end: passes on the run when it has begun, raises the error of the run."""

CLOSED = "the cluster was stopped"


class Queue:
    """Runs plans on a cluster, one after the other.

    Added plans begin at once, on a separate thread, if nothing else runs on the cluster. All
    methods can be called from any thread. All of them except `wait` return at once.

    One thread works at a time. It is either the queue's thread, which starts when plans wait, or
    the thread that trains in a cell (`train`).

    Args:
        keep_going: Whether the next plan begins after a plan has failed. In a notebook it does not:
            the waiting plans are dropped.
    """

    def __init__(self, cluster: ClusterAccess, *, keep_going: bool = False) -> None:
        self._cluster, self.keep_going = cluster, keep_going
        self._line = QueueState()
        self._lock = threading.RLock()
        self._listeners: list[Callable[[Any], object]] = []
        self._worker: threading.Thread | None = None  # also the thread that trains in a cell
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False  # the plan that is about to begin must end at once
        self._closed = False

    # -- what is asked for -------------------------------------------------------------------------

    def add(self, plans: Plan | Iterable[Plan]) -> list[Item]:
        """Add plans at the end of the queue and have them run; return their items.

        Raises:
            ClusterError: The cluster was stopped.
        """
        with self._lock:
            if self._closed:
                raise ClusterError(
                    f"The queue does not accept new plans, because {CLOSED}.",
                    next_step="start a cluster with %cluster start, and add the plans to its queue",
                    code="WB-CLUSTER-041",
                )
            items = self._line.add([plans] if isinstance(plans, Plan) else plans)
            if items and self._worker is None:
                self._go()
        self._tell()
        return items

    def sweep(
        self,
        recipes: Source | Sequence[Source],
        strategies: str | Sequence[str],
        *,
        seeds: int | Sequence[int] = (),
        **settings: Any,
    ) -> list[Item]:
        """Add every recipe under every strategy with every seed; return their items.

        Args:
            seeds: The number of seeds, counted from 0, or a list of seeds.
            settings: As `Cluster.run` takes them: `workers`, `options`, `epochs`, `name`, ...; a
                list gives several values of one setting.

        Raises:
            PlanError: A plan cannot be run; no plan was added.
        """
        return self.add(sweep(self._cluster, recipes, strategies, seeds=seeds, **settings))

    def remove(self, number: int) -> None:
        """Remove a waiting plan.

        Raises:
            PlanError: There is no plan with this number, or it is not waiting.
        """
        with self._lock:
            self._line.remove(number)
        self._tell()

    def move(self, number: int, to: int) -> None:
        """Move a waiting plan to place `to` among the waiting plans, counted from 0.

        Raises:
            PlanError: There is no plan with this number, or it is not waiting.
        """
        with self._lock:
            self._line.move(number, to)
        self._tell()

    def clear(self) -> None:
        """Remove all waiting plans; the current run continues."""
        with self._lock:
            self._line.clear()
        self._tell()

    def stop(self) -> None:
        """Stop the current run at a step that its workers agree on; then the next plan begins."""
        with self._lock:
            run = self._to_end()
        if run is not None:
            run.stop()

    def stop_all(self, why: str = "the queue was stopped") -> None:
        """Stop the current run and remove all waiting plans."""
        with self._lock:
            self._line.give_up(why)
            run = self._to_end()
        if run is not None:
            run.stop()
        self._tell()

    def close(self) -> None:
        """Accept no more plans and start no plan, because the cluster is stopping."""
        with self._lock:
            self._closed = True
            self._line.give_up(CLOSED)
        self._tell()

    def wait(self, timeout: float | None = None) -> Queue:
        """Wait until no plan waits or runs.

        Raises:
            TimeoutError: That took longer than `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        while not self._idle.wait(0.1):  # short, so that an interrupt is noticed
            if end is not None and time.monotonic() > end:
                raise TimeoutError(f"the queue is still running after {timeout} s: {self!r}")
        return self

    def is_idle(self, timeout_s: float = 0.0) -> bool:
        """Wait at most `timeout_s` seconds; return whether nothing waits or runs."""
        return self._idle.wait(timeout_s)

    def listen(self, listener: Callable[[Queue], object]) -> Callable[[], None]:
        """Call `listener(queue)` on each change, on any thread; return a function to stop that."""
        with self._lock:
            self._listeners.append(listener)

        def undo() -> None:
            with self._lock, suppress(ValueError):
                self._listeners.remove(listener)

        return undo

    # -- what is known -----------------------------------------------------------------------------

    @property
    def items(self) -> list[Item]:
        """The plans of this batch in their order, with state, run and error."""
        with self._lock:
            return list(self._line.items)

    @property
    def runs(self) -> list[Run]:
        """The runs of this batch that have begun."""
        return [item.run for item in self.items if item.run is not None]

    @property
    def current(self) -> Item | None:
        """The current plan."""
        with self._lock:
            return self._line.current

    @property
    def busy(self) -> bool:
        """Whether a plan waits or runs."""
        return not self._idle.is_set()

    @property
    def progress(self) -> float:
        """The finished share of the batch, 0..1; each plan counts the same."""
        with self._lock:
            return self._line.progress

    @property
    def remaining_s(self) -> float | None:
        """The remaining seconds; None while unknown."""
        with self._lock:
            return self._line.remaining.seconds

    def to_wire(self) -> dict[str, Any]:
        """Return the queue as JSON-ready data; `rough` marks a rough estimate of the remaining
        time.
        """
        with self._lock:
            left = self._line.remaining
            return {
                "items": [item.to_wire() for item in self._line.items],
                "busy": self.busy,
                "progress": round(self._line.progress, 4),
                "remaining_s": left.seconds,
                "rough": left.rough,
                "keep_going": self.keep_going,
            }

    def __repr__(self) -> str:
        lines = [f"  {item.number}: {item.name}, {item.state}" for item in self.items]
        return (
            "\n".join([f"queue ({self.progress:.0%} done):", *lines])
            if lines
            else "the queue is empty"
        )

    def train(
        self,
        plans: Iterable[Plan],
        conduct: Conduct,
        passes: Callable[[RunError], bool] = lambda error: False,
    ) -> list[Run]:
        """Run plans in this thread, one after the other; return their runs.

        If a run is stopped, the remaining plans do not run. If a run fails, they do not run either,
        and its error is raised.

        Args:
            passes: Whether the remaining plans run after a run failed with this error; the run
                keeps the error. If all runs fail in this way, the first error is raised.

        Raises:
            RunError: A plan failed, or the queue is running.
        """
        mine: list[Item] = []
        try:
            with deferred():
                mine = self._take_up(plans)
            while any(item.state == "waiting" for item in mine):
                item = self._next()
                if item is None:  # the plans were removed at this moment
                    break
                try:
                    self._run(item, conduct)
                except RunError as error:
                    if item.run is None or not passes(error):
                        raise
                if item.state == "stopped":
                    self._give_up(f"{item.name} was stopped", mine)
            if mine and all(item.state == "failed" for item in mine) and mine[0].error is not None:
                raise mine[0].error
        except BaseException:
            self._give_up("an earlier run failed", mine)
            raise
        finally:
            if self._worker is threading.current_thread():
                with deferred():
                    self._end_work()
        return [item.run for item in mine if item.run is not None]

    def check_free(self) -> None:
        """Raise RunError while the queue works, because a cell would run between its plans."""
        with self._lock:
            if self._worker is not None:
                raise RunError(
                    "The cluster is still running the plans of its queue.",
                    seen=f"plans that wait: {len(self._line.waiting)}",
                    next_step="wait with wb.queue().wait(), or stop all plans with "
                    "wb.queue().stop_all()",
                    code="WB-RUN-081",
                )

    def _take_up(self, plans: Iterable[Plan]) -> list[Item]:
        """Make this thread the one that works; return its items."""
        with self._lock:
            self.check_free()
            self._begin_work()
            self._worker = threading.current_thread()
            return self._line.add(plans)

    def _main(self) -> None:
        """Run waiting plans until none waits; on the queue's thread."""
        while (item := self._next()) is not None:
            try:
                self._run(item, self._conduct)
            except Exception as error:  # noqa: PERF203 - the item keeps the error and shows it
                if not isinstance(error, WorkbenchError):
                    log.exception("A queued plan failed")
                if isinstance(error, ClusterError) or not self.keep_going:
                    self._give_up(f"{item.name} failed")
        self._end_work()

    def _begin_work(self) -> None:
        """Note that a thread works; called under the lock."""
        self._ending = False
        self._idle.clear()

    def _go(self) -> None:
        """Start the queue's thread; called under the lock."""
        self._begin_work()
        self._worker = threading.Thread(target=self._main, name="workbench-queue", daemon=True)
        self._worker.start()

    def _end_work(self) -> None:
        with self._lock:
            self._worker = None
            if (stray := self._line.current) is not None:  # an interrupt struck as it began
                self._line.settle(stray, "failed")
            if self._line.waiting:  # added meanwhile
                self._go()
            else:
                self._ending = False
                self._idle.set()
        self._tell()

    def _next(self) -> Item | None:
        with self._lock:
            self._ending = False  # was meant for the one before
            return self._line.begin()

    def _to_end(self) -> Run | None:
        """Return the run to stop if it has begun; otherwise it ends when it begins.

        Called under the lock.
        """
        current = self._line.current
        if current is None:
            return None
        self._ending = current.run is None
        run: Run | None = current.run
        return run

    def _give_up(self, why: str, only: Sequence[Item] | None = None) -> None:
        with self._lock:
            self._line.give_up(why, only)
        self._tell()

    def _run(self, item: Item, conduct: Conduct) -> None:
        """Run a plan to its end and note how it ended.

        Raises:
            The error of the run.
        """
        watch: list[PaceWatch] = []

        def begun(run: Run) -> None:
            with self._lock:
                item.run = run
                watch.append(PaceWatch(item, run, self._lock, self._tell))
                ending = self._ending or self._closed
            self._tell()
            if ending:
                run.stop()

        outcome: Outcome = "failed"
        failure: BaseException | None = None
        try:
            self._tell()
            run = conduct(item.plan, begun)
            outcome = "stopped" if run.state == "stopped" else "finished"
        except _GivenUp:
            outcome = "stopped"
        except BaseException as error:
            failure = error
            if item.run is not None and item.run.state == "stopped":
                outcome = "stopped"
            raise
        finally:
            with deferred():  # an interrupt must not leave it running forever
                for one in watch:
                    one.end()
                with self._lock:
                    self._line.settle(item, outcome, failure)
                self._tell()

    def _conduct(self, plan: Plan, begun: Callable[[Run], None]) -> Run:
        """Run a plan without a view when nothing else runs on the cluster."""
        run = self._start(plan)
        begun(run)
        run.over.wait()
        if run.error is not None:
            raise run.error
        return run

    def _start(self, plan: Plan) -> Run:
        while not (self._ending or self._closed):
            if self._cluster.is_busy:
                time.sleep(POLL_S)
                continue
            with suppress(BusyError):  # a cell was quicker
                return self._cluster.start(plan)
        raise _GivenUp

    def _tell(self) -> None:
        with self._lock:
            listeners = list(self._listeners)
        for listener in listeners:
            try:
                listener(self)
            except Exception:  # noqa: PERF203 - a view that fails must not end the queue
                log.exception("A listener of the queue failed")


class _GivenUp(Exception):
    """The queue was stopped just before a plan began."""


TICK_S = 0.5
"""Interval at which the pace is measured."""


class PaceWatch:
    """Updates an item's pace until it is ended, and calls back after each update."""

    def __init__(
        self, item: Item, run: Run, lock: threading.RLock, tell: Callable[[], None]
    ) -> None:
        self._item, self._run, self._lock, self._tell = item, run, lock, tell
        self._elapsed_s, self._seen_at = 0.0, time.monotonic()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._main, name="workbench-pace", daemon=True)
        self._thread.start()

    def _main(self) -> None:
        while not self._end.wait(TICK_S):
            self._look()
            self._tell()

    def _look(self) -> None:
        now = time.monotonic()
        if self._run.state != "paused":
            self._elapsed_s += now - self._seen_at
        self._seen_at = now
        snapshot = self._run.snapshot()
        with self._lock:
            self._item.pace.update(
                snapshot.step, snapshot.total_steps, snapshot.elapsed_s, self._elapsed_s
            )

    def end(self) -> None:
        """Update a last time, then end."""
        self._end.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(5)
        self._look()


Source: TypeAlias = "str | Callable[..., Any] | Recipe"


def sweep(
    cluster: ClusterAccess,
    recipes: Source | Sequence[Source],
    strategies: str | Sequence[str],
    *,
    seeds: int | Sequence[int] = (),
    args: tuple[Any, ...] = (),
    name: str = "",
    **settings: Any,
) -> list[Plan]:
    """Return the plans, all validated; every strategy with every seed, recipe after recipe.

    Numbers of workers, batches, epochs, steps, options and values may be lists: every combination
    is a plan, as on a `%%distributed` line.

    Args:
        recipes: Source of a cell, a function, a recipe; one or several.
        seeds: The number of seeds, counted from 0, or a list of seeds; without it the cell sets the
            seed.
        name: The name of the runs. If there are several, the strategy, the recipe's number and the
            seed are added.
        settings: Further settings that `Cluster.run` takes: `workers`, `options`, `values`,
            `epochs`, ...; a list gives several values of one setting.

    Raises:
        PlanError: A plan cannot be run.
    """
    several = isinstance(recipes, Sequence) and not isinstance(recipes, str)
    sources = list(cast("Sequence[Source]", recipes)) if several else [cast("Source", recipes)]
    chosen = [strategies] if isinstance(strategies, str) else list(strategies)
    if not sources or not chosen:
        missing = "recipe" if not sources else "strategy"
        raise PlanError(
            f"A sweep needs at least one {missing}.",
            allowed=f"one {missing}, or a list of them",
            code="WB-PLAN-133",
        )
    settings, axes = several_in(settings)
    asked = replace(from_arguments("", settings), several=axes)
    wanted = list(
        range(check_count("The number of seeds", seeds)) if isinstance(seeds, int) else seeds
    )
    found = []
    for number, source in enumerate(sources, 1):
        recipe = to_recipe(source, args)
        stem = name
        if len(sources) > 1:
            stem = f"{name or recipe.name or recipe.function or 'recipe'}-{number}"
        names = tuple(catalog.canonical(one, asked.framework) for one in chosen)
        plans = plans_of(
            replace(asked, name=stem, strategies=names),
            recipe,
            framework=cluster.framework,
            workers=max(1, len(cluster.worker_ids)),
        )
        for plan in plans:
            found += [plan.with_seed(check_seed(seed)) for seed in wanted] or [plan]
    check_runs(len(found))
    return apart(found)
