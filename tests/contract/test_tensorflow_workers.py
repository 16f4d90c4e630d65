"""What TensorFlow's strategies with one engine per worker must honour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tf_cells
from needs import need
from tf_harness import Report, clean
from tf_workers import Workers

from workbench.shared import record

need("tensorflow")
pytestmark = pytest.mark.tensorflow

STRATEGY = "multi_worker_mirrored"


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


def settings(**changed: Any) -> dict[str, Any]:
    return {
        "SIZES": (120, 24), "DTYPE": "float32", "OPTIMIZER": "SGD", "EXTRA": {}, "GRAPH": True,
        "STEPS": 20, **changed,
    }  # fmt: skip


def rows_of(reports: list[Report]) -> Any:
    return np.concatenate([report.rows for report in reports], axis=1)


@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance"),
    [("SGD", "float32", 5e-7), ("Adam", "float64", 1e-10)],  # of Adam the stricter of two
)
@pytest.mark.parametrize("way", tf_cells.WAYS)
def test_trains_exactly_as_one_device_does(
    pair: Workers, way: str, optimizer: str, dtype: str, tolerance: float
) -> None:
    names = settings(OPTIMIZER=optimizer, DTYPE=dtype)
    truth = clean(pair.run("one_device", [tf_cells.WAYS[way], ""], workers=1, names=names)[0])
    reports = [clean(report) for report in pair.run(STRATEGY, tf_cells.WAYS[way], names=names)]
    first, second = (report.weights for report in reports)
    assert first.keys() == truth.weights.keys()
    assert all((first[name] == second[name]).all() for name in first)  # to the last bit
    assert max(float(abs(first[name] - truth.weights[name]).max()) for name in first) <= tolerance
    loss, true_loss = record.derive(rows_of(reports)).loss, record.derive(truth.rows).loss
    assert np.allclose(loss, true_loss, rtol=0, atol=max(10 * tolerance, 1e-6))


@pytest.mark.timing
@pytest.mark.parametrize("way", tf_cells.WAYS)
def test_an_injected_delay_is_read_back_as_the_others_wait(pair: Workers, way: str) -> None:
    cell, names = tf_cells.SLEEPY_WAYS[way], {"MILLIS": 2, "STEPS": 30}
    reports = pair.run(STRATEGY, cell, faults=("slow=1:50ms",), names=names)
    derived = record.derive(rows_of([clean(report) for report in reports]))
    wait_ms = np.median(derived.sync_wait_s, axis=0) * 1e3
    assert wait_ms[0] == pytest.approx(50, abs=5)
    assert wait_ms[1] == pytest.approx(0, abs=1)
    assert (derived.blamed_rank[:, 0] == 1).mean() >= 0.95


KERAS = """
import keras, numpy as np, os, tensorflow as tf
x = np.random.default_rng(0).normal(size=(96, 28, 28)).astype("float32")
y = np.random.default_rng(1).integers(0, 10, 96)
model = keras.Sequential([
    keras.layers.Flatten(), keras.layers.Dense(32, activation="relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(10),
])
model.compile(optimizer="adam", metrics=["accuracy"], steps_per_execution=EVERY,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(24)
history = model.fit(x, y, epochs=2, batch_size=24, validation_data=data).history
scores = model.evaluate(data, verbose=0)
told = history, scores, model.predict(x, batch_size=24, verbose=0), os.environ["TF_CONFIG"]
"""


@pytest.mark.parametrize("every", [1, 2])
def test_keras_fit_works_unchanged(pair: Workers, every: int) -> None:
    reports = [clean(report) for report in pair.run(STRATEGY, KERAS, names={"EVERY": every})]
    first, second = (report.weights for report in reports)
    assert any("moving" in name for name in first)
    assert all((first[name] == second[name]).all() for name in first)
    rows = rows_of(reports)
    assert rows.shape == (8, 2)
    assert (rows["samples"] == 12).all()
    derived = record.derive(rows)
    (history, scores, out, config), (theirs, *_, other_config) = (r.names["told"] for r in reports)
    assert all(history[name] == pytest.approx(theirs[name]) for name in history)
    assert derived.loss[:4].mean() == pytest.approx(history["loss"][0], rel=1e-4)
    assert derived.loss[4:].mean() == pytest.approx(history["loss"][1], rel=1e-4)
    assert scores == pytest.approx([history["val_loss"][-1], history["val_accuracy"][-1]])
    assert out.shape == (96, 10)
    assert '"index": 0' in config
    assert '"index": 1' in other_config
    assert len(reports[0].emitted("eval")) == 2


def test_the_model_is_the_engines_own_afterwards(pair: Workers) -> None:
    clean(pair.run(STRATEGY, KERAS, names={"EVERY": 1})[0])
    again = """
import numpy as np
told = np.abs(np.asarray(model(x[:8])) - before[2][:8]).max(), strategy.num_replicas_in_sync
"""
    renamed = "before = told\n" + again
    report = clean(pair.run("one_device", renamed, workers=1, carry=("model", "x", "told"))[0])
    assert report.names["told"][0] < 1e-5
    assert report.names["told"][1] == 1


@pytest.mark.timing
def test_a_worker_that_dies_is_noticed_and_the_other_goes_on() -> None:
    pair = Workers(2)
    try:
        cell, names = tf_cells.SLEEPY_WAYS["keras"], {"MILLIS": 2, "STEPS": 200}
        survivor, dead = pair.run(STRATEGY, cell, faults=("kill=1@20",), names=names)
        assert dead.error == "died"
        assert survivor.error is not None
        assert "UnavailableError" in survivor.error
        assert survivor.left == []
        again = pair.run("one_device", tf_cells.SLEEPY_WAYS["keras"], workers=1, names=names)
        assert clean(again[0]).trained == 200
    finally:
        pair.close()


FILES = """
import keras, numpy as np, os, tensorflow as tf
x, y = np.ones((48, 4), "float32"), np.ones((48, 1), "float32")
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
callbacks = [
    keras.callbacks.ModelCheckpoint(f"{FOLDER}/new/epoch-{{epoch}}.weights.h5",
                                    save_weights_only=True),
    keras.callbacks.ModelCheckpoint(f"{FOLDER}/best.h5", monitor="loss", save_best_only=True),
    keras.callbacks.BackupAndRestore(f"{FOLDER}/backup"),
    keras.callbacks.CSVLogger(f"{FOLDER}/log.csv"),
    keras.callbacks.CSVLogger(f"{FOLDER}/log-{rank}.csv"),
]
history = model.fit(x, y, epochs=8, batch_size=24, callbacks=callbacks).history
model.save(f"{FOLDER}/model.keras")
model.save(f"{FOLDER}/model-{rank}.keras")
if rank == 0:
    model.save(f"{FOLDER}/alone.keras")
model.load_weights(f"{FOLDER}/new/epoch-8.weights.h5")
again = keras.models.load_model(f"{FOLDER}/model.keras").get_weights()
told = history["loss"], [w.tolist() for w in again], [w.tolist() for w in model.get_weights()]
"""


def test_all_workers_may_name_the_same_files(pair: Workers, tmp_path: Any) -> None:
    reports = pair.run(STRATEGY, FILES, names={"FOLDER": str(tmp_path)})
    first, second = (clean(report).names["told"] for report in reports)
    assert first == second
    assert first[1] == first[2]
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"new", "best.h5", "log.csv", "log-0.csv", "log-1.csv", "model.keras",
                     "alone.keras", "model-0.keras", "model-1.keras"}  # fmt: skip
    assert len(list((tmp_path / "new").iterdir())) == 8
    lines = (tmp_path / "log.csv").read_text().splitlines()
    assert len(lines) == 9
    losses = [float(line.split(",")[1]) for line in lines[1:]]
    assert losses == pytest.approx(first[0], rel=1e-5)
    notes = [note["text"] for note in reports[0].emitted("note")]
    assert any("CSVLogger" in text and "lowest rank" in text for text in notes)


def test_an_own_loops_batch_is_that_of_all_workers(pair: Workers) -> None:
    names = settings(STEPS=5)
    for report in map(clean, pair.run(STRATEGY, tf_cells.OWN_LOOP, names=names)):
        (begun,) = report.emitted("run_started")
        assert (begun["batch_size"], begun["local_batch"]) == (24, 12)


FLOAT16 = """
import keras, numpy as np
keras.config.set_dtype_policy("mixed_float16")
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
y = x.sum(1, keepdims=True)
x[60] = 1e38  # the second worker's part of the second batch
model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(1, dtype="float32")])
try:
    model.compile("adam", "mse")
    model.fit(x, y, batch_size=32, epochs=2, shuffle=False)
finally:
    keras.config.set_dtype_policy("float32")
"""


def test_workers_agree_to_pass_over_a_step_that_overflows_on_one_of_them(pair: Workers) -> None:
    reports = [clean(report) for report in pair.run(STRATEGY, FLOAT16)]
    first, second = (report.weights for report in reports)
    assert all((first[name] == second[name]).all() for name in first)
    assert all(np.isfinite(array).all() for array in first.values())
    rows = rows_of(reports)
    assert rows.shape == (6, 2)
    assert (rows["samples"] == 16).all()
