"""Workers with unequal shares of a batch train what one device trains."""

from __future__ import annotations

import pytest
import share_cells
from strategy_cases import ENTRIES, run
from worker_reports import assert_same, clean
from workers import Workers

from workbench import catalog

pytestmark = pytest.mark.torch
SHEDS = [pytest.param(entry, id=entry.name) for entry in ENTRIES if entry.sheds]
CHANGES = {3: (15, 2, 6), 9: (1, 21, 1), 13: (7, 8, 8)}
"""Of batches of 23; each epoch's last one has 8, in which shares of 1 may come to nothing."""


@pytest.mark.parametrize("entry", SHEDS)
def test_unequal_shares_train_as_one_device_does(workers: Workers, entry: catalog.Strategy) -> None:
    truth = workers.truth(share_cells.shared_out, {})
    reports = clean(run(workers, entry, share_cells.shared_out, CHANGES, workers=3))
    assert_same(reports, truth, 1e-10)
    for rank, report in enumerate(reports):
        samples = report.rows["samples"].tolist()
        assert [samples[step] for step in (3, 5, 8, 10, 15)] == [
            (7, 8, 8)[rank], (15, 2, 6)[rank], (15, 2, 6)[rank], (1, 21, 1)[rank], (7, 8, 8)[rank],
        ]  # fmt: skip
        for mine, theirs in zip(report.value["evals"], truth.value["evals"], strict=True):
            assert mine == pytest.approx(theirs, abs=1e-10)


@pytest.mark.parametrize("kind", ["samples", "processes"])
def test_every_kind_of_data_is_dealt_anew(workers: Workers, kind: str) -> None:
    keywords = {"kind": kind, "steps": 14}
    truth = workers.truth(share_cells.shared_out, {}, **keywords)
    entry = catalog.lookup("mirrored", "torch")
    reports = clean(
        run(workers, entry, share_cells.shared_out, CHANGES, workers=3, keywords=keywords)
    )
    assert_same(reports, truth, 1e-10)
    assert reports[1].rows["samples"].tolist()[4:9] == [0, 2, 2, 2, 2]


@pytest.mark.parametrize("entry", SHEDS)
def test_shares_smaller_than_the_micro_batches_are_weighted(
    workers: Workers, entry: catalog.Strategy
) -> None:
    keywords = {"accumulate": 3, "steps": 12}
    truth = workers.truth(share_cells.shared_out, {}, **keywords)
    reports = clean(
        run(workers, entry, share_cells.shared_out, CHANGES, workers=3, keywords=keywords)
    )
    assert_same(reports, truth, 1e-10)
