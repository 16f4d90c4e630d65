"""What TensorFlow's strategies must honour: those whose replicas are all in one engine."""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

import numpy as np
import pytest
import tf_cells
from needs import need
from tf_harness import Report, clean, run

from workbench import catalog, metrics

need("tensorflow")
pytestmark = pytest.mark.tensorflow


def _exists(entry: catalog.Strategy) -> bool:
    return importlib.util.find_spec(entry.module.partition(":")[0]) is not None


ENTRIES = [
    entry
    for entry in catalog.strategies("tensorflow")
    if _exists(entry) and entry.one_engine and entry.sync and entry.data_parallel and entry.anywhere
]
CASES = [
    pytest.param(entry, count, id=f"{entry.name}-{count}")
    for entry in ENTRIES
    for count in (1, 2, 3)
    if count <= (entry.max_workers or count)
]
SEVERAL = [case for case in CASES if case.values[1] > 1]
WIDEST = [case for case in CASES if case.values[1] == 3]
WAYS = {"fit": tf_cells.WB_FIT, "keras": tf_cells.KERAS_FIT, "loop": tf_cells.OWN_LOOP}


def in_every_way(cases: list[Any]) -> list[Any]:
    """Return each case with each way the strategy can be used: (entry, count, way)."""
    return [
        pytest.param(*case.values, way, id=f"{case.id}-{way}")
        for case in cases
        for way in WAYS
        if way in case.values[0].ways
    ]


def train(strategy: str, way: str, workers: int = 1, **settings: Any) -> Report:
    names = {
        "SIZES": (120, 24), "DTYPE": "float32", "OPTIMIZER": "SGD", "EXTRA": {}, "GRAPH": True,
        "STEPS": 20,
    }  # fmt: skip
    return clean(run(strategy, WAYS[way], workers, names={**names, **settings}))


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
    same(entry, count, way, "SGD", "float32", 2e-7)


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
    losses, true_losses = (metrics.derive(each.rows).loss for each in (report, truth))
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
    assert furthest(report, truth) <= 2e-7


def test_a_strategy_without_all_reduce_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The canary: replicas that keep their own gradients do not pass for one device."""
    from keras.src.backend.tensorflow.optimizer import TFOptimizer

    truth = train("one_device", "fit")
    monkeypatch.setattr(TFOptimizer, "_all_reduce_sum_gradients", lambda self, pairs: list(pairs))
    assert furthest(train("mirrored", "fit", 2), truth) > 1e-3


@pytest.mark.timing
@pytest.mark.parametrize(("entry", "count", "way"), in_every_way(CASES))
def test_records_cover_the_run(entry: catalog.Strategy, count: int, way: str) -> None:
    cell = tf_cells.SLEEPY_WAYS[way]
    report = clean(run(entry.name, cell, count, names={"MILLIS": 12, "STEPS": 30}))
    rows = report.rows
    assert rows.shape == (30, count)
    assert (rows["step"] == np.arange(30)[:, None]).all()
    assert (rows["rank"] == np.arange(count)).all()
    assert (rows["samples"].sum(axis=1) == 12).all()
    derived = metrics.derive(rows)
    assert derived.step_s[0].max() < 10 * np.median(derived.step_s)  # tracing is no part of it
    named = (1 - derived.other_s / derived.step_s)[1:]  # of the first one the data wait is unknown
    assert np.median(named) >= 0.95
    assert named.max() <= 1.001
    for step_s in derived.step_s.T:
        assert step_s.sum() == pytest.approx(report.train_s, rel=0.01)
    begun = report.emitted("run_started")
    assert [fields["rank"] for fields in begun] == list(range(count))
    assert {fields["batch_size"] for fields in begun} == {12}


@pytest.mark.timing
@pytest.mark.parametrize(("entry", "count", "way"), in_every_way(SEVERAL))
def test_an_injected_delay_is_read_back_as_the_others_wait(
    entry: catalog.Strategy, count: int, way: str
) -> None:
    cell, names = tf_cells.SLEEPY_WAYS[way], {"MILLIS": 2, "STEPS": 30}
    report = clean(run(entry.name, cell, count, faults=("slow=1:50ms",), names=names))
    derived = metrics.derive(report.rows)
    wait_ms = np.median(derived.sync_wait_s, axis=0) * 1e3
    others = [rank for rank in range(count) if rank != 1]
    assert wait_ms[others] == pytest.approx(50, abs=5)
    assert wait_ms[1] == pytest.approx(0, abs=1)
    assert (derived.blamed_rank[:, others] == 1).mean() >= 0.95


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


KERAS = """
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(96, 28, 28)).astype("float32")
y = np.random.default_rng(1).integers(0, 10, 96)
model = keras.Sequential([
    keras.layers.Flatten(input_shape=(28, 28)), keras.layers.Dense(128, activation="relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(10),
])
seen = []
class Mine(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.append((batch, sorted(logs)))
model.compile(optimizer="adam", metrics=["accuracy"], steps_per_execution=EVERY,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
FIT_CALLS = {
    "arrays": "h = model.fit(x, y, epochs=2, batch_size=24, callbacks=[Mine()])",
    "validation_data": "h = model.fit(x, y, 24, 2, validation_data=(x, y), callbacks=Mine())",
    "validation_split": "h = model.fit(x, y, 18, 2, validation_split=0.25, callbacks=[Mine()])",
    "tf.data": "h = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(24), epochs=2, "
    "callbacks=[Mine()], validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(24))",
    "weights": "h = model.fit(x, y, epochs=2, batch_size=24, callbacks=[Mine()], "
    "sample_weight=np.ones(96))",
}


# Several steps per execution meet data of each origin in the same function of Keras'.
@pytest.mark.parametrize(
    ("call", "every"),
    [*((call, 1) for call in FIT_CALLS), ("validation_split", 2), ("tf.data", 2)],
)
def test_keras_fit_works_unchanged(call: str, every: int) -> None:
    source = KERAS + FIT_CALLS[call] + "\nscores = model.evaluate(x, y, batch_size=24)\n"
    source += "out = model.predict(x, batch_size=24)\n"
    report = clean(run("mirrored", source, 2, names={"EVERY": every}))
    assert report.trained == 8
    assert len(report.rows) == 8
    assert np.isfinite(report.rows["local_loss"]).all()
    assert report.rows["samples"].sum() == (72 if call == "validation_split" else 96) * 2
    assert len(report.names["seen"]) == 8 // every
    assert report.names["out"].shape == (96, 10)
    history = report.names["h"].history
    assert len(history["loss"]) == 2
    evals = report.emitted("eval")
    assert len(evals) == (2 if "val_loss" in history else 0)
    for fields, loss in zip(evals, history.get("val_loss", ()), strict=True):
        assert fields["values"]["loss"] == pytest.approx(loss)
    # What Keras shows is the mean over the epoch; the rows hold each batch's own.
    first = metrics.derive(report.rows).loss[:4]
    assert first.mean() == pytest.approx(history["loss"][0], rel=1e-4)


@pytest.mark.timing
def test_how_long_tracing_took_is_said() -> None:
    source = KERAS + FIT_CALLS["arrays"]
    report = clean(run("mirrored", source, 3, names={"EVERY": 1}))
    texts = [fields["text"] for fields in report.emitted("note")]
    assert any("traced the step once" in text for text in texts), texts
    step_s = (report.rows["end_s"] - report.rows["start_s"])[:, 0]
    assert report.train_s == pytest.approx(step_s.sum(), rel=1e-6)


def test_what_xla_compiles_is_recorded_without_its_parts() -> None:
    source = KERAS.replace("EVERY", "1, jit_compile=True") + FIT_CALLS["arrays"]
    report = clean(run("one_device", source))
    assert report.trained == 8
    assert (report.rows["samples"] == 24).all()
    assert np.isfinite(report.rows["local_loss"]).all()
    assert np.isnan(report.rows["compute_s"]).all()
    (unseen,) = report.emitted("unmeasured")
    assert "jit_compile" in unseen["columns"]["compute_s"]


def test_the_lines_overrides_win() -> None:
    overrides = {"steps": 7, "batch_size": 12, "seed": 5}
    source = KERAS + FIT_CALLS["arrays"]
    report = clean(run("mirrored", source, 2, overrides=overrides, names={"EVERY": 1}))
    assert report.rows.shape == (7, 2)
    assert (report.rows["samples"] == 6).all()
    overrides = {"epochs": 3}
    report = clean(run("mirrored", source, 2, overrides=overrides, names={"EVERY": 1}))
    assert report.rows.shape == (12, 2)


def test_a_model_of_the_cell_before_trains_on() -> None:
    first = clean(run("mirrored", KERAS + FIT_CALLS["arrays"], 2, names={"EVERY": 1}))
    names = {"model": first.names["model"], "x": first.names["x"], "y": first.names["y"]}
    report = clean(run("mirrored", "model.fit(x, y, batch_size=24)", 2, names=names))
    assert report.trained == 4
    assert np.isfinite(report.rows["compute_s"]).all()
    assert any("trained by an earlier run" in e["text"] for e in report.emitted("warning"))


@pytest.mark.timing
def test_a_function_traced_in_an_earlier_run_is_still_seen() -> None:
    names = {"MILLIS": 1, "STEPS": 4}
    first = clean(run("mirrored", tf_cells.SLEEPY_WAYS["loop"], 2, names=names))
    kept = {name: first.names[name] for name in ("train_step", "data")}
    again = "for batch in strategy.experimental_distribute_dataset(data):\n    train_step(batch)"
    report = clean(run("mirrored", again, 2, names=kept, faults=("slow=1:30ms",)))
    assert report.trained == 4
    wait_ms = 1e3 * np.median(metrics.derive(report.rows).sync_wait_s, axis=0)
    assert wait_ms == pytest.approx([30, 0], abs=5)
    first.names.clear()


WRONG = {
    "built outside": ("model.fit(x, y, batch_size=24)", "outside this run's strategy"),
    "indivisible": ("made(); model.fit(x, y, batch_size=25)", "batch_size=26"),
    "indivisible tf.data": (
        "made(); model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(25))",
        "cannot be divided evenly",
    ),
    "single samples": (
        "made(); model.fit(tf.data.Dataset.from_tensor_slices((x, y[:, 0])))",
        "not batches",
    ),
    "not compiled": ("made(compiled=False); model.fit(x, y, batch_size=24)", "compile"),
    "another batch": (
        "made(); wb.fit(model, tf.data.Dataset.from_tensor_slices((x, y)).batch(24), "
        "loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD(), batch_size=12)",
        "batches of 24, batch_size=12",
    ),
    "torch data": (
        "import torch; made(); wb.fit(model, torch.utils.data.TensorDataset(torch.ones(8, 4)), "
        "loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD(), batch_size=4)",
        "PyTorch's",
    ),
    "torch model": (
        "import torch; wb.fit(torch.nn.Linear(4, 1), (x, y), batch_size=4, "
        "loss=keras.losses.MeanSquaredError(), optimizer=keras.optimizers.SGD())",
        "torch module",
    ),
    "a summed loss": (
        "made(); wb.fit(model, (x, y), batch_size=4, optimizer=keras.optimizers.SGD(), "
        "loss=keras.losses.MeanSquaredError(reduction='sum'))",
        "must be a mean",
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
