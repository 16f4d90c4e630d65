"""Mirrored: one engine holds a replica on each of its devices.

Every replica holds all parameters and computes a share of each batch. The gradients of all replicas
are added up. Then each replica updates its own copy of the parameters, so the copies stay equal:

    device 0:  forward, backward --+                     +-> update
    device 1:  forward, backward --+-- all-reduce (sum) -+-> update
    device 2:  forward, backward --+                     +-> update

Some Keras layers also keep values that are not learnt from gradients (BatchNorm's moving
statistics). These values are averaged over the replicas at the end of each step. In BatchNorm, each
replica normalises over its own share of the batch.

With some Embeddings, the steps of Adam, RMSprop and Adagrad are not the same as on one device.
TensorFlow without Workbench has the same difference. The gradient of an Embedding is a list of
rows, one row for each lookup, and these optimizers square each row separately. If a lookup depends
on a sample, only the replica with this sample makes the lookup. So the list has one row for this
lookup, as on one device. Other lookups do not depend on the samples, for example lookups of
positions (0, 1, 2, ...). Every replica makes such a lookup. So the list has n rows for this
lookup, but only one row on one device. The sum of the n rows is equal to the one row. But the
sum of the squares of the n rows is not the square of the one row. So the steps differ. With SGD the
steps are equal.

The step waits for the slowest device. Each replica's loss is divided by the number of replicas
(Keras does this automatically). So the sum of the gradients is the gradient of the mean loss of the
batch.

Sources: tf.distribute.MirroredStrategy, https://www.tensorflow.org/guide/distributed_training;
Abadi et al., TensorFlow: A system for large-scale machine learning, OSDI 2016, section 4.4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from .keras.replicated import Replicated

CROSS_DEVICE_OPS: dict[str, Callable[[], Any]] = {
    "nccl": tf.distribute.NcclAllReduce,
    "hierarchical": tf.distribute.HierarchicalCopyAllReduce,
    "reduce_to_one": tf.distribute.ReductionToOneDevice,
    "ring": lambda: None,  # TensorFlow's own choice: collective ops in a ring
}


def naive_step(
    replicas: Sequence[Any], devices: Sequence[str], loss_fn: Any, x: Any, y: Any
) -> float:
    """Take one step on a batch x (B, ...); each replica takes B/n samples. Return the mean loss.

    The replicas compute one after the other here. `MirroredStrategy` has a thread for each, adds up
    on the devices, and compiles the step as one graph.

    Args:
        replicas: n pairs of a model and its own optimizer; the models are equal.
    """
    losses, gradients = [], []
    shares = zip(tf.split(x, len(devices)), tf.split(y, len(devices)), strict=True)
    for (model, _), device, (inputs, targets) in zip(replicas, devices, shares, strict=True):
        with tf.device(device), tf.GradientTape() as tape:
            losses.append(loss_fn(targets, model(inputs, training=True)))  # mean over the share
        gradients.append(tape.gradient(losses[-1], model.trainable_variables))
    means = [tf.add_n(parts) / len(devices) for parts in zip(*gradients, strict=True)]
    for (model, optimizer), device in zip(replicas, devices, strict=True):
        with tf.device(device):
            optimizer.apply_gradients(zip(means, model.trainable_variables, strict=True))
    return float(tf.add_n(losses)) / len(devices)


class Mirrored(Replicated):
    """Synchronous training on all devices of one engine."""

    def build(self) -> tf.distribute.Strategy:
        """Return the strategy over this engine's devices."""
        chosen = self.options.get("cross_device_ops", "auto")
        if chosen == "auto":
            # In a ring, a second strategy in one process fails, because the keys of its collectives
            # are already used.
            chosen = "nccl" if self.on_gpus else "reduce_to_one"
        return tf.distribute.MirroredStrategy(
            self.devices, cross_device_ops=CROSS_DEVICE_OPS[chosen]()
        )
