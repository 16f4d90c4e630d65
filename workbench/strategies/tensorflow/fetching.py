"""Fetches what closures returned, on a thread of its own: their workers go on meanwhile.

A fetch is a round trip, whatever it brings. So what several closures left on a worker within a few
milliseconds is stacked there and fetched at once.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ..base import NAN

LOCAL = "/job:chief"
LONGEST_S = 10.0
TOGETHER_S, MOST = 0.05, 32
"""What is left within that time is fetched at once, up to so many closures."""

clock = time.perf_counter

Told = Callable[[Any], float]
"""What takes the values that a closure returned; returns its loss."""


@dataclass
class Pending:
    """A loss that is still on its worker; completes a row of the recorder."""

    tensors: Any  # nested, all on one worker
    told: Told
    loss: float = NAN
    known: threading.Event = field(default_factory=threading.Event)

    def ready(self) -> bool:
        """Whether it is known, or known to be lost."""
        return self.known.is_set()

    def values(self) -> dict[str, float]:
        """Return the fields of the row that were missing."""
        self.known.wait(LONGEST_S)
        return {"local_loss": self.loss}


class Fetcher:
    """The thread; `close` ends it."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._left = threading.Condition()
        self._open = 0
        self._closed = False
        self._thread = threading.Thread(target=self._main, name="workbench-fetch", daemon=True)
        self._thread.start()

    def fetch(self, tensors: Any, told: Told) -> Pending:
        """Have the values fetched and told."""
        pending = Pending(tensors, told)
        with self._left:
            self._open += 1
        self._waiting.put(pending)
        return pending

    def _main(self) -> None:
        while not self._closed or not self._waiting.empty():
            for group in _groups(self._gather()):
                _fetch(group)
                with self._left:
                    self._open -= len(group)
                    self._left.notify_all()

    def _gather(self) -> list[Pending]:
        """Wait for the first, then for those that follow soon; None among them ends the wait."""
        found, until_s = [self._waiting.get()], clock() + TOGETHER_S
        with contextlib.suppress(queue.Empty):
            while found[-1] is not None and len(found) < MOST:
                found.append(self._waiting.get(timeout=max(0.0, until_s - clock())))
        return [one for one in found if one is not None]

    def settle(self) -> None:
        """Wait until everything is fetched."""
        self._waiting.put(None)
        with self._left:
            self._left.wait_for(lambda: self._open == 0, LONGEST_S)

    def close(self) -> None:
        """Fetch what is left, then end."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join(LONGEST_S)


def _groups(found: list[Pending]) -> list[list[Pending]]:
    """Return those together whose values are on one worker and can be stacked."""
    groups: dict[Any, list[Pending]] = {}
    for one in found:
        try:
            leaves = tf.nest.flatten(one.tensors)
            kind: Any = (*((leaf.device, leaf.dtype, *leaf.shape) for leaf in leaves),)
        except (tf.errors.OpError, AttributeError):  # a shape is known only once it was computed
            kind = id(one)
        groups.setdefault(kind, []).append(one)
    return list(groups.values())


def _fetch(group: list[Pending]) -> None:
    """Fetch what is wanted of one worker, and tell."""
    try:
        together = len(group) > 1
        columns = zip(*(tf.nest.flatten(one.tensors) for one in group), strict=True)
        rows = list(zip(*(_column(list(same), together) for same in columns), strict=True))
        for one, row in zip(group, rows, strict=True):
            one.loss = one.told(tf.nest.pack_sequence_as(one.tensors, list(row)))
    except (tf.errors.OpError, RuntimeError):
        pass  # their worker has died since: their loss stays NaN
    for one in group:
        one.tensors = None
        one.known.set()


def _column(tensors: list[Any], together: bool) -> Any:
    """Return tensors of one worker, shape and kind as NumPy arrays."""
    if not together:
        with tf.device(LOCAL):
            return [tf.identity(tensors[0]).numpy()]
    with tf.device(tensors[0].device):
        stacked = tf.stack(tensors)
    with tf.device(LOCAL):
        return tf.identity(stacked).numpy()
