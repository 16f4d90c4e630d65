"""Signed messages that are good once: for one receiver, in one session, in one direction.

    engine -> kernel   via = [engine's nonce, kernel's nonce or "", n]
    kernel -> engine   via = [kernel's nonce, engine's nonce, n]

Each end draws a nonce when it is made and counts what it sends. A message that was recorded and is
sent again, to the same end, to the one that sent it, or to a later one with the same key, is
refused. An engine learns the kernel's nonce with the first answer; what it says before that (its
hello, and all that goes through ipyparallel where the socket cannot be reached) is good for any
kernel that knows the key, once.

The window is RFC 4303's (section 3.4.3): numbers may come in any order, each once, and not later
than `WINDOW` behind the highest.
"""

from __future__ import annotations

import itertools
import secrets
import threading
from collections.abc import Sequence
from typing import Any

from .messages import BadMessageError
from .protocol import Packet, pack, unpack

WINDOW = 4096
_VIA = "via"


class Seal:
    """One end of a control path.

    Args:
        key: The cluster's key.
        open_to_any: Whether messages that name no receiver are taken: the kernel's end takes an
            engine's first words.

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
            BadMessageError: It is not signed with the key, is malformed, is for somebody else, or
                was received before.
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
    """Which of one sender's latest numbers have come."""

    def __init__(self) -> None:
        self._highest, self._bits = -1, 0

    def accept(self, number: int) -> bool:
        """Take a number; return False where it came before or is too old to tell."""
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
