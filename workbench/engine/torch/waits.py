"""Waits for collectives: a thread can leave the wait if gloo cannot end it.

If a connection closes at the moment when a message is sent, gloo loses the end of that message.
Gloo's own thread then waits for the message in `UnboundBuffer::waitSend` for the group's whole
timeout. Nothing ends this wait: neither closed sockets nor `abort`. But the thread that asked for
the collective can leave. In training that can continue with others, this thread waits in slices:
`Work.wait` with a timeout, which ends with an error and does not change the work. Some time after
the group's connections were shut, the thread leaves a collective that still waits. The group and
gloo's thread then stay until the process ends, because to remove them would mean to wait for gloo's
thread.

DistributedDataParallel's reducer waits in C++, for a future. It gets a future of ours
(`passed_on`). Our future completes when gloo's future completes, or when the collective is left.

Waits for sends and receives are gloo's own and are not changed. If such a wait times out, it breaks
all of the group's connections.
"""

from __future__ import annotations

import ctypes
import re
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ...errors import ClusterError
from ..transport.connection import LinkError

clock = time.monotonic
SLICE = timedelta(seconds=0.5)
PATIENCE_S = 1.0
"""How long a collective may still end by itself after its connections were shut."""
LEFT = "gloo: this worker stopped waiting for a collective, because the connections are closed"
_ONE_TO_ONE = (12, 13, 14)
"""Send, receive, receive from any rank, as `Work._get_op_type` numbers them (c10d/Types.hpp)."""

_plain_wait = dist.Work.wait
_shut_since_s: float | None = None
_left = False
_passing: set[_Passing] = set()
_lock = threading.Lock()


def connections_were_shut() -> None:
    """Note that collectives of the present group end now, or never end."""
    global _shut_since_s
    if _shut_since_s is None:
        _shut_since_s = clock()
        if _passing:
            timer = threading.Timer(PATIENCE_S, _leave_all, (list(_passing),))
            timer.daemon = True
            timer.start()


def are_shut_for(seconds: float) -> bool:
    """Return whether the present group's connections were shut at least `seconds` ago."""
    since_s = _shut_since_s
    return since_s is not None and clock() - since_s > seconds


def group_was_made(*, leavable: bool) -> None:
    """Note that there is a group whose connections are intact.

    Args:
        leavable: Whether a thread may leave the group's collectives after they are broken.
    """
    global _shut_since_s, _left
    _shut_since_s, _left = None, False
    dist.Work.wait = _wait if leavable else _plain_wait  # type: ignore[assignment]


def is_leavable() -> bool:
    """Return whether a thread leaves collectives after they are broken."""
    return dist.Work.wait is _wait


def passed_on(work: Any) -> torch.futures.Future[torch.Tensor]:
    """Return a future of a collective's tensor; it also completes when the collective is left."""
    return _Passing(work).future


class _Passing:
    """Completes a future when a collective ends or is left; only the first event counts."""

    def __init__(self, work: Any) -> None:
        made: Any = torch.futures.Future()
        self.future: torch.futures.Future[torch.Tensor] = made
        self._made = made
        self._work, self._ended = work, False
        with _lock:
            _passing.add(self)
        work.get_future().add_done_callback(self._done)

    def _is_first(self) -> bool:
        with _lock:
            first, self._ended = not self._ended, True
            _passing.discard(self)
            return first

    def _done(self, gloos: Any) -> None:
        if not self._is_first():
            return
        try:
            value = gloos.value()
        except Exception as error:  # the error with which the collective ended
            self._made.set_exception(error)
        else:
            self.future.set_result(value[0] if isinstance(value, list) else value)

    def leave(self) -> None:
        """Complete the future, if the collective has not ended."""
        if self._is_first():
            _leave_behind(self._work)
            self._made.set_exception(RuntimeError(LEFT))


def _leave_all(passing: list[_Passing]) -> None:
    for one in passing:
        one.leave()


def _wait(work: Any, *timeout: Any) -> Any:
    if timeout or work._get_op_type() in _ONE_TO_ONE:
        return _plain_wait(work, *timeout)
    while True:
        try:
            return _plain_wait(work, SLICE)
        except RuntimeError:  # noqa: PERF203 - one slice at a time
            if work.is_completed():
                return _plain_wait(work)  # its result: its own error, or success
            if are_shut_for(PATIENCE_S):
                _leave_behind(work)
                raise RuntimeError(LEFT) from None


def _leave_behind(work: Any) -> None:
    global _left
    _left = True
    _keep_for_good(work)


def keep_what_was_left() -> None:
    """Keep the present group permanently, if a collective was left in it."""
    c10d: Any = dist.distributed_c10d
    for group in list(c10d._world.pg_map) if _left else ():
        _keep_for_good(group)


def _keep_for_good(thing: object) -> None:
    """Keep an object until the process is gone, also at the end of the interpreter."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


_CUT = re.compile(
    r"gloo|Connection (closed by peer|reset)|Broken pipe|Socket (closed|is closed)|NCCL", re.I
)


def was_cut(error: BaseException) -> bool:
    """Whether an error in a collective or in the store is a consequence of another worker's end.

    Torch raises gloo's errors as plain RuntimeErrors. Only their text identifies them.
    """
    if isinstance(error, LinkError):
        return bool(error.felt)
    if isinstance(error, ClusterError):
        return error.code == "WB-CLUSTER-054"
    kinds: Any = dist
    network = getattr(kinds, "DistError", ())
    return isinstance(error, network) or (
        isinstance(error, RuntimeError) and _CUT.search(str(error)) is not None
    )
