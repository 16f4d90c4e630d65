"""Closures of a ClusterCoordinator, seen one by one: a closure that trains is a step of its worker.

    schedule ---- queue ----> a worker is free: begins  --- pull, compute, push --->  ended
              queue wait      version v0                   closure time               version v1

    staleness = v1 - v0: how many other closures ended, and so changed the parameters, meanwhile

Each worker has a thread of TensorFlow's in the coordinator's process, which takes a closure from
the queue, sends it and waits until it has ended. That is where it is measured: nothing is added to
what travels, so a closure takes as long as without us. Stop and Pause work there too: between
closures.

Times are the coordinator's. From one closure's end to the next one's begin a worker has nothing to
do: that is its data wait. What a closure returns is fetched only where a loss is due: each time
where `wb.fit` or `model.fit` are under way, a few times a second in an own loop.

Delays cannot be spent here, as the push would have happened by then (`delays.py`).

Source: `tensorflow/python/distribute/coordinator/cluster_coordinator.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute.coordinator import cluster_coordinator

from ...engine.announce import announce
from ...engine.context import RunContext
from ...errors import ClusterError, RunStopped
from .closure_functions import Functions
from .closure_rows import Rows
from .fetching import Fetcher, Told
from .loop import check_unsaved
from .patches import Patches

clock = time.perf_counter
STALL_S = 120.0
"""After how long one closure is taken for one that will never end."""

UNMEASURED = "pull, computation and push are one closure, which is timed as a whole"


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
    """What a coordinator schedules while this is entered.

    Attributes:
        coordinator: The ClusterCoordinator.
        samples: Samples per closure of an own loop; 0 while nobody knows.
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
        """See what is scheduled from now on."""
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
        """What was applied last; None before."""
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
            told: Hears what it returned; by default a loss is looked for now and then.
            samples: How many it takes; by default what its data set says.
            alike: Equal for calls of the function that the same graph serves: it is looked up
                once. None: TensorFlow looks at the arguments each time.

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
            ClusterError: A worker does not end its closure.
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
        """Wait until fewer than so many closures are open; raises what `join` does."""
        while True:
            with self._counts:
                if self._open < most:
                    return
                self._counts.wait(0.5)
            self._check()
            try:
                self._queue.done()  # raises what went wrong with one of them
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
                f"Worker {late[0]} does not end its closure.",
                seen=f"nothing for {STALL_S:g} s",
                next_step="%cluster shows which engines are alive; %cluster restart",
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
        """Count on from a checkpoint: so many steps of each worker lie before it."""
        with self._counts:
            self._rows.go_on(steps)
            self._admitted = self._rows.version

    def announced(self) -> None:
        """Somebody who knows more has told the kernel that training begins."""
        self._announced = True

    def _dataset(self, create: Callable[..., Any]) -> Any:
        """Learn the batch size from the data set that workers are given."""

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
        """Run a closure, and record it where it trained."""
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
            del value  # TensorFlow fetches what somebody still refers to, and the worker waits
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
        """What lay between belongs to no step: an evaluation, a pause."""
        with self._counts:
            self._rows.idle()


def _is_loss(value: Any) -> bool:
    """Whether a closure returns one real number."""
    spec = getattr(value, "_type_spec", None)
    return isinstance(spec, tf.TensorSpec) and spec.dtype.is_floating and spec.shape.rank == 0
