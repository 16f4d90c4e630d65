"""Each worker trains on samples that no other worker has, and only models are sent."""

from __future__ import annotations

from collections import Counter

import numpy as np
import own_data_cells
import pytest
from worker_reports import clean, joined
from workers import Workers

from workbench import catalog

pytestmark = pytest.mark.torch

WAYS = {
    "mirrored": {}, "sharded": {}, "central_storage": {}, "local_sgd": {"every": "3"},
}  # fmt: skip


@pytest.mark.parametrize("kind", ["indexed", "tensors"])
@pytest.mark.parametrize("name", WAYS)
def test_the_result_is_that_of_the_same_training_by_hand(
    workers: Workers, name: str, kind: str
) -> None:
    reports = clean(workers.run(name, own_data_cells.train, kind, workers=2, options=WAYS[name]))
    truth = own_data_cells.by_hand(int(WAYS[name].get("every", 0)))
    for report in reports:
        found = sorted((np.asarray(v) for v in report.weights.values()), key=lambda v: -v.size)
        for value, right in zip(found, truth, strict=True):
            assert np.allclose(value, right, rtol=0, atol=1e-10)


def test_a_worker_reads_its_own_samples_only_and_sends_none(workers: Workers) -> None:
    reports = clean(
        workers.run("local_sgd", own_data_cells.train, workers=2, options={"every": "4"})
    )
    for rank, report in enumerate(reports):
        reads = Counter(report.value)
        assert set(reads) == set(range(own_data_cells.COUNTS[rank]))
    rows = joined(reports)
    numbers = sum(np.asarray(value).size for value in reports[0].weights.values())
    assert set(rows["sent_bytes"].ravel().tolist()) == {0.0, 8.0 * numbers}  # the model, or nothing


@pytest.mark.parametrize("name", ["gossip", "parameter_server"])
def test_other_strategies_train_on_own_data(workers: Workers, name: str) -> None:
    reports = clean(workers.run(name, own_data_cells.train, workers=2))
    for rank, report in enumerate(reports):
        assert set(report.value) == set(range(own_data_cells.COUNTS[rank]))


def test_a_single_worker_trains_on_all_it_has(workers: Workers) -> None:
    (report,) = clean(workers.run("one_device", own_data_cells.train))
    assert Counter(report.value)[5] == own_data_cells.EPOCHS


REFUSING = [e.name for e in catalog.strategies("torch") if "own_data" not in e.supports]


@pytest.mark.parametrize("name", REFUSING)
def test_strategies_whose_workers_share_a_batch_refuse_own_data(
    workers: Workers, name: str
) -> None:
    reports = clean(workers.run(name, own_data_cells.refused, workers=2))
    assert ["WB-FIT-027" in report.value for report in reports] == [True, True]


def test_evaluation_needs_data_that_all_have(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", own_data_cells.evaluate_own, workers=2))
    assert ["WB-FIT-187" in report.value for report in reports] == [True, True]


def test_a_stream_is_refused(workers: Workers) -> None:
    reports = workers.run("mirrored", own_data_cells.train, "stream", workers=2)
    assert ["WB-FIT-186" in report.error for report in reports] == [True, True]
