"""When each stage of a split model was busy, step by step, from the marks in its graph.

    stage 0   | forward | . . . . bubble . . . . | backward | update |
    stage 1   | bubble  | forward, then backward | bubble . | update |

A stage's busy time is the union of its stretches (`stages.py`), and of the optimizer's, which
updates all stages at once; all the rest of the step since its batch was there is its bubble.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
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
        if seen is None:
            lost = StepResult(whole.samples, NAN, NAN)
            results = [lost] * last + [replace(lost, loss=whole.loss)]
            return replace(step, data_wait_s=(NAN,) * count, results=tuple(results))
        spans, injected = seen
        update = (whole.ready_s + whole.exposed_s, step.end_s)
        wait_s = step.data_wait_s[0]
        given_s = step.start_s if wait_s != wait_s else step.start_s + wait_s
        results = []
        for stage, own in enumerate(spans):
            busy_s = covered([*own, update])
            idle_s = max(0.0, step.end_s - given_s - busy_s)
            self.stages.faults[stage].compute_s = busy_s - float(injected[stage])
            results.append(
                StepResult(
                    whole.samples, whole.loss if stage == last else NAN, busy_s,
                    exposed_s=idle_s, wait_s=idle_s, bubble_s=idle_s,
                )
            )  # fmt: skip
        return replace(step, data_wait_s=(wait_s,) * count, results=tuple(results))


def covered(spans: Sequence[Span]) -> float:
    """Return how much time the spans cover, counting what lies in several of them once."""
    total, reached = 0.0, -np.inf
    for begin, end in sorted(spans):
        begin = max(begin, reached)
        if end > begin:
            total, reached = total + end - begin, end
    return float(total)
