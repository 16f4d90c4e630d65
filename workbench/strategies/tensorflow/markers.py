"""When each replica's gradients were ready, and how long it then stood waiting for the others.

TensorFlow runs a step as one graph for all replicas, so no Python line of the user's could read a
clock between one replica's backward and the all-reduce. Marks are put into the graph instead, while
it is traced:

    began | forward, backward . . . | ready | all-reduce . . . . | reduced | optimizer

    compute = (ready - began) + (end - reduced)     exposed = reduced - ready
    sync wait (metrics.derive) = latest ready of all replicas - own ready

`began` holds back the replica's inputs, `ready` sits before `tf.distribute.ReplicaContext
.all_reduce` and waits for every gradient, `reduced` sits behind it. Keras' optimizers call
`all_reduce` themselves, so `model.fit` and a loop with `strategy.run` are marked alike. Where a
step reduces several times (synchronised BatchNorm), a replica's ready time is read from the clock
of its own work, which stands still while it is blocked.

Each mark is a *stateless* `tf.numpy_function`, and values that the graph needs flow through it:
stateful ones, like `tf.py_function` and `tf.timestamp`, are run in one chain over all replicas, so
everybody would read the straggler's time; a mark that nothing needs is pruned away. Only the
smallest of the tensors flows through, the others are waited for. `reduced` is written to a variable
of our own: central storage uses the sum of one replica only.

Delays injected into a replica are spent in its marks: `data` before `began`, `forward` behind it,
`backward` before `ready`.

Source: tf.distribute guide, https://www.tensorflow.org/guide/distributed_training; the effect of
statefulness: `tensorflow/python/framework/auto_control_deps.py`.

How it is used (one object per run and engine)::

    with Markers(strategy, context.faults.replicas) as markers:    # patches until it is left
        for batch in batches:
            start_s = clock()
            train(batch)                                       # any number of steps
            for step in markers.take(start_s, clock()):        # those steps, oldest first
                for rank, result in enumerate(step.results, first_rank):
                    recorder.add(number, result.samples, step.start_s, step.end_s, ...)
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute import distribute_lib, mirrored_run, one_device_strategy
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import control_flow_util, resource_variable_ops

from ...engine.injector import FaultInjector
from ..base import NAN, StepResult

clock = time.perf_counter
_here = threading.local()  # .replica: the one being traced in this thread
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


@dataclass(frozen=True)
class Measured:
    """One optimizer step, of all replicas this engine holds.

    Attributes:
        start_s, end_s: When the step began and ended on this engine. Of several steps in one call
            (`steps_per_execution`) one ends where the first replica begins the next.
        data_wait_s: By replica, from `start_s` until its inputs were there; NaN in a step that was
            also traced, which takes longer than any data.
        results: By replica; `samples` is 0 and `loss` NaN where they could not be seen.
        eager: Whether no tf.function was used: TensorFlow then runs the replicas one after the
            other, and the first waits for the computation of all others.
    """

    start_s: float
    end_s: float
    data_wait_s: tuple[float, ...]
    results: tuple[StepResult, ...]
    eager: bool = False


class Markers:
    """Marks in every step that is traced while this is entered.

    Args:
        strategy: The tf.distribute strategy of the run.
        faults: One injector per replica that this engine holds, in the order of their ranks.
    """

    def __init__(self, strategy: Any, faults: Sequence[FaultInjector]) -> None:
        self.faults = tuple(faults)
        self.open = False
        self.total = int(strategy.num_replicas_in_sync)
        self.anchors = [_anchor(device) for device in strategy.extended.worker_devices]
        self._traces: list[_Trace] = []
        self._traced = False
        self._undo: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Markers:
        """Patch TensorFlow: what is traced from now on is marked."""
        self.open = True
        one_device = one_device_strategy.OneDeviceExtended
        self._patch(mirrored_run, "_call_for_each_replica", self._each_replica)
        self._patch(one_device, "_call_for_each_replica", self._one_replica)
        self._patch(distribute_lib.ReplicaContextBase, "all_reduce", _marked_all_reduce)
        self._patch(tf.GradientTape, "gradient", _watched_gradient)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches; marks in functions that were traced do nothing any more."""
        self.open = False
        for owner, name, before in reversed(self._undo):
            setattr(owner, name, before)
        self._undo.clear()
        self._traces.clear()

    def take(self, start_s: float, end_s: float) -> list[Measured]:
        """Return the steps done since the last call, oldest first.

        Empty where no gradient was reduced by `all_reduce`: then nothing could be measured.

        Args:
            start_s: When the first of them began, before it asked for its data.
            end_s: When the last of them had ended.
        """
        steps = [step for trace in self._traces for step in trace.take()]
        steps.sort(key=lambda step: step[0].began_s)
        eager = any(trace.eager for trace in self._traces)
        self._traces = [trace for trace in self._traces if not trace.eager]
        traced, self._traced = self._traced, False
        bounds = [start_s, *(min(one.began_s for one in step) for step in steps[1:]), end_s]
        return [
            self._measured(step, bounds[i], bounds[i + 1], traced and i == 0, eager)
            for i, step in enumerate(steps)
        ]

    def _measured(
        self, step: list[_Stamps], start_s: float, end_s: float, traced: bool, eager: bool
    ) -> Measured:
        results = []
        for one, faults in zip(step, self.faults, strict=True):
            compute_s = end_s - one.began_s - one.exposed_s
            faults.compute_s = compute_s - one.injected_s
            results.append(
                StepResult(
                    one.samples, one.loss, compute_s, ready_s=one.ready_s, exposed_s=one.exposed_s
                )
            )
        waits = [NAN if traced else one.began_s - start_s for one in step]
        if eager:  # the later replicas were kept waiting by the earlier ones, not by data
            waits = [min(waits)] * len(waits)
        return Measured(start_s, end_s, tuple(waits), tuple(results), eager)

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        self._undo.append((owner, name, before))
        setattr(owner, name, make(before))

    def _each_replica(self, original: Any) -> Any:
        """Strategies with several replicas: the innermost function that all of them call."""

        def call(distribution: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(fn, polymorphic_function.Function) or _compiled():
                return original(distribution, fn, args, kwargs)
            return original(distribution, self._trace().wrap(fn), args, kwargs)

        return tf.autograph.experimental.do_not_convert(call)

    def _one_replica(self, original: Any) -> Any:
        """OneDeviceStrategy; a tf.function is entered only when it is traced, as in the others."""
        lifted: Any = weakref.WeakKeyDictionary()

        def lift(extended: Any, fn: Any) -> Any:
            enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
            inner = fn.python_function
            inner = autograph.tf_convert(inner, enabled) if fn._autograph else inner

            def marked(*args: Any, **kwargs: Any) -> Any:
                return call(extended, inner, args, kwargs)

            clone = fn._clone(python_function=tf.autograph.experimental.do_not_convert(marked))
            return lifted.setdefault(fn, clone)

        def call(extended: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(fn, polymorphic_function.Function):
                if fn._jit_compile:
                    return original(extended, fn, args, kwargs)
                return (lifted.get(fn) or lift(extended, fn))(*args, **kwargs)
            if _compiled():
                return original(extended, fn, args, kwargs)
            return original(extended, self._trace().wrap(fn), args, kwargs)

        return tf.autograph.experimental.do_not_convert(call)

    def _trace(self) -> _Trace:
        trace = _Trace(self, tf.executing_eagerly())
        self._traces.append(trace)
        self._traced |= not trace.eager
        return trace


@dataclass
class _Stamps:
    """What was seen of one replica in one step."""

    began_s: float
    ready_s: float
    exposed_s: float
    loss: float
    samples: int
    injected_s: float


class _Trace:
    """One traced step: its replicas. Executed eagerly, it lives for one step only."""

    def __init__(self, markers: Markers, eager: bool) -> None:
        self.markers, self.eager = markers, eager
        self._replicas = [
            _Replica(self, faults, anchor)
            for faults, anchor in zip(markers.faults, markers.anchors, strict=True)
        ]

    def wrap(self, fn: Any) -> Any:
        """Return what each replica calls instead of `fn`."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            number = int(tf.distribute.get_replica_context()._replica_id_in_sync_group)
            replica = self._replicas[number % len(self._replicas)]
            return replica.call(fn, args, kwargs)

        return marked

    def take(self) -> list[list[_Stamps]]:
        """Return the steps of which every replica has all its stamps, and forget them."""
        by_replica = [replica.take() for replica in self._replicas]
        return [list(step) for step in zip(*by_replica, strict=False)]


class _Replica:
    """One replica in one trace: puts the marks in, and keeps what they read."""

    def __init__(self, trace: _Trace, faults: FaultInjector, anchor: Any) -> None:
        self._trace, self._faults, self._anchor = trace, faults, anchor
        self._sites: list[tuple[deque[float], deque[float]]] = []  # ready, reduced by all-reduce
        self._began: deque[tuple[float, int]] = deque()
        self._losses: deque[float] = deque()
        self._injected_s = 0.0
        self._token: Any = None
        self._loss: tuple[Any, bool] | None = None  # tensor, whether a share of the global loss

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Trace (or eagerly run) this replica's step."""
        outer, _here.replica = getattr(_here, "replica", None), self
        try:
            return self._begin(fn, args, kwargs)
        finally:
            _here.replica = outer
            self._token = self._loss = None  # tensors keep their graph alive

    def take(self) -> list[_Stamps]:
        """Return the complete steps, and forget all stamps."""
        marks = [marks for site in self._sites for marks in site]
        count = min((len(marks) for marks in [self._began, *marks]), default=0)
        if not self._sites:
            count = 0
        steps = [self._stamps(i, count) for i in range(count)]
        for queue in (self._began, self._losses, *marks):
            queue.clear()
        self._injected_s = 0.0
        return steps

    def _stamps(self, step: int, count: int) -> _Stamps:
        began_s, samples = self._began[step]
        blocked_s = [reduced[step] - ready[step] for ready, reduced in self._sites]
        loss = self._losses[step] if len(self._losses) > step else NAN
        ready_s = self._sites[-1][0][step] - sum(blocked_s[:-1])
        return _Stamps(began_s, ready_s, sum(blocked_s), loss, samples, self._injected_s / count)

    def see_loss(self, loss: Any, *, part: bool) -> None:
        """Remember the loss of the step; the replica's own mean is kept before a `part`.

        Args:
            part: It is this replica's part of the global loss: what is differentiated.
        """
        if not (part and self._loss is not None and not self._loss[1]):
            self._loss = (loss, part)

    def reduce(self, original: Any, context: Any, op: Any, value: Any, options: Any) -> Any:
        """Reduce a replica's tensors between a `ready` and a `reduced` mark."""
        ready: deque[float] = deque()
        reduced: deque[float] = deque()
        first, loss, factor = not self._sites, None, 1.0
        self._sites.append((ready, reduced))
        if self._loss is not None and _usable(self._loss[0]):
            loss, part = self._loss
            summed = str(getattr(op, "value", op)).upper() == "SUM"
            factor = float(self._trace.markers.total) if part and summed else 1.0
            self._loss = None

        def on_ready(passing: Any, *seen: Any) -> Any:
            if self._trace.markers.open:
                if first:
                    self._spend("backward")
                if loss is not None:
                    self._losses.append(float(seen[0]) * factor)
                ready.append(clock())
            return passing

        def on_reduced(*seen: Any) -> Any:
            if self._trace.markers.open:
                reduced.append(clock())
            return np.float32(0)

        extras = [extra for extra in (loss, self._token) if extra is not None]
        value = _pass_through(on_ready, value, extras)
        result = original(context, op, value, options)
        _run_behind(on_reduced, result, self._anchor)
        return result

    def _begin(self, fn: Any, args: Any, kwargs: Any) -> Any:
        tensors = [leaf for leaf in tf.nest.flatten((args, kwargs)) if isinstance(leaf, tf.Tensor)]
        batch = next((tensor for tensor in tensors if tensor.shape.rank), None)
        count = 0 if batch is None else batch.shape[0]
        if count is None:
            count = tf.shape(batch)[0]
        if self._trace.eager:
            self._on_began(None, int(count))
            return fn(*args, **kwargs)
        if tensors:
            source = tf.reshape(tensors[0] if batch is None else batch, [-1])[:1]
        else:  # a constant would be folded away, and the mark with it
            source = tf.numpy_function(lambda: np.float32(0), [], tf.float32)
        self._token = tf.numpy_function(self._on_began, [source, count], tf.float32, stateful=False)
        with tf.control_dependencies([self._token]):
            if not tensors:
                return fn(*args, **kwargs)
            args, kwargs = tf.nest.map_structure(_held_back, (args, kwargs))
        return fn(*args, **kwargs)

    def _on_began(self, source: Any, count: Any) -> Any:
        if self._trace.markers.open:
            self._spend("data")
            if self._sites or self._trace.eager:  # else an evaluation
                self._began.append((clock(), int(count)))
            self._spend("forward")
        return np.float32(0)

    def _spend(self, phase: str) -> None:
        if self._faults.active:
            self._injected_s += self._faults.spend(phase)


def _anchor(device: str) -> Any:
    """Return a variable, on the host, that keeps a replica's marks from being pruned."""
    host = device if "CPU" in device else "CPU:0"
    with tf.init_scope(), tf.device(host):
        # Made directly: strategies would put a copy on each device.
        return resource_variable_ops.ResourceVariable(0.0, trainable=False)


def note_loss(loss: Any) -> None:
    """Say what the replica being traced calls its mean loss; no effect elsewhere."""
    replica: _Replica | None = getattr(_here, "replica", None)
    if replica is not None:
        replica.see_loss(loss, part=False)


def _marked_all_reduce(original: Any) -> Any:
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        replica: _Replica | None = getattr(_here, "replica", None)
        if replica is None:
            return original(self, reduce_op, value, options)
        return replica.reduce(original, self, reduce_op, value, options)

    return tf.autograph.experimental.do_not_convert(all_reduce)


def _watched_gradient(original: Any) -> Any:
    def gradient(self: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        replica: _Replica | None = getattr(_here, "replica", None)
        if replica is not None and isinstance(target, tf.Tensor) and target.shape.rank == 0:
            replica.see_loss(target, part=True)
        return original(self, target, *args, **kwargs)

    return tf.autograph.experimental.do_not_convert(gradient)


def _pass_through(mark: Callable[..., Any], value: Any, extras: list[Any]) -> Any:
    """Return `value` behind a mark that runs when all of it, and `extras`, are there."""
    leaves = tf.nest.flatten(value)
    if not leaves or tf.executing_eagerly():
        mark(None, *extras)
        return value
    chosen = min(range(len(leaves)), key=lambda i: _size(leaves[i]))
    leaf = leaves[chosen]
    others = [one for i, one in enumerate(leaves) if i != chosen]

    @tf.custom_gradient
    def identity(tensor: Any) -> Any:
        with tf.control_dependencies(others):
            out = tf.numpy_function(mark, [tensor, *extras], tensor.dtype, stateful=False)
        out.set_shape(tensor.shape)
        return out, lambda gradient: gradient

    if isinstance(leaf, tf.IndexedSlices):
        leaves[chosen] = tf.IndexedSlices(identity(leaf.values), leaf.indices, leaf.dense_shape)
    else:
        leaves[chosen] = identity(leaf)
    return tf.nest.pack_sequence_as(value, leaves)


def _run_behind(mark: Callable[..., Any], value: Any, anchor: Any) -> None:
    """Run a mark when all of `value` is there; `anchor`, a variable, needs its result."""
    leaves = tf.nest.flatten(value)
    if not leaves or tf.executing_eagerly():
        mark()
        return
    leaf = min(leaves, key=_size)
    source = leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf
    with tf.control_dependencies(leaves):
        anchor.assign(tf.numpy_function(mark, [source], tf.float32, stateful=False))


def _size(leaf: Any) -> float:
    if isinstance(leaf, tf.IndexedSlices):
        return float("inf")
    size = leaf.shape.num_elements()
    return 1e18 if size is None else float(size)


def _held_back(leaf: Any) -> Any:
    return tf.identity(leaf) if isinstance(leaf, (tf.Tensor, *_COMPOSITE)) else leaf


def _usable(tensor: Any) -> bool:
    """Whether a tensor belongs to the graph being built, not to a branch inside or around it."""
    if tf.executing_eagerly():
        return hasattr(tensor, "numpy")
    return getattr(tensor, "graph", None) is tf.compat.v1.get_default_graph()


def _compiled() -> bool:
    """Whether XLA is to compile what is traced: it knows no Python."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )
