"""How messages between the notebook's kernel and the engines are sent, for both sides.

Every message is `[signature, header, payload...]`: the header is JSON, payloads are raw bytes
(packed records), the signature is HMAC-SHA256 over both with the cluster's key. Nothing is ever
unpickled, and a message whose signature does not match is counted and dropped before it is parsed.
The messages are in `messages.py`. `encode` turns a message into a packet; `decode_up` and
`decode_down` turn a packet into a message again, each for one direction.

A signed message is valid only once: for one receiver, in one session, in one direction.

    engine -> kernel   via = [engine's nonce, kernel's nonce or "", n]
    kernel -> engine   via = [kernel's nonce, engine's nonce, n]

Each side draws a nonce when it is created and numbers its messages. A recorded message is refused
if it is sent again to the receiver, to the sender, or to a later process with the same key. An
engine learns the kernel's nonce with the first answer. Its earlier messages (its hello, and
messages through ipyparallel if the socket cannot be reached) are valid once, for any kernel that
has the key.

The window is RFC 4303's (section 3.4.3): numbers can come in any order, each once, and at most
`WINDOW` behind the highest.

`Wakeup` wakes a thread that polls sockets, from any other thread; both sides use it.
"""

from __future__ import annotations

import hmac
import itertools
import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast, get_args

import numpy as np

from .flags.settings import RunSettings, settings_from_wire
from .messages import BadMessageError, Down, Message, Records, Up
from .record import RECORD

VERSION = 2


@dataclass(frozen=True)
class Packet:
    """A message in the form in which it is sent; only this module reads it.

    Attributes:
        kind: The name of the message.
        body: JSON-ready fields.
        payload: Raw buffers.
    """

    kind: str
    body: Mapping[str, Any] = field(default_factory=dict)
    payload: Sequence[bytes | memoryview] = ()


def control_key(secret: str) -> bytes:
    """Return the key that processes derive from a shared secret; the key is never sent."""
    return hmac.digest(secret.encode(), b"workbench control", "sha256")


def new_key() -> bytes:
    """Return a fresh key for one cluster."""
    return secrets.token_bytes(32)


def pack(packet: Packet, key: bytes) -> list[bytes | memoryview]:
    """Return the frames of a packet, signed."""
    header = json.dumps({**packet.body, "v": VERSION, "kind": packet.kind}).encode()
    frames: list[bytes | memoryview] = [header, *packet.payload]
    return [_sign(frames, key), *frames]


def unpack(frames: Sequence[bytes | memoryview], key: bytes) -> Packet:
    """Return the packet in `frames`.

    Raises:
        BadMessageError: The signature does not match, or the header is not ours.
    """
    if len(frames) < 2 or not hmac.compare_digest(bytes(frames[0]), _sign(frames[1:], key)):
        raise BadMessageError("signature")
    try:
        body = json.loads(bytes(frames[1]))
        version, kind = body.pop("v"), body.pop("kind")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise BadMessageError("header") from error
    if not isinstance(kind, str):
        raise BadMessageError("kind")
    if version != VERSION:
        raise BadMessageError(f"version {version} instead of version {VERSION}")
    return Packet(kind, body, tuple(frames[2:]))


_UP_WORD, _DOWN_WORD = "said", "do"
"""The field that distinguishes messages of one kind."""
_UP: dict[tuple[str, str], type[Message]] = {(one.kind, one.word): one for one in get_args(Up)}
_DOWN: dict[tuple[str, str], type[Message]] = {(one.kind, one.word): one for one in get_args(Down)}


def encode(message: Up | Down) -> Packet:
    """Return a message in its packed form."""
    body = message.to_wire()
    if message.word:
        body[_UP_WORD if isinstance(message, Up) else _DOWN_WORD] = message.word
    return Packet(message.kind, body, message.buffers())


def decode_up(packet: Packet) -> Up:
    """Return an engine's message.

    Raises:
        BadMessageError: Engines do not send such a message, or a field is unknown, missing or has
            the wrong type.
    """
    message = cast(Up, _decode(packet, _UP, _UP_WORD))
    if isinstance(message, Records):
        records_from(message.rows)
    return message


def decode_down(packet: Packet) -> Down:
    """Return the kernel's message.

    Raises:
        BadMessageError: The kernel does not send such a message, or a field is unknown, missing or
            has the wrong type.
    """
    return cast(Down, _decode(packet, _DOWN, _DOWN_WORD))


def _decode(packet: Packet, kinds: Mapping[tuple[str, str], type[Message]], by: str) -> Message:
    body = dict(packet.body)
    word = body.pop(by, "")
    kind = kinds.get((packet.kind, word)) if isinstance(word, str) else None
    if kind is None:
        raise BadMessageError(f"kind {packet.kind!r} {word!r}")
    return kind.from_wire(body, packet.payload)


def _sign(frames: Sequence[bytes | memoryview], key: bytes) -> bytes:
    if len(frames) == 1:
        return hmac.digest(key, frames[0], "sha256")
    mac = hmac.new(key, digestmod="sha256")
    for frame in frames:
        # Lengths go in so that bytes cannot be moved from one frame to the next.
        mac.update(len(frame).to_bytes(8, "big"))
        mac.update(frame)
    return mac.digest()


def records_from(payload: bytes | memoryview) -> np.ndarray[Any, np.dtype[Any]]:
    """Return the RECORD rows in a payload.

    Raises:
        BadMessageError: The size is not a whole number of rows.
    """
    if len(payload) % RECORD.itemsize:
        raise BadMessageError(f"{len(payload)} bytes do not contain a whole number of rows")
    return np.frombuffer(payload, RECORD)


@dataclass(frozen=True)
class RunSpec(RunSettings):
    """The data that one engine gets about its run (or about its cell without a strategy).

    In addition to the run's settings, where `init_from` is a folder:

    Attributes:
        run: Sequence number; the `run` field of records. 0 for SPMD cells.
        run_id: Unique, sortable name of the run's folder.
        ranks: Engine ids by rank; an engine that holds several replicas occurs several times.
        resume: The checkpoint (`DIR/step-N`) that the run continues from; empty: none.
        resume_name: Its path on the host that sent it to this host.
        original_rank: The rank for this engine's rows, if the run continued with fewer workers and
            ranks were assigned again; -1: its own.
        rows_from: Rows before this step are not recorded, because the run's history has them
            already.
        rescue: Whether to keep this worker's state if the cell fails, because the run may continue
            from it.
        heals: Whether training continues with the others when a worker dies; `joins`: this engine
            takes part after it has joined and has received another worker's state.
        replicas: How many replicas this engine holds: those of `rank` and the following ranks.
        devices: Device of each replica held here, in the order of their ranks; if this engine only
            gives out steps (`device` is the CPU), the devices of its workers. `cuda:k` is the k-th
            of `gpus`, and k the local rank of a worker that does not share its GPU.
        labels: The same for tables, with the GPU's name and number in nvidia-smi; none for CPUs.
        gpus: Permanent names (UUIDs) of the GPUs that engines of this host may see, in this order
            (`devices/mask.py`); of kind `accelerator`, a name in `mask.KINDS`.
        sharers: How many workers of the run compute on this worker's GPU, itself included.
        reserved: Files that reserve the GPUs; the engine holds them too
            (`devices/reservations.py`).
        backend: Of the process group: `gloo`, or `cpu:gloo,cuda:nccl`.
        run_dir: The run's folder; empty if this engine does not see it.
        far: Whether the kernel writes this engine's rows, because it is on another host.
        threads: CPU threads of this worker; `cores` is the number of cores for all workers on its
            host together.
        store: Host, port of the TCPStore keeper; `prefix` keeps groups apart.
        hosts: Tokens that identify the engines' hosts (`address.host_token`), in the order of
            `ranks`.
        address: The address at which other hosts reach this engine, if there is no store to find
            it.
        ports: The first and last port on which this engine can listen; None: any.
        group: Name of the process group, if it exists longer than the run; by default `prefix`.
        mode: `run` trains under a strategy; `spmd` runs on every worker with a process group.
        role: A `server` holds parameters: it never runs the cell, and world_size does not count it.
            Its rank is world_size + its index among the engines that run no cell.
        part: The name of an engine that runs no cell: `server s0`, `worker 1`.
        servers: How many servers the run has.
        key: The secret with which workers and servers of the run prove to each other that they
            belong to it (hex).
    """

    mode: Literal["run", "spmd"]
    rank: int
    world_size: int
    ranks: tuple[int, ...]
    device: str = "cpu"
    threads: int = 1
    framework: str = "torch"
    store: tuple[str, int] | None = None
    prefix: str = ""
    group: str = ""
    run: int = 0
    run_id: str = ""
    run_dir: str = ""
    strategy: str = ""
    backend: str = "gloo"
    options: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)
    hosts: tuple[str, ...] = ()
    role: Literal["worker", "server"] = "worker"
    servers: int = 0
    key: str = field(default="", repr=False)
    resume: str = ""
    resume_name: str = ""
    original_rank: int = -1
    rows_from: int = 0
    rescue: bool = False
    heals: bool = False
    joins: bool = False
    replicas: int = 1
    devices: tuple[str, ...] = ()
    part: str = ""
    cores: int = 0
    labels: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    accelerator: str = ""
    sharers: int = 1
    reserved: tuple[str, ...] = ()
    address: str = ""
    ports: tuple[int, int] | None = None
    far: bool = False

    @property
    def group_name(self) -> str:
        """The prefix of this process group's keys in the store."""
        return self.group or self.prefix

    @property
    def host_ranks(self) -> list[int]:
        """Ranks of the workers on this worker's host; all ranks if hosts are not known."""
        if not self.hosts:
            return list(range(self.world_size))
        workers = self.hosts[: self.world_size]  # servers follow; they have no local rank
        return [rank for rank, name in enumerate(workers) if name == self.hosts[self.rank]]

    @property
    def local_rank(self) -> int:
        """This worker's index among those of its host."""
        return self.host_ranks.index(self.rank)

    @property
    def host_rank(self) -> int:
        """The index of this engine's host among the run's, in the order of ranks."""
        return list(dict.fromkeys(self.hosts)).index(self.hosts[self.rank]) if self.hosts else 0

    @property
    def neighbours(self) -> list[int]:
        """Engines of the run on this engine's host, including itself, in the order of the ranks."""
        if not self.hosts:
            return list(dict.fromkeys(self.ranks))
        where = zip(self.ranks, self.hosts, strict=False)
        return list(dict.fromkeys(i for i, host in where if host == self.hosts[self.rank]))

    @property
    def row_rank(self) -> int:
        """The rank for this engine's rows, during the whole run."""
        return self.rank if self.original_rank < 0 else self.original_rank

    @property
    def gpus_used(self) -> int:
        """How many of the first `gpus` this engine uses at most."""
        if self.device == "cpu":
            return 0
        numbers = [one.partition(":")[2] for one in (self.device, *self.devices)]
        return max((int(number) + 1 for number in numbers if number), default=0)

    @property
    def held(self) -> range:
        """Ranks of the replicas that this engine holds."""
        return range(self.rank, self.rank + self.replicas)

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return self.__dict__ | self.settings_to_wire()

    @staticmethod
    def from_wire(data: Mapping[str, Any]) -> RunSpec:
        """Rebuild what `to_wire` gave, from JSON."""
        known = dict(data) | settings_from_wire(data)
        for key in ("ranks", "hosts", "devices", "labels", "gpus", "reserved"):
            known[key] = tuple(known.get(key) or ())
        store = known.get("store")
        known["store"] = (str(store[0]), int(store[1])) if store else None
        ports = known.get("ports")
        known["ports"] = (int(ports[0]), int(ports[1])) if ports else None
        return RunSpec(**known)


WINDOW = 4096
_VIA = "via"


class Seal:
    """One end of a control path.

    Args:
        key: The cluster's key.
        open_to_any: Whether messages that name no receiver are accepted. The kernel's end accepts
            an engine's first messages.

    Attributes:
        name: This end's nonce.
    """

    def __init__(self, key: bytes, *, open_to_any: bool = False) -> None:
        self.name = secrets.token_hex(8)
        self._key, self._open = key, open_to_any
        self._numbers = itertools.count()
        self._seen: dict[str, _Window] = {}
        self._lock = threading.Lock()

    def pack(self, packet: Packet, to: str = "") -> list[bytes | memoryview]:
        """Return the frames of a packet for the end whose nonce is `to`."""
        via = [self.name, to, next(self._numbers)]
        return pack(Packet(packet.kind, {**packet.body, _VIA: via}, packet.payload), self._key)

    def unpack(self, frames: Sequence[bytes | memoryview]) -> tuple[Packet, str]:
        """Return the packet in `frames` and the nonce of the end that sent it.

        Raises:
            BadMessageError: It is not signed with the key, is malformed, is for another receiver,
                or was received before.
        """
        packet = unpack(frames, self._key)
        sender, to, number = _read(packet.body.get(_VIA))
        if sender == self.name or (to != self.name and not (self._open and to == "")):
            raise BadMessageError("receiver")
        with self._lock:
            if not self._seen.setdefault(sender, _Window()).accept(number):
                raise BadMessageError("replay")
        body = {key: value for key, value in packet.body.items() if key != _VIA}
        return Packet(packet.kind, body, packet.payload), sender


def _read(via: Any) -> tuple[str, str, int]:
    if isinstance(via, list) and len(via) == 3:
        sender, to, number = via
        if isinstance(sender, str) and isinstance(to, str) and type(number) is int and number >= 0:
            return sender, to, number
    raise BadMessageError("envelope")


class _Window:
    """Which of one sender's latest numbers have arrived."""

    def __init__(self) -> None:
        self._highest, self._bits = -1, 0

    def accept(self, number: int) -> bool:
        """Accept a number; return False if it came before or is too old to know."""
        ahead = number - self._highest
        if ahead > 0:
            kept = self._bits << ahead if ahead < WINDOW else 0
            self._bits = (kept | 1) & ((1 << WINDOW) - 1)
            self._highest = number
            return True
        bit = 1 << -ahead if -ahead < WINDOW else 0
        if not bit or self._bits & bit:
            return False
        self._bits |= bit
        return True
