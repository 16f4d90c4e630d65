"""What an engine says to ipyparallel around each of our requests: no more than somebody reads.

ipykernel announces each request, writes it into the log, and hands both streams over to its thread
three times, which takes longer than an empty cell. What the order of outputs rests on stays: all
that a cell printed is on its way before `idle` is, and `idle` says that nothing more comes.
"""

from __future__ import annotations

import array
import codecs
import contextlib
import fcntl
import logging
import os
import select
import termios
import threading
from typing import Any

LET_GO_S = 2.0
PIPE_BYTES = 1 << 16

OURS = "workbench"
"""Metadata of the kernel's requests (`cluster/calls.py`); others are answered as ever."""

NEEDED = ("_publish_status", "init_metadata", "should_handle", "get_parent", "aborted")
"""What is made use of here; some of it is ipykernel's own affair."""


def shorten(kernel: Any) -> None:
    """Have an engine's kernel answer our requests briefly."""
    if not all(hasattr(kernel, name) for name in NEEDED):
        return  # another ipykernel: it answers as ever
    say, metadata, handles = kernel._publish_status, kernel.init_metadata, kernel.should_handle

    def publish_status(status: str, channel: str, parent: Any = None) -> None:
        # Nobody waits for `busy`: that a request was sent is known where it was.
        if status != "busy" or not _is_ours(parent or kernel.get_parent(channel)):
            say(status, channel, parent)

    def init_metadata(parent: Any) -> dict[str, Any]:
        about: dict[str, Any] = metadata(parent)
        if _is_ours(parent):
            about.pop("started", None)  # the client would parse it as a date
        return about

    def should_handle(stream: Any, message: Any, idents: Any) -> Any:  # may be awaitable
        if _is_ours(message) and message["header"]["msg_id"] not in kernel.aborted:
            return True  # without a line in the log
        return handles(stream, message, idents)

    kernel._publish_status, kernel.init_metadata = publish_status, init_metadata
    kernel.should_handle = should_handle
    if kernel.log.level < logging.INFO:  # its handlers show no more; records were made for nothing
        kernel.log.setLevel(logging.INFO)


def _is_ours(message: Any) -> bool:
    return OURS in (message.get("metadata") or {})


def brief(stream: Any) -> None:
    """Have a stream of ipykernel's hand over what was printed only where something was."""
    if "flush" in vars(stream) or not hasattr(stream, "_flush_pending"):
        return
    pipe = _Pipe(stream) if getattr(stream, "_should_watch", False) else None
    if pipe is not None and not pipe.begin():
        return
    flush = stream.flush

    def flush_if_printed() -> None:
        if pipe is not None:
            pipe.take_in()
        if stream._flush_pending:
            flush()

    stream.flush = flush_if_printed


class _Pipe:
    """What C code and child processes print into a stream of ipykernel's.

    ipykernel's thread reads it sooner or later; what a cell printed last could come after the cell
    was over, and was lost then. Here whoever reads holds a lock until it is written on, so that
    nothing is on its way between the two when the end of a cell has taken in what is there.
    """

    def __init__(self, stream: Any) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def begin(self) -> bool:
        """Take over from ipykernel's thread; return whether it let go."""
        stream = self._stream
        stream._should_watch = False  # it looks when it has read something, as in its `close`
        os.write(stream._original_stdstream_fd, b"\0")
        stream.watch_fd_thread.join(LET_GO_S)
        stream._should_watch = True
        if stream.watch_fd_thread.is_alive():
            return False
        os.set_blocking(stream._fid, False)
        stream.watch_fd_thread = threading.Thread(
            target=self._watch, name=f"workbench-{stream.name}", daemon=True
        )
        stream.watch_fd_thread.start()
        return True

    def _watch(self) -> None:
        poller = select.poll()
        poller.register(self._stream._fid, select.POLLIN)
        # Looked at after reading too: what was read may have been the byte that `close` wakes with.
        while self._stream._should_watch and poller.poll() and self._stream._should_watch:
            with self._lock:
                if not self._take(PIPE_BYTES):
                    return

    def take_in(self) -> None:
        """Write on what is in the pipe now; a child that prints on and on does not hold this up."""
        waiting = array.array("i", [0])
        with self._lock, contextlib.suppress(OSError):
            fcntl.ioctl(self._stream._fid, termios.FIONREAD, waiting)
            if waiting[0]:
                self._take(waiting[0])
                if not self._stream._should_watch:  # what was read may be what wakes the reader
                    os.write(self._stream._original_stdstream_fd, b"\0")

    def _take(self, most_bytes: int) -> bool:
        """Read and write on; return whether the pipe goes on."""
        try:
            data = os.read(self._stream._fid, most_bytes)
        except BlockingIOError:  # the other one was here first
            return True
        if text := self._decoder.decode(data):
            self._stream.write(text)
        os.write(self._stream._original_stdstream_copy, data)
        return bool(data)
