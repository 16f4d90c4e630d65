"""TensorFlow's runs over several engines go on from a checkpoint."""

import numpy as np
import pytest
from needs import need
from notebook_shell import notebook, soon

import workbench as wb
from workbench.notebook.session import session
from workbench.shared import checkpoints

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

DATA = """
import keras, numpy as np, tensorflow as tf
keras.utils.set_random_seed(7)
rng = np.random.default_rng(0)
x, y = rng.normal(size=(120, 8)).astype("float32"), rng.integers(0, 3, 120)
model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
CELLS = {
    "fit": DATA
    + "wb.fit(model, (x, y), loss=loss, batch_size=24, steps=20,\n"
    + "       optimizer=lambda p: keras.optimizers.SGD(0.2, momentum=0.9))\n",
    "keras": DATA
    + "model.compile(optimizer=keras.optimizers.SGD(0.2, momentum=0.9), loss=loss)\n"
    + "model.fit(x, y, batch_size=24, epochs=4)\n",
}


@pytest.fixture(scope="module")
def cluster():
    with notebook(2):
        yield session.cluster
        busy = session.cluster.busy
        assert soon(lambda: busy is None or busy.is_over)


@pytest.mark.parametrize(
    ("name", "workers"), [("multi_worker_mirrored", 2), ("parameter_server", 1)]
)
@pytest.mark.parametrize("way", CELLS)
def test_it_goes_on_to_the_same_result(cluster, tmp_path, way, name, workers):
    settings = {"strategy": name, "workers": workers, "framework": "tensorflow"}
    whole = cluster.run(CELLS[way], steps=20, **settings).wait(240)
    cluster.run(
        CELLS[way], steps=13, checkpoint=str(tmp_path), checkpoint_every=6, **settings
    ).wait(240)
    assert [one.step for one in checkpoints.found(tmp_path)] == [12, 13]
    again = wb.resume(
        tmp_path / "step-12", steps=20, checkpoint=tmp_path / "other", cluster=cluster
    ).wait(240)
    assert again.history["step"].min() == 12
    assert again.history["step"].max() == 19
    assert whole.weights()
    for key, value in whole.weights().items():
        assert np.abs(again.weights()[key] - value).max() <= 1e-6, key
