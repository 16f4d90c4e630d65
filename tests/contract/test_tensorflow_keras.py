"""Keras' own `model.fit`, unchanged, under a strategy."""

from __future__ import annotations

import numpy as np
import pytest
from needs import need
from tf_cells import FIT_CALLS, KERAS_MODEL
from tf_harness import clean, run

from workbench.shared import record

need("tensorflow")
pytestmark = pytest.mark.tensorflow


# Several steps per execution meet data of each origin in the same function of Keras'.
@pytest.mark.parametrize(
    ("call", "every"),
    [*((call, 1) for call in FIT_CALLS), ("validation_split", 2), ("tf.data", 2)],
)
def test_keras_fit_works_unchanged(call: str, every: int) -> None:
    source = KERAS_MODEL + FIT_CALLS[call] + "\nscores = model.evaluate(x, y, batch_size=24)\n"
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
    first = record.derive(report.rows).loss[:4]
    assert first.mean() == pytest.approx(history["loss"][0], rel=1e-4)


def test_what_xla_compiles_is_recorded_without_its_parts() -> None:
    source = KERAS_MODEL.replace("EVERY", "1, jit_compile=True") + FIT_CALLS["arrays"]
    report = clean(run("one_device", source))
    assert report.trained == 8
    assert (report.rows["samples"] == 24).all()
    assert np.isfinite(report.rows["local_loss"]).all()
    assert np.isnan(report.rows["compute_s"]).all()
    (unseen,) = report.emitted("unmeasured")
    assert "jit_compile" in unseen["columns"]["compute_s"]


def test_the_lines_overrides_win() -> None:
    overrides = {"steps": 7, "batch_size": 12, "seed": 5}
    source = KERAS_MODEL + FIT_CALLS["arrays"]
    report = clean(run("mirrored", source, 2, overrides=overrides, names={"EVERY": 1}))
    assert report.rows.shape == (7, 2)
    assert (report.rows["samples"] == 6).all()
    overrides = {"epochs": 3}
    report = clean(run("mirrored", source, 2, overrides=overrides, names={"EVERY": 1}))
    assert report.rows.shape == (12, 2)


def test_a_model_of_the_cell_before_trains_on() -> None:
    first = clean(run("mirrored", KERAS_MODEL + FIT_CALLS["arrays"], 2, names={"EVERY": 1}))
    names = {"model": first.names["model"], "x": first.names["x"], "y": first.names["y"]}
    report = clean(run("mirrored", "model.fit(x, y, batch_size=24)", 2, names=names))
    assert report.trained == 4
    assert np.isfinite(report.rows["compute_s"]).all()
    assert any(e.get("topic") == "trained_before" for e in report.emitted("warning"))


STATISTICS = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(97, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([
    keras.layers.Dense(4), keras.layers.BatchNormalization(momentum=0.5, scale=False),
    keras.layers.Dense(1),
])
model.compile("sgd", "mse")
history = model.fit(x[:SAMPLES], y[:SAMPLES], batch_size=32, shuffle=False,
                    validation_data=(x[:33], y[:33])).history
scores = [model.evaluate(x[:n], y[:n], batch_size=7) for n in (7, 33)]
right = [float(np.mean((np.asarray(model(x[:n])) - y[:n]) ** 2)) for n in (7, 33)]
copies = [
    [copy.numpy() for copy in strategy.experimental_local_results(variable.value)]
    for variable in model.non_trainable_variables
]
"""


def test_replicas_share_the_mean_of_their_statistics_and_odd_batches_can_be_evaluated() -> None:
    report = clean(run("mirrored", STATISTICS, 2, names={"SAMPLES": 96}))
    central = clean(run("central_storage", STATISTICS, 2, names={"SAMPLES": 96}))
    names = report.names
    for copies, (truth,) in zip(names["copies"], central.names["copies"], strict=True):
        assert (copies[0] == copies[1]).all()
        assert copies[0] == pytest.approx(truth, rel=1e-5)
    assert names["scores"] == pytest.approx(names["right"], rel=1e-5)
    assert names["history"]["val_loss"] == pytest.approx(names["scores"][1:], rel=1e-5)


def test_a_replica_without_a_sample_has_no_say_in_the_statistics() -> None:
    report = clean(run("mirrored", STATISTICS, 2, names={"SAMPLES": 97}))
    assert report.rows["samples"][-1].tolist() == [1, 0]
    assert all(np.isfinite(copy).all() for copies in report.names["copies"] for copy in copies)
    assert any("a sample" in note["text"] for note in report.emitted("note"))


def test_an_uneven_last_batch_that_is_not_reached_is_not_mentioned() -> None:
    names = {"SAMPLES": 97}
    report = clean(run("mirrored", STATISTICS, 2, overrides={"steps": 2}, names=names))
    assert report.trained == 2
    assert not any("a sample" in note["text"] for note in report.emitted("note"))


TRAINS_ITSELF = """
import keras, numpy as np, tensorflow as tf
layers = keras.layers
keras.utils.set_random_seed(0)
rng = np.random.default_rng(0)

class GAN(keras.Model):
    def __init__(self, critic, maker):
        super().__init__()
        self.critic, self.maker = critic, maker
        self.seed, self.tracker = keras.random.SeedGenerator(1), keras.metrics.Mean(name="d_loss")
    def compile(self, mine, its):
        super().compile()
        self.mine, self.its = mine, its
        self.loss_fn = keras.losses.BinaryCrossentropy(from_logits=True)
    @property
    def metrics(self):
        return [self.tracker]
    def train_step(self, real):
        count = tf.shape(real)[0]
        made = self.maker(keras.random.normal((count, 4), seed=self.seed))
        labels = tf.concat([tf.ones((count, 1)), tf.zeros((count, 1))], 0)
        with tf.GradientTape() as tape:
            loss = self.loss_fn(labels, self.critic(tf.concat([made, real], 0)))
        weights = self.critic.trainable_weights
        self.mine.apply_gradients(zip(tape.gradient(loss, weights), weights))
        with tf.GradientTape() as tape:
            made = self.maker(keras.random.normal((count, 4), seed=self.seed))
            other = self.loss_fn(tf.zeros((count, 1)), self.critic(made))
        weights = self.maker.trainable_weights
        self.its.apply_gradients(zip(tape.gradient(other, weights), weights))
        self.tracker.update_state(loss)
        return {"d_loss": self.tracker.result()}

class Siamese(keras.Model):
    def __init__(self, network):
        super().__init__()
        self.network, self.tracker = network, keras.metrics.Mean(name="loss")
    def call(self, inputs):
        return self.network(inputs)
    def train_step(self, data):
        with tf.GradientTape() as tape:
            near, far = self.network(data)
            loss = tf.maximum(near - far + 0.5, 0.0)  # one per sample
        weights = self.network.trainable_weights
        self.optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights))
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}
    @property
    def metrics(self):
        return [self.tracker]

if KIND == "gan":
    model = GAN(keras.Sequential([keras.Input((8,)), layers.Dense(1)]),
                keras.Sequential([keras.Input((4,)), layers.Dense(8)]))
    model.compile(keras.optimizers.SGD(0.1), keras.optimizers.SGD(0.1))
    data = tf.data.Dataset.from_tensor_slices(rng.normal(size=(64, 8)).astype("float32"))
else:
    embed = keras.Sequential([keras.Input((8,)), layers.Dense(4)])
    inputs = [keras.Input((8,), name=name) for name in ("anchor", "like", "unlike")]
    one, two, three = map(embed, inputs)
    far = lambda a, b: keras.ops.sum((a - b) ** 2, -1)
    model = Siamese(keras.Model(inputs, [far(one, two), far(one, three)]))
    model.compile(optimizer=keras.optimizers.SGD(0.01))
    arrays = tuple(rng.normal(size=(64, 8)).astype("float32") for _ in range(3))
    data = tf.data.Dataset.from_tensor_slices(arrays)
history = model.fit(data.batch(16), epochs=1, verbose=0).history
"""


@pytest.mark.parametrize("kind", ["gan", "siamese"])
def test_a_model_with_a_train_step_of_its_own_needs_no_change(kind: str) -> None:
    plain = {"KIND": kind}
    exec(TRAINS_ITSELF, plain)  # no strategy, no Workbench
    report = clean(run("one_device", TRAINS_ITSELF, names={"KIND": kind}))
    several = clean(run("mirrored", TRAINS_ITSELF, 2, names={"KIND": kind}))
    for name, values in plain["history"].items():
        assert report.names["history"][name] == pytest.approx(values, rel=1e-4)
    for one in (report, several):
        assert one.trained == 4
        assert np.isfinite(one.rows["local_loss"]).all()
    if kind == "siamese":  # its loss is a vector
        loss = record.derive(several.rows).loss.mean()
        assert loss == pytest.approx(plain["history"]["loss"][0], rel=1e-4)


def test_a_python_generator_is_said_to_lose_batches() -> None:
    cell = """
import keras, numpy as np
def batches():
    for _ in range(6):
        yield np.ones((8, 4), "float32"), np.ones((8, 1), "float32")
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse")
model.fit(batches())
"""
    report = clean(run("one_device", cell))
    assert report.trained < 6  # as in plain Keras
    assert any("Python generator" in note["text"] for note in report.emitted("note"))


BY_HAND = """
import tensorflow as tf
weight = tf.Variable(1.0)
@tf.function
def train():
    def step():
        with tf.GradientTape() as tape:
            loss = weight * weight
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss
    return strategy.run(step)
for _ in range(3):
    train()
"""


@pytest.mark.parametrize(("strategy", "workers"), [("one_device", 1), ("mirrored", 2)])
def test_a_loop_that_updates_by_hand_is_recorded(strategy: str, workers: int) -> None:
    report = clean(run(strategy, BY_HAND, workers))
    assert report.trained == 3
    assert report.rows["local_loss"] == pytest.approx(
        np.array([[1.0] * workers, [0.64] * workers, [0.4096] * workers]), rel=1e-5
    )


NO_NUMBER = """
import keras, numpy as np, tensorflow as tf
x, y = np.ones((32, 4), "float32"), np.zeros((32, 1), "float32")
x[:, 0] = np.nan  # every replica has some
model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
if LOOP:
    optimizer = keras.optimizers.SGD(0.1)
    @tf.function
    def train(batch):
        def step(batch):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(batch) - 1.0) ** 2)
            found = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(found, model.trainable_variables))
            return loss
        return strategy.run(step, args=(batch,))
    for _ in range(4):
        train(tf.constant(x))
else:
    model.compile("sgd", "mse")
    model.fit(x, y, batch_size=32, epochs=4)
"""


@pytest.mark.parametrize(
    ("strategy", "workers", "loop"),
    [("mirrored", 2, False), ("mirrored", 2, True), ("model_split", 2, False)],
)
def test_a_loss_that_never_was_a_number_is_named_and_compared_as_diverged(
    strategy: str, workers: int, loop: bool
) -> None:
    from workbench.history.analysis.comparison import compare
    from workbench.history.analysis.summary import summarise
    from workbench.history.store import RunHistory

    report = clean(run(strategy, NO_NUMBER, workers, names={"LOOP": loop}))
    assert np.isnan(report.rows["local_loss"]).all()
    data_parallel = strategy != "model_split"
    history = RunHistory(range(workers), data_parallel=data_parallel)
    for rank in range(workers):
        history.append(report.rows[:, rank])
    len(history)  # takes in what was appended
    (note,) = (text for text in history.snapshot().notes if "NaN" in text)
    assert "first step" in note
    meta = {"name": "lost", "strategy": strategy, "state": "finished"}
    assert any("lost" in note for note in compare([summarise(history, meta)]).notes)
