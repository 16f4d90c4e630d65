"""`wb.Cluster`: engines, the runs on them, and the cells without a strategy.

Its `RunDispatcher` passes each engine's message to its run, by the run number in the message.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from ..cluster.engines import EngineInfo, Engines, Listeners
from ..cluster.hosts.configuration import LaunchArguments, check_keep, launch_settings
from ..cluster.hosts.settings import LOCAL, LaunchSettings
from ..cluster.progress import Report, quiet
from ..cookbook.recipe import Recipe
from ..errors import RunError
from ..execution import logging_to, registry
from ..execution.allocator import EngineAllocator, default_framework, spent
from ..execution.launch import RunExecution
from ..execution.outcome import short_handed
from ..execution.paused import Paused
from ..execution.requests import (
    FREE,
    PULL,
    PUSH,
    BusyError,
    cell_requests,
    check_arrived,
    check_folder,
    check_framework,
    check_limits,
    check_members,
    check_size,
    check_travels,
    members_of,
    task_record,
    to_recipe,
)
from ..execution.run import Run
from ..execution.stop import deferred
from ..execution.task import Task
from ..execution.workers import hangs
from ..shared.messages import Answered, Happened, Left, Position, Records, Served, Stopped, Up
from ..shared.plan import Plan, plan_of
from ..shared.run_request import from_arguments, takes_flags
from . import checkpoints
from . import status as session_status
from .debug import PostMortem, post_mortem
from .keeping import Keeping
from .logs import Stacks, gather
from .queue import Queue
from .status import Vitals

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from ..devices.leases import Leases

Method = TypeVar("Method", bound=Callable[..., Any])


def begins(method: Method) -> Method:
    """Prevent another thread, such as the queue's, from starting a cell or a run meanwhile."""

    @wraps(method)
    def alone(self: Cluster, *args: Any, **kwargs: Any) -> Any:
        with self._beginning:
            return method(self, *args, **kwargs)

    return cast("Method", alone)


class Cluster:
    """A cluster: a controller and its engines. It can be used as a context manager.

    Args:
        workers: Number of engines to start.
        devices: `cpu`, `cuda`, GPU numbers such as `0,1` (with these and `cuda`, workers may share
            a GPU), or `auto`: a free GPU for each worker, or CPUs if there are too few GPUs.
        framework: What engines import when they start; by default `torch`, if it is installed.
        keep: Whether the cluster continues after this kernel; `wb.attach` can then take it over.
        idle_timeout: How long a cluster may be idle before it ends: `30m`, a number of seconds, or
            `never`, which is the default. The default of a kept cluster is a day.
        progress: Called with a `Progress` while engines start; `str(progress)` is one line of text.
        launch: Checked settings of the launcher; by default made from the arguments below.
        launcher: `local`, `ssh`, `slurm`, `mpi`, or the name of one of ipyparallel's launchers.
        on: Hosts for ssh, with their numbers of engines: `node1:4,user@node2:4`, or a list.
        nodes, gpus_per_node, time, partition, account: Settings of the Slurm job.
        setup: Shell commands that run on each host before the engines start. Lines that begin with
            `#SBATCH` are options of the job.
        launcher_options: Further options of `sbatch`, `ssh` or `mpiexec`: `{"qos": "high"}`.
        listen: Where the notebook listens: an address, an interface, a network or a host name.
            The argument `hosts` means the same.
        ports: First and last port that may be used, `20000-20100`.
        start_timeout: The longest time for a start with its wait in a queue: `10m`, or seconds.

    Raises:
        PlanError: The number of engines, the devices or the launcher's arguments are invalid.
        ClusterError: The engines did not start.

    Example:
        >>> with wb.Cluster(2) as cluster:
        ...     run = cluster.run(source, strategy="mirrored").wait()
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        devices: str = "auto",
        framework: str | None = None,
        engines: Engines | None = None,
        keep: bool = False,
        idle_timeout: str | float | None = None,
        progress: Report = quiet,
        launch: LaunchSettings | None = None,
        **where: Unpack[LaunchArguments],
    ) -> None:
        count = check_size("The number of engines", workers)
        self.launch = launch = launch or launch_settings(count, **where)
        if keep:
            check_keep(launch.launcher)
        check_limits(count, launch=launch, elsewhere=launch.has_agents)
        self._busy: Run | Task | None = None
        self._beginning = threading.RLock()  # held while a cell or a run is begun
        self._said: set[str] = set()  # to cells: the same of each would bury their output
        framework = framework or default_framework()
        self.pool = pool = EngineAllocator(devices, framework, hosted=launch.has_agents)
        self.hearing = RunDispatcher()
        self.paused = Paused(lambda engine, message: self.engine_set.router.send(engine, message))
        if not launch.has_agents:  # otherwise the hosts are not known yet
            pool.lease(count)  # refuse impossible settings before anything starts
        pool.most_workers = count
        if launch.launcher == LOCAL:
            check_framework(framework)
        self.engine_set: Engines = engines or Engines(
            self.listeners(), framework=framework, launch=launch
        )
        pool.engines = self.engine_set
        self.vitals = Vitals(self)
        self._queue = Queue(self)
        if engines is not None:
            engines.listen(self.listeners())
            engines.framework = framework
        try:
            self.keeping = Keeping(self, keep, idle_timeout)
            pool.on_task = self.keeping.begun
            if not self.engine_set.engines:  # else they were there before us
                self.engine_set.start(count, progress)
            if launch.has_agents:
                pool.lease(count)
        except BaseException:
            self.engine_set.stop()
            raise
        self.keeping.begin()
        registry.add_cluster(self)

    def listeners(self) -> Listeners:
        """The object that receives the engines' messages."""
        return Listeners(message=self._message, death=self._death, helper=self._helper_gone)

    # -- its end ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End every process of the cluster."""
        self._wind_up()
        self.engine_set.stop()
        self.pool.devices.free()

    def hand_back(self) -> Engines | None:
        """Stop the cluster, but keep the controller and the warm parents for another cluster.

        Returns:
            The value for `Cluster(engines=...)`. None if another cluster could not use it; then it
            is ended.
        """
        self._wind_up()
        engines = self.engine_set
        try:
            if engines.reusable:
                try:
                    engines.reset(default_framework())
                except BaseException:
                    engines.stop()
                    raise
                if engines.reusable:
                    return engines
            engines.stop()
        finally:
            self.pool.devices.free()
        return None

    def _wind_up(self, end: Callable[[Run], object] = Run.stop) -> None:
        """End the current work; the cluster no longer belongs to this process."""
        self._queue.close()
        busy = self._busy
        if isinstance(busy, Run) and not busy.is_over:
            end(busy)
        registry.remove_cluster(self)
        self.keeping.end()
        self.vitals.close()

    def release(self, reason: str = "The notebook's kernel ended.") -> None:
        """Release a kept cluster, so that it continues without this kernel; else stop it."""
        if not self.keeping.kept:
            self.stop()
            return
        # An open run would be recorded as failed, although its engines continue.
        self._wind_up(lambda run: run.abandon(reason))
        self.engine_set.release(reason)
        self.pool.devices.reservations.leave()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster of {len(self.ids)} engines>"

    def _ipython_display_(self) -> None:
        from ..views.blocks import show

        show(self.status())

    # -- cells and runs ----------------------------------------------------------------------------

    @takes_flags
    def run(
        self,
        source: str | Callable[..., Any] | Recipe,
        args: tuple[Any, ...] = (),
        *,
        strategy: str,
        number: int = 1,
        autoreload: str = "",
        **asked: Any,
    ) -> Run:
        """Start training a recipe under a strategy, and return the run immediately.

        If there are fewer engines than workers, engines are added.

        Args:
            source: Source of a cell, or a function whose arguments are `args`.
            asked: The settings that the flags of `%%distributed` give.

        Raises:
            PlanError: The plan cannot be run; no engine was used.
            RunError: Another run is active.
        """
        plan = plan_of(
            from_arguments(strategy, asked),
            to_recipe(source, args),
            framework=self.framework,
            workers=max(1, len(self.worker_ids)),
        )
        return self.start(plan, number=number, autoreload=autoreload)

    @begins
    def start(
        self, plan: Plan, *, number: int = 1, autoreload: str = "", resume_from: str = ""
    ) -> Run:
        """Start a validated plan, from a checkpoint if one is named; returns at once."""
        self.claim()
        if resume_from:
            checkpoints.verify(resume_from, plan)
        checkpoints.claim(plan, resume_from)
        logging_to.check_targets(plan.log)
        check_framework(plan.framework)
        check_size("The number of workers", plan.workers)
        pool = self.pool
        plan.check_devices(pool.lease(plan.workers, plan).words)
        leases, said = pool.hold(plan.workers, plan)
        plan.check_devices(leases.words)  # others may be quicker
        ids = pool.workers_for(plan.engines, plan.framework) * (plan.workers // plan.engines)
        servers = pool.servers_for(len(plan.helpers), plan.framework)
        pool.bring([*dict.fromkeys(ids), *servers], plan.framework)
        check_folder(pool.engines, ids, plan.checkpoint)
        said = [*dict.fromkeys([*pool.differences([*ids, *servers], plan.framework), *said])]
        names = [lease.label for lease in leases.leases]
        run = registry.new_run(
            plan, number=self.hearing.number(), engines=ids, devices=names, resume_from=resume_from
        )
        self._busy = run
        try:
            for text in (*said, short_handed(pool.lost_workers, len(pool.worker_ids))):
                if text:
                    run.note(text)
            self.hearing.add(run)
            run.record()
            run.advance("submit")
            run.begin_logs()
            checkpoints.describe(run)
            launch = RunExecution(
                pool, run, servers, leases, number, autoreload, self.hearing.renumber
            )
            launch.files.settings()  # sending files to other hosts can take long
            with deferred():
                launch.submit()
        except KeyboardInterrupt:
            # After the run has started, the caller that catches the interrupt ends its engines.
            if run.task is None:
                run.finish(RunError("Interrupted before the run started.", code="WB-RUN-063"))
            raise
        except BaseException as error:
            run.finish(
                error if isinstance(error, RunError) else RunError(str(error), code="WB-RUN-064")
            )
            raise
        return run

    def queue(self, plans: Plan | Iterable[Plan] = (), *, keep_going: bool | None = None) -> Queue:
        """Return the cluster's queue, which runs plans one after the other in the background.

        Args:
            plans: Plans to add to the queue. `Queue.sweep` makes and adds plans itself.
            keep_going: Whether the queue continues after a plan has failed; None: unchanged.
        """
        if keep_going is not None:
            self._queue.keep_going = keep_going
        if plans:
            self._queue.add(plans)
        return self._queue

    @begins
    def execute(
        self,
        source: str,
        *,
        framework: str | None = None,
        ids: Sequence[int] | None = None,
        workers: int | None = None,
        number: int = 1,
        first_line: int = 1,
        autoreload: str = "",
        traceback: str = "short",
        viewed: bool = False,
    ) -> Task:
        """Start a cell on every worker (SPMD), with a process group, and return immediately.

        Args:
            framework: The framework that the engines need; by default the cluster's framework.
            ids: Engines that run the cell. World size and process group still include all workers.
            workers: The world size; the first engines are used.
            traceback: How errors are shown: `short`, or `full` with every frame.
            viewed: Whether a view waits for the cell and reports a long cell (`when_long`).
        """
        self.claim()
        if framework is not None:  # the cluster's framework was checked when the cluster started
            check_framework(framework)
        framework, pool = framework or self.framework, self.pool
        members = pool.workers_for(workers or len(self.worker_ids), framework)
        targets = list(ids) if ids is not None else members
        check_members(targets, members)
        pool.bring(members, framework)
        leases, said = pool.hold(len(members))
        specs = pool.cell_specs(members, targets, framework, leases)
        recipe = Recipe(source, first_line)
        asked = cell_requests(recipe, specs, targets, number, autoreload, traceback)
        parts = members_of(specs, targets, hosts=pool.hosts())
        pool.on_task(task_record(asked, parts, framework=framework))
        over = partial(self.cell_over, framework=framework)
        with deferred():
            self._busy = task = Task(self.engine_set, asked, parts, over)
        said = [text for text in said if text not in self._said]
        self._said.update(said)
        if workers is None:
            said.append(short_handed(pool.lost_workers, len(pool.worker_ids)))
        for text in filter(None, said):
            task.board.message(targets[0], "stream", {"name": "stderr", "text": f"note: {text}\n"})
        absent = [rank for rank, engine in enumerate(members) if engine not in targets]
        ask = self.engine_set.router.questions.ask
        task.when_long = partial(hangs.watch, task, ask, absent=absent)
        if not viewed:
            task.when_long()
        return task

    def cell_over(self, task: Task, framework: str) -> None:
        """Settle a cell: replace engines that cannot be used again, drop a broken process group."""
        if found := spent(task.outcomes):
            self.pool.replacer.begin(self.engine_set, lambda: list(found), framework)
        if task.group_broken:
            self.pool.drop_group()
        self.pool.on_task(None)

    # -- events ------------------------------------------------------------------------------------

    def _message(self, engine: int, message: Up) -> None:
        match message:
            case Stopped() | Answered() | Left() | Served():
                self.paused.hear(message)
            case Records() | Happened() | Position():
                self.hearing.receive(message, engine)

    def _death(self, engine: EngineInfo) -> None:
        self.paused.forget(engine.id)
        self.pool.drop_group()
        if isinstance(self._busy, Run):
            self._busy.died(engine)

    def _helper_gone(self, text: str) -> None:
        self.pool.drop_group()
        if isinstance(self._busy, Run) and not self._busy.is_over:
            self._busy.note(text)

    # -- its engines -------------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        """The ids of the living engines."""
        return self.engine_set.ids

    @property
    def engines(self) -> list[EngineInfo]:
        """Every engine, dead ones too, by id."""
        return self.pool.all

    @property
    def worker_ids(self) -> list[int]:
        """The ids of the living engines that run cells, without the engines that are servers."""
        return self.pool.worker_ids

    @property
    def devices_asked(self) -> str:
        """What `devices` said."""
        return self.pool.devices_asked

    def lease(self, workers: int) -> Leases:
        """Return the device of each of this many workers; always the same answer."""
        return self.pool.lease(workers)

    @property
    def framework(self) -> str:
        """The framework of engines, cells and runs that do not name one."""
        return self.engine_set.framework

    def use(self, framework: str) -> None:
        """Set the default framework of engines, cells and runs.

        Raises:
            ClusterError: The framework is not installed.
        """
        check_framework(framework)
        self.engine_set.framework = framework

    @begins
    def add(self, count: int, framework: str = "") -> list[int]:
        """Start more engines and return their ids."""
        return self.pool.add(count, framework)

    def restart(self, ids: Iterable[int] | None = None) -> list[int]:
        """Replace all engines, or those with the given ids, by new engines with the same ids.

        An active run or cell on these engines fails.

        Raises:
            ClusterError: There is no engine with this id.
        """
        self.pool.drop_group()
        self.engine_set.seek_hosts()
        return self.engine_set.restart(
            list(ids) if ids is not None else [e.id for e in self.engines]
        )

    def take_up(self, busy: Run | Task, record: Mapping[str, Any]) -> None:
        """Let this cluster continue the work that another kernel began on these engines."""
        self.keeping.task = dict(record)
        self._busy = busy

    @begins
    def free(self) -> dict[int, int]:
        """Delete the cells' variables on all engines; return the number of names per engine.

        Other notebooks can then use the GPUs. The next cell or run takes the same GPUs again; if no
        engine has used a GPU yet, it can take other GPUs.

        Raises:
            RunError: A cell or a run is active.
        """
        self.claim()
        dropped = self.engine_set.call(self.ids, FREE)
        self.pool.devices.free()
        self.keeping.write()
        return dropped

    def logs(self, engine: int) -> str:
        """Return the last lines of an engine's log.

        Raises:
            ClusterError: There is no engine with this id.
        """
        self.engine_set.known(engine)
        return self.engine_set.log_tail(engine)

    def stacks(self, ids: Iterable[int] | None = None) -> Stacks:
        """Return the current stacks of the engines' threads, also while a cell or a run is active.

        Raises:
            ClusterError: There is no engine with this id.
        """
        return gather(self, ids)

    def debug(self, rank: int | None = None) -> PostMortem:
        """Return the frames of a rank whose cell failed; by default of the rank that failed first.

        Raises:
            RunError: The rank has no stored failure, or a cell is active.
        """
        return post_mortem(self, rank)

    def status(self) -> Any:
        """Return a table with one row per engine."""
        return session_status.table(self)

    @property
    def rejected(self) -> int:
        """Number of messages and connections that Workbench refused (docs/security.md)."""
        return session_status.rejected(self)

    @begins
    def push(self, values: Mapping[str, Any], ids: Sequence[int] | None = None) -> None:
        """Set variables on all engines, or on those with the given ids.

        Raises:
            RunError: A cell or a run is active.
            PlanError: A value cannot be sent.
        """
        self.claim()
        check_travels(values)
        self.engine_set.call(ids or self.ids, PUSH, (dict(values),))

    @begins
    def pull(
        self, names: Sequence[str], ids: Sequence[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Return the values of variables, for each engine id.

        Raises:
            RunError: A cell or a run is active, or the notebook cannot load a value.
        """
        self.claim()
        found = self.engine_set.fetch(ids or self.ids, PULL, (list(names),))
        check_arrived(found)
        return found

    # -- whose turn it is --------------------------------------------------------------------------

    @property
    def busy(self) -> Run | Task | None:
        """The current run or cell, or the last one."""
        return self._busy

    @property
    def is_busy(self) -> bool:
        """Whether a cell or a run is active."""
        return self._busy is not None and not self._busy.is_over

    @property
    def last_task(self) -> Task | None:
        """The cell that runs, or ran last, be it a run's or not."""
        return self._busy.task if isinstance(self._busy, Run) else self._busy

    def claim(self) -> None:
        """Raise BusyError if the cluster is busy; have dead engines replaced."""
        self.keeping.touch()
        busy = self._busy
        if busy is None or busy.is_over:
            self.pool.replacer.wait()
            return
        what = f"run {busy.name!r}" if isinstance(busy, Run) else "a cell"
        raise BusyError(
            f"The cluster is busy with {what}.",
            next_step=f"wait: wb.runs[{busy.name!r}].wait(); or stop: wb.runs[{busy.name!r}].stop()"
            if isinstance(busy, Run)
            else "wait for the cell, or interrupt the cell",
            code="WB-RUN-065",
        )


class RunDispatcher:
    """Gives runs their numbers, and messages to the runs that they name.

    Attributes:
        folders: The folders of all runs of the cluster, by run number.
    """

    def __init__(self) -> None:
        self._runs: dict[int, Run] = {}  # those that are heard
        self.folders: dict[int, Path] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def number(self) -> int:
        """Return a number that no other run of the cluster has used."""
        return next(self._numbers)

    def count_from(self, first: int) -> None:
        """Start the numbers at `first`, because another kernel has used the smaller numbers."""
        self._numbers = itertools.count(first)

    def add(self, run: Run) -> None:
        """Pass messages with this run's number to the run.

        Runs that are over are released, except the last one: its last messages can still arrive.
        """
        with self._lock:
            last = list(self._runs)[-1:]
            self._runs = {n: r for n, r in self._runs.items() if n in last or not r.is_over}
            self._runs[run.number] = run
            self.folders[run.number] = run.folder

    def renumber(self, run: Run) -> int:
        """Give a restarted run another number, so that no earlier message reaches it."""
        number = self.number()
        with self._lock:
            self._runs.pop(run.number, None)
            self.folders.pop(run.number, None)
            self._runs[number], self.folders[number] = run, run.folder
        return number

    def receive(self, message: Records | Happened | Position, engine: int = -1) -> None:
        """Pass a message to the run that it names; drop it if that run is not registered."""
        run = self._runs.get(message.run)
        if run is not None:
            run.receive(message, engine)
