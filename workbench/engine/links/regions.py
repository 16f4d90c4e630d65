"""Memory that two processes of one host map; it has no name and goes with its last user.

On Linux it is a memfd, which needs no room in /dev/shm and is sealed against being resized;
elsewhere an unlinked temporary file. The descriptor is handed over on a Unix socket.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile

import numpy as np

from ..marks import ANSWER, waits_in
from .wire import Bytes, LinkError

_SEALS = 0x0001 | 0x0002 | 0x0004  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW
_F_ADD_SEALS = 1033
_CHUNK_BYTES = 1 << 20


class Region:
    """A mapped area of `size_bytes`.

    Attributes:
        data: (size_bytes,) uint8; read-only where it was mapped so.
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
        """Let go of it; the memory goes when no array looks at it any more."""
        self.data = np.empty(0, np.uint8)
        with contextlib.suppress(BufferError):
            self._map.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _reserve(fd: int, size_bytes: int) -> None:
    """Have room for a file's bytes now: writing to a hole of it on a full disk ends by SIGBUS."""
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
        sizes: (bytes, whether it may be written) of each.

    Raises:
        LinkError: They are not as many or as large as was agreed.
    """
    _, fds, _, _ = socket.recv_fds(sock, 1, len(sizes))
    actual = [os.fstat(fd).st_size for fd in fds]
    expected = [max(1, size) for size, _ in sizes]
    if actual != expected:
        for fd in fds:
            os.close(fd)
        raise LinkError(
            f"{peer} shared memory of the wrong size.",
            seen=actual,
            allowed=f"{expected}",
            code="WB-RUN-019",
        )
    return [
        Region(fd, size, writable=writable) for fd, (size, writable) in zip(fds, sizes, strict=True)
    ]
