"""The process on a host that starts engines there; they end with it.

It connects to the kernel that started it, describes the host, and forks engines from its own warm
parent. It reports how the engines end and what they log. It ends when the kernel has ended: the
connection stays lost for `PATIENCE_S`, or its stdin is closed. Then it also ends the warm parent
and the engines, and removes its private folder.

    main thread    the connection: reads orders, sends queued messages
    a few others   execute orders, which can take as long as an import
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.metadata
import os
import platform
import secrets
import signal
import socket
import sys
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from types import FrameType
from typing import Any
from urllib.parse import urlsplit

import psutil
import zmq
from zmq.utils.monitor import recv_monitor_message

from ...devices.discovery import Survey, survey
from ...devices.leases import cpu_count
from ...errors import ClusterError
from ...shared import cluster_env
from ...shared.cluster_env import Wakeup, host_token, import_environment, own_address
from ...shared.messages import BadMessageError
from .. import folders
from ..forkserver.client import WarmParent
from ..hub import ENGINE_ARGS
from ..processes import Exit, MemoryWatch, ending, is_halted
from ..vitals import Gpus, Processes
from . import wire

PATIENCE_S = 6.0
"""How long a lost connection may take to come back."""
BEAT_S = 1.0
TOGETHER_S = 1.0
"""SIGTERMs within this time count as one: srun and Slurm's step daemon both send one."""
LOOK_S = 0.2
"""How often it checks the logs, and whether the kernel still exists."""
HEARTBEAT_MS, SILENT_MS = 1000, 4000
CONNECT_S = 8.0
LOG_BYTES = 64 << 10
MOST_WAITING = 100
"""Logs are read only while fewer messages than this wait for the connection."""
MPI_PREFIXES = ("OMPI_", "PMIX_", "PMI_", "PRTE_", "MPI_", "HYDRA_")
RANKS = ("SLURM_NODEID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK")


class Agent:
    """One host's agent.

    Args:
        join: Where the kernel is.
        stdin: Whether the end of stdin means that the kernel has ended.
    """

    def __init__(self, join: wire.Join, *, stdin: bool) -> None:
        self._join, self._word = join, bytes.fromhex(join.word)
        self.folder = folders.create()
        self._outbox: deque[wire.Up] = deque()
        self._wakeup = Wakeup()
        self._over, self._leaving, self._warns, self._told_at = False, "", False, 0.0
        self._workers = ThreadPoolExecutor(8, thread_name_prefix="workbench-agent")
        self._orders: wire.Ready | None = None
        self._parents: dict[str, WarmParent] = {}
        self._pids: dict[int, int] = {}  # by engine
        self._owners: dict[int, WarmParent] = {}  # by pid
        self._logs: dict[int, _Log] = {}
        self._memory, self._processes = MemoryWatch(), Processes()
        self._gpus, self._measuring = Gpus(), threading.Lock()
        self._lock, self._starting = threading.Lock(), threading.Lock()
        self._mpi_engine: int | None = None
        if stdin:
            threading.Thread(target=self._await_eof, daemon=True).start()

    # -- the connection ----------------------------------------------------------------------------

    def run(self) -> int:
        """Serve the kernel until it ends; return this process's exit code."""
        if self._join.framework:
            self._workers.submit(self._warm, self._join.framework)
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.curve_serverkey = self._join.key.encode()
        sock.curve_publickey, sock.curve_secretkey = zmq.curve_keypair()
        sock.setsockopt(zmq.LINGER, 1000)
        sock.setsockopt(zmq.IDENTITY, secrets.token_hex(16).encode())  # the same when it reconnects
        sock.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENT_MS)
        monitor = sock.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        sock.connect(self._join.url)
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._told_to_end)
        try:
            if not monitor.poll(int(1e3 * CONNECT_S)):
                where = urlsplit(self._join.url)
                sys.stderr.write(
                    f"{socket.gethostname()} cannot connect to the notebook: nothing answered at "
                    f"{where.hostname}:{where.port} within {CONNECT_S:g} s\n"
                )
                return wire.NO_ROUTE
            self._send(sock, self._arrived())
            self._serve(sock, monitor)
            return 0
        finally:
            self._end()
            sock.disable_monitor()
            monitor.close(0)
            sock.close()
            context.term()

    def _serve(self, sock: Any, monitor: Any) -> None:
        poller = zmq.Poller()
        for one in (sock, monitor, self._wakeup.fileno()):
            poller.register(one, zmq.POLLIN)
        lost_at: float | None = None
        beat_at = 0.0
        halted: tuple[int, ...] = ()
        while not (self._over and not self._outbox):
            ready = dict(poller.poll(int(1e3 * LOOK_S)))
            now = time.monotonic()
            if self._wakeup.fileno() in ready:
                self._wakeup.clear()
            if self._warns:
                self._warn()
            while monitor.poll(0):
                event = recv_monitor_message(monitor)["event"]
                lost_at = (lost_at or now) if event == zmq.EVENT_DISCONNECTED else None
            if lost_at is not None and now - lost_at > PATIENCE_S:
                return
            if sock in ready:
                self._receive(sock)
            if len(self._outbox) < MOST_WAITING:
                for engine in list(self._logs):
                    self._read_log(engine)
            before, halted = halted, self._halted()
            if now - beat_at >= BEAT_S or halted != before:
                beat_at = now
                self._outbox.append(wire.Alive(halted=halted))
            while self._outbox and self._send(sock, self._outbox[0]):
                self._outbox.popleft()

    def _halted(self) -> tuple[int, ...]:
        """Return the engines that a signal has stopped."""
        with self._lock:
            pids = list(self._pids.items())
        return tuple(i for i, pid in pids if i != wire.KEEPER and is_halted(pid))

    def _send(self, sock: Any, message: wire.Up) -> bool:
        """Send a message; return False if the connection accepts none now."""
        try:
            sock.send_multipart(wire.pack(message, self._word), zmq.NOBLOCK)
        except zmq.Again:
            return False
        return True

    def _receive(self, sock: Any) -> None:
        while True:
            try:
                frames = sock.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            with contextlib.suppress(BadMessageError):
                self._obey(wire.unpack_down(frames, self._word))

    def _obey(self, message: wire.Down) -> None:
        match message:
            case wire.End():
                self._over = True
            case wire.Ready():
                self._begin(message)
            case wire.Asked():
                self._workers.submit(self._answer, message)

    def _say(self, message: wire.Up) -> None:
        self._outbox.append(message)
        self._wakeup.set()

    def _await_eof(self) -> None:
        while sys.stdin.buffer.read(1 << 12):
            pass
        self._over = True
        self._wakeup.set()

    def _told_to_end(self, number: int, _frame: FrameType | None) -> None:
        why = f"Workbench's agent on this host received {signal.Signals(number).name}"
        now = time.monotonic()
        if not self._leaving and number == signal.SIGTERM:
            self._leaving, self._told_at, self._warns = why, now, True
        elif number != signal.SIGTERM or now - self._told_at >= TOGETHER_S:
            self._leaving = why
            self._leave()
        self._wakeup.set()

    def _warn(self) -> None:
        """Pass a SIGTERM on to the engines, which report their end.

        After the last one this process ends.
        """
        self._warns = False
        with self._lock:
            pids = [pid for engine, pid in self._pids.items() if engine != wire.KEEPER]
            owners = {pid: self._owners[pid] for pid in pids}
        for pid, owner in owners.items():
            with contextlib.suppress(ClusterError, ProcessLookupError):
                owner.signal(pid, signal.SIGTERM)
        if not pids:
            self._leave()

    def _leave(self) -> None:
        self._outbox.append(wire.Leaving(why=self._leaving))
        self._over = True
        self._wakeup.set()

    def _arrived(self) -> wire.Arrived:
        address = own_address(str(urlsplit(self._join.url).hostname))
        found = survey()
        facts = wire.HostFacts(
            hostname=socket.gethostname(),
            token=host_token(),
            address=address,
            cores=cpu_count(),
            memory_bytes=int(psutil.virtual_memory().total),
            pid=os.getpid(),
            versions={
                "python": platform.python_version(),
                **dict(filter(None, map(_installed, wire.PACKAGES))),
            },
            devices=[asdict(one) for one in found.devices],
            notes=found.notes,
            folder=str(self.folder),
            home=str(Path.home()),
            unfit=_unfit(found),
            cpus=sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (),
        )
        return wire.Arrived(place=_place(), slots=_slots(), facts=facts)

    # -- what is ordered ---------------------------------------------------------------------------

    def _begin(self, orders: wire.Ready) -> None:
        self._orders = orders
        os.environ.update((name, value) for name, value in orders.environ)
        folders.write_text(self.folder / "security" / "ipcontroller-engine.json", orders.connection)
        if orders.framework:
            self._workers.submit(self._warm, orders.framework)

    def _answer(self, message: wire.Asked) -> None:
        try:
            answer = self._done(message)
        except Exception as error:  # told where it was ordered
            answer = wire.Answer(ask=message.ask, error=f"{type(error).__name__}: {error}")
        self._say(answer)

    def _done(self, message: wire.Asked) -> wire.Answer:
        match message:
            case wire.Fork():
                return self._fork(message)
            case wire.Signal():
                return self._signal(message)
            case wire.Keep():
                return self._keep(message)
            case wire.Measure():
                return self._measure(message)
            case wire.ReadFile():
                return self._read(message)
            case wire.WriteFile():
                return self._write(message)
            case wire.RemoveFile():
                return self._remove(message)
            case wire.Look():
                seen = wire.Seen.at(message.path, deep=message.deep)
                return wire.Answer(ask=message.ask, value=seen and asdict(seen))
        raise NotImplementedError(message.kind)

    def _warm(self, framework: str) -> WarmParent:
        """Return the warm parent of a framework; it is started if there is none."""
        with self._starting:
            if self._over:
                raise ClusterError("The agent has ended.", code="WB-CLUSTER-071")
            parent = self._parents.get(framework)
            if parent is None or not parent.alive:
                if parent is not None:
                    parent.stop()
                parent = WarmParent(framework=framework, folder=str(self.folder))
                parent.on_exit(self._left)
                parent.start()
                parent.guard_dir(self.folder)
                self._parents[framework] = parent
            return parent

    def _fork(self, message: wire.Fork) -> wire.Answer:
        assert self._orders is not None, "internal error: `Fork` came before `Orders`"
        parent = self._warm(message.framework)
        parent.soon()
        parent.wait_ready()
        cwd = self._orders.cwd if os.path.isdir(self._orders.cwd) else str(Path.home())
        path = [*sys.path, *(one for one in self._orders.sys_path if os.path.isdir(one))]
        pids: list[int] = []
        try:
            for engine in message.engines:
                pid = self._fork_one(parent, engine, message.framework, cwd, path)
                pids.append(pid)
        except BaseException:
            for pid in pids:
                parent.signal(pid, signal.SIGKILL)
            raise
        return wire.Answer(ask=message.ask, value=pids)

    def _fork_one(
        self, parent: WarmParent, engine: int, framework: str, cwd: str, path: list[str]
    ) -> int:
        log_path = str(self.folder / "log" / f"engine-{engine}.log")
        with self._lock:
            self._logs[engine] = _Log(Path(log_path))
        pid = parent.fork_engine(
            [*ENGINE_ARGS, f"--IPEngine.id={engine}"],
            self._environ(engine, framework), cwd, path, log_path, f"engine-{engine}",
        )  # fmt: skip
        with self._lock:
            self._pids[engine], self._owners[pid] = pid, parent
        if (end := parent.exit_of(pid)) is not None:  # it was faster than we were
            self._left(end)
        return pid

    def _environ(self, engine: int, framework: str) -> dict[str, str]:
        """Return an engine's environment.

        With MPI, only one engine at a time has the rank's variables.
        """
        env = {
            **os.environ,
            cluster_env.MARK: str(self.folder),
            folders.FOLDER_VARIABLE: str(self.folder),
        }
        env |= import_environment(framework, env)
        env.pop(wire.JOIN, None)
        if self._mpi_engine is None or self._mpi_engine not in self._pids:
            self._mpi_engine = engine
        if engine != self._mpi_engine:
            env = {name: value for name, value in env.items() if not name.startswith(MPI_PREFIXES)}
        return env

    def _signal(self, message: wire.Signal) -> wire.Answer:
        pid = self._pids.get(message.engine)
        owner = None if pid is None else self._owners.get(pid)
        sent = owner is not None and pid is not None and owner.signal(pid, message.number)
        return wire.Answer(ask=message.ask, value=bool(sent))

    def _keep(self, message: wire.Keep) -> wire.Answer:
        parent = self._warm("torch")
        parent.soon()
        parent.wait_ready()
        address = own_address(str(urlsplit(self._join.url).hostname))
        ports = (message.ports[0], message.ports[1]) if message.ports else None
        pid, host, port = parent.fork_keeper(
            str(self.folder / "log" / "keeper.log"), host=address, ports=ports
        )
        with self._lock:
            self._pids[wire.KEEPER], self._owners[pid] = pid, parent
        return wire.Answer(ask=message.ask, value=[pid, host, port])

    def _measure(self, message: wire.Measure) -> wire.Answer:
        with self._lock:
            pids = {engine: pid for engine, pid in self._pids.items() if engine != wire.KEEPER}
        with self._measuring:
            found = self._processes.read(
                dict.fromkeys(pids.values(), 0.0), all_memory=message.all_memory
            )
            gpus = [asdict(one) for one in self._gpus.read()]
        engines = {
            engine: asdict(reading) | {"uptime_s": _age_s(pid)}
            for engine, pid in pids.items()
            if (reading := found.get(pid)) is not None
        }
        return wire.Answer(ask=message.ask, value={"engines": engines, "gpus": gpus})

    def _read(self, message: wire.ReadFile) -> wire.Answer:
        with open(message.path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(message.offset)
            data = file.read(message.size)
        return wire.Answer(ask=message.ask, value=size, data=data)

    def _write(self, message: wire.WriteFile) -> wire.Answer:
        path = self.folder / message.path  # an absolute one stays as it is
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | (0 if message.offset else os.O_TRUNC)
        with open(os.open(path, flags, 0o600), "r+b" if message.offset else "wb") as file:
            file.seek(message.offset)
            file.write(message.data)
        return wire.Answer(ask=message.ask, value=str(path))

    def _remove(self, message: wire.RemoveFile) -> wire.Answer:
        path = self.folder / message.path
        there = path.exists()
        if path.is_dir() and self.folder in path.parents:
            import shutil

            shutil.rmtree(path, ignore_errors=True)
        elif there:
            path.unlink()
        return wire.Answer(ask=message.ask, value=there)

    # -- what is told ------------------------------------------------------------------------------

    def _left(self, end: Exit) -> None:
        """A child of a warm parent ended; called on that parent's thread."""
        with self._lock:
            engine = next((i for i, pid in self._pids.items() if pid == end.pid), None)
            if engine is None:
                return
            del self._pids[engine]
            self._owners.pop(end.pid, None)
        how = ending(end, self._memory.seen(end.pid, end.signal is not None))
        self._read_log(engine)
        self._say(wire.EngineLeft(engine=engine, pid=end.pid, ending=how))
        if self._leaving and not self._pids.keys() - {wire.KEEPER}:
            self._leave()

    def _read_log(self, engine: int) -> None:
        log = self._logs.get(engine)
        if log is None:
            return
        with log.lock:  # text that was read first must be sent first
            while data := log.new():
                self._say(wire.LogAdded(engine=engine, data=data))

    # -- the end -----------------------------------------------------------------------------------

    def _end(self) -> None:
        self._over = True
        self._workers.shutdown(wait=False, cancel_futures=True)
        with self._starting:
            parents = list(self._parents.values())
        for parent in parents:
            parent.stop()
        folders.end_family(self.folder)
        folders.remove(self.folder)


class _Log:
    """Reads additions to a log; several threads can call it."""

    def __init__(self, path: Path) -> None:
        self._path, self.lock = path, threading.Lock()
        self._at = path.stat().st_size if path.exists() else 0  # of an engine of before

    def new(self) -> bytes:
        """Return the additions; the caller holds the lock."""
        try:
            if self._path.stat().st_size == self._at:
                return b""
            with self._path.open("rb") as file:
                file.seek(self._at)
                data = file.read(LOG_BYTES)
        except OSError:
            return b""
        self._at += len(data)
        return data


def _unfit(found: Survey) -> dict[str, list[str]]:
    """Return why frameworks cannot use existing devices, by framework."""
    fit = {name: survey(name) for name in ("torch", "tensorflow") if found.devices}
    return {
        name: [note for note in one.notes if note not in found.notes]
        for name, one in fit.items()
        if not one.devices
    }


def _age_s(pid: int) -> float | None:
    try:
        return max(0.0, time.time() - float(psutil.Process(pid).create_time()))
    except psutil.Error:
        return None


def _installed(package: str) -> tuple[str, str] | None:
    try:
        return package, importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _place() -> int:
    """Return this agent's number among all; -1 if it is not known here."""
    for name in (wire.PLACE, *RANKS):
        with contextlib.suppress(KeyError, ValueError):
            return int(os.environ[name])
    return -1


def _slots() -> int:
    """Return the requested number of engines on this host: given, or Slurm's for the node."""
    told = os.environ.get(wire.SLOTS, "")
    if told.isdecimal():
        return int(told)
    node = int(os.environ.get("SLURM_NODEID", "0"))
    return tasks_of_node(told, node)


def tasks_of_node(text: str, node: int) -> int:
    """Return the tasks of a node from SLURM_TASKS_PER_NODE, as `2(x3),1`; 0 where it says nothing.

    Source: sbatch(1), output environment variables.
    """
    counts: list[int] = []
    for part in filter(None, text.split(",")):
        count, _, times = part.partition("(x")
        if not count.isdecimal():
            return 0
        counts += [int(count)] * (int(times.rstrip(")")) if times else 1)
    return counts[node] if node < len(counts) else 0


def main() -> None:
    """Run a host's agent; the environment or a line of stdin says where the kernel is."""
    told = os.environ.pop(wire.JOIN, "")
    stdin = not told
    try:
        join = wire.Join.from_text(told or sys.stdin.buffer.readline().decode())
    except (BadMessageError, UnicodeDecodeError):
        sys.exit("do not start this program yourself: %cluster start --launcher ... starts it")
    os.environ.pop(cluster_env.MARK, None)
    faulthandler.register(signal.SIGUSR2, all_threads=True)
    code = Agent(join, stdin=stdin).run()
    sys.stderr.flush()
    os._exit(code)  # a thread of ours still reads stdin, which Python would not end with


if __name__ == "__main__":
    main()
