"""Records each closure of a ClusterCoordinator; a closure that trains is a step of its worker.

    schedule ---- queue ----> a worker is free: begins  --- pull, compute, push --->  ended
              queue wait      version v0                   closure time               version v1

    staleness = v1 - v0: how many other closures ended meanwhile, and so changed the parameters

For each worker TensorFlow has a thread in the coordinator's process. This thread takes a closure
from the queue, sends it and waits until it has ended. Workbench measures in this thread, so nothing
is added to the messages, and a closure takes as long as without Workbench. Stop and Pause also work
in this thread, between closures.

Times are read from the coordinator's clock. Between the end of a closure and the beginning of the
next one, a worker has nothing to do: this is its data wait. A closure's result is fetched only if a
loss is due: each time under `wb.fit` or `model.fit`, a few times per second in a user's own loop.

Injected delays cannot be added here, because the push has already happened; `feeds.py` adds them.

Source: `tensorflow/python/distribute/coordinator/cluster_coordinator.py`.

When a closure's function is traced, Workbench finds out whether it trains:

    schedule(step)      asks a tape for gradients, or an optimizer applies some      it trains
    schedule(score)     neither                                                      it does not

A plain Python function runs only on its worker, and a function that was traced earlier is not
traced again. Workbench cannot see what these functions do, so it assumes that they train.

Each closure that trains is a row, a step of the worker that ran it:

    free ---- data wait ---- begins ---- closure (compute) ---- ends
                             version v0                         version v1      staleness = v1 - v0

The version is the number of closures of all workers that have trained.

The results of closures are fetched on a separate thread, while their workers continue. A fetch
costs one round trip, whatever its size. So results that several closures left on a worker within a
few milliseconds are stacked there and fetched together.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute.coordinator import cluster_coordinator
from tensorflow.python.eager.polymorphic_function import polymorphic_function

from ....engine.contract import NAN
from ....engine.telemetry.recorder import StepResult
from ....engine.training.notes import announce
from ....errors import ClusterError, RunStopped
from ....shared import events
from ..parts.steps import Patches, check_unsaved
from .feeds import Delays

if TYPE_CHECKING:
    from ....engine.context import RunContext

clock = time.perf_counter
STALL_S = 120.0
"""After this time, a closure counts as one that will never end."""

UNMEASURED = (
    "a worker pulls, computes and pushes in one function (a closure), and Workbench measures only "
    "the time of the whole function"
)


class Step(cluster_coordinator.Closure):  # type: ignore[misc]
    """A closure that is recorded when it has ended."""

    def __init__(
        self, owner: Closures, told: Told | None, samples: int, function: Any, *args: Any
    ) -> None:
        self.owner, self.told, self.samples = owner, told, samples
        super().__init__(function, *args)
        self.trains = True
        self.value: Any = self.build_output_remote_value()
        self.scheduled_s = clock()

    def execute_on(self, worker: Any) -> None:
        """Run on a worker; called on that worker's thread."""
        self.owner.execute(self, worker, super().execute_on)


class Closures:
    """The closures that a coordinator schedules inside this context.

    Attributes:
        coordinator: The ClusterCoordinator.
        samples: Samples per closure of a user's own loop; 0 if unknown.
    """

    def __init__(self, context: RunContext, coordinator: Any) -> None:
        self.context, self.coordinator = context, coordinator
        self.samples = 0
        self._cluster = coordinator._cluster
        self._queue = self._cluster.closure_queue
        self._counts = threading.Condition()
        self._turn = threading.Lock()  # one thread at a time asks the gate
        self._admitted = self._open = 0
        self._rows = Rows(context)
        self._running: dict[int, float] = {}
        self._functions = Functions()
        self._announced = False
        self._patches = Patches()
        self._fetcher = Fetcher()

    def __enter__(self) -> Closures:
        """Watch all closures that are scheduled from now on."""
        replace = self._patches.replace
        replace(self._cluster, "schedule", lambda original: self.schedule)
        replace(self._cluster, "join", lambda original: self.join)
        replace(self.coordinator, "create_per_worker_dataset", self._dataset)
        self._functions.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches."""
        self._functions.__exit__(*error)
        self._patches.undo()
        self._fetcher.close()

    @property
    def optimizer(self) -> Any:
        """The optimizer that was applied last; None before the first."""
        return self._functions.optimizer

    # -- the thread that runs the cell -------------------------------------------------------------

    def schedule(
        self,
        function: Any,
        args: Any = None,
        kwargs: Any = None,
        *,
        told: Told | None = None,
        samples: int | None = None,
        alike: Hashable = None,
    ) -> Any:
        """Queue a closure; return its RemoteValue.

        Args:
            told: Called with the result; by default, results are checked for a loss from time to
                time.
            samples: Its number of samples; by default that of its data set.
            alike: A key that is equal for calls with the same graph, which is then looked up only
                once. None: TensorFlow checks the arguments each time.

        Raises:
            RunStopped: Stop was pressed.
        """
        self._check()
        active = any(faults.active for faults in self.context.faults.replicas)
        count = self.samples if samples is None else samples

        def make(known: Any) -> Step:
            manager = self._queue._cancellation_mgr
            return Step(self, told, count, known, manager, args, kwargs)

        step = self._functions.closure(function, alike, make, delayed=active)
        if step.trains:
            self._announce()
        with self._counts:
            self._open += 1
        value = step.value
        try:
            self._queue.put(step)
        except Exception:
            self._check()
            raise
        return value

    def join(self) -> None:
        """Wait until every closure has ended.

        Raises:
            RunStopped: Stop was pressed.
            ClusterError: A worker does not finish its closure.
        """
        try:
            while not self._queue.wait(timeout=1.0):
                self._look_for_stalls()
            self._fetcher.settle()
        except Exception:
            self._check()
            raise
        self._check()

    def wait_for_room(self, most: int) -> None:
        """Wait until fewer closures than this are open; raises the same errors as `join`."""
        while True:
            with self._counts:
                if self._open < most:
                    return
                self._counts.wait(0.5)
            self._check()
            try:
                self._queue.done()  # raises the error of a failed closure
            except Exception:
                self._check()
                raise
            self._look_for_stalls()

    def _check(self) -> None:
        if self.context.gate.stopping:
            raise RunStopped

    def _look_for_stalls(self) -> None:
        with self._counts:
            late = [rank for rank, since_s in self._running.items() if clock() - since_s > STALL_S]
        if late:
            raise ClusterError(
                f"Worker {late[0]} has not finished the function that was scheduled on it.",
                seen=f"no result for {STALL_S:g} s",
                next_step="%cluster shows which engines are alive; %cluster restart starts new "
                "engines; if all engines are alive, give each function less work, for "
                "example a smaller batch",
                code="WB-CLUSTER-045",
            )

    def _announce(self) -> None:
        if self._announced:
            return
        check_unsaved(self.context)
        self._announced = True
        variables = getattr(self.optimizer, "_trainable_variables", ())
        size = self.samples * self.context.spec.world_size
        count = sum(int(np.prod(variable.shape)) for variable in variables)
        announce(self.context, count, batch_size=size or None)

    def go_on(self, steps: int) -> None:
        """Continue from a checkpoint: count the earlier steps of each worker."""
        with self._counts:
            self._rows.go_on(steps)
            self._admitted = self._rows.version

    def announced(self) -> None:
        """Note that the kernel already knows that training begins."""
        self._announced = True

    def _dataset(self, create: Callable[..., Any]) -> Any:
        """Read the batch size from the workers' data set."""

        def create_per_worker_dataset(dataset: Any) -> Any:
            if not callable(dataset):
                return create(self._see(dataset))
            enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
            make = autograph.tf_convert(dataset, enabled)
            seen = tf.autograph.experimental.do_not_convert(lambda *args: self._see(make(*args)))
            return create(seen)

        return create_per_worker_dataset

    def _see(self, dataset: Any) -> Any:
        """Note how many samples a batch of the data set has."""
        inner = dataset
        while not hasattr(inner, "_batch_size") and len(getattr(inner, "_inputs", list)()) == 1:
            (inner,) = inner._inputs()
        size = tf.get_static_value(getattr(inner, "_batch_size", None))
        self.samples = self.samples if size is None else int(size)
        return dataset

    # -- a worker's thread -------------------------------------------------------------------------

    def execute(self, step: Step, worker: Any, run: Callable[[Any], None]) -> None:
        """Run a closure, and record it if it trained."""
        rank = int(worker.worker_index)
        self._admit()
        begin_s = clock()
        with self._counts:
            version = self._rows.version
            self._running[rank] = begin_s
        told = step.told
        if told is None and self._rows.due(rank, begin_s) and _is_loss(step.value):
            told = float
        value, step.value = (step.value if told is not None else None), None
        try:
            run(worker)
        finally:
            with self._counts:
                del self._running[rank]
        end_s = clock()
        late = None
        if told is not None and value is not None:
            late = self._fetcher.fetch(value._values, told)
            del value  # TensorFlow fetches results that are still referenced, and the worker waits
        with self._counts:
            self._open -= 1
            if step.trains:
                times = (step.scheduled_s, begin_s, end_s)
                self._rows.add(rank, step.samples, times, version, late)
            self._rows.free(rank)
            self._counts.notify_all()

    def _admit(self) -> None:
        gate = self.context.gate
        with self._turn:
            paused_s = gate.paused_s
            if not gate.enter(self._admitted):
                raise tf.errors.CancelledError(None, None, "the run was stopped")
            self._admitted += 1
            if gate.paused_s != paused_s:  # a pause belongs to no step
                self.idle()

    def idle(self) -> None:
        """Count the time of this block (an evaluation, a pause) for no step."""
        with self._counts:
            self._rows.idle()


def _is_loss(value: Any) -> bool:
    """Whether a closure returns one real number."""
    spec = getattr(value, "_type_spec", None)
    return isinstance(spec, tf.TensorSpec) and spec.dtype.is_floating and spec.shape.rank == 0


class Functions:
    """The functions whose closures are made inside this context.

    Attributes:
        optimizer: The optimizer that was applied last.
    """

    def __init__(self) -> None:
        self.optimizer: Any = None
        self._seen = 0  # gradients that any traced function computed or applied
        self._delays = Delays()
        self._trains: Any = weakref.WeakKeyDictionary()
        # by function: the closures of calls with equal `alike`
        self._graphs: Any = weakref.WeakKeyDictionary()
        self._patches = Patches()

    def __enter__(self) -> Functions:
        """Watch all functions that are traced from now on."""
        self._patches.replace(keras.optimizers.Optimizer, "apply", self._applies)
        self._patches.replace(tf.GradientTape, "gradient", self._differentiates)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches."""
        self._patches.undo()

    def closure(
        self, function: Any, alike: Hashable, make: Callable[[Any], Any], *, delayed: bool
    ) -> Any:
        """Make a closure of a function, set its `trains`, and return it.

        Args:
            alike: A key that is equal for calls with the same graph, which is then looked up only
                once. None: TensorFlow checks the arguments each time.
            make: Makes the closure from the function, or from its graph; a new function is traced.
            delayed: Whether it must contain injected delays.
        """
        chosen = self._delays.variant(function) if delayed else function
        before = self._seen
        # Tracing shows what a function does; a plain function shows it only when it runs.
        plain = not isinstance(function, polymorphic_function.Function)
        unseen = plain or chosen.experimental_get_tracing_count() > 0
        graphs = {} if plain or alike is None else self._graphs.setdefault(chosen, {})
        known = graphs.get(alike, chosen)
        made = make(known)
        if known is chosen and not plain:
            graphs[alike] = made._concrete_function
        if self._seen > before:
            self._trains[function] = True
        made.trains = plain or self._trains.setdefault(function, unseen)
        return made

    def _applies(self, original: Any) -> Any:
        def apply(optimizer: Any, grads: Any, *args: Any, **keywords: Any) -> Any:
            self.optimizer = optimizer
            self._seen += 1
            held = self._delays.hold(grads)
            return original(optimizer, held, *args, **keywords)

        return tf.autograph.experimental.do_not_convert(apply)

    def _differentiates(self, original: Any) -> Any:
        def gradient(tape: Any, *args: Any, **keywords: Any) -> Any:
            self._seen += 1
            return original(tape, *args, **keywords)

        return tf.autograph.experimental.do_not_convert(gradient)


SHOW_S = 0.1
"""How often, per worker, the loss of a user's own loop is fetched and queue waits are logged."""


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
        """Continue from a checkpoint: count the earlier steps of each worker."""
        self._steps = [steps] * len(self._steps)
        self.version = steps * len(self._steps)

    def idle(self) -> None:
        """Count the time of this block (an evaluation, a pause) for no step."""
        self._free_s = [clock()] * len(self._free_s)

    def free(self, rank: int) -> None:
        """Note that a worker has nothing to do from now on."""
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
            late: Fetches its loss, if that is due.
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


LOCAL = "/job:chief"
LONGEST_S = 10.0
TOGETHER_S, MOST = 0.05, 32
"""Results that are ready within this time are fetched together, up to this number of closures."""


Told = Callable[[Any], float]
"""A function that takes the values of a closure and returns its loss."""


@dataclass
class Pending:
    """A loss that is still on its worker; completes a row of the recorder."""

    tensors: Any  # nested, all on one worker
    told: Told
    loss: float = NAN
    known: threading.Event = field(default_factory=threading.Event)

    def ready(self) -> bool:
        """Whether the loss is known, or known to be lost."""
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
        """Queue the values to be fetched and reported."""
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
        """Wait for the first result, then for those that follow soon.

        None in the queue ends the wait.
        """
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
        """Fetch the remaining values, then end."""
        self._closed = True
        self._waiting.put(None)
        self._thread.join(LONGEST_S)


def _groups(found: list[Pending]) -> list[list[Pending]]:
    """Return groups of results whose values are on one worker and can be stacked."""
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
    """Fetch the wanted values of one worker, and report them."""
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
