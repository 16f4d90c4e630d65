"""Works plans off, one run after the other: on a thread of its own, or in the cell that asked."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError, RunError, WorkbenchError
from ..plan import Plan
from .checks import BusyError
from .interrupts import deferred
from .lineup import Item, Lineup, Outcome
from .pacing import PaceWatch
from .run import Run

if TYPE_CHECKING:
    from .cluster import Cluster

log = logging.getLogger("workbench.session")

POLL_S = 0.05
Conduct = Callable[[Plan, Callable[[Run], None]], Run]
"""Runs a plan to its end: tells the run when it has begun, raises what it failed with."""


class Conductor:
    """Has the plans of a row run on a cluster; `queue.Queue` is the rest of it.

    One thread works at a time: its own, which begins when there is something to do, or the one
    that trains in a cell (`train`).

    Args:
        keep_going: Whether the next plan begins after one has failed.
    """

    def __init__(self, cluster: Cluster, *, keep_going: bool = False) -> None:
        self._cluster, self.keep_going = cluster, keep_going
        self._line = Lineup()
        self._lock = threading.RLock()
        self._listeners: list[Callable[[Any], object]] = []
        self._worker: threading.Thread | None = None  # also the one that trains in a cell
        self._idle = threading.Event()
        self._idle.set()
        self._ending = False  # the one that is about to begin is to end at once
        self._closed = False

    def train(
        self,
        plans: Iterable[Plan],
        conduct: Conduct,
        passes: Callable[[RunError], bool] = lambda error: False,
    ) -> list[Run]:
        """Run plans here and now, one after the other; return their runs.

        A run that is stopped ends the rest. One that fails ends it too, and its error is raised.

        Args:
            passes: Whether the rest goes on after a run that failed with this error; it stays with
                the run. Where all fail so, the first error is raised.

        Raises:
            RunError: A plan failed, or the queue is at work.
        """
        mine: list[Item] = []
        try:
            with deferred():
                mine = self._take_up(plans)
            while any(item.state == "waiting" for item in mine):
                item = self._next()
                if item is None:  # they were taken out in this moment
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
            self._give_up("one before it failed", mine)
            raise
        finally:
            if self._worker is threading.current_thread():
                with deferred():
                    self._end_work()
        return [item.run for item in mine if item.run is not None]

    def _take_up(self, plans: Iterable[Plan]) -> list[Item]:
        """Have this thread be the one that works; return its items."""
        with self._lock:
            if self._worker is not None:
                raise RunError(
                    "The cluster's queue is at work.",
                    seen=f"{len(self._line.waiting)} plans wait",
                    next_step="queue.wait(), or queue.stop_all()",
                )
            self._begin_work()
            self._worker = threading.current_thread()
            return self._line.add(plans)

    def _main(self) -> None:
        """Run what waits until nothing does; on the queue's own thread."""
        while (item := self._next()) is not None:
            try:
                self._run(item, self._conduct)
            except Exception as error:  # noqa: PERF203 - kept in the item, which shows it
                if not isinstance(error, WorkbenchError):
                    log.exception("A queued plan failed")
                if isinstance(error, ClusterError) or not self.keep_going:
                    self._give_up(f"{item.name} failed")
        self._end_work()

    def _begin_work(self) -> None:
        """Take note that somebody works; under the lock."""
        self._ending = False
        self._idle.clear()

    def _go(self) -> None:
        """Work on a thread of its own; under the lock."""
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
        """Return the run to stop, if it has begun; else it ends as it begins. Under the lock."""
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
        """Run one to its end and take note of how it ended.

        Raises:
            Whatever it failed with.
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
            with deferred():  # an interrupt must not leave it running for ever
                for one in watch:
                    one.end()
                with self._lock:
                    self._line.settle(item, outcome, failure)
                self._tell()

    def _conduct(self, plan: Plan, begun: Callable[[Run], None]) -> Run:
        """Run a plan without a view, when nothing else goes on on the cluster."""
        run = self._start(plan)
        begun(run)
        run._over.wait()
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
    """The queue was stopped while a plan was about to begin."""
