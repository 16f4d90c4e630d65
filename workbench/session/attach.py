"""`wb.attach`, `%cluster attach`: take over a kept cluster and the work that runs on it.

This notebook follows a cell or a run of another notebook through the files of its engines. Rows,
events and outputs are read from disk from the beginning. Each of them arrives exactly once, even if
no notebook was connected in the meantime.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import folders
from ..cluster.engines import Engines, Listeners
from ..devices.leases import Lease, Leases
from ..errors import ClusterError, RunError, WorkbenchError
from ..execution import registry
from ..execution.launch import RunExecution
from ..execution.registry import load
from ..execution.run import Run
from ..execution.task import OnLoss, Task, unreadable
from ..execution.workers import hangs
from ..history import disk
from ..history.disk import Tail
from ..shared import events
from ..shared.cluster_env import last_page
from ..shared.members import Member
from ..shared.messages import BadMessageError, CellOutcome, Happened, Position, Records
from ..shared.plan import Plan
from .cluster import Cluster

if TYPE_CHECKING:
    from ..cluster.calls import Call


def attach(cluster: str, *, take: bool = False) -> Cluster:
    """Take over a kept cluster whose notebook has ended.

    The engines of the cluster keep their variables. An active run is restored completely, in
    `wb.runs` and `cluster.current`.

    Args:
        cluster: The id of the cluster, as `workbench ps` lists it.
        take: Whether to take the cluster even if another notebook owns it. The other notebook then
            loses the cluster.

    Raises:
        ClusterError: The cluster does not exist, was started without `keep`, or has an owner and
            `take` is false.
    """
    found = _find(cluster)
    about = found.about
    nobody = Listeners(message=lambda engine, message: None, death=lambda engine: None)
    engines = Engines(
        nobody,
        framework=about["framework"],
        folder=found.folder,
        key=bytes.fromhex(about["key"]),
    )
    try:
        engines.take_over(about, take=take)
        return _restore(found, engines)
    except BaseException:
        engines.release("The cluster could not be taken over.")
        raise


def _find(cluster: str) -> folders.Found:
    found = folders.look(folders.folder_of(cluster))
    if found is None or not found.kept:
        ids = [one.id for one in folders.clusters() if one.kept]
        raise ClusterError(
            "There is no kept cluster with this id."
            if found is None
            else "This cluster was started without --keep, so only its own notebook can use it.",
            seen=cluster,
            allowed=", ".join(ids) or "no kept cluster exists; %cluster start 4 --keep starts one",
            next_step="in a terminal, `workbench ps` lists all clusters",
            code="WB-CLUSTER-034",
        )
    if found.owner is not None and found.owner["pid"] == os.getpid():
        raise ClusterError(
            "This notebook already has this cluster.", seen=cluster, code="WB-CLUSTER-035"
        )
    return found


def _restore(found: folders.Found, engines: Engines) -> Cluster:
    about = found.about
    cluster = Cluster(
        max(1, len(engines.ids)),
        devices=about["devices"],
        framework=about["framework"],
        engines=engines,
        keep=True,
        idle_timeout=about["idle_timeout_s"] or "never",
    )
    leases = {int(n): _leases(one) for n, one in about["leases"].items()}
    cluster.pool.restore(about["servers"], leases, about["reserved"])
    numbers = [int(number) for number, _ in about["runs"]]
    cluster.hearing.count_from(1 + max(numbers, default=0))
    cluster.keeping.since = float(about["since"])
    for number, folder in about["runs"]:
        _bring_run(cluster, int(number), Path(folder), about["task"] or {})
    task = about["task"]
    if task is not None and cluster.busy is None and not task["run"]:
        _follow_cell(cluster, found.folder, task)
    cluster.keeping.write()
    return cluster


def _leases(about: Mapping[str, Any]) -> Leases:
    leases = tuple(Lease(**one) for one in about["leases"])
    return Leases(**{**about, "leases": leases, "gpus": tuple(about["gpus"])})


def _bring_run(cluster: Cluster, number: int, folder: Path, task: Mapping[str, Any]) -> None:
    """Add a run of the cluster to `wb.runs`; follow the run if it has not ended."""
    cluster.hearing.folders[number] = folder
    if any(run.folder == folder for run in registry.runs.values()):
        return
    try:
        meta = disk.read_meta(folder)
        if task.get("run") == number and meta.get("state") not in FINISHED:
            _follow_run(cluster, folder, meta, task)
        else:
            registry.runs.add(load(folder))
    except WorkbenchError:
        del cluster.hearing.folders[number]  # it was pruned, or is damaged


def _follow_run(
    cluster: Cluster, folder: Path, meta: Mapping[str, Any], task: Mapping[str, Any]
) -> None:
    pool, plan = cluster.pool, Plan.from_wire(meta["plan"])
    run = FollowedRun(
        plan=plan,
        number=int(task["run"]),
        name=str(meta["name"]),
        engines=[int(engine) for engine in meta["ranks"]],
        devices=meta["devices"],
        folder=folder,
        began=float(meta["began"]),
    )
    run.advance("submit")
    registry.runs.add(run)
    cluster.hearing.add(run)
    cluster.take_up(run, task)
    run.begin_logs()
    servers = [int(engine) for engine in task["servers"]]
    launch = RunExecution(
        pool, run, servers, pool.lease(plan.workers), task["number"], task["autoreload"],
        cluster.hearing.renumber,
    )  # fmt: skip
    run.open_board(pool.engines.router.send, [*run.members, *servers])
    follower = Follower(pool.engines.folder(), task, pool.engines)
    spare = servers[: plan.workers] if plan.entry.remote_workers else ()
    followed = FollowedTask(
        pool.engines, follower.calls, _members(task), launch.settled, spare, launch.lose,
        launch.chains(),
    )  # fmt: skip
    run.begin(followed)
    hangs.watch(followed, pool.engines.router.questions.ask, lambda: run.held)
    follower.follow(followed, run)


def _follow_cell(cluster: Cluster, folder: Path, task: Mapping[str, Any]) -> None:
    engines = cluster.engine_set
    follower = Follower(folder, task, engines)
    followed = FollowedTask(
        engines,
        follower.calls,
        _members(task),
        lambda one: cluster.cell_over(one, task["framework"]),
    )
    cluster.take_up(followed, task)
    follower.follow(followed, None)


def _members(task: Mapping[str, Any]) -> dict[int, Member]:
    return {int(engine): Member.from_wire(one) for engine, one in task["members"].items()}


LOOK_S = 0.15
BEGIN_S = 10.0
"""How long a call that was sent to an engine may take to begin there."""
FINISHED = frozenset({"finished", "stopped", "failed"})


class FollowedRun(Run):
    """A run whose history is read from its folder; its engines' messages only control it."""

    def __init__(self, **about: Any) -> None:
        super().__init__(**about)
        self._tail = Tail(self.folder)
        self._reading = threading.Lock()

    def receive(self, message: Records | Happened | Position, engine: int = -1) -> None:
        """Process a message of this run; data that is also on disk is read from disk."""
        match message:
            case Position():
                super().receive(message, engine)
            case Happened() if (getattr(message.event, "rank", None) or 0) >= len(self.engines):
                super().receive(message, engine)

    def catch_up(self) -> None:
        """Read the data that engines have written since the last call."""
        with self._reading:
            for name, fields in self._tail.events():
                with contextlib.suppress(
                    KeyError, events.InvalidTransitionError, events.UnknownEventError
                ):
                    self._event(events.read(name, fields), fields)
            for rows in self._tail.rows():
                self.history.append(rows)
                if self.task is not None:
                    self.task.moved()

    def finish(self, error: RunError | None) -> None:
        """Settle the run after all its data was read."""
        try:
            self.catch_up()
        except Exception as trouble:  # the run is over even if some data cannot be read
            self.note(f"A part of this run could not be read: {type(trouble).__name__}: {trouble}")
        finally:
            super().finish(error)


class FollowedTask(Task):
    """A cell that another kernel started.

    Args:
        calls: The engines' calls, in the order of the ranks.
    """

    def __init__(
        self,
        engines: Engines,
        calls: Mapping[int, Call],
        members: Mapping[int, Member],
        on_done: Callable[[Task], None] = lambda task: None,
        spare: Iterable[int] = (),
        on_loss: OnLoss = lambda text, engines: None,
        chains: Iterable[Iterable[int]] = (),
    ) -> None:
        self._calls = calls
        none: dict[int, dict[str, Any]] = {i: {} for i in calls}
        super().__init__(engines, none, members, on_done, spare, on_loss, chains=chains)

    def _submit(self, engine: int, request: Mapping[str, Any]) -> Call:
        return self._calls[engine]

    def _await_rows(self) -> None:
        """Wait for nothing: the rows are read from files."""


class Follower:
    """Reads the files of one task's engines, on a separate thread, until all engines have ended.

    Args:
        folder: The folder of the cluster.
        record: The last owner's record of the task (`requests.task_record`).
    """

    def __init__(self, folder: Path, record: Mapping[str, Any], engines: Engines) -> None:
        self._folder = folder
        self._ids = {int(engine): str(call) for engine, call in record["calls"].items()}
        self.calls = {engine: engines.expect(engine) for engine in self._ids}
        self._outputs = {engine: _Outputs(folder, engine) for engine in self._ids}
        self._began = time.monotonic()

    def follow(self, task: Task, run: FollowedRun | None) -> None:
        """Start. `task` receives outputs and ends, `run` receives rows and events."""
        threading.Thread(
            target=self._main, args=(task, run), name="workbench-attached", daemon=True
        ).start()

    def _main(self, task: Task, run: FollowedRun | None) -> None:
        while not all(call.done.is_set() for call in self.calls.values()):
            ended = dict(self._ended())  # first: the text they printed before is on disk
            self._read(task, run)
            for engine, outcome in ended.items():
                self.calls[engine].finish(outcome)
            time.sleep(0 if ended else LOOK_S)

    def _read(self, task: Task, run: FollowedRun | None) -> None:
        for engine, outputs in self._outputs.items():
            if self._page(engine).get("call") == self._ids[engine]:
                for kind, content in outputs.fresh():
                    task.output(engine, kind, content)
        if run is not None:
            run.catch_up()

    def _page(self, engine: int) -> Mapping[str, Any]:
        page = last_page(self._folder / folders.DOING / f"engine-{engine}.jsonl")
        return page if isinstance(page, dict) else {}

    def _ended(self) -> Iterator[tuple[int, CellOutcome]]:
        for engine, call in self.calls.items():
            if call.done.is_set():
                continue
            page = self._page(engine)
            if page.get("call") == self._ids[engine]:
                if not page.get("busy") and isinstance(page.get("outcome"), dict):
                    yield engine, _written(page["outcome"])
            elif time.monotonic() - self._began > BEGIN_S:
                why = "the notebook ended before this engine began the cell"
                yield engine, CellOutcome(status="error", ename="RunError", evalue=why)


def _written(outcome: object) -> CellOutcome:
    """Read an outcome that an engine of any version has written."""
    try:
        return CellOutcome.from_wire(outcome, strict=False)
    except BadMessageError as error:
        return unreadable(error)


class _Outputs:
    """The text that one engine's call has printed, in segments.

    Segments in the middle can be missing.
    """

    def __init__(self, folder: Path, engine: int) -> None:
        self._folder, self._engine = folder / folders.DOING, engine
        self._segment, self._at = 0, 0

    def fresh(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the segments added since the last call, as kind and content."""
        paths = sorted(self._folder.glob(f"out-{self._engine}-*.jsonl"))
        for path in paths:
            number = int(path.stem.rpartition("-")[2])
            if number < self._segment:
                continue
            if number > self._segment:
                if number > self._segment + 1:
                    text = "[... some output was deleted before this notebook could read it ...]\n"
                    yield "stream", {"name": "stderr", "text": text}
                self._segment, self._at = number, 0
            with contextlib.suppress(OSError), path.open("rb") as file:
                file.seek(self._at)
                packed = file.read()
                whole = packed.rfind(b"\n") + 1
                self._at += whole
                for line in packed[:whole].splitlines():
                    with contextlib.suppress(ValueError, TypeError):
                        kind, content = json.loads(line)
                        yield str(kind), content
