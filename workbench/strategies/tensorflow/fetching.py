"""Fetches what closures returned, on a thread of its own: their workers go on meanwhile."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tensorflow as tf

from ..base import NAN

LOCAL = "/job:chief"
LONGEST_S = 10.0

Told = Callable[[Any], float]
"""What takes the values that a closure returned; returns its loss."""


@dataclass
class Pending:
    """A loss that is still on its worker; completes a row of the recorder."""

    tensors: Any
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
        while (pending := self._waiting.get()) is not None:
            try:
                with tf.device(LOCAL):
                    local = tf.nest.map_structure(tf.identity, pending.tensors)
                pending.loss = pending.told(tf.nest.map_structure(lambda one: one.numpy(), local))
            except (tf.errors.OpError, RuntimeError):
                pending.loss = NAN  # its worker has died since
            pending.tensors = None
            pending.known.set()
            with self._left:
                self._open -= 1
                self._left.notify_all()

    def settle(self) -> None:
        """Wait until everything is fetched."""
        with self._left:
            self._left.wait_for(lambda: self._open == 0, LONGEST_S)

    def close(self) -> None:
        """Fetch what is left, then end."""
        self._waiting.put(None)
        self._thread.join(LONGEST_S)
