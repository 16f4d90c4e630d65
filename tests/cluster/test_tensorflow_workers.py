"""TensorFlow over several engines in a notebook: the kernel passes their addresses on."""

import importlib.util

import numpy as np
import pytest
from notebook_shell import notebook

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
if importlib.util.find_spec("tensorflow") is None:  # not imported: this is a notebook's kernel
    pytest.skip("tensorflow is not installed", allow_module_level=True)

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
    assert "listen on every interface until the run is over" in cell.text
    history = run.history
    wait_ms = [
        np.nanmedian(history["sync_wait_s"][history["rank"] == rank]) * 1e3 for rank in (0, 1)
    ]
    assert wait_ms == pytest.approx([50, 0], abs=5)
    loss, weights = history["loss"], run.weights()
    book.ok(CELL.format(flags="--steps 30").replace("multi_worker_mirrored", "mirrored"))
    assert book["_run"].history["loss"] == pytest.approx(loss, abs=1e-5)
    other = book["_run"].weights()
    assert all(np.allclose(weights[name], other[name], atol=5e-5) for name in other)


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
