"""Calls that engines have not answered yet."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from ..errors import ClusterError
from .calls import Call


class Pending:
    """The calls under way, by engine; safe from any thread.

    Args:
        on_idle: Told of an engine whose last call has ended; must return quickly.
    """

    def __init__(self, on_idle: Callable[[int], None]) -> None:
        self._on_idle = on_idle
        self._calls: dict[int, list[Call]] = {}
        self._lock = threading.Lock()

    def add(self, call: Call) -> None:
        """Take a call in until it is done."""
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
        """Return the calls of an engine that is no more, and forget them."""
        with self._lock:
            return self._calls.pop(engine, [])

    def all(self) -> list[Call]:
        """Return the calls of all engines."""
        with self._lock:
            return [call for waiting in self._calls.values() for call in waiting]


class NoAnswerError(ClusterError):
    """An engine, or what passes calls on to it, did not answer in time."""


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
                f"Engine {one.engine} failed in {name}.",
                seen=str(one.result),
                code="WB-CLUSTER-015",
            )
        results[one.engine] = one.result
    return results
