"""Engines of one cluster: started, watched, called, signalled, stopped; over ipyparallel.

A cluster has its own folder, its own cluster id and its own controller, so it never meets the
user's other clusters. Local engines are forked from a warm parent where the system allows it.
ipyparallel's own launchers do everything else. Kept engines go to another kernel:

    this kernel: keep ── about (into cluster.json) ── release, or its end
    the next:    take_over ── invite (control.json) ── expect, for calls under way
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import signal as signals
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ClusterError
from ..shared.cluster_env import host_token
from . import calls, folders, processes, progress
from .calls import Call, NoAnswerError, Pending, gather
from .hosts.settings import HERE, LOCAL, LaunchSettings
from .processes import Ending, lives
from .router import ControlRouter
from .services import ClusterServices

if TYPE_CHECKING:
    from ..shared.messages import Up
    from .hosts.agents import Host, HostFiles
    from .hosts.places import HostedEngines

__all__ = ["NOBODY", "EngineInfo", "Engines", "Listeners"]

log = logging.getLogger("workbench.cluster")
FETCH_TIMEOUT_S = 60.0
ORPHAN_S = 3.0
"""How long an engine that was not forked waits for its lost kernel before it ends."""


class Engines:
    """The engines of one cluster.

    Args:
        framework: The framework that engines import at their start, unless another is given.
        launch: Where they are started, and how.
        folder, key: Of a kept cluster that is taken over (`take_over`); by default fresh ones.

    Attributes:
        idle_timeout_s: A kept cluster ends after being idle for this time (0: never); None: it is
            not kept.
    """

    def __init__(
        self,
        listeners: Listeners,
        *,
        framework: str = "torch",
        launch: LaunchSettings = HERE,
        folder: Path | None = None,
        key: bytes | None = None,
    ) -> None:
        self.idle_timeout_s: float | None = None
        self._listeners = listeners
        self.launch, self.launcher = launch, launch.launcher
        self._ground = self._make_ground(framework, folder)
        self._calls = Pending(self._idle)
        address = self._ground.address or "127.0.0.1"
        try:
            self.router = ControlRouter(
                self._heard, address, key, secret=launch.launcher != LOCAL, ports=launch.ports
            )
        except BaseException:  # probably no port is free
            self._ground.stop()
            raise
        self.engines: dict[int, EngineInfo] = {}
        self.starting: tuple[int, ...] = ()
        """Ids of engines that are being started, or replaced."""
        self.on_change: Callable[[], None] = _nothing
        """Called when engines were started."""
        self._lock = threading.Lock()
        self._stopping = False
        self._next_id = 0

    def _make_ground(self, framework: str, folder: Path | None = None) -> ClusterServices:
        return ClusterServices(framework, self.launch, self._engine_left, self._helper_left, folder)

    def listen(self, listeners: Listeners) -> None:
        """Use other callbacks from now on: these engines were prepared before their cluster."""
        self._listeners = listeners

    def prewarm(self) -> None:
        """Begin, in the background, everything that a start needs except the engines themselves."""
        self._ground.prepare_in_background()

    @property
    def put_off(self) -> str:
        """Why the framework was not imported in advance, in words; empty if it was."""
        warm = self._ground.warm
        return "" if warm is None else warm.put_off

    @property
    def framework(self) -> str:
        """The framework that engines import at their start, unless another is given."""
        return self._ground.framework

    @framework.setter
    def framework(self, framework: str) -> None:
        self._ground.prefer(framework)

    @property
    def hosted(self) -> HostedEngines | None:
        """The agents and hosts of engines that agents started; None for other engines."""
        return self._ground.hosted

    def can_fork(self, framework: str) -> bool:
        """Whether engines with this framework are forked from a warm parent here."""
        return self._ground.can_fork(framework)

    @property
    def ids(self) -> list[int]:
        """Ids of the living engines, ascending."""
        return sorted(i for i, e in self.engines.items() if e.state != "dead")

    def start(
        self,
        count: int,
        report: progress.Report = progress.quiet,
        framework: str = "",
    ) -> list[int]:
        """Start `count` more engines and attach them; return their ids.

        Args:
            report: Called with the progress, on this and on other threads.

        Raises:
            ClusterError: They did not start; the error shows the end of their logs.
        """
        ids = list(range(self._next_id, self._next_id + count))
        self._next_id += count
        return self._start_ids(ids, report, framework)

    def _start_ids(
        self, ids: list[int], report: progress.Report = progress.quiet, framework: str = ""
    ) -> list[int]:
        ground, report = self._ground, progress.steady(report)
        self.starting = (*self.starting, *ids)
        try:
            ground.ensure(report, len(ids))
            uuids = ground.launch(ids, self.launch.start_timeout_s, framework, report)
            self._take_in(uuids)
        finally:
            self.starting = tuple(i for i in self.starting if i not in ids)
        report(progress.ready(len(ids)))
        self.on_change()
        return sorted(uuids)

    def _take_in(self, uuids: Mapping[int, str]) -> None:
        """Attach engines that have registered."""
        ground = self._ground
        found = {i: self._known_of(i, uuid) for i, uuid in uuids.items()}
        with self._lock:
            self.engines.update(found)
        if self.idle_timeout_s is not None:
            ground.parents.keep(ground.folder, self.idle_timeout_s)
            self.invite()
        self._attach(sorted(found))

    def _known_of(self, engine: int, uuid: str) -> EngineInfo:
        host = self._ground.host_of(engine)
        if host is None:
            return EngineInfo(engine, uuid)
        facts = host.facts
        return EngineInfo(engine, uuid, host=host.name, place=facts.token, address=facts.address)

    def _attach(self, ids: Sequence[int]) -> None:
        info = {
            "url": self.router.url,
            "key": self.router.key.hex(),
            "cwd": os.getcwd(),
            "sys_path": list(sys.path),
            "curve": self.router.public_key,
            **self._home(),
        }
        replies = self.call(
            ids, "workbench.engine.entry:attach", lambda i: ({**info, "engine": i},)
        )
        for engine, about in replies.items():
            self.engines[engine].pid = about["pid"]
            self.engines[engine].began = about["began"]
            if self._ground.host_of(engine) is None:
                self.engines[engine].host = about["host"]
            self.engines[engine].address = about["address"]
            self.engines[engine].place = about["place"]
            self.engines[engine].python = about["python"]
            self.engines[engine].frameworks = set(about["frameworks"])

    def submit(
        self,
        engine: int,
        name: str,
        args: tuple[Any, ...],
        on_output: Callable[[int, str, Mapping[str, Any]], None] | None = None,
        *,
        for_values: bool = False,
    ) -> Call:
        """Call `module:function` in one engine; returns at once."""
        info = self.engines.get(engine)
        if info is not None and info.state == "dead":
            how = info.exit or processes.Ending()
            raise processes.EngineDiedError(engine, info.pid, how, host=info.elsewhere)
        if info is None:
            raise ClusterError(
                "This engine does not exist.",
                seen=engine,
                allowed=f"one of {self.ids}",
                next_step="%cluster lists the engines",
                code="WB-CLUSTER-005",
            )
        call = calls.submit(
            self._ground.client, self._ground.socket, info.uuid, engine, name, args,
            on_output, self.router.feed, for_values=for_values,
        )  # fmt: skip
        info.state = "busy"
        self._calls.add(call)
        return call

    def together(self) -> AbstractContextManager[None]:
        """Send the calls that this thread submits in the block together, at its end."""
        return self._ground.together()

    def _idle(self, engine: int) -> None:
        info = self.engines.get(engine)
        if info is not None and info.state == "busy":
            info.state = "idle"

    def call(
        self,
        ids: Iterable[int],
        name: str,
        args: Callable[[int], tuple[Any, ...]] | tuple[Any, ...] = (),
        timeout_s: float = 60.0,
    ) -> dict[int, Any]:
        """Call `module:function` in several engines and wait for their results.

        Raises:
            ClusterError: One of them raised, died or did not answer in time.
        """
        with self.together():
            pending = [self.submit(i, name, args(i) if callable(args) else args) for i in ids]
        return gather(pending, name, timeout_s)

    def fetch(self, ids: Iterable[int], name: str, args: tuple[Any, ...]) -> dict[int, Any]:
        """Call a function that returns the user's values by name; those are returned by engine.

        A value that cannot be read here is an `Unread`.

        Raises:
            ClusterError: As `call`.
        """
        pending = [self.submit(i, name, args, for_values=True) for i in ids]
        replies = gather(pending, name, FETCH_TIMEOUT_S)
        return {engine: calls.read_values(reply) for engine, reply in replies.items()}

    def host_of(self, engine: int) -> Host | None:
        """Return the host of an engine that an agent has started; None for other engines."""
        return self._ground.host_of(engine)

    @property
    def host_files(self) -> HostFiles | None:
        """The files that runs read and write on hosts with agents; None if there are no agents."""
        return None if self._ground.hosted is None else self._ground.hosted.files

    def signal(self, engine: int, sig: int) -> None:
        """Send a signal to one engine (by pid; only engines we started)."""
        info = self.engines.get(engine)
        if info is not None and info.state != "dead":
            self._ground.signal(engine, info.pid, sig)

    def give_up(self, engine: int) -> None:
        """Complete the calls of an engine that was killed, if no process reports its end.

        Normally its warm parent reports it, but it can be halted; the hub's heartbeats are slow, or
        halted too.
        """
        info = self.engines.get(engine)
        if info is None or info.state == "dead" or self.launch.launcher != LOCAL:
            return
        if not lives(info.pid):
            self._lost(info, processes.Ending(signal="SIGKILL", hint="the cause is not known"))

    def interrupt(self, ids: Iterable[int]) -> None:
        """Send SIGINT to engines."""
        for engine in ids:
            self.signal(engine, signals.SIGINT)

    def restart(self, ids: Iterable[int], framework: str = "") -> list[int]:
        """End engines and start new ones as their replacements, with the same ids.

        If no engine can be reached because the controller died or does not answer, all engines are
        replaced.
        """
        gone = list(ids)
        for engine in gone:
            self.known(engine)
        lived = self.ids
        self._ground.look()
        gone = sorted({*gone, *(set(lived) - set(self.ids))})  # also who ended by that
        if not self._ground.broken:
            try:
                return self._replace(gone, framework)
            except NoAnswerError as error:
                self._ground.broken = str(error)
        for info in list(self.engines.values()):  # told before their processes end
            if info.state != "dead":
                self._lost(info, processes.RESTARTED)
        self._ground.stop()
        self._ground = self._make_ground(self.framework)
        return self._replace(sorted(self.engines), framework)

    def seek_hosts(self) -> None:
        """Let the next restart ask for other hosts if the cluster has no host left."""
        hosted = self._ground.hosted
        if hosted is not None and hosted.is_over and not self._ground.broken:
            self._ground.broken = "the connections to all hosts of the cluster have ended"

    def _replace(self, gone: Sequence[int], framework: str) -> list[int]:
        for engine in gone:
            info = self.engines[engine]
            if info.state != "dead":
                self._lost(info, processes.RESTARTED)
                self._ground.end(engine, info.pid)
        return self._start_ids(list(gone), framework=framework)

    @property
    def reusable(self) -> bool:
        """Whether another cluster can use these processes after a `reset`."""
        return not self._stopping and not self.kept and self._ground.reusable

    def reset(self, framework: str = "") -> None:
        """Return to the state before the first engine; the controller and warm parents stay.

        All engines and their store end without notices; ids count from 0 again.

        Args:
            framework: The framework of the next engines; by default the same as before.

        Raises:
            ClusterError: The store does not end.
        """
        self.listen(NOBODY)
        self.on_change = _nothing
        self.when_taken(_nothing)
        for info in list(self.engines.values()):
            if info.state != "dead":
                self._lost(info, processes.GIVEN_UP)
                self._ground.end(info.id, info.pid)
        self.engines.clear()
        self._next_id = 0
        self.router.rejected = 0
        self.router.refused.clear()
        self._ground.store.end()
        if framework:
            self.framework = framework

    def known(self, engine: int) -> EngineInfo:
        """Return what is known about an engine, dead or alive.

        Raises:
            ClusterError: There never was an engine with this id.
        """
        info = self.engines.get(engine)
        if info is None:
            raise ClusterError(
                "There is no engine with this id.",
                seen=engine,
                allowed=", ".join(map(str, sorted(self.engines))),
                next_step="%cluster lists the engines",
                code="WB-CLUSTER-006",
            )
        return info

    def store(self) -> tuple[str, int]:
        """Return host and port of the TCPStore, started on first use."""
        return self._ground.store.address()

    def _heard(self, engine: int, message: Up) -> None:
        self._listeners.message(engine, message)

    def _engine_left(self, engine: int, how: processes.Ending) -> None:
        """A process ended or its heart stopped; called on a background thread."""
        info = self.engines.get(engine)
        if info is None or info.state == "dead" or self._stopping:
            return
        self._lost(info, how)

    def _helper_left(self, what: str, pid: int, how: processes.Ending) -> None:
        """A process that is not an engine ended; without the controller no engine can be used."""
        if self._stopping:
            return
        self._listeners.helper(f"{what[0].upper()}{what[1:]} (pid {pid}) died: {how}.")
        if self._ground.broken:
            for info in list(self.engines.values()):
                if info.state != "dead":
                    self._ground.signal(info.id, info.pid, signals.SIGKILL)
                    since = self._ground.broken
                    how = processes.Ending(what="not reachable", since=since, with_all=True)
                    self._lost(info, how)

    def _lost(self, info: EngineInfo, how: processes.Ending) -> None:
        """Clean up after an engine that has ended."""
        info.state, info.exit = "dead", how
        self.router.forget(info.id)
        stranded = self._calls.take(info.id)
        log = processes.excerpt(self.log_tail(info.id, 200))
        error = processes.EngineDiedError(info.id, info.pid, how, log, host=info.elsewhere)
        self._listeners.death(info)
        for call in stranded:
            call.finish(error)

    def log_path(self, engine: int) -> Path:
        """Return where an engine's log is.

        Raises:
            ClusterError: There never was an engine with this id.
        """
        self.known(engine)
        return self._ground.log_path(engine)

    def log_tail(self, engine: int, lines: int = 40) -> str:
        """Return the last lines of an engine's log."""
        path = self._ground.log_path(engine)
        if not path.exists():
            return ""
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])

    def folder(self) -> Path:
        """The cluster's private folder."""
        return self._ground.folder

    def stop(self) -> None:
        """End everything this cluster started; safe to call twice."""
        self._stopping = True
        for call in self._calls.all():
            call.finish(ClusterError("The cluster was stopped.", code="WB-CLUSTER-007"))
        self._ground.stop()
        self.engines.clear()
        with contextlib.suppress(Exception):
            self.router.close()

    # -- kept clusters -----------------------------------------------------------------------------

    @property
    def kept(self) -> bool:
        """Whether the engines outlive this kernel."""
        return self.idle_timeout_s is not None

    def keep(self, idle_timeout_s: float) -> None:
        """Let engines outlive this kernel; call it before the first engine is started.

        Raises:
            ClusterError: They are not forked here, so no warm parent would look after them.
        """
        if not self._ground.forks:
            raise ClusterError(
                "The engines of this cluster end together with the notebook's kernel, so they "
                "cannot be kept.",
                seen=self._ground.why_not, code="WB-CLUSTER-008",
                allowed="engines that Workbench forks on this machine (--launcher local, on Linux)",
                next_step="remove --keep, and save the training with --checkpoint",
            )  # fmt: skip
        self.idle_timeout_s = idle_timeout_s

    def about(self) -> dict[str, Any]:
        """Return the description of its processes for the cluster's folder (`folders.py`)."""
        return {
            **self._ground.about(),
            "engines": {str(i): described(one) for i, one in self.engines.items()},
            "next_id": self._next_id,
            "key": self.router.key.hex() if self.kept else "",
            "framework": self._ground.framework,
            "launcher": self.launch.launcher,
        }

    def take_over(self, about: Mapping[str, Any], *, take: bool) -> None:
        """Become the owner of engines that another kernel has left.

        Raises:
            ClusterError: They have ended, or have an owner.
        """
        ground = self._ground
        self.idle_timeout_s = float(about["idle_timeout_s"])
        self._next_id = int(about["next_id"])
        for number, one in about["engines"].items():
            info = recalled(int(number), one)
            if not folders.alive(one):
                info.state, info.exit = "dead", Ending(what="ended while no notebook was attached")
            self.engines[info.id] = info
        ground.take_over(about, take=take)
        self.invite()

    def invite(self) -> None:
        """Write into the cluster's folder where engines reach this kernel."""
        folders.write_json(self._ground.folder / folders.CONTROL, {"url": self.router.url})

    def expect(self, engine: int) -> Call:
        """Return a call that represents one begun by another kernel and finished elsewhere."""
        call, info = Call(engine), self.engines.get(engine)
        if info is None or info.state == "dead":
            call.finish(
                ClusterError(
                    f"Engine {engine} died: {info.exit if info else 'unknown cause'}.",
                    code="WB-CLUSTER-009",
                )
            )
            return call
        info.state = "busy"
        self._calls.add(call)
        return call

    def when_taken(self, callback: Callable[[int], None]) -> None:
        """Set a callback that gets the pid of a kernel that takes this cluster over."""
        self._ground.parents.on_taken = callback

    def release(self, reason: str) -> None:
        """Release all processes, which continue without this kernel; waiting calls fail."""
        self._stopping = True
        for call in self._calls.all():
            call.finish(ClusterError(reason, code="WB-CLUSTER-010"))
        self._ground.release()
        self.engines.clear()
        with contextlib.suppress(Exception):
            self.router.close()

    def _home(self) -> dict[str, Any]:
        """Return the engines' settings: when they end, and where they write their activity."""
        if self._ground.hosted is not None:
            return {}  # its agent ends it
        if not self._ground.forks:
            return {"patience_s": ORPHAN_S}
        return {"folder": str(self._ground.folder), "kept": self.kept}


@functools.cache
def _own_place() -> str:
    return host_token()


def _nothing(*_: object) -> None:
    """Do nothing."""


_KNOWN = ("uuid", "pid", "host", "place", "python", "device")


@dataclass
class EngineInfo:
    """One engine as the kernel sees it.

    Attributes:
        id: Permanent; in this cluster only its replacement gets the same id. place: The token of
            its host (`cluster_env.host_token`). address: The address at which other hosts reach its
            host; empty on this machine.
        state: idle, busy, dead.
        exit: How it ended; None while it lives.
        frameworks: The frameworks that it has imported.
    """

    id: int
    uuid: str
    pid: int = 0
    host: str = ""
    place: str = ""
    address: str = ""
    python: str = ""
    device: str = "cpu"
    state: str = "idle"
    exit: Ending | None = None
    frameworks: set[str] = field(default_factory=set)

    @property
    def is_here(self) -> bool:
        """Whether it runs on this machine."""
        return not self.place or self.place == _own_place()

    @property
    def elsewhere(self) -> str:
        """The name of its host; empty if it runs on this machine."""
        return "" if self.is_here else self.host

    began: float = 0.0  # its start time, to distinguish it from a later process with the same pid


@dataclass(frozen=True)
class Listeners:
    """Callbacks for events; each is called on a background thread and must return quickly."""

    message: Callable[[int, Up], None]
    death: Callable[[EngineInfo], None]
    helper: Callable[[str], None] = lambda text: None
    """Called, with a text, when a process of the cluster that is not an engine ended."""


NOBODY = Listeners(message=lambda engine, message: None, death=lambda engine: None)
"""The callbacks for engines that belong to no cluster yet, or no longer."""


def described(info: EngineInfo) -> dict[str, Any]:
    """Return an engine's description for another kernel, for `recalled`."""
    return {
        **{name: getattr(info, name) for name in _KNOWN},
        "frameworks": sorted(info.frameworks),
        "create_time": info.began,
    }


def recalled(engine: int, about: Mapping[str, Any]) -> EngineInfo:
    """Return an engine from another kernel's description."""
    known = {key: value for key, value in about.items() if key in _KNOWN}
    info = EngineInfo(engine, **known, frameworks=set(about["frameworks"]))
    info.began = float(about["create_time"])
    return info
