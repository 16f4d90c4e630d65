"""Both ends of a fresh connection prove that they know the run's key; the key is never sent.

server -> worker   nonce a                          (32 bytes)
worker -> server   rank, nonce b, HMAC(key, "worker", rank, a, b)
server -> worker   HMAC(key, "server", rank, a, b)
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct

from ..marks import ANSWER, waits_in
from .wire import LinkError

NONCE_BYTES = 32
TIMEOUT_S = 10.0


class _Refused:
    """How many connections this process has turned away: their other end did not know a key."""

    def __init__(self) -> None:
        self.count = 0


refused = _Refused()
_RANK = struct.Struct("!I")
_PROOF_BYTES = 32


@waits_in(ANSWER)
def prove_worker(sock: socket.socket, key: bytes, rank: int) -> None:
    """Prove this end to a server, and have it prove itself.

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
            "The server did not let this worker in.", seen=str(error), code="WB-RUN-014"
        ) from error
    if not hmac.compare_digest(proof, _proof(key, b"server", name, theirs, mine)):
        raise LinkError(
            "What answers at the server's address does not know the run's key.", code="WB-RUN-015"
        )
    sock.settimeout(None)


@waits_in(ANSWER)
def prove_server(sock: socket.socket, key: bytes) -> int | None:
    """Let a worker prove itself; return its rank, or None when it does not know the key."""
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
