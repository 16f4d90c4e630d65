"""A line with several numbers of replicas, plain Keras."""

from __future__ import annotations

import pytest
from needs import need
from notebook_shell import notebook

import workbench as wb

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

KERAS = """
import keras
rate = wb.options.get("lr", 0.1)
batch = wb.options.get("batch_size", 64)
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer=keras.optimizers.SGD(rate),
              loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=1, batch_size=batch)
"""


def test_keras_is_swept_over_replicas_and_values() -> None:
    with notebook(2) as book:
        book.ok("%%distributed one_device,mirrored -n 1,2,3 --batch-per-worker 32 --price 2.5 "
                f"--framework tensorflow --plot text\n{KERAS}")  # fmt: skip
        names = list(wb.runs)[-4:]
        found = wb.compare(*names).scaling(price=2.5).scaling
        swept = wb.sweep(KERAS, "one_device", framework="tensorflow", values={"lr": [0.5, 0.0]})
    assert names == ["one_device", "mirrored-n1", "mirrored-n2", "mirrored-n3"]
    (curve,) = found.curves
    assert (curve.mode, curve.law.name) == ("weak", "Gustafson")
    assert [(point.workers, point.batch) for point in curve.points] == [(1, 32), (2, 64), (3, 96)]
    assert curve.base.strategy == "one_device"
    assert all(point.measured for point in curve.points)
    assert all(point.cost is not None and point.cost.is_epoch for point in curve.points)
    assert [row.options["lr"] for row in swept.comparison.rows] == [0.5, 0.0]
    moving, still = (row.final_loss.mean for row in swept.comparison.rows)
    assert moving < still
