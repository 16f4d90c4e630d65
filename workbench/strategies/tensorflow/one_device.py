"""One device: the textbook's training loop, the baseline of every other strategy.

    batch -> forward -> loss -> backward -> optimizer -> next batch

There is only one replica, so the sync wait is 0 and no bytes are sent.

Sources: tf.distribute.OneDeviceStrategy,
https://www.tensorflow.org/guide/distributed_training#other_strategies; Robbins and Monro, A
Stochastic Approximation Method, 1951.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from .keras.replicated import Replicated


def naive_step(model: Any, loss_fn: Any, optimizer: Any, x: Any, y: Any) -> float:
    """Take one step on a batch: x (B, ...), y (B, ...). Return its mean loss."""
    with tf.GradientTape() as tape:
        loss = loss_fn(y, model(x, training=True))  # mean over the B samples
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return float(loss)


class OneDevice(Replicated):
    """A single replica."""

    def build(self) -> tf.distribute.Strategy:
        """Return the strategy on this engine's first device."""
        return tf.distribute.OneDeviceStrategy(self.devices[0])
