"""Which engine is on which host: started there, restarted there, signalled and heard there.

Engines fill the hosts one after the other, as many on each as it was asked for, so that ranks that
are neighbours share a host. What comes later (servers, workers of a larger run, the place of an
engine whose host is gone) goes to the host that has most room: no second job is asked for.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...devices.discovery import Device, Survey
from ...devices.leases import (
    AUTO,
    CPU,
    NOT_PROVED,
    DevicePool,
    Lease,
    Leases,
    once,
    parse_devices,
)
from ...devices.mask import KINDS
from ...devices.reservations import Reservations
from ...errors import ClusterError, PlanError, WorkbenchError
from .. import processes, progress
from . import wire
from .agents import KEEPER, Agents, Ears, Host, unlike
from .launchers import Launcher, launcher_of, way_to_hosts

if TYPE_CHECKING:
    from .settings import LaunchSettings

POLL_S = 0.1
ARRIVE_S = 60.0
"""How long an agent may take once its job runs."""
FORK_S = 150.0
MUST_AGREE = ("python", "distributed-workbench", "ipyparallel")
HANDED = (
    "NCCL_", "GLOO_", "TP_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "TF_", "KERAS_", "XLA_",
    "CUDA_LAUNCH_", "HF_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "RES_OPTIONS", "PYTHONHASHSEED",
)  # fmt: skip
"""Beginnings of the variables that engines on other hosts take from the notebook."""


class HostedEngines:
    """The engines of one cluster on other hosts, and the agents that have them.

    Args:
        settings: What was asked for.
        folder: The cluster's; logs of engines are kept in it.
        on_left: `on_left(engine, how)` when an engine's process ended, or its host is gone.
        on_keeper_left: The same of the store's keeper.

    Attributes:
        address: Of this machine, where it listens for the hosts.
        said: What is to be told of differences between the hosts, a sentence each.
    """

    def __init__(
        self,
        settings: LaunchSettings,
        folder: Path,
        on_left: Callable[[int, processes.Ending], None],
        on_keeper_left: Callable[[processes.Ending], None],
    ) -> None:
        self._settings, self._folder = settings, folder
        self._on_left, self._on_keeper_left = on_left, on_keeper_left
        self.launcher: Launcher = launcher_of(settings)
        self.address = settings.listen or way_to_hosts(settings)
        self.agents = Agents(
            self.address, settings.ports, Ears(self._left, self._logged, self._lost)
        )
        self.said: list[str] = []
        self._hosts: dict[int, Host] = {}  # by engine
        self._pids: dict[int, int] = {}
        self._keeper: Host | None = None
        self._ended_by_us: dict[int, str] = {}
        self._started = False
        self._lock = threading.Lock()

    # -- hosts -------------------------------------------------------------------------------------

    def begin(self, engines: int) -> None:
        """Have the agents started, if they are not yet; returns at once.

        Raises:
            ClusterError: The launcher refused.
        """
        with self._lock:
            started, self._started = self._started, True
        if not started:
            self.launcher.start(self.agents.join, engines)

    def order(self, connection: str, framework: str) -> None:
        """Tell agents, those to come too, where engines register and what they import."""
        environ = tuple((n, v) for n, v in os.environ.items() if n.startswith(HANDED))
        orders = wire.Ready(
            connection=connection, framework=framework, environ=environ, cwd=os.getcwd(),
            sys_path=tuple(sys.path),
        )  # fmt: skip
        self.agents.orders = orders
        for host in self.agents.living:
            self.agents.tell(host, orders)

    def await_hosts(self, report: progress.Report, until: float) -> None:
        """Wait until all agents are there.

        Args:
            until: On `time.monotonic`'s clock.

        Raises:
            ClusterError: They cannot come, or did not within the time.
        """
        began, runs_since = time.monotonic(), 0.0
        while True:
            # Hosts that came and are gone again are not waited for: engines go to the others.
            wanted, found = self.launcher.agents, len(self.agents.hosts)
            if wanted and found >= wanted:
                break
            queued = self.launcher.look()
            now = time.monotonic()
            if queued is not None:
                runs_since = 0.0
                report(progress.queued(queued.state, queued.reason, queued.position, now - began))
            else:
                runs_since = runs_since or now
                report(progress.hosts(found, wanted))
            if now > until or (runs_since and now - runs_since > ARRIVE_S):
                raise self._late(found, wanted, queued is not None, now - began)
            self.agents.await_change(POLL_S)
        self._compare()

    def _late(self, found: int, wanted: int, waits: bool, waited_s: float) -> ClusterError:
        if waits:
            return ClusterError(
                f"The job did not begin within {waited_s:.0f} s; it was cancelled.",
                next_step="--start-timeout 2h waits longer; squeue shows who is before you",
                code="WB-CLUSTER-071",
            )
        names = ", ".join(one.name for one in self.agents.living) or "none"
        return ClusterError(
            f"Only {found} of {wanted or 'all'} hosts came within {waited_s:.0f} s.",
            seen=names,
            next_step="a firewall may drop what hosts send back: --ports and --listen; "
            "workbench doctor --on HOST tries it",
            code="WB-CLUSTER-072",
        )

    def _compare(self) -> None:
        """Look whether the hosts have the same versions.

        Raises:
            ClusterError: One that must be the same is not.
        """
        differ = unlike(self.agents.living, here())
        bad = [name for name in MUST_AGREE if _keeps_apart(name, differ.get(name, {}))]
        if bad:
            raise ClusterError(
                "The hosts do not have the notebook's versions, so cells could not travel.",
                seen="; ".join(_words(name, differ[name]) for name in bad),
                next_step="install the same there, or name another interpreter: "
                "--launcher-option python=/path/to/python",
                code="WB-CLUSTER-073",
            )
        self.said = [
            f"versions differ: {_words(name, seen)}"
            for name, seen in differ.items()
            if name not in MUST_AGREE
        ]
        self.said += [f"{h.name}: {note}" for h in self.agents.living for note in h.facts.notes]

    def differences(self, engines: Sequence[int], framework: str) -> list[str]:
        """Return what a run of these engines is to be told of their hosts, a sentence each."""
        known = {self._hosts[one].place: self._hosts[one] for one in engines if one in self._hosts}
        hosts = [known[place] for place in sorted(known)]
        others = {"torch", "tensorflow", "keras"} - {framework}
        others -= {"keras"} if framework == "tensorflow" else set()
        said = []
        for name, seen in unlike(hosts, {}).items():
            if name == framework:
                said.append(
                    f"The hosts of this run have different versions of {name} "
                    f"({_versions(seen)}): its workers may fail, or compute different numbers. "
                    "Install the same everywhere."
                )
            elif name not in others:
                said.append(f"The hosts of this run differ: {_words(name, seen)}.")
        return said + [f"{one.name}: {note}" for one in hosts for note in one.facts.notes]

    def cores_of(self, engine: int) -> int:
        """Return how many cores the engines of a host have together; 0 where that is not known.

        Agents of one host (MPI) may be bound to cores of their own.
        """
        host = self._hosts.get(engine)
        if host is None:
            return 0
        near = [one.facts for one in self.agents.hosts if one.facts.token == host.facts.token]
        cpus = {cpu for one in near for cpu in one.cpus}
        if not cpus or any(one.cores < len(one.cpus) for one in near):  # a container's quota
            return max(one.cores for one in near)
        return len(cpus)

    # -- engines -----------------------------------------------------------------------------------

    def fork(self, ids: Sequence[int], framework: str) -> None:
        """Fork engines, each on its host; returns when they exist.

        Raises:
            ClusterError: There is no host left, or one could not.
        """
        chosen = self._choose(ids)
        asked = []
        for host in dict.fromkeys(chosen.values()):
            mine = tuple(engine for engine in ids if chosen[engine] is host)
            order = wire.Fork(ask=0, engines=mine, framework=framework)
            asked.append((host, mine, self.agents.begin(host, order)))
        for host, mine, future in asked:
            pids = self.agents.answer(host, future, FORK_S).value
            self._pids.update(zip(mine, map(int, pids), strict=True))

    def _choose(self, ids: Sequence[int]) -> dict[int, Host]:
        living, load = self._living(), self._load()
        chosen = {engine: _where(self._hosts.get(engine), living, load) for engine in ids}
        self._hosts |= chosen
        return chosen

    def _living(self) -> list[Host]:
        """Return the hosts that are there.

        Raises:
            ClusterError: There is none.
        """
        living = self.agents.living
        if not living:
            raise ClusterError(
                "No host of this cluster is there any more.",
                seen="; ".join(one.gone for one in self.agents.hosts) or "none has come",
                next_step="%cluster stop, then start again",
                code="WB-CLUSTER-074",
            )
        return living

    def _load(self) -> Counter[int]:
        """Return how many engines live on each host, by its place."""
        return Counter(host.place for engine, host in self._hosts.items() if engine in self._pids)

    def next_hosts(self, count: int) -> list[Host]:
        """Return where so many more engines would be; nothing where no host is there."""
        living, load = self.agents.living, self._load()
        return [_where(None, living, load) for _ in range(count)] if living else []

    def host_of(self, engine: int) -> Host | None:
        """Return an engine's host; None where it has none."""
        return self._hosts.get(engine)

    def pid_of(self, engine: int) -> int:
        """Return an engine's pid on its host; 0 where it does not live."""
        return self._pids.get(engine, 0)

    def signal(self, engine: int, number: int, by_us: str = "") -> None:
        """Signal an engine; does nothing where it is gone.

        Args:
            by_us: Why it is ended, in words, where it is.
        """
        host = self._hosts.get(engine)
        if host is None or host.gone or (engine not in self._pids and engine != KEEPER):
            return
        if by_us:
            self._ended_by_us[engine] = by_us
        with contextlib.suppress(ClusterError):
            self.agents.begin(host, wire.Signal(ask=0, engine=engine, number=number))

    # -- the store ---------------------------------------------------------------------------------

    def keep_store(self) -> tuple[int, str, int]:
        """Have the first host keep the store that workers meet in; return pid, address and port.

        Raises:
            ClusterError: No host is there.
        """
        host = self._living()[0]
        found = self.agents.ask(host, wire.Keep(ask=0, ports=self._settings.ports or ()), FORK_S)
        pid, address, port = found.value
        self._keeper = self._hosts[KEEPER] = host
        return int(pid), str(address), int(port)

    # -- what agents tell --------------------------------------------------------------------------

    def _left(self, engine: int, pid: int, how: processes.Ending) -> None:
        if engine == KEEPER:
            self._keeper = None
            self._on_keeper_left(how)
        elif self._pids.pop(engine, None) is not None:
            if why := self._ended_by_us.pop(engine, ""):
                how = processes.Ending(how.signal, how.code, hint=why)
            self._on_left(engine, how)

    def _logged(self, engine: int, data: bytes) -> None:
        with self.log_path(engine).open("ab") as file:
            file.write(data)

    def log_path(self, engine: int) -> Path:
        """Return where an engine's log is kept here."""
        return self._folder / "log" / f"engine-{engine}.log"

    def _lost(self, host: Host) -> None:
        threading.Thread(target=self._settle, args=(host,), daemon=True).start()

    def _settle(self, host: Host) -> None:
        """Tell why a host's engines are gone; its launcher may know more than that it is silent."""
        why = self.launcher.ended(host.place) or host.gone
        host.gone = why
        how = processes.Ending(what=f"its host is gone: {why}")
        if self._keeper is host:
            self._keeper = None
            self._on_keeper_left(how)
        for engine in [i for i, one in self._hosts.items() if one is host and i in self._pids]:
            self._pids.pop(engine, None)
            self._on_left(engine, how)

    def look(self) -> None:
        """Take hosts as gone whose launcher has ended."""
        for host in self.agents.living:
            if why := self.launcher.ended(host.place):
                self.agents.lose([host], why)

    # -- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all agents, with their engines, and what started them."""
        self.agents.close()
        self.launcher.stop()


def _where(before: Host | None, living: Sequence[Host], load: Counter[int]) -> Host:
    """Return an engine's host, the one it had while that lives; and count it there."""
    host = before
    if host is None or host.gone:
        # The first with room; where none has any, the one with the least too many.
        host = next(
            (one for one in living if load[one.place] < max(1, one.slots)),
            min(living, key=lambda one: load[one.place] - max(1, one.slots)),
        )
    load[host.place] += 1
    return host


def here() -> Mapping[str, str]:
    """Return this kernel's versions of what agents tell of."""
    found = {"python": platform.python_version()}
    for package in wire.PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def _keeps_apart(package: str, seen: Mapping[str, str]) -> bool:
    """Whether these versions cannot work together: of Python, the last number does not matter."""
    parts = 2 if package == "python" else None
    return len({tuple(version.split(".")[:parts]) for version in seen.values()}) > 1


def _words(package: str, seen: Mapping[str, str]) -> str:
    return f"{package} {_versions(seen)}"


def _versions(seen: Mapping[str, str]) -> str:
    return ", ".join(f"{version} on {name}" for name, version in seen.items())


# -- devices -----------------------------------------------------------------------------------


class HostDevices:
    """The GPUs of a cluster whose engines are on other hosts, as its agents have told of them.

    Each host has a `DevicePool` of its own, by the rules of one machine. What is decided for all
    together: they compute on GPUs, or all on their CPUs; on GPUs of one kind; and their group is
    NCCL's where each has one for itself. Nothing is reserved: the files for that are this
    machine's, and a scheduler keeps its jobs apart by itself.

    Where agents of one host (MPI has one for each rank) see different GPUs, they count as hosts of
    their own: their engines can open no others.

    Args:
        asked: What `parse_devices` takes.
        framework: Devices that it cannot use where they are do not count.
        hosts: Those that have been there, in the order of their places.

    Attributes:
        held: Whether GPUs are reserved on this machine: never.

    Raises:
        PlanError: `asked` was not understood.
    """

    held = False

    def __init__(self, asked: str, framework: str, hosts: Callable[[], Sequence[Host]]) -> None:
        self.asked, self.framework, self._hosts = asked, framework, hosts
        self._wanted = parse_devices(asked)
        self._seen: tuple[wire.HostFacts, ...] = ()
        self._known: dict[int, str] = {}  # rooms of these, by the host's place
        self._pools: dict[str, tuple[wire.HostFacts, DevicePool]] = {}
        self._on_cpu: dict[tuple[str, ...], Leases] = {}  # what was begun there stays there
        self.reservations = Reservations()

    @property
    def settled(self) -> dict[int, Leases]:
        """What another kernel would have to know: nothing, as these clusters are not kept."""
        return {}

    def room_of(self, host: Host) -> str:
        """Return the place of a host's devices: its own, or its agent's alone."""
        return self._rooms()[host.place]

    def _rooms(self) -> dict[int, str]:
        hosts = self._hosts()
        if tuple(one.facts for one in hosts) != self._seen:
            self._seen = tuple(one.facts for one in hosts)
            seen: dict[str, set[tuple[str, ...]]] = {}
            for one in hosts:
                uuids = tuple(sorted(str(gpu["uuid"]) for gpu in one.facts.devices))
                seen.setdefault(one.facts.token, set()).add(uuids)
            tokens = {one.place: one.facts.token for one in hosts}
            self._known = {
                place: token if len(seen[token]) == 1 else f"{token} {place}"
                for place, token in tokens.items()
            }
        return self._known

    def _host(self, room: str) -> Host:
        rooms = self._rooms()
        return next(one for one in self._hosts() if rooms[one.place] == room)

    def _pool(self, room: str) -> DevicePool:
        facts = self._host(room).facts
        known, pool = self._pools.get(room, (None, None))
        if pool is None or facts is not known:  # a job that was begun anew may be given other ones
            found = tuple(Device(**{**one, "pids": tuple(one["pids"])}) for one in facts.devices)

            def find(framework: str) -> Survey:
                if (why := facts.unfit.get(framework)) is not None:
                    return Survey(notes=tuple(why))
                return Survey(found, () if found else facts.notes)

            pool = DevicePool(self.asked, self.framework, find=find, reserves=False)
            self._pools[room] = facts, pool
        return pool

    def lease(self, rooms: Sequence[str]) -> Leases:
        """Return which device the worker of each rank gets, or would get.

        Args:
            rooms: Of each worker's host (`room_of`).

        Raises:
            PlanError: A host has not the GPUs that were named, or they are not alike.
            ClusterError: GPUs were asked for and a host has none.
        """
        if (settled := self._on_cpu.get(tuple(rooms))) is not None:
            return settled
        each = {}
        for room, count in Counter(rooms).items():
            try:
                each[room] = self._pool(room).lease(count)
            except (PlanError, ClusterError) as error:  # noqa: PERF203
                raise _lacking(self._host(room), error) from error
        return self._join(rooms, each)

    def hold(
        self, rooms: Sequence[str], engines: Mapping[str, Mapping[int, int]]
    ) -> tuple[Leases, list[str]]:
        """Settle the devices of workers; return them, and what is to be said.

        Args:
            engines: Pids of the living engines by id, by room; each keeps its GPU in later runs.

        Raises:
            PlanError, ClusterError: As `lease`; or a GPU would be shared that cannot be.
        """
        leases = self.lease(rooms)
        leases.check_shared()
        if not leases.on_gpus:
            self._on_cpu[tuple(rooms)] = leases
            said = [once(text) for text in (*self._notes(rooms), leases.warning)]
            return leases, list(filter(None, said))
        each, said = {}, []
        for room, count in Counter(rooms).items():
            mine = engines.get(room, {})
            each[room], words = self._pool(room).hold(count, mine, max(count, len(mine)))
            name = self._host(room).name
            said += [text if text == NOT_PROVED else f"{name}: {text}" for text in words]
        return self._join(rooms, each), list(dict.fromkeys(said))

    def _join(self, rooms: Sequence[str], each: Mapping[str, Leases]) -> Leases:
        names = {room: self._host(room).name for room in each}
        seen = {room: one.gpus for room, one in each.items()}
        parts = any(one.parts for one in each.values())
        kinds = {one.kind for one in each.values() if one.on_gpus}
        why = self._why_cpu(rooms, each, names)
        if why is not None:
            cpus = tuple(Lease("cpu", "cpu", host=names[room], place=room) for room in rooms)
            return Leases(cpus, "gloo", why)
        (kind,) = kinds
        given = {room: iter(one.leases) for room, one in each.items()}
        leases = tuple(replace(next(given[room]), host=names[room], place=room) for room in rooms)
        if parts:  # each is shown its own alone
            leases = tuple(replace(one, device=f"{KINDS[kind].device}:0") for one in leases)
        alone = all(one.backend != "gloo" for one in each.values())
        alone = alone and not (parts and len(rooms) > 1)
        said = [f"{names[room]}: {one.warning}" for room, one in each.items() if one.warning]
        backend = KINDS[kind].backend if alone else "gloo"
        return Leases(leases, backend, " ".join(said), kind=kind, parts=parts, places=seen)

    def _why_cpu(
        self, rooms: Sequence[str], each: Mapping[str, Leases], names: Mapping[str, str]
    ) -> str | None:
        """Return why all compute on the CPU, empty where nobody expects more; None: on GPUs.

        Raises:
            PlanError: GPUs were named that are of different kinds.
        """
        counts, auto = Counter(rooms), self._wanted == AUTO
        lacking = [room for room, one in each.items() if not one.on_gpus]
        kinds = sorted({one.kind for one in each.values() if one.on_gpus})
        if self._wanted == CPU or not any(self._pool(room).found for room in each):
            return ""
        if lacking:
            some = all(self._pool(room).found for room in lacking)
            words = [
                f"{names[room]} has {_count(len(self._pool(room).found), 'GPU')} for "
                f"{_count(counts[room], 'worker')}"
                for room in lacking
            ]
            step = " --devices cuda shares them." if some else ""
            return f"{'; '.join(words)}: so all compute on the CPU.{step}"
        if len(kinds) > 1 and not auto:
            raise PlanError(
                "The hosts' GPUs are of different kinds, so their workers cannot form a group.",
                seen="; ".join(f"{names[room]}: {one.kind}" for room, one in each.items()),
                allowed="GPUs of one kind",
                next_step="--devices cpu, or hosts that are alike",
                code="WB-PLAN-190",
            )
        if len(kinds) > 1:
            return f"GPUs of {' and '.join(kinds)} cannot form a group: so all compute on the CPU."
        if auto and len(rooms) > 1 and any(one.parts for one in each.values()):
            return "MIG instances cannot form an NCCL group: so all compute on the CPU."
        return None

    def told(self, engines: Mapping[str, Mapping[int, int]]) -> None:
        """Note which engines (pids by id, by room) have been shown their host's GPUs."""
        for room, mine in engines.items():
            self._pool(room).told(mine)

    def free(self) -> None:
        """Let the next run choose anew: variables are gone."""
        for _, pool in self._pools.values():
            pool.free()
        self._on_cpu.clear()

    def words(self, rooms: Sequence[str]) -> list[str]:
        """Return what to say below a table of these workers."""
        given = self.lease(rooms)
        warning = [given.warning] if given.warning and not given.on_gpus else []
        return [*self._notes(rooms), *warning]

    def _notes(self, rooms: Sequence[str]) -> list[str]:
        """Return what was left out on each host."""
        each = ((self._host(room).name, self._pool(room).notes) for room in dict.fromkeys(rooms))
        return [f"{name}: {note}" for name, notes in each for note in notes]

    def restore(self, *_: object) -> None:
        """Do nothing: these clusters are not kept."""


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"


def _lacking(host: Host, error: WorkbenchError) -> WorkbenchError:
    """Return an error about devices as one about a host's."""
    if isinstance(error, ClusterError):
        return ClusterError(
            f"GPUs were asked for, but {host.name} has none that can be used.",
            seen=error.seen,
            allowed="hosts with GPUs that their drivers report, within CUDA_VISIBLE_DEVICES",
            next_step=error.next_step,
            code="WB-CLUSTER-150",
        )
    return PlanError(
        f"{host.name} has no such GPU, or it was named twice: each host uses those with the "
        "numbers that were given.",
        seen=error.seen,
        allowed=error.allowed,
        next_step="numbers count on each host, within CUDA_VISIBLE_DEVICES; leave --devices out "
        "for auto",
        code="WB-PLAN-191",
    )
