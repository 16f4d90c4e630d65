"""Frames on a stream: a fixed head, a JSON header, then raw bytes of an agreed size.

Both ends of a fresh connection prove that they know the run's key; the key is never sent.

    server -> worker   nonce a                          (32 bytes)
    worker -> server   rank, nonce b, HMAC(key, "worker", rank, a, b)
    server -> worker   HMAC(key, "server", rank, a, b)

Memory that two processes of one host map has no name and is freed with its last user. On Linux it
is a memfd, which needs no room in /dev/shm and cannot be resized; elsewhere it is an unlinked
temporary file. The descriptor is sent over a Unix socket.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import mmap
import os
import secrets
import socket
import struct
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import RunError
from ..debugging.marks import ANSWER, waits_in

Bytes = NDArray[np.uint8]

_HEAD = struct.Struct("!4sIQ")  # magic, bytes of the header, bytes of the payload
HEAD_BYTES = _HEAD.size
_MAGIC = b"wbL1"
MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 40
_MOST_PARTS = 512  # the system limits how many buffers one call may name


class LinkError(RunError):
    """A link broke, or its other end sent a message that is not valid.

    Args:
        about: The arguments of every Workbench error.
        felt: The local symptom of another process's end, whose own error is the cause; empty if
            the reason may be here.
    """

    def __init__(self, what: str, *, felt: str = "", **about: Any) -> None:
        super().__init__(what, **about)
        self.felt = felt


class LinkClosedError(LinkError):
    """The other end of a link has ended."""


@dataclass
class Message:
    """One message.

    Attributes:
        kind: The message's purpose.
        meta: JSON-ready fields.
        size_bytes: Payload that follows on the stream; 0 if it is in shared memory.
    """

    kind: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    size_bytes: int = 0


def closed(peer: str) -> LinkClosedError:
    """Return the error for a link whose other end has ended."""
    felt = "Connection closed by peer"
    return LinkClosedError(
        f"{felt}: {peer} has ended.",
        felt=felt,
        next_step=f"read the error of {peer}; %cluster logs shows the output of all engines",
        code="WB-RUN-020",
    )


def ended(peer: str) -> LinkError:
    """Return the error for another worker that has stopped exchanging messages."""
    felt = "Connection closed by peer"
    return LinkError(
        f"{felt}: {peer} has left the training loop, but this worker is still in it.",
        felt=felt,
        next_step=f"read the error of {peer}. If there is no error, {peer} took fewer steps: all "
        "ranks must take the same number of steps",
        code="WB-RUN-021",
    )


def pack(message: Message) -> bytes:
    """Return head and header."""
    header = json.dumps({"kind": message.kind, **message.meta}).encode()
    return _HEAD.pack(_MAGIC, len(header), message.size_bytes) + header


def unpack_head(head: bytes, peer: str) -> tuple[int, int]:
    """Return (bytes of the header, bytes of the payload).

    Raises:
        LinkError: The stream does not speak this protocol, or announces an absurd header.
    """
    magic, header_bytes, payload_bytes = _HEAD.unpack(head)
    if magic != _MAGIC or header_bytes > MAX_HEADER_BYTES:
        raise LinkError(
            f"{peer} sent data that is not a Workbench message.", seen=head.hex(), code="WB-RUN-022"
        )
    return header_bytes, payload_bytes


def unpack_header(header: bytes, size_bytes: int, peer: str) -> Message:
    """Return the message; its payload is still on the stream.

    Raises:
        LinkError: The header cannot be read.
    """
    try:
        meta = json.loads(header)
        kind = str(meta.pop("kind"))
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise LinkError(f"{peer} sent a header that cannot be read.", code="WB-RUN-023") from error
    return Message(kind, meta, size_bytes)


def room_for(message: Message, peer: str) -> memoryview:
    """Return memory for a payload whose size was not agreed before.

    It is not written to here: a payload that is announced but never sent takes no memory.

    Raises:
        LinkError: The announced size is larger than the free memory.
    """
    try:
        if message.size_bytes > MAX_PAYLOAD_BYTES:
            raise MemoryError
        return np.empty(message.size_bytes, np.uint8).data
    except MemoryError:
        raise LinkError(
            f"{peer} announced a {message.kind!r} message that does not fit into memory.",
            seen=f"{message.size_bytes} bytes",
            code="WB-RUN-024",
        ) from None


def check_size(message: Message, expected_bytes: int, peer: str) -> None:
    """Raise LinkError if a payload does not have the agreed size; nothing of it is read."""
    if message.size_bytes != expected_bytes:
        raise LinkError(
            f"{peer} announced a {message.kind!r} message of the wrong size.",
            seen=f"{message.size_bytes} bytes",
            allowed=f"{expected_bytes} bytes",
            code="WB-RUN-025",
        )


def check_most(message: Message, most_bytes: int, peer: str) -> None:
    """Raise LinkError if a payload is larger than agreed; nothing of it is read."""
    if message.size_bytes > most_bytes:
        raise LinkError(
            f"{peer} announced a {message.kind!r} message that is too large.",
            seen=f"{message.size_bytes} bytes",
            allowed=f"at most {most_bytes} bytes",
            code="WB-RUN-127",
        )


@waits_in(ANSWER)
def send(sock: socket.socket, message: Message, parts: Sequence[Bytes], peer: str) -> None:
    """Send a message and its payload, gathered from its buffers.

    Raises:
        LinkError: The other end has ended.
    """
    left = [memoryview(pack(message)), *(part.data for part in parts if part.size)]
    try:
        while left:
            sent = sock.sendmsg(left[:_MOST_PARTS])
            left = rest(left, sent)
    except OSError as error:
        raise closed(peer) from error


def receive(sock: socket.socket, peer: str) -> Message:
    """Wait for a message; its payload stays on the stream.

    Raises:
        LinkError: The other end has ended or does not speak this protocol.
    """
    head = bytearray(HEAD_BYTES)
    receive_into(sock, [memoryview(head)], peer)
    header_bytes, payload_bytes = unpack_head(bytes(head), peer)
    header = bytearray(header_bytes)
    receive_into(sock, [memoryview(header)], peer)
    return unpack_header(bytes(header), payload_bytes, peer)


@waits_in(ANSWER)
def receive_into(sock: socket.socket, parts: Sequence[Bytes | memoryview], peer: str) -> None:
    """Fill the buffers directly from the stream.

    Raises:
        LinkError: The other end has ended.
    """
    views = [part if isinstance(part, memoryview) else part.data for part in parts]
    left = [view for view in views if len(view)]
    try:
        while left:
            received = sock.recvmsg_into(left[:_MOST_PARTS])[0]
            if not received:
                raise closed(peer)
            left = rest(left, received)
    except OSError as error:
        raise closed(peer) from error


def rest(views: list[memoryview], done: int) -> list[memoryview]:
    """Return the remaining part of the buffers after this many bytes."""
    at = 0
    while at < len(views) and done >= len(views[at]):
        done -= len(views[at])
        at += 1
    left = views[at:]
    if done:
        left[0] = left[0][done:]
    return left


def size_of(parts: Sequence[Bytes]) -> int:
    """Return the bytes in all parts."""
    return sum(part.size for part in parts)


def copy_in(parts: Sequence[Bytes], area: Bytes) -> None:
    """Copy the parts into an area, in sequence."""
    at = 0
    for part in parts:
        area[at : at + part.size] = part
        at += part.size


def copy_out(area: Bytes, parts: Sequence[Bytes]) -> None:
    """Copy an area into the parts, in sequence."""
    at = 0
    for part in parts:
        part[:] = area[at : at + part.size]
        at += part.size


SEATS = 1 << 16
"""A worker identifies itself as `generation * SEATS + rank` to servers that know generations."""
NONCE_BYTES = 32
TIMEOUT_S = 10.0


class _Refused:
    """How many connections this process has refused because the other end did not know a key."""

    def __init__(self) -> None:
        self.count = 0


refused = _Refused()
_RANK = struct.Struct("!I")
_PROOF_BYTES = 32


@waits_in(ANSWER)
def prove_worker(sock: socket.socket, key: bytes, rank: int) -> None:
    """Prove this end's identity to a server, and check the server's identity.

    Raises:
        LinkError: The other end does not know the key.
    """
    sock.settimeout(TIMEOUT_S)
    try:
        theirs = _exactly(sock, NONCE_BYTES)
        mine = secrets.token_bytes(NONCE_BYTES)
        name = _RANK.pack(rank)
        sock.sendall(name + mine + _proof(key, b"worker", name, theirs, mine))
        proof = _exactly(sock, _PROOF_BYTES)
    except OSError as error:
        raise LinkError(
            "The server did not accept this worker's connection.",
            seen=str(error),
            code="WB-RUN-014",
        ) from error
    if not hmac.compare_digest(proof, _proof(key, b"server", name, theirs, mine)):
        raise LinkError(
            "The process at the server's address does not belong to this run: it does not have the "
            "run's secret key.",
            code="WB-RUN-015",
        )
    sock.settimeout(None)


@waits_in(ANSWER)
def prove_server(sock: socket.socket, key: bytes) -> int | None:
    """Check a worker's identity; return its rank, or None if it does not know the key."""
    rank = _proven_rank(sock, key)
    refused.count += rank is None
    return rank


def _proven_rank(sock: socket.socket, key: bytes) -> int | None:
    sock.settimeout(TIMEOUT_S)
    try:
        mine = secrets.token_bytes(NONCE_BYTES)
        sock.sendall(mine)
        said = _exactly(sock, _RANK.size + NONCE_BYTES + _PROOF_BYTES)
        name, theirs = said[: _RANK.size], said[_RANK.size : _RANK.size + NONCE_BYTES]
        if not hmac.compare_digest(
            said[-_PROOF_BYTES:], _proof(key, b"worker", name, mine, theirs)
        ):
            return None
        sock.sendall(_proof(key, b"server", name, mine, theirs))
        sock.settimeout(None)
    except OSError:
        return None
    return int(_RANK.unpack(name)[0])


def _proof(key: bytes, role: bytes, *parts: bytes) -> bytes:
    return hmac.digest(key, b"|".join((role, *parts)), "sha256")


def _exactly(sock: socket.socket, count: int) -> bytes:
    said = b""
    while len(said) < count:
        more = sock.recv(count - len(said))
        if not more:
            raise ConnectionError("the connection was closed")
        said += more
    return said


_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_F_ADD_SEALS = 1033
_CHUNK_BYTES = 1 << 20


class Region:
    """A mapped area of `size_bytes`.

    Attributes:
        data: (size_bytes,) uint8; read-only if it was mapped so.
    """

    def __init__(self, fd: int, size_bytes: int, *, writable: bool = True) -> None:
        self.fd, self.size_bytes = fd, size_bytes
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        self._map = mmap.mmap(fd, max(1, size_bytes), access=access)
        self.data: Bytes = np.frombuffer(self._map, np.uint8)[:size_bytes]

    @staticmethod
    def create(size_bytes: int) -> Region:
        """Make a region, filled with zeros."""
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("workbench", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            os.ftruncate(fd, max(1, size_bytes))
            _seal(fd)
        else:
            with tempfile.TemporaryFile() as file:
                _reserve(file.fileno(), max(1, size_bytes))
                fd = os.dup(file.fileno())
        return Region(fd, size_bytes)

    def close(self) -> None:
        """Release it; the memory is freed after the last array that uses it."""
        self.data = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _reserve(fd: int, size_bytes: int) -> None:
    """Reserve room for a file's bytes: on a full disk, a write to a hole would end by SIGBUS."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(fd, 0, size_bytes)
        return
    for at in range(0, size_bytes, _CHUNK_BYTES):
        os.write(fd, bytes(min(_CHUNK_BYTES, size_bytes - at)))


def _seal(fd: int) -> None:
    import fcntl

    with contextlib.suppress(OSError):
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)


@waits_in(ANSWER)
def hand_over(sock: socket.socket, regions: list[Region]) -> None:
    """Send the regions' descriptors over a Unix socket."""
    socket.send_fds(sock, [b"f"], [region.fd for region in regions])


@waits_in(ANSWER)
def take_over(sock: socket.socket, sizes: list[tuple[int, bool]], peer: str) -> list[Region]:
    """Receive and map regions.

    Args:
        sizes: (bytes, whether it may be written) of each region.

    Raises:
        LinkError: Their number or sizes are not as agreed.
    """
    _, fds, _, _ = socket.recv_fds(sock, 1, len(sizes))
    actual = [os.fstat(fd).st_size for fd in fds]
    expected = [max(1, size) for size, _ in sizes]
    if actual != expected:
        for fd in fds:
            os.close(fd)
        raise LinkError(
            f"{peer} gave this worker shared memory of the wrong size.",
            seen=actual,
            allowed=f"{expected}",
            code="WB-RUN-019",
        )
    return [
        Region(fd, size, writable=writable) for fd, (size, writable) in zip(fds, sizes, strict=True)
    ]
