"""A tutorial's Keras cell runs as it is: it makes its own strategy and opens its scope.

`keras.datasets.mnist` needs the network, so a cell before it puts enlarged digits in its place.
"""

from __future__ import annotations

import pytest
from needs import need

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]

OFFLINE = """%%distributed --framework tensorflow
import numpy as np
import tensorflow as tf

def load_data():
    parts = [wb.data.digits(split, arrays=True, as_mnist=True) for split in ("train", "test")]
    return [((255 * x).astype(np.uint8), y.astype(np.uint8)) for x, y in parts]

tf.keras.datasets.mnist.load_data = load_data
"""
TUTORIAL = """%%distributed mirrored --framework tensorflow --name tutorial --plot off
import tensorflow as tf
import numpy as np

(x_train, y_train), (x_test, y_test) = tf.keras.datasets.mnist.load_data()
x_train, x_test = x_train / 255.0, x_test / 255.0

def create_model():
    model = tf.keras.models.Sequential([
        tf.keras.layers.Flatten(input_shape=(28, 28)),
        tf.keras.layers.Dense(128, activation='relu'),
        tf.keras.layers.Dropout(0.2),
        tf.keras.layers.Dense(10)
    ])
    return model

strategy = tf.distribute.MirroredStrategy()

with strategy.scope():
    model = create_model()
    model.compile(optimizer='adam',
                  loss=tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                  metrics=['accuracy'])

model.fit(x_train, y_train, epochs=10)
"""


def test_the_cell_of_a_tutorial_trains_under_the_strategy_of_the_line(book):
    need("tensorflow")
    book.ok(OFFLINE)
    book.ok(TUTORIAL)
    run = book["_run"]
    assert run.state == "finished"
    assert len(run.engines) == 2  # both replicas
    assert run.history.totals.samples == 10 * 1437
    assert run.history["loss"][-1] < run.history["loss"][0] / 4
