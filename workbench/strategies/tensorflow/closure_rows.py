"""Rows of closures: each is a step of the worker that ran it.

    free ---- data wait ---- begins ---- closure (compute) ---- ends
                             version v0                         version v1      staleness = v1 - v0

The version counts the closures that have trained, of all workers.
"""

from __future__ import annotations

import time

import numpy as np

from ... import events
from ...engine.context import RunContext
from ..base import NAN, StepResult
from .fetching import Pending

clock = time.perf_counter
SHOW_S = 0.1
"""How often an own loop's loss is fetched, and queue waits are logged, per worker."""


class Rows:
    """Records closures of all workers; one thread at a time calls it.

    Attributes:
        version: Closures that have trained so far.
    """

    def __init__(self, context: RunContext) -> None:
        workers = context.spec.world_size
        self.context = context
        self.version = 0
        self._steps = [0] * workers
        self._free_s = [NAN] * workers  # since when a worker has had nothing to do
        self._shown_s = [0.0] * workers
        self._queue_waits: list[list[float]] = [[] for _ in range(workers)]

    def go_on(self, steps: int) -> None:
        """Count on from a checkpoint: so many steps of each worker lie before it."""
        self._steps = [steps] * len(self._steps)
        self.version = steps * len(self._steps)

    def idle(self) -> None:
        """What lay between belongs to no step: an evaluation, a pause."""
        self._free_s = [clock()] * len(self._free_s)

    def free(self, rank: int) -> None:
        """Say that a worker has nothing to do from now on."""
        self._free_s[rank] = clock()

    def due(self, rank: int, now_s: float) -> bool:
        """Return whether a loss of this worker has not been shown for a while."""
        return now_s - self._shown_s[rank] >= SHOW_S

    def add(
        self,
        rank: int,
        samples: int,
        times: tuple[float, float, float],
        pulled: int,
        late: Pending | None,
    ) -> None:
        """Record a closure that trained.

        Args:
            times: When it was scheduled, began and ended.
            pulled: The version when it began.
            late: Brings its loss, where that is fetched.
        """
        context, (scheduled_s, begin_s, end_s), number = self.context, times, self._steps[rank]
        start_s = self._free_s[rank]
        if start_s != start_s or start_s > begin_s:
            start_s = begin_s
        result = StepResult(
            samples, NAN, end_s - begin_s, wait_s=0.0, staleness=self.version - pulled,
            deferred=late,
        )  # fmt: skip
        context.recorder.add_step(
            number, result, start_s, end_s, data_wait_s=begin_s - start_s, rank=rank
        )
        self.version += 1
        self._steps[rank] += 1
        workers = len(self._steps)
        context.train_s += (end_s - start_s) / workers
        context.trained = -(-self.version // workers)
        context.step = max(self._steps) - 1
        self._queue_waits[rank].append(begin_s - scheduled_s)
        if self.due(rank, end_s):
            self._shown_s[rank] = end_s
            values = {"queue_wait_s": float(np.mean(self._queue_waits[rank]))}
            self._queue_waits[rank].clear()
            context.emit(events.Logged(rank=rank, step=number, values=values))
