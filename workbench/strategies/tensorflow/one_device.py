"""One device: the textbook's training loop, the yardstick of every other strategy.

    for each batch:
        gradients = backward(loss(model(x), y))
        model = optimizer(model, gradients)

    batch -> forward -> loss -> backward -> optimizer -> next batch

Nothing is communicated, so nobody waits: sync wait is 0 and no bytes are sent.

Sources: tf.distribute.OneDeviceStrategy,
https://www.tensorflow.org/guide/distributed_training#other_strategies; Robbins and Monro, A
Stochastic Approximation Method, 1951.
"""

from __future__ import annotations

import tensorflow as tf

from .keras.replicated import Replicated


class OneDevice(Replicated):
    """A single replica."""

    def build(self) -> tf.distribute.Strategy:
        """Return the strategy on this engine's first device."""
        return tf.distribute.OneDeviceStrategy(self.devices[0])
