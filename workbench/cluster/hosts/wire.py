"""Messages between the kernel and the agents on other hosts, and their encryption.

One ZeroMQ connection each, encrypted by CURVE: an agent knows the kernel by its public key, and the
kernel an agent by the pass that stands before each message
(https://rfc.zeromq.org/spec/25/, https://libzmq.readthedocs.io/en/latest/zmq_curve.html). Key and
pass reach an agent in a `Join`, through what started it.
"""

from __future__ import annotations

import base64
import hmac
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import zmq

from ...shared.cluster_env import cannot_listen
from ...shared.messages import BadMessageError, Buffer, Message, fields_of
from ..processes import Ending  # noqa: TC001 - read when messages are checked

JOIN = "WORKBENCH_JOIN"
"""Environment variable of an agent that is not told on its stdin where its kernel is."""
SLOTS, PLACE = "WORKBENCH_SLOTS", "WORKBENCH_PLACE"
"""For how many engines a host was asked for, and its number among the hosts."""
PACKAGES = (
    "distributed-workbench", "torch", "tensorflow", "keras", "numpy", "ipyparallel", "cloudpickle",
    "pyzmq",
)  # fmt: skip
"""The packages whose versions are reported and compared."""
KEEPER = -1
"""The number of the store's keeper among the engines of a host."""
CANNOT_IMPORT, NO_ROUTE = 71, 72
"""Exit codes of an agent that finds no Workbench on its host, or no way to its kernel."""


@dataclass(frozen=True)
class Join:
    """Where an agent finds its kernel, and how both identify each other.

    Attributes:
        url: Of the kernel's socket.
        key: Its public key (Z85).
        word: The secret that proves that this kernel started the agent (hex).
        framework: The framework that it imports while it connects; empty: none yet.
    """

    url: str
    key: str
    word: str = field(repr=False)
    framework: str = ""

    def to_text(self) -> str:
        """Return it as one word of letters, digits and `=`, `-`, `_`."""
        return base64.urlsafe_b64encode(json.dumps(asdict(self)).encode()).decode()

    @staticmethod
    def from_text(text: str) -> Join:
        """Return what `to_text` gave.

        Raises:
            BadMessageError: It is something else.
        """
        try:
            found = json.loads(base64.urlsafe_b64decode(text.strip()))
        except ValueError as error:
            raise BadMessageError("join") from error
        return Join(**fields_of(Join, found))


@dataclass(frozen=True)
class HostFacts:
    """A host, as its agent sees it.

    Attributes:
        hostname: Its own name; several hosts can have the same.
        token: The token that identifies it (`address.host_token`).
        address: The address at which other hosts reach it: the one on its route to the kernel.
        cores: The number of cores for its processes; `cpus` has their numbers, if known.
        versions: The versions of Python and of packages, by name.
        devices: `discovery.Device`, field by field.
        notes: Notes about devices that cannot be used.
        unfit: Why a framework, as installed there, cannot use them: a list of sentences, by its
            name.
        folder: The agent's private one.
        home: Its user's home folder, where engines begin that do not find the notebook's folder.
    """

    hostname: str
    token: str
    address: str
    cores: int
    memory_bytes: int
    pid: int
    versions: Any
    devices: Any = ()
    notes: tuple[str, ...] = ()
    folder: str = ""
    home: str = ""
    unfit: Any = field(default_factory=dict)
    cpus: Any = ()


# -- up: messages from agents --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Arrived(Message):
    """The agent is there.

    Attributes:
        place: Its number among the agents, in the order of hosts; -1: it does not know.
        slots: The requested number of engines on the host; 0: not known.
    """

    kind: ClassVar[str] = "arrived"
    place: int
    slots: int
    facts: HostFacts


@dataclass(frozen=True, kw_only=True)
class Alive(Message):
    """The agent lives; sent every second, so that a silent host is noticed.

    Attributes:
        halted: Engines whose processes are halted (SIGSTOP); a change is sent at once.
    """

    kind: ClassVar[str] = "alive"
    halted: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer(Message):
    """The answer to a request; `error` is a text if the agent could not do it."""

    kind: ClassVar[str] = "answer"
    ask: int
    value: Any = None
    error: str = ""
    data: Buffer = b""

    def to_wire(self) -> dict[str, Any]:
        return {"ask": self.ask, "value": self.value, "error": self.error}

    def buffers(self) -> tuple[Buffer, ...]:
        return (self.data,)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], buffers: Sequence[Buffer]) -> Answer:
        return cls(**fields_of(cls, data), data=_one(cls, buffers))


@dataclass(frozen=True, kw_only=True)
class Leaving(Message):
    """The agent was told to end, but not by its kernel; `why` is the reason in words."""

    kind: ClassVar[str] = "leaving"
    why: str


@dataclass(frozen=True, kw_only=True)
class EngineLeft(Message):
    """An engine's process ended; -1: the store's keeper."""

    kind: ClassVar[str] = "left"
    engine: int
    pid: int
    ending: Ending


@dataclass(frozen=True, kw_only=True)
class LogAdded(Message):
    """An addition to an engine's log; -1: a message of the agent itself."""

    kind: ClassVar[str] = "logged"
    engine: int
    data: Buffer = b""

    def to_wire(self) -> dict[str, Any]:
        return {"engine": self.engine}

    def buffers(self) -> tuple[Buffer, ...]:
        return (self.data,)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], buffers: Sequence[Buffer]) -> LogAdded:
        return cls(**fields_of(cls, data), data=_one(cls, buffers))


def _one(kind: type, buffers: Sequence[Buffer]) -> Buffer:
    if len(buffers) != 1:
        raise BadMessageError(f"{kind.__name__} must have exactly one buffer")
    return bytes(buffers[0])


# -- down: messages from the kernel ----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Ready(Message):
    """The agent's first orders.

    Attributes:
        connection: The text of ipyparallel's connection file for engines.
        framework: What its warm parent imports; empty: nothing is forked yet.
        environ: Variables of the notebook that engines take, as pairs.
        cwd: Where engines begin, if that folder is there.
        sys_path: Where engines look for modules as well.
    """

    kind: ClassVar[str] = "ready"
    connection: str
    framework: str
    environ: tuple[tuple[str, ...], ...] = ()
    cwd: str = ""
    sys_path: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class End(Message):
    """This agent is no longer needed."""

    kind: ClassVar[str] = "end"


@dataclass(frozen=True, kw_only=True)
class Asked(Message):
    """A question or an order, answered under its number."""

    ask: int


@dataclass(frozen=True, kw_only=True)
class Fork(Asked):
    """Fork engines; the answer is their pids, in order."""

    kind: ClassVar[str] = "fork"
    engines: tuple[int, ...]
    framework: str


@dataclass(frozen=True, kw_only=True)
class Signal(Asked):
    """Signal an engine, or the keeper (-1); the answer is whether it was there."""

    kind: ClassVar[str] = "signal"
    engine: int
    number: int


@dataclass(frozen=True, kw_only=True)
class Keep(Asked):
    """Host the store that workers meet in; the answer is pid, address and port."""

    kind: ClassVar[str] = "keep"
    ports: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Measure(Asked):
    """Read what the host's engines use; the answer is a `agents.HostReading` as data."""

    kind: ClassVar[str] = "measure"
    all_memory: bool = False


@dataclass(frozen=True, kw_only=True)
class ReadFile(Asked):
    """Read a part of a file; the answer's data is it, and its value the file's whole size."""

    kind: ClassVar[str] = "read"
    path: str
    offset: int = 0
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class WriteFile(Asked):
    """Write a part of a file, with the folders above it; a path that is not absolute is put in the
    agent's folder. The answer is the whole path.
    """

    kind: ClassVar[str] = "write"
    path: str
    offset: int = 0
    data: Buffer = b""

    def to_wire(self) -> dict[str, Any]:
        return {"ask": self.ask, "path": self.path, "offset": self.offset}

    def buffers(self) -> tuple[Buffer, ...]:
        return (self.data,)

    @classmethod
    def from_wire(cls, data: Mapping[str, Any], buffers: Sequence[Buffer]) -> WriteFile:
        return cls(**fields_of(cls, data), data=_one(cls, buffers))


@dataclass(frozen=True, kw_only=True)
class RemoveFile(Asked):
    """Remove a file, or a folder in the agent's own; the answer is whether it was there."""

    kind: ClassVar[str] = "remove"
    path: str


@dataclass(frozen=True, kw_only=True)
class Look(Asked):
    """Describe a path; the answer is a `Seen`'s fields, or None if there is nothing.

    Attributes:
        deep: Whether the files below a folder are listed.
    """

    kind: ClassVar[str] = "look"
    path: str
    deep: bool = False


@dataclass(frozen=True)
class Seen:
    """A file or folder of a host.

    Attributes:
        files: Below a folder: their paths there, bytes, and time of change.
    """

    is_folder: bool
    inode: int
    changed_ns: int
    files: tuple[tuple[str, int, int], ...] = ()

    @staticmethod
    def at(path: str | os.PathLike[str], *, deep: bool = False) -> Seen | None:
        """Return the description of a path on this machine; None if nothing is there or visible."""
        try:
            found = os.stat(path)
            is_folder = stat.S_ISDIR(found.st_mode)
            files = tuple(_files(Path(path))) if deep and is_folder else ()
        except OSError:
            return None
        return Seen(is_folder, found.st_ino, found.st_mtime_ns, files)

    @staticmethod
    def told(value: Any) -> Seen | None:
        """Return the description of a path from an agent's answer.

        Raises:
            BadMessageError: It is something else, or names files that are not below the folder.
        """
        if value is None:
            return None
        try:
            files = tuple((str(n), int(size), int(ns)) for n, size, ns in value["files"])
            found = Seen(
                bool(value["is_folder"]), int(value["inode"]), int(value["changed_ns"]), files
            )
        except (TypeError, ValueError, KeyError) as error:
            raise BadMessageError("seen") from error
        for path in (PurePosixPath(name) for name, _, _ in files):
            if path.is_absolute() or not path.parts or ".." in path.parts:
                raise BadMessageError("path")
        return found


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            found = path.stat()
            yield path.relative_to(folder).as_posix(), found.st_size, found.st_mtime_ns


Up = Arrived | Alive | Answer | Leaving | EngineLeft | LogAdded
Down = Ready | End | Fork | Signal | Keep | Measure | ReadFile | WriteFile | RemoveFile | Look
_UP: dict[str, Any] = {
    one.kind: one for one in (Arrived, Alive, Answer, Leaving, EngineLeft, LogAdded)
}
_DOWN: dict[str, Any] = {
    one.kind: one
    for one in (Ready, End, Fork, Signal, Keep, Measure, ReadFile, WriteFile, RemoveFile, Look)
}


def pack(message: Up | Down, word: bytes) -> list[Buffer]:
    """Return a message's frames."""
    head = json.dumps({"kind": message.kind, **_plain(message)}).encode()
    return [word, head, *message.buffers()]


def _plain(message: Message) -> dict[str, Any]:
    found = message.to_wire()
    if isinstance(message, Arrived):
        return {**found, "facts": asdict(message.facts)}
    if isinstance(message, EngineLeft):
        return {**found, "ending": asdict(message.ending)}
    return found


def unpack_up(frames: Sequence[bytes], word: bytes) -> Up:
    """Return an agent's message.

    Raises:
        BadMessageError: It does not know the pass, or is malformed.
    """
    found: Up = _unpack(frames, word, _UP)
    return found


def unpack_down(frames: Sequence[bytes], word: bytes) -> Down:
    """Return the kernel's message.

    Raises:
        BadMessageError: It is malformed.
    """
    found: Down = _unpack(frames, word, _DOWN)
    return found


def _unpack(frames: Sequence[bytes], word: bytes, kinds: Mapping[str, Any]) -> Any:
    if len(frames) < 2 or not hmac.compare_digest(frames[0], word):
        raise BadMessageError("pass")
    try:
        body = json.loads(frames[1])
        kind = kinds[body.pop("kind")]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise BadMessageError("kind") from error
    return kind.from_wire(body, frames[2:])


# -- the kernel's sockets ----------------------------------------------------------------------


def encrypt(sock: Any) -> str:
    """Make a ZeroMQ socket accept only encrypted messages; call it before the bind.

    Returns:
        The public key that others encrypt with (Z85).
    """
    public, secret = zmq.curve_keypair()
    sock.curve_server, sock.curve_publickey, sock.curve_secretkey = True, public, secret
    return public.decode()


def bind(sock: Any, address: str, ports: tuple[int, int] | None) -> int:
    """Bind a socket of ZeroMQ to a free port; return it.

    Args:
        ports: First and last port that may be taken; None: any.

    Raises:
        ClusterError: None of them is free, or there is no such address here.
    """
    if ports is None:
        try:
            return int(sock.bind_to_random_port(f"tcp://{address}"))
        except zmq.ZMQError as error:
            raise cannot_listen(address, ports, str(error)) from error
    why = ""
    for port in range(ports[0], ports[1] + 1):
        why = _refusal(sock, f"tcp://{address}:{port}")
        if not why:
            return port
    raise cannot_listen(address, ports, why)


def _refusal(sock: Any, url: str) -> str:
    try:
        sock.bind(url)
    except zmq.ZMQError as error:
        return str(error)
    return ""
