"""`wb.attach`, `%cluster attach`: take over a kept cluster, with what runs on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..cluster import kept
from ..cluster.devices import Lease, Leases
from ..cluster.engines import Engines, Listeners
from ..errors import ClusterError, WorkbenchError
from ..history import disk
from ..members import Member
from ..plan import Plan
from . import hangs, registry
from .cluster import Cluster
from .following import FINISHED, FollowedRun, FollowedTask, Follower
from .launch import Launch
from .load import load


def attach(cluster: str, *, take: bool = False) -> Cluster:
    """Take over a kept cluster whose notebook is gone.

    Its engines keep their variables; a run that goes on is restored whole, as `wb.runs` and
    `cluster.current`.

    Args:
        cluster: Its id, as `workbench ps` lists it.
        take: Also when another notebook has it, which then no longer does.

    Raises:
        ClusterError: There is no such cluster, it was not kept, or it has an owner.
    """
    found = _find(cluster)
    about = found.about
    nobody = Listeners(message=lambda engine, message: None, death=lambda engine: None)
    engines = Engines(
        nobody,
        framework=about["framework"],
        launcher=about["launcher"],
        folder=found.folder,
        key=bytes.fromhex(about["key"]),
    )
    try:
        engines.take_over(about, take=take)
        return _restore(found, engines)
    except BaseException:
        engines.release("It could not be taken over.")
        raise


def _find(cluster: str) -> kept.Found:
    found = kept.look(kept.folder_of(cluster))
    if found is None or not found.kept:
        ids = [one.id for one in kept.clusters() if one.kept]
        raise ClusterError(
            "There is no such kept cluster."
            if found is None
            else "That cluster ends with its notebook: it was started without --keep.",
            seen=cluster,
            allowed=", ".join(ids) or "no cluster is kept here; %cluster start 4 --keep starts one",
            next_step="workbench ps lists all clusters",
            code="WB-CLUSTER-034",
        )
    if found.owner is not None and found.owner["pid"] == os.getpid():
        raise ClusterError(
            "This notebook has that cluster already.", seen=cluster, code="WB-CLUSTER-035"
        )
    return found


def _restore(found: kept.Found, engines: Engines) -> Cluster:
    about = found.about
    cluster = Cluster(
        max(1, len(engines.ids)),
        devices=about["devices"],
        launcher=about["launcher"],
        framework=about["framework"],
        engines=engines,
        keep=True,
        idle_timeout=about["idle_timeout_s"] or "never",
    )
    leases = {int(n): _leases(one) for n, one in about["leases"].items()}
    cluster.pool.restore(about["servers"], leases)
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
    return Leases(leases, about["backend"], about["warning"])


def _bring_run(cluster: Cluster, number: int, folder: Path, task: Mapping[str, Any]) -> None:
    """Have a run of the cluster in `wb.runs`; the one that was not settled is followed."""
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
    )
    run.began = float(meta["began"])
    run.advance("submit")
    registry.runs.add(run)
    cluster.hearing.add(run)
    cluster.take_up(run, task)
    run.begin_logs()
    servers = [int(engine) for engine in task["servers"]]
    launch = Launch(
        pool, run, servers, pool.lease(plan.workers), task["number"], task["autoreload"],
        cluster.hearing.renumber,
    )  # fmt: skip
    run.open_board(pool.engines.router.send, [*run.members, *servers])
    follower = Follower(pool.engines.folder(), task, pool.engines)
    spare = servers[: plan.workers] if plan.entry.remote_workers else ()
    run.task = FollowedTask(
        pool.engines, follower.calls, _members(task), launch.settled, spare, run.note
    )
    hangs.watch(run.task, pool.engines.router.questions.ask, lambda: run.held)
    follower.follow(run.task, run)


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
