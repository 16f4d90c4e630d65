"""Embeddings: optimizers treat the rows of a gradient as plain Keras does, and norms count sums."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np
import pytest
from needs import need
from tf_harness import Report, clean, run

need("tensorflow")
pytestmark = pytest.mark.tensorflow
CLOSE = 1e-8  # thirds of a batch are weighed in float32

MODEL = """
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
model = keras.Sequential([keras.layers.Embedding(6, 4), *([Places()] if PLACES else []),
                          keras.layers.Flatten(), keras.layers.Dense(1)])
make = getattr(keras.optimizers, OPTIMIZER)
loss = keras.losses.MeanSquaredError()
"""
KERAS = (
    MODEL
    + """
model.compile(optimizer=make(0.05), loss=loss)
model.fit(x, y, batch_size=24, epochs=2, shuffle=False, verbose=0)
"""
)
WB_FIT = (
    MODEL
    + """
wb.fit(model, (x, y), loss=loss, optimizer=lambda p: make(0.05), batch_size=24, steps=4,
       shuffle=False, **EXTRA)
"""
)


@contextlib.contextmanager
def float64() -> Any:
    import keras

    try:
        yield
    finally:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy("float32")


@functools.cache
def train(
    strategy: str, workers: int, way: str, optimizer: str, places: bool = False, **extra: float
) -> Report:
    names = {"OPTIMIZER": optimizer, "EXTRA": extra, "PLACES": places}
    cell = f"with float64():\n    exec({(KERAS if way == 'keras' else WB_FIT)!r}, globals())"
    return clean(run(strategy, cell, workers, names={**names, "float64": float64}))


@functools.cache
def plain(workers: int, optimizer: str, places: bool = False) -> list[np.ndarray]:
    """Return the weights after the same cell without Workbench, as TensorFlow and Keras have it."""
    import tensorflow as tf

    from workbench.engine.tensorflow.support import configure

    configure(8, 2)
    strategy = tf.distribute.OneDeviceStrategy("CPU:0")
    if workers > 1:
        strategy = tf.distribute.MirroredStrategy(
            [f"CPU:{i}" for i in range(workers)],
            cross_device_ops=tf.distribute.ReductionToOneDevice(),
        )
    names = {"OPTIMIZER": optimizer, "PLACES": places}
    with strategy.scope(), float64():
        exec(KERAS, names)
    return [weight.numpy() for weight in names["model"].weights]


def apart(report: Report, truth: Any) -> float:
    truth = list(truth.weights.values()) if isinstance(truth, Report) else truth
    found = list(report.weights.values())
    return max(float(abs(a - b).max()) for a, b in zip(found, truth, strict=True))


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "Adagrad"])
@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("one_device", 1), ("mirrored", 2), ("central_storage", 3), ("model_split", 2)],
)
def test_an_embedding_trains_as_in_plain_keras(strategy, workers, optimizer):
    assert apart(train(strategy, workers, "keras", optimizer), plain(1, optimizer)) < CLOSE


def test_wb_fit_trains_an_embedding_as_model_fit_does():
    truth = train("one_device", 1, "fit", "Adam")
    assert apart(truth, plain(1, "Adam")) < CLOSE
    assert apart(train("mirrored", 2, "fit", "Adam"), truth) < CLOSE


def test_rows_that_every_replica_looks_up_for_itself_train_as_in_plain_mirrored():
    report = train("mirrored", 2, "keras", "Adam", places=True)
    assert apart(report, plain(2, "Adam", places=True)) < CLOSE
    assert apart(report, plain(1, "Adam", places=True)) > CLOSE  # the pages say so
    assert apart(train("mirrored", 2, "keras", "SGD", places=True),
                 plain(1, "SGD", places=True)) < CLOSE  # fmt: skip


@pytest.mark.parametrize("extra", [{"accumulate": 3}, {"clip_norm": 0.05}], ids=str)
def test_micro_batches_and_clipping_see_the_whole_gradient(extra):
    whole = {name: value for name, value in extra.items() if name != "accumulate"}
    truth = train("one_device", 1, "fit", "Adam", **whole)
    assert apart(train("mirrored", 2, "fit", "Adam", **extra), truth) < CLOSE


def test_a_row_that_is_listed_several_times_counts_as_their_sum_in_a_norm():
    import tensorflow as tf

    from workbench.strategies.tensorflow.parts.replica import rows_once

    listed = tf.IndexedSlices(tf.constant([[1.0], [2.0], [4.0]]), tf.constant([3, 0, 3]), (5, 1))
    once = rows_once(listed)
    assert sorted(once.indices.numpy()) == [0, 3]
    assert (tf.convert_to_tensor(once) == tf.convert_to_tensor(listed)).numpy().all()
    dense = tf.constant([1.0])
    assert rows_once(dense) is dense
