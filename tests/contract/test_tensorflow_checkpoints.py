"""TensorFlow's runs go on from a checkpoint as if never interrupted."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tf_cells
from needs import need
from tf_harness import Report, clean, run

from workbench import catalog
from workbench.shared import checkpoints

need("tensorflow")
pytestmark = pytest.mark.tensorflow

WAYS = {"fit": tf_cells.WB_FIT, "keras": tf_cells.KERAS_FIT}
ENTRIES = [
    entry
    for entry in catalog.strategies("tensorflow")
    if entry.one_engine and entry.sync and entry.anywhere
]
DROPOUT = tf_cells.KERAS_FIT.replace(
    'keras.layers.Dense(16, "tanh"),', 'keras.layers.Dense(16, "tanh"), keras.layers.Dropout(0.5),'
).replace(
    "history = model.fit(x, y,", "history = model.fit(x, y, validation_data=(x[:24], y[:24]),"
)


def train(name: str, cell: str, steps: int, workers: int = 2, **told: Any) -> Report:
    workers = min(workers, catalog.lookup(name, "tensorflow").max_workers or workers)
    names = {"SIZES": (120, 24), "DTYPE": "float64", "OPTIMIZER": "Adam", "EXTRA": {}}
    report = run(name, cell, workers, names=names, overrides={"steps": steps}, told=told)
    return clean(report)


@functools.cache
def whole(name: str, cell: str) -> Report:
    """A run that nothing interrupted."""
    return train(name, cell, 20)


def apart(report: Report, truth: Report) -> float:
    assert truth.weights
    assert report.weights.keys() == truth.weights.keys()
    return max(float(abs(report.weights[k] - truth.weights[k]).max()) for k in truth.weights)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_the_same_replicas_go_on_bit_for_bit(
    tmp_path: Path, entry: catalog.Strategy, way: str
) -> None:
    truth = whole(entry.name, WAYS[way])
    first = train(entry.name, WAYS[way], 13, checkpoint=str(tmp_path), checkpoint_every=6)
    assert [one.step for one in checkpoints.found(tmp_path)] == [12, 13]
    assert [e["step"] for e in first.emitted("checkpoint")] == [6, 12, 13]
    again = train(entry.name, WAYS[way], 20, resume=str(tmp_path / "step-12"))
    assert again.rows["step"][:, 0].tolist() == list(range(12, 20))
    assert apart(again, truth) == 0.0
    np.testing.assert_array_equal(again.rows["local_loss"], truth.rows["local_loss"][12:])


SHUFFLED = {
    "tf.data": """
data = tf.data.Dataset.from_tensor_slices((x, y)).shuffle(SIZE, seed=3).batch(BATCH)
""",
    "PyDataset": """
class Rows(keras.utils.PyDataset):
    def __init__(self):
        super().__init__()
        self.generator = np.random.default_rng(3)
        self.on_epoch_end()
    def __len__(self):
        return SIZE // BATCH
    def __getitem__(self, index):
        places = self.order[index * BATCH : (index + 1) * BATCH]
        return np.asarray(x)[places], np.asarray(y)[places]
    def on_epoch_end(self):
        self.order = self.generator.permutation(SIZE)
data = Rows()
""",
}


@pytest.mark.parametrize("kind", SHUFFLED)
@pytest.mark.parametrize("step", [10, 12])
def test_a_stream_that_shuffles_goes_on_in_its_order(tmp_path: Path, kind: str, step: int) -> None:
    cell = tf_cells.WB_FIT.replace("model, (x, y), ", "model, data, ")
    cell = cell.replace("result = wb.fit(", "import numpy as np\n" + SHUFFLED[kind] + "wb.fit(")
    cell = cell.replace("evals = result.evals", "")
    truth = whole("mirrored", cell)
    train("mirrored", cell, 13, checkpoint=str(tmp_path), checkpoint_every=step // 2)
    again = train("mirrored", cell, 20, resume=str(tmp_path / f"step-{step}"))
    assert apart(again, truth) == 0.0


def test_another_number_of_replicas_goes_on_to_the_same_result(tmp_path: Path) -> None:
    truth = whole("one_device", tf_cells.WB_FIT)
    train("mirrored", tf_cells.WB_FIT, 13, checkpoint=str(tmp_path), checkpoint_every=6)
    again = train("mirrored", tf_cells.WB_FIT, 20, workers=4, resume=str(tmp_path / "step-12"))
    assert apart(again, truth) <= 1e-10


def test_dropout_and_an_epochs_metrics_are_what_they_would_have_been(tmp_path: Path) -> None:
    truth = whole("mirrored", DROPOUT)
    train("mirrored", DROPOUT, 13, checkpoint=str(tmp_path), checkpoint_every=6)
    again = train("mirrored", DROPOUT, 20, resume=str(tmp_path / "step-12"))
    assert apart(again, truth) == 0.0
    for name, values in again.names["history"].history.items():
        np.testing.assert_allclose(values, truth.names["history"].history[name][2:], rtol=1e-12)


def test_what_is_written_is_a_checkpoint_of_tensorflows(tmp_path: Path) -> None:
    import tensorflow as tf

    report = train("one_device", tf_cells.WB_FIT, 6, checkpoint=str(tmp_path), checkpoint_every=6)
    found = tf.train.load_checkpoint(str(tmp_path / "step-6" / "state" / "arrays"))
    arrays = [found.get_tensor(name) for name in found.get_variable_to_shape_map()]
    assert report.weights
    for weight in report.weights.values():
        assert any(a.shape == weight.shape and (a == weight).all() for a in arrays)


def test_an_own_loop_is_refused(tmp_path: Path) -> None:
    names = {"SIZES": (120, 24), "DTYPE": "float64", "OPTIMIZER": "SGD", "EXTRA": {}}
    report = run(
        "mirrored", tf_cells.OWN_LOOP, 2, names={**names, "GRAPH": True, "STEPS": 5},
        told={"checkpoint": str(tmp_path), "checkpoint_every": 5},
    )  # fmt: skip
    assert "remove --checkpoint" in (report.error or "")
