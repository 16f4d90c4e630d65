"""The warm parent's door: a Unix socket in a kept cluster's folder, where the next owner knocks.

    next owner -> warm   {"cmd": "own", "pid", "create_time", "take"}
    warm -> next owner   {"children", "exits", "report"} | {"error", "owner"}

Only this user can reach it (the folder is 0700), and who knocks is checked once more by the user id
that the system vouches for. Runs in the warm parent: one thread, no waiting but a short one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

KNOCK_S = 2.0
MAX_LINE_BYTES = 1 << 16


class Door:
    """Listens in a cluster's folder.

    Args:
        folder: The cluster's.
        name: Of the socket; one for each warm parent.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self.path = folder / name
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with contextlib.suppress(FileNotFoundError):
            self.path.unlink()
        with _short(self.path) as path:
            self._socket.bind(path)
        self.path.chmod(0o600)
        self._socket.listen(8)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For `select`."""
        return self._socket.fileno()

    def answer(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """Return who knocks and what they say; None for strangers and those who say nothing."""
        try:
            caller, _ = self._socket.accept()
        except OSError:
            return None
        try:
            caller.settimeout(KNOCK_S)
            if _uid(caller) == os.getuid():
                message = json.loads(_line(caller, MAX_LINE_BYTES))
                if message.get("cmd") == "own":
                    caller.settimeout(None)
                    return caller, message
        except (OSError, ValueError, AttributeError):
            pass
        caller.close()
        return None

    def close(self) -> None:
        """Listen no more."""
        self._socket.close()
        with contextlib.suppress(OSError):
            self.path.unlink()

    def leave(self) -> None:
        """Let go of it in a forked child."""
        self._socket.close()


def knock(path: Path, message: Mapping[str, Any]) -> tuple[socket.socket, dict[str, Any]]:
    """Ask to own the cluster; return the connection and the answer.

    Raises:
        OSError: Nobody is there.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(10 * KNOCK_S)
        with _short(path) as short:
            sock.connect(short)
        sock.sendall(json.dumps({"cmd": "own", **message}).encode() + b"\n")
        answer: dict[str, Any] = json.loads(_line(sock))
    except ValueError as error:
        sock.close()
        raise OSError("the answer was cut off") from error
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock, answer


def _line(sock: socket.socket, most_bytes: int = -1) -> bytes:
    """Read one line, and not a byte more: what follows belongs to somebody else."""
    with sock.makefile("rb", buffering=0) as unbuffered:
        return unbuffered.readline(most_bytes)


def _uid(sock: socket.socket) -> int:
    size = struct.calcsize("3i")
    raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("3i", raw)[1])


@contextlib.contextmanager
def _short(path: Path) -> Any:
    """Yield a name that fits a socket's address (107 bytes), however deep the folder lies."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
