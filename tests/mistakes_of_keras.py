"""Mistakes with Keras (see `mistakes.py`)."""

from __future__ import annotations

from mistakes import Mistake

KERAS = (
    "import keras, numpy as np, tensorflow as tf\n"
    "x, y = np.ones((64, 4), 'float32'), np.ones((64, 3), 'float32')\n"
    "model = keras.Sequential([keras.layers.Dense(3)])\n"
)
COMPILED = KERAS + "model.compile('sgd', 'mse')\n"


def keras(body: str, head: str = COMPILED, strategy: str = "mirrored") -> str:
    """Return a cell that trains a Keras model."""
    return f"%%distributed {strategy} --framework tensorflow --plot off\n{head}{body}"


TENSORFLOW = [
    Mistake(
        "The Keras model is not compiled",
        keras("model.fit(x, y, verbose=0)", KERAS),
        "WB-FIT-082",
        keras("model.fit(x, y, verbose=0)"),
        framework="tensorflow",
    ),
    Mistake(
        "The batch does not divide over the replicas",
        keras("model.fit(x, y, batch_size=31, verbose=0)"),
        "WB-FIT-073",
        keras("model.fit(x, y, batch_size=32, verbose=0)"),
        framework="tensorflow",
    ),
    Mistake(
        "The tf.data set is batched with another size",
        keras(
            "data = tf.data.Dataset.from_tensor_slices((x, y))\n"
            "model.fit(data.batch(32), batch_size=16, verbose=0)"
        ),
        "WB-FIT-090",
        keras(
            "data = tf.data.Dataset.from_tensor_slices((x, y))\n"
            "model.fit(data.batch(32), verbose=0)"
        ),
        framework="tensorflow",
    ),
    Mistake(
        "PyTorch's data for a Keras model",
        keras(
            "import torch\n"
            "data = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 3))\n"
            "model.fit(torch.utils.data.DataLoader(data, batch_size=32), verbose=0)"
        ),
        "WB-FIT-088",
        framework="tensorflow",
        within_s=30,
    ),
    Mistake(
        "A strategy that TensorFlow does not have",
        keras("model.fit(x, y)", strategy="sharded"),
        "WB-PLAN-001",
        framework="tensorflow",
    ),
    Mistake(
        "The data has another shape than the Keras model takes",
        keras("model.build((None, 5))\nmodel.fit(x, y, verbose=0)"),
        "WB-RUN-066",
        keras("model.build((None, 4))\nmodel.fit(x, y, verbose=0)"),
        framework="tensorflow",
    ),
]
