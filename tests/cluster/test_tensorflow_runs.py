"""TensorFlow runs in a notebook: one engine holds all replicas."""

import threading

import numpy as np
import pytest
from needs import need
from notebook_shell import notebook, soon

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")


@pytest.fixture(scope="module")
def book():
    with notebook() as book:
        book.ok("%cluster start 1 --framework tensorflow")
        yield book


PLAIN = """%%distributed mirrored -n 2 --framework tensorflow
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=2, batch_size=64)
"""


def test_plain_keras_trains_on_replicas_of_one_engine(book):
    cell = book.ok(PLAIN)
    run = book["_run"]
    assert run.state == "finished"
    assert run.engines == (0, 0)
    assert run.members == (0,)
    history = run.history
    assert len(history) == 2 * 46
    assert set(history["rank"]) == {0, 1}
    assert set(history["engine"]) == {0}
    assert history["samples"].sum() == 2 * 1437
    assert np.isfinite(history["loss"]).all()
    assert history["loss"][-1] < history["loss"][0]
    assert {name: array.shape for name, array in run.weights().items()} == {
        "sequential/dense/kernel": (64, 10),
        "sequential/dense/bias": (10,),
    }
    assert "rank 0 · cpu" in cell.text
    assert "rank 1 · cpu" in cell.text
    assert "overwrote" not in cell.text


TEXTBOOK = """%%distributed mirrored -n 2 --epochs 1
import keras
x_train, y_train = wb.data.digits("train", as_mnist=True)
x_test, y_test = wb.data.digits("test", as_mnist=True)
model = keras.Sequential([
    keras.layers.Flatten(input_shape=(28, 28)),
    keras.layers.Dense(128, activation="relu"),
    keras.layers.Dropout(0.2),
    keras.layers.Dense(10),
])
model.compile(
    optimizer="adam", metrics=["accuracy"],
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
model.fit(x_train, y_train, epochs=5, batch_size=64, validation_data=(x_test, y_test))
print(len(model.evaluate(x_test, y_test, verbose=0)), model.predict(x_test, verbose=0).shape)
"""


def test_the_textbook_cell_runs_as_it_stands(book):
    cell = book.ok(TEXTBOOK)
    run = book["_run"]
    assert "2 (360, 10)" in cell.stdout
    assert len(run.history) == 2 * 23
    assert [set(one) for one in run.evals] == [{"step", "epoch", "loss", "accuracy"}]


LOOP = """%%distributed one_device,mirrored -n 2 --plot off
import keras, tensorflow as tf
x, y = wb.data.digits("train", arrays=True)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
optimizer = keras.optimizers.SGD(0.1)
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
data = tf.data.Dataset.from_tensor_slices((x, y)).batch(64, drop_remainder=True)

@tf.function
def train_step(batch):
    def step(inputs, targets):
        with tf.GradientTape() as tape:
            each = losses(targets, model(inputs, training=True))
            loss = tf.nn.compute_average_loss(each, global_batch_size=64)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss
    return strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)

for batch in strategy.experimental_distribute_dataset(data):
    loss = train_step(batch)
    wb.log(shown=loss)
"""


def test_an_own_loop_with_the_injected_strategy_is_recorded(book):
    book.ok(LOOP)
    runs = book["wb"].runs
    alone, both = runs["one_device"], runs["mirrored"]
    assert (len(alone.history), len(both.history)) == (22, 44)
    assert both.history["shown"][::2] == pytest.approx(alone.history["shown"], abs=1e-5)
    assert both.history["loss"] == pytest.approx(both.history["shown"], abs=1e-5)
    for name, array in alone.weights().items():
        assert abs(array - both.weights()[name]).max() <= 2e-7


FIT = """%%distributed mirrored -n 2 --name fit --plot off
import keras, tensorflow as tf
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
wb.fit(model, wb.data.digits("train"), optimizer=keras.optimizers.SGD(0.1), batch_size=64,
       loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
       eval_data=wb.data.digits("test"), epochs=2,
       metrics={"accuracy": lambda out, y: tf.cast(tf.argmax(out, 1) == y, tf.float32)})
"""


def test_wb_fit_trains_a_keras_model_and_its_weights_come_home(book):
    book.ok(FIT)
    run = book["_run"]
    assert len(run.history) == 2 * 46
    assert [set(one) for one in run.evals] == [{"step", "epoch", "loss", "accuracy"}] * 2
    keras = pytest.importorskip("keras")
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
    model.build((None, 1, 8, 8))
    assert run.load_into(model) is model
    x, y = book["wb"].data.digits("test", arrays=True)
    right = (model.predict(x, verbose=0).argmax(1) == y).mean()
    assert right == pytest.approx(run.evals[-1]["accuracy"], abs=1e-6)
    again = FIT.replace("--name fit", "--name on --init-from fit --steps 3")
    book.ok(again)
    (first, last), begun = run.history["loss"][[0, -1]], book["_run"].history["loss"][0]
    assert abs(begun - last) < abs(begun - first)
    book.refused(again.replace("from fit", "from nobody"), "nobody")
    assert "fit" in repr(book["wb"].compare(run, book["_run"]))


SLOW = """
import time, keras, tensorflow as tf

class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)

model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train"), epochs=200, batch_size=64, callbacks=[Slow()])
"""


def test_pause_resume_and_stop_reach_model_fit(book):
    run = _cluster().run(SLOW, strategy="mirrored", workers=2, framework="tensorflow")
    assert soon(lambda: run.history.totals.steps > 5)
    run.pause()
    assert soon(lambda: run.state == "paused")
    steps = run.history.totals.steps
    threading.Event().wait(0.3)
    assert run.history.totals.steps - steps <= 1
    run.resume()
    assert soon(lambda: run.state == "running" and run.history.totals.steps > steps + 5)
    run.stop()
    run.wait(20)
    assert run.state == "stopped"
    assert run.weights()


def _cluster():
    from workbench.notebook.session import session

    return session.need_cluster()


def test_a_delay_in_one_replica_shows_as_the_others_wait_and_is_lifted_live(book):
    run = _cluster().run(
        SLOW, strategy="mirrored", workers=3, framework="tensorflow", inject=["slow=1:50ms"],
        batch_size=66,
    )  # fmt: skip
    assert soon(lambda: run.history.totals.steps > 20)
    history = run.history
    wait = [np.median(history["sync_wait_s"][history["rank"] == r][3:]) for r in range(3)]
    assert wait == pytest.approx([0.05, 0.0, 0.05], abs=0.005)
    run.inject()
    steps = history.totals.steps
    assert soon(lambda: history.totals.steps > steps + 40)
    run.stop()
    run.wait(20)
    late = history["step"] > steps + 5
    assert np.median(history["sync_wait_s"][late & (history["rank"] == 0)]) < 0.01


def test_a_killed_replica_is_named_and_the_next_run_works(book):
    cell = PLAIN.replace("-n 2", "-n 2 --inject kill=1@3 --plot off")
    book.refused(cell, "Replicas 0-1 are gone", "SIGKILL")
    book.ok("%cluster restart 0")
    book.ok(PLAIN)


def test_mistakes_are_refused_and_the_engine_goes_on(book):
    book.refused(PLAIN.replace("batch_size=64", "batch_size=65"), "batch_size=66")
    book.refused(PLAIN.replace("-n 2", "-n 2 -o cross_device_ops=nccl"), "GPU")
    book.refused(PLAIN.replace("model.fit", "#"), "WB-RUN-092")
    book.refused(
        "%%distributed mirrored\nimport keras\nwb.prepare(keras.Sequential(), None)", "wb.prepare"
    )
    book.ok(PLAIN.replace("-n 2", "-n 2 --plot off"))
