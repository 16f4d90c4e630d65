"""TensorFlow's model_split gives one device's results.

Apart from its other tests: after these, a Keras fit with validation data has been seen to end the
process by a segmentation fault.
"""

from __future__ import annotations

import numpy as np
import pytest
from needs import need
from tf_cells import WAYS
from tf_harness import clean
from tf_split import furthest, train

need("tensorflow")
pytestmark = pytest.mark.tensorflow


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("optimizer", "dtype", "tolerance"), [("SGD", "float32", 5e-7), ("Adam", "float64", 1e-10)]
)
def test_trains_exactly_as_one_device_does(way, stages, optimizer, dtype, tolerance):
    settings = {"OPTIMIZER": optimizer, "DTYPE": dtype}
    truth = clean(train("one_device", WAYS[way], **settings))
    report = clean(train("model_split", WAYS[way], stages, **settings))
    assert report.trained == truth.trained == 20
    assert furthest(report, truth) <= tolerance
    last = report.rows[:, -1]["local_loss"]
    assert abs(last - truth.rows[:, 0]["local_loss"]).max() < 1e-5
    assert np.isnan(report.rows[:, :-1]["local_loss"]).all()
    assert (report.rows["samples"] == 24).all()
