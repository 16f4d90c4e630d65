"""Links between the workers of one host: a Unix socket for each pair, and no thread in between.

    worker r   sendmsg(size, buffer) ------> recvmsg(size, buffer)   worker s
               recvmsg(size, buffer) <------ sendmsg(size, buffer)

A worker that waits for a message reads it itself, directly into its buffer: the system wakes that
thread, a signal interrupts it, and a peer's death ends its wait. Every message begins with its
size; a message of another size than the buffer is refused before more of it is read.

    listen     each worker, in a folder that no other user can enter
    connect    to all workers of a lower rank, then accept those of a higher rank; both ends prove
               that they know the run's key (`connection.py`)
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Mapping, Sequence

from ...shared import cluster_env
from ..debugging.marks import MESSAGE, waits_in
from .connection import TIMEOUT_S, LinkError, ended, prove_server, prove_worker, rest

SILENCE_S = 1800  # how long a living peer may stay silent; as long as a collective of the group
_SIZE = struct.Struct("!Q")
_TIMEVAL = struct.pack("ll", SILENCE_S, 0)


class Doorway:
    """The socket on which the other workers of this host connect to this worker.

    Attributes:
        path: Path of the listening socket.

    Raises:
        OSError: This system has no Unix sockets, or no folder for one with a short name.
    """

    def __init__(self) -> None:
        if not hasattr(socket, "AF_UNIX"):
            raise OSError("no Unix sockets")
        self._folder = tempfile.mkdtemp(
            prefix="wb-peer-", dir=cluster_env.folder()
        )  # made with mode 0700
        self.path = os.path.join(self._folder, "s")
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listening.bind(self.path)
            self._listening.listen(1024)
        except BaseException:
            self.close()
            raise

    @waits_in(MESSAGE)
    def connect(self, paths: Sequence[str], rank: int, key: bytes) -> Peers:
        """Return the links to all other workers.

        Args:
            paths: Every worker's listening socket, by rank; all are listening already.
            rank: This worker's rank.
            key: The same for all; a connection whose other end does not know it is closed.

        Raises:
            LinkError: Some worker did not connect, or does not know the key.
            OSError: Some worker cannot be reached.
        """
        sockets: dict[int, socket.socket] = {}
        try:
            for other in range(rank):
                sock = sockets[other] = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
                sock.connect(paths[other])
                prove_worker(sock, key, rank)
            deadline_s = time.monotonic() + TIMEOUT_S
            while len(sockets) < len(paths) - 1:
                self._let_in(sockets, range(rank + 1, len(paths)), key, deadline_s)
        except BaseException:
            for sock in sockets.values():
                sock.close()
            raise
        return Peers(sockets)

    def _let_in(
        self, sockets: dict[int, socket.socket], awaited: range, key: bytes, deadline_s: float
    ) -> None:
        """Accept one connection; close it if its other end does not know the key."""
        self._listening.settimeout(max(0.01, deadline_s - time.monotonic()))
        try:
            sock, _ = self._listening.accept()
        except TimeoutError as error:
            missing = sorted(set(awaited) - set(sockets))
            raise LinkError(
                "Some workers on this host did not connect to this worker.",
                seen=f"no connection from ranks {missing}",
                next_step="read the errors of these ranks; %cluster logs shows the output of all "
                "engines",
                code="WB-RUN-016",
            ) from error
        other = prove_server(sock, key)
        if other is None or other not in awaited or other in sockets:
            sock.close()
            return
        sockets[other] = sock

    def close(self) -> None:
        """Stop listening; links that are open stay open."""
        self._listening.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class Peers:
    """The links of one worker; used by one thread at a time.

    After an error or an interrupt, perhaps in the middle of a message, all links are closed, so
    that other workers that wait for this worker notice it at once.

    Args:
        sockets: A connected stream socket to each other worker, by rank.
    """

    def __init__(self, sockets: Mapping[int, socket.socket]) -> None:
        self._sockets = dict(sockets)
        for sock in self._sockets.values():
            sock.setblocking(True)
            for which in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, which, _TIMEVAL)

    @waits_in(MESSAGE)
    def send(self, to: int, data: memoryview) -> None:
        """Send bytes to a worker; it may return before they are read.

        Raises:
            LinkError: The worker has ended.
        """
        try:
            sending = _Sending(self._socket(to), to, data)
            while sending.left:
                sending.advance()
        except BaseException:
            self.close()
            raise

    @waits_in(MESSAGE)
    def receive(self, source: int, into: memoryview) -> None:
        """Fill a buffer with a worker's next message.

        Raises:
            LinkError: The worker has ended, or its message is not as long as the buffer.
        """
        try:
            receiving = _Receiving(self._socket(source), source, into)
            while receiving.left:
                receiving.advance()
        except BaseException:
            self.close()
            raise

    @waits_in(MESSAGE)
    def exchange(self, to: int, data: memoryview, source: int, into: memoryview) -> None:
        """Send to one worker while receiving from another, for messages of any size.

        Raises:
            LinkError: For the same reasons as in `send` and `receive`.
        """
        try:
            sending = _Sending(self._socket(to), to, data)
            receiving = _Receiving(self._socket(source), source, into)
            sending.advance(socket.MSG_DONTWAIT)
            while sending.left and receiving.left:
                _wait_for_either(receiving, sending)
                receiving.advance(socket.MSG_DONTWAIT)
                sending.advance(socket.MSG_DONTWAIT)
            while receiving.left:
                receiving.advance()
            while sending.left:
                sending.advance()
        except BaseException:
            self.close()
            raise

    def _socket(self, rank: int) -> socket.socket:
        try:
            return self._sockets[rank]
        except KeyError:
            raise ended(f"worker {rank}") from None

    def break_off(self) -> None:
        """End a blocking call of the thread that uses the links; callable from any other thread."""
        for sock in list(self._sockets.values()):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all links; other workers that wait for this worker stop at once."""
        while self._sockets:
            _, sock = self._sockets.popitem()
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


class _Sending:
    """A message that is being sent to a worker."""

    def __init__(self, sock: socket.socket, rank: int, data: memoryview) -> None:
        self.sock, self._rank = sock, rank
        self.left = [memoryview(_SIZE.pack(len(data))), data]

    def advance(self, flags: int = 0) -> None:
        """Send as much as there is room for, waiting unless `flags` say not to."""
        try:
            sent = self.sock.sendmsg(self.left, (), flags)
        except BlockingIOError:
            if not flags:
                raise _silent(self._rank) from None
            return
        except OSError as error:
            raise ended(f"worker {self._rank}") from error
        self.left = rest(self.left, sent)


class _Receiving:
    """A message that is being received from a worker."""

    def __init__(self, sock: socket.socket, rank: int, into: memoryview) -> None:
        self.sock, self._rank, self._expected_bytes = sock, rank, len(into)
        self._size = bytearray(_SIZE.size)
        self.left = [memoryview(self._size), into]

    def advance(self, flags: int = 0) -> None:
        """Read the available bytes; wait for some unless `flags` say not to."""
        try:
            received = self.sock.recvmsg_into(self.left, 0, flags)[0]
        except BlockingIOError:
            if not flags:
                raise _silent(self._rank) from None
            return
        except OSError as error:
            raise ended(f"worker {self._rank}") from error
        if not received:
            raise ended(f"worker {self._rank}")
        with_size = len(self.left) == 2
        self.left = rest(self.left, received)
        if with_size and len(self.left) < 2:
            self._check_size()

    def _check_size(self) -> None:
        (size_bytes,) = _SIZE.unpack(self._size)
        if size_bytes != self._expected_bytes:
            raise LinkError(
                f"Worker {self._rank} sent a message of the wrong size.",
                seen=f"{size_bytes} bytes",
                allowed=f"{self._expected_bytes} bytes",
                code="WB-RUN-017",
            )


def _wait_for_either(receiving: _Receiving, sending: _Sending) -> None:
    """Wait until data has arrived, or the socket can take more."""
    poll = select.poll()
    poll.register(sending.sock, select.POLLOUT)
    both = select.POLLIN | select.POLLOUT if receiving.sock is sending.sock else select.POLLIN
    poll.register(receiving.sock, both)
    if not poll.poll(1000 * SILENCE_S):
        raise _silent(receiving._rank)


def _silent(rank: int) -> LinkError:
    return LinkError(
        f"Worker {rank} did not answer in time.",
        seen=f"no answer for {SILENCE_S} s",
        next_step=f"%cluster stacks shows which line of code worker {rank} is running",
        code="WB-RUN-018",
    )
