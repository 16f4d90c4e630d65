"""Code that is written for Horovod trains as it says, and is recorded."""

from __future__ import annotations

import horovod_cells
import pytest
from worker_reports import clean
from workers import Workers

pytestmark = pytest.mark.torch

KINDS = (
    "plain", "adam", "passes", "clipped", "sum", "predivide", "sparse", "thawed", "closure",
    "asked between",
)  # fmt: skip


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_averaged_as_on_one_device(workers: Workers, kind: str, count: int) -> None:
    reports = clean(workers.run("mirrored", horovod_cells.trained, kind, workers=count))
    truth = workers.truth(horovod_cells.trained, kind)
    for report in reports:
        assert report.trained == 6
        for name, value in truth.value.items():
            assert abs(report.value[name] - value).max() <= 1e-10, name
