"""TensorFlow over several engines in a notebook: the kernel passes their addresses on."""

import os
import signal

import numpy as np
import pytest
from needs import need
from notebook_shell import notebook, soon
from warm_support import gone

from workbench.errors import RunError

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

CELL = """%%distributed multi_worker_mirrored -n 2 --framework tensorflow --plot off {flags}
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="adam", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=2, batch_size=64)
"""


@pytest.fixture(scope="module")
def book():
    with notebook() as book:
        book.ok("%cluster start 2 --framework tensorflow")
        yield book


def test_trains_as_mirrored_does_and_waits_are_read_back(book):
    cell = book.ok(CELL.format(flags="--steps 30 --inject slow=1:50ms"))
    run = book["_run"]
    assert (run.state, run.engines) == ("finished", (0, 1))
    assert "interface" in cell.text
    history = run.history
    wait_ms = [
        np.nanmedian(history["sync_wait_s"][history["rank"] == rank]) * 1e3 for rank in (0, 1)
    ]
    assert wait_ms == pytest.approx([50, 0], abs=5)
    loss, weights = history["loss"], run.weights()
    book.ok(CELL.format(flags="--steps 30").replace("multi_worker_mirrored", "mirrored"))
    assert book["_run"].history["loss"] == pytest.approx(loss, abs=1e-5)
    other = book["_run"].weights()
    assert other.keys() == weights.keys() != set()
    assert all(np.allclose(weights[name], other[name], atol=5e-5) for name in other)


@pytest.mark.timing
def test_a_dead_worker_is_named_and_the_next_run_works(book):
    alive = book.ok(CELL.format(flags="--steps 10"))
    cell = book.run(CELL.format(flags="--inject kill=1@10"))

    assert cell.error is not None
    assert book["_run"].state == "failed"
    assert "Rank 1 is gone" in cell.text
    assert cell.text.count("is gone") == 1
    assert book.ok("%cluster").text.count("dead") == 1  # the one that waited for it lives
    assert cell.seconds < 2 * alive.seconds
    book.ok("%cluster restart 1")
    book.ok(CELL.format(flags="--steps 10"))
    assert book["_run"].state == "finished"


FIT = """
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(optimizer="adam", loss=loss)
model.fit(*wb.data.digits("train", arrays=True), epochs=10_000, batch_size=64)
"""
WB_FIT = (
    FIT[: FIT.index("model.compile")]
    + """
wb.fit(model, wb.data.digits("train", arrays=True), loss=loss, batch_size=64, steps=1_000_000,
       optimizer=keras.optimizers.Adam())
"""
)
LOOP = """
import keras, tensorflow as tf
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")
optimizer = keras.optimizers.Adam()

def step(x, y):
    with tf.GradientTape() as tape:
        loss = tf.nn.compute_average_loss(losses(y, model(x)), global_batch_size=64)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))

@tf.function
def train_step(batch):
    strategy.run(step, args=batch)

data = tf.data.Dataset.from_tensor_slices(wb.data.digits("train", arrays=True)).batch(64).repeat()
for batch in strategy.experimental_distribute_dataset(data):
    train_step(batch)
"""


def start(book, source, **settings):
    from workbench.notebook.session import session

    run = session.need_cluster().run(
        source, strategy="multi_worker_mirrored", workers=2, framework="tensorflow", **settings
    )
    assert soon(lambda: run.history.totals.steps > 5, 120)
    return run


@pytest.mark.parametrize("source", [FIT, WB_FIT, LOOP], ids=["fit", "wb_fit", "loop"])
def test_pause_and_stop_reach_all_workers_at_one_step(book, source):
    run = start(book, source)
    run.pause()
    assert soon(lambda: run.state == "paused")
    steps = run.history.totals.steps
    assert not soon(lambda: run.history.totals.steps > steps + 1, 0.5)
    run.resume()
    assert soon(lambda: run.history.totals.steps > steps + 5)
    run.stop()
    run.wait(30)
    assert run.state == "stopped"
    history = run.history
    last = [history["step"][history["rank"] == rank].max() for rank in (0, 1)]
    assert last[0] == last[1]


TIMEOUT_S = 8.0  # the first steps, which the workers trace at their own pace, must fit


def test_a_worker_that_stalls_is_named_within_the_timeout_and_the_next_run_works(book):
    from workbench.notebook.session import session

    run = start(book, FIT, options={"timeout_s": TIMEOUT_S})
    stalled = session.need_cluster().engines[1].pid
    os.kill(stalled, signal.SIGSTOP)
    assert soon(lambda: run.state == "failed", 60)
    with pytest.raises(RunError, match=r"Rank 1 [\s\S]*WB-RUN-066"):
        run.wait(30)
    assert not gone([stalled], 5)
    book.run("%cluster restart 1")
    book.ok(CELL.format(flags="--steps 10"))


def test_a_mistake_of_one_worker_is_not_blamed_on_those_that_waited(book):
    cell = LOOP.replace("for batch", "if rank == 0: 1 / 0\nfor batch")
    lines = "%%distributed multi_worker_mirrored -n 2 --framework tensorflow --plot off"
    book.refused(lines + cell, "Rank 0", "ZeroDivisionError")
    book.run("%cluster restart 1")
    book.ok(CELL.format(flags="--steps 10"))
