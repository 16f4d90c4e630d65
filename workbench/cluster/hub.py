"""ipyparallel's controller of one cluster, and this kernel's client of it.

With it comes an engine launcher for ipyparallel that forks engines from a warm parent.
`ipyparallel.Cluster(engines="workbench", n=4)` works by itself: the launcher then starts a warm
parent of its own. `wb.Cluster` passes one that is already warm.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import signal as signals
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from textwrap import indent
from typing import Any

import ipyparallel
import psutil
import zmq
from ipyparallel.cluster.launcher import EngineLauncher, NotRunning, ProcessStateError
from IPython.core.profiledir import ProfileDir, ProfileDirError
from IPython.paths import get_ipython_dir
from traitlets import Any as AnyTrait
from traitlets import Float, Integer, List, Unicode
from traitlets.config import Config
from traitlets.config.loader import ConfigFileNotFound, DeferredConfigString, PyFileConfigLoader
from traitlets.log import get_logger

from ..errors import ClusterError
from .calls import Gathering, NoAnswerError
from .controller import config
from .forkserver.client import WarmParent
from .processes import Exit, watch

REAPED_S = 0.5
UNLISTED_S = 10.0
"""How long the hub may take to remove engines that have ended."""
ANSWER_S = 20.0
ATTEMPT_S, CONNECT_S = 10.0, 90.0
"""How long one request to connect waits, and all of them: a class whose controllers start at once
on a few cores takes longer than ipyparallel's 10 s."""


class Controller:
    """Starts or finds the controller, connects to it, and knows which engines are registered.

    Args:
        folder: The cluster's.
        launcher: One of ipyparallel's, that starts engines; empty where engines are forked.
        interface: Where the controller listens; empty: on this machine only.
        secret: Whether messages are encrypted (CURVE), as is required between hosts.
        ports: First and last port that may be listened on; None: any.
        options: For ipyparallel's launcher: `profile` (its settings are read), and single
            settings, such as `PBSLauncher.queue`.
        on_left: Called when the controller's process ended.
        on_unlisted: Called with an engine that is no longer registered.

    Attributes:
        cluster: ipyparallel's cluster; None until `start` or `reconnect`.
        client: This kernel's client; None until it is connected.
        socket: The stream that calls are sent on; None until then.
    """

    def __init__(
        self,
        folder: Path,
        launcher: str,
        interface: str,
        on_left: Callable[[Exit], None],
        on_unlisted: Callable[[int], None],
        *,
        secret: bool = False,
        ports: tuple[int, int] | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.cluster: Any = None
        self.client: Any = None
        self.socket: Any = None
        self._folder, self._launcher, self._interface = folder, launcher, interface
        self._secret, self._ports, self._options = secret, ports, options or {}
        self._on_left, self._on_unlisted = on_left, on_unlisted
        self._changed, self._ended = threading.Event(), threading.Event()

    @property
    def controller(self) -> Any:
        """The controller's launcher, which has its `pid`; None before it was started."""
        return None if self.cluster is None else self.cluster.controller

    def start(self, guard: Callable[[int], None]) -> None:
        """Start the controller and connect.

        Args:
            guard: Given the controller's pid as soon as there is one.
        """
        self.cluster = self._ipyparallel()
        self.cluster.start_controller_sync()
        watch(self.cluster.controller.pid, self._left)
        guard(self.cluster.controller.pid)
        self._connect()

    def reconnect(self, saved: Mapping[str, Any]) -> None:
        """Connect to the controller that another kernel left.

        Args:
            saved: The result of its launcher's `to_dict`.
        """
        self.cluster = cluster = self._ipyparallel()
        cluster.controller = cluster.controller_launcher_class.from_dict(saved, parent=cluster)
        watch(cluster.controller.pid, self._left)
        self._connect()

    def _ipyparallel(self) -> Any:
        quiet = logging.getLogger("workbench.ipyparallel")
        quiet.setLevel(logging.CRITICAL)
        settings: dict[str, Any] = {**CLUSTER_SETTINGS}
        if self._launcher:
            settings["engines"] = self._launcher
        if self._interface:
            settings |= {"controller_ip": self._interface, "controller_location": self._interface}
        if self._secret:
            settings["controller_args"] = [*CONTROLLER_ARGS, "--IPController.enable_curve=True"]
        if self._ports is not None:
            free = ",".join(map(str, free_ports(self._interface or "127.0.0.1", self._ports)))
            settings["controller_args"] = [
                *settings["controller_args"], f"--IPController.ports={free}",
            ]  # fmt: skip
        return ipyparallel.Cluster(
            profile_dir=str(self._folder),
            cluster_id="",
            config=self._settings(),
            log=quiet,
            n=0,
            shutdown_atexit=False,
            **settings,
        )

    def _settings(self) -> Config:
        """Return ipyparallel's settings: of the profile that was named, then ours, then options."""
        found = Config()
        if profile := self._options.get("profile"):
            try:
                find: Any = ProfileDir.find_profile_dir_by_name
                folder = find(get_ipython_dir(), profile).location
            except ProfileDirError as error:
                raise ClusterError(
                    "ipyparallel has no profile with this name.",
                    seen=f"profile={profile}",
                    next_step="give the name of a profile that `ipython profile list` shows; or "
                    f"run `ipython profile create --parallel --profile={profile}`",
                    code="WB-CLUSTER-072",
                ) from error
            with contextlib.suppress(ConfigFileNotFound):
                found.merge(PyFileConfigLoader("ipcluster_config.py", folder).load_config())
        found.merge(config(self._folder))
        for name, value in self._options.items():
            owner, dot, trait = name.partition(".")
            if dot:
                found[owner][trait] = DeferredConfigString(value)
        return found

    def _connect(self) -> None:
        end = time.monotonic() + CONNECT_S
        while self.client is None:
            try:
                with _unsigned() if self._secret else contextlib.nullcontext():
                    self.client = self.cluster.connect_client_sync(timeout=ATTEMPT_S)
            except TimeoutError:  # noqa: PERF203 - the wait is what costs
                if self._ended.is_set() or time.monotonic() > end:
                    raise
        self.client._registration_callbacks.append(self._registration)
        _hush(self.client)
        # The stream that direct views send on; sending on the bare socket below it would eat
        # the wake-up of a reply that arrives meanwhile.
        self.socket = stream = self.client._mux_stream
        flush = partial(stream.flush, zmq.POLLOUT)
        self.client._io_loop = Gathering(self.client._io_loop, flush)

    # -- who is registered -------------------------------------------------------------------------

    def connection(self) -> str:
        """Return the text of the file by which engines find the controller."""
        return (self._folder / "security" / "ipcontroller-engine.json").read_text()

    def uuids(self, engines: Sequence[int]) -> dict[int, str]:
        """Return the ipyparallel uuids of registered engines."""
        known = self.client._engines
        return {i: str(known[i]) for i in engines}

    def await_change(self, timeout_s: float) -> None:
        """Wait until an engine registers or is removed, or time is up."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def await_unlisted(self, engines: Sequence[int]) -> None:
        """Wait until the hub has removed engines, for `UNLISTED_S` at most."""
        end = time.monotonic() + UNLISTED_S
        while set(engines) & set(self.client.ids) and time.monotonic() < end:
            for engine in engines:
                self.unlist(engine)
            self.await_change(0.1)

    def unlist(self, engine: int, uuid: str = "") -> None:
        """Tell the hub that an engine has ended, as ipyparallel's nanny would; heartbeats are slow.

        Args:
            uuid: The engine's uuid, because another engine may have its id now.
        """
        # Engines that end after the client was closed have no hub to be struck off from.
        if self.client._closed:
            return
        listed = self.client._engines.get(engine)
        if listed is not None and (not uuid or listed == uuid):
            self._strike_off(engine)

    def make_room(self, engines: Sequence[int]) -> None:
        """Make the hub forget engines, even those that clients do not see; returns when it has.

        A request that the hub reads later would remove the next engine with this id.

        Raises:
            NoAnswerError: The hub does not answer.
        """
        for engine in engines:
            self._strike_off(engine)
        # Any request with a reply will do: it is read after those that were sent before it.
        answer = self.client._send(self.client._query_stream, "connection_request")
        if not answer.wait(ANSWER_S):
            raise NoAnswerError(
                "ipyparallel's controller does not answer.",
                seen=f"no answer for {ANSWER_S:g} s",
                next_step="run %cluster stop, then %cluster start",
                code="WB-CLUSTER-012",
            )

    def together(self) -> contextlib.AbstractContextManager[None]:
        """Send this thread's requests in the block together, at its end (`calls.Gathering`)."""
        client = self.client
        return contextlib.nullcontext() if client is None else client._io_loop.together()

    def _strike_off(self, engine: int) -> None:
        # By the stream: sending on the socket below it would eat the wake-up of a reply.
        self.client._send(self.client._query_stream, "unregistration_request", {"id": engine})

    def _registration(self, event: dict[str, Any]) -> None:
        self._changed.set()
        if event["event"] == "unregister":
            self._on_unlisted(int(event["id"]))

    # -- the end -----------------------------------------------------------------------------------

    def _left(self, end: Exit) -> None:
        self._ended.set()
        if end.code is None and end.signal is None:  # ipyparallel has reaped it before we looked
            with contextlib.suppress(Exception):
                running = self.cluster.controller
                # Of two that wait for a process at once, who comes second learns no code.
                running._wait_thread.join(REAPED_S)
                code = running.process.wait(timeout=REAPED_S)
                end = Exit(end.pid, code if code >= 0 else None, -code if code < 0 else None)
        self._on_left(end)

    def close(self) -> None:
        """Disconnect; the controller continues."""
        if self.client is not None and not self.client._closed:
            with contextlib.suppress(Exception):
                # Its loop closes the sockets before `close` does, and what they still have for a
                # controller that is gone would keep them for ever.
                self.client._io_loop.add_callback(self._drop_unsent)
                self.client.close(linger=0)

    def _drop_unsent(self) -> None:
        for name in self.client.trait_names():
            if name.endswith("_socket") and (socket := getattr(self.client, name)) is not None:
                socket.setsockopt(zmq.LINGER, 0)

    def stop(self) -> None:
        """End the controller, and engines that ipyparallel started."""
        if self.cluster is None:
            return
        with contextlib.suppress(Exception):
            if self._launcher:
                self.cluster.stop_engines_sync()
            running = self.cluster.controller
            if running is not None and running.pid > 0:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(running.pid, signals.SIGTERM)
                with contextlib.suppress(Exception):
                    self.cluster.stop_controller_sync()
        _end_thread(self.cluster)


def _hush(client: Any) -> None:
    """Have a client print nothing of replies that nobody waits for: of hosts that come back."""
    handlers = getattr(client, "_queue_handlers", {})
    if (handle := handlers.get("apply_reply")) is None:
        return

    def handle_wanted(message: dict[str, Any]) -> None:
        if message["parent_header"]["msg_id"] in client.outstanding:
            handle(message)

    handlers["apply_reply"] = handle_wanted


@contextlib.contextmanager
def _unsigned() -> Iterator[None]:
    """Keep a client from warning that it does not sign: what CURVE encrypts cannot be forged."""

    def passes(record: logging.LogRecord) -> bool:
        return "signing is disabled" not in str(record.msg)

    logger: Any = get_logger()
    logger.addFilter(passes)
    try:
        yield
    finally:
        logger.removeFilter(passes)


def free_ports(address: str, ports: tuple[int, int]) -> list[int]:
    """Return the ports of a range on which no process listens now."""
    found = []
    for port in range(ports[0], ports[1] + 1):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            found.append(port)
    return found


def _end_thread(cluster: Any) -> None:
    """End the thread on which ipyparallel runs what is called within a running event loop.

    It would live as long as the kernel, with its loop's files.
    """
    thread, loop = getattr(cluster, "_async_thread", None), getattr(cluster, "_thread_loop", None)
    if thread is None or loop is None or thread is threading.current_thread():
        return
    loop.add_callback(loop.stop)
    thread.join(REAPED_S)
    if not thread.is_alive():
        with contextlib.suppress(Exception):
            loop.close(all_fds=True)


# The warm parent is the nanny, and it ends engines that nobody needs any more; the engine's own
# watch on the controller would only cost threads and start-up time.
ENGINE_ARGS = ("--IPEngine.enable_nanny=False", "--IPEngine.max_heartbeat_misses=0")

CONTROLLER_ARGS = (
    # An engine counts as registered at its second heartbeat: 3 s each by default. Engines are
    # declared dead by the warm parent, at once; the heartbeat only has to be patient (30 s).
    "--HeartMonitor.period=100",
    "--HeartMonitor.max_heartmonitor_misses=300",
    "--IPController.broadcast_scheduler_depth=0",
    "--TaskScheduler.scheme_name=none",
)

CLUSTER_SETTINGS: dict[str, Any] = {
    "engines": "workbench",
    "controller_args": list(CONTROLLER_ARGS),
    "delay": 0.0,
    "load_profile": False,
}
"""Arguments of `ipyparallel.Cluster` for the fastest safe start."""

POLL_S = 0.2


class WarmEngineSetLauncher(EngineLauncher):  # type: ignore[misc]
    """A set of engines on this machine, forked from a warm parent.

    Attributes:
        warm: The `WarmParent` to fork from; without one the launcher starts its own and stops it
            with the engines.
        on_fork: Called with the number of engines forked so far, on a thread of its own.
        ids: Engine ids to ask for; by default they count on from the cluster's other engine sets.
        pids: Process id of every live engine, by engine id.
        exits: How engines that ended did so, by engine id.
    """

    warm = AnyTrait(None, allow_none=True)
    on_fork = AnyTrait(None, allow_none=True)
    framework = Unicode("torch")
    ids = List(Integer()).tag(to_dict=True)
    engine_args = List(Unicode(), default_value=list(ENGINE_ARGS), config=True)
    grace_s = Float(2.0, config=True, help="seconds from SIGTERM to SIGKILL")

    def __init__(self, **kwargs: Any) -> None:
        self.pids: dict[int, int] = {}
        self.exits: dict[int, Exit] = {}
        self.log_paths: dict[int, str] = {}
        self._lock = threading.Lock()
        self._all_gone = threading.Event()
        self._owned: WarmParent | None = None
        self._undo: Callable[[], None] = _nothing
        super().__init__(**kwargs)

    # -- starting ------------------------------------------------------------------------------

    def find_args(self) -> list[str]:
        """Return what our log lines call this set."""
        return ["workbench engine set"]

    async def start(self, n: int) -> list[int]:
        """Fork `n` engines; returns their pids once they exist (they register by themselves).

        Raises:
            ClusterError: The warm parent could not start or fork.
        """
        if self.state != "before":
            raise ProcessStateError(f"The engines are already started (state: {self.state})")
        self.loop  # noqa: B018 - taken here, on the loop's own thread
        self.n = n
        if not self.ids:
            first = self._first_id()
            self.ids = list(range(first, first + n))
        # The notebook's state now, not when the thread runs later.
        job = {
            "env": {**os.environ, **self.get_env()},
            "cwd": os.getcwd(),
            "sys_path": [str(entry) for entry in sys.path],
            "together": n,
        }
        await asyncio.get_running_loop().run_in_executor(None, partial(self._fork_all, job))
        self.notify_start(list(self.pids.values()))
        self._check_gone()
        return list(self.pids.values())

    def _first_id(self) -> int:
        others = getattr(self.parent, "engines", None) or {}
        taken = [i for other in others.values() if other is not self for i in _ids_of(other)]
        return max(taken, default=-1) + 1

    def _fork_all(self, job: dict[str, Any]) -> None:
        if self.warm is None:
            self.warm = self._owned = WarmParent(self.framework)
        warm = self.warm
        warm.wait_ready()
        self._undo = warm.on_exit(self._ended)
        folder = Path(self.profile_dir) / "log"
        folder.mkdir(parents=True, exist_ok=True)
        for engine_id in self.ids[: self.n]:
            log_path = str(
                folder / f"ipengine-{self.cluster_id}-{self.engine_set_id}-{engine_id}.log"
            )
            argv = [*self.engine_args, f"--IPEngine.id={engine_id}"]
            pid = warm.fork_engine(argv, log_path=log_path, name=f"engine-{engine_id}", **job)
            self.log_paths[engine_id] = log_path
            with self._lock:
                self.pids[engine_id] = pid
            if self.on_fork is not None:
                self.on_fork(len(self.log_paths))
            end = warm.exit_of(pid)
            if end is not None:  # it was faster than we were
                self._ended(end)

    # -- ending --------------------------------------------------------------------------------

    def _ended(self, end: Exit) -> None:
        """An engine ended (called in the warm parent's reader thread)."""
        with self._lock:
            engine_id = next((i for i, pid in self.pids.items() if pid == end.pid), None)
            if engine_id is None:
                return
            del self.pids[engine_id]
            self.exits[engine_id] = end
        self._check_gone()

    def _check_gone(self) -> None:
        if self.state != "running" or self.pids:
            return
        self._undo()
        if self._owned is not None:
            # Not in the reader thread, which `stop` waits for.
            threading.Thread(target=self._owned.stop, name="workbench-warm-stop").start()
        self._all_gone.set()
        data = {
            "exit_code": next((e.code or -(e.signal or 0) for e in self.exits.values()), None),
            "engines": {i: {"exit_code": e.code, "pid": e.pid} for i, e in self.exits.items()},
        }
        self.loop.add_callback(self.notify_stop, data)

    async def stop(self) -> None:
        """Stop the engines: SIGTERM, and SIGKILL after `grace_s`; returns when they are gone."""
        if self.state != "running":
            return
        pids = list(self.pids.values())
        if self.warm is not None and self.warm.alive:
            self.warm.stop_pids(pids, self.grace_s)
        else:
            for pid in pids:
                _signal(pid, signal.SIGTERM)
        try:
            await self.join(self.grace_s + POLL_S)
        except TimeoutError:
            for pid in pids:
                _signal(pid, signal.SIGKILL)
            await self.join(self.stop_timeout)
        if self._owned is not None:
            self._owned.stop()

    def signal(self, sig: int) -> None:
        """Send a signal to every engine."""
        for engine_id in list(self.pids):
            self.signal_engine(engine_id, sig)

    def signal_engine(self, engine_id: int, sig: int) -> bool:
        """Send a signal to one engine; False when it is gone already."""
        pid = self.pids.get(engine_id)
        if pid is None:
            return False
        if self.warm is not None and self.warm.alive:
            return bool(self.warm.signal(pid, sig))
        return _signal(pid, sig)

    async def join(self, timeout: float | None = None) -> None:
        """Wait until every engine has ended.

        Raises:
            TimeoutError: Some had not after `timeout` seconds.
        """
        wait = partial(self._all_gone.wait, timeout)
        if not await asyncio.get_running_loop().run_in_executor(None, wait):
            raise TimeoutError(f"Engines {sorted(self.pids)} did not end in {timeout} s.")

    def get_output(self, remove: bool = False) -> str:
        """Return the ends of the engines' logs."""
        parts = []
        for engine_id, path in sorted(self.log_paths.items()):
            with contextlib.suppress(OSError):
                lines = Path(path).read_text(errors="replace").splitlines(keepends=True)
                if lines:
                    tail = "".join(lines[-self.output_limit :] if self.output_limit else lines)
                    parts.append(f"Output for engine {engine_id}\n{indent(tail, '  ')}")
                if remove:
                    os.unlink(path)
        return "\n".join(parts)

    # -- another process's engines ---------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return what `from_dict` needs."""
        data: dict[str, Any] = super().to_dict()
        data["pids"] = {str(i): pid for i, pid in self.pids.items()}
        data["log_paths"] = {str(i): path for i, path in self.log_paths.items()}
        return data

    @classmethod
    def from_dict(cls, d: dict[str, Any], **kwargs: Any) -> WarmEngineSetLauncher:
        """Take up engines that another process started; they are watched by pid.

        Raises:
            NotRunning: None of them is alive.
        """
        self: WarmEngineSetLauncher = super().from_dict(d, **kwargs)
        self.loop  # noqa: B018 - taken here, on the loop's own thread
        self.log_paths = {int(i): path for i, path in d.get("log_paths", {}).items()}
        self.pids = {int(i): pid for i, pid in d["pids"].items() if psutil.pid_exists(pid)}
        if not self.pids:
            raise NotRunning("None of the engines is alive")
        threading.Thread(target=self._watch, name="workbench-engines", daemon=True).start()
        return self

    def _watch(self) -> None:
        processes = {}
        for pid in self.pids.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                processes[pid] = psutil.Process(pid)
        while self.pids:
            for pid in list(self.pids.values()):
                process = processes.get(pid)
                if process is None or not process.is_running():
                    self._ended(Exit(pid, None, None))
            time.sleep(POLL_S)


def _ids_of(engine_set: Any) -> list[int]:
    ids = getattr(engine_set, "ids", None)
    return list(ids) if ids else list(range(engine_set.n))


def _signal(pid: int, sig: int) -> bool:
    try:
        os.kill(pid, sig)
    except ProcessLookupError:
        return False
    return True


def _nothing() -> None:
    """Undo nothing."""
