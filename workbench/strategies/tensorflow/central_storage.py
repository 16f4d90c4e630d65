"""Central storage: parameters are on one device; replicas on all devices compute.

The parameters and the optimizer exist only once. In every step each replica reads the parameters
again and sends its gradients to the device that holds the parameters. This device adds up the
gradients, and the optimizer runs on it once:

    device 0:  forward, backward --+                             +--> read by device 0
    device 1:  forward, backward --+--> sum --> update --> v ----+--> read by device 1
    device 2:  forward, backward --+       (on one device)       +--> read by device 2

The step waits for the slowest device, as under `mirrored`. The parameters and the optimizer need
less memory than under `mirrored`, but all parameters and gradients pass through one device.

Some variables of a layer are not changed by the optimizer (BatchNorm's statistics, Dropout's
seeds). Several replicas can write to such a variable in one step. If the values are floating-point
numbers (BatchNorm's statistics), Workbench makes Keras store the mean of the replicas' values. If
the values are whole numbers (Dropout's seeds), Keras stores the value of replica 0.

Sources: tf.distribute.experimental.CentralStorageStrategy,
https://www.tensorflow.org/guide/distributed_training#centralstoragestrategy; Li et al., Scaling
Distributed Machine Learning with the Parameter Server, OSDI 2014 (a similar method, with servers
instead of a device).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from .keras.patches import central_storage
from .keras.replicated import Replicated


def naive_step(
    model: Any, devices: Sequence[str], loss_fn: Any, optimizer: Any, x: Any, y: Any
) -> float:
    """Take one step on a batch x (B, ...); each device takes B/n samples. Return the mean loss.

    Here the devices compute one after the other, with the same model. Its variables and optimizer
    are on one of the devices. TensorFlow's strategy has a thread for each device.
    """
    losses, gradients = [], []
    shares = zip(tf.split(x, len(devices)), tf.split(y, len(devices)), strict=True)
    for device, (inputs, targets) in zip(devices, shares, strict=True):
        with tf.device(device), tf.GradientTape() as tape:
            losses.append(loss_fn(targets, model(inputs, training=True)))  # reads the variables
        gradients.append(tape.gradient(losses[-1], model.trainable_variables))
    means = [tf.add_n(parts) / len(devices) for parts in zip(*gradients, strict=True)]
    optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))  # once
    return float(tf.add_n(losses)) / len(devices)


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
        """Do what all strategies do, with Keras repaired for variables that replicas write to."""
        with super().around_cell() as names, central_storage():
            yield names
