"""What TensorFlow's strategies with one engine per worker must honour."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import tf_cells
from tf_harness import Report, clean
from tf_workers import Workers

from workbench import metrics

pytest.importorskip("tensorflow")
pytestmark = pytest.mark.tensorflow

WAYS = {"fit": tf_cells.WB_FIT, "keras": tf_cells.KERAS_FIT, "loop": tf_cells.OWN_LOOP}
STRATEGY = "multi_worker_mirrored"


@pytest.fixture(scope="module")
def pair() -> Iterator[Workers]:
    workers = Workers(2)
    yield workers
    workers.close()


def settings(**changed: Any) -> dict[str, Any]:
    return {
        "SIZES": (120, 24), "DTYPE": "float32", "OPTIMIZER": "SGD", "EXTRA": {}, "GRAPH": True,
        "STEPS": 20, **changed,
    }  # fmt: skip


def rows_of(reports: list[Report]) -> Any:
    return np.concatenate([report.rows for report in reports], axis=1)


@pytest.mark.parametrize(
    ("optimizer", "tolerance"), [("SGD", 2e-7), ("Adam", 5e-5)], ids=["SGD", "Adam"]
)
@pytest.mark.parametrize("way", WAYS)
def test_trains_exactly_as_one_device_does(
    pair: Workers, way: str, optimizer: str, tolerance: float
) -> None:
    names = settings(OPTIMIZER=optimizer)
    truth = clean(pair.run("one_device", WAYS[way], workers=1, names=names)[0])
    reports = [clean(report) for report in pair.run(STRATEGY, WAYS[way], names=names)]
    first, second = (report.weights for report in reports)
    assert first.keys() == truth.weights.keys()
    assert all((first[name] == second[name]).all() for name in first)  # to the last bit
    assert max(float(abs(first[name] - truth.weights[name]).max()) for name in first) <= tolerance
    loss, true_loss = metrics.derive(rows_of(reports)).loss, metrics.derive(truth.rows).loss
    assert np.allclose(loss, true_loss, rtol=0, atol=max(10 * tolerance, 1e-6))
