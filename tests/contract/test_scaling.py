"""Scaled losses (fp16): overflows are met by all workers together, and cost no row and no turn."""

from __future__ import annotations

import pytest
import scaling_cells
from worker_reports import assert_same, clean
from workers import Workers

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", ["tensor_parallel", "sharded", "mirrored"])
def test_a_scaled_loss_trains_as_on_one_device(
    workers: Workers, name: str, clip: float | None
) -> None:
    keywords = {"clip": clip, "overflow": 3 if name == "tensor_parallel" else -1}
    truth = workers.truth(scaling_cells.fitted, **keywords)
    reports = clean(workers.run(name, scaling_cells.fitted, workers=2, keywords=keywords))
    assert_same(reports, truth, 1e-12)
    assert [report.value for report in reports] == [truth.value] * 2
    assert len(set(truth.value)) == (2 if name == "tensor_parallel" else 1)  # it was halved once


@pytest.mark.parametrize("name", ["one_device", "mirrored", "local_sgd", "gossip"])
def test_a_step_that_a_loop_passes_over_has_its_row_and_its_turn(
    workers: Workers, name: str
) -> None:
    count = 1 if name == "one_device" else 2
    options = {"every": "2"} if name == "local_sgd" else {}
    reports = clean(workers.run(name, scaling_cells.looped, workers=count, options=options))
    for report in reports:
        assert report.value[:2] == (8, 8)
        assert sorted(report.rows["step"]) == list(range(8))
    assert reports[-1].value[2] == 32768.0


@pytest.mark.parametrize("name", ["central_storage", "parameter_server"])
def test_servers_refuse_a_loops_own_scaler(workers: Workers, name: str) -> None:
    for report in workers.run(name, scaling_cells.looped, workers=2):
        assert "WB-FIT-128" in str(report.error)
        assert "GradScaler" in str(report.error)


def test_a_scaler_that_is_switched_off_is_none(workers: Workers) -> None:
    keywords = {"enabled": False, "overflow": -1}
    reports = workers.run("central_storage", scaling_cells.looped, workers=2, keywords=keywords)
    assert [report.value[:2] for report in clean(reports)] == [(8, 8)] * 2
