"""Turns what the marks measured into rows, whoever wrote the loop.

One `Steps` serves a whole cell. Between two calls into TensorFlow the loop's owner (`model.fit`,
the user) is asked for nothing: `begin` before a call that trains, `end` after it. In between, any
number of steps may have happened (`steps_per_execution`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ... import events
from ...engine.announce import announce
from ...engine.context import RunContext
from ...errors import RunStopped
from ..base import NAN, StepResult
from .markers import Markers, Measured

clock = time.perf_counter

UNSEEN = ("data_wait_s", "compute_s", "sync_wait_s", "transfer_s")

WORTH_SAYING_S = 0.1


class Steps:
    """The steps of one cell.

    Attributes:
        start_s: When the step under way began: at the end of the one before, unless something
            else (an evaluation, a pause) lay between.
        batch: Samples of the latest step, over the replicas held here.
        synchronise: Waits for the devices.
        announced: Whether the kernel was told that training has begun.
    """

    def __init__(
        self, context: RunContext, markers: Markers, synchronise: Callable[[], object]
    ) -> None:
        self.context, self.markers, self.synchronise = context, markers, synchronise
        self.start_s = NAN
        self._called_s = NAN
        self._traced_s, self._traces = 0.0, 0
        self.announced = False
        self.batch: int | None = None
        self._unseen = False

    def announce(self, parameters: int, **counts: Any) -> None:
        """Tell the kernel that training begins, or goes on with another `fit`."""
        self.announced = True
        announce(self.context, parameters, **counts)

    def begin(self) -> None:
        """Ask whether the next step may start; a pause is waited for here.

        Raises:
            RunStopped: Stop was pressed.
        """
        if not self.enter():
            raise RunStopped

    def enter(self) -> bool:
        """As `begin`, but return False where the run is to stop."""
        context, step = self.context, self.context.trained
        paused_s = context.gate.paused_s
        if not context.gate.enter(step):
            return False
        if context.gate.paused_s != paused_s or self.start_s != self.start_s:
            self.start_s = clock()
        context.faults.before_step(step)
        context.step = step
        return True

    def skip(self) -> None:
        """Count the time since the last step as evaluation, or whatever else it was."""
        now = clock()
        if self.start_s == self.start_s:
            self.context.eval_s += now - self.start_s
        self.start_s = now

    def forget(self) -> None:
        """Drop what the marks read so far: it belongs to no step."""
        self.markers.take(self.start_s, clock())

    def called(self) -> None:
        """Say that TensorFlow is asked for data only now: what lay before was no wait for it."""
        self._called_s = clock()

    def end(self, unmarked: Callable[[], Measured] | None = None) -> int:
        """Record what was done since `begin`.

        Args:
            unmarked: Says what to record where no mark was passed; by default nothing.

        Returns:
            How many steps there were.
        """
        end_s = clock()
        start_s = self.start_s if self.start_s == self.start_s else end_s
        steps = self.markers.take(start_s, end_s)
        if not steps and unmarked is not None:
            steps = [unmarked()]
            self._say_unseen()
        # The first step's wait counts from its start, where the loop may have been busy elsewhere.
        busy_s = max(0.0, self._called_s - start_s) if self._called_s == self._called_s else 0.0
        self._called_s = NAN
        for step in steps:
            self._record(step, busy_s)
            busy_s = 0.0
        if steps:
            self.set_up(sum(step.set_up_s for step in steps))
            self.context.train_s += end_s - start_s - sum(step.set_up_s for step in steps)
            self.start_s = end_s
        return len(steps)

    def set_up(self, seconds: float) -> None:
        """Take note of time that a step was traced: it belongs to no step."""
        if seconds:
            self._traced_s, self._traces = self._traced_s + seconds, self._traces + 1
            self.context.eval_s += seconds

    def say_set_up(self) -> None:
        """Tell the user how long tracing took."""
        if self._traced_s >= WORTH_SAYING_S and self.context.spec.rank == 0:
            often = "once" if self._traces == 1 else f"{self._traces} times"
            text = (
                f"TensorFlow traced the step {often}, {self._traced_s:.1f} s in all; "
                "that time belongs to no step."
            )
            self.context.emit(events.Noted(rank=0, text=text))

    def unmarked(self, samples: int, loss: float, *, has_loss: bool = False) -> Measured:
        """Return a step of which nothing is known but its samples and loss, shared evenly."""
        held = self.context.spec.held
        parts = len(held) if self.context.entry.data_parallel else 1
        shares = [(r + 1) * samples // parts - r * samples // parts for r in range(parts)]
        shares *= len(held) // parts
        return Measured(
            self.start_s,
            clock(),
            (NAN,) * len(held),
            tuple(StepResult(share, loss, NAN, has_loss=has_loss) for share in shares),
        )

    def _record(self, step: Measured, busy_s: float) -> None:
        context = self.context
        for rank, data_wait_s, one in zip(
            context.spec.held, step.data_wait_s, step.results, strict=True
        ):
            waited_s = data_wait_s - busy_s
            context.recorder.add_step(
                context.trained, one, step.start_s, step.end_s, data_wait_s=waited_s, rank=rank
            )
        samples = [one.samples for one in step.results]
        self.batch = (sum if self.context.entry.data_parallel else max)(samples) or None
        context.step = context.trained
        context.trained += 1

    def _say_unseen(self) -> None:
        if not self._unseen:
            self._unseen = True
            reason = "no gradient was reduced where a clock could be read (not under jit_compile)"
            self.context.emit(events.Unmeasured(columns=dict.fromkeys(UNSEEN, reason)))


def global_loss(results: tuple[StepResult, ...]) -> float:
    """Return the mean loss over all samples of a step."""
    samples = np.array([one.samples for one in results], np.float64)
    losses = np.array([one.loss for one in results], np.float64)
    total = samples.sum()
    return float((losses[samples > 0] * samples[samples > 0]).sum() / total) if total else NAN
