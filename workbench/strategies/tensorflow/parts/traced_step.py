"""One step while TensorFlow traces it: the marks of each replica, and their later reports.

See `markers.py` for what they mean.

The marks' readings of each step are kept next to the replicas until the loop asks for them. A call
into Python from within a graph costs 0.15 to 0.3 ms: TensorFlow passes it to another thread, which
must wake up and get Python's lock. So Python is not called while a step is running. Each device
that holds replicas has a variable, a list of numbers to which every step appends a row. The loop
reads it when its call has ended, which takes 15 µs per device. Between two calls there may be any
number of steps (`steps_per_execution`).

    row of a device:  for each of its replicas
                          began, samples, delay of data, delay of work, loss, 1 if it was seen,
                          ready x reductions
                      reduced x reductions      on the device of the first replica only
                      reductions                how many all-reduces the step had

A row ends with the number that tells its length, so a list is read from its end. If a list was not
read for a long time, its oldest numbers are lost.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from tensorflow.python.ops import resource_variable_ops
from tensorflow.python.ops.gen_resource_variable_ops import read_variable_op

from ....engine.contract import NAN

if TYPE_CHECKING:
    from ....engine.telemetry.step_gate import FaultInjector

# .replica, .trace: the replica and the trace that are being traced in this thread
_here = threading.local()

EACH, PART, MEAN = range(3)
"""The forms of a loss: one number per sample; a part; a mean.

The part is this replica's part of the global loss, which was differentiated. The mean is the
replica's mean, if the code names it so.
"""


class Run:
    """The data that all traces of a run share.

    Attributes:
        open: Whether the run is still in progress; after it there are no delays.
        total: Replicas of the run, on all engines.
        hosts: For each replica of this engine, the device for operations that do not run on a GPU.
            Copying one number between devices costs as much as all marks together.
        on_gpus: Whether replicas compute on GPUs.
        faults: By replica, its injector.
        slowed: For each replica, a variable that says whether the graph must ask the injector.
        log: The log in which each step stores its readings.
    """

    def __init__(self, total: int, devices: Sequence[str], faults: Sequence[FaultInjector]) -> None:
        self.open = True
        self.total, self.faults = total, tuple(faults)
        self.hosts = [device if "CPU" in device else "CPU:0" for device in devices]
        self.on_gpus = any("CPU" not in device for device in devices)
        # Made directly: a strategy would make a copy on each device.
        self.slowed = []
        for host, fault in zip(self.hosts, self.faults, strict=True):
            with tf.init_scope(), tf.device(host):
                variable = resource_variable_ops.ResourceVariable(fault.active, trainable=False)
                self.slowed.append(variable)
        self._known = [fault.active for fault in faults]
        self.log = StepLog(self.hosts)

    def look_at_faults(self) -> None:
        """Tell the graphs which injectors have something to do."""
        for index, fault in enumerate(self.faults):
            if fault.active != self._known[index]:
                self._known[index] = fault.active
                self.slowed[index].assign(fault.active)


class Trace:
    """One traced step: its replicas. Executed eagerly, it lives for one step only.

    A step can run its replicas a second time, inside their common operations. Keras' optimizer for
    float16 does this twice: to check whether the gradients are finite, and, in a branch, to apply
    them. Tensors inside a branch cannot be read outside. So the second trace gets all readings of
    the first, and stores the row inside the branch.
    """

    def __init__(self, run: Run, *, eager: bool) -> None:
        self.run, self.eager = run, eager
        self._within: Trace | None = under_way()
        if self._within is not None and self._within.eager != eager:
            self._within = None
        self.replicas = [Replica(self, index) for index in range(len(run.faults))]
        self.reduced: list[Any] = []  # when each all-reduce of the step ended
        self.written: dict[int, Any] = {}  # variables of which each replica wrote its own copy
        self._graph = None if eager else tf.compat.v1.get_default_graph()
        self.scalers: dict[int, None] = {}  # optimizers for float16 whose `apply` was called
        self._told = False  # whether the row was stored in the log
        if self._within is not None:
            self.reduced = list(self._within.reduced)
            for replica, outer in zip(self.replicas, self._within.replicas, strict=True):
                replica.go_on(outer)

    def __enter__(self) -> Trace:
        """Note in this thread that the step is being traced."""
        _here.trace = self
        return self

    def __exit__(self, *error: object) -> None:
        """Continue with the outer trace."""
        _here.trace = self._within

    @property
    def told(self) -> bool:
        """Whether its row is in the log already."""
        return self._told

    @property
    def inner(self) -> bool:
        """Whether it continues another trace of the same step."""
        return self._within is not None

    def wrap(self, fn: Any) -> Any:
        """Return the function that each replica calls instead of `fn`."""

        def marked(*args: Any, **kwargs: Any) -> Any:
            context = tf.distribute.get_replica_context()
            number = int(context._replica_id_in_sync_group)
            replica = self.replicas[number % len(self.replicas)]
            result = replica.call(fn, args, kwargs)
            _average(context, list(self.written.values()), replica.weight)
            return result

        return marked

    def end(self) -> None:
        """Store the replicas' readings in the log, or pass them to the outer trace."""
        outer = self._within
        if not self.reduced and all(len(one.ready) == 1 for one in self.replicas):
            self.reduced = list(self.replicas[0].ready)  # each replica worked for itself
        count = len(self.reduced)
        whole = count and all(len(one.ready) == count for one in self.replicas)
        if outer is None:
            if whole and not self._told:
                self._leave()
        elif whole and count > len(outer.reduced):
            if self._graph is outer._graph:
                outer.reduced = self.reduced
                for replica, one in zip(outer.replicas, self.replicas, strict=True):
                    replica.go_on(one)
            elif len(outer.scalers) < 2:  # a second optimizer's branches are part of the same step
                self._leave()
                outer._told = True
        self._forget()

    def passed_over(self, scaler: Any) -> None:
        """Store the row in the branch of a step that changes nothing because gradients overflowed.

        Args:
            scaler: The optimizer that skips it.
        """
        if next(iter(self.scalers), None) != id(scaler):
            return
        before = list(self.reduced)
        if not before:  # a single replica waits for no other
            for one in self.replicas:
                one._ready_alone()
            self.reduced = [self.replicas[0].ready[0]]
        self._leave()
        if not before:
            self.reduced = []
            for one in self.replicas:
                one.ready = []
        self._told = True

    def _leave(self) -> None:
        leave = self.run.log.keep if self.eager else self.run.log.append
        leave([one.seen for one in self.replicas], self.reduced)

    def _forget(self) -> None:
        """Drop all tensors: they keep their graph alive."""
        for replica in self.replicas:
            replica.forget()
        self.reduced, self.written, self._graph, self._within = [], {}, None, None


class Replica:
    """One replica in one trace; it inserts the marks."""

    def __init__(self, trace: Trace, index: int) -> None:
        self._trace, self._index = trace, index
        self._host = trace.run.hosts[index]
        self._graph: Any = None
        self.forget()

    def forget(self) -> None:
        """Drop all tensors: they keep their graph alive."""
        self._began: Any = NAN
        self._samples: Any = 0.0
        self.weight: Any = 1.0  # samples, where they are known
        self._delays: Any = np.zeros(2)
        self._mean: Any = NAN
        self._seen = 0.0  # 1 when a loss is known
        self._loss: tuple[Any, int] | None = None  # tensor, what it is
        self._scaled: tuple[Any, Any] | None = None  # a loss times a scale, and without
        self._sources: dict[int, Any] = {}  # variables by which a loss was differentiated
        self._updates = False  # whether one of these variables was written
        self.ready: list[Any] = []  # when each all-reduce of the step could begin

    def go_on(self, other: Replica) -> None:
        """Take over the readings of the same replica from another trace of the step."""
        self._began, self._samples, self._delays = other._began, other._samples, other._delays
        self._mean, self._seen, self._loss = other._mean, other._seen, other._loss
        self.ready = list(other.ready)

    @property
    def seen(self) -> Any:
        """Return the parts of a replica's row: numbers, in a graph vectors."""
        first, last = [self._began, self._samples], [self._mean, self._seen, *self.ready]
        if self._trace.eager:
            return [*first, *self._delays, *last]
        with tf.device(self._host):
            return [tf.stack(first), self._delays, tf.stack(last)]

    def call(self, fn: Any, args: Any, kwargs: Any) -> Any:
        """Trace (or eagerly run) this replica's step."""
        outer, _here.replica = getattr(_here, "replica", None), self
        self._graph = None if self._trace.eager else tf.compat.v1.get_default_graph()
        leaves = tf.nest.flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, tf.Tensor)]
        if not self._trace.inner:
            batch = next((tensor for tensor in tensors if tensor.shape.rank), None)
            self._began = self._now(tensors)
            if batch is not None:
                self._samples = _number(batch.shape[0] or tf.shape(batch)[0])
                self.weight = self._samples
        try:
            result = fn(*args, **kwargs)
            if self._updates and not self.ready and not self._trace.told:
                self._ready_alone()
            return result
        finally:
            _here.replica = outer
            self._graph = None

    def see_loss(self, loss: Any, kind: int) -> None:
        """Keep the loss of the step; a more exact one replaces a less exact one.

        Args:
            kind: `EACH`, `PART` or `MEAN`.
        """
        if self._loss is None or kind >= self._loss[1]:
            self._loss = (loss, kind)

    def see_scaled(self, loss: Any, scaled: Any) -> None:
        """Keep a loss as it was before it was scaled for float16."""
        self._scaled = (scaled, loss)

    def unscaled(self, loss: Any) -> Any:
        """Return the loss as it was before it was scaled."""
        scaled = self._scaled
        return scaled[1] if scaled is not None and scaled[0] is loss else loss

    def see_scaler(self, optimizer: Any) -> None:
        """Note that an optimizer for float16 is about to apply gradients."""
        outer = self._trace._within or self._trace
        outer.scalers[id(optimizer)] = None

    def see_sources(self, sources: Any) -> bool:
        """Note the variables of a differentiation; return whether there are any."""
        every = [getattr(one, "_value", one) for one in tf.nest.flatten(sources)]  # Keras' own hold
        found = [one for one in every if hasattr(one, "assign")]
        self._sources |= {id(one): one for one in found}
        return bool(found)

    def see_update(self, variable: Any) -> None:
        """Note that a variable was written: one of the model's, without an optimizer."""
        self._updates = self._updates or id(variable) in self._sources

    def see_written(self, variable: Any) -> None:
        """Note a variable of which this replica wrote its own copy."""
        if not self._trace.inner:
            self._trace.written[id(variable)] = variable

    def _ready_alone(self) -> None:
        """Mark the end of the step's computation if nothing is reduced."""
        self._take_loss(summed=False)
        self.ready.append(self._now([]))

    def reduce(self, original: Any, context: Any, op: Any, value: Any, options: Any) -> Any:
        """Reduce a replica's tensors between a `ready` and a `reduced` mark.

        One mark for all replicas of this engine shows when the all-reduce ended.
        """
        leaves = tf.nest.flatten(value)
        in_branch = not self._trace.eager and self._graph is not tf.compat.v1.get_default_graph()
        if not leaves or in_branch:  # tensors inside a branch cannot be read outside
            return original(context, op, value, options)
        if not self.ready:
            value = self._delayed(value, leaves)
        self._take_loss(summed=str(getattr(op, "value", op)).upper() == "SUM")
        self.ready.append(self._now(self._arrived(tf.nest.flatten(value))))
        result = original(context, op, value, options)
        if self._index == 0:
            self._trace.reduced.append(self._now(self._arrived(tf.nest.flatten(result))))
        return result

    def _take_loss(self, *, summed: bool) -> None:
        if self._loss is None or not _usable(self._loss[0]):
            return
        (loss, kind), self._loss = self._loss, None
        if kind == EACH:
            loss = tf.reduce_mean(loss)
        self._mean = _number(loss) * (self._trace.run.total if kind == PART and summed else 1)
        self._seen = 1.0

    def _now(self, after: list[Any]) -> Any:
        """Return the time, in seconds since 1970, when all of `after` is computed."""
        if self._trace.eager:
            return time.time()
        with tf.device(self._host), tf.control_dependencies(after):
            stamp = tf.timestamp()
        # Otherwise TensorFlow would run it in one chain with all operations with side effects, over
        # all replicas.
        manager = tf.compat.v1.get_default_graph().experimental_acd_manager
        if manager is not None:
            manager.run_independently(stamp.op)
        return stamp

    def _arrived(self, leaves: list[Any]) -> list[Any]:
        """Return a tensor that is ready when all leaves are; on a GPU, when they can be copied."""
        if not self._trace.run.on_gpus or self._trace.eager:
            return leaves
        leaf = min(leaves, key=_size)
        with tf.control_dependencies(leaves):
            last = tf.identity(leaf.values if isinstance(leaf, tf.IndexedSlices) else leaf)
        with tf.device(self._host):
            return [tf.identity(last)]

    def _delayed(self, value: Any, leaves: list[Any]) -> Any:
        """Return the value after the delay that the injector gives.

        The injector is asked only while it has something to do.
        """
        run = self._trace.run
        if self._trace.eager:
            self._delays = self._spend()
            return value
        chosen = min(range(len(leaves)), key=lambda i: _size(leaves[i]))
        leaf = leaves[chosen]
        sliced = isinstance(leaf, tf.IndexedSlices)
        tensor = leaf.values if sliced else leaf
        arrived = self._arrived(leaves)
        with tf.control_dependencies(arrived), tf.device(self._host):
            slowed = tf.identity(run.slowed[self._index].read_value())
            first = arrived[0].values if isinstance(arrived[0], tf.IndexedSlices) else arrived[0]
            delays = tf.cond(
                slowed,
                # Without an input it would be a constant, and TensorFlow would run it when it
                # optimises the graph.
                lambda: tf.numpy_function(self._spend, [first], tf.float64, stateful=False),
                lambda: tf.zeros(2, tf.float64),
            )
        self._delays = tf.ensure_shape(delays, (2,))
        with tf.control_dependencies([delays]):
            tensor = tf.identity(tensor)
        kept = tf.IndexedSlices(tensor, leaf.indices, leaf.dense_shape) if sliced else tensor
        return tf.nest.pack_sequence_as(value, [*leaves[:chosen], kept, *leaves[chosen + 1 :]])

    def _spend(self, *seen: Any) -> Any:
        """Wait for this replica's delays; return the seconds for data, and for computation."""
        faults = self._trace.run.faults[self._index]
        if not (self._trace.run.open and faults.active):
            return np.zeros(2)
        data_s = faults.spend("data")
        return np.array([data_s, faults.spend("forward") + faults.spend("backward")])


def _average(context: Any, variables: list[Any], samples: Any) -> None:
    """Give all replicas, on all engines, the mean of the values that each wrote in this step.

    All variables go in one message. A replica without a sample has weight 0, because its values can
    be anything.

    Args:
        samples: The weight of this replica's values.
    """
    if not variables:
        return
    values = [tf.cast(tf.reshape(one.value, [-1]), tf.float64) for one in variables]
    weight, joined = tf.cast(samples, tf.float64), tf.concat(values, 0)
    counted = tf.where(weight > 0, joined * weight, tf.zeros_like(joined))
    total = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.concat([counted, [weight]], 0))
    means = tf.split(total[:-1] / total[-1], [one.shape.num_elements() for one in variables])
    for variable, mean in zip(variables, means, strict=True):
        variable.value.assign(tf.cast(tf.reshape(mean, variable.shape), variable.dtype))


def under_way() -> Trace | None:
    """Return the step that is being traced in this thread."""
    trace: Trace | None = getattr(_here, "trace", None)
    return trace


def in_replica() -> Replica | None:
    """Return the replica that is being traced in this thread."""
    replica: Replica | None = getattr(_here, "replica", None)
    return replica


def _number(value: Any) -> Any:
    return float(value) if tf.executing_eagerly() else tf.cast(value, tf.float64)


def _size(leaf: Any) -> float:
    if isinstance(leaf, tf.IndexedSlices):
        return float("inf")
    size = leaf.shape.num_elements()
    return 1e18 if size is None else float(size)


def _usable(tensor: Any) -> bool:
    """Whether a tensor can be read in the graph that is being built now."""
    if tf.executing_eagerly():
        return hasattr(tensor, "numpy")
    graph = tf.compat.v1.get_default_graph()
    while graph is not None and graph is not getattr(tensor, "graph", None):
        graph = getattr(graph, "outer_graph", None)  # tensors of outer graphs are captured
    return graph is not None


FIRST_READY = 6
"""Numbers of a replica before its first ready time."""

MOST = 1 << 15
"""Numbers that a device keeps at most: thousands of steps in one call."""

_CLEARED = 512  # a longer list is emptied after it was read, because each step copies it
_CLOSE_S = 20e-6


@dataclass
class Stamps:
    """The measurements of one replica in one step.

    Attributes:
        ready_s: On the replica's computation clock, which stops while the replica is blocked.
        exposed_s: How long it was blocked in all-reduces.
        injected_s: Its injected delays after it had begun.
        has_loss: Whether the model's loss was seen. If so, NaN means that the loss is NaN.
        eager: Whether it was computed without a graph.
    """

    began_s: float
    ready_s: float
    exposed_s: float
    loss: float
    samples: int
    injected_s: float
    has_loss: bool = False
    eager: bool = False


class StepLog:
    """The rows of all replicas of an engine.

    Args:
        hosts: For each replica, the device that keeps its numbers. Copying one number between
            devices costs as much as all marks together, so each device keeps its own numbers.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._lists = [
            _List(host, [i for i, other in enumerate(hosts) if other == host])
            for host in dict.fromkeys(hosts)
        ]
        self._eager: list[list[Stamps]] = []
        self._offset_s = NAN

    def append(self, parts: Sequence[Sequence[Any]], reduced: Sequence[Any]) -> None:
        """Make the traced graph append a row.

        Args:
            parts: By replica, vectors with its numbers.
            reduced: When each all-reduce was done.
        """
        for one in self._lists:
            one.append([part for index in one.replicas for part in parts[index]], reduced)

    def keep(self, replicas: Sequence[Sequence[float]], reduced: Sequence[float]) -> None:
        """Keep a step that was computed without a graph."""
        offset_s = self._offset()
        self._eager.append([_stamps(own, reduced, offset_s, eager=True) for own in replicas])

    def take(self) -> list[list[Stamps]]:
        """Return the steps done since the last call, by replica; forget them."""
        steps, self._eager = self._eager, []
        lists = [one.take() for one in self._lists]
        # A failed step can have stored a row on only some devices.
        count = min(len(rows) for rows in lists)
        if not count:
            return steps
        offset_s, replicas = self._offset(), sum(len(one.replicas) for one in self._lists)
        for number in range(-count, 0):
            row = [rows[number] for rows in lists]
            reduced = row[0].reduced
            step: list[Any] = [None] * replicas
            for one, own in zip(self._lists, row, strict=True):
                for index, numbers in zip(one.replicas, own.replicas, strict=True):
                    step[index] = _stamps(numbers, reduced, offset_s)
            steps.append(step)
        return steps

    def clear(self) -> None:
        """Forget everything that was computed while nothing was measured."""
        self._eager = []
        for one in self._lists:
            one.clear()

    def _offset(self) -> float:
        """Return the difference that turns TensorFlow's time into the time of `perf_counter`."""
        for _ in range(3):
            before, wall, after = time.perf_counter(), time.time(), time.perf_counter()
            if after - before < _CLOSE_S or self._offset_s != self._offset_s:
                self._offset_s = (before + after) / 2 - wall
            if after - before < _CLOSE_S:
                break
        return self._offset_s


@dataclass
class _Row:
    """One step on one device."""

    replicas: list[list[float]]
    reduced: list[float]


class _List:
    """The numbers of one device; `replicas` are those it holds."""

    def __init__(self, host: str, replicas: list[int]) -> None:
        self.replicas = replicas
        self._host, self._read = host, 0
        # Made directly: a strategy would make a copy on each device.
        with tf.init_scope(), tf.device(host):
            self._empty = tf.identity(tf.zeros(0, tf.float64))
            self._variable = resource_variable_ops.ResourceVariable(
                self._empty, shape=tf.TensorShape([None]), trainable=False
            )

    def append(self, parts: list[Any], reduced: Sequence[Any]) -> None:
        handle = self._variable.handle
        count = tf.constant(len(reduced), tf.float64)
        with tf.device(self._host):
            end = tf.stack([*reduced, count] if 0 in self.replicas else [count])
            before = tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64)
            joined = tf.concat([before, *parts, end], 0)[-MOST:]
            tf.raw_ops.AssignVariableOp(resource=handle, value=joined)

    def take(self) -> list[_Row]:
        tensor = read_variable_op(self._variable.handle, tf.float64)
        numbers: list[float] = memoryview(tensor)[self._read :].tolist()  # type: ignore[assignment]
        held, first = len(self.replicas), 0 in self.replicas
        rows: list[_Row] = []
        end = len(numbers)
        while end:
            count = int(numbers[end - 1])
            width = FIRST_READY + count
            begin = end - 1 - held * width - (count if first else 0)
            if begin < 0:
                break
            ends = range(begin + width, end, width)
            own = [numbers[stop - width : stop] for stop in ends[:held]]
            rows.append(_Row(own, numbers[begin + held * width : end - 1]))
            end = begin
        self._read += len(numbers)
        if self._read > _CLEARED:
            self.clear()
        rows.reverse()
        return rows

    def clear(self) -> None:
        tf.raw_ops.AssignVariableOp(resource=self._variable.handle, value=self._empty)
        self._read = 0


def _stamps(
    own: Sequence[float], reduced_s: Sequence[float], offset_s: float, *, eager: bool = False
) -> Stamps:
    """Read a replica's numbers of one step."""
    began_s, samples, data_s, delay_s, loss, seen = own[:FIRST_READY]
    exposed_s = blocked_s = 0.0
    ready_s = NAN
    for ready_s, after_s in zip(own[FIRST_READY:], reduced_s, strict=True):
        exposed_s += blocked_s
        blocked_s = max(0.0, after_s - ready_s)
    # The delay for data is added later, with the other delays.
    began_s += data_s + offset_s
    ready_s += offset_s - exposed_s
    return Stamps(
        began_s, ready_s, exposed_s + blocked_s, loss, int(samples), delay_s, bool(seen), eager
    )
