"""`wb.Cluster`: engines, the runs on them, and the cells without a strategy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from .. import catalog
from ..cluster import devices as device_pool
from ..cluster.engines import EngineInfo, Engines, Listeners
from ..errors import ClusterError, RunError, WorkbenchError
from ..faults import parse_fault
from ..history import disk
from ..plan import Plan, check_count, make_plan
from ..protocol import Message
from ..recipe import Recipe
from . import registry
from .checks import check_framework, check_members, check_size, to_recipe
from .frameworks import bring, default_framework
from .replace import Replacer, spent, words
from .requests import (
    ARGS,
    FREE,
    PULL,
    PUSH,
    RESULT,
    TAKE,
    Specs,
    cell_requests,
    labels,
    make_specs,
    run_requests,
)
from .run import Run
from .task import Task
from .verdicts import outcome_error, outcome_notes


class Cluster:
    """A controller and engines of this notebook; also a context manager.

    Args:
        workers: Engines to start with.
        devices: `auto` (the least used GPUs, CPU where there are none), `cpu`, `cuda`, or GPU
            numbers as `0,1`.
        launcher: `local`, or one of ipyparallel's launchers by name.
        framework: What engines have imported when they start; by default torch, where installed.

    Raises:
        PlanError: The number of engines or the devices make no sense.
        ClusterError: The engines did not come up.

    Example:
        >>> with wb.Cluster(2) as cluster:
        ...     run = cluster.run(source, strategy="mirrored").wait()
    """

    def __init__(
        self,
        workers: int = 2,
        *,
        devices: str = "auto",
        launcher: str = "local",
        hosts: str = "",
        framework: str | None = None,
        engines: Engines | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        count = check_size("The number of engines", workers)
        self.devices_asked, self.launcher = devices, launcher
        self.devices = device_pool.parse_devices(devices)
        self._leases: dict[int, device_pool.Leases] = {}
        self._runs: dict[int, Run] = {}
        self._number = itertools.count(1)
        self._generation = itertools.count(1)
        self._group: tuple[str, tuple[str | int, ...]] = ("", ())  # prefix; framework, engines
        self._servers: set[int] = set()  # engines started as servers; workers do not spread to them
        self._replacer = Replacer()
        self._begun_again: set[int] = set()  # runs whose engines were replaced, once each
        self._lock = threading.Lock()
        self._busy: Run | Task | None = None
        self.lease(count)
        framework = framework or default_framework()
        if launcher == "local":
            check_framework(framework)
        self._engines = engines or Engines(
            self.listeners(), framework=framework, launcher=launcher, hosts=hosts
        )
        if engines is not None:
            engines.listen(self.listeners())
            engines.framework = framework
        try:
            self._engines.start(count, progress)
        except BaseException:
            self._engines.stop()
            raise
        registry.add_cluster(self)

    def listeners(self) -> Listeners:
        """Where the engines' messages go."""
        return Listeners(message=self._message, death=self._death)

    # -- engines ----------------------------------------------------------------------------------

    @property
    def ids(self) -> list[int]:
        """Ids of the living engines."""
        return self._engines.ids

    @property
    def engines(self) -> list[EngineInfo]:
        """Every engine, dead ones too, by id."""
        return [self._engines.engines[i] for i in sorted(self._engines.engines)]

    @property
    def worker_ids(self) -> list[int]:
        """Ids of the living engines that run cells; the others were started as servers."""
        return [engine for engine in self.ids if engine not in self._servers]

    def lease(self, workers: int) -> device_pool.Leases:
        """Return which device each of so many workers gets; the same answer every time.

        A worker's variables live on its device from one cell to the next, so ranks keep theirs
        although `auto` would see other memory in use by then.
        """
        if workers not in self._leases:
            self._leases[workers] = device_pool.lease(self.devices, workers)
        return self._leases[workers]

    @property
    def framework(self) -> str:
        """The framework of engines, cells and runs that name none."""
        return self._engines.framework

    def use(self, framework: str) -> None:
        """Let engines, cells and runs that name no framework have this one from now on.

        Raises:
            ClusterError: It is not installed.
        """
        check_framework(framework)
        self._engines.framework = framework

    def add(self, count: int, framework: str = "") -> list[int]:
        """Start more engines; return their ids."""
        return self._engines.start(check_count("The number of engines", count), framework=framework)

    def restart(self, ids: Iterable[int] | None = None) -> list[int]:
        """Replace engines (all, or those named) by fresh ones under the same ids.

        What they are doing ends: a run or a cell on them fails.

        Raises:
            ClusterError: There is no engine of that id.
        """
        self._group = ("", ())
        return self._engines.restart(list(ids) if ids is not None else [e.id for e in self.engines])

    def free(self) -> dict[int, int]:
        """Drop the cells' variables on all engines; return how many names each dropped.

        Raises:
            RunError: A cell or a run is going on.
        """
        self._claim()
        return self._engines.call(self.ids, FREE)

    def logs(self, engine: int) -> str:
        """The last lines of an engine's log.

        Raises:
            ClusterError: There is no engine of that id.
        """
        self._engines.known(engine)
        return self._engines.log_tail(engine)

    def status(self) -> Any:
        """A table: a row per engine."""
        from ..views.tables import cluster_table
        from .status import rows

        return cluster_table(rows(self))

    def stop(self) -> None:
        """End every process of the cluster."""
        busy = self._busy
        if isinstance(busy, Run) and not busy.is_over:
            busy.stop()
        registry.remove_cluster(self)
        self._engines.stop()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Cluster of {len(self.ids)} engines>"

    def _ipython_display_(self) -> None:
        from ..views.blocks import show

        show(self.status())

    # -- variables --------------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any], ids: Sequence[int] | None = None) -> None:
        """Set variables on engines (all, or those named).

        Raises:
            RunError: A cell or a run is going on.
        """
        self._claim()
        self._engines.call(ids or self.ids, PUSH, (dict(values),))

    def pull(
        self, names: Sequence[str], ids: Sequence[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Return variables of engines, by engine id.

        Raises:
            RunError: A cell or a run is going on.
        """
        self._claim()
        return self._engines.call(ids or self.ids, PULL, (list(names),))

    # -- cells and runs ----------------------------------------------------------------------------

    def run(
        self,
        source: str | Callable[..., Any] | Recipe,
        args: tuple[Any, ...] = (),
        *,
        strategy: str,
        workers: int | None = None,
        framework: str | None = None,
        options: dict[str, Any] | None = None,
        name: str = "",
        inject: Sequence[str] = (),
        init_from: str = "",
        number: int = 1,
        autoreload: str = "",
        **overrides: Any,
    ) -> Run:
        """Train a recipe under a strategy; returns at once.

        Args:
            source: Source of a cell, or a function whose arguments are `args`.
            workers: Replicas; by default as many as there are engines. More than there are
                engines adds engines.
            init_from: Name of a run; the model starts from the weights that run ended with.
            overrides: `epochs`, `steps`, `batch_size`, `seed`.

        Raises:
            PlanError: What was asked for cannot be run; no engine was touched.
            RunError: Another run is going on.
        """
        plan = make_plan(
            to_recipe(source, args),
            strategy,
            framework=framework or self.framework,
            workers=workers or max(1, len(self.worker_ids)),
            options=options,
            overrides=overrides,
            faults=tuple(parse_fault(text) for text in inject),
            name=name,
            init_from=init_from,
        )
        return self.start(plan, number=number, autoreload=autoreload)

    def start(self, plan: Plan, *, number: int = 1, autoreload: str = "") -> Run:
        """Start a validated plan; returns at once (see `run`)."""
        self._claim()
        check_framework(plan.framework)
        check_size("The number of workers", plan.workers)
        leases = self.lease(plan.workers)
        plan.check_devices([lease.device for lease in leases.leases])
        ids = self._ids_for(plan.engines, plan.framework) * (plan.workers // plan.engines)
        servers = self._servers_for(len(plan.helpers), plan.framework)
        self._bring([*dict.fromkeys(ids), *servers], plan.framework)
        names = [lease.label for lease in leases.leases]
        run = registry.new_run(plan, number=next(self._number), engines=ids, devices=names)
        if leases.warning:
            run.note(leases.warning)
        with self._lock:
            self._runs[run.number] = run
        disk.write_meta(run.folder, run.meta())
        run.advance("submit")
        self._busy = run
        try:
            self._submit(run, servers, leases, number=number, autoreload=autoreload)
        except BaseException as error:
            run.finish(error if isinstance(error, RunError) else RunError(str(error)))
            raise
        return run

    def _submit(
        self,
        run: Run,
        servers: Sequence[int],
        leases: device_pool.Leases,
        *,
        number: int,
        autoreload: str,
    ) -> None:
        ids = [*run.members, *servers]
        if run.plan.recipe.function:
            self._engines.call(run.members, PUSH, ({ARGS: run.plan.recipe.args},))
        prefix = f"run-{run.number}-{next(self._generation)}"
        specs = self._specs(ids, run.plan, leases, prefix, run.plan.framework)
        asked = run_requests(run, specs, number, autoreload)
        self._group = ("", ())
        again = partial(self._submit, run, servers, leases, number=number, autoreload=autoreload)
        run.open_board(self._engines.router.send, ids)
        run.task = Task(
            self._engines,
            asked,
            labels(specs),
            lambda task: self._run_over(run, task, again),
            spare=servers[: run.plan.workers] if run.plan.entry.remote_workers else (),
            on_loss=run.note,
        )

    def _run_over(self, run: Run, task: Task, again: Callable[[], None]) -> None:
        """Settle a run; on the thread that hears the engines, so it may not wait for them."""
        run.task = task
        if self._replace(run, task, again):
            return
        error = task.failure()
        if run.state == "stopping" and error is not None and task.first_failed is None:
            error = None  # an agreed stop that needed an interrupt is still a stop
        error = error or outcome_error(run, task.outcomes)
        for text in outcome_notes(task.outcomes):
            run.note(text)
        if run.plan.recipe.function:
            threading.Thread(
                target=self._fetch_results, args=(run, error), name="workbench-results", daemon=True
            ).start()
        else:
            run.finish(error)

    def _replace(self, run: Run, task: Task, again: Callable[[], None]) -> bool:
        """Replace engines that say they must be; return whether the run begins again on them."""
        found = spent(task.outcomes)
        if not found:
            return False
        ids = list(found)
        run.note(words(ids, found[ids[0]]))
        begins_again = run.state == "starting" and run.number not in self._begun_again
        self._begun_again.add(run.number)

        def then(error: ClusterError | None) -> None:
            try:
                if error is not None:
                    raise error
                again()
            except WorkbenchError as failure:
                run.finish(RunError(str(failure)))

        framework = run.plan.framework
        if begins_again:
            self._replacer.begin(self._engines, ids, framework, then)
        else:
            self._replacer.begin(self._engines, ids, framework)
        return begins_again

    def _fetch_results(self, run: Run, error: RunError | None) -> None:
        """Bring a function's return values into `run.results`, and its names off the engines."""
        try:
            living = [i for i in run.members if i in self.ids]
            taken = self._engines.call(living, TAKE, ([RESULT, ARGS],))
            run.results = [taken.get(i, {}).get(RESULT) for i in run.members]
        except ClusterError as failure:
            run.note(f"What the function returned could not be fetched: {failure.what}")
        finally:
            run.finish(error)

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
    ) -> Task:
        """Run a cell on every worker (SPMD), with a process group; returns at once.

        Args:
            framework: What its engines have imported; by default the cluster's.
            ids: Engines that run it; world size and process group stay those of all workers.
            workers: Changes the world size to the first so many engines.
        """
        self._claim()
        framework = framework or self.framework
        check_framework(framework)
        members = self._ids_for(workers or len(self.worker_ids), framework)
        targets = list(ids) if ids is not None else members
        check_members(targets, members)
        self._bring(members, framework)
        fresh = self._group[1] != (framework, *members) or not self._group[0]
        if fresh:
            self._group = (f"spmd-{next(self._generation)}", (framework, *members))
        specs = self._specs(members, None, self.lease(len(members)), self._group[0], framework)
        if fresh and set(targets) != set(members):
            # A collective on some ranks needs a group that all ranks have joined.
            self._settle_group(specs)
        asked = cell_requests(Recipe(source, first_line), specs, targets, number, autoreload)
        self._busy = task = Task(
            self._engines,
            asked,
            labels(specs, targets),
            partial(self._cell_over, framework=framework),
        )
        return task

    def _settle_group(self, specs: Specs) -> None:
        task = Task(self._engines, cell_requests(Recipe(""), specs, specs, 0, ""), {})
        task.over.wait()
        if (error := task.failure()) is not None:
            raise error

    def _cell_over(self, task: Task, framework: str) -> None:
        if found := spent(task.outcomes):
            self._replacer.begin(self._engines, list(found), framework)
        if task.group_broken:
            self._group = ("", ())

    def _claim(self) -> None:
        busy = self._busy
        if busy is None or busy.is_over:
            self._replacer.wait()
            return
        what = f"run {busy.name!r}" if isinstance(busy, Run) else "a cell"
        raise RunError(
            f"Another one is going on: {what}.",
            next_step="wait for it (run.wait()), or stop it (run.stop())"
            if isinstance(busy, Run)
            else "wait for it, or interrupt it",
        )

    def _bring(self, ids: Sequence[int], framework: str) -> None:
        """Have the framework on engines; those replaced for that leave no process group."""
        if bring(self._engines, ids, framework):
            self._group = ("", ())

    def _ids_for(self, count: int, framework: str) -> list[int]:
        check_size("The number of workers", count)
        dead = [e.id for e in self.engines if e.state == "dead"]
        if not self.ids and dead:
            raise ClusterError("All engines are dead.", next_step="%cluster restart")
        missing = count - len(self.worker_ids)
        if missing > 0:
            self.add(missing, framework)
        return self.worker_ids[:count]

    def _servers_for(self, count: int, framework: str) -> list[int]:
        """Return engines to be servers; the first run that needs them starts them."""
        missing = count - len(self._servers & set(self.ids))
        if missing > 0:
            self._servers |= set(self.add(missing, framework))
        return sorted(self._servers & set(self.ids))[:count]

    def _specs(
        self,
        ids: Sequence[int],
        plan: Plan | None,
        leases: device_pool.Leases,
        prefix: str,
        framework: str,
    ) -> Specs:
        """Return what each engine is told; of a cell without a strategy where `plan` is None."""
        hosts = {i: self._engines.engines[i].host for i in ids}
        return make_specs(
            hosts,
            len(ids) if plan is None else plan.workers,
            leases,
            store=self._engines.store() if framework in catalog.MEET_IN_STORE else None,
            framework=framework,
            prefix=prefix,
            one_engine=plan is not None and plan.entry.one_engine,
            helpers=() if plan is None else plan.helpers,
        )

    # -- events ------------------------------------------------------------------------------------

    def _message(self, engine: int, message: Message) -> None:
        run = self._runs.get(int(message.body.get("run", 0) or 0))
        if run is not None:
            run.receive(message)

    def _death(self, engine: EngineInfo) -> None:
        self._group = ("", ())
