"""What an engine says to ipyparallel around each of our requests: no more than somebody reads.

ipykernel announces each request, writes it into the log, and hands both streams over to its thread
three times, which takes longer than an empty cell. What the order of outputs rests on stays: all
that a cell printed is on its way before `idle` is, and `idle` says that nothing more comes.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

OURS = "workbench"
"""Metadata of the kernel's requests (`cluster/calls.py`); others are answered as ever."""


def shorten(kernel: Any) -> None:
    """Have an engine's kernel answer our requests briefly."""
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

    def should_handle(stream: Any, message: Any, idents: Any) -> bool:
        if _is_ours(message) and message["header"]["msg_id"] not in kernel.aborted:
            return True  # without a line in the log
        return bool(handles(stream, message, idents))

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
    flush = stream.flush

    def flush_if_printed() -> None:
        if stream._flush_pending:
            flush()

    stream.flush = flush_if_printed


def hand_over(*streams: Any) -> None:
    """Send what these streams hold, however it came there, and wait until it is on its way.

    What C code or a child process prints comes through a pipe, which a thread of the stream's
    reads: the wait lets it.
    """
    threads = {id(thread): thread for s in streams if (thread := getattr(s, "pub_thread", None))}
    if len(threads) != 1:
        for stream in streams:
            stream.flush()
        return
    (thread,) = threads.values()
    done = threading.Event()
    for stream in streams:
        thread.schedule(stream._flush)
    thread.schedule(done.set)
    done.wait(min(float(stream.flush_timeout) for stream in streams))
