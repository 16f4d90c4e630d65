"""Precision, compilation and schedules of `wb.fit`; loops that start from another run's weights."""

from __future__ import annotations

import functools
import json

import numpy as np
import pytest
import tf_cells
from needs import need
from tf_harness import clean, run

from workbench.shared import record

need("tensorflow")
pytestmark = pytest.mark.tensorflow

NAMES = {
    "SIZES": (120, 24), "DTYPE": "float32", "OPTIMIZER": "SGD", "EXTRA": {}, "GRAPH": True,
    "STEPS": 20,
}  # fmt: skip


def fit(strategy="mirrored", workers=2, cell=tf_cells.WB_FIT, **extra):
    return run(strategy, cell, workers, names={**NAMES, "EXTRA": extra})


@functools.cache
def plain():
    """A run that the others are held against; nothing of TensorFlow's outlives it."""
    report = clean(fit())
    report.names.clear()
    return report


def furthest(report, truth):
    return max(float(abs(report.weights[k] - truth.weights[k]).max()) for k in truth.weights)


@pytest.mark.parametrize(("strategy", "workers"), [("one_device", 1), ("mirrored", 2)])
def test_what_xla_compiles_trains_alike_and_is_measured(strategy, workers):
    truth, report = plain(), clean(fit(strategy, workers, compile=True))
    assert furthest(report, truth) < 1e-5
    assert np.isfinite(report.rows["compute_s"]).all()
    assert np.isfinite(report.rows["ready_s"]).all()


def test_bf16_computes_in_bfloat16_and_keeps_weights_in_float32():
    cell = tf_cells.WB_FIT.replace("model = keras", "seen = []\nmodel = keras").replace(
        'keras.layers.Dense(16, "tanh")',
        "keras.layers.Dense(16, lambda x: (seen.append(x.dtype.name), keras.ops.tanh(x))[1])",
    )
    truth, report = plain(), clean(fit(cell=cell, precision="bf16"))
    assert set(report.names["seen"]) == {"bfloat16"}
    assert {array.dtype.name for array in report.weights.values()} == {"float32"}
    assert 0 < furthest(report, truth) < 0.1
    layers = report.names["model"].layers
    assert {layer.dtype_policy.name for layer in layers} == {"float32"}  # afterwards


def test_fp16_is_refused_with_the_way_that_works():
    report = fit(precision="fp16")
    assert report.error is not None
    assert report.error.startswith("FitError")
    assert all(word in report.error for word in ("bf16", "mixed_float16", "model.fit"))


def test_a_schedule_is_what_the_optimizer_would_follow():
    cell = tf_cells.WB_FIT.replace("SGD(0.2,", "SGD(RATE,")
    assert cell != tf_cells.WB_FIT
    head = "import keras\nRATE = keras.optimizers.schedules.ExponentialDecay(0.2, 5, 0.5)\n"
    truth = clean(run("one_device", head + cell, names=NAMES))
    cell = head + cell.replace("SGD(RATE,", "SGD(0.7,")
    given = cell.replace("**EXTRA", "scheduler=RATE")
    assert furthest(clean(run("mirrored", given, 2, names=NAMES)), truth) < 1e-6
    given = cell.replace("**EXTRA", "scheduler=lambda step: 0.2 * 0.5 ** (step / 5)")
    assert furthest(clean(run("one_device", given, names=NAMES)), truth) < 1e-6


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("scheduler=lambda optimizer: optimizer.step()", ["WB-FIT-044", "raised"]),
        ("scheduler=0.1", ["WB-FIT-044", "ExponentialDecay"]),
    ],
)
def test_a_scheduler_of_another_kind_is_refused(cell, words):
    report = run("mirrored", tf_cells.WB_FIT.replace("**EXTRA", cell), 2, names=NAMES)
    assert report.error is not None
    assert report.error.startswith("FitError")
    assert all(word in report.error for word in words), report.error


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a run left its weights."""
    from workbench.history.disk import META

    folder = tmp_path_factory.mktemp("weights")
    report = clean(run("one_device", tf_cells.WB_FIT, names=NAMES))
    np.savez(folder / "weights.npz", **report.weights)
    (folder / META).write_text(json.dumps({"framework": "tensorflow"}))
    return str(folder)


@pytest.mark.parametrize(
    ("strategy", "workers"),
    [("one_device", 1), ("mirrored", 2), ("central_storage", 2), ("model_split", 2)],
)
def test_a_loop_starts_from_another_runs_weights(folder, strategy, workers):
    report = clean(run(strategy, tf_cells.OWN_LOOP, workers, names=NAMES, init_from=folder))
    alone = clean(run(strategy, tf_cells.OWN_LOOP, workers, names=NAMES))
    assert report.names["context"].initial_read
    assert report.names["shown"][0] < 0.9 * alone.names["shown"][0]  # it went on
    if workers == 1:
        truth = clean(run("one_device", tf_cells.WB_FIT, names=NAMES, init_from=folder))
        loss = np.nanmean(truth.rows["local_loss"], axis=1)
        # The order of samples differs, the weights at the start do not.
        assert abs(report.names["shown"][0] - loss[0]) < 0.3


def test_a_loop_that_is_not_traced_says_how_to(folder):
    report = run(
        "mirrored", tf_cells.OWN_LOOP, 2, names={**NAMES, "GRAPH": False}, init_from=folder
    )
    assert report.error is not None
    assert "@tf.function" in report.error
    assert report.trained == 0


def test_more_replicas_than_the_engine_has_devices_are_said_to_cost_its_variables():
    clean(fit())
    report = clean(fit("mirrored", 12))
    assert any("12" in note["text"] and "anew" in note["text"] for note in report.emitted("note"))
    again = clean(fit("mirrored", 12))
    assert not any("anew" in note["text"] for note in again.emitted("note"))


FLOAT16 = """
import keras, numpy as np, tensorflow as tf
keras.config.set_dtype_policy("mixed_float16")
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
y = x.sum(1, keepdims=True)
if OVERFLOWS:
    x[60] = 1e38  # the second replica's part of the second batch
model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1, dtype="float32")])
try:
    if WAY == "keras":
        model.compile("adam", "mse")
        told = model.fit(x, y, batch_size=32, epochs=2, shuffle=False).history["loss"]
    else:
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
        def step(a, b):
            with tf.GradientTape() as tape:
                each = tf.reduce_sum((model(a) - b) ** 2, 1)
                loss = tf.nn.compute_average_loss(each, global_batch_size=32)
                scaled = optimizer.scale_loss(loss)
            variables = model.trainable_variables
            optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables))
            return loss
        @tf.function
        def train(a, b):
            return strategy.reduce("SUM", strategy.run(step, args=(a, b)), axis=None)
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(32)
        told = [float(train(a, b)) for a, b in strategy.experimental_distribute_dataset(data)]
finally:
    keras.config.set_dtype_policy("float32")
"""


@pytest.mark.parametrize(
    ("strategy", "workers", "way"),
    [
        ("one_device", 1, "keras"),
        ("mirrored", 2, "keras"),
        ("mirrored", 2, "loop"),
        ("central_storage", 2, "keras"),
    ],
)
def test_float16_is_measured_as_any_other(strategy, workers, way):
    report = clean(run(strategy, FLOAT16, workers, names={"WAY": way, "OVERFLOWS": False}))
    told, loss = report.names["told"], record.derive(report.rows).loss
    assert (report.rows["samples"] == 32 // workers).all()
    if way == "keras":  # by epoch
        loss = loss.reshape(2, 3).mean(1)
    assert loss == pytest.approx(told, rel=1e-4)
    assert np.isfinite(report.rows["compute_s"]).all()
    assert np.isfinite(report.rows["ready_s"]).all()


def test_a_step_that_overflows_on_any_replica_is_passed_over_by_all_and_recorded():
    report = clean(run("mirrored", FLOAT16, 2, names={"WAY": "keras", "OVERFLOWS": True}))
    assert report.trained == 6
    assert (report.rows["samples"] == 16).all()
    assert all(np.isfinite(array).all() for array in report.weights.values())
    optimizer = report.names["model"].optimizer
    assert float(optimizer.dynamic_scale.numpy()) == 2**15 / 4
    assert int(optimizer.iterations.numpy()) == 4
