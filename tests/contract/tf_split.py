"""What the tests of TensorFlow's model_split train."""

from __future__ import annotations

from typing import Any

from tf_harness import Report, run

NAMES = {
    "SIZES": (120, 24), "DTYPE": "float32", "OPTIMIZER": "SGD", "EXTRA": {}, "GRAPH": True,
    "STEPS": 20,
}  # fmt: skip

WIDE = """
import keras, numpy as np
rng = np.random.default_rng(0)
x, y = rng.normal(size=(256, 64)).astype("float32"), rng.integers(0, 4, 256)
tanh = [keras.layers.Dense(256, "tanh", name=f"fc{i}") for i in range(5)]
if FUNCTIONAL:
    inputs = keras.Input((64,))
    out = inputs
    for layer in tanh:
        out = layer(out)
    out = keras.layers.Dense(4, name="head")(keras.layers.add([out, tanh[0](inputs)]))
    model = keras.Model(inputs, out)
else:
    model = keras.Sequential([*tanh, keras.layers.Dropout(0.2), keras.layers.Dense(4, name="head")])
model.compile(
    optimizer=keras.optimizers.SGD(0.05, momentum=0.9), metrics=["accuracy"],
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), **EXTRA,
)
history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, validation_data=(x, y))
score = model.evaluate(x, y, verbose=0)
predicted = model.predict(x, verbose=0)
devices = [variable.value.device[-5:] for variable in model.trainable_variables]
slots = [variable.value.device[-5:] for variable in model.optimizer.variables[2:]]
"""


def train(strategy: str, cell: str, workers: int = 1, **settings: Any) -> Report:
    faults, options = settings.pop("faults", ()), settings.pop("options", {})
    names = {**NAMES, "FUNCTIONAL": False, **settings}
    return run(strategy, cell, workers, faults=faults, options=options, names=names)


def furthest(report: Report, truth: Report) -> float:
    assert truth.weights
    assert report.weights.keys() == truth.weights.keys()
    return max(float(abs(report.weights[k] - truth.weights[k]).max()) for k in truth.weights)
