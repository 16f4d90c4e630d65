"""Calls into engines over ipyparallel: a function entered by name, its outputs as they come."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ipyparallel import Client
from ipyparallel.serialize import PrePickled, serialize_object

log = logging.getLogger("workbench.cluster")
TELEMETRY = "workbench_telemetry"
OURS = {"workbench": True}
"""Metadata of our requests: engines leave out what we do not read (`engine/answers.py`)."""
OUTPUTS = frozenset(
    {"stream", "display_data", "execute_result", "error", "clear_output", "update_display_data"}
)


def enter(name: str, args: tuple[Any, ...]) -> Any:
    """Call `module:function` on the engine; the kernel never imports the engine's modules."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


_ENTER = PrePickled(enter)


def travels(value: Any) -> bool:
    """Whether a value can be sent to an engine."""
    try:
        serialize_object(value)
    except Exception:  # what __getstate__ raises is up to the value
        return False
    return True


@dataclass
class Call:
    """One call in one engine.

    Attributes:
        result: What the function returned; an exception if it raised or the engine died.
    """

    engine: int
    result: Any = None
    done: threading.Event = field(default_factory=threading.Event)
    callbacks: list[Callable[[Call], None]] = field(default_factory=list)
    _left: int = 2
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def finish(self, result: Any) -> None:
        """Settle the call, whatever is still on its way."""
        with self._lock:
            if self.done.is_set():
                return
            self.result = result
            self.done.set()
        for callback in self.callbacks:
            callback(self)

    def when_done(self, callback: Callable[[Call], None]) -> None:
        """Call back once, also when the call is over already."""
        with self._lock:
            over = self.done.is_set()
            if not over:
                self.callbacks.append(callback)
        if over:
            callback(self)

    def _part_done(self, result: Any = None, *, is_reply: bool = False) -> None:
        with self._lock:
            if is_reply:
                self._reply = result
            self._left -= 1
            complete = self._left == 0
        if complete:
            self.finish(self._reply)


def submit(
    client: Client,
    socket: Any,
    uuid: str,
    engine: int,
    name: str,
    args: tuple[Any, ...],
    on_output: Callable[[int, str, Mapping[str, Any]], None] | None = None,
    on_frames: Callable[[list[bytes]], None] | None = None,
) -> Call:
    """Send a call to one engine and return at once.

    Args:
        on_output: `on_output(engine, message_type, content)` for each output, in order, on the
            client's thread.
        on_frames: Telemetry frames that came over ipyparallel.
    """
    call = Call(engine)

    def on_iopub(message: Mapping[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind == TELEMETRY and on_frames is not None:
            on_frames([bytes(buffer) for buffer in message["buffers"]])
        elif kind in OUTPUTS and on_output is not None:
            on_output(engine, kind, message["content"])

    def hook(future: Any) -> None:
        # Before the request is sent, so that no output can come too early to be heard.
        future.iopub_callbacks.append(on_iopub)
        future.add_done_callback(lambda f: call._part_done(f.result(), is_reply=True))
        future.output.add_done_callback(lambda f: call._part_done())

    client.send_apply_request(
        socket, _ENTER, args=(name, args), ident=uuid.encode(), message_future_hook=hook,
        metadata=OURS,
    )  # fmt: skip
    return call


class Gathering:
    """A client's event loop that is woken once for all requests which are sent together.

    Each would wake it by itself, and its thread and the sender's would take turns for the
    interpreter with every request.

    Args:
        flush: Sends at once what was put into the stream; it would send one in each of its turns.
    """

    def __init__(self, loop: Any, flush: Callable[[], object] = lambda: None) -> None:
        self._loop, self._flush = loop, flush
        self._here = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def add_callback(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Have the loop's thread call back; after the block where this thread is `together`."""
        waiting = getattr(self._here, "waiting", None)
        if waiting is None:
            self._loop.add_callback(callback, *args, **kwargs)
        else:
            waiting.append(lambda: callback(*args, **kwargs))

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Send what is asked for in the block, by this thread, when the block is left."""
        if getattr(self._here, "waiting", None) is not None:
            yield
            return
        waiting: list[Callable[[], Any]] = []
        self._here.waiting = waiting
        try:
            yield
        finally:
            self._here.waiting = None
            if waiting:
                self._loop.add_callback(self._call_all, waiting)

    def _call_all(self, callbacks: list[Callable[[], Any]]) -> None:
        for callback in (*callbacks, self._flush):
            try:
                callback()
            except Exception:  # noqa: PERF203 - one that cannot be sent keeps no other back
                log.exception("A request to an engine could not be sent")
