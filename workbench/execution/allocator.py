"""Which engines and devices a cell or a run gets, and the process group among them.

The engines have the framework that the run needs. If an engine can no longer use its framework,
it reports this in the outcome of a cell (`errors.EngineSpentError`), and a new engine replaces it.
If nothing was trained yet, the run starts again on the new engines. Otherwise the next run uses
them.
"""

from __future__ import annotations

import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from .. import catalog
from ..cluster.hosts.gpus import HostDevices
from ..cluster.processes import installed
from ..cookbook.recipe import Recipe
from ..devices import leases as device_pool
from ..errors import ClusterError, PlanError
from ..shared.members import ranges
from ..shared.plan import Plan, check_count
from .outcome import how_ended
from .requests import Specs, cell_requests, check_limits, check_size, lease_of, make_specs
from .task import Task

if TYPE_CHECKING:
    from ..cluster.engines import EngineInfo, Engines
    from ..cluster.hosts.agents import Host
    from ..cluster.hosts.places import HostedEngines
    from ..shared.messages import Outcomes

NO_GROUP: tuple[str, tuple[str | int, ...]] = ("", ())


class EngineAllocator:
    """Gives the engines of a cluster to cells and runs.

    Args:
        devices: What `parse_devices` takes.
        hosted: Whether agents start the engines on other hosts; then devices are those of each
            host.

    Attributes:
        engines: The processes behind it.
        replacer: Replaces engines in the background.
        given: The device that each engine last got, by id.
        servers: Engines started as servers; workers do not spread to them.
        most_workers: The largest number of living workers so far.
    """

    def __init__(self, devices: str, framework: str = "", *, hosted: bool = False) -> None:
        self.devices_asked = devices
        self.engines: Engines
        self.replacer = Replacer()
        notebook = os.path.basename(os.environ.get("JPY_SESSION_NAME", ""))
        self._far = HostDevices(devices, framework, self._all_hosts) if hosted else None
        self._near = device_pool.DevicePool(devices, framework, notebook)
        self.given: dict[int, device_pool.Lease] = {}
        self.most_workers = 0
        self._group = NO_GROUP  # prefix; framework, engines
        self.servers: set[int] = set()
        self._generation = itertools.count(1)
        self.on_task: Callable[[Mapping[str, Any] | None], None] = lambda task: None
        """Called with the task that engines will run; with None when the task is settled."""

    @property
    def devices(self) -> device_pool.DevicePool | HostDevices:
        """The GPUs of the engines."""
        return self._far or self._near

    @property
    def hosted(self) -> HostedEngines | None:
        """The object that knows the engines' hosts, if agents have started the engines."""
        return self.engines.hosted if self._far is not None else None

    def _all_hosts(self) -> list[Host]:
        hosted = self.hosted
        return [] if hosted is None else sorted(hosted.agents.hosts, key=lambda one: one.place)

    def restore(
        self,
        servers: Iterable[int],
        leases: Mapping[int, device_pool.Leases],
        reserved: Mapping[str, str],
    ) -> None:
        """Take over the state of another kernel's pool of the same engines."""
        self.servers = set(servers)
        self.devices.restore(leases, reserved, self._pids())
        # Names of process groups that are unique in the store.
        self._generation = itertools.count(time.time_ns())

    @property
    def ids(self) -> list[int]:
        """Ids of the living engines."""
        return self.engines.ids

    @property
    def all(self) -> list[EngineInfo]:
        """Every engine, dead ones too, by id."""
        return [self.engines.engines[i] for i in sorted(self.engines.engines)]

    @property
    def worker_ids(self) -> list[int]:
        """Ids of the living engines that run cells; the others were started as servers.

        In the order of the ranks: host by host, so that neighbouring ranks share a host.
        """
        return self._by_host([engine for engine in self.ids if engine not in self.servers])

    def _by_host(self, ids: Iterable[int]) -> list[int]:
        if self._far is None:
            return sorted(ids)
        order: dict[str, int] = {}
        for info in self.all:
            order.setdefault(info.place, len(order))
        known = self.engines.engines
        return sorted(ids, key=lambda one: (order[known[one].place], one))

    def of_ranks(self, ranks: Sequence[int] | None = None) -> list[int]:
        """Return the engines that the user names by rank, engines without a rank by id; None: all.

        Ranks equal ids, unless ranks are assigned host by host and engines were added later.
        """
        if self._far is None:
            return self.ids if ranks is None else list(ranks)
        workers = self.worker_ids
        if ranks is None:
            return [*workers, *(one for one in self.ids if one not in workers)]
        return [workers[one] if one < len(workers) else one for one in ranks]

    @property
    def lost_workers(self) -> list[int]:
        """Ids of dead engines that ran cells, as long as fewer workers live than before."""
        if len(self.worker_ids) >= self.most_workers:
            return []
        return [e.id for e in self.all if e.state == "dead" and e.id not in self.servers]

    def lease(self, workers: int, plan: Plan | None = None) -> device_pool.Leases:
        """Return which device each of this many workers gets, or would get.

        A worker's variables stay on its device from one cell to the next. So ranks keep their
        devices, even if `auto` would now choose other devices.

        Args:
            plan: The run's plan; an engine can hold several replicas, or be a helper.
        """
        if self._far is not None:
            return self._far.lease(self._rooms(workers, plan))
        return self._near.lease(workers)

    def hold(self, workers: int, plan: Plan | None = None) -> tuple[device_pool.Leases, list[str]]:
        """Reserve the GPUs of this many workers; return them and the notes for the user.

        Raises:
            ClusterError: Other processes have taken the GPUs that the engines are bound to.
            PlanError: Two workers would share a GPU, which this run does not allow.
        """
        if self._far is not None:
            return self._far.hold(self._rooms(workers, plan), self._by_room(self._pids()))
        return self._near.hold(workers, self._pids(), max(workers, len(self.worker_ids)))

    def fitted(
        self, leases: device_pool.Leases, ids: Sequence[int], plan: Plan
    ) -> device_pool.Leases:
        """Return the devices of a run; its engines can have moved to other hosts meanwhile.

        Args:
            ids: Its engines by rank, then its other engines.
        """
        if self._far is None:
            return leases
        rooms = self._rooms_of(ids, plan.workers, plan)
        if rooms == [lease.place for lease in leases.leases]:
            return leases
        return self._far.hold(rooms, self._by_room(self._pids()))[0]

    def words(self) -> list[str]:
        """Return the notes on devices and hosts below a table of the workers."""
        count = max(1, len(self.worker_ids))
        if self._far is None:
            return self._near.words(count)
        said = [*(self.hosted.words if self.hosted else ()), *self._far.words(self._rooms(count))]
        return list(dict.fromkeys(said))

    def differences(self, ids: Sequence[int], framework: str) -> list[str]:
        """Return data about the hosts of these engines, for a run on them."""
        return [] if self.hosted is None else self.hosted.differences(ids, framework)

    def hosts(self) -> dict[int, str]:
        """Return the names of the hosts of engines that are not on this machine."""
        return {one.id: one.elsewhere for one in self.engines.engines.values() if one.elsewhere}

    # -- where they are ----------------------------------------------------------------------------

    def _room_of(self, engine: int) -> str:
        """Return the host whose devices an engine sees (`HostDevices.room_of`)."""
        host = None if self.hosted is None else self.hosted.host_of(engine)
        return "" if host is None or self._far is None else self._far.room_of(host)

    def _by_room(self, pids: Mapping[int, int]) -> dict[str, dict[int, int]]:
        found: dict[str, dict[int, int]] = {}
        for engine, pid in pids.items():
            found.setdefault(self._room_of(engine), {})[engine] = pid
        return found

    def _rooms(self, workers: int, plan: Plan | None = None) -> list[str]:
        """Return the place of each rank's worker, also for engines that are not started yet.

        The list is shorter if no host can take the missing engines.
        """
        hosted, far = self.hosted, self._far
        if hosted is None or far is None:
            return []
        wanted = workers if plan is None else plan.engines
        helpers = 0 if plan is None else len(plan.helpers)
        have = [one for one in self.worker_ids if hosted.host_of(one) is not None]
        servers = sorted(self.servers & set(self.ids))
        lacking = max(0, wanted - len(have))
        fresh = hosted.next_hosts(lacking + max(0, helpers - len(servers)))
        order = [host.facts.token for host in self._all_hosts()]
        seen = [self.engines.engines[one].place for one in have]
        first = list(dict.fromkeys([*(info.place for info in self.all), *order]))
        tokens = [*seen, *(host.facts.token for host in fresh[:lacking])]
        rooms = [*map(self._room_of, have), *map(far.room_of, fresh[:lacking])]
        ranked = sorted(range(len(rooms)), key=lambda at: (first.index(tokens[at]), at))
        known = [rooms[at] for at in ranked][:wanted]
        known += [*map(self._room_of, servers), *map(far.room_of, fresh[lacking:])][:helpers]
        return _of_workers(known, workers, plan)

    def _rooms_of(self, ids: Sequence[int], workers: int, plan: Plan | None) -> list[str]:
        return _of_workers([self._room_of(one) for one in ids], workers, plan)

    def _pids(self) -> dict[int, int]:
        return {one.id: one.pid for one in self.all if one.state != "dead"}

    def add(self, count: int, framework: str = "") -> list[int]:
        """Start more engines; return their ids.

        Raises:
            PlanError: The number would be larger than the administrator allows.
        """
        checked = check_count("The number of engines", count)
        check_limits(checked, list(self._pids().values()), elsewhere=self._far is not None)
        return self.engines.start(checked, framework=framework)

    def workers_for(self, count: int, framework: str) -> list[int]:
        """Return the engines of this many workers; start those that are missing.

        Raises:
            ClusterError: All engines are dead.
        """
        dead = [engine for engine in self.all if engine.state == "dead"]
        if dead and not self.worker_ids:
            raise ClusterError(
                f"All {'engines' if not self.ids else 'workers'} are dead: {how_ended(dead)}.",
                next_step="%cluster restart",
                code="WB-CLUSTER-040",
            )
        check_size("The number of workers", count)
        missing = count - len(self.worker_ids)
        if missing > 0:
            self.add(missing, framework)
        self.most_workers = max(self.most_workers, len(self.worker_ids))
        return self.worker_ids[:count]

    def servers_for(self, count: int, framework: str) -> list[int]:
        """Return engines for servers; the first run that needs servers starts them."""
        missing = count - len(self.servers & set(self.ids))
        if missing > 0:
            self.servers |= set(self.add(missing, framework))
        return sorted(self.servers & set(self.ids))[:count]

    def bring(self, ids: Sequence[int], framework: str) -> None:
        """Make engines import the framework; replaced engines leave the process group."""
        if bring(self.engines, ids, framework):
            self.drop_group()

    # -- the process group -------------------------------------------------------------------------

    def drop_group(self) -> None:
        """Let the next cell create its process group again."""
        self._group = NO_GROUP

    def new_prefix(self, what: str) -> str:
        """Return a new name for a process group."""
        return f"{what}-{next(self._generation)}"

    def specs(
        self,
        ids: Sequence[int],
        plan: Plan | None,
        leases: device_pool.Leases,
        prefix: str,
        framework: str,
        group: str = "",
    ) -> Specs:
        """Return the request for each engine; `plan` is None for a cell without a strategy."""
        hosts = {i: self.engines.engines[i].place for i in ids}
        specs = make_specs(
            hosts,
            len(ids) if plan is None else plan.workers,
            leases,
            store=self.engines.store() if framework in catalog.MEET_IN_STORE else None,
            framework=framework,
            prefix=prefix,
            group=group,
            one_engine=plan is not None and plan.entry.one_engine,
            helpers=() if plan is None else plan.helpers,
            remote_workers=plan is not None and plan.entry.remote_workers,
            addresses={i: self.engines.engines[i].address for i in ids},
            ports=self.engines.launch.ports,
            reserved=[str(path) for path in self.devices.reservations.files.values()],
            rooms={i: self._room_of(i) for i in ids},
            cores={} if self.hosted is None else {i: self.hosted.cores_of(i) for i in ids},
        )
        self.given |= {i: lease_of(spec, leases) for i, spec in specs.items()}
        pids = self._pids()
        told = {i: pids.get(i, 0) for i, spec in specs.items() if spec.gpus}
        if self._far is not None:
            self._far.told(self._by_room(told))
        else:
            self._near.told(told)
        return specs

    def _group_of(
        self, members: Sequence[int], leases: device_pool.Leases, framework: str
    ) -> tuple[str, bool]:
        """Return the name of these workers' group, and whether it still must be created."""
        devices = [lease.device for lease in leases.leases]
        key: tuple[str | int, ...] = (framework, *members, *devices)
        fresh = self._group[1] != key or not self._group[0]
        if fresh:
            self._group = (self.new_prefix("group"), key)
        return self._group[0], fresh

    def run_group(self, members: Sequence[int], leases: device_pool.Leases, framework: str) -> str:
        """Return the process group for a run's workers; empty: the run creates a new group.

        NCCL needs up to seconds to create a group for collectives on GPUs. So the group is kept
        from cell to cell and from run to run, until an error occurs.
        """
        if leases.backend == "gloo" or framework not in catalog.MEET_IN_STORE:
            self.drop_group()
            return ""
        return self._group_of(members, leases, framework)[0]

    def cell_specs(
        self,
        members: Sequence[int],
        targets: Sequence[int],
        framework: str,
        leases: device_pool.Leases,
    ) -> Specs:
        """Return the data for the members of a cell's process group; only some of them run the
        cell.

        Raises:
            RunError: The group could not be created.
        """
        group, fresh = self._group_of(members, leases, framework)
        specs = self.specs(members, None, leases, group, framework)
        if fresh and set(targets) != set(members):
            # A collective on some ranks needs a group that all ranks have joined.
            task = Task(self.engines, cell_requests(Recipe(""), specs, specs, 0, ""), {})
            task.over.wait()
            if (error := task.failure()) is not None:
                raise error
        return specs


def _of_workers(places: Sequence[str], workers: int, plan: Plan | None) -> list[str]:
    """Return the places of workers from those of a run's engines: by rank, then the helpers."""
    if plan is not None and plan.entry.remote_workers:
        return list(places[plan.engines : plan.engines + workers])
    if plan is not None and plan.entry.one_engine:
        return list(places[:1]) * workers
    return list(places[:workers])


WAIT_S = 60.0


def spent(outcomes: Outcomes) -> dict[int, str]:
    """Return the engines that must be replaced, and why."""
    return {i: o.evalue for i, o in outcomes.items() if o.replace}


def replacement_words(ids: Sequence[int], why: str) -> str:
    """Return the note on engines that must be replaced."""
    reason = why.partition("\n")[0]
    if len(ids) == 1:
        return (
            f"The variables of engine {ids[0]} are lost, because a new engine replaces it: {reason}"
        )
    return (
        f"The variables of engines {ranges(ids)} are lost, because new engines replace them: "
        f"{reason}"
    )


class Replacer:
    """Replaces engines in the background, one batch after the other.

    Callers are told the end of a cell on the thread that reads the engines' messages. This thread
    must not wait.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def begin(
        self,
        engines: Engines,
        ids: Callable[[], Sequence[int]],
        framework: str,
        then: Callable[[ClusterError | None], None] = lambda error: None,
    ) -> None:
        """Replace engines by new engines with the framework; `then` receives the result.

        Args:
            ids: Returns the engines; called in the background, so it may wait.
        """

        def replace(before: threading.Thread | None) -> None:
            if before is not None:
                before.join()
            error = None
            try:
                if gone := ids():
                    engines.restart(gone, framework)
            except ClusterError as failure:
                error = failure
            then(error)

        with self._lock:
            thread = threading.Thread(
                target=replace, args=(self._thread,), name="workbench-replace", daemon=True
            )
            self._thread = thread
            thread.start()

    def wait(self) -> None:
        """Wait until replacements are done; called before any other request to the engines."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(WAIT_S)


PREWARM = "WORKBENCH_PREWARM"
LOAD = "workbench.engine.entry:load"
VARIABLES = "workbench.engine.entry:variables"
LOAD_TIMEOUT_S = 180.0


def bring(engines: Engines, ids: Iterable[int], framework: str) -> list[int]:
    """Make engines import a framework before their next request; return the replaced engines.

    An engine without variables of the user is replaced by an engine that was forked with the
    framework, under the same id. An engine with variables imports the framework too and keeps them.

    Raises:
        ClusterError: An engine could not be replaced, or could not import the framework.
    """
    lacking = [i for i in ids if framework not in engines.engines[i].frameworks]
    if not lacking:
        return []
    held = engines.call(lacking, VARIABLES)
    bare = [i for i in lacking if not held[i]] if engines.can_fork(framework) else []
    rest = [i for i in lacking if i not in bare]
    if holding := [i for i in rest if held[i]]:
        _say(holding, framework)
    if bare:
        engines.restart(bare, framework)
    for engine, names in engines.call(rest, LOAD, (framework,), LOAD_TIMEOUT_S).items():
        engines.engines[engine].frameworks = set(names)
    return bare


def _say(ids: list[int], framework: str) -> None:
    one = len(ids) == 1
    sys.stdout.write(
        f"{'Engine' if one else 'Engines'} {ranges(ids)} import{'s' if one else ''} {framework} "
        "now, which takes some seconds. The variables of "
        f"{'this engine' if one else 'these engines'} are not lost.\n"
    )


def prewarmed() -> str | None:
    """Return the framework to import in advance; None if the user wants none.

    Raises:
        PlanError: The environment variable has an invalid value.
    """
    asked = os.environ.get(PREWARM, "")
    if asked == "off":
        return None
    if asked not in ("", "torch", "tensorflow"):
        raise PlanError(
            f"The environment variable {PREWARM} has an invalid value.",
            seen=asked,
            allowed="torch, tensorflow, off",
            code="WB-PLAN-105",
        )
    return asked or default_framework()


_notebooks: list[Callable[[], str | None]] = []


def notebook_framework() -> str:
    """Return the framework of the notebook's cluster, or of the one it would start."""
    return next(filter(None, (ask() for ask in _notebooks)), None) or default_framework()


def know_notebook(framework: Callable[[], str | None]) -> None:
    """Register the function that returns the cluster's framework; None: there is no cluster."""
    _notebooks[:] = [framework]


def default_framework() -> str:
    """Return the default framework: the configured one, otherwise the installed one."""
    asked = os.environ.get(PREWARM, "")
    if asked in ("torch", "tensorflow"):
        return asked
    return "tensorflow" if installed("tensorflow") and not installed("torch") else "torch"
