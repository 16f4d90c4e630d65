"""TensorFlow's parameter server on real engines: a coordinator, workers and servers."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest
from needs import need
from notebook_shell import WAIT_S

import workbench as wb
from workbench.errors import RunError
from workbench.execution.run import Run
from workbench.shared.messages import Told

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

MODEL = """
import keras, tensorflow as tf, workbench as wb
x, y = wb.data.digits("train", arrays=True)
model = keras.Sequential([
    keras.Input(x.shape[1:]), keras.layers.Flatten(), keras.layers.Dense(16, activation="tanh"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.1), keras.layers.Dense(10),
])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
FIT = (
    MODEL
    + """
wb.fit(model, (x, y), loss=loss, batch_size=64, epochs={epochs},
       optimizer=lambda p: keras.optimizers.SGD(0.2),
       metrics={{"accuracy": keras.metrics.SparseCategoricalAccuracy()}},
       eval_data=wb.data.digits("test", arrays=True))
"""
)
KERAS = (
    MODEL
    + """
model.compile(optimizer=keras.optimizers.SGD(0.2), loss=loss, metrics=["accuracy"])
kept = model.fit({data}, epochs={epochs}, validation_data=wb.data.digits("test", arrays=True),
                 callbacks=[{callback}])
history = kept.history
scores = model.evaluate(*wb.data.digits("test", arrays=True), return_dict=True)
shape = model.predict(x[:40]).shape
"""
)
LOOP = (
    MODEL
    + """
optimizer = keras.optimizers.SGD(0.2)

@tf.function
def step(iterator):
    def replica(batch):
        a, b = batch
        with tf.GradientTape() as tape:
            value = loss(b, model(a, training=True))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return value
    return strategy.run(replica, args=(next(iterator),))

optimizer.build(model.trainable_variables)
data = lambda: tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000).repeat().batch(32)
iterator = iter(coordinator.create_per_worker_dataset(data))
for _ in range({steps}):
    last = coordinator.schedule(step, args=(iterator,))
coordinator.join()
"""
)
ARRAYS = "x, y, batch_size=64"
DATASET = "tf.data.Dataset.from_tensor_slices((x, y)).shuffle(2000).batch(64)"


@pytest.fixture(scope="module")
def cluster():
    with wb.Cluster(1, devices="cpu", framework="tensorflow") as cluster:
        yield cluster


def train(cluster, source, workers=2, **more):
    return cluster.run(source, strategy="parameter_server", workers=workers, **more)


def keras(data=ARRAYS, epochs=2, callback=""):
    return KERAS.format(data=data, epochs=epochs, callback=callback)


def of(run, rank, column):
    rows = run.history
    return np.asarray(rows[column], float)[np.asarray(rows["rank"]) == rank]


def listening(pid):
    """Inodes of the sockets on which a process listens."""
    inodes = set()
    for name in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]:
            columns = line.split()
            inodes |= {columns[9]} if columns[3] == "0A" else set()
    links = [
        os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir() if entry.is_symlink()
    ]
    return inodes & {link[8:-1] for link in links if link.startswith("socket:[")}


def begun(run):
    while run.state in ("pending", "starting"):
        run.over.wait(0.05)
    while not run.is_over and len(run.history["rank"]) < 4:
        run.over.wait(0.05)


WAYS = {
    "fit": FIT.format(epochs=2),
    "keras": keras(),
    "dataset": keras(DATASET),
    "loop": LOOP.format(steps=92) + "ended = float(last.fetch())\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_workers_take_steps_at_their_own_pace(cluster, way):
    before = {e.id: listening(e.pid) for e in cluster.engines}
    run = train(cluster, WAYS[way]).wait(WAIT_S)
    assert run.state == "finished", run.error
    assert len(run.history["rank"]) == 92  # two per global batch of 64; 1437 samples make 23
    assert set(run.history["rank"]) == {0, 1}
    for rank in (0, 1):
        assert list(of(run, rank, "step")) == list(range(len(of(run, rank, "step"))))
        assert np.all(of(run, rank, "sync_wait_s") == 0)
        named = of(run, rank, "data_wait_s") + of(run, rank, "compute_s")
        assert named.sum() >= 0.8 * of(run, rank, "step_s").sum()
    assert 0.5 <= np.nanmean(run.history["staleness"]) <= 1.5
    losses = np.asarray(run.history["local_loss"], float)
    seen = losses[~np.isnan(losses)]
    assert len(seen) == 92 or (way == "loop" and len(seen) >= 2)
    if way == "loop":  # its rows may hold no loss but those of the workers' first closures
        assert cluster.pull(["ended"], ids=[0])[0]["ended"] < 0.8 * max(seen)
    else:
        assert seen[-1] < seen[0]
    assert run.weights()["sequential/dense/kernel"].shape == (64, 16)
    assert "transfer_s" in run.history.unmeasured
    for engine in cluster.engines:
        left = listening(engine.pid)
        assert not left - before.get(engine.id, left)
        assert engine.id in before or len(left) <= len(before[0])


def test_keras_history_and_later_cells(cluster):
    run = train(cluster, keras(epochs=3)).wait(WAIT_S)
    assert run.state == "finished", run.error
    asked = ["history", "scores", "shape"]
    values = cluster.pull(asked, ids=[0])[0]
    assert {k: len(v) for k, v in values["history"].items()} == dict.fromkeys(
        ("accuracy", "loss", "val_accuracy", "val_loss"), 3
    )
    assert values["history"]["val_accuracy"][-1] == pytest.approx(values["scores"]["accuracy"])
    assert values["history"]["loss"][-1] < values["history"]["loss"][0]
    assert values["shape"] == (40, 10)
    assert len(run.evals) == 3
    # The model has come home: it is this engine's own in the next cell, with the final weights.
    task = cluster.execute(
        "scored = float(loss(y, model(x, training=False)))\n"
        "same = model.get_weights()[0]; model.fit(x, y, verbose=0); again = len(model.weights)"
    )
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    assert np.array_equal(
        cluster.pull(["same"], ids=[0])[0]["same"], run.weights()["sequential/dense/kernel"]
    )


def test_one_worker_equals_one_device(cluster):
    cell = MODEL.replace("keras.layers.Dropout(0.1), ", "") + (
        "wb.fit(model, (x, y), loss=loss, batch_size=64, steps=20,\n"
        "       optimizer=lambda p: keras.optimizers.SGD(0.2))"
    )
    runs = [
        cluster.run(cell, strategy=strategy, workers=1, framework="tensorflow").wait(WAIT_S)
        for strategy in ("one_device", "parameter_server")
    ]
    one, other = (run.weights() for run in runs)
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_allclose(other[name], one[name], atol=2e-6, err_msg=name)


def test_a_slow_worker_takes_fewer_closures_of_greater_staleness(cluster):
    run = train(cluster, LOOP.format(steps=120), inject=["slow=1:50ms"]).wait(WAIT_S)
    fast, slow = of(run, 0, "compute_s"), of(run, 1, "compute_s")
    assert np.median(slow) - np.median(fast) == pytest.approx(0.05, abs=0.03)
    assert len(slow) < 0.6 * len(fast)
    assert of(run, 1, "staleness").mean() > 2 * max(0.3, of(run, 0, "staleness").mean())


@pytest.mark.parametrize("source", [keras(epochs=1000), LOOP.format(steps=100_000)])
def test_pause_and_stop_between_closures(cluster, source):
    run = train(cluster, source)
    begun(run)
    run.pause()
    while run.state != "paused":
        assert not run.over.wait(0.05), run.error
    run.over.wait(0.3)  # what was under way ends
    rows = len(run.history["rank"])
    run.over.wait(0.5)
    assert len(run.history["rank"]) == rows
    run.resume()
    while len(run.history["rank"]) <= rows:
        assert not run.over.wait(0.05), run.error
    run.stop()
    run.wait(WAIT_S)
    assert run.state == "stopped"
    assert run.weights()["sequential/dense/kernel"].shape == (64, 16)


def test_a_killed_worker_is_survived_and_said(cluster):
    run = train(cluster, LOOP.format(steps=150), inject=["kill=1@10"]).wait(WAIT_S)
    assert run.state == "finished", run.error
    assert len(run.history["rank"]) == 150
    assert any("Worker 1" in note for note in run.history.story.notes)
    assert len(of(run, 1, "step")) <= 12
    again = train(cluster, FIT.format(epochs=1)).wait(WAIT_S)
    assert set(again.history["rank"]) == {0, 1}


def test_a_killed_server_is_named(cluster):
    run = train(cluster, LOOP.format(steps=100_000))
    begun(run)
    (server,) = [e for e in cluster.engines if e.id == run.task.ids[-1]]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"Server s0 .*WB-RUN-066"):
        run.wait(WAIT_S)
    again = train(cluster, FIT.format(epochs=1)).wait(WAIT_S)
    assert again.state == "finished"


OWN_STEP = """
class Own(keras.Sequential):
    def train_step(self, data):
        return {"loss": 0.0}
model = Own([keras.layers.Flatten(), keras.layers.Dense(10)])
"""
PARTS = """
import tensorflow as tf, workbench as wb
table = tf.Variable(tf.ones((100, 4)))
places = [v.device.rpartition("/job:")[2] for v in getattr(table, "variables", [table])]

@tf.function
def step():
    def replica():
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.nn.embedding_lookup(table, [1, 70]) ** 2)
        parts = getattr(table, "variables", [table])
        for part, gradient in zip(parts, tape.gradient(value, parts)):
            part.assign_sub(0.1 * tf.convert_to_tensor(gradient))
        return value
    return strategy.run(replica)

for _ in range(10):
    last = coordinator.schedule(step)
coordinator.join()
"""


@pytest.mark.parametrize(
    ("options", "tasks"),
    [
        ({"servers": 2, "partitioner": "fixed:2"}, ["ps/replica:0/task:0", "ps/replica:0/task:1"]),
        ({"servers": 2, "partitioner": "min_size:100000"}, ["ps/replica:0/task:0"]),
        ({}, ["ps/replica:0/task:0"]),
    ],
)
def test_a_variable_is_cut_as_asked(cluster, options, tasks):
    run = train(cluster, PARTS, options=options).wait(WAIT_S)
    assert run.state == "finished"
    places = cluster.pull(["places"], ids=[0])[0]["places"]
    assert [place.partition("/device")[0] for place in places] == tasks
    assert len(run.history["rank"]) == 10


def test_a_worker_that_does_not_come_is_named(cluster, monkeypatch):
    train(cluster, FIT.format(epochs=1)).wait(WAIT_S)  # the engines are there
    told = Run._tell

    def tell(run, message):
        if not (isinstance(message, Told) and (message.topic, message.rank) == ("up", 3)):
            told(run, message)

    monkeypatch.setattr(Run, "_tell", tell)
    cell = "import workbench.strategies.tensorflow.parameter_server as one; one.MEET_S = {}"
    cluster.execute(cell.format(2)).over.wait(WAIT_S)
    with pytest.raises(RunError, match=r"WB-CLUSTER-025[\s\S]*worker 1"):
        train(cluster, FIT.format(epochs=1)).wait(WAIT_S)
    monkeypatch.undo()
    cluster.execute(cell.format(60)).over.wait(WAIT_S)
    assert train(cluster, FIT.format(epochs=1)).wait(WAIT_S).state == "finished"


MISTAKES = {
    "on_train_batch_end": keras(
        callback="type('Mine', (keras.callbacks.Callback,), "
        "{'on_train_batch_end': lambda self, batch, logs=None: None})()"
    ),
    "Own.train_step": keras().replace("model.compile", OWN_STEP + "model.compile"),
    "on_step_end": FIT.format(epochs=1).replace("epochs=1,", "epochs=1, callbacks=print,"),
}


@pytest.mark.parametrize("seen", MISTAKES)
def test_what_closures_cannot_carry_is_refused(cluster, seen):
    with pytest.raises(RunError, match=seen) as refused:
        train(cluster, MISTAKES[seen]).wait(WAIT_S)
    assert "coordinator.schedule" in str(refused.value)
    assert train(cluster, FIT.format(epochs=1)).wait(WAIT_S).state == "finished"
