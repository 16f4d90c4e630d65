"""What engines are asked to run: requests made from runs and cells, and checked first.

The checks come before a cluster is started or asked for anything.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..cluster import folders
from ..cluster.calls import Unread, travels
from ..cluster.processes import installed
from ..cookbook.recipe import Recipe
from ..devices import leases as device_pool
from ..devices import limits
from ..errors import ClusterError, PlanError, RunError, unknown
from ..shared.members import Member
from ..shared.plan import Plan, check_count
from ..shared.protocol import RunSpec

if TYPE_CHECKING:
    from ..history.run_data import RunData

PUSH = "workbench.engine.entry:push"
PULL = "workbench.engine.entry:pull"
TAKE = "workbench.engine.entry:take"
FREE = "workbench.engine.entry:free"
ARGS, RESULT = "_wb_args", "_wb_result"
"""Where a function's arguments and its return value are kept on the engines meanwhile."""

Specs = Mapping[int, RunSpec]
"""What each engine is told, by engine id, in the order of the ranks."""


def make_specs(
    hosts: Mapping[int, str],
    workers: int,
    leases: device_pool.Leases,
    *,
    store: tuple[str, int] | None,
    framework: str,
    prefix: str,
    group: str = "",
    one_engine: bool = False,
    helpers: Sequence[str] = (),
    remote_workers: bool = False,
    reserved: Sequence[str] = (),
    rooms: Mapping[int, str] | None = None,
    cores: Mapping[int, int] | None = None,
) -> dict[int, RunSpec]:
    """Return what each engine is told about its part.

    Args:
        hosts: Host of each engine that takes part, by engine id, in the order of the ranks; those
            beyond the workers' engines are servers.
        prefix: Keeps this process group apart from others in the store.
        group: Name of one that may be there already, and stays; empty: there is none.
        one_engine: Whether the first engine holds all replicas.
        helpers: What the engines beyond the workers' are called.
        remote_workers: Whether the first helpers are the workers: theirs are the devices, and the
            first engine, which only hands out work, computes on the CPU.
        reserved: Files that reserve the GPUs.
        rooms: Which of `Leases.places` each engine sees the GPUs of, where there are several.
        cores: Of each engine's host; by default this machine's.
    """
    own_cores = device_pool.cpu_count()
    on_host = Counter(hosts.values())
    each = workers if one_engine else 1  # replicas per engine
    holders = workers // each
    engines = list(hosts)
    places = [*(engine for engine in engines[:holders] for _ in range(each)), *engines[holders:]]
    specs = {}
    for position, engine in enumerate(hosts):
        worker = position < holders
        rank = position * each if worker else workers + position - holders
        first = position - holders  # among the helpers
        here = leases.leases[rank : rank + each] if worker else ()  # of its replicas
        if remote_workers:
            mine = leases.leases[first : first + 1] if 0 <= first < workers else ()
        else:
            mine = here
        all_cores = (cores or {}).get(engine) or own_cores
        specs[engine] = RunSpec(
            mode="spmd",
            rank=rank,
            world_size=workers,
            ranks=tuple(places),
            device=mine[0].device if mine else "cpu",
            role="worker" if worker else "server",
            threads=device_pool.threads_per_worker(on_host[hosts[engine]], all_cores),
            cores=all_cores,
            framework=framework,
            store=store,
            prefix=prefix,
            group=group,
            backend=leases.backend,
            hosts=tuple(hosts[one] for one in places),
            replicas=each if worker else 1,
            devices=tuple(lease.device for lease in here or mine),
            labels=tuple(lease.label for lease in here or mine if lease.gpu),
            gpus=leases.seen_by(mine[0] if mine else None, (rooms or {}).get(engine, "")),
            accelerator=leases.kind,
            sharers=mine[0].sharers if mine else 1,
            reserved=tuple(reserved),
            part="" if worker else helpers[position - holders],
        )
    return specs


def lease_of(spec: RunSpec, leases: device_pool.Leases) -> device_pool.Lease:
    """Return what an engine was given: a worker by its rank, remote workers before other helpers.

    Of one that holds several replicas, the first one's.
    """
    if spec.device == "cpu":
        return device_pool.Lease("cpu", "cpu")
    return leases.leases[spec.rank if spec.role == "worker" else spec.rank - spec.world_size]


def run_requests(
    run: RunData, specs: Specs, number: int, autoreload: str, plan: Plan | None = None
) -> dict[int, dict[str, Any]]:
    """Return each engine's request for a training run.

    Args:
        plan: Under which it runs now, where it has fewer workers or faults than it began with.
    """
    plan = plan or run.plan
    recipe = plan.recipe
    source = recipe.numbered
    if recipe.function:
        source += f"\n{RESULT} = {recipe.call(f'*{ARGS}')}\n"
    about = plan.settings_to_wire() | {
        "mode": "run",
        "run": run.number,
        "run_id": run.folder.name,
        "run_dir": str(run.folder),
        "name": run.name,
        "strategy": plan.strategy,
        "framework": plan.framework,
        "options": plan.options,
        "overrides": plan.overrides,
        "init_from": run.init_from,
        "resume": run.resume_from,
        "rows_from": run.rows_from,
        "rescue": plan.on_failure == "continue" and plan.entry.replicated,
        "servers": plan.servers,
        "key": secrets.token_hex(32) if plan.servers else "",
    }
    found = {}
    for engine, spec in specs.items():
        wire = {**spec.to_wire(), **about}
        found[engine] = _request(source, number, autoreload, wire, plan.traceback)
    return found


def with_original_ranks(specs: Specs, engines: Sequence[int]) -> Specs:
    """Return the specs with the rank each engine is known by: the one it began the run with.

    Args:
        engines: Of the run's ranks, as it began.
    """
    ranks = {engine: rank for rank, engine in reversed([*enumerate(engines)])}
    return {i: replace(spec, original_rank=ranks.get(i, -1)) for i, spec in specs.items()}


def cell_requests(
    recipe: Recipe,
    specs: Specs,
    targets: Iterable[int],
    number: int,
    autoreload: str,
    traceback: str = "short",
) -> dict[int, dict[str, Any]]:
    """Return the requests for a cell without a strategy, for the engines that run it."""
    return {
        engine: _request(recipe.numbered, number, autoreload, specs[engine].to_wire(), traceback)
        for engine in targets
    }


def members_of(specs: Specs, targets: Sequence[int] | None = None) -> dict[int, Member]:
    """Return which part each engine takes, and how it is called in outputs."""
    chosen = specs if targets is None else targets
    return {e: _member(specs[e]) for e in chosen}


def _member(spec: RunSpec) -> Member:
    if spec.role == "server":
        return Member.helper(spec.part)
    if spec.replicas > 1:
        return Member.of_ranks(spec.held[0], spec.held[-1], spec.device)
    return Member.of_ranks(spec.row_rank, device=spec.device)


def _request(
    source: str, number: int, autoreload: str, spec: dict[str, Any], traceback: str
) -> dict[str, Any]:
    name = spec.get("name")
    return {
        "source": source,
        "number": number,
        "autoreload": autoreload,
        "traceback": traceback,
        "spec": spec,
        "call": secrets.token_hex(6),
        "what": f"run {name}" if name else f"cell {number}",
    }


def task_record(
    asked: Mapping[int, Mapping[str, Any]], members: Mapping[int, Member], **about: Any
) -> dict[str, Any]:
    """Return what another kernel must know to follow what was begun here."""
    return {
        "calls": {str(engine): request["call"] for engine, request in asked.items()},
        "members": {str(engine): member.to_wire() for engine, member in members.items()},
        "run": 0,
        **about,
    }


MAX_ENGINES = 256


class BusyError(RunError):
    """A cell or a run goes on, so nothing else can begin."""


def check_travels(values: Mapping[str, object]) -> None:
    """Raise PlanError where a value cannot be sent to another process."""
    for name, value in values.items():
        if not travels(value):
            raise PlanError(
                f"{name} cannot be sent to the engines: it cannot be pickled.",
                seen=type(value).__name__,
                allowed="data, arrays, models, functions and classes",
                next_step="make it there: put the line that makes it under %%distributed",
                code="WB-PLAN-099",
            )


def check_arrived(found: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RunError where an engine's value cannot be had in the notebook: which, why, what now.

    Args:
        found: Values by name, by engine.
    """
    for engine, values in found.items():
        for name, value in values.items():
            if isinstance(value, Unread):
                what = f"{name} cannot be brought from engine {engine} to the notebook."
                raise RunError(what, **_why(value, name), code="WB-RUN-062")


def _why(unread: Unread, name: str) -> dict[str, Any]:
    parcel = unread.parcel
    parts = "pull what it holds, as numbers, arrays and lists"
    if parcel.parts:
        parts = f"pull what it holds: parts = {parcel.parts} on the engines, then %pull parts"
    if unread.lacks and unread.module == "__main__":
        return {
            "seen": f"the notebook has no {unread.lacks}",
            "allowed": "objects of classes that the notebook has too",
            "next_step": f"define {unread.lacks} in the notebook too, or {parts}",
        }
    if unread.lacks:
        return {
            "seen": f"the notebook has no {unread.module}.{unread.lacks}",
            "allowed": "objects of modules that the notebook can import too",
            "next_step": f"make {unread.module} importable in the notebook, or {parts}",
        }
    if parcel.remade:
        return {
            "seen": f"{parcel.kind} was defined again after {name} was made",
            "allowed": "objects of the class as it is now",
            "next_step": f"make {name} again, or {parts}",
        }
    return {
        "seen": unread.fault,
        "allowed": "data, arrays, models, functions and classes",
        "next_step": parts,
    }


def check_size(what: str, count: object) -> int:
    """Return how many engines are wanted.

    Raises:
        PlanError: It is no whole number of at least 1, or more than one notebook can serve.
    """
    checked = check_count(what, count)
    if checked > MAX_ENGINES:
        raise PlanError(
            f"{what}: that is more workers than one notebook can serve.",
            seen=checked,
            allowed=f"1 to {MAX_ENGINES}",
            code="WB-PLAN-100",
        )
    return checked


def check_limits(
    wanted: int, own: Sequence[int] = (), *, hosts: str = "", elsewhere: bool = False
) -> None:
    """Raise PlanError where so many more engines are beyond the administrator's limits.

    Who asks to listen beyond loopback, and may, is told what that exposes.

    Args:
        own: Pids of the engines that the cluster has already.
        hosts: What is to be listened on beyond loopback.
        elsewhere: Whether they are on other hosts: what else runs on this machine, or there, is
            not counted then.
    """
    allowed = limits.load()
    allowed.check_hosts(hosts)
    limits.warn(hosts)
    if allowed.max_engines is not None:  # the census looks at every process of the machine
        others = 0 if elsewhere else folders.elsewhere(own)
        allowed.check_engines(wanted + len(own), others)


def check_members(ids: Sequence[int], members: Sequence[int]) -> None:
    """Raise PlanError unless all of `ids` are among the workers `members`."""
    strange = [i for i in ids if i not in members]
    if strange:
        raise PlanError(
            "There is no such engine among the workers.",
            seen=", ".join(map(str, strange)),
            allowed=", ".join(map(str, members)),
            next_step="%cluster lists them",
            code="WB-PLAN-101",
        )


def check_framework(framework: str) -> None:
    """Raise unless engines on this machine can import the framework.

    Raises:
        PlanError: It is unknown.
        ClusterError: It is not installed; names what installs it.
    """
    if framework not in catalog.FRAMEWORKS:
        raise unknown("framework", framework, catalog.FRAMEWORKS)
    if not installed(framework):
        raise ClusterError(
            f"{framework} is not installed here.",
            seen=framework,
            next_step=f"pip install 'distributed-workbench[{framework}]', then restart the kernel",
            code="WB-CLUSTER-036",
        )


def to_recipe(source: str | Callable[..., Any] | Recipe, args: tuple[Any, ...] = ()) -> Recipe:
    """Make a recipe of source or a function.

    Raises:
        PlanError: It is neither, or the function cannot be sent to engines.
    """
    if isinstance(source, Recipe):
        return source
    if isinstance(source, str):
        return Recipe(source)
    if callable(source):
        return Recipe.from_function(source, args)
    raise PlanError(
        "A recipe is source code or a function.", seen=type(source).__name__, code="WB-PLAN-102"
    )
