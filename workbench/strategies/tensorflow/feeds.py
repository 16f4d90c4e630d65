"""How a closure gets its samples.

    Resident: the arrays are sent to every worker once; a closure is told which samples to take
    Fed:      a closure is sent its samples

Whichever worker runs a closure, its samples are the same, so the order is that of one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.distribute.coordinator import values

RESIDENT_BYTES = 1 << 30
"""Arrays that are larger are sent piece by piece."""


class Resident:
    """Arrays that lie on every worker.

    Args:
        arrays: Nested arrays of one length.
    """

    def __init__(self, coordinator: Any, arrays: Any) -> None:
        place = tf.function(lambda *parts: [tf.identity(part) for part in parts], autograph=False)
        parts = [tf.convert_to_tensor(array) for array in tf.nest.flatten(arrays)]
        workers = coordinator._cluster.workers
        self._structure = arrays
        self._data = values.PerWorkerValues(
            tuple(worker.create_resource(place, args=tuple(parts)) for worker in workers)
        )

    def args(self, places: Any) -> tuple[Any, ...]:
        """Return what a closure for the samples at these places is called with."""
        return self._data, tf.constant(places)

    def function(self, body: Callable[[Any], Any]) -> Any:
        """Return the closure's function, from what it does with a batch."""

        def closure(data: Any, places: Any) -> Any:
            batch = [tf.gather(part, places) for part in data]
            return body(tf.nest.pack_sequence_as(self._structure, batch))

        return tf.function(closure, autograph=False)


class Fed:
    """Batches that travel with their closure."""

    def args(self, batch: Any) -> tuple[Any, ...]:
        """Return what a closure for a batch is called with."""
        return (tf.nest.map_structure(tf.convert_to_tensor, batch),)

    def function(self, body: Callable[[Any], Any]) -> Any:
        """Return the closure's function, from what it does with a batch."""
        return tf.function(body, autograph=False)


def fits(arrays: Any) -> bool:
    """Whether data are arrays that may lie on every worker."""
    parts = tf.nest.flatten(arrays)
    return all(isinstance(part, np.ndarray) and part.dtype.kind in "biuf" for part in parts) and (
        sum(part.nbytes for part in parts) <= RESIDENT_BYTES
    )
