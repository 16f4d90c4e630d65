"""Requests to engines, made from runs and cells after checks.

The checks come before a cluster is started or used. `FarFiles` are the files of one
run on machines other than this one.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..cluster import folders
from ..cluster.calls import Unread, travels
from ..cluster.hosts.settings import LOCAL, LaunchSettings
from ..cluster.processes import installed
from ..cookbook.recipe import Recipe
from ..devices import leases as device_pool
from ..devices import limits
from ..errors import ClusterError, PlanError, RunError, unknown
from ..history import disk
from ..shared import cluster_env
from ..shared.members import Member
from ..shared.plan import Plan, check_count
from ..shared.protocol import RunSpec

if TYPE_CHECKING:
    from ..cluster.engines import Engines
    from ..cluster.hosts.agents import Host, HostFiles
    from ..history.run_data import RunData
    from ..shared.messages import Outcomes

PUSH = "workbench.engine.entry:push"
PULL = "workbench.engine.entry:pull"
TAKE = "workbench.engine.entry:take"
FREE = "workbench.engine.entry:free"
ARGS, RESULT = "_wb_args", "_wb_result"
"""Names of the variables on the engines that hold a function's arguments and return value."""

Specs = Mapping[int, RunSpec]
"""The request for each engine, by engine id, in the order of the ranks."""


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
    addresses: Mapping[int, str] | None = None,
    ports: tuple[int, int] | None = None,
    rooms: Mapping[int, str] | None = None,
    cores: Mapping[int, int] | None = None,
) -> dict[int, RunSpec]:
    """Return the data about the process group for each engine.

    Args:
        hosts: Host of each engine that takes part, by engine id, in the order of the ranks. Engines
            after those of the workers are servers.
        prefix: Separates this process group from others in the store.
        group: Name of a group that can already exist and is kept; empty: no such group.
        one_engine: Whether the first engine holds all replicas.
        helpers: The name for engines that are not workers.
        remote_workers: Whether the first helpers are the workers. Then the helpers get the devices.
            The first engine only distributes work and computes on the CPU.
        reserved: Files that reserve the GPUs.
        addresses: Addresses of the engines' hosts, if there are several hosts.
        ports: The allowed ports for listening; None: any port.
        rooms: The entry of `Leases.places` whose GPUs each engine sees, if there are several.
        cores: CPU cores of each engine's host; by default this machine's.
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
            address=(addresses or {}).get(engine, ""),
            ports=ports,
            part="" if worker else helpers[position - holders],
        )
    return specs


def lease_of(spec: RunSpec, leases: device_pool.Leases) -> device_pool.Lease:
    """Return an engine's device: a worker's by its rank, remote workers before other helpers.

    For an engine with several replicas, the device of the first replica.
    """
    if spec.device == "cpu":
        return device_pool.Lease("cpu", "cpu")
    return leases.leases[spec.rank if spec.role == "worker" else spec.rank - spec.world_size]


def run_requests(
    run: RunData,
    specs: Specs,
    number: int,
    autoreload: str,
    plan: Plan | None = None,
    far: Mapping[int, Mapping[str, str]] | None = None,
    key: str = "",
) -> dict[int, dict[str, Any]]:
    """Return each engine's request for a training run.

    Args:
        plan: The current plan, if the run has fewer workers or faults than at its start.
        key: The key with which its engines authenticate to each other; by default a new key.
        far: Settings that replace these for engines on other machines: paths there.
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
        "rescue": plan.on_failure in ("continue", "heal") and plan.entry.replicated,
        "heals": plan.on_failure == "heal",
        "servers": plan.servers,
        "key": key or (secrets.token_hex(32) if plan.servers else ""),
    }
    found = {}
    for engine, spec in specs.items():
        wire = {**spec.to_wire(), **about, **(far or {}).get(engine, {})}
        found[engine] = _request(source, number, autoreload, wire, plan.traceback)
    return found


def with_original_ranks(specs: Specs, engines: Sequence[int]) -> Specs:
    """Return the specs with the original rank of each engine, from the start of the run.

    Args:
        engines: The engines of the run's ranks at its start.
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


def members_of(
    specs: Specs,
    targets: Sequence[int] | None = None,
    *,
    hosts: Mapping[int, str] | None = None,
) -> dict[int, Member]:
    """Return the member of each engine, and its name in outputs.

    Args:
        hosts: Names of the hosts of engines on other machines.
    """
    chosen = specs if targets is None else targets
    return {e: replace(_member(specs[e]), host=(hosts or {}).get(e, "")) for e in chosen}


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
    """Return the data that another kernel needs to follow this run or cell."""
    return {
        "calls": {str(engine): request["call"] for engine, request in asked.items()},
        "members": {str(engine): member.to_wire() for engine, member in members.items()},
        "run": 0,
        **about,
    }


MAX_ENGINES = 256


class BusyError(RunError):
    """A cell or a run is still running, so nothing else can begin."""


def check_travels(values: Mapping[str, object]) -> None:
    """Raise PlanError if a value cannot be sent to another process."""
    for name, value in values.items():
        if not travels(value):
            raise PlanError(
                f"{name} cannot be sent to the engines, because it cannot be pickled.",
                seen=type(value).__name__,
                allowed="data, arrays, models, functions and classes",
                next_step=f"create {name} in a %%distributed cell, which runs on the engines",
                code="WB-PLAN-099",
            )


def check_arrived(found: Mapping[int, Mapping[str, object]]) -> None:
    """Raise RunError if an engine's value cannot be copied to the notebook; it says why.

    Args:
        found: Values by name, by engine.
    """
    for engine, values in found.items():
        for name, value in values.items():
            if isinstance(value, Unread):
                what = f"{name} cannot be copied from engine {engine} to the notebook."
                raise RunError(what, **_why(value, name), code="WB-RUN-062")


def _why(unread: Unread, name: str) -> dict[str, Any]:
    parcel = unread.parcel
    parts = (
        f"put the contents of {name} into arrays or lists in a %%distributed cell, then %pull "
        "these arrays or lists"
    )
    if parcel.parts:
        parts = f"run `parts = {parcel.parts}` in a %%distributed cell, then %pull parts"
    if unread.lacks and unread.module == "__main__":
        return {
            "seen": f"the notebook does not define {unread.lacks}",
            "allowed": "objects of classes that the notebook also defines",
            "next_step": f"define {unread.lacks} in the notebook too, or {parts}",
        }
    if unread.lacks:
        return {
            "seen": f"the notebook has no {unread.module}.{unread.lacks}",
            "allowed": "objects whose class the notebook can import",
            "next_step": f"make {unread.module} importable in the notebook, or {parts}",
        }
    if parcel.remade:
        return {
            "seen": f"{parcel.kind} was defined again after {name} had been created",
            "allowed": "objects that were created from the newest definition of the class",
            "next_step": f"create {name} again, or {parts}",
        }
    return {
        "seen": unread.fault,
        "allowed": "data, arrays, models, functions and classes",
        "next_step": parts,
    }


def check_size(what: str, count: object) -> int:
    """Return the requested number of engines.

    Raises:
        PlanError: It is not a whole number of at least 1, or it is more than one notebook can
            serve.
    """
    checked = check_count(what, count)
    if checked > MAX_ENGINES:
        raise PlanError(
            f"{what} is too high for one notebook.",
            seen=checked,
            allowed=f"1 to {MAX_ENGINES}",
            code="WB-PLAN-100",
        )
    return checked


def check_limits(
    wanted: int,
    own: Sequence[int] = (),
    *,
    launch: LaunchSettings | None = None,
    elsewhere: bool = False,
) -> None:
    """Raise PlanError if this many more engines exceed the administrator's limits.

    If the request makes a port reachable beyond loopback, a message says what that exposes.

    Args:
        own: Pids of the cluster's existing engines.
        launch: The place for the new engines; None: the place of the others.
        elsewhere: Whether they are on other hosts; then no other processes are counted.
    """
    allowed = limits.load()
    if launch is not None:
        launcher = launch.launcher if launch.leaves_machine else LOCAL
        allowed.check_hosts(launch.listen, launcher)
        limits.warn(launch.listen, launcher, encrypted=launcher != "local")
    if allowed.max_engines is not None:  # counting reads every process of the machine
        others = 0 if elsewhere else folders.elsewhere(own)
        allowed.check_engines(wanted + len(own), others)


def check_members(ids: Sequence[int], members: Sequence[int]) -> None:
    """Raise PlanError unless all of `ids` are among the workers `members`."""
    strange = [i for i in ids if i not in members]
    if strange:
        raise PlanError(
            "There are no workers with these engine ids.",
            seen=", ".join(map(str, strange)),
            allowed=", ".join(map(str, members)),
            next_step="%cluster lists the workers",
            code="WB-PLAN-101",
        )


def check_framework(framework: str) -> None:
    """Raise an error if engines on this machine cannot import the framework.

    Raises:
        PlanError: The framework is unknown.
        ClusterError: The framework is not installed; the error names the command that installs it.
    """
    if framework not in catalog.FRAMEWORKS:
        raise unknown("framework", framework, catalog.FRAMEWORKS)
    if not installed(framework):
        raise ClusterError(
            f"{framework} is not installed in the notebook's environment.",
            seen=framework,
            next_step=f"pip install 'distributed-workbench[{framework}]', then restart the kernel",
            code="WB-CLUSTER-036",
        )


def to_recipe(source: str | Callable[..., Any] | Recipe, args: tuple[Any, ...] = ()) -> Recipe:
    """Make a recipe from source code or a function.

    Raises:
        PlanError: The value is neither source code nor a function, or the function cannot be sent
            to engines.
    """
    if isinstance(source, Recipe):
        return source
    if isinstance(source, str):
        return Recipe(source)
    if callable(source):
        return Recipe.from_function(source, args)
    raise PlanError(
        "A recipe must be source code or a function.",
        seen=type(source).__name__,
        code="WB-PLAN-102",
    )


BLIND = "workbench.engine.checkpoints.files:blind"


def check_folder(engines: Engines, ids: Sequence[int], folder: str) -> None:
    """Refuse a checkpoint folder that the run's machines do not all share with this machine.

    Rank 0 would wait for parts that other ranks wrote to their local disks.

    Args:
        ids: The run's workers.
        folder: The folder; empty if the run writes no checkpoints.

    Raises:
        PlanError: Names the machines. A folder that was created for the test is removed again.
    """
    far = {one.place: one for i in reversed(ids) if not (one := engines.engines[i]).is_here}
    if not folder or not far:
        return
    path, token = Path(folder), secrets.token_hex(16)
    made = [above for above in (path, *path.parents) if not above.exists()]
    file = path / f".workbench-{token[:8]}"
    why: dict[int, str] = {}
    try:
        path.mkdir(parents=True, exist_ok=True)
        file.write_text(token)
        why = dict.fromkeys((one.id for one in far.values()), "it was not checked")
        why = engines.call([one.id for one in far.values()], BLIND, (str(file), token))
    except OSError as error:
        raise PlanError(
            "Checkpoints cannot be written to this folder.",
            seen=f"{folder} ({disk.reason_of(error)})",
            next_step="use --checkpoint with another folder",
            code="WB-PLAN-189",
        ) from error
    finally:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
            for above in made if any(why.values()) else ():
                above.rmdir()
    seen = [f"{one.host or one.address}: {why[one.id]}" for one in far.values() if why[one.id]]
    if seen:
        raise PlanError(
            "At least one host of the run cannot use the notebook's checkpoint folder.",
            seen=f"{folder} ({'; '.join(sorted(seen))})",
            allowed="a folder that the notebook's machine and all hosts of the run share",
            next_step="use --checkpoint with a shared folder (often the home folder is shared); if "
            "no folder is shared, remove --checkpoint",
            code="WB-PLAN-188",
        )


class FarFiles:
    """The files of one run on other machines: start files are sent there, results are fetched.

    Engines there are not told the run's folder. Their rows and events are written here when they
    arrive. Their final weights and profiles stay below their agent's folder until the end of the
    run.
    """

    def __init__(self, engines: Engines, run: RunData, servers: Sequence[int]) -> None:
        self._engines, self._run, self._servers = engines, run, servers

    @property
    def hosts(self) -> list[Host]:
        """Hosts with agents and engines of the run, without the kernel's host."""
        found = map(self._host_of, [*self._run.members, *self._servers])
        return list(dict.fromkeys(one for one in found if one is not None))

    def _host_of(self, engine: int) -> Host | None:
        info = self._engines.engines.get(engine)
        if info is None or info.is_here:
            return None
        return self._engines.host_of(engine)

    def can_send(self, engines: Sequence[int]) -> bool:
        """Whether files can be copied to and from all of these engines."""
        return all(self._engines.engines[i].is_here or self._host_of(i) for i in engines)

    def folder_of(self, engine: int) -> str:
        """Return the folder where an engine writes files of the run."""
        host = self._host_of(engine)
        return str(self._run.folder) if host is None else f"{host.facts.folder}/{self._there}"

    @property
    def _there(self) -> str:
        return f"{cluster_env.TMP}/{self._run.folder.name}"  # as `cluster_env.run_folder` says

    def settings(self, *, again: bool = False) -> dict[int, dict[str, str]]:
        """Return the settings that replace this machine's paths for engines on other machines.

        When this returns, the start files of the run are on these machines.

        Args:
            again: Whether engines ran it before; their old files must not be fetched.

        Raises:
            RunError: The files could not be sent.
        """
        run = self._run
        ids = [*run.members, *self._servers]
        far = [i for i in ids if not self._engines.engines[i].is_here]
        run.far.ranks = {i: run.engines.index(i) for i in far if i in run.engines}
        found = {i: {"run_dir": ""} for i in far}
        files = self._engines.host_files
        if not far or files is None:
            return found
        for host in self.hosts:
            if again:
                files.remove(host, self._there, wait=True)
            mine = [i for i in far if self._host_of(i) is host]
            told = self._sent(files, host, mine)
            for engine in mine:
                found[engine] |= told
        return found

    def _sent(self, files: HostFiles, host: Host, engines: Sequence[int]) -> dict[str, str]:
        """Send the run's start files to a host; return the settings with their paths there."""
        run, told = self._run, {}
        ranks = {str(run.members.index(i)) for i in engines if i in run.members}
        try:
            if run.init_from:
                told["init_from"] = files.send(host, Path(run.init_from), _is_weights)
            if run.resume_from:
                told["resume"] = files.send(
                    host, Path(run.resume_from), lambda name: _is_for(name, ranks)
                )
                told["resume_name"] = run.resume_from
        except (ClusterError, OSError) as error:
            step = (
                f"if the disk of {host.name} is full, free some space in {host.facts.folder}. "
                "Or start the cluster with another folder: %cluster start --setup 'export "
                "TMPDIR=...'. You can also save weights and checkpoints in a shared folder that "
                f"has the same path on the notebook's machine and on {host.name}. Then Workbench "
                "does not have to send these files"
            )
            raise RunError(
                f"The run's initial weights or checkpoint could not be sent to {host.name}.",
                seen=error.seen or error.what if isinstance(error, ClusterError) else error,
                # Without a ClusterError, the notebook itself cannot read the files.
                next_step=(error.next_step or step) if isinstance(error, ClusterError) else None,
                code="WB-RUN-100",
            ) from error
        return told

    def brought(self, engine: int, path: str, into: Path) -> str:
        """Fetch a folder that an engine has written; return its path here.

        Raises:
            ClusterError, OSError: The folder could not be fetched.
        """
        host, files = self._host_of(engine), self._engines.host_files
        if host is None or files is None:
            return path
        target = into / Path(path).name
        shutil.rmtree(target, ignore_errors=True)
        files.fetch(host, path, target)
        return str(target)

    def fetch(self, outcomes: Outcomes) -> None:
        """Copy final weights and profiles into the run's folder; failures do not fail the run."""
        files, run = self._engines.host_files, self._run
        for host in self.hosts if files is not None else ():
            assert files is not None
            left = {
                Path(outcome.weights).stem  # `weights`, which can have two forms
                for engine, outcome in outcomes.items()
                if outcome.weights and self._host_of(engine) is host
            }
            try:
                if host.gone and not left:
                    continue
                where = f"{host.facts.folder}/{self._there}"
                files.fetch(host, where, run.folder, partial(_is_left, stems=left))
            except Exception as error:  # the host can be down, the disk can be full
                for stem in left:  # a part of the weights is worse than no weights
                    for path in run.folder.glob(f"{stem}.*"):
                        path.unlink(missing_ok=True)
                run.history.event(disk.unwritten(run.folder, error))
            finally:
                files.remove(host, self._there)


def _is_weights(name: str) -> bool:
    return name == disk.META or (name.startswith("weights") and name.endswith(".npz"))


def _is_left(name: str, stems: Container[str]) -> bool:
    """Whether a file is a result of a run: complete weights with these names, or a profile."""
    path = PurePosixPath(name)
    return path.parts[0] == disk.PROFILES or (len(path.parts) == 1 and path.stem in stems)


def _is_for(name: str, ranks: Container[str]) -> bool:
    """Whether one of these ranks needs a checkpoint file: a shared file, or a file of the rank."""
    first, _, rank = name.partition("/")[0].partition("-")
    return first != "rank" or rank in ranks
