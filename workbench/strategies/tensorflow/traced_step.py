"""One step while TensorFlow traces it: the marks of each replica, and what they read later.

See `markers.py` for what they mean.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops

from ...engine.injector import FaultInjector
from ..base import NAN

clock = time.perf_counter
_here = threading.local()  # .replica: the one being traced in this thread
_COMPOSITE = (tf.RaggedTensor, tf.SparseTensor)


@dataclass
class Stamps:
    """What was seen of one replica in one step.

    Attributes:
        ready_s: On the clock of the replica's own work, which stands still while it is blocked.
        exposed_s: How long it was blocked in all-reduces.
        injected_s: Delays it spent.
    """

    began_s: float
    ready_s: float
    exposed_s: float
    loss: float
    samples: int
    injected_s: float


class Run:
    """What all traces of a run share.

    Attributes:
        open: Whether marks read the clock; after the run they do nothing.
        total: Replicas of the run, on all engines.
        devices: Device of each replica on this engine.
        faults: Its injector.
    """

    def __init__(self, total: int, devices: Sequence[str], faults: Sequence[FaultInjector]) -> None:
        self.open = True
        self.total, self.devices, self.faults = total, tuple(devices), tuple(faults)
        with tf.init_scope(), tf.device("CPU:0"):
            # What writes to a variable is not pruned. Made directly: a strategy would make copies.
            self.anchor = resource_variable_ops.ResourceVariable(0.0, trainable=False)


class Trace:
    """One traced step: its replicas. Executed eagerly, it lives for one step only."""

    def __init__(self, run: Run, *, eager: bool) -> None:
        self.run, self.eager = run, eager
        self.replicas = [
            Replica(self, index, device, faults)
            for index, (device, faults) in enumerate(zip(run.devices, run.faults, strict=True))
        ]
        self.reduced: list[deque[float]] = []  # one queue per all-reduce of the step

    def wrap(self, fn: Any) -> Any:
        """Return what each replica calls instead of `fn`."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            number = int(tf.distribute.get_replica_context()._replica_id_in_sync_group)
            return self.replicas[number % len(self.replicas)].call(fn, args, kwargs)

        return marked

    def take(self) -> list[list[Stamps]]:
        """Return the steps of which every replica has all its stamps; forget all stamps."""
        queues = [queue for replica in self.replicas for queue in replica.queues] + self.reduced
        reduces = bool(self.reduced)
        count = min(len(queue) for queue in queues) if reduces else 0
        steps = [[one.stamps(step, count) for one in self.replicas] for step in range(count)]
        for replica in self.replicas:
            replica.clear()
        for queue in self.reduced:
            queue.clear()
        return steps


class Replica:
    """One replica in one trace: puts the marks in, and keeps what they read."""

    def __init__(self, trace: Trace, index: int, device: str, faults: FaultInjector) -> None:
        self._trace, self._index, self._device, self._faults = trace, index, device, faults
        self._began: deque[tuple[float, int]] = deque()
        self._ready: list[deque[float]] = []  # one queue per all-reduce of the step
        self._losses: deque[float] = deque()
        self._injected_s = 0.0
        self._token: Any = None
        self._loss: tuple[Any, bool] | None = None  # tensor, whether a part of the global loss

    @property
    def queues(self) -> list[deque[Any]]:
        """What every step must have left a stamp in."""
        return [self._began, *self._ready]

    def clear(self) -> None:
        """Forget all stamps."""
        for queue in (*self.queues, self._losses):
            queue.clear()
        self._injected_s = 0.0

    def stamps(self, step: int, count: int) -> Stamps:
        """Return one of the `count` steps of which the stamps are there."""
        began_s, samples = self._began[step]
        blocked_s = [
            max(0.0, reduced[step] - ready[step])
            for ready, reduced in zip(self._ready, self._trace.reduced, strict=True)
        ]
        loss = self._losses[step] if len(self._losses) == count else NAN
        ready_s = self._ready[-1][step] - sum(blocked_s[:-1])
        return Stamps(began_s, ready_s, sum(blocked_s), loss, samples, self._injected_s / count)

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Trace (or eagerly run) this replica's step."""
        outer, _here.replica = getattr(_here, "replica", None), self
        try:
            if self._trace.eager:
                self._on_began(_batch_of(_tensors(args, kwargs)))
                return fn(*args, **kwargs)
            return self._call_marked(fn, args, kwargs)
        finally:
            _here.replica = outer
            self._token = self._loss = None  # tensors keep their graph alive

    def _call_marked(self, fn: Any, args: Any, kwargs: Any) -> Any:
        tensors = _tensors(args, kwargs)
        batch = _batch_of(tensors)
        if batch is None:  # a constant would be folded away, and the mark with it
            source = [tf.numpy_function(lambda: np.float32(0), [], tf.float32)]
        elif "CPU" in self._device:
            source = [batch]
        else:  # looking at the batch must not bring it to the host
            source = [tf.reshape(batch, [-1])[:1], tf.shape(batch, tf.int64)[0]]
        self._token = tf.numpy_function(self._on_began, source, tf.float32, stateful=False)
        with tf.control_dependencies([self._token]):
            if not tensors:
                return fn(*args, **kwargs)
            args, kwargs = tf.nest.map_structure(_held_back, (args, kwargs))
        return fn(*args, **kwargs)

    def see_loss(self, loss: Any, *, part: bool) -> None:
        """Remember the loss of the step; a mean that was named goes before a `part`.

        Args:
            part: It is this replica's part of the global loss: what is differentiated.
        """
        if not (part and self._loss is not None and not self._loss[1]):
            self._loss = (loss, part)

    def reduce(self, original: Any, context: Any, op: Any, value: Any, options: Any) -> Any:
        """Reduce a replica's tensors between a `ready` and a `reduced` mark.

        One mark says for all replicas of this engine when it was done.
        """
        trace, site = self._trace, len(self._ready)
        self._ready.append(deque())
        if len(trace.reduced) == site:
            trace.reduced.append(deque())
        loss, factor = self._loss_at(op)
        extras = [extra for extra in (loss, self._token) if extra is not None]
        on_ready = self._on_ready(site, factor if loss is not None else None)
        value = _pass_through(on_ready, value, extras)
        result = original(context, op, value, options)
        if self._index == 0:
            _run_behind(self._on_reduced(site), result, trace.run.anchor)
        return result

    def _loss_at(self, op: Any) -> tuple[Any, float]:
        """Return the loss, if it can be read here, and what makes it the replica's mean."""
        if self._loss is None or not _usable(self._loss[0]):
            return None, 1.0
        (loss, part), self._loss = self._loss, None
        summed = str(getattr(op, "value", op)).upper() == "SUM"
        return loss, float(self._trace.run.total) if part and summed else 1.0

    def _on_began(self, batch: Any, length: Any = None) -> Any:
        if self._trace.run.open:
            self._spend("data")
            if self._ready or self._trace.eager:  # else an evaluation
                if length is None:
                    length = batch.shape[0] if getattr(batch, "ndim", 0) else 0
                self._began.append((clock(), int(length)))
            self._spend("forward")
        return np.float32(0)

    def _on_ready(self, site: int, factor: float | None) -> Callable[..., Any]:
        run, queue = self._trace.run, self._ready[site]

        def on_ready(passing: Any, *seen: Any) -> Any:
            if run.open:
                if site == 0:
                    self._spend("backward")
                if factor is not None:
                    self._losses.append(float(seen[0]) * factor)
                queue.append(clock())
            return passing

        return on_ready

    def _on_reduced(self, site: int) -> Callable[..., Any]:
        run, queue = self._trace.run, self._trace.reduced[site]

        def on_reduced(*seen: Any) -> Any:
            if run.open:
                queue.append(clock())
            return np.float32(0)

        return on_reduced

    def _spend(self, phase: str) -> None:
        if self._faults.active:
            self._injected_s += self._faults.spend(phase)


def in_replica() -> Replica | None:
    """Return the replica that is being traced in this thread."""
    replica: Replica | None = getattr(_here, "replica", None)
    return replica


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


def _tensors(args: Any, kwargs: Any) -> list[Any]:
    leaves = tf.nest.flatten((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]


def _batch_of(tensors: list[Any]) -> Any:
    """Return the first tensor with a batch axis, else the first, else None."""
    with_axis = [tensor for tensor in tensors if tensor.shape.rank]
    return next(iter(with_axis + tensors), None)


def _usable(tensor: Any) -> bool:
    """Whether a tensor can be read where the graph is being built now."""
    if tf.executing_eagerly():
        return hasattr(tensor, "numpy")
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not getattr(tensor, "graph", None):
        graph = getattr(graph, "outer_graph", None)  # tensors of outer graphs are captured
    return graph is not None
