"""Rows of `%cluster`: each engine's kind, place, memory and current work.

The state and the text of an engine are derived from the kernel's data about its cell or run. The
engines are sampled at most once a second, and only while someone is looking at the table.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..cluster.hosts.agents import HostReading
from ..cluster.hosts.agents import readings as agent_readings
from ..cluster.vitals import (
    EngineVitals,
    GpuReading,
    Gpus,
    LastLine,
    Processes,
    Reading,
    State,
    gpu_use,
)
from ..execution.run import Run
from ..shared.messages import AskWhere, Whereabouts
from ..views.tables import cluster_table

if TYPE_CHECKING:
    from ..cluster.engines import EngineInfo
    from ..devices.leases import Lease
    from ..shared.members import Member
    from ..views.table import Table
    from .access import ClusterAccess

RESIDENT = (
    "Memory is the resident set size (RSS). A memory page that several engines share is counted "
    "for each of these engines."
)


def rows(cluster: ClusterAccess, *, now: bool = False) -> list[dict[str, Any]]:
    """Return one mapping per engine: engine, rank, pid, host, device, memory_bytes, and so on.

    Args:
        now: Take a new sample with the memory of all engines; this can take some tenths of a
            second. Otherwise the last sample is used if it is younger than a second.
    """
    found = cluster.vitals.now() if now else cluster.vitals.sample()
    gpus = any(one.gpu_percent is not None or one.gpu_memory_bytes is not None for one in found)
    logged = any(one.log_line for one in found)
    return [
        {
            "engine": one.engine,
            "rank": one.rank,
            "pid": one.pid,
            "host": one.host,
            "device": one.device,
            "cpu_percent": one.cpu_percent,
            "memory_bytes": one.memory_bytes,
            **({"gpu_percent": one.gpu_percent} if gpus else {}),
            **({"gpu_memory_bytes": one.gpu_memory_bytes} if gpus else {}),
            "state": one.doing,
            **({"log_line": one.log_line} if logged else {}),
        }
        for one in found
    ]


def rejected(cluster: ClusterAccess) -> int:
    """Return the number of messages and connections without the cluster's or a run's key."""
    router, hosted = cluster.engine_set.router, cluster.engine_set.hosted
    agents = None if hosted is None else hosted.agents
    of_agents = 0 if agents is None else agents.refused
    return int(router.rejected + sum(router.refused.values()) + of_agents)


def notes(cluster: ClusterAccess) -> list[str]:
    """Return the lines below the table."""
    count, said = rejected(cluster), []
    if count:
        said.append(
            f"Messages and connections that Workbench refused: {count}. Possible reasons: no valid "
            "key, an invalid message, or a message that arrived twice. Another user of this "
            "machine or network may be the cause. See docs/security.md."
        )
    if (hosted := cluster.engine_set.hosted) is not None:
        said += hosted.agents.turned_away
    return said + cluster.pool.words()


def table(cluster: ClusterAccess) -> Table:
    """Return the table of `%cluster`: one row per engine, sampled now."""
    found = rows(cluster, now=True)
    resident = any(one.memory_kind == "RSS" and one.memory_bytes for one in cluster.vitals.latest)
    said = [RESIDENT] if resident else []
    return cluster_table(found, notes=[*said, *notes(cluster)])


Doing = tuple[State, str]


@dataclass(frozen=True)
class Scene:
    """The current work of the cluster.

    Attributes:
        unfinished: Engines that run the cell, with their members; empty when no cell runs.
        run_state: State of the cell's run (`events.State`); empty for a cell without a strategy.
        places: The reported code place of each engine that was asked (`engine.stacks.where`).
    """

    unfinished: Mapping[int, Member]
    run_state: str
    places: Mapping[int, Whereabouts]


def doing(engine: int, state: str, exit_words: str, scene: Scene, *, starting: bool) -> Doing:
    """Return the state and the work of an engine.

    Args:
        state: The state of its process: idle, busy, dead.
        exit_words: How it ended, in a few words; empty while it lives.
    """
    if starting:
        return "starting", "starting"
    if state == "dead":
        return "dead", f"dead ({exit_words})" if exit_words else "dead"
    if engine not in scene.unfinished:
        return ("busy", "busy") if state == "busy" and not scene.unfinished else ("idle", "idle")
    place = scene.places.get(engine)
    if place is not None and place.state == "paused":
        return "paused", "paused at a debugger"
    if scene.run_state == "paused" or (place is not None and place.state == "held"):
        return "paused", "paused"
    if place is not None and place.state == "waits":
        return "waiting", f"waiting {place.waits_in}"
    who = scene.unfinished[engine]
    if not scene.run_state:
        return "cell", "in a cell"
    if who.role == "helper":
        return "serving", f"working as {who}"
    verb = "about to train" if scene.run_state == "starting" else "training"
    return "training", f"{verb} as {who}"


log = logging.getLogger("workbench.session")

EVERY_S = 1.0
SETTLE_S = 0.1
"""CPU shares need two readings; the clock of processes ticks every 10 ms."""
STALE_S = 5.0
QUIET_S = 2.0
"""Silence of a cell after which its engines are asked for their place in the code."""
ANSWER_S = 0.3

Listener = Callable[[Sequence[EngineVitals]], object]


class Vitals:
    """Samples the engines of one cluster; all methods may be called from any thread.

    Args:
        processes, gpus: The objects that read them; tests replace these.
    """

    def __init__(
        self, cluster: ClusterAccess, processes: Processes | None = None, gpus: Gpus | None = None
    ) -> None:
        self._cluster = cluster
        self._processes, self._gpus = processes or Processes(), gpus or Gpus()
        self._far: dict[int, HostReading] = {}
        self._logs: dict[int, LastLine] = {}
        self._latest: list[EngineVitals] = []
        self._sampled_at = -float("inf")
        self._lock = threading.Lock()
        self._watching = threading.Lock()
        self._listeners: list[Listener] = []
        self._thread: threading.Thread | None = None
        self._ended = threading.Event()

    @property
    def latest(self) -> list[EngineVitals]:
        """The last sample, without waiting; empty before the first sample."""
        return list(self._latest)

    def sample(self) -> list[EngineVitals]:
        """Return one row per engine, by id; a sample younger than a second is used again."""
        with self._lock:
            if time.monotonic() - self._sampled_at >= EVERY_S:
                self._take()
            return list(self._latest)

    def now(self) -> list[EngineVitals]:
        """Return a new sample with the memory of all engines; can take some tenths of a second."""
        with self._lock:
            if time.monotonic() - self._sampled_at > STALE_S:
                self._processes.read(self._local())
                self._read_far()
                time.sleep(SETTLE_S)
            self._take(all_memory=True)
            return list(self._latest)

    def watch(self, listener: Listener) -> Callable[[], None]:
        """Call `listener(sample)` once a second on a separate thread; return a function to stop
        that.
        """
        with self._watching:
            self._listeners.append(listener)
            if self._thread is None and not self._ended.is_set():
                self._thread = threading.Thread(
                    target=self._main, name="workbench-vitals", daemon=True
                )
                self._thread.start()

        def undo() -> None:
            with self._watching, contextlib.suppress(ValueError):
                self._listeners.remove(listener)

        return undo

    def close(self) -> None:
        """End the sampling, because the cluster is stopped."""
        self._ended.set()
        self._gpus.close()

    def _main(self) -> None:
        while True:
            with self._watching:
                if not self._listeners or self._ended.is_set():
                    self._thread = None
                    return
                listeners = list(self._listeners)
            try:
                found = self.sample()
                for listener in listeners:
                    listener(found)
            except Exception:  # a listener that fails must not end the calls of the others
                log.exception("The state of the engines could not be read or shown")
            self._ended.wait(EVERY_S)

    # -- one sample, under the lock --------------------------------------------------------------

    def _take(self, *, all_memory: bool = False) -> None:
        cluster = self._cluster
        readings = self._processes.read(self._local(), all_memory=all_memory)
        far = self._read_far(all_memory=all_memory)
        gpus = [] if far is not None else self._gpus.read()
        workers, living = cluster.worker_ids, set(cluster.ids)
        leases = cluster.lease(max(1, len(workers))).leases
        ranks = {engine: rank for rank, engine in enumerate(workers)}
        scene, starting = look(cluster), set(cluster.engine_set.starting)
        found = []
        for info in cluster.engines:
            rank = ranks.get(info.id)
            server = "server" if info.id in living else ""
            lease = cluster.pool.given.get(info.id) or (None if rank is None else leases[rank])
            device = server
            if lease is not None and (rank is not None or lease.gpu):
                device = lease.label
            exit_words = info.exit.short if info.exit else ""
            does = doing(info.id, info.state, exit_words, scene, starting=info.id in starting)
            reading = readings.get(info.pid) if info.id in living else None
            seen: Sequence[GpuReading] = gpus
            uptime_s: float | None = None
            if far is not None and info.id in living:
                seen, reading, uptime_s = self._of_far(info.id, reading)
            elif info.state != "dead" and info.began:
                uptime_s = max(0.0, time.time() - info.began)
            found.append(self._row(info, rank, device, does, reading, seen, lease, uptime_s))
        known = {info.id for info in cluster.engines}
        found += [
            EngineVitals(i, None, 0, "", "", "starting", "starting") for i in starting - known
        ]
        self._latest = sorted(found, key=lambda one: one.engine)
        self._sampled_at = time.monotonic()

    def _row(
        self,
        info: EngineInfo,
        rank: int | None,
        device: str,
        does: Doing,
        reading: Reading | None,
        gpus: Sequence[GpuReading],
        lease: Lease | None,
        uptime_s: float | None,
    ) -> EngineVitals:
        line = self._logs.setdefault(info.id, LastLine(self._cluster.engine_set.log_path(info.id)))
        about: dict[str, Any] = {"uptime_s": uptime_s}
        if reading is not None:
            percent, held = gpu_use(gpus, lease.gpu if lease else "", reading.pids)
            about |= {
                "cpu_percent": reading.cpu_percent,
                "memory_bytes": reading.memory_bytes,
                "memory_kind": reading.memory_kind,
                "processes": len(reading.pids),
                "gpu_percent": percent,
                "gpu_memory_bytes": held,
            }
        state, words = does
        return EngineVitals(
            info.id, rank, info.pid, info.host, device, state, words,
            log_line=line.read(), **about,
        )  # fmt: skip

    def _local(self) -> dict[int, float]:
        """Return pid and start time of the living engines of this host."""
        return {
            info.pid: info.began
            for info in self._cluster.engines
            if info.state != "dead" and info.pid > 0 and info.is_here
        }

    def _read_far(self, *, all_memory: bool = False) -> Mapping[int, HostReading] | None:
        """Ask the agents of all hosts; if an agent does not answer in time, its last reading is
        used.

        Returns:
            Readings by the hosts' places; None if engines have no agents.
        """
        hosted = self._cluster.pool.hosted
        if hosted is None:
            return None
        agents = hosted.agents
        self._far |= agent_readings(agents, agents.living, all_memory=all_memory)
        return self._far

    def _of_far(
        self, engine: int, own: Reading | None
    ) -> tuple[Sequence[GpuReading], Reading | None, float | None]:
        """Return a remote engine's GPUs, its reading, and the time since its start."""
        hosted = self._cluster.pool.hosted
        host = None if hosted is None else hosted.host_of(engine)
        read = None if host is None else self._far.get(host.place)
        if read is None:
            return (), own, None
        return read.gpus, read.engines.get(engine, own), read.uptimes_s.get(engine)


def look(cluster: ClusterAccess) -> Scene:
    """Return the current work; ask the engines of a silent cell for their place in the code."""
    task, busy = cluster.last_task, cluster.busy
    if task is None or task.is_over:
        return Scene({}, "", {})
    unfinished = {engine: task.member(engine) for engine in task.unfinished()}
    places: Mapping[int, Whereabouts] = {}
    if time.perf_counter() - task.moved_at >= QUIET_S:
        asked = [engine for engine in unfinished if engine in cluster.ids]
        places = cluster.engine_set.router.questions.ask(AskWhere, asked, ANSWER_S)
    return Scene(unfinished, str(busy.state) if isinstance(busy, Run) else "", places)
