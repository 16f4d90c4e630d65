"""`wb.Cluster`: engines, the runs on them, and the cells without a strategy."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..cluster import devices as device_pool
from ..cluster.engines import EngineInfo, Engines, Listeners
from ..errors import ClusterError, PlanError, RunError
from ..faults import parse_fault
from ..history import disk
from ..plan import Plan, check_count, make_plan
from ..protocol import Message, RunSpec
from ..recipe import Recipe
from . import registry
from .run import Run, outcome_error
from .task import Task

MAX_ENGINES = 256


class Cluster:
    """A controller and engines of this notebook; also a context manager.

    Args:
        workers: Engines to start with.
        devices: `auto` (the least used GPUs, CPU where there are none), `cpu`, `cuda`, or GPU
            numbers as `0,1`.
        launcher: `local`, or one of ipyparallel's launchers by name.
        framework: What engines have imported when they start.

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
        framework: str = "torch",
        engines: Engines | None = None,
        progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        count = check_count("The number of engines", workers)
        if count > MAX_ENGINES:
            raise PlanError(
                "That is more engines than one notebook can serve.",
                seen=count,
                allowed=f"1 to {MAX_ENGINES}",
            )
        self.devices = device_pool.parse_devices(devices)
        self._leases: dict[int, device_pool.Leases] = {}
        self.framework = framework
        self._runs: dict[int, Run] = {}
        self._number = itertools.count(1)
        self._generation = itertools.count(1)
        self._group: tuple[str, tuple[int, ...]] = ("", ())
        self._lock = threading.Lock()
        self._busy: Run | Task | None = None
        self._engines = engines or Engines(
            self.listeners(), framework=framework, launcher=launcher, hosts=hosts
        )
        if engines is not None:
            engines.listen(self.listeners())
        self._engines.start(count, progress)
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

    def lease(self, workers: int) -> device_pool.Leases:
        """Return which device each of so many workers gets; the same answer every time.

        A worker's variables live on its device from one cell to the next, so ranks keep theirs
        although `auto` would see other memory in use by then.
        """
        if workers not in self._leases:
            self._leases[workers] = device_pool.lease(self.devices, workers)
        return self._leases[workers]

    def add(self, count: int) -> list[int]:
        """Start more engines; return their ids."""
        return self._engines.start(check_count("The number of engines", count))

    def restart(self, ids: Iterable[int] | None = None) -> list[int]:
        """Replace engines (all, or those named) by fresh ones under the same ids."""
        self._group = ("", ())
        return self._engines.restart(list(ids) if ids is not None else [e.id for e in self.engines])

    def free(self) -> dict[int, int]:
        """Drop the cells' variables on all engines; return how many names each dropped."""
        return self._engines.call(self.ids, "workbench.engine.entry:free")

    def logs(self, engine: int) -> str:
        """The last lines of an engine's log."""
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
        from IPython.display import display

        display(self.status())

    # -- variables --------------------------------------------------------------------------------

    def push(self, values: Mapping[str, Any], ids: Sequence[int] | None = None) -> None:
        """Set variables on engines (all, or those named)."""
        self._engines.call(ids or self.ids, "workbench.engine.entry:push", (dict(values),))

    def pull(
        self, names: Sequence[str], ids: Sequence[int] | None = None
    ) -> dict[int, dict[str, Any]]:
        """Return variables of engines, by engine id."""
        return self._engines.call(ids or self.ids, "workbench.engine.entry:pull", (list(names),))

    # -- cells and runs -----------------------------------------------------------------------------

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
        number: int = 1,
        autoreload: str = "",
        **overrides: Any,
    ) -> Run:
        """Train a recipe under a strategy; returns at once.

        Args:
            source: Source of a cell, or a function whose arguments are `args`.
            workers: Replicas; by default as many as there are engines. More than there are
                engines adds engines.
            overrides: `epochs`, `steps`, `batch_size`, `seed`.

        Raises:
            PlanError: What was asked for cannot be run; no engine was touched.
            RunError: Another run is going on.
        """
        recipe = source if isinstance(source, Recipe) else to_recipe(source, args)
        plan = make_plan(
            recipe,
            strategy,
            framework=framework or self.framework,
            workers=workers or max(1, len(self.ids)),
            options=options,
            overrides=overrides,
            faults=tuple(parse_fault(text) for text in inject),
            name=name,
        )
        return self.start(plan, number=number, autoreload=autoreload)

    def start(self, plan: Plan, *, number: int = 1, autoreload: str = "") -> Run:
        """Start a validated plan; returns at once (see `run`)."""
        self._claim()
        ids = self._ids_for(plan.workers + plan.servers)
        leases = self.lease(plan.workers)
        labels = [lease.label for lease in leases.leases]
        run = registry.new_run(plan, number=next(self._number), engines=ids, devices=labels)
        if leases.warning:
            run.note(leases.warning)
        with self._lock:
            self._runs[run.number] = run
        disk.write_meta(run.folder, run.meta())
        run.advance("submit")
        recipe = plan.recipe
        if recipe.function:
            self.push({"_wb_args": recipe.args}, ids)
        source = "\n" * (recipe.first_line - 1) + recipe.source
        if recipe.function:
            source += f"\n_wb_result = {recipe.function}(*_wb_args)\n"
        specs = self._specs(
            ids, plan.workers, leases, prefix=f"run-{run.number}-{next(self._generation)}"
        )
        requests = {
            engine: {
                "source": source,
                "number": number,
                "autoreload": autoreload,
                "spec": {
                    **spec.to_wire(),
                    "mode": "run",
                    "run": run.number,
                    "run_id": run.folder.name,
                    "run_dir": str(run.folder),
                    "name": run.name,
                    "strategy": plan.strategy,
                    "framework": plan.framework,
                    "options": plan.options,
                    "overrides": plan.overrides,
                    "faults": [fault.text for fault in plan.faults],
                },
            }
            for engine, spec in zip(ids, specs, strict=True)
        }
        names = {e: f"rank {s.rank} · {s.device}" for e, s in zip(ids, specs, strict=True)}
        self._group = ("", ())
        self._busy = run
        run.task = Task(self._engines, requests, names, lambda task: self._run_over(run, task))
        return run

    def _run_over(self, run: Run, task: Task) -> None:
        error = task.failure()
        if run.state == "stopping" and error is not None and task.first_failed is None:
            error = None  # an agreed stop that needed an interrupt is still a stop
        error = error or outcome_error(run, task.outcomes)
        if run.plan.recipe.function and error is None:
            pulled = self.pull(["_wb_result"], run.engines)
            run.results = [pulled[i].get("_wb_result") for i in run.engines]
        self._busy = None
        run.finish(error)

    def execute(
        self,
        source: str,
        *,
        ids: Sequence[int] | None = None,
        workers: int | None = None,
        number: int = 1,
        first_line: int = 1,
        autoreload: str = "",
    ) -> Task:
        """Run a cell on every worker (SPMD), with a process group; returns at once.

        Args:
            ids: Engines that run it; world size and process group stay those of all workers.
            workers: Changes the world size to the first so many engines.
        """
        self._claim()
        members = self._ids_for(workers or len(self.ids))
        targets = list(ids) if ids is not None else members
        unknown = [i for i in targets if i not in members]
        if unknown:
            raise PlanError("There is no such engine.", seen=unknown, allowed=f"{members}")
        leases = self.lease(len(members))
        fresh = self._group[1] != tuple(members) or not self._group[0]
        if fresh:
            self._group = (f"spmd-{next(self._generation)}", tuple(members))
        specs = dict(
            zip(members, self._specs(members, len(members), leases, self._group[0]), strict=True)
        )
        partial = set(targets) != set(members)
        if fresh and partial:
            # A collective on some ranks needs a group that all ranks have joined.
            self._settle_group(specs)
        requests = {
            engine: {
                "source": "\n" * (first_line - 1) + source,
                "number": number,
                "autoreload": autoreload,
                "spec": specs[engine].to_wire(),
            }
            for engine in targets
        }
        labels = {e: f"rank {specs[e].rank} · {specs[e].device}" for e in targets}
        task = Task(self._engines, requests, labels, self._cell_over)
        if not task.over.is_set():
            self._busy = task
        return task

    def _settle_group(self, specs: Mapping[int, RunSpec]) -> None:
        requests = {e: {"source": "", "number": 0, "spec": s.to_wire()} for e, s in specs.items()}
        task = Task(self._engines, requests, {})
        task.over.wait()
        if (error := task.failure()) is not None:
            raise error

    def _cell_over(self, task: Task) -> None:
        if task.group_broken:
            self._group = ("", ())
        self._busy = None

    def _claim(self) -> None:
        busy = self._busy
        if busy is None:
            return
        what = f"run {busy.name!r}" if isinstance(busy, Run) else "a cell"
        raise RunError(
            f"Another one is going on: {what}.",
            next_step="wait for it (run.wait()), or stop it (run.stop())"
            if isinstance(busy, Run)
            else "wait for it, or interrupt it",
        )

    def _ids_for(self, count: int) -> list[int]:
        if count > MAX_ENGINES:
            raise PlanError(
                "That is more workers than one notebook can serve.",
                seen=count,
                allowed=f"1 to {MAX_ENGINES}",
            )
        dead = [e.id for e in self.engines if e.state == "dead"]
        if not self.ids and dead:
            raise ClusterError("All engines are dead.", next_step="%cluster restart")
        missing = count - len(self.ids)
        if missing > 0:
            self.add(missing)
        return self.ids[:count]

    def _specs(
        self, ids: Sequence[int], workers: int, leases: device_pool.Leases, prefix: str
    ) -> list[RunSpec]:
        threads = device_pool.threads_per_worker(workers)
        hosts = [self._engines.engines[i].host for i in ids]
        return [
            RunSpec(
                mode="spmd",
                rank=rank,
                world_size=workers,
                ranks=tuple(ids),
                device=leases.leases[rank].device,
                threads=threads,
                framework=self.framework,
                store=self._engines.store(),
                prefix=prefix,
                backend=leases.backend,
                hosts=tuple(hosts),
            )
            for rank in range(len(ids))
        ]

    # -- events -------------------------------------------------------------------------------------

    def _message(self, engine: int, message: Message) -> None:
        run = self._runs.get(int(message.body.get("run", 0) or 0))
        if run is not None:
            run.receive(message)

    def _death(self, engine: EngineInfo) -> None:
        self._group = ("", ())


def to_recipe(source: str | Callable[..., Any], args: tuple[Any, ...] = ()) -> Recipe:
    """Make a recipe of source or a function."""
    if isinstance(source, str):
        return Recipe(source)
    if callable(source):
        return Recipe.from_function(source, args)
    raise PlanError("A recipe is source code or a function.", seen=type(source).__name__)
