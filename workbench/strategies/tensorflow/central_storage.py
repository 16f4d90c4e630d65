"""Central storage: parameters lie on one device, replicas on all devices compute.

Nothing is kept twice. Each replica reads the parameters anew in every step and sends its gradients
to where they lie; there they are added up, and the optimizer runs once:

    device 0:  forward, backward --+                             +--> read by device 0
    device 1:  forward, backward --+--> sum --> update --> v ----+--> read by device 1
    device 2:  forward, backward --+       (on one device)       +--> read by device 2

The step waits for the slowest device, as in `mirrored`. Less memory is spent on parameters and
optimizer; in exchange the one device carries all the traffic.

Under Keras a mean is kept of what replicas write in the step (BatchNorm's statistics), and the
seeds of Dropout are replica 0's: see `keras/patches.py`.

Sources: tf.distribute.experimental.CentralStorageStrategy,
https://www.tensorflow.org/guide/distributed_training#centralstoragestrategy; Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014, for the idea with one server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from .keras.patches import central_storage
from .parts.replicated import Replicated


class CentralStorage(Replicated):
    """Synchronous training with parameters on one device."""

    def build(self) -> tf.distribute.Strategy:
        """Return the strategy over this engine's devices."""
        where = self.options.get("parameter_device", "auto")
        if where == "auto":
            where = self.devices[0]
        elif where == "cpu":
            where = "CPU:0"
        return tf.distribute.experimental.CentralStorageStrategy(self.devices, where)

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """As all strategies, with Keras repaired for variables that all replicas write to."""
        with super().around_cell() as names, central_storage():
            yield names
