"""Calls into engines over ipyparallel: a function entered by name, its outputs as they come.

Calls that engines have not answered yet are kept here too.
"""

from __future__ import annotations

import importlib
import io
import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from ipyparallel import Client
from ipyparallel.serialize import PrePickled, deserialize_object, serialize_object

from ..errors import ClusterError

log = logging.getLogger("workbench.cluster")
TELEMETRY = "workbench_telemetry"
OURS = {"workbench": True}
"""Metadata of Workbench's requests: engines leave out data that is not read (`engine/entry.py`)."""
OUTPUTS = frozenset(
    {"stream", "display_data", "execute_result", "error", "clear_output", "update_display_data"}
)


def enter(name: str, args: tuple[Any, ...]) -> Any:
    """Call `module:function` on the engine; the kernel never imports the engine's modules."""
    module, _, function = name.partition(":")
    return getattr(importlib.import_module(module), function)(*args)


_ENTER = PrePickled(enter)
MAX_FRAMES = 60
"""ipyparallel sends up to this number of list items separately; a longer list becomes one item."""


@dataclass(frozen=True)
class Parcel:
    """One value of an engine, in the form in which it is sent.

    Attributes:
        frames: How many of the message's frames are its own.
        kind: Its class.
        remade: Whether that class was defined again since the value was made.
        parts: An expression for its content: `x.state_dict()`, `vars(x)`; empty if there is none.
        fault: Why it could not be packed; empty if it was packed.
    """

    name: str
    frames: int
    kind: str
    remade: bool
    parts: str
    fault: str = ""


@dataclass(frozen=True)
class Unread:
    """A value that stays on its engine, because it cannot be read here.

    Attributes:
        parcel: The known facts about it.
        module, lacks: The name that this process does not have; empty if there is another cause.
        fault: The error of packing or reading.
    """

    parcel: Parcel
    module: str = ""
    lacks: str = ""
    fault: str = ""


def enter_for_values(name: str, args: tuple[Any, ...]) -> list[Any]:
    """Call `module:function`, which returns values by name; pack each value separately.

    Reading the user's own objects can fail; the rest of the reply must still be sent.
    """
    parcels: list[Parcel] = []
    frames: list[Any] = []
    for key, value in enter(name, args).items():
        packed: list[Any] = []
        fault = ""
        try:
            packed = serialize_object(value)
        except Exception as error:  # a value's __getstate__ can raise any error
            fault = f"{type(error).__name__}: {error}"
        cls = type(value)
        now = getattr(sys.modules.get(cls.__module__), cls.__qualname__, cls)
        parts = f"vars({key})" if hasattr(value, "__dict__") else ""
        if callable(getattr(value, "state_dict", None)):
            parts = f"{key}.state_dict()"
        parcels.append(Parcel(key, len(packed), cls.__qualname__, now is not cls, parts, fault))
        frames += packed
    if len(frames) > MAX_FRAMES:
        frames = [bytes(frame) for frame in frames]
    return [parcels, *frames]


def read_values(reply: Sequence[Any]) -> dict[str, Any]:
    """Return the values of a reply of `enter_for_values` by name; `Unread` for some."""
    parcels, frames = reply[0], list(reply[1:])
    found: dict[str, Any] = {}
    for parcel in parcels:
        own, frames = frames[: parcel.frames], frames[parcel.frames :]
        if parcel.fault:
            found[parcel.name] = Unread(parcel, fault=parcel.fault)
            continue
        try:
            found[parcel.name] = deserialize_object(own)[0]
        except Exception as error:
            module, lacks = _lacking(own[0])
            fault = f"{type(error).__name__}: {error}"
            found[parcel.name] = Unread(parcel, module, lacks, fault)
    return found


class _Finder(pickle.Unpickler):
    """Notes the first name that does not exist here."""

    lacks = ("", "")

    def find_class(self, module: str, name: str) -> Any:
        """Return the object with this name."""
        try:
            return super().find_class(module, name)
        except (ImportError, AttributeError):
            self.lacks = (module, name)
            raise


def _lacking(packed: Any) -> tuple[str, str]:
    finder = _Finder(io.BytesIO(packed))
    with suppress(Exception):
        finder.load()
    return finder.lacks


_ENTER_FOR_VALUES = PrePickled(enter_for_values)


def travels(value: Any) -> bool:
    """Whether a value can be sent to an engine."""
    try:
        serialize_object(value)
    except Exception:  # a value's __getstate__ can raise any error
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
        """Complete the call, even if messages are still being sent."""
        with self._lock:
            if self.done.is_set():
                return
            self.result = result
            self.done.set()
        for callback in self.callbacks:
            try:
                callback(self)
            except Exception:  # noqa: PERF203 - one that fails keeps no other back
                log.exception("A callback failed after a call to engine %d", self.engine)

    def when_done(self, callback: Callable[[Call], None]) -> None:
        """Call back once, even if the call is already over."""
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


CLEANED_S = 0.02
"""After this time ipyparallel has forgotten a call that has ended."""
_LATEST = "_workbench_latest"  # of a client: message of each engine's latest call with outputs


def _go_on_hearing(client: Any, engine: int, future: Any) -> None:
    """Receive outputs of an engine's latest call even after its end, from threads that it started.

    ipyparallel forgets a call and its callbacks when the reply comes.
    """
    futures, loop = getattr(client, "_futures", None), getattr(client, "_io_loop", None)
    if futures is None or loop is None or not future.done():
        return  # both are internals of ipyparallel; without them late output is lost
    latest: dict[int, str] = vars(client).setdefault(_LATEST, {})

    def again() -> None:
        if earlier := latest.get(engine):
            futures.pop(earlier, None)
            client.metadata.pop(earlier, None)
        latest[engine] = future.msg_id
        futures[future.msg_id] = future

    with suppress(RuntimeError):  # the client was closed
        loop.add_callback(loop.call_later, CLEANED_S, again)


def submit(
    client: Client,
    socket: Any,
    uuid: str,
    engine: int,
    name: str,
    args: tuple[Any, ...],
    on_output: Callable[[int, str, Mapping[str, Any]], None] | None = None,
    on_frames: Callable[[list[bytes]], None] | None = None,
    *,
    for_values: bool = False,
) -> Call:
    """Send a call to one engine and return at once.

    Args:
        on_output: `on_output(engine, message_type, content)` for each output, in order, on the
            client's thread.
        on_frames: Called with telemetry frames that came over ipyparallel.
        for_values: Whether it returns the user's values, by name, for `read_values`.
    """
    call = Call(engine)

    def on_iopub(message: Mapping[str, Any]) -> None:
        kind = message["header"]["msg_type"]
        if kind == TELEMETRY and on_frames is not None:
            on_frames([bytes(buffer) for buffer in message["buffers"]])
        elif kind in OUTPUTS and on_output is not None:
            on_output(engine, kind, message["content"])

    def hook(future: Any) -> None:
        # Before the request is sent, so that no early output is lost.
        future.iopub_callbacks.append(on_iopub)
        future.add_done_callback(lambda f: call._part_done(f.result(), is_reply=True))
        future.output.add_done_callback(lambda f: call._part_done())
        if on_output is not None:
            call.when_done(lambda _: _go_on_hearing(client, engine, future))

    client.send_apply_request(
        socket,
        _ENTER_FOR_VALUES if for_values else _ENTER,
        args=(name, args),
        ident=uuid.encode(),
        message_future_hook=hook,
        metadata=OURS,
    )
    return call


class Gathering:
    """A client's event loop that is woken only once for all requests that are sent together.

    Otherwise each request would wake the loop, and its thread and the sender's would compete for
    the interpreter.

    Args:
        flush: Sends all messages in the stream at once; otherwise the loop sends one per iteration.
    """

    def __init__(self, loop: Any, flush: Callable[[], object] = lambda: None) -> None:
        self._loop, self._flush = loop, flush
        self._here = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def add_callback(self, callback: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Let the loop's thread call back.

        Inside a `together` block of this thread, after the block.
        """
        waiting = getattr(self._here, "waiting", None)
        if waiting is None:
            self._loop.add_callback(callback, *args, **kwargs)
        else:
            waiting.append(lambda: callback(*args, **kwargs))

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send all requests that this thread makes in the block when the block ends."""
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


class Pending:
    """The running calls, by engine; safe from any thread.

    Args:
        on_idle: Called with an engine whose last call has ended; must return quickly.
    """

    def __init__(self, on_idle: Callable[[int], None]) -> None:
        self._on_idle = on_idle
        self._calls: dict[int, list[Call]] = {}
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Keep a call until it is done."""
        with self._lock:
            self._calls.setdefault(call.engine, []).append(call)
        call.when_done(self._settle)

    def _settle(self, call: Call) -> None:
        with self._lock:
            waiting = self._calls.get(call.engine, [])
            if call in waiting:
                waiting.remove(call)
            if not waiting:
                self._on_idle(call.engine)

    def take(self, engine: int) -> list[Call]:
        """Return the calls of an engine that no longer exists, and forget them."""
        with self._lock:
            return self._calls.pop(engine, [])

    def all(self) -> list[Call]:
        """Return the calls of all engines."""
        with self._lock:
            return [call for waiting in self._calls.values() for call in waiting]


class NoAnswerError(ClusterError):
    """An engine, or a process that forwards calls to it, did not answer in time."""


def gather(pending: Iterable[Call], name: str, timeout_s: float) -> dict[int, Any]:
    """Wait for calls of `name`; return each engine's result.

    Raises:
        ClusterError: One of them raised, died or did not answer within `timeout_s`.
    """
    end = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    for one in pending:
        if not one.done.wait(max(0.0, end - time.monotonic())):
            raise NoAnswerError(
                f"Engine {one.engine} did not answer within {timeout_s:g} s.",
                next_step=f"%cluster restart {one.engine}",
                code="WB-CLUSTER-014",
            )
        if isinstance(one.result, BaseException):
            raise ClusterError(
                f"Engine {one.engine} failed in the function {name}.",
                seen=str(one.result),
                code="WB-CLUSTER-015",
            )
        results[one.engine] = one.result
    return results
