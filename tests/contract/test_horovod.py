"""Code that is written for Horovod trains as it says, and is recorded."""

from __future__ import annotations

import horovod_cells
import numpy as np
import pytest
from worker_reports import clean, joined
from workers import Workers

from workbench.shared import record

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


def test_half_precision_is_sent_where_it_is_asked_for(workers: Workers) -> None:
    first, second = clean(workers.run("mirrored", horovod_cells.trained, "fp16", workers=2))
    truth = workers.truth(horovod_cells.trained, "plain")
    for name, value in truth.value.items():
        assert np.array_equal(first.value[name], second.value[name])
        assert abs(first.value[name] - value).max() <= 1e-2, name
    whole, _ = clean(workers.run("mirrored", horovod_cells.trained, "plain", workers=2))
    assert whole.rows["sent_bytes"][-1] == 4 * first.rows["sent_bytes"][-1] > 0


def test_messages_are_those_of_horovods_documentation(workers: Workers) -> None:
    first, second = (
        report.value for report in clean(workers.run("mirrored", horovod_cells.messages, workers=2))
    )
    assert (first["who"], second["who"]) == ((0, 2, 0, 2, 0, 1), (1, 2, 1, 2, 0, 1))
    for came in (first, second):
        assert came["mean"] == [0.5, 1.5, 2.5, 3.5]
        assert came["named"] == {
            "Sum": [1, 3, 5, 7], "Min": [0, 1, 2, 3], "Max": [1, 2, 3, 4],
            "Product": [0, 2, 6, 12],
        }  # fmt: skip
        assert came["by average"] == [1, 3, 5, 7]
        assert came["scaled"] == [2, 6, 10, 14]
        assert came["small"]
        assert came["whole"] == [3, 4]
        assert came["in place"] == (True, [1, 3, 5, 7], True)
        assert came["grouped"] == [[0.5], [1]]
        assert came["gathered"] == [[0, 0], [1, 1], [1, 1]]
        assert came["one each"] == [0, 1]
        assert came["flags"] == [True, True]
        assert came["sent"] == 8
        assert came["object"] == {"rank": 1}
        assert came["objects"] == ["", "x"]
        assert came["built"] == (False, True, True, True, False)
    assert second["untouched"] == [1, 2, 3, 4]
    assert first["leaves"][:2] == [3, 1.5]  # summed; averaged for the root
    assert second["leaves"][:2] == [3, 0]


CODES = {
    "no init": "WB-FIT-165", "comm": "WB-FIT-163", "join": "WB-FIT-170", "both": "WB-FIT-166",
    "adasum": "WB-FIT-167", "set": "WB-FIT-168", "alltoall": "WB-FIT-183",
    "elastic": "WB-FIT-183", "shapes": "WB-FIT-169", "other model": "WB-FIT-171",
    "other optimizer": "WB-FIT-171", "max": "WB-FIT-177", "unnamed": "WB-FIT-179",
    "twice": "WB-FIT-179", "no names": "WB-FIT-178", "wrapped": "WB-FIT-176",
    "zeroed": "WB-FIT-175", "more passes": "WB-FIT-174", "clipped early": "WB-FIT-173",
    "sparse": "WB-FIT-172",
}  # fmt: skip


def test_mistakes_are_refused_on_every_rank(workers: Workers) -> None:
    for report in clean(workers.run("mirrored", horovod_cells.mistaken, workers=2)):
        assert report.value == CODES


@pytest.mark.parametrize(
    ("first", "code"),
    [("prepare", "WB-FIT-180"), ("horovod", "WB-FIT-182"), ("fit", "WB-FIT-182")],
)
def test_one_of_both_averages(workers: Workers, first: str, code: str) -> None:
    for report in workers.run("mirrored", horovod_cells.both, first, workers=2):
        assert report.error is None
        assert report.value[0] == code


def test_another_strategy_is_refused(workers: Workers) -> None:
    reports = workers.run("sharded", horovod_cells.recorded, False, workers=2)
    assert ["WB-FIT-181" in str(report.error) for report in reports] == [True, True]


def test_the_newest_optimizer_of_a_model_averages(workers: Workers) -> None:
    first, second = clean(workers.run("mirrored", horovod_cells.again, workers=2))
    assert first.value == second.value
    assert first.value[1] == [[1.5, 1.5]]


@pytest.mark.parametrize("watched", [False, True])
def test_a_loop_is_recorded_as_it_is(workers: Workers, watched: bool) -> None:
    reports = clean(workers.run("mirrored", horovod_cells.recorded, watched, workers=2))
    for report in reports:
        assert report.trained == 30
        assert set(report.rows["samples"]) == {8}
        assert np.isfinite(report.rows["ready_s"]).all()
        assert np.isfinite(report.rows["exposed_s"]).all()
        assert np.isfinite(report.rows["data_wait_s"]).all()
    notes = [fields["text"] for fields in reports[0].emitted("note")]
    assert sum("Horovod" in text for text in notes) <= 1


def test_a_loop_without_a_loader_counts_its_first_batch_too(workers: Workers) -> None:
    for report in clean(workers.run("mirrored", horovod_cells.without_loader, workers=2)):
        assert list(report.rows["samples"]) == [6] * 4


@pytest.mark.timing
@pytest.mark.parametrize("watched", [False, True])
def test_who_waits_for_a_slow_rank_is_seen(workers: Workers, watched: bool) -> None:
    reports = clean(workers.run("mirrored", horovod_cells.recorded, watched, 30, 0.03, workers=2))
    waits_s = np.median(record.derive(joined(reports)).sync_wait_s[3:], axis=0)
    assert waits_s[0] > 0.8 * 0.03
    assert waits_s[1] < 0.2 * 0.03
