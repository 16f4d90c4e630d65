"""Marks in the graph of a split model: when each stage began and ended its work.

A mark reads the clock when the activations enter a stage, and when their gradients leave it again.
With three stages (e: activations enter, g: their gradient is ready, d: gradients of the stage's
weights are ready):

    stage 0   e0 -- forward -- e1 . . . . . . . . . . . . . g1 -- backward ------ d0
    stage 1                    e1 -- forward -- e2 . . . g2 -- backward -- g1
    stage 2                                     e2 ----- g2

`StageMarks` turns the marks into a result per stage and step; `markers.py` explains why the marks
are stateless.

These marks show when each stage was busy, step by step:

    stage 0   | forward | . . . . bubble . . . . | backward | update, metrics
    stage 1   | bubble  | forward, then backward | bubble . | of all stages

A stage's busy time is the union of its periods of work; the rest of the chain, from the first
forward to the last gradient, is its bubble. TensorFlow computes the gradients of a stage's weights
while the gradient of its input goes to the stage before. This time is divided between both stages.
So a chain never looks faster than stages that work one after another. The update and the metrics,
after the last gradient, are computed for all stages together. They count neither as a stage's work
nor as part of the schedule.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain, pairwise
from typing import Any

import numpy as np
import tensorflow as tf

from ....engine.contract import NAN
from ....engine.telemetry.recorder import StepResult
from ....engine.telemetry.step_gate import FaultInjector
from .markers import Markers, Measured

clock = time.perf_counter
Span = tuple[float, float]


class Pass:
    """One traced pass of a batch through all stages: queues of stamps, one per step."""

    def __init__(self, stages: int) -> None:
        self.entered: list[deque[float]] = [deque() for _ in range(stages)]
        self.left: list[deque[float]] = [deque() for _ in range(stages)]  # backwards; not stage 0
        self.done: list[deque[float]] = [deque() for _ in range(stages)]
        self.injected_s = [0.0] * stages
        self.reached = -1  # stage, while it is traced
        self.trains = False

    def queues(self) -> list[deque[float]]:
        """Return the marks at which every step must have left a time stamp."""
        return [*self.entered, *self.left[1:]]

    def spans(self, step: int) -> list[list[Span]]:
        """Return each stage's periods of work in one step: forward, then backward."""
        entered, left = ([q[step] if q else NAN for q in qs] for qs in (self.entered, self.left))
        last = len(entered) - 1
        spans = []
        for stage, done in enumerate(self.done):
            ends = [left[stage]] if stage else []
            ends += [done[step]] if len(done) > step else []
            end = max(ends, default=NAN)
            if stage == last:
                spans.append([(entered[stage], end)])
            else:
                spans.append([(entered[stage], entered[stage + 1]), (left[stage + 1], end)])
        return spans


class Stages:
    """The marks of one cell.

    Args:
        devices: One per stage.
        faults: One injector per stage.
    """

    def __init__(self, devices: Sequence[str], faults: Sequence[FaultInjector]) -> None:
        self.faults = tuple(faults)
        self.open = True
        self._numbers = [tf.DeviceSpec.from_string(one).device_index for one in devices]
        self._of_graph: Any = weakref.WeakKeyDictionary()  # graph, while it is traced -> its passes
        self._traced: list[list[Pass]] = []
        self._eager: list[Pass] = []

    def begin_pass(self) -> None:
        """Note that a model is called from outside."""
        passes = self._here()
        if tf.executing_eagerly():  # an evaluation left stamps
            passes[:] = [one for one in passes if one.trains]
        passes.append(Pass(len(self.faults)))

    def _here(self) -> list[Pass]:
        if tf.executing_eagerly():
            return self._eager
        graph = tf.compat.v1.get_default_graph()
        if graph not in self._of_graph:
            self._traced.append(self._of_graph.setdefault(graph, []))
        passes: list[Pass] = self._of_graph[graph]
        return passes

    def every(self) -> list[list[Pass]]:
        """Return the passes that train, by the function in which they were traced."""
        groups = [[one for one in group if one.trains] for group in (*self._traced, self._eager)]
        return [group for group in groups if group]

    def forget_eager(self) -> None:
        """Drop the marks of eager computation, which runs only once."""
        self._eager.clear()

    # -- where a stage begins ----------------------------------------------------------------------

    def enter(self, stage: int, args: Any, keywords: Any) -> tuple[Any, Any]:
        """Mark the inputs that a stage gets from the stage before."""
        passes = self._here()
        if not passes or stage <= passes[-1].reached:
            return args, keywords
        one = passes[-1]
        one.reached = stage
        leaves = tf.nest.flatten((args, keywords))
        chosen = [i for i, leaf in enumerate(leaves) if _floating(leaf)]
        if not chosen:
            chosen = [i for i, leaf in enumerate(leaves) if isinstance(leaf, tf.Tensor)]
        marked = self._marked([leaves[i] for i in chosen], one, stage)
        for i, leaf in zip(chosen, marked, strict=True):
            leaves[i] = leaf
        args, keywords = tf.nest.pack_sequence_as((args, keywords), leaves)
        return args, keywords

    def _marked(self, tensors: list[Any], one: Pass, stage: int) -> list[Any]:
        on_enter, on_left = self._on_enter(one, stage), self._on_left(one, stage)
        if not stage or not all(map(_floating, tensors)):
            return _behind(on_enter, tensors)

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def entrance(*given: Any) -> Any:
            def gradient(*upstream: Any) -> Any:
                return _behind(on_left, list(upstream))

            return _behind(on_enter, list(given)), gradient

        return list(entrance(*tensors))

    def _on_enter(self, one: Pass, stage: int) -> Callable[[], None]:
        def on_enter() -> None:
            if self.open and (one.trains or one in self._eager):
                one.entered[stage].append(clock())
                one.injected_s[stage] += self._spend(stage, "data", "forward")

        return on_enter

    def _on_left(self, one: Pass, stage: int) -> Callable[[], None]:
        def on_left() -> None:
            if self.open:
                one.injected_s[stage] += self._spend(stage, "backward")
                one.left[stage].append(clock())

        return on_left

    # -- where its gradients are there -------------------------------------------------------------

    def differentiated(self, sources: Any, gradients: Any) -> Any:
        """Mark the gradients of each stage's weights; return them."""
        waiting = [one for one in self._here() if not one.trains and one.reached >= 0]
        if not waiting:
            return gradients
        one = waiting[-1]
        for earlier in waiting:
            earlier.trains = True
        leaves = tf.nest.flatten(gradients)
        of_stage: dict[int, list[int]] = {}
        for i, source in enumerate(tf.nest.flatten(sources)):
            stage = self._stage_of(source)
            if leaves[i] is not None and stage is not None:
                of_stage.setdefault(stage, []).append(i)
        for stage, places in of_stage.items():
            for i, leaf in zip(
                places,
                _behind(self._on_done(one, stage), [leaves[i] for i in places]),
                strict=True,
            ):
                leaves[i] = leaf
        return tf.nest.pack_sequence_as(gradients, leaves)

    def _stage_of(self, source: Any) -> int | None:
        value = getattr(source, "value", source)
        device = getattr(value if isinstance(value, tf.Variable) else source, "device", "")
        index = tf.DeviceSpec.from_string(device).device_index if device else None
        return self._numbers.index(index) if index in self._numbers else None

    def _on_done(self, one: Pass, stage: int) -> Callable[[], None]:
        def on_done() -> None:
            if self.open:
                if stage == 0:  # its backward passes no further mark
                    one.injected_s[0] += self._spend(0, "backward")
                one.done[stage].append(clock())

        return on_done

    def _spend(self, stage: int, *phases: str) -> float:
        faults = self.faults[stage]
        return sum(faults.spend(phase) for phase in phases) if faults.active else 0.0


def _floating(leaf: Any) -> bool:
    return isinstance(leaf, tf.Tensor) and leaf.dtype.is_floating


def _behind(mark: Callable[[], None], tensors: list[Any]) -> list[Any]:
    """Return the tensors, connected to a mark that runs when all of them are computed.

    They are sliced from an offset, always 0, that the mark returns: nothing is copied, and they
    stay on their device. TensorFlow removes a mark whose value is not used, even if other
    operations wait for it. It also removes a reshape that does not change the shape.
    """
    values = [leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf for leaf in tensors]
    if not values:
        return tensors

    def stamp(*_: Any) -> Any:
        mark()
        return np.zeros(1, np.int32)

    # One number of each tensor is enough. Control edges would prevent TensorFlow from fusing
    # operations, and so change the rounding.
    seen = [tf.reshape(value, [-1])[:1] for value in values]
    offset = tf.numpy_function(stamp, seen, tf.int32, stateful=False)
    offset.set_shape((1,))
    held = [_from(value, offset) for value in values]
    return [
        tf.IndexedSlices(value, leaf.indices, leaf.dense_shape)
        if isinstance(leaf, tf.IndexedSlices)
        else value
        for leaf, value in zip(tensors, held, strict=True)
    ]


def _from(value: Any, offset: Any) -> Any:
    """Return the value, sliced from (offset, 0, 0, ...)."""
    rank = value.shape.rank
    if not rank:
        return value + tf.cast(offset[0], value.dtype)
    begin = tf.concat([offset, tf.zeros(rank - 1, tf.int32)], 0) if rank > 1 else offset
    same = tf.slice(value, begin, [-1] * rank)
    same.set_shape(value.shape)
    return same


class StageMarks(Markers):
    """Like `Markers`, for one replica; each step becomes a result per stage."""

    def __init__(self, strategy: Any, stages: Stages) -> None:
        super().__init__(strategy, [FaultInjector(0)])  # the stages add the delays
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
        """Return the busy periods of each stage, step by step; forget all stamps."""
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
        # The mark after the batch can be passed later than the mark of the first stage.
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

    Time in which several stages work is divided among them, so that together they never work for
    longer than the chain takes. None if no period is known.

    Args:
        stages: The periods of work of each stage.
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
