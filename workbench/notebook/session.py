"""The notebook's session: its cluster, how its cells are run, shown and resumed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ..cluster.engines import NOBODY, Engines
from ..cluster.hosts.configuration import (
    LaunchArguments,
    differences,
    engines_meant,
    launch_settings,
)
from ..errors import ClusterError, PlanError, RunError
from ..execution import registry
from ..execution.allocator import default_framework, know_notebook, prewarmed
from ..execution.outcome import is_refusal
from ..execution.paused import attending
from ..execution.requests import check_framework, check_size
from ..execution.stop import ending
from ..session import checkpoints
from ..session.checkpoints import apart
from ..session.cluster import Cluster
from ..shared.plan import MOST_NAME, Plan, make_plan, plans_of
from .awake import keep_awake
from .recipes import recipes
from .run_view import INTERRUPTED, CellView, RunView, check_view

if TYPE_CHECKING:
    from ..cluster.hosts.settings import LaunchSettings
    from ..cookbook.recipe import Recipe
    from ..execution.run import Run
    from ..execution.task import Task
    from ..session.cluster import Cluster
    from ..session.queue import Queue
    from ..shared.run_request import RunRequest


@dataclass
class Session:
    """The state of one notebook: at most one cluster, prepared in advance, and the last recipe."""

    cluster: Cluster | None = None
    recipe: Recipe | None = None
    recipes: dict[str, Recipe] = field(default_factory=dict)
    prepared: Engines | None = None
    lost: str = ""  # why the cluster ended, if the user did not stop it
    _starting: threading.RLock = field(default_factory=threading.RLock, repr=False, compare=False)

    # -- the cluster -------------------------------------------------------------------------------

    def prewarm(self) -> None:
        """Begin to import the framework and to start the controller in the background."""
        framework = prewarmed()
        if framework is None or self.prepared is not None or self.cluster is not None:
            return
        self.prepared = Engines(NOBODY, framework=framework)
        self.prepared.prewarm()

    def start(self, count: int | None, **settings: Any) -> Cluster:
        """Start the notebook's cluster, or add engines to it until it has `count`.

        None means as many engines as the named hosts have room for, or 2. If another thread (the
        panel's) is starting the cluster, this call waits for it.

        Raises:
            PlanError: The settings are not valid, or a cluster with other settings is running.
            ClusterError: The engines did not start.
        """
        with self._starting:
            return self._start(count, settings)

    def _start(self, count: int | None, settings: dict[str, Any]) -> Cluster:
        if self.cluster is not None:
            self._grow(self.cluster, count or 2, settings)
            return self.cluster
        count = count or engines_meant(**_where(settings))
        launch = launch_settings(count, **_where(settings))
        settings = {name: settings[name] for name in set(settings) - _WHERE}
        prepared = self.prepared
        if prepared is not None and not _fits(prepared, launch, settings):
            threading.Thread(target=prepared.stop, daemon=True).start()
            self.prepared = prepared = None
        try:
            self.cluster = Cluster(count, engines=prepared, launch=launch, **settings)
        except BaseException:  # an interrupt as well
            if prepared is not None and not prepared.reusable:
                prepared.stop()
                self.prepared = None
            raise
        self.prepared = None
        return self._have(self.cluster)

    def attach(self, cluster: str, *, take: bool = False) -> Cluster:
        """Take over a kept cluster (see `attach.attach`); the notebook must not have another
        cluster.

        Raises:
            ClusterError: The cluster cannot be taken over, or the notebook already has a cluster.
        """
        with self._starting:
            return self._attach(cluster, take)

    def _attach(self, cluster: str, take: bool) -> Cluster:
        from ..session.attach import attach

        if self.cluster is not None:
            raise ClusterError(
                "This notebook already has a cluster.",
                seen=self.cluster.keeping.id,
                next_step="to attach here, first stop this notebook's cluster with %cluster stop. "
                "To keep this notebook's cluster, run %cluster attach in another notebook",
                code="WB-CLUSTER-043",
            )
        found = attach(cluster, take=take)
        prepared, self.prepared = self.prepared, None
        if prepared is not None:
            threading.Thread(target=prepared.stop, daemon=True).start()
        self.cluster = found
        return self._have(found)

    def _have(self, cluster: Cluster) -> Cluster:
        self.lost = ""
        cluster.keeping.on_end = lambda reason: self._lose(cluster, reason)
        return cluster

    def _lose(self, cluster: Cluster, reason: str) -> None:
        if self.cluster is cluster:
            self.cluster, self.lost = None, reason

    @staticmethod
    def _grow(cluster: Cluster, count: int, settings: dict[str, Any]) -> None:
        others = differences(cluster.launch, **_where(settings))
        if settings.get("devices", now := cluster.devices_asked) != now:
            others["devices"] = (f"--devices {settings['devices']}", now)
        for wanted, now in others.values():
            raise PlanError(
                "The notebook's cluster was started with other settings.",
                seen=wanted,
                allowed=now or "the settings of the running cluster, or no settings",
                next_step="run %cluster stop, then %cluster start with your settings",
                code="WB-PLAN-127",
            )
        if settings.get("keep") and not cluster.keeping.kept:
            raise PlanError(
                "The notebook's cluster was started without --keep.",
                next_step="run %cluster stop, then run %cluster start with --keep",
                code="WB-PLAN-128",
            )
        if framework := settings.get("framework"):
            cluster.use(framework)
        missing = count - len(cluster.worker_ids)
        if missing > 0:
            cluster.add(missing)

    def reset(self) -> None:
        """Forget the trained cells; the cluster stays."""
        self.recipe = None
        self.recipes.clear()

    def stop(self) -> None:
        """Stop the cluster and all prepared processes."""
        cluster, self.cluster = self.cluster, None
        prepared, self.prepared = self.prepared, None
        if cluster is not None:
            cluster.stop()
        if prepared is not None:
            prepared.stop()

    def need_cluster(self) -> Cluster:
        """Return the cluster.

        Raises:
            ClusterError: No cluster was started; the error names the command.
        """
        if self.cluster is None:
            gone = f"This notebook has no cluster now: {self.lost}." if self.lost else ""
            raise ClusterError(
                gone or "No cluster is running in this notebook.",
                next_step="run %cluster start 2 first",
                code="WB-CLUSTER-044",
            )
        return self.cluster

    # -- cells -------------------------------------------------------------------------------------

    def run_cell(self, line: RunRequest, recipe: Recipe, *, number: int, autoreload: str) -> Task:
        """Run a cell on the engines and show its output live; return when it is over.

        Raises:
            RunError: A rank failed, or the cell was interrupted.
        """
        self._refuse_training_flags(line)
        cluster = self.need_cluster()
        with attending(not line.background), ending(cluster):
            task = cluster.execute(
                recipe.source,
                framework=line.framework,
                ids=None if line.ranks is None else cluster.pool.of_ranks(line.ranks),
                workers=line.workers,
                number=number,
                first_line=recipe.first_line,
                autoreload=autoreload,
                traceback=line.traceback,
                viewed=True,
            )
            view = CellView(task)
            if line.background:
                view.follow()
            else:
                view.wait()
        return task

    @staticmethod
    def _refuse_training_flags(line: RunRequest) -> None:
        if given := line.training_flags:
            raise PlanError(
                "These flags need a strategy, but the line names no strategy.",
                seen=", ".join(given),
                next_step="add a strategy: %%distributed mirrored ...",
                code="WB-PLAN-129",
            )

    def plans(self, line: RunRequest, recipe: Recipe) -> list[Plan]:
        """Return the plans of a line, all validated at once: see `plan.plans_of`.

        Devices and limits are also checked for all plans, as far as they are known.

        Raises:
            PlanError: A plan cannot be run.
        """
        cluster = self.need_cluster()
        if line.ranks is not None:
            raise PlanError(
                "A strategy chooses its workers itself, so --ranks is not allowed.",
                seen=f"--ranks {','.join(map(str, line.ranks))}",
                next_step="use -n for the number of workers",
                code="WB-PLAN-130",
            )
        found = plans_of(
            line,
            recipe,
            framework=cluster.framework,
            workers=max(1, len(cluster.worker_ids)),
        )
        if line.price is not None and len({plan.workers for plan in found}) < 2:
            raise PlanError(
                "--price needs runs with different numbers of workers.",
                seen=f"--price {line.price:g}; number of workers in each run: {found[0].workers}",
                next_step="use -n 1,2,4; for earlier runs use wb.compare(...).scaling(price=...)",
                code="WB-PLAN-284",
            )
        if len(found) > 1:
            check_ahead(cluster, found)
        return apart(found)

    def train(self, line: RunRequest, recipe: Recipe, *, number: int, autoreload: str) -> list[Run]:
        """Train a recipe under the line's strategies, one after the other, with a live view each.

        Raises:
            RunError: A rank failed, the run was interrupted, or nothing was trained. If there are
                several strategies and one refuses, the others still run. If the line gives several
                values, the others still run after any failed run.
        """
        cluster = self.need_cluster()
        plans = self.plans(line, recipe)
        check_view(line.plot)
        self.recipe = replace(plans[0].recipe, framework=plans[0].framework)
        if line.background and len(plans) > 1:
            raise PlanError(
                "One cell can start only one run in the background.",
                seen=f"{len(plans)} runs",
                next_step="wb.queue().sweep(...) trains several runs in the background, one after "
                "the other",
                code="WB-PLAN-131",
            )

        def conduct(plan: Plan, begun: Callable[[Run], None]) -> Run:
            with attending(not line.background), ending(cluster):
                run = cluster.start(plan, number=number, autoreload=autoreload)
                self.recipes[run.name] = replace(plan.recipe, framework=plan.framework)
                begun(run)
                view = RunView(run, line.plot, brief=bool(line.several))
                if line.background:
                    view.follow()
                else:
                    view.wait()
            return run

        if line.background:
            return [conduct(plan, lambda run: None) for plan in plans]
        if len(plans) == 1:
            cluster.queue().check_free()
            return [conduct(plans[0], lambda run: None)]
        return cluster.queue().train(plans, conduct, partial(_passes, line))

    def recipe_named(self, name: str | None, framework: str | None = None) -> Recipe:
        """Return the recipe with this name (see `Recipes.find`); without one, the last cell's.

        Raises:
            PlanError: There is no such recipe.
        """
        if name:
            return recipes.find(name, framework or "")
        if self.recipe is None:
            raise PlanError(
                "No cell has been trained yet, so there is nothing to run again.",
                next_step="train a cell with %%distributed STRATEGY first",
                code="WB-PLAN-132",
            )
        return self.recipe


def check_ahead(cluster: Cluster, plans: Iterable[Plan]) -> None:
    """Raise an error if one of the plans cannot begin, before any engine is used.

    Raises:
        PlanError: A strategy needs other devices, or there would be too many workers.
        ClusterError: A framework is not installed.
    """
    plans = list(plans)
    for framework in dict.fromkeys(plan.framework for plan in plans):
        check_framework(framework)
    most = max(plans, key=lambda plan: plan.workers, default=None)
    if most is not None:
        check_size("The number of workers", most.workers)
    for plan in plans:
        plan.check_devices(cluster.lease(plan.workers).words)


def _passes(line: RunRequest, error: RunError) -> bool:
    """Whether the other runs of a line continue after one failed with this error."""
    if line.several:
        return error.code not in INTERRUPTED
    return len(line.strategies) > 1 and is_refusal(error)


_WHERE = frozenset(LaunchArguments.__annotations__)


def _where(settings: dict[str, Any]) -> LaunchArguments:
    """Return the settings for the place of engines."""
    return cast("LaunchArguments", {name: settings[name] for name in _WHERE & set(settings)})


def _fits(prepared: Engines, launch: LaunchSettings, settings: dict[str, Any]) -> bool:
    """Whether a cluster with these settings can use the prepared processes."""
    framework = settings.get("framework") or default_framework()
    return launch == prepared.launch and (
        framework == prepared.framework or prepared.can_fork(framework)
    )


session = Session()
recipes.cells_of = lambda: session.recipes
know_notebook(lambda: None if session.cluster is None else session.cluster.framework)


def queue(plans: Plan | Iterable[Plan] = (), *, keep_going: bool | None = None) -> Queue:
    """Add plans to the queue of the notebook's cluster and return the queue (`wb.queue`).

    Args:
        plans: Plans to add, such as `wb.runs["base"].plan`.
        keep_going: Whether the queue continues with the next plan after a plan has failed. None
            leaves this setting unchanged.

    Raises:
        ClusterError: The notebook has no cluster.
    """
    found = session.need_cluster().queue(plans, keep_going=keep_going)
    keep_awake(found.is_idle)
    return found


def resume(
    path: str | os.PathLike[str],
    *,
    workers: int | None = None,
    strategy: str | None = None,
    options: Mapping[str, Any] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int | None = None,
    on_failure: str = "",
    name: str = "",
    args: tuple[Any, ...] | None = None,
    cluster: Cluster | None = None,
    **overrides: Any,
) -> Run:
    """Run the cell or function of a checkpoint again, from the step of the checkpoint.

    The code of the run is stored with the checkpoints and runs on the engines. So resume only from
    folders that you trust. Injected faults are not repeated.

    Args:
        path: The folder `DIR` of `--checkpoint DIR` (its last checkpoint is used), or the folder
            `DIR/step-N` of one checkpoint.
        workers: Number of workers (replicas); by default as in the earlier run.
        strategy: Another strategy of the same framework.
        options: Options of the strategy; they override the options of the earlier run.
        checkpoint: Folder for new checkpoints; by default the folder of the earlier run.
        checkpoint_every: Number of steps between two checkpoints; by default as in the earlier run.
        on_failure: The value of `--on-failure`; by default as in the earlier run.
        name: Name of the run in `wb.runs`; by default as in the earlier run.
        args: The arguments of the function, if the run trains a function that has arguments.
        cluster: The cluster for the run; by default the notebook's cluster, or the only cluster.
        overrides: `epochs` or `steps`, up to which the run trains. `seed` and `batch_size` cannot
            be changed.

    Returns:
        The run, which has begun. Its step numbers continue from the step of the checkpoint.

    Raises:
        RunError: There is no checkpoint, or the checkpoint cannot be read.
        PlanError: The requested run is not possible.
    """
    one = checkpoints.at(path)
    about = checkpoints.described(Path(one.path).parent)
    before = Plan.from_wire(about["plan"])
    recipe = before.recipe
    if args is None and about.get("arguments"):
        raise PlanError(
            "The run trained a function with arguments, but the checkpoint does not store these "
            "arguments.",
            seen=recipe.origin,
            allowed=f"args=({about['arguments']} value{'s' * (about['arguments'] != 1)})",
            next_step="wb.resume(path, args=(...))",
            code="WB-PLAN-117",
        )
    same = strategy in (None, before.strategy)
    plan = make_plan(
        replace(recipe, args=args or ()),
        strategy or before.strategy,
        framework=before.framework,
        workers=workers or before.workers,
        options={**(before.options if same else {}), **(options or {})},
        overrides={**before.overrides, **overrides},
        values=before.values,
        name=name or str(about["name"])[:MOST_NAME],
        checkpoint=str(checkpoint or Path(one.path).parent),
        checkpoint_every=checkpoint_every or before.checkpoint_every,
        on_failure=on_failure or before.on_failure,
        on_straggler=before.on_straggler if same else "wait",
    )
    return (cluster or cluster_here()).start(plan, resume_from=one.path)


def cluster_here() -> Cluster:
    """Return the notebook's cluster, or the only one of this process.

    Raises:
        ClusterError: There is no cluster, or there are several.
    """
    from .session import session

    if session.cluster is not None:
        return session.cluster
    running: list[Cluster] = registry.running_clusters()
    if len(running) == 1:
        return running[0]
    raise ClusterError(
        "No cluster is running in this notebook."
        if not running
        else f"{len(running)} clusters are running, and the call does not say which one to use.",
        next_step="run %cluster start 2 first"
        if not running
        else "add the argument cluster=... to the call",
        code="WB-CLUSTER-042",
    )
