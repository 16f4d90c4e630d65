"""When each stage of a split model was busy, step by step, from the marks in its graph.

    stage 0   | forward | . . . . bubble . . . . | backward | update, metrics
    stage 1   | bubble  | forward, then backward | bubble . | of all stages

A stage's busy time is the union of its stretches (`stages.py`); the rest of the chain, from the
first forward to the last gradient, is its bubble. TensorFlow computes the gradients of a stage's
weights while that of its input goes on to the stage before: such time is divided among both, so
that no chain looks better than one in which stages take turns. What follows the chain is done for
all stages together: no stage's own work, and no part of the schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.injector import FaultInjector
from ..base import NAN, StepResult
from .markers import Markers, Measured
from .stages import Span, Stages


class StageMarks(Markers):
    """As `Markers` for the one replica, each of whose steps becomes a result per stage."""

    def __init__(self, strategy: Any, stages: Stages) -> None:
        super().__init__(strategy, [FaultInjector(0)])  # delays are spent in the stages
        self.stages = stages

    def __enter__(self) -> StageMarks:
        """Patch TensorFlow."""
        super().__enter__()
        self._patch(tf.GradientTape, "gradient", self._differentiated)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches."""
        self.stages.open = False
        super().__exit__(*error)

    def _differentiated(self, original: Any) -> Any:
        def gradient(tape: Any, target: Any, sources: Any, *args: Any, **keywords: Any) -> Any:
            found = original(tape, target, sources, *args, **keywords)
            return self.stages.differentiated(sources, found)

        return tf.autograph.experimental.do_not_convert(gradient)

    def take(self, start_s: float, end_s: float) -> list[Measured]:
        """Return the steps done since the last call, with a result per stage."""
        steps = super().take(start_s, end_s)
        seen = self._seen()
        if len(seen) != len(steps):
            seen = [None] * len(steps)
        return [self._split(step, spans) for step, spans in zip(steps, seen, strict=True)]

    def _seen(self) -> list[Any]:
        """Return the busy stretches of each stage, step by step; forget all stamps."""
        found: list[Any] = []
        for passes in self.stages.every():
            queues = [queue for one in passes for queue in one.queues()]
            count = min(len(queue) for queue in queues)
            for step in range(count):
                spans = [one.spans(step) for one in passes]
                injected = np.sum([one.injected_s for one in passes], axis=0) / count
                found.append(([list(chain(*same)) for same in zip(*spans, strict=True)], injected))
            for one in passes:
                one.injected_s = [0.0] * len(self.stages.faults)
                for queue in (*one.queues(), *one.left, *one.done):
                    queue.clear()
        self.stages.forget_eager()
        return sorted(found, key=lambda one: one[0][0][0][0])

    def _split(self, step: Measured, seen: Any) -> Measured:
        whole = step.results[0]
        count = len(self.stages.faults)
        last = count - 1
        found = None if seen is None else chain_of(seen[0])
        if found is None:
            lost = StepResult(whole.samples, NAN, NAN)
            end = replace(lost, loss=whole.loss, has_loss=whole.has_loss)
            return replace(step, data_wait_s=(NAN,) * count, results=(*[lost] * last, end))
        begin_s, chain_s, busy = found
        # The mark behind the batch may be passed later than that of the first stage.
        wait_s = min(step.data_wait_s[0], begin_s - step.start_s)
        results = []
        for stage, busy_s in enumerate(busy):
            idle_s = chain_s - busy_s
            self.stages.faults[stage].compute_s = busy_s - float(seen[1][stage])
            results.append(
                StepResult(
                    whole.samples, whole.loss if stage == last else NAN, busy_s,
                    exposed_s=idle_s, wait_s=idle_s, bubble_s=idle_s,
                    has_loss=stage == last and whole.has_loss,
                )
            )  # fmt: skip
        return replace(step, data_wait_s=(wait_s,) * count, results=tuple(results))


def chain_of(stages: Sequence[Sequence[Span]]) -> tuple[float, float, list[float]] | None:
    """Return when a step's chain began, how long it took, and for how long each stage worked.

    Time in which several stages are at work is divided among them, so that together they never
    work for longer than the chain takes. None where no stretch is known.

    Args:
        stages: Of each stage, its busy stretches.
    """
    known = [[(a, b) for a, b in spans if a <= b] for spans in stages]  # not where one is NaN
    edges = sorted({edge for spans in known for span in spans for edge in span})
    if not edges:
        return None
    busy = [0.0] * len(known)
    for begin, end in pairwise(edges):
        at_work = [
            stage for stage, spans in enumerate(known)
            if any(a <= begin and end <= b for a, b in spans)
        ]  # fmt: skip
        for stage in at_work:
            busy[stage] += (end - begin) / len(at_work)
    return edges[0], edges[-1] - edges[0], busy
