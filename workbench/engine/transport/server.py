"""A server's end of all its links: one thread, which takes messages as they become complete."""

from __future__ import annotations

import contextlib
import selectors
import socket
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ..debugging.marks import ANSWER, waits_in
from . import connection
from .address import Listeners, Store, keep_alive, publish
from .connection import SEATS, Bytes, LinkError, Message, Region, hand_over, prove_server

PUSHES = ("init", "push", "update")
"""Kinds of messages that fill a worker's mailbox."""
LOOK_S = 0.5
"""How often a hub that waits for workers checks whether it must still wait."""
Others = Literal["never", "together", "singly"]
"""Whether more workers come after the first workers: never; a whole generation, in place of the
earlier generation; or one by one, each in place of a worker that has ended."""
NOBODY = -1
REGROUP = "regroup"
"""The result of `Hub.next` when a new generation begins: earlier messages do not follow it."""


class Gone(Message):
    """The result of `Hub.next` for a worker whose link is closed."""

    def __init__(self) -> None:
        super().__init__("gone")


class Hub:
    """A server's links.

    Args:
        workers: How many workers will connect.
        key: The run's key.
        others: Whether others may join later (`Others`).
        stays: The rank of a peer that is not a worker and belongs to no generation.

    Attributes:
        living: Ranks whose links are open.
        generation: The newest generation with a connected worker, if all connect together.
        strangers: Connections that did not know the key, or claimed a rank in use.
    """

    def __init__(self, workers: int, key: bytes, others: Others = "never", stays: int = -1) -> None:
        self._workers, self._key, self._others, self._stays = workers, key, others, stays
        self.generation = 0
        self._waits = others != "never"  # also while no worker is connected
        self._peers: dict[int, _Peer] = {}
        self._selector = selectors.DefaultSelector()
        self._ready: deque[tuple[int, Message]] = deque()
        self._board: Region | None = None
        self._listeners: Listeners | None = None
        self._hung_up = False
        self.strangers = 0

    def listen(
        self, store: Store, server: int, host: str, ports: tuple[int, int] | None = None,
        role: str = "link",
    ) -> None:  # fmt: skip
        """Listen, and publish this server's addresses.

        Args:
            host, ports: The address on which it listens (`Listeners`).
            role: The part for which it answers there (`look_up`).
        """
        self._listeners = Listeners(host, ports)
        publish(store, server, self._listeners.about, role)

    def admit(
        self, store: Store, server: int, host: str, ports: tuple[int, int] | None = None
    ) -> None:
        """Publish this server's addresses and wait until every worker has connected (`listen`)."""
        self.listen(store, server, host, ports)
        self.gather()

    @waits_in(ANSWER)
    def gather(self) -> None:
        """Wait until every worker has connected, or `hang_up` says that none will connect."""
        assert self._listeners is not None, "listen comes first"
        try:
            with selectors.DefaultSelector() as selector:
                for sock in self._listeners.sockets:
                    selector.register(sock, selectors.EVENT_READ)
                while len(self._peers) < self._workers and not self._hung_up:
                    for key, _ in selector.select(LOOK_S):
                        self._let_in(key.fileobj)
        finally:
            if not self._waits:
                self._listeners.close()
        for sock in self._listeners.sockets if self._waits else ():
            self._selector.register(sock, selectors.EVENT_READ)

    def _let_in(self, listener: Any) -> None:
        try:
            sock, _ = listener.accept()
        except OSError:  # the peer has already ended
            return
        seat = prove_server(sock, self._key)
        generation, rank = divmod(0 if seat is None else seat, SEATS)
        if seat is None or not self._admits(generation, rank):
            self.strangers += 1
            sock.close()
            return
        self._make_room(generation, rank)
        if sock.family == socket.AF_INET:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            keep_alive(sock)
        peer = self._peers[rank] = _Peer(sock, rank, generation)
        self._selector.register(sock, selectors.EVENT_READ, peer)

    def _admits(self, generation: int, rank: int) -> bool:
        """Whether a worker belongs to a generation that is not over."""
        if not generation:
            return rank not in self._peers and rank < self._workers and not self.generation
        if self._others == "singly" and (there := self._peers.get(rank)) is not None:
            return generation > there.generation
        return self._others != "never" and generation >= self.generation and rank != self._stays

    def _make_room(self, generation: int, rank: int) -> None:
        """Drop the links and messages of the workers that this worker replaces."""
        if self._others == "singly" and rank in self._peers:
            self.drop(rank)
        elif generation > self.generation and self._others == "together":
            self.generation = generation
            for one in [one for one in self._peers if one != self._stays]:
                self._forget(one)
            self._ready.append((NOBODY, Message(REGROUP)))
        elif rank in self._peers:  # at its first try another server had ended
            self._forget(rank)

    def _forget(self, rank: int) -> None:
        """Close a link, and drop its unread messages."""
        self.drop(rank)
        self._ready = deque(item for item in self._ready if item[0] != rank)

    @property
    def living(self) -> list[int]:
        """Ranks whose links are open."""
        return sorted(self._peers)

    def board(self, size_bytes: int) -> Bytes:
        """Make the memory that workers read; (size_bytes,) uint8."""
        self.close_session()
        self._board = Region.create(size_bytes)
        return self._board.data

    def mailbox(
        self, rank: int, size_bytes: int, *, shared: bool, most_bytes: int | None = None
    ) -> Bytes:
        """Make the memory into which a worker's pushes go; (size_bytes,) uint8.

        Args:
            most_bytes: Pushes vary in size and are at most this large, and so is the memory; the
                initial values, of `size_bytes`, come as the message's payload.
        """
        return self._peers[rank].make_mailbox(size_bytes, shared=shared, most_bytes=most_bytes)

    @waits_in(ANSWER)
    def next(self) -> tuple[int, Message] | None:
        """Wait for a message; return (rank, message), or None when no worker remains.

        The payload of a push is in the worker's mailbox by then.
        """
        while not self._ready:
            if not self._peers and (self._hung_up or not self._waits):
                return None
            for key, _ in self._selector.select(LOOK_S if self._waits else None):
                if key.data is None:
                    self._let_in(key.fileobj)
                else:
                    self._advance(key.data)
        return self._ready.popleft()

    def expect_nobody(self) -> None:
        """Let `next` end when no worker remains: no others will join; called by another thread."""
        self._waits = False

    def _advance(self, peer: _Peer) -> None:
        if self._peers.get(peer.rank) is not peer:  # another connection has just replaced it
            return
        try:
            message = peer.advance()
        except LinkError as error:
            with contextlib.suppress(LinkError):
                connection.send(peer.sock, Message("error", {"text": error.what}), (), peer.name)
            self.drop(peer.rank)
            return
        if message is not None:
            self._ready.append((peer.rank, message))

    def shares(self, rank: int) -> bool:
        """Whether the worker reads the board itself, after `reply` has returned."""
        return rank in self._peers and self._peers[rank].shared

    def reply(
        self, rank: int, kind: str, meta: Mapping[str, Any] | None = None, *, board: bool = False
    ) -> None:
        """Send a message; add the board if requested, unless the worker shares its memory."""
        peer = self._peers.get(rank)
        if peer is not None:
            parts = [self._board.data] if board and not peer.shared and self._board else []
            self._send(peer, Message(kind, meta or {}, connection.size_of(parts)), parts)

    def reply_parts(
        self, rank: int, kind: str, meta: Mapping[str, Any], parts: Sequence[Bytes]
    ) -> None:
        """Send a message with these parts, in sequence, on the stream."""
        if (peer := self._peers.get(rank)) is not None:
            self._send(peer, Message(kind, meta, connection.size_of(parts)), parts)

    def reply_bytes(self, rank: int, kind: str, payload: bytes) -> None:
        """Send a message with a payload of any size."""
        if (peer := self._peers.get(rank)) is not None:
            data = np.frombuffer(payload, np.uint8)
            self._send(peer, Message(kind, {}, data.size), [data])

    def hand_over(self, rank: int) -> None:
        """Give a worker the descriptors of the memory that it shares."""
        peer = self._peers.get(rank)
        if peer is not None and peer.shared and peer.region is not None and self._board is not None:
            with contextlib.suppress(OSError):  # its end shows in `next`
                hand_over(peer.sock, [peer.region, self._board])

    def _send(self, peer: _Peer, message: Message, parts: Sequence[Bytes]) -> None:
        try:
            connection.send(peer.sock, message, parts, peer.name)
        except LinkError:
            self.drop(peer.rank)

    def drop(self, rank: int) -> None:
        """Close a worker's link; `next` will report it."""
        peer = self._peers.pop(rank, None)
        if peer is not None:
            self._selector.unregister(peer.sock)
            peer.close()
            self._ready.append((rank, Gone()))

    def hang_up(self) -> None:
        """End the wait of the thread in `gather` or `next`; called by another thread."""
        self._hung_up = True
        for peer in list(self._peers.values()):
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def cut(self, rank: int) -> None:
        """Drop a peer that has ended, even if its link does not show it; from any thread."""
        peer = self._peers.get(rank)
        if peer is not None:
            with contextlib.suppress(OSError):
                peer.sock.shutdown(socket.SHUT_RDWR)

    def close_session(self) -> None:
        """Release the memory of a session."""
        if self._board is not None:
            self._board.close()
            self._board = None
        for peer in self._peers.values():
            peer.drop_mailbox()

    def close(self) -> None:
        """Close every link."""
        self.close_session()
        for rank in self.living:
            self.drop(rank)
        self._selector.close()
        if self._listeners is not None:
            self._listeners.close()


class _Peer:
    """One worker's connection, read piece by piece: a slow worker does not delay the others."""

    def __init__(self, sock: socket.socket, rank: int, generation: int = 0) -> None:
        self.sock, self.rank, self.name = sock, rank, f"worker {rank}"
        self.generation = generation
        self.shared = False
        self.region: Region | None = None
        self._mailbox: Bytes = np.empty(0, np.uint8)
        self._init_bytes: int | None = None  # where pushes vary in size
        self._begin()

    def _begin(self) -> None:
        self._head = bytearray(connection.HEAD_BYTES)
        self._left = memoryview(self._head)
        self._stage, self._size_bytes = "head", 0
        self._message: Message | None = None

    def make_mailbox(
        self, size_bytes: int, *, shared: bool, most_bytes: int | None = None
    ) -> Bytes:
        self.drop_mailbox()
        self.shared = shared
        self._init_bytes = None if most_bytes is None else size_bytes
        if most_bytes is not None:
            self._mailbox = np.zeros(most_bytes, np.uint8)
        elif shared:
            self.region = Region.create(size_bytes)
            self._mailbox = self.region.data
        else:
            self._mailbox = np.zeros(size_bytes, np.uint8)
        return self._mailbox

    def drop_mailbox(self) -> None:
        self._mailbox = np.empty(0, np.uint8)
        if self.region is not None:
            self.region.close()
            self.region = None

    def advance(self) -> Message | None:
        """Read what is there; return the message once it is complete.

        Raises:
            LinkError: The worker has ended, or sent a message that is not valid.
        """
        while True:
            if len(self._left):
                try:
                    received = self.sock.recv_into(self._left, 0, socket.MSG_DONTWAIT)
                except (BlockingIOError, InterruptedError):
                    return None
                except OSError as error:
                    raise connection.closed(self.name) from error
                if not received:
                    raise connection.closed(self.name)
                self._left = self._left[received:]
                continue
            if (message := self._next_stage()) is not None:
                self._begin()
                return message

    def _next_stage(self) -> Message | None:
        if self._stage == "head":
            header_bytes, self._size_bytes = connection.unpack_head(bytes(self._head), self.name)
            self._header = bytearray(header_bytes)
            self._left, self._stage = memoryview(self._header), "header"
            return None
        if self._stage == "header":
            message = connection.unpack_header(bytes(self._header), self._size_bytes, self.name)
            if message.kind in PUSHES and not self.shared:
                self._check(message)
            if not message.size_bytes:
                return message
            self._message = message
            self._left, self._stage = memoryview(self._target(message)), "payload"
            return None
        return self._message

    def _target(self, message: Message) -> Any:
        """Return the target of a payload; the size is checked before anything is read."""
        varies = self._init_bytes is not None
        if message.kind == "load" or (varies and message.kind == "init"):
            payload = connection.room_for(message, self.name)  # a saved state can have any size
            message.meta = {**message.meta, "payload": payload}
            return payload
        self._check(message)
        return self._mailbox[: message.size_bytes]

    def _check(self, message: Message) -> None:
        """Raise LinkError if a push does not have the agreed size, or exceeds the limit."""
        if self._init_bytes is None:
            connection.check_size(message, self._mailbox.size, self.name)
        elif message.kind == "init":
            connection.check_size(message, self._init_bytes, self.name)
        else:
            connection.check_most(message, self._mailbox.size, self.name)

    def close(self) -> None:
        self.drop_mailbox()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
