"""Frames on a stream: a fixed head, a JSON header, then raw bytes of an agreed size."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import RunError
from ..marks import ANSWER, waits_in

Bytes = NDArray[np.uint8]

_HEAD = struct.Struct("!4sIQ")  # magic, bytes of the header, bytes of the payload
HEAD_BYTES = _HEAD.size
_MAGIC = b"wbL1"
MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 40
_MOST_PARTS = 512  # the system limits how many buffers one call may name


class LinkError(RunError):
    """A link broke, or its other end said something that makes no sense.

    Args:
        about: As of every error of ours.
        felt: In short what is felt here of another one's end, who knows better why; empty where
            the reason may be here.
    """

    def __init__(self, what: str, *, felt: str = "", **about: Any) -> None:
        super().__init__(what, **about)
        self.felt = felt


@dataclass
class Message:
    """One message.

    Attributes:
        kind: What it is about.
        meta: JSON-ready fields.
        size_bytes: Payload that follows on the stream; 0 where it is in shared memory.
    """

    kind: str
    meta: Mapping[str, Any] = field(default_factory=dict)
    size_bytes: int = 0


def closed(peer: str) -> LinkError:
    """Return the error for a link whose other end is gone."""
    felt = "Connection closed by peer"
    return LinkError(
        f"{felt}: {peer} is gone.",
        felt=felt,
        next_step="its own error says why; %cluster logs shows what it wrote",
        code="WB-RUN-020",
    )


def ended(peer: str) -> LinkError:
    """Return the error for another worker that exchanges nothing any more."""
    felt = "Connection closed by peer"
    return LinkError(
        f"{felt}: {peer} takes no further part, though this worker's loop goes on.",
        felt=felt,
        next_step="its own error says why; if it shows none, its loop was shorter: let all ranks "
        "take the same number of steps",
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
            f"{peer} sent something that is no message.", seen=head.hex(), code="WB-RUN-022"
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

    It is not touched here: what is announced and never comes takes no memory.

    Raises:
        LinkError: It announces more than there is.
    """
    try:
        if message.size_bytes > MAX_PAYLOAD_BYTES:
            raise MemoryError
        return np.empty(message.size_bytes, np.uint8).data
    except MemoryError:
        raise LinkError(
            f"{peer} announced a payload for {message.kind!r} that there is no memory for.",
            seen=f"{message.size_bytes} bytes",
            code="WB-RUN-024",
        ) from None


def check_size(message: Message, expected_bytes: int, peer: str) -> None:
    """Raise LinkError when a payload is not as large as was agreed; nothing of it is read."""
    if message.size_bytes != expected_bytes:
        raise LinkError(
            f"{peer} announced a payload of the wrong size for {message.kind!r}.",
            seen=f"{message.size_bytes} bytes",
            allowed=f"{expected_bytes} bytes",
            code="WB-RUN-025",
        )


@waits_in(ANSWER)
def send(sock: socket.socket, message: Message, parts: Sequence[Bytes], peer: str) -> None:
    """Send a message and its payload, gathered from where it lies.

    Raises:
        LinkError: The other end is gone.
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
        LinkError: The other end is gone or does not speak this protocol.
    """
    head = bytearray(HEAD_BYTES)
    receive_into(sock, [memoryview(head)], peer)
    header_bytes, payload_bytes = unpack_head(bytes(head), peer)
    header = bytearray(header_bytes)
    receive_into(sock, [memoryview(header)], peer)
    return unpack_header(bytes(header), payload_bytes, peer)


@waits_in(ANSWER)
def receive_into(sock: socket.socket, parts: Sequence[Bytes | memoryview], peer: str) -> None:
    """Fill the buffers from the stream, straight to where they lie.

    Raises:
        LinkError: The other end is gone.
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
    """Return what is left of the buffers after so many bytes."""
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
    """Copy the parts into an area, one behind the other."""
    at = 0
    for part in parts:
        area[at : at + part.size] = part
        at += part.size


def copy_out(area: Bytes, parts: Sequence[Bytes]) -> None:
    """Copy an area into the parts, one behind the other."""
    at = 0
    for part in parts:
        part[:] = area[at : at + part.size]
        at += part.size
