"""A worker's end of the link to one server."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from . import connection
from .address import Store, dial, look_up
from .connection import Bytes, LinkError, Message, Region, prove_worker, take_over

WAYS = ("auto", "shared_memory", "unix", "tcp")


class Link:
    """One link; used by the training thread alone.

    Attributes:
        server: Index of the server.
        way: The medium of buffers: `shared_memory`, `unix` or `tcp`.
        taken_over: Called with (dead server, server that took over, seconds that this took), if two
            servers hold the same (`chained`).
    """

    taken_over: Callable[[int, int, float], None]

    def __init__(self, sock: socket.socket, server: int, way: str) -> None:
        self._sock, self.server, self.way = sock, server, way
        self.name = f"server s{server}"
        self._size_bytes, self._in_session = 0, False
        self._most_bytes: int | None = None
        self._shared = False
        self._refusal: Mapping[str, Any] | None = None  # the server's reason for ending the session
        self._mailbox: Region | None = None
        self._board: Region | None = None

    def begin(
        self, size_bytes: int, meta: Mapping[str, Any], most_bytes: int | None = None
    ) -> None:
        """Ask for a session with `size_bytes` each way; `opened` must follow.

        Args:
            most_bytes: Pushes and answers vary in size and are at most this large; they use the
                stream. None: all have one size.
        """
        self._drop_memory()
        self._size_bytes, self._in_session, self._refusal = size_bytes, True, None
        self._most_bytes = most_bytes
        self._shared = self.way == "shared_memory" and most_bytes is None
        self.send("open", {**meta, "size_bytes": size_bytes, "shared": self._shared})

    def opened(self, answer: Message | None = None) -> Message:
        """Wait until the session is open; return the server's answer.

        Args:
            answer: The answer, if it has arrived already.

        Raises:
            LinkError: The server refused, or has ended.
        """
        answer = answer or self.receive()
        if self._shared:
            sizes = [(self._size_bytes, True), (self._size_bytes, False)]
            self._mailbox, self._board = take_over(self._sock, sizes, self.name)
        return answer

    def send(self, kind: str, meta: Mapping[str, Any] | None = None) -> None:
        """Send a message without a payload."""
        connection.send(self._sock, Message(kind, meta or {}), (), self.name)

    def send_bytes(self, kind: str, payload: bytes) -> None:
        """Send a message with a payload of any size, on the stream."""
        data = np.frombuffer(payload, np.uint8)
        connection.send(self._sock, Message(kind, {}, data.size), (data,), self.name)

    def push(self, kind: str, meta: Mapping[str, Any], parts: Sequence[Bytes]) -> None:
        """Send the parts, in sequence, into this worker's mailbox.

        Raises:
            LinkError: They do not have the agreed size, or the server has ended.
        """
        message = Message(kind, meta, connection.size_of(parts))
        if self._most_bytes is None or kind == "init":
            connection.check_size(message, self._size_bytes, "this worker")
        else:
            connection.check_most(message, self._most_bytes, "this worker")
        if self._mailbox is None:
            connection.send(self._sock, message, parts, self.name)
            return
        connection.copy_in(parts, self._mailbox.data)
        message.size_bytes = 0
        connection.send(self._sock, message, (), self.name)

    def receive(self) -> Message:
        """Wait for the server's next message; `read` or `read_bytes` takes its payload.

        Raises:
            LinkError: The server has ended, or has failed with a reason.
        """
        if self._refusal is None:
            message = connection.receive(self._sock, self.name)
            if message.kind != "error":
                return message
            self._refusal = message.meta
        # It answers nothing more in this session: another request would wait forever.
        text, felt = (str(self._refusal.get(key, "")) for key in ("text", "felt"))
        raise LinkError(f"{self.name} refused the request: {text}", felt=felt, code="WB-RUN-026")

    def read(self, message: Message, parts: Sequence[Bytes]) -> None:
        """Copy the server's payload into the parts.

        Raises:
            LinkError: It is not as large as the parts, or the server has ended.
        """
        if self._board is None:
            connection.check_size(message, connection.size_of(parts), self.name)
            connection.receive_into(self._sock, parts, self.name)
            return
        connection.check_size(
            Message(message.kind, {}, self._size_bytes), connection.size_of(parts), self.name
        )
        connection.copy_out(self._board.data, parts)

    def take(self, where: Callable[[Message], Sequence[Bytes]]) -> Message:
        """Wait for the server's next message and copy its payload into the parts for it.

        Args:
            where: Returns the parts that an answer fills.

        Raises:
            LinkError: For the same reasons as in `receive` and `read`.
        """
        answer = self.receive()
        self.read(answer, where(answer))
        return answer

    def take_bytes(self) -> bytes:
        """Wait for the server's next message and return its payload.

        Raises:
            LinkError: For the same reasons as in `receive` and `read_bytes`.
        """
        return self.read_bytes(self.receive())

    def complete(self, kind: str, meta: Mapping[str, Any]) -> None:
        """Send the remaining data that the server needs for the last push."""
        self.send(kind, meta)

    def expect(self) -> None:
        """Wait for an answer that another worker's message causes; this call sends nothing."""

    def cut(self, server: int) -> None:
        """End a wait for this server, because it has ended; from any thread."""
        if server == self.server:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def settled(self) -> None:
        """Note that all servers continue from one step: any server of a part may answer."""

    def break_off(self) -> None:
        """End any wait; from any thread."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def release(self, message: Message) -> None:
        """Allow the server to change the memory that it sent with this message."""
        if message.meta.get("held"):
            self.send("release")

    def read_bytes(self, message: Message) -> bytes:
        """Return a payload that was sent on the stream.

        Raises:
            LinkError: The server has ended, or announced more than fits the memory.
        """
        payload = connection.room_for(message, self.name)
        connection.receive_into(self._sock, [payload], self.name)
        return bytes(payload)

    def end_session(self) -> None:
        """Leave the session, if there is one; the link stays."""
        self._drop_memory()
        if self._in_session:
            self._in_session = False
            with contextlib.suppress(LinkError):  # the server may have ended already
                self.send("close")

    def _drop_memory(self) -> None:
        for region in (self._mailbox, self._board):
            if region is not None:
                region.close()
        self._mailbox = self._board = None

    def close(self) -> None:
        """Close the link to the server."""
        self._drop_memory()
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def connect(store: Store, servers: int, rank: int, key: bytes, way: str = "auto") -> list[Link]:
    """Connect this worker to all servers of its run.

    Raises:
        LinkError: A server did not start or does not know the key.
    """
    links: list[Link] = []
    try:
        for server in range(servers):
            links.append(dial_server(store, server, rank, key, way))  # noqa: PERF401 - closed below
    except BaseException:
        for link in links:
            link.close()
        raise
    return links


def dial_server(
    store: Store, server: int, rank: int, key: bytes, way: str, *, of_copy: int | None = None
) -> Link:
    """Connect to one server.

    Args:
        of_copy: The part whose copy this server holds, if the link is for that part.

    Raises:
        LinkError: It did not start or does not know the key.
    """
    about = look_up(store, server) if of_copy is None else look_up(store, of_copy, "copy")
    peer = f"server s{server}"
    try:
        sock = dial(about, way)
    except OSError as error:
        raise connection.closed(peer) from error
    try:
        prove_worker(sock, key, rank)
    except LinkError as error:
        sock.close()
        if isinstance(error.__cause__, ConnectionError) and rank >= connection.SEATS:
            raise connection.closed(peer) from error  # it has ended, or refuses this generation
        raise
    near = "unix" if sock.family != socket.AF_INET else "tcp"
    if near == "unix" and way in ("auto", "shared_memory"):
        near = "shared_memory"
    return Link(sock, server, near)
