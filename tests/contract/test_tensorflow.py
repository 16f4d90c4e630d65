"""What TensorFlow's strategies must honour: those whose replicas are all in one engine."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
import tf_cells
from needs import need
from tf_cases import CASES, SEVERAL, WIDEST, in_every_way
from tf_harness import Report, clean, run

from workbench import catalog
from workbench.shared import record

need("tensorflow")
pytestmark = pytest.mark.tensorflow


def train(strategy: str, way: str, workers: int = 1, **settings: Any) -> Report:
    names = {
        "SIZES": (120, 24), "DTYPE": "float32", "OPTIMIZER": "SGD", "EXTRA": {}, "GRAPH": True,
        "STEPS": 20,
    }  # fmt: skip
    return clean(run(strategy, tf_cells.WAYS[way], workers, names={**names, **settings}))


@functools.cache
def truth_of(way: str, optimizer: str, dtype: str) -> Report:
    return train("one_device", way, OPTIMIZER=optimizer, DTYPE=dtype)


@functools.cache
def unequal_truth(**extra: Any) -> Report:
    return train("one_device", "fit", SIZES=(100, 23), EXTRA=extra)


def furthest(report: Report, truth: Report) -> float:
    assert report.weights.keys() == truth.weights.keys()
    assert truth.weights
    return max(float(abs(report.weights[k] - truth.weights[k]).max()) for k in truth.weights)


@pytest.mark.parametrize(("entry", "count", "way"), in_every_way(CASES))
def test_trains_exactly_as_one_device_does(entry: catalog.Strategy, count: int, way: str) -> None:
    same(entry, count, way, "SGD", "float32", 5e-7)


# Of an optimizer with state, 64 bits are the stricter case; what is held for three replicas is what
# is held for two.
@pytest.mark.parametrize(("entry", "count", "way"), in_every_way(WIDEST))
def test_an_optimizer_with_state_is_exact_too(
    entry: catalog.Strategy, count: int, way: str
) -> None:
    same(entry, count, way, "Adam", "float64", 1e-10)


def same(
    entry: catalog.Strategy, count: int, way: str, optimizer: str, dtype: str, tolerance: float
) -> None:
    """Check that a strategy trains as one device does."""
    truth = truth_of(way, optimizer, dtype)
    report = train(entry.name, way, count, OPTIMIZER=optimizer, DTYPE=dtype)
    assert report.trained == truth.trained == 20
    assert furthest(report, truth) <= tolerance
    losses, true_losses = (record.derive(each.rows).loss for each in (report, truth))
    assert np.allclose(losses, true_losses, rtol=0, atol=max(10 * tolerance, 1e-6))


@pytest.mark.parametrize("extra", [{}, {"accumulate": 3}, {"clip_norm": 0.05}], ids=str)
@pytest.mark.parametrize(("entry", "count"), SEVERAL)
def test_fit_is_exact_where_shares_are_unequal(
    entry: catalog.Strategy, count: int, extra: dict[str, Any]
) -> None:
    truth = unequal_truth(**extra)
    report = train(entry.name, "fit", count, SIZES=(100, 23), EXTRA=extra)
    assert report.rows["samples"].sum(axis=1).tolist() == ([23] * 4 + [8]) * 4
    assert furthest(report, truth) <= 1e-6
    for mine, theirs in zip(report.names["evals"], truth.names["evals"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


STATE = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(24, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
optimizer = keras.optimizers.SGD(0.02, momentum=0.9)
def train(steps):
    wb.fit(model, (x, y), loss=keras.losses.MeanSquaredError(), optimizer=optimizer,
           batch_size=24, steps=steps, shuffle=False)
if before is None:
    train(steps)
else:
    train(1)
    context.strategy.load_state(before)
    train(steps)
state = context.strategy.state()
"""


def test_state_goes_on_under_another_number_of_replicas() -> None:
    truth = clean(run("one_device", STATE, names={"before": None, "steps": 20}))
    first = clean(run("mirrored", STATE, 2, names={"before": None, "steps": 10}))
    names = {"before": first.names["state"], "steps": 10}
    second = clean(run("mirrored", STATE, 3, names=names))
    assert furthest(second, truth) <= 1e-6
    assert furthest(first, truth) > 1e-3


def test_an_eager_loop_is_recorded_too() -> None:
    truth = train("one_device", "loop", STEPS=5)
    report = train("mirrored", "loop", 2, STEPS=5, GRAPH=False)
    assert report.trained == 5
    assert furthest(report, truth) <= 5e-7


def test_a_strategy_without_all_reduce_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: replicas that keep their own gradients do not pass for one device."""
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    truth = train("one_device", "fit")
    monkeypatch.setattr(TFOptimizer, "_all_reduce_sum_gradients", lambda self, pairs: list(pairs))
    assert furthest(train("mirrored", "fit", 2), truth) > 1e-3


STOPPED = {
    "keras": """
class Stops(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if context.trained == 5:
            context.gate.halt_at("stop", 6)
model.compile(optimizer="sgd", loss="mse")
model.fit(x, y, batch_size=12, callbacks=[Stops()])
""",
    "fit": """
wb.fit(model, (x, y), loss=keras.losses.MeanSquaredError(), batch_size=12, steps=STEPS,
       optimizer=keras.optimizers.SGD(0.01),
       callbacks=lambda step, logs: step == 5 and context.gate.halt_at("stop", 6))
""",
}


@pytest.mark.parametrize("way", STOPPED)
def test_stop_ends_fit_at_the_agreed_step(way: str) -> None:
    cell = tf_cells.SLEEPY + STOPPED[way]
    report = clean(run("mirrored", cell, 2, names={"MILLIS": 1, "STEPS": 30}))
    assert report.trained == 7
    assert len(report.rows) == 7


def test_stop_raises_in_an_own_loop() -> None:
    cell = tf_cells.SLEEPY_WAYS["loop"].replace(
        "    train_step(batch)",
        "    train_step(batch)\n    if context.trained == 5: context.gate.halt_at('stop', 6)",
    )
    report = run("mirrored", cell, 2, names={"MILLIS": 1, "STEPS": 30})
    assert report.error is not None
    assert report.error.startswith("RunStopped")
    assert report.trained == 7
    assert report.left == []


WRONG = {
    "built outside": ("model.fit(x, y, batch_size=24)", "outside the scope of this run's strategy"),
    "indivisible": ("made(); model.fit(x, y, batch_size=25)", "batch_size=26"),
    "indivisible tf.data": (
        "made(); model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(25))",
        "WB-FIT-073",
    ),
    "single samples": (
        "made(); model.fit(tf.data.Dataset.from_tensor_slices((x, y[:, 0])))",
        "WB-FIT-089",
    ),
    "not compiled": ("made(compiled=False); model.fit(x, y, batch_size=24)", "WB-FIT-082"),
    "another batch": (
        "made(); wb.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(24), "
        "loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD(), batch_size=12)",
        "batches of 24, batch_size=12",
    ),
    "torch data": (
        "import torch; made(); wb.fit(model, torch.utils.data.TensorDataset(torch.ones(8, 4)), "
        "loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD(), batch_size=4)",
        "WB-FIT-033",
    ),
    "torch model": (
        "import torch; wb.fit(torch.nn.Linear(4, 1), (x, y), batch_size=4, "
        "loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD())",
        "WB-FIT-042",
    ),
    "a summed loss": (
        "made(); wb.fit(model, (x, y), batch_size=4, optimizer=keras.optimizers.SGD(), "
        "loss=keras.losses.MeanSquaredError(reduction='sum'))",
        "WB-FIT-102",
    ),
    "a scheduler": (
        "made(); wb.fit(model, (x, y), batch_size=4, optimizer=keras.optimizers.SGD(), "
        "loss=keras.losses.MeanSquaredError(), scheduler=print)",
        "scheduler",
    ),
    "prepare": ("made(); wb.prepare(model, None)", "cannot be used with wb.prepare"),
    "watch": ("made(); wb.watch(model, None)", "wb.watch"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_trained_is_refused(kind: str) -> None:
    import keras

    outside = keras.Sequential([keras.layers.Dense(1)])
    outside.compile(optimizer="sgd", loss="mse")
    begin = """
import keras, numpy as np, tensorflow as tf
x, y = np.ones((100, 4), "float32"), np.ones((100, 1), "float32")
def made(compiled=True):
    global model
    model = keras.Sequential([keras.layers.Dense(1)])
    if compiled:
        model.compile(optimizer="sgd", loss="mse")
"""
    source, words = WRONG[kind]
    report = run("mirrored", begin + source, 2, names={"model": outside})
    assert report.error is not None
    assert words in report.error
    assert report.trained == 0
    assert report.left == []
