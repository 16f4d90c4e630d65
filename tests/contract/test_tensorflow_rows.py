"""Embeddings: rows that several replicas, or one batch, use repeatedly count as their sum."""

from __future__ import annotations

import functools

import pytest
from needs import need
from tf_harness import Report, clean, run

need("tensorflow")
pytestmark = pytest.mark.tensorflow
CLOSE = 1e-8  # thirds of a batch are weighed in float32

CELL = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(0)
keras.config.set_floatx("float64"); keras.config.set_dtype_policy("float64")

class Places(keras.layers.Layer):
    '''Adds a row for each place: once per replica, whatever its share of the batch.'''
    def __init__(self):
        super().__init__()
        self.rows = keras.layers.Embedding(5, 4)
    def build(self, shape):
        self.rows.build(())
    def call(self, x):
        return x + self.rows(tf.range(5))[None]

x = np.random.default_rng(0).integers(0, 6, (48, 5))
y = np.random.default_rng(1).normal(size=(48, 1))
model = keras.Sequential([keras.layers.Embedding(6, 4), Places(), keras.layers.Flatten(),
                          keras.layers.Dense(1)])
make = getattr(keras.optimizers, OPTIMIZER)
loss = keras.losses.MeanSquaredError()
try:
    if WAY == "fit":
        wb.fit(model, (x, y), loss=loss, optimizer=lambda p: make(0.05), batch_size=24, steps=4,
               shuffle=False, **EXTRA)
    elif WAY == "keras":
        model.compile(optimizer=make(0.05), loss=loss)
        model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
    else:
        model.build((None, 5))
        optimizer = make(0.05)
        optimizer.build(model.trainable_variables)
        for step in range(4):
            part = slice(24 * (step % 2), 24 * (step % 2) + 24)
            with tf.GradientTape() as tape:
                value = tf.reduce_mean((model(x[part]) - y[part]) ** 2)
            found = tape.gradient(value, [v.value for v in model.trainable_variables])
            whole = [tf.convert_to_tensor(gradient) for gradient in found]
            strategy.run(lambda: optimizer.apply(whole, model.trainable_variables))
finally:
    keras.config.set_floatx("float32"); keras.config.set_dtype_policy("float32")
"""


@functools.cache
def train(strategy: str, workers: int, way: str, optimizer: str, **extra: float) -> Report:
    names = {"WAY": way, "OPTIMIZER": optimizer, "EXTRA": extra}
    return clean(run(strategy, CELL, workers, names=names))


def apart(report: Report, truth: Report) -> float:
    assert report.weights.keys() == truth.weights.keys()
    assert len(truth.weights) == 4
    return max(float(abs(report.weights[k] - truth.weights[k]).max()) for k in truth.weights)


@pytest.mark.parametrize("way", ["fit", "keras"])
@pytest.mark.parametrize("optimizer", ["Adam", "Adagrad", "SGD"])
@pytest.mark.parametrize(("strategy", "workers"), [("mirrored", 2), ("central_storage", 3)])
def test_replicas_that_share_rows_train_as_one_device(strategy, workers, optimizer, way):
    truth = train("one_device", 1, way, optimizer)
    assert apart(train(strategy, workers, way, optimizer), truth) < CLOSE


@pytest.mark.parametrize("extra", [{"accumulate": 3}, {"clip_norm": 0.05}], ids=str)
def test_micro_batches_and_clipping_add_rows_up_too(extra):
    whole = {name: value for name, value in extra.items() if name != "accumulate"}
    truth = train("one_device", 1, "fit", "Adam", **whole)
    assert apart(train("mirrored", 2, "fit", "Adam", **extra), truth) < CLOSE


def test_rows_that_a_batch_repeats_count_as_a_whole_gradient():
    truth = train("one_device", 1, "whole", "Adam")
    assert apart(train("one_device", 1, "fit", "Adam"), truth) < CLOSE


def test_keras_is_left_as_it_was():
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    before = TFOptimizer._all_reduce_sum_gradients
    train("mirrored", 2, "keras", "Adam")
    assert TFOptimizer._all_reduce_sum_gradients is before
