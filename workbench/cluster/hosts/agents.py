"""The kernel's side of the agents: which hosts exist, requests to them, their reports.

One thread reads and writes the socket. A host without a message for `SILENT_S` counts as lost with
all its engines, and requests that wait for its answers fail.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import itertools
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import zmq

from ...errors import ClusterError, RunError
from ...shared.cluster_env import Wakeup
from ...shared.messages import BadMessageError
from ..vitals import GpuReading, Reading
from . import wire

if TYPE_CHECKING:
    from ..processes import Ending

log = logging.getLogger("workbench.cluster")
SILENT_S = 6.0
LOOK_S = 0.5
ASK_S = 60.0
CHUNK_BYTES = 4 << 20
SENT = "sent"
"""The subfolder of an agent's folder with the files from which runs start."""
KEPT_COPIES = 3
READ_S = 0.8
"""How long hosts may take to report their engines' state; after that the last state is used."""
AT_ONCE = 1000
"""After this number of messages the hosts are checked again."""
TOLD_OF = 5


@dataclass(eq=False)
class Host:
    """A host with an agent.

    Attributes:
        place: Its number among the hosts; ranks follow it.
        name: Its name in tables; unique per host, and shared by its agents.
        slots: The requested number of engines; more are possible.
        gone: Why it is lost; empty while it exists.
        was_told: Whether its agent was told to end, instead of falling silent.
        has_cwd: Whether it has the same notebook folder.
        halted: Its engines that a signal has stopped, by the agent's last report.
    """

    place: int
    name: str
    slots: int
    facts: wire.HostFacts
    identity: bytes
    heard_at: float
    gone: str = ""
    was_told: bool = False
    has_cwd: bool = True
    halted: frozenset[int] = frozenset()
    waiting: dict[int, Future[wire.Answer]] = field(default_factory=dict)


@dataclass(frozen=True)
class Ears:
    """Callbacks for events, each called on the socket's thread."""

    left: Callable[[int, int, Ending], None]
    """Engine (-1: the keeper), pid and how its process ended."""
    logged: Callable[[int, bytes], None]
    lost: Callable[[Host], None]
    """A host is lost; its engines are not reported one by one."""


class Agents:
    """All agents of one cluster.

    Args:
        address: Where to listen.
        ports: First and last port that may be taken; None: any.

    Attributes:
        expected: The expected number of agents; 0: not known yet. When all have come, further
            agents are refused even if they know the pass, until one is lost.
        refused: The number of messages that did not know the pass or were malformed.
        turned_away: Surplus agents that knew the pass, a sentence each; only the first few.
    """

    def __init__(self, address: str, ports: tuple[int, int] | None, ears: Ears) -> None:
        self._ears = ears
        self.hosts: list[Host] = []
        self._numbers = itertools.count(1)
        self._outbox: deque[tuple[Host, wire.Down]] = deque()
        self._lock, self._changed = threading.RLock(), threading.Event()
        self._wakeup, self._closed = Wakeup(), False
        self.expected = self.refused = 0
        self.turned_away: list[str] = []
        self.orders: wire.Ready | None = None
        """The orders that each agent gets when it arrives."""
        self._word = secrets.token_bytes(32)
        self._context = zmq.Context()
        self._socket = sock = self._context.socket(zmq.ROUTER)
        public = wire.encrypt(sock)
        sock.setsockopt(zmq.LINGER, 500)
        sock.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a connection that is made anew takes over
        sock.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, 4000)
        sock.setsockopt(zmq.MAXMSGSIZE, 64 << 20)
        port = wire.bind(sock, address, ports)
        self.join = wire.Join(f"tcp://{address}:{port}", public, self._word.hex())
        self._thread = threading.Thread(target=self._main, name="workbench-hosts", daemon=True)
        self._thread.start()

    # -- hosts -------------------------------------------------------------------------------------

    @property
    def living(self) -> list[Host]:
        """Hosts with a living agent, in the order of their places."""
        with self._lock:
            return sorted((one for one in self.hosts if not one.gone), key=lambda one: one.place)

    def await_change(self, timeout_s: float) -> None:
        """Wait until a host arrives or goes, or time is up."""
        self._changed.wait(timeout_s)
        self._changed.clear()

    def lose(self, hosts: Iterable[Host], why: str) -> None:
        """Mark hosts as lost."""
        for host in hosts:
            with self._lock:
                if host.gone:
                    continue
                host.gone = why
                waiting, host.waiting = list(host.waiting.values()), {}
            for one in waiting:
                one.set_exception(gone_error(host))
            if not self._closed:
                self._ears.lost(host)
            self._changed.set()

    # -- requests to agents -----------------------------------------------------------------------

    def ask(self, host: Host, message: Any, timeout_s: float = ASK_S) -> wire.Answer:
        """Send a question and wait for its answer.

        Args:
            message: With any number; it gets a new number.

        Raises:
            ClusterError: The host is lost, does not answer, or could not do it.
        """
        return self.answer(host, self.begin(host, message), timeout_s)

    def begin(self, host: Host, message: Any) -> Future[wire.Answer]:
        """Send a question; `answer` waits for what comes back."""
        future: Future[wire.Answer] = Future()
        asked = replace(message, ask=next(self._numbers))
        with self._lock:
            if host.gone:
                raise gone_error(host)
            host.waiting[asked.ask] = future
            self._outbox.append((host, asked))
        self._wakeup.set()
        return future

    def answer(
        self, host: Host, future: Future[wire.Answer], timeout_s: float = ASK_S
    ) -> wire.Answer:
        """Wait for the answer to a question that was sent.

        Raises:
            ClusterError: As `ask`.
        """
        try:
            found = future.result(timeout_s)
        except FutureTimeout:
            with self._lock:
                host.waiting = {n: one for n, one in host.waiting.items() if one is not future}
            raise ClusterError(
                f"Host {host.name} does not answer.",
                seen=f"no answer for {timeout_s:g} s",
                next_step="run %cluster stop, then %cluster start",
                code="WB-CLUSTER-057",
            ) from None
        if found.error:
            raise ClusterError(
                f"Host {host.name} could not carry out the notebook's request.",
                seen=found.error,
                code="WB-CLUSTER-058",
            )
        return found

    def tell(self, host: Host, message: wire.Down) -> None:
        """Send a message that has no answer."""
        with self._lock:
            self._outbox.append((host, message))
        self._wakeup.set()

    def read_file(self, host: Host, path: str, into: Path) -> int:
        """Copy a file of a host to here; return its size in bytes.

        Raises:
            ClusterError: It cannot be read there.
        """
        offset, size = 0, 1
        fresh = into.with_name(f".{into.name}.{os.getpid()}")
        try:
            with fresh.open("wb") as file:
                while offset < size:
                    part = self.ask(
                        host, wire.ReadFile(ask=0, path=path, offset=offset, size=CHUNK_BYTES)
                    )
                    size = int(part.value)
                    if not part.data:
                        break
                    file.write(part.data)
                    offset += len(part.data)
            fresh.replace(into)
        finally:
            fresh.unlink(missing_ok=True)
        return offset

    def write_file(self, host: Host, path: str, source: Path) -> str:
        """Copy a local file to a host; return its path there.

        Args:
            path: There; below the agent's folder unless it is absolute.

        Raises:
            ClusterError: It cannot be written there.
        """
        offset, where = 0, path
        with source.open("rb") as file:
            while (data := file.read(CHUNK_BYTES)) or not offset:
                order = wire.WriteFile(ask=0, path=path, offset=offset, data=data)
                where = str(self.ask(host, order).value)
                offset += len(data)
                if not data:
                    break
        return where

    # -- the socket --------------------------------------------------------------------------------

    def _main(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wakeup.fileno(), zmq.POLLIN)
        try:
            while not (self._closed and not self._outbox):
                ready = dict(poller.poll(int(1e3 * LOOK_S)))
                if self._wakeup.fileno() in ready:
                    self._wakeup.clear()
                self._receive()
                self._look()
                self._send_waiting()
        finally:
            self._socket.close()
            self._context.term()
            self._wakeup.close()

    def _receive(self) -> None:
        for _ in range(AT_ONCE):
            try:
                identity, *frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.unpack_up(frames, self._word)
            except BadMessageError:
                self.refused += 1
                continue
            try:
                self._take(identity, message)
            except Exception:  # an error of one host must not block the others
                log.exception("A message from a host's agent could not be processed")

    def _take(self, identity: bytes, message: wire.Up) -> None:
        host = next((one for one in self.hosts if one.identity == identity), None)
        if isinstance(message, wire.Arrived):
            if host is None:
                self._welcome(identity, message)
            return
        if host is None:
            return
        if host.gone:  # it is back, after everything there was settled as lost
            self._outbox.append((host, wire.End()))
            return
        host.heard_at = time.monotonic()
        match message:
            case wire.Answer():
                with self._lock:
                    future = host.waiting.pop(message.ask, None)
                if future is not None:
                    future.set_result(message)
            case wire.Alive():
                host.halted = frozenset(message.halted)
            case wire.Leaving():
                host.was_told = True
                self.lose([host], message.why)
            case wire.EngineLeft():
                self._ears.left(message.engine, message.pid, message.ending)
            case wire.LogAdded():
                self._ears.logged(message.engine, bytes(message.data))

    def _welcome(self, identity: bytes, message: wire.Arrived) -> None:
        facts = message.facts
        if why := self._why_not(message.place):
            self.refused += 1
            if len(self.turned_away) < TOLD_OF:
                who = f"{facts.hostname} ({facts.address}, pid {facts.pid})"
                self.turned_away.append(f"The cluster refused Workbench's agent on {who}: {why}.")
            log.warning("Refused an agent on %s (%s): %s", facts.hostname, facts.address, why)
            self._send(identity, wire.End())
            return
        with self._lock:
            # Ranks of MPI on one host have an agent each, and share its name.
            others = [one for one in self.living if one.facts.token != facts.token]
            taken = {one.name for one in others}
            name = facts.hostname
            if name in taken:
                name = f"{facts.hostname} ({facts.address})"
            if name in taken:
                name = f"{facts.hostname} ({facts.address}, {message.place})"
            places = {one.place for one in self.living}
            place = message.place
            if place < 0:
                place = next(one for one in itertools.count() if one not in places)
            host = Host(place, name, message.slots, facts, identity, time.monotonic())
            self.hosts.append(host)
            if self.orders is not None:
                self._outbox.append((host, self.orders))
        self._changed.set()

    def _why_not(self, place: int) -> str:
        """Return why an agent is refused at a place, in words; empty if it is accepted."""
        there = self.living
        if self.expected and len(there) >= self.expected:
            if self.expected == 1:
                return "the cluster needs only one agent, and another agent is already connected"
            return f"all {self.expected} agents of the cluster are already connected"
        if (holder := next((one for one in there if one.place == place), None)) is not None:
            return f"{holder.name} is already connected as agent number {place}"
        return ""

    def _look(self) -> None:
        now = time.monotonic()
        for host in self.living:
            silent_s = now - host.heard_at
            if silent_s > SILENT_S and not self._closed:
                self.lose([host], f"nothing was received from {host.name} for {silent_s:.0f} s")

    def _send_waiting(self) -> None:
        while self._outbox:
            host, message = self._outbox.popleft()
            self._send(host.identity, message)

    def _send(self, identity: bytes, message: wire.Down) -> None:
        try:
            self._socket.send_multipart([identity, *wire.pack(message, self._word)], zmq.NOBLOCK)
        except zmq.ZMQError:
            log.debug("Messages to %s cannot be sent", identity)

    def close(self) -> None:
        """End all agents, and stop listening."""
        if self._closed:
            return
        for host in self.living:
            self._outbox.append((host, wire.End()))
        self._closed = True
        self._wakeup.set()
        self._thread.join(timeout=2)
        self.lose(self.living, "the cluster was stopped")


class HostFiles:
    """The files of runs on the hosts: sent there once, fetched from there, removed.

    Args:
        agents: Of the hosts.
    """

    def __init__(self, agents: Agents) -> None:
        self._agents = agents
        self._sent: dict[int, dict[str, str]] = {}  # by place of the host; the newest last
        self._lock = threading.Lock()

    def look(self, host: Host, path: str, *, deep: bool = False) -> wire.Seen | None:
        """Return the description of a path on a host; None if there is nothing.

        Raises:
            ClusterError: The host is gone.
            RunError: It answers something else.
        """
        found = self._agents.ask(host, wire.Look(ask=0, path=path, deep=deep)).value
        try:
            return wire.Seen.told(found)
        except BadMessageError as error:
            raise RunError(
                f"Host {host.name} sent an invalid description of its files.",
                seen=str(found)[:200],
                next_step="run %cluster stop, then %cluster start",
                code="WB-RUN-099",
            ) from error

    def send(self, host: Host, folder: Path, wanted: Callable[[str], bool]) -> str:
        """Return where a host finds the files of a folder of this machine.

        Nothing is sent if the host sees the same files, or already received them.

        Args:
            wanted: The names below the folder that are needed; other files can be missing in the
                copy.

        Raises:
            ClusterError: They cannot be written there.
            OSError: They cannot be read here.
        """
        mine = wire.Seen.at(folder, deep=True)
        if mine is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        files = [one for one in mine.files if wanted(one[0])]
        theirs = self.look(host, str(folder), deep=True)
        if theirs is not None and set(files) <= set(theirs.files):
            return str(folder)
        key = hashlib.sha256(repr((str(folder), files)).encode()).hexdigest()[:16]
        with self._lock:
            sent = self._sent.setdefault(host.place, {})
            if (known := sent.pop(key, "")) and self.look(host, known) is not None:
                sent[key] = known
                return known
            while len(sent) >= KEPT_COPIES:
                self.remove(host, f"{SENT}/{next(iter(sent))}")
                del sent[next(iter(sent))]
            path = f"{SENT}/{key}/{folder.name}"
            for name, _, _ in files:
                self._agents.write_file(host, f"{path}/{name}", folder / name)
            sent[key] = f"{host.facts.folder}/{path}"
            return sent[key]

    def fetch(
        self,
        host: Host,
        folder: str,
        into: Path,
        wanted: Callable[[str], bool] = lambda name: True,
    ) -> list[str]:
        """Copy the files below a folder of a host to here; return their names, none without it.

        Args:
            wanted: Which of them.

        Raises:
            ClusterError: The host is gone, or cannot read them.
            OSError: They cannot be written here.
        """
        seen = self.look(host, folder, deep=True)
        names = []
        files = () if seen is None else seen.files
        for name, size, _ in (one for one in files if wanted(one[0])):
            target = into / name
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if (came := self._agents.read_file(host, f"{folder}/{name}", target)) != size:
                target.unlink(missing_ok=True)
                raise OSError(
                    errno.EIO, f"only {came} of {size} bytes of {name} arrived from {host.name}"
                )
            names.append(name)
        return names

    def remove(self, host: Host, path: str, *, wait: bool = False) -> None:
        """Remove a path in the agent's folder; on a lost host there is nothing to remove.

        Args:
            wait: Until it is done.
        """
        with contextlib.suppress(ClusterError):
            future = self._agents.begin(host, wire.RemoveFile(ask=0, path=path))
            if wait:
                self._agents.answer(host, future)


def gone_error(host: Host) -> ClusterError:
    """Return the error for a request to a lost host."""
    return ClusterError(
        f"The connection to host {host.name} has ended: {host.gone}.",
        next_step="%cluster shows which engines are alive",
        code="WB-CLUSTER-059",
    )


def unlike(hosts: Iterable[Host], here: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Return which versions differ, by package: by name of host, and `the notebook`.

    Args:
        here: This kernel's versions; packages that it does not have are not compared.
    """
    found = {one.name: one.facts.versions for one in hosts}
    differ = {}
    for package in dict.fromkeys(name for versions in found.values() for name in versions):
        seen = {name: str(versions.get(package, "none")) for name, versions in found.items()}
        if package in here:
            seen["the notebook"] = here[package]
        if len(set(seen.values())) > 1:
            differ[package] = seen
    return differ


@dataclass(frozen=True)
class HostReading:
    """The state of a host's engines, as its agent has read it.

    Attributes:
        engines: The use of each engine; engines that have just ended are missing.
        uptimes_s: The age of each engine, by the host's clock.
        gpus: The GPUs that the host's engines can use.
    """

    engines: Mapping[int, Reading]
    uptimes_s: Mapping[int, float]
    gpus: tuple[GpuReading, ...]

    @staticmethod
    def from_wire(value: Mapping[str, Any]) -> HostReading:
        """Rebuild an agent's answer."""
        engines, uptimes_s = {}, {}
        for engine, about in value["engines"].items():
            known = dict(about)
            if (age := known.pop("uptime_s")) is not None:
                uptimes_s[int(engine)] = float(age)
            engines[int(engine)] = Reading(**{**known, "pids": tuple(known["pids"])})
        gpus = []
        for gpu in value["gpus"]:
            held = {int(pid): used for pid, used in gpu["memory_bytes"].items()}
            gpus.append(GpuReading(**{**gpu, "memory_bytes": held}))
        return HostReading(engines, uptimes_s, tuple(gpus))


def readings(
    agents: Agents, hosts: Sequence[Host], *, all_memory: bool = False, within_s: float = READ_S
) -> dict[int, HostReading]:
    """Return the state of the hosts' engines by place; all hosts are asked at the same time.

    Hosts that do not answer within the time are left out.
    """
    asked, found = [], {}
    until = time.monotonic() + within_s
    for host in hosts:
        with contextlib.suppress(ClusterError):
            asked.append((host, agents.begin(host, wire.Measure(ask=0, all_memory=all_memory))))
    for host, future in asked:
        with contextlib.suppress(ClusterError):
            left_s = max(0.0, until - time.monotonic())
            found[host.place] = HostReading.from_wire(agents.answer(host, future, left_s).value)
    return found
