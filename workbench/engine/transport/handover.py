"""One worker sends others all of its state, on separate connections.

    donor                                            receiver r
    listens, writes its address to the store ------> looks it up, connects
    both prove that they know the run's key (`connection.py`)
    state: JSON, then every tensor's bytes --------> into tensors of the sizes that the JSON names

Nothing is unpickled. A donor that waits for a receiver checks whether the set of workers has
changed: a receiver that died will never connect.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from ..debugging.marks import ANSWER, waits_in
from . import connection
from .address import Listeners, Store, dial
from .connection import Bytes, LinkError, Message, prove_server, prove_worker

WHERE = "handover"
LOOK_S = 0.05
"""How often a waiting donor checks whether it must still wait."""


def called_off() -> LinkError:
    """Return the error of a donor if some receivers will not come."""
    felt = "Connection closed by peer"
    return LinkError(
        f"{felt}: a worker ended while it was joining the run.", felt=felt, code="WB-RUN-136"
    )


class Donor:
    """The place where receivers connect; they may connect before the state is packed.

    Args:
        host, ports: The same as for `Listeners`.
        key: The same for all workers of the run.
        where: The name under which receivers look for it, if there are several donors.
    """

    def __init__(
        self,
        store: Store,
        key: bytes,
        host: str,
        ports: tuple[int, int] | None = None,
        where: str = WHERE,
    ) -> None:
        self._key, self._listeners = key, Listeners(host, ports)
        store.set(where, json.dumps(self._listeners.about))

    @waits_in(ANSWER)
    def give(
        self,
        ranks: Collection[int],
        about: Mapping[str, Any],
        parts: Sequence[Bytes],
        over: Callable[[], bool],
    ) -> None:
        """Send the state to each of these ranks.

        Args:
            over: Whether no worker waits for these ranks any more.

        Raises:
            LinkError: One of them has ended.
        """
        left = set(ranks)
        message = Message("state", about, connection.size_of(parts))
        while left:
            ready, _, _ = select.select(self._listeners.sockets, [], [], LOOK_S)
            if over():
                raise called_off()
            for listening in ready:
                with contextlib.suppress(BlockingIOError), _accepted(listening) as sock:
                    rank = prove_server(sock, self._key)
                    if rank in left:
                        connection.send(sock, message, parts, f"worker {rank}")
                        left.discard(rank)

    def close(self) -> None:
        """Stop listening."""
        self._listeners.close()


@contextlib.contextmanager
def _accepted(listening: socket.socket) -> Any:
    sock, _ = listening.accept()
    with sock:
        sock.setblocking(True)
        yield sock


@waits_in(ANSWER)
def take(
    store: Store,
    key: bytes,
    rank: int,
    room_for: Callable[[Mapping[str, Any]], Sequence[Bytes]],
    where: str = WHERE,
) -> None:
    """Receive the donor's state.

    Args:
        room_for: Given the description of the state, returns its buffers, in sequence.
        where: The donor's name.

    Raises:
        LinkError: The donor has ended, does not know the key, or sends another size.
    """
    peer = "the worker that sends the training state"
    try:
        sock = dial(json.loads(store.get(where)), "auto")
    except OSError as error:
        raise connection.closed(peer) from error
    with sock:
        try:
            prove_worker(sock, key, rank)
        except LinkError as error:
            if isinstance(error.__cause__, OSError):  # the donor ended during the transfer
                raise connection.closed(peer) from error
            raise
        message = connection.receive(sock, peer)
        parts = room_for(message.meta)
        connection.check_size(message, connection.size_of(parts), peer)
        connection.receive_into(sock, parts, peer)
