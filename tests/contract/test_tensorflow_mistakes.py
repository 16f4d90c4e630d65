"""Mistakes with Keras: what was seen, what is allowed, what to do; the engine trains on."""

from __future__ import annotations

import os
import sys
import types

import pytest
from needs import need
from tf_harness import clean, run

need("tensorflow")
pytestmark = pytest.mark.tensorflow

HEAD = """
import keras, numpy as np, tensorflow as tf
x, y = np.ones((64, 4), "float32"), np.ones((64, 3), "float32")
model = keras.Sequential([keras.layers.Dense(3)])
data = tf.data.Dataset.from_tensor_slices((x, y))
loss, optimizer = keras.losses.MeanSquaredError(), keras.optimizers.SGD(0.1)
"""
COMPILED = HEAD + "model.compile(optimizer, loss)\n"
TORCH = (
    "import torch\nset_ = torch.utils.data.TensorDataset(torch.ones(64, 4), torch.ones(64, 3))\n"
)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (HEAD + "model.fit(x, y)", ["WB-FIT-082", "model.compile("]),
        (
            COMPILED + "model.fit(x, y, batch_size=30)",
            ["30", "4 replicas", "batch_size=32", "or", "28"],
        ),
        (
            COMPILED + "model.fit(data.batch(30))",
            ["30", "4 replicas", "data.batch(32) or data.batch(28)"],
        ),
        (
            COMPILED + "model.fit(data.batch(32), batch_size=16)",
            ["WB-FIT-090", "batches of 32", "batch_size=16", "remove batch_size"],
        ),
        (
            HEAD + "wb.fit(model, data.batch(32), loss=loss, optimizer=optimizer, batch_size=16)",
            ["WB-FIT-039", "batches of 32, batch_size=16"],
        ),
        (COMPILED + "model.fit(data)", ["WB-FIT-089", "(4,), (3,)", ".batch(64)"]),
        (
            "import keras\noutside.compile('sgd', 'mse')\noutside.fit([[1.0]], [[1.0]])",
            ["WB-FIT-074"],
        ),
        (
            HEAD + "model.compile(early, loss)\nmodel.fit(x, y)",
            ["WB-FIT-083"],
        ),
        (
            COMPILED + TORCH + "model.fit(torch.utils.data.DataLoader(set_, batch_size=32))",
            ["WB-FIT-088", "DataLoader", "x.numpy()"],
        ),
        (
            HEAD + TORCH + "wb.fit(model, set_, loss=loss, optimizer=optimizer, batch_size=16)",
            ["WB-FIT-033", "TensorDataset", "x.numpy()"],
        ),
        (
            HEAD + TORCH + "wb.fit(torch.nn.Linear(4, 3), (x, y), loss=loss, optimizer=optimizer, "
            "batch_size=16)",
            ["WB-FIT-042", "torch module"],
        ),
        (
            HEAD + TORCH + "wb.fit(model, (x, y), loss=torch.nn.MSELoss(), optimizer=optimizer, "
            "batch_size=16)",
            ["WB-FIT-101", "MSELoss", "keras.losses"],
        ),
        (COMPILED + "wb.prepare(model, None)", ["wb.prepare", "use model.fit"]),
        (COMPILED + "model.fit(epochs=2)", ["WB-FIT-084", "model.fit(x, y, ...)"]),
        (COMPILED + "model.fit(x)", ["WB-FIT-086", "(64, 4)"]),
        (COMPILED + "model.fit(x.tolist(), y)", ["WB-FIT-085", "list with 64", "numpy.array(x)"]),
        (
            COMPILED + "model.fit(x, y, epoch=2)",
            ["WB-FIT-087", "'epoch'", "did you mean 'epochs'"],
        ),
    ],
)
def test_a_mistake_is_named_with_the_next_step(cell, words):
    import keras

    if "torch" in cell:
        need("torch")
    names = {"outside": keras.Sequential([keras.layers.Dense(1)]), "early": keras.optimizers.SGD()}
    report = run("mirrored", cell, 4, names=names)
    assert report.error is not None
    assert report.error.startswith("FitError"), report.error
    assert all(word in report.error for word in words), report.error
    assert report.trained == 0
    trains()


def trains():
    report = clean(run("mirrored", COMPILED + "model.fit(x, y, batch_size=32)", 4))
    assert report.trained == 2


@pytest.mark.parametrize(
    ("cell", "words"),
    [  # the others' messages are in unit/test_advice.py
        ("model.compile('sgd', 'categorical_crossentropy')\nmodel.fit(x, classes)",
         ["class numbers", "has 3 values", "sparse_categorical_crossentropy"]),
        ("model.compile('sgd', 'mse')\nmodel.fit(x, y[:, :2])",
         ["[16,2] and [16,3]", "last layer"]),
        ("model = keras.Sequential([keras.layers.Conv2D(4, 3)])\nmodel.compile('sgd', 'mse')\n"
         "model.fit(np.ones((64, 8, 8), 'float32'), y)", ["4 axes", "x[..., None]"]),
    ],
)  # fmt: skip
def test_what_keras_names_without_a_way_out_gets_a_next_step(cell, words):
    from workbench.engine.debugging.tracebacks import advice

    report = run("mirrored", HEAD + "classes = np.arange(64) % 3\n" + cell, 2)
    assert report.error is not None
    step = advice(report.error)
    assert step is not None, report.error
    assert all(word in step for word in words), step


def test_a_model_that_needs_no_labels_trains_without():
    cell = HEAD + (
        "class Own(keras.Model):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.layer = keras.layers.Dense(4)\n"
        "    def call(self, x):\n        return self.layer(x)\n"
        "    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **more):\n"
        "        return keras.ops.mean((x - y_pred) ** 2)\n"
        "model = Own()\nmodel.compile('sgd', 'mse')\nmodel.fit(x, batch_size=32)"
    )
    assert clean(run("mirrored", cell, 2)).trained == 2


def test_torch_tensors_are_as_good_as_arrays():
    need("torch")
    cell = COMPILED + "import torch\nmodel.fit(torch.from_numpy(x), torch.from_numpy(y))"
    assert clean(run("mirrored", cell, 4)).trained == 2


def test_a_tf_config_of_the_users_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", '{"cluster": {"worker": ["a:1"]}}')
    report = run("mirrored", COMPILED + "model.fit(x, y)", 4)
    assert report.error is not None
    for word in ("ClusterError", "WB-CLUSTER-028", '"worker": ["a:1"]', "del os.environ"):
        assert word in report.error
    assert report.left == []
    del os.environ["TF_CONFIG"]
    trains()


def test_keras_with_another_backend_is_refused(monkeypatch):
    import keras

    monkeypatch.setattr(keras.backend, "backend", lambda: "jax")
    report = run("mirrored", COMPILED + "model.fit(x, y)", 4)
    assert report.error is not None
    for word in ("ClusterError", "KERAS_BACKEND=jax", "tensorflow", "%cluster restart"):
        assert word in report.error
    monkeypatch.undo()
    trains()


DEVICES = """
import tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 4)
"""


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (DEVICES, ["logical CPU devices", "-n"]),
        (
            HEAD + "import torch\nwb.fit(model, (x, y), loss=loss, batch_size=16, "
            "optimizer=lambda p: torch.optim.SGD(p, 0.1))",
            ["PyTorch optimizer", "keras.optimizers"],
        ),
    ],
)
def test_what_others_raise_is_explained(cell, words):
    from workbench.engine.tensorflow.support import explain

    if "torch" in cell:
        need("torch")
    report = run("mirrored", cell, 4)
    assert report.error is not None
    text = explain(RuntimeError(report.error.partition("Traceback")[0]))
    assert text is not None
    assert all(word in text for word in words), text
    trains()


def test_keras_2_is_said_not_to_be_watched(monkeypatch):
    monkeypatch.setitem(sys.modules, "tf_keras", types.ModuleType("tf_keras"))
    report = clean(run("mirrored", "import tf_keras", 4))
    assert "tf_keras" in report.emitted("note")[0]["text"]
    monkeypatch.undo()
    assert clean(run("mirrored", "x = 1", 4)).emitted("note") == []


TUTORIAL = """
import tensorflow as tf, keras, numpy as np
strategy = tf.distribute.MirroredStrategy()
print("Number of devices: {}".format(strategy.num_replicas_in_sync))
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(3)])
    model.compile(loss="mse", optimizer=keras.optimizers.Adam(), metrics=["accuracy"])
history = model.fit(np.ones((64, 4), "float32"), np.ones((64, 3), "float32"), epochs=2)
"""


def test_a_tutorials_own_strategy_is_the_runs_where_it_is_of_the_kind_on_the_line():
    import tensorflow as tf

    before = tf.distribute.MirroredStrategy
    report = clean(run("mirrored", TUTORIAL, 2))
    assert report.trained == 4
    assert report.names["strategy"].num_replicas_in_sync == 2
    assert isinstance(report.names["strategy"], tf.distribute.MirroredStrategy)
    assert any("MirroredStrategy" in note["text"]
               for note in report.emitted("note"))  # fmt: skip
    assert tf.distribute.MirroredStrategy is before
    assert tf.distribute.MirroredStrategy(["CPU:0"]) is not report.names["strategy"]
    given = TUTORIAL.replace("Strategy()", "Strategy(['GPU:0'])")
    notes = clean(run("mirrored", given, 2)).emitted("note")
    assert any("no effect" in note["text"] for note in notes)
    central = TUTORIAL.replace("MirroredStrategy()", "experimental.CentralStorageStrategy()")
    assert clean(run("central_storage", central, 2)).trained == 4
    alone = TUTORIAL.replace("Mirrored", "experimental.MultiWorkerMirrored")
    assert clean(run("multi_worker_mirrored", alone, 1)).trained == 4


def test_a_strategy_of_another_kind_than_the_line_names_is_refused_with_the_word_for_the_line():
    report = run("one_device", TUTORIAL)
    assert report.error is not None
    assert report.error.startswith("FitError")
    for word in (
        "tf.distribute.MirroredStrategy",
        "under one_device",
        "WB-FIT-097",
        "mirrored",
    ):
        assert word in report.error
    assert report.left == []


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        (
            HEAD + "model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(True))\n"
            "model.fit(x, np.arange(64) % 5)",
            ["label 4:", "3 outputs"],
        ),
        (
            COMPILED + "def read(a): raise KeyError('no such file')\n"
            "def shaped(a, b):\n"
            "    return tf.ensure_shape(tf.py_function(read, [a], tf.float32), 4), b\n"
            "model.fit(data.map(shaped).batch(32))",
            ["function", "KeyError: 'no such file'"],
        ),
    ],
)
def test_what_a_graph_raises_is_followed_by_the_next_step(cell, words):
    from workbench.engine.debugging.tracebacks import advice

    report = run("mirrored", cell, 2)
    assert report.error is not None
    step = advice(report.error)
    assert step is not None
    assert all(word in step for word in words), step
