"""The warm parent's end of the line to its owner: one line of JSON each, one thread, no waiting.

`warm_client.py` is the other end.
"""

from __future__ import annotations

import contextlib
import json
import socket
from typing import Any

Message = dict[str, Any]
_CHUNK_BYTES = 1 << 16


class OwnerLine:
    """Sends to the owner and splits what comes from it into messages.

    Args:
        sock: Our end of the socket pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._input = b""

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.sock.fileno()

    def send(self, message: Message) -> bool:
        """Send a message; return whether the owner is there."""
        try:
            self.sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            return False
        return True

    def receive(self) -> list[Message] | None:
        """Return the messages that are complete now; None when the owner is gone."""
        try:
            chunk = self.sock.recv(_CHUNK_BYTES)
        except OSError:
            chunk = b""
        if not chunk:
            return None
        *lines, self._input = (self._input + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    def rest(self) -> list[Message]:
        """Return what was said before the owner was gone; what is no message is left out."""
        self.sock.setblocking(False)
        with contextlib.suppress(OSError):
            while chunk := self.sock.recv(_CHUNK_BYTES):
                self._input += chunk
        found = []
        for line in self._input.split(b"\n"):
            with contextlib.suppress(ValueError):
                found.append(json.loads(line))
        return found

    def change(self, sock: socket.socket) -> None:
        """Go on with another owner."""
        # A fresh descriptor first: were the old one's number used again, nobody would notice.
        old, self.sock, self._input = self.sock, sock, b""
        old.close()

    def close(self) -> None:
        """Let go of the line, in a forked child."""
        self.sock.close()
