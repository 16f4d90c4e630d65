"""Knows which engine is on which host; starts, restarts and signals engines there.

Engines fill the hosts one after another, with the requested number on each, so that neighbouring
ranks share a host. Later engines (servers, workers of a larger run, replacements for engines of a
lost host) go to the host with the most room; no second job is requested.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import os
import platform
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ClusterError, WorkbenchError
from ...shared.cluster_env import own_address
from .. import processes, progress
from . import wire
from .agents import Agents, Ears, Host, HostFiles, gone_error, unlike
from .launchers import Launcher, Mpi, Queued, Ssh, address_of, ask_program, ssh_name
from .settings import MPI, SLURM, SSH
from .slurm import ALLOCATION, Sbatch, Srun

if TYPE_CHECKING:
    from .settings import LaunchSettings

POLL_S = 0.1
ARRIVE_S = 120.0
"""How long an agent may take after its job has begun."""
FORK_S = 150.0
SETTLED_S = 4.0
MUST_AGREE = ("python", "distributed-workbench", "ipyparallel")
HANDED = (
    "NCCL_", "GLOO_", "TP_", "OMP_", "MKL_", "KMP_", "TORCH_", "PYTORCH_", "TF_", "KERAS_", "XLA_",
    "CUDA_LAUNCH_", "HF_", "TOKENIZERS_", "WANDB_", "MLFLOW_", "RES_OPTIONS", "PYTHONHASHSEED",
)  # fmt: skip
"""Beginnings of the variables that engines on other hosts take from the notebook."""


class HostedEngines:
    """The engines of one cluster on other hosts, and the agents that have them.

    Args:
        settings: The requested settings.
        folder: The cluster's; logs of engines are kept in it.
        on_left: `on_left(engine, how)` when an engine's process ended, or its host is lost.
        on_keeper_left: The same for the store's keeper.

    Attributes:
        address: Of this machine, where it listens for the hosts.
        files: The files of runs on the hosts.
        said: Which versions differ between the hosts, a sentence each.
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
        self.launcher.on_end = self.look
        self.files = HostFiles(self.agents)
        self.said: list[str] = []
        self._notes: dict[str, list[str]] = {}  # by host
        self._came = False
        self._hosts: dict[int, Host] = {}  # by engine
        self._pids: dict[int, int] = {}
        self._keeper: Host | None = None
        self._ended_by_us: dict[tuple[int, int], str] = {}  # by engine and pid
        self._ended_early: set[tuple[int, int]] = set()  # gone before they were known
        self._started = False
        self._lock = threading.Lock()

    # -- hosts -------------------------------------------------------------------------------------

    def begin(self, engines: int, framework: str, report: progress.Report) -> None:
        """Start the agents unless they have been started; returns at once.

        Args:
            framework: What they import while they connect.

        Raises:
            ClusterError: The launcher refused.
        """
        with self._lock:
            started, self._started = self._started, True
        if not started:
            report(progress.asking(self.launcher.asks))
            self.agents.join = replace(self.agents.join, framework=framework)
            self.launcher.start(self.agents.join, engines)

    def order(self, connection: str, framework: str) -> None:
        """Tell present and future agents where engines register and what they import."""
        environ = tuple((n, v) for n, v in os.environ.items() if n.startswith(HANDED))
        orders = wire.Ready(
            connection=connection, framework=framework, environ=environ, cwd=os.getcwd(),
            sys_path=tuple(sys.path),
        )  # fmt: skip
        self.agents.orders = orders
        for host in self.agents.living:
            self.agents.tell(host, orders)

    def await_hosts(self, report: progress.Report, until: float) -> None:
        """Wait until all agents have come.

        Args:
            until: On `time.monotonic`'s clock.

        Raises:
            ClusterError: They cannot come, or did not within the time.
        """
        began, runs_since = time.monotonic(), 0.0
        while not self._came:
            wanted, found = self.launcher.agents, len(self.agents.hosts)
            self.agents.expected = wanted
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
                raise self._late(found, wanted, queued, now - began)
            self.agents.await_change(POLL_S)
        if not self._came:
            self._compare()
        self._came = True

    def _late(self, found: int, wanted: int, waits: Queued | None, waited_s: float) -> ClusterError:
        if waits is not None:
            return ClusterError(
                f"Slurm did not start the job within {waited_s:.0f} s, so Workbench cancelled it.",
                seen=f"{waits.state} ({waits.reason})" if waits.reason else waits.state,
                next_step=f"wait longer: --start-timeout {math.ceil(waited_s / 1800)}h; `squeue` "
                "shows the waiting jobs",
                code="WB-CLUSTER-066",
            )
        names = ", ".join(one.name for one in self.agents.living) or "no host"
        what = "ranks of mpiexec" if self._settings.launcher == MPI else "hosts"
        return ClusterError(
            f"Only {found} of {wanted} {what} answered within {waited_s:.0f} s."
            if wanted
            else f"Not all hosts answered within {waited_s:.0f} s.",
            seen=f"answers from {names}",
            next_step="run `workbench doctor --on HOST` to check the connection to a host. If a "
            "firewall blocks connections to this machine, use ports that are open (--ports "
            "FIRST-LAST), or another address of this machine (--listen ADDRESS)",
            code="WB-CLUSTER-067",
        )

    def _compare(self) -> None:
        """Check whether the hosts have the same versions.

        Raises:
            ClusterError: A version that must be the same differs.
        """
        differ = unlike(self.agents.living, here())
        bad = [name for name in MUST_AGREE if _keeps_apart(name, differ.get(name, {}))]
        if bad:
            raise ClusterError(
                "The hosts cannot run cells: on at least one host, the version of Python, "
                "Workbench or ipyparallel differs from the notebook's version.",
                seen="; ".join(_words(name, differ[name]) for name in bad),
                next_step="install the notebook's versions on the hosts, or give another "
                "interpreter: --launcher-option python=/path/to/python",
                code="WB-CLUSTER-068",
            )
        self.said = [
            f"versions differ: {_words(name, seen)}"
            for name, seen in differ.items()
            if name not in MUST_AGREE
        ]
        for host in self.agents.living:
            notes = [*host.facts.notes, self._look_for_folder(host)]
            self._notes[host.name] = [note for note in notes if note]

    @property
    def words(self) -> list[str]:
        """The notes about hosts below a table: different versions, missing folders, lost hosts.

        Hosts with the same note share a sentence.
        """
        hosts = list(self.agents.hosts)
        gone = {one.name: one.gone for one in hosts if one.gone}
        gone = {name: why for name, why in gone.items() if name not in self._names_of_living}
        same: dict[str, list[str]] = {}
        for name, notes in self._notes.items():
            for note in notes if name in self._names_of_living else ():
                same.setdefault(note, []).append(name)
        shared = [f"{', '.join(names)}: {note}" for note, names in same.items()]
        return [*self.said, *shared, *(f"{name} is gone: {why}" for name, why in gone.items())]

    @property
    def _names_of_living(self) -> set[str]:
        return {one.name for one in self.agents.living}

    def _look_for_folder(self, host: Host) -> str:
        """Return the note for a host that does not have the notebook's folder."""
        cwd = os.getcwd()
        try:
            mine, theirs = wire.Seen.at(cwd), self.files.look(host, cwd)
        except WorkbenchError:  # the host is ending; code that needs it will report this
            return ""
        found = theirs if theirs is not None and theirs.is_folder else None
        host.has_cwd = found is not None and (
            mine is None
            # One disk of two hosts shows the same number, or at least the same time.
            or found.inode == mine.inode
            or found.changed_ns == mine.changed_ns
        )
        if host.has_cwd:
            return ""
        if found is not None:
            return (
                f"the path {cwd} leads to another folder there, not to the notebook's folder, so "
                "the notebook's files may be missing there"
            )
        return (
            f"the notebook's folder {cwd} does not exist there, so engines start in "
            f"{host.facts.home}"
        )

    def differences(self, engines: Sequence[int], framework: str) -> list[str]:
        """Return the notes about the hosts of a run's engines, a sentence each."""
        known = {self._hosts[one].place: self._hosts[one] for one in engines if one in self._hosts}
        hosts = [known[place] for place in sorted(known)]
        others = {"torch", "tensorflow", "keras"} - {framework}
        others -= {"keras"} if framework == "tensorflow" else set()
        said = []
        for name, seen in unlike(hosts, {}).items():
            if name == framework:
                said.append(
                    f"The hosts of this run have different versions of {name} "
                    f"({_versions(seen)}), so the workers may fail or compute different numbers. "
                    "Install the same version everywhere."
                )
            elif name not in others:
                said.append(f"The hosts of this run have different versions: {_words(name, seen)}.")
        return said + [f"{one.name}: {note}" for one in hosts for note in one.facts.notes]

    def cores_of(self, engine: int) -> int:
        """Return how many cores the engines of a host have together; 0 if not known.

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
        failed: ClusterError | None = None
        for host, mine, future in asked:  # wait for all answers, so that all can be ended
            try:
                pids = self.agents.answer(host, future, FORK_S).value
            except ClusterError as error:
                failed = failed or error
                continue
            for engine, pid in zip(mine, map(int, pids), strict=True):
                if (engine, pid) not in self._ended_early and not host.gone:
                    self._pids[engine] = pid
        self._ended_early.clear()
        if failed is not None:
            raise failed

    def abandon(self, ids: Iterable[int]) -> None:
        """End the engines of a failed start, because nothing else would end them."""
        for engine in ids:
            host = self._hosts.get(engine)
            if host is None or host.gone:
                self._pids.pop(engine, None)
                continue
            with contextlib.suppress(ClusterError):  # also those that we were not told of
                order = wire.Signal(ask=0, engine=engine, number=signal.SIGKILL)
                self.agents.begin(host, order)

    def _choose(self, ids: Sequence[int]) -> dict[int, Host]:
        living, load = self._living(), self._load()
        chosen = {engine: _where(self._hosts.get(engine), living, load) for engine in ids}
        self._hosts |= chosen
        return chosen

    def _living(self) -> list[Host]:
        """Return the hosts that exist.

        Raises:
            ClusterError: There is none.
        """
        living = self.agents.living
        if not living:
            raise ClusterError(
                "No host of this cluster can be used any more.",
                seen="; ".join(one.gone for one in self.agents.hosts) or "no host has answered",
                next_step="run %cluster stop, then %cluster start",
                code="WB-CLUSTER-069",
            )
        return living

    def _load(self) -> Counter[int]:
        """Return how many engines live on each host, by its place."""
        return Counter(
            host.place for engine, host in list(self._hosts.items()) if engine in self._pids
        )

    def next_hosts(self, count: int) -> list[Host]:
        """Return where this many more engines would be; empty if no host is left."""
        living, load = self.agents.living, self._load()
        return [_where(None, living, load) for _ in range(count)] if living else []

    @property
    def is_over(self) -> bool:
        """Whether hosts have come and none is left."""
        return self._came and not self.agents.living

    def has(self, framework: str) -> bool:
        """Whether the hosts have a framework, as far as they are there."""
        return all(framework in host.facts.versions for host in self.agents.living)

    def host_of(self, engine: int) -> Host | None:
        """Return an engine's host; None where it has none."""
        return self._hosts.get(engine)

    def pid_of(self, engine: int) -> int:
        """Return an engine's pid on its host; 0 where it does not live."""
        return self._pids.get(engine, 0)

    def signal(self, engine: int, number: int, by_us: str = "") -> None:
        """Signal an engine; does nothing if it has ended.

        Args:
            by_us: If Workbench ends it: why, in words.
        """
        host = self._hosts.get(engine)
        if host is None or host.gone or (engine not in self._pids and engine != wire.KEEPER):
            return
        if by_us:
            self._ended_by_us[engine, self._pids.get(engine, 0)] = by_us
        with contextlib.suppress(ClusterError):
            self.agents.begin(host, wire.Signal(ask=0, engine=engine, number=number))

    # -- the store ---------------------------------------------------------------------------------

    def keep_store(self) -> tuple[int, str, int]:
        """Have the first host keep the store that workers meet in; return pid, address and port.

        Raises:
            ClusterError: There is no host.
        """
        host = self._living()[0]
        self._hosts[wire.KEEPER] = host
        order = wire.Keep(ask=0, ports=self._settings.ports or ())
        pid, address, port = self.agents.ask(host, order, FORK_S).value
        self._keeper = host
        if host.gone:  # who settled it had no keeper to tell of
            raise gone_error(host)
        return int(pid), str(address), int(port)

    # -- what agents tell --------------------------------------------------------------------------

    def _left(self, engine: int, pid: int, how: processes.Ending) -> None:
        if engine == wire.KEEPER:
            self._keeper = None
            self._on_keeper_left(how)
        elif self._pids.get(engine) == pid:
            del self._pids[engine]
            if why := self._ended_by_us.pop((engine, pid), ""):
                how = processes.Ending(how.signal, how.code, hint=why)
            self._on_left(engine, how)
        else:  # of a start that is under way, or the one before under that id
            self._ended_early.add((engine, pid))

    def _logged(self, engine: int, data: bytes) -> None:
        with self.log_path(engine).open("ab") as file:
            file.write(data)

    def log_path(self, engine: int) -> Path:
        """Return where an engine's log is kept here."""
        return self._folder / "log" / f"engine-{engine}.log"

    def _lost(self, host: Host) -> None:
        threading.Thread(target=self._settle, args=(host,), daemon=True).start()

    def _settle(self, host: Host) -> None:
        """Report why a host's engines are lost.

        The launcher may know more than that it is silent.
        """
        why = self.launcher.ended(host.place)
        end = time.monotonic() + (SETTLED_S if host.was_told else 0.0)
        while not why and time.monotonic() < end:  # a job's state comes after its end
            time.sleep(POLL_S)
            why = self.launcher.ended(host.place)
        why = why or host.gone
        host.gone = why
        how = processes.Ending(what="host gone", hint=why)
        if self._keeper is host:
            self._keeper = None
            self._on_keeper_left(how)
        for engine in [
            i for i, one in list(self._hosts.items()) if one is host and i in self._pids
        ]:
            self._pids.pop(engine, None)
            self._on_left(engine, how)

    def look(self) -> None:
        """Mark hosts as lost if their launcher has ended."""
        for host in self.agents.living:
            if why := self.launcher.ended(host.place):
                self.agents.lose([host], why)

    # -- the end -----------------------------------------------------------------------------------

    def stop(self) -> None:
        """End all agents, their engines, and the processes that started them."""
        self.agents.close()
        self.launcher.stop()


def launcher_of(settings: LaunchSettings) -> Launcher:
    """Return the launcher of the agents; inside an allocation of Slurm this is srun."""
    if settings.launcher == SSH:
        return Ssh(settings)
    if settings.launcher == MPI:
        return Mpi(settings)
    assert settings.launcher == SLURM, settings.launcher
    return Srun(settings) if os.environ.get(ALLOCATION) else Sbatch(settings)


def way_to_hosts(settings: LaunchSettings) -> str:
    """Return the address of this machine from which the hosts are reached.

    Raises:
        ClusterError: A host is not known here.
    """
    if settings.launcher == SSH:
        ways = [own_address(address_of(ssh_name(settings, one.name))) for one in settings.on]
        return next((way for way in ways if not way.startswith("127.")), ways[0])
    if settings.launcher == SLURM:
        nodes = ask_program(["sinfo", "-h", "-N", "-o", "%o"]).split()
        for node in nodes:
            with contextlib.suppress(OSError):
                return own_address(socket.gethostbyname(node))
    if settings.leaves_machine:
        with contextlib.suppress(OSError):
            return own_address("192.0.2.1")  # nothing is sent: this finds the default route
    return "127.0.0.1"


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
    """Return this kernel's versions of the packages that agents report."""
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
