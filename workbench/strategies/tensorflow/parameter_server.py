"""Asynchronous data parallelism under a coordinator: servers hold the variables, workers compute.

The cell runs on one engine, the coordinator. The coordinator does not compute. It schedules
closures: functions that compute one step. An idle worker takes the next closure. In a closure, a
worker reads the variables from the servers and computes the gradients of its share of a batch.
Then the servers apply these gradients:

    coordinator:  schedule(step) schedule(step) schedule(step) ...
                       |               |              |
    worker 0:     [pull w3, compute, push]       [pull w5, compute, push]
    worker 1:          [pull w4 . . . . . . . . . . . . . . . . . push]
                       |              |                            |
    server s0:    w3 . . . . . . w4 = w3 - lr g(w3) . . . w6 = w5 - lr g(w4)

No worker waits for another, so there is no sync wait. The disadvantage is staleness: other workers
push between a worker's pull and its push. With n equally fast workers the mean staleness is n - 1.
A slow worker takes fewer closures. In `run.history`, each closure that trains is one row. The row
contains the rank of the worker that ran the closure. With n workers, each push uses 1/n of a batch.

When a worker dies, the run continues: the dead worker's closure runs again on another worker. So
every closure runs at least once, and some run several times. When a server dies, its variables are
lost. If the run has no `--checkpoint`, it ends. With `--checkpoint`, by default a new server
replaces the dead server, and the run continues from the last checkpoint.

    servers=2               variables are distributed over two servers
    partitioner=fixed:2     each variable is cut in two along its first dimension
    partitioner=min_size:N  each variable is cut into parts of at least N bytes

In Keras 3, each variable must be one tensor, but a partitioned variable consists of several
tensors. So you can use a partitioner only in your own loop, for `tf.Variable`s that this loop
makes.

Every task (the coordinator, each worker and each server) opens a gRPC server (a socket for messages
from other processes) for the run. The gRPC server listens on every network interface, even if its
address is 127.0.0.1. After the run, no process can connect to it.

The tasks form a TensorFlow cluster (a group of TensorFlow processes). When a process connects to
such a cluster, TensorFlow deletes all tensors and variables of this process. So the coordinator
loses the TensorFlow tensors and variables of earlier cells. NumPy arrays are kept.

Sources: tf.distribute.ParameterServerStrategy,
https://www.tensorflow.org/tutorials/distribute/parameter_server_training; Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ...engine.contract import Job, Share, Strategy
from ...engine.tensorflow.support import reset
from ...engine.training.initial import initialise
from ...errors import FitError
from ...shared import events
from .coordinator.closures import UNMEASURED, Closures
from .coordinator.fit import Coordinated
from .coordinator.servers import (
    MEET_S,
    Survivors,
    check_alive,
    cluster_of,
    helpers,
    listening,
    serve,
    shut,
)
from .keras.coordinated import CoordinatedFit
from .keras.fit import check_model
from .parts.models import Homecoming, owner, restore, state_of
from .parts.replica import Trainer
from .parts.steps import stand_ins

if TYPE_CHECKING:
    from ...engine.context import RunContext
    from ...engine.telemetry.recorder import StepResult

SET_BY_TENSORFLOW = (
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY",
)  # fmt: skip


def partitioner(text: str, servers: int) -> Any:
    """Return TensorFlow's partitioner for `none`, `fixed:N` or `min_size:BYTES`."""
    kind, _, number = text.partition(":")
    kinds = tf.distribute.experimental.partitioners
    if kind == "fixed":
        return kinds.FixedShardsPartitioner(int(number))
    if kind == "min_size":
        return kinds.MinSizePartitioner(int(number), max_shards=servers)
    return None


class ParameterServer(Strategy):
    """Runs closures on workers, with variables on servers; one object serves the whole cell."""

    per_cell = injects_data_delay = owns_loop = True

    def __init__(self, context: RunContext) -> None:
        super().__init__(context)
        self.distribution: Any = None
        self.coordinator: Any = None
        self.closures: Closures | None = None
        self._carried: Coordinated | None = None
        self._fit: CoordinatedFit | None = None
        self._model: Any = None
        self._optimizer: Any = None
        self._sample: Any = None
        self._final: dict[str, NDArray[np.generic]] = {}

    # -- on a worker, on a server ------------------------------------------------------------------

    def serve(self) -> None:
        """Act as one of TensorFlow's workers or servers until the run is over."""
        serve(self.context)

    # -- on the coordinator ------------------------------------------------------------------------

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """Connect the cluster, run the cell in the strategy's scope, copy the results back."""
        context, before = self.context, listening()
        environ = {name: os.environ.get(name) for name in SET_BY_TENSORFLOW}
        try:
            self._connect()
            with contextlib.ExitStack() as stack:
                self.closures = stack.enter_context(Closures(context, self.coordinator))
                self._fit = CoordinatedFit(context, self.closures, self._trains, self)
                stack.enter_context(self._fit)
                stack.enter_context(stand_ins(context, self.distribution))
                context.weights = self.weights
                stack.enter_context(self.distribution.scope())
                yield {"strategy": self.distribution, "coordinator": self.coordinator}
        finally:
            self._disconnect(before)
            for name, value in environ.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})

    def _connect(self) -> None:
        context, spec = self.context, self.context.spec
        ranks = helpers(context)
        parts = dict(zip(ranks, self._parts, strict=True))
        addresses = context.board.wait("address", ranks, MEET_S, parts)
        devices = context.board.wait("up", ranks, MEET_S, parts)
        context.remote_devices = tuple(devices[rank] for rank in ranks[: spec.world_size])
        check_alive(addresses, parts)
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            cluster_of(context, addresses), rpc_layer="grpc"
        )
        self.distribution = tf.distribute.ParameterServerStrategy(
            resolver, partitioner(self.options["partitioner"], spec.servers)
        )
        self.coordinator = tf.distribute.coordinator.ClusterCoordinator(self.distribution)
        Survivors(self.coordinator._cluster)
        context.emit(events.Unmeasured(columns={"transfer_s": UNMEASURED}))
        where = ", ".join(
            f"{part} on engine {engine}"
            for part, engine in zip(self._parts, spec.ranks[spec.world_size :], strict=True)
        )
        text = (
            f"{where.capitalize()}. TensorFlow starts one gRPC server on each of these engines, "
            "and one on the engine that runs the cell. These servers listen on every network "
            "interface until the run ends."
        )
        context.emit(events.Noted(rank=0, text=text))

    @property
    def _parts(self) -> tuple[str, ...]:
        return self.context.entry.helpers(self.options, self.world_size)

    def _disconnect(self, before: set[tuple[int, str]]) -> None:
        """Copy the models into this engine, then reset TensorFlow to its state after the import.

        Args:
            before: Sockets that do not belong to the run.
        """
        home = Homecoming()
        try:
            # the values on a server that died are lost
            with contextlib.suppress(tf.errors.OpError):
                home.pack(*self._trained())
            self._final = home.weights
            if self.coordinator is not None:
                self.coordinator._cluster.stop()
            self.closures = self._carried = self._fit = None
            self.distribution = self.coordinator = None
            reset()
        finally:  # also if an interrupt comes first, so that nothing stays open and no task waits
            shut(listening() - before)
            self.context.post("over")
            home.unpack()

    def _trained(self) -> tuple[Any, Any]:
        """Return the model and the optimizer that trained last."""
        optimizer = None if self.closures is None else self.closures.optimizer
        return self._model or owner(optimizer), optimizer

    def _trains(self, model: Any) -> None:
        self._model, self._optimizer = model, getattr(model, "optimizer", None)

    # -- wb.fit ------------------------------------------------------------------------------------

    def shard_source(self, source: Any) -> Any:
        """Keep a sample of the data, from which a model may get its weights' shapes."""
        self._sample = source.peek()
        return source

    @property
    def eval_shard(self) -> tuple[int, int]:
        """Keep batches whole; each worker takes one at a time."""
        return 0, 1

    def prepare(self, job: Job) -> None:
        """Build the model and the optimizer on the servers if they are not built yet."""
        check_model(job.model, self.distribution)
        self._trains(job.model)
        assert self.closures is not None, "internal error: prepare was not called"
        self.closures.announced()
        trainer = Trainer(self.distribution, job, 1, self._sample)
        initialise(self.context, job.model)
        self._optimizer = trainer.optimizer
        self._carried = Coordinated(self.closures, trainer, self.world_size)

    def run_loop(self, training: Any) -> StepResult | None:
        """Take all steps at once, because closures have no order."""
        return self._working.run_loop(training)

    def step(self, share: Share) -> StepResult:
        """Refuse: see `run_loop`."""
        raise FitError(
            "This strategy cannot take the steps of a run one by one: it schedules all steps "
            "together.",
            code="WB-FIT-096",
        )

    def evaluate(self, shares: Iterable[Share]) -> dict[str, float]:
        """Return loss and metrics over an evaluation set."""
        return self._working.evaluate(shares)

    def finish(self) -> None:
        """Let `model.fit` and the user's own loops continue."""
        self._carried = None

    @property
    def _working(self) -> Coordinated:
        assert self._carried is not None, "prepare comes first"
        return self._carried

    # -- what stays --------------------------------------------------------------------------------

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the trained model's weights by name, as they were when the cell ended."""
        return self._final

    def state(self) -> dict[str, Any]:
        """Return model and optimizer, as they are on the servers."""
        return state_of(self._model, self._optimizer)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned."""
        restore(self._model, self._optimizer, state)

    def close(self) -> None:
        """Release the user's model."""
        self._model = self._optimizer = None
        self._final = {}
