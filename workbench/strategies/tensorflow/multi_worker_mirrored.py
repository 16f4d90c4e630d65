"""Multi-worker mirrored: one engine per worker, each with a full copy of the parameters.

Every worker computes its share of each batch. Then the gradients are added up, in a ring or with
NCCL. In a ring, each engine receives gradients from one neighbour, adds its own gradients to them,
and sends the sum to the other neighbour. At the end all workers apply the same sum, so their copies
of the model stay equal, bit for bit:

    worker 0:  forward, backward --+                     +-> update
                                   |    <- ring / NCCL -> |
    worker 1:  forward, backward --+-- all-reduce (sum) -+-> update
                                   |                      |
    worker 2:  forward, backward --+                     +-> update

Workers find each other by the addresses in `TF_CONFIG`, which Workbench sets for the duration of
the run:

    TF_CONFIG = {"cluster": {"worker": [address of 0, of 1, of 2]}, "task": {"index": rank}}

Some Keras layers also keep values that are not learnt from gradients (BatchNorm's moving
statistics). These values are averaged over the workers at the end of each step, so saved models are
equal too. In BatchNorm, each worker normalises over its own share of the batch.

With Keras, all workers can save to the same path. Each worker saves the complete model or the
complete weights, and the file that is saved last remains. `CSVLogger`, `TensorBoard` and
`BackupAndRestore` write only on rank 0. If a cell writes other files, use a different path for each
rank, or write them only on rank 0 (`if rank == 0:`).

Workbench sets `TF_CONFIG` only when all workers are ready. Otherwise TensorFlow would wait forever
for a missing worker, and block every thread of its process. If a collective operation (such as an
all-reduce) hangs later, it ends with an error after `timeout_s` seconds.

Every worker opens a gRPC server (a socket for messages from other processes) for the run. The gRPC
server listens on every network interface, even if its address is 127.0.0.1. After the run, no
process can connect to it.

The workers form a TensorFlow cluster (a group of TensorFlow processes). When a process joins such a
cluster, TensorFlow deletes all tensors and variables of this process. So the engines lose the
TensorFlow tensors and variables of earlier cells. NumPy arrays are kept. The model that the run
trains is also kept: Workbench restores its variables at the end of the run.

Sources: tf.distribute.MultiWorkerMirroredStrategy,
https://www.tensorflow.org/tutorials/distribute/multi_worker_with_keras; Patarasuk and Yuan,
Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from numpy.typing import NDArray

from ...engine.tensorflow import accelerator
from ...engine.tensorflow.support import configure, reset, seed_all
from ...errors import ClusterError
from ...shared import events
from .coordinator.servers import listening, shut, swap_addresses
from .keras.fit import files_shared
from .keras.patches import multi_worker
from .keras.replicated import Replicated
from .parts.models import Homecoming, owner

LEAVE_S = 10.0
"""How long a worker that has finished keeps answering the others."""

COMMUNICATION = tf.distribute.experimental.CommunicationImplementation


class MultiWorkerMirrored(Replicated):
    """Synchronous training over several engines."""

    _final: dict[str, NDArray[Any]] | None = None

    def build(self) -> tf.distribute.Strategy:
        """Return the strategy over all workers; TF_CONFIG names them."""
        wanted = self.options.get("communication", "auto")
        if wanted == "auto" and self.on_gpus and self.context.spec.sharers > 1:
            wanted = "ring"  # NCCL does not accept a GPU that two workers share
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=COMMUNICATION[wanted.upper()],
            timeout_seconds=self.options.get("timeout_s", 120.0),
        )
        if self.world_size == 1:
            return tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        return tf.distribute.MultiWorkerMirroredStrategy(
            tf.distribute.cluster_resolver.TFConfigClusterResolver(), options
        )

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """Join the other workers, run the cell in the strategy's scope, keep the model."""
        before = listening()
        with self._tf_config():
            try:
                self._begin_anew()
                with (
                    super().around_cell() as names,
                    multi_worker(self.distribution, self._note),
                    files_shared(self.context, self._note),
                ):
                    seed_all(int(self.context.spec.overrides.get("seed", 0)))
                    yield names
            except BaseException:
                self.context.failed = True
                raise
            finally:
                self._leave(before)

    @contextlib.contextmanager
    def _tf_config(self) -> Iterator[None]:
        """Set TF_CONFIG as soon as all workers have sent their addresses.

        Raises:
            ClusterError: A worker did not answer.
        """
        if self.world_size == 1:
            yield
            return
        ranks = range(self.world_size)
        addresses = swap_addresses(self.context, ranks)
        workers = [addresses[rank] for rank in ranks]
        task = {"type": "worker", "index": self.rank}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": workers}, "task": task})
        try:
            yield
        finally:
            os.environ.pop("TF_CONFIG", None)

    def _begin_anew(self) -> None:
        """Reset TensorFlow to its state after the import; otherwise it cannot join a cluster."""
        spec = self.context.spec
        if self.world_size == 1:
            return
        reset()
        configure(1, max(1, spec.threads), accelerator.own(spec))
        self._note(
            "TensorFlow starts one gRPC server on each worker. These servers listen on every "
            "network interface until the run ends."
        )

    def _note(self, text: str) -> None:
        if self.rank == 0:
            self.context.emit(events.Noted(rank=0, text=text))

    def _leave(self, before: set[tuple[int, str]]) -> None:
        """Copy the model into this engine, then leave the cluster.

        Args:
            before: Sockets that do not belong to the run.
        """
        if self.world_size == 1:
            return
        home = Homecoming()
        try:
            with contextlib.suppress(tf.errors.OpError):
                home.pack(self._trained, self._loop and self._loop.optimizer)
                self._final = home.weights
            self.distribution = None
            self._let_others_finish()
        finally:  # also if an interrupt comes first
            try:
                self.distribution = None
                reset()
            finally:
                shut(listening() - before)
            home.unpack()

    def _let_others_finish(self) -> None:
        """Wait for the other workers, which may still be fetching data from this worker.

        After a failure do not wait, so that the others notice that this worker has ended.
        """
        if not self.context.failed:
            self.context.post("left")
            with contextlib.suppress(ClusterError):
                self.context.board.wait("left", range(self.world_size), LEAVE_S)

    @property
    def _trained(self) -> Any:
        if self._model is None and self._loop is not None:
            return owner(self._loop.optimizer)
        return self._model

    def weights(self) -> dict[str, NDArray[Any]]:
        """Return the trained model's weights by name; equal on all workers."""
        return super().weights() if self._final is None else self._final
