"""A worker's death: its closure goes back into the queue, the others go on.

TensorFlow's own way is to wait until the worker is back, and to connect the whole cluster anew: it
hangs for as long as that takes, and the end of the run with it. Here a worker that has died stays
away until the next run.

Source: `WorkerPreemptionHandler` in
`tensorflow/python/distribute/coordinator/cluster_coordinator.py`, whose place this takes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute.coordinator import cluster_coordinator

FAILURES = (
    tf.errors.OpError,
    cluster_coordinator.ClosureInputError,
    cluster_coordinator.ClosureAbortedError,
)


class Survivors:
    """Handles the failures of a coordinator's workers.

    Args:
        cluster: The `Cluster` of a ClusterCoordinator.
    """

    def __init__(self, cluster: Any) -> None:
        cluster.failure_handler.stop()
        cluster.failure_handler = self
        self._cluster = cluster
        self._living = {worker.device_name: worker for worker in cluster.workers}
        for worker in cluster.workers:
            worker.failure_handler = self

    @contextlib.contextmanager
    def wait_on_failure(
        self,
        on_failure_fn: Callable[[BaseException], None] | None = None,
        on_transient_failure_fn: Callable[[], None] | None = None,
        on_recovery_fn: Callable[[], None] | None = None,
        worker_device_name: str = "",
    ) -> Iterator[None]:
        """Run a closure; called on its worker's thread."""
        try:
            yield
        except FAILURES as error:
            derived = isinstance(error, tf.errors.CancelledError) and "/job:" in str(error)
            if derived or self._cluster._record_and_ignore_transient_ps_failure(error):
                if on_transient_failure_fn is not None:
                    on_transient_failure_fn()
                return
            worker = self._living.get(worker_device_name)
            cancelled = self._cluster.closure_queue._cancellation_mgr.is_cancelled
            lost = cluster_coordinator._is_worker_failure(error) and not cancelled
            if not lost or worker is None or len(self._living) == 1:
                raise
            del self._living[worker_device_name]
            if on_failure_fn is not None:
                on_failure_fn(error)
            worker.stop()

    def stop(self) -> None:
        """Nothing goes on that would have to be stopped."""
