"""What strategies with servers must honour of times, and of orders that only the pace decides."""

from __future__ import annotations

from typing import Any

import cells
import numpy as np
import pytest
import server_cells
from strategy_cases import FREE, NAME, SERVED, together
from worker_reports import Report, clean, joined
from workers import Workers

from workbench import catalog
from workbench.shared import record

pytestmark = [pytest.mark.torch, pytest.mark.timing]


def one_by_one(report: Report) -> record.Derived:
    """Return a worker's rows as the history of free workers reads them."""
    return record.derive(report.rows[:, None], workers=3)


def blamed_by_others(reports: list[Report], rank: int) -> np.ndarray:
    """Return (steps, others) whether the others' waits are put down to `rank`."""
    others = [one_by_one(report).blamed_rank[:, 0] for r, report in enumerate(reports) if r != rank]
    return np.stack(others, axis=1) == rank


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_unbounded_staleness_is_n_minus_1_on_average(
    workers: Workers, entry: catalog.Strategy, count: int
) -> None:
    reports = clean(workers.run(entry.name, cells.slow_steps, False, 100, 3, workers=count))
    staleness = np.concatenate([report.rows["staleness"] for report in reports])
    assert len(staleness) == 100 * count
    assert staleness.mean() == pytest.approx(count - 1, abs=0.1)
    for report in reports:
        assert (report.rows["wait_s"] == 0).all()


@pytest.mark.parametrize("entry", FREE, **NAME)
def test_a_slow_worker_is_nobodys_wait_and_has_stale_gradients(
    workers: Workers, entry: catalog.Strategy
) -> None:
    reports = clean(
        workers.run(entry.name, cells.slow_steps, False, 30, 2, workers=3, faults=("slow=1:50ms",))
    )
    busy = [report.rows for report in reports]
    assert all((rows["wait_s"] == 0).all() for rows in busy)
    assert busy[1]["staleness"][0] >= 8  # later on, the others have ended
    assert np.median(busy[0]["staleness"]) <= 2
    fast_s = [np.median(busy[r]["end_s"] - busy[r]["start_s"]) for r in (0, 2)]
    assert max(fast_s) < 0.03  # not held up by the 50 ms
    assert np.median(busy[1]["compute_s"]) > 0.05
    assert all((one_by_one(report).blamed_rank == -1).all() for report in reports)


@pytest.mark.parametrize("bound", [0, 2, 3])
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_bounded_staleness_blocks_the_fast_ones_for_the_slow_one(
    workers: Workers, entry: catalog.Strategy, bound: int
) -> None:
    options = {"max_staleness": bound}
    reports = clean(
        workers.run(
            entry.name, cells.slow_steps, False, 30, 2, workers=3, options=options,
            faults=("slow=1:50ms",),
        )
    )  # fmt: skip
    rows = joined(reports)
    steady = slice(5, 30 - bound - 1)
    wait_ms = np.median(rows["wait_s"][steady], axis=0) * 1e3
    # The fast ones wait for the slow one's 52 ms and take about 2 ms of steps in the meantime.
    assert wait_ms[[0, 2]] == pytest.approx(50, abs=5)
    assert wait_ms[1] < 2
    # Nobody begins step c before all have ended step c - bound - 1.
    begun, ended = rows["start_s"], rows["end_s"]
    for step in range(bound + 1, 30):
        assert begun[step].min() >= ended[step - bound - 1].max() - 0.02
    derived = record.derive(rows)
    named = 1 - derived.other_s / derived.step_s
    assert np.quantile(named, 0.05) >= 0.95
    assert blamed_by_others(reports, 1)[steady].mean() >= 0.95
    assert (one_by_one(reports[1]).blamed_rank == -1)[steady].mean() >= 0.95


@pytest.mark.parametrize("options", [{}, {"servers": 2, "max_staleness": 4}], ids=["free", "bound"])
@pytest.mark.parametrize("entry", FREE, **NAME)
def test_the_loss_of_one_device_is_reached_within_half_again_its_samples(
    workers: Workers, entry: catalog.Strategy, options: dict[str, Any]
) -> None:
    (truth,) = clean(workers.run("one_device", server_cells.digits, 10))
    # A push is a step of its own with a third of the batch: with a third of the learning rate it
    # moves the parameters as far, sample by sample, as one device's steps.
    reports = clean(
        workers.run(entry.name, server_cells.digits, 15, 0.1 / 3, workers=3, options=options)
    )
    staleness = np.concatenate([report.rows["staleness"] for report in reports])
    assert staleness.mean() <= 4
    samples = sum(int(report.rows["samples"].sum()) for report in reports)
    assert samples <= 1.5 * truth.rows["samples"].sum()
    assert reports[0].value <= truth.value


@pytest.mark.parametrize("entry", FREE, **NAME)
def test_rows_of_free_workers_cover_their_run(workers: Workers, entry: catalog.Strategy) -> None:
    reports = clean(workers.run(entry.name, cells.slow_steps, False, 30, 12, workers=2))
    for report in reports:
        rows = report.rows
        step_s = rows["end_s"] - rows["start_s"]
        named = rows["data_wait_s"] + rows["compute_s"] + rows["exposed_s"]
        assert np.quantile(named / step_s, 0.05) >= 0.95
        assert step_s.sum() == pytest.approx(report.train_s, rel=0.01)
        assert (rows["samples"] == 6).all()
        assert (rows["sent_bytes"] == (72 + 72 + 9) * 4).all()


@pytest.mark.parametrize(("fault", "ms"), [("latency=10ms", 20), ("bandwidth=1MB/s", 20)])
@pytest.mark.parametrize("entry", [e for e in SERVED if e.links], **NAME)
def test_a_simulated_link_shows_as_transfer_and_is_labelled(
    workers: Workers, entry: catalog.Strategy, fault: str, ms: float
) -> None:
    """10,000 bytes each way: 10 ms each at 1 MB/s."""
    options = together(entry)
    read = []
    for faults in ((), (fault,)):
        reports = clean(
            workers.run(
                entry.name, server_cells.wide_steps, 2499, workers=2, options=options,
                faults=faults,
            )
        )  # fmt: skip
        derived = record.derive(joined(reports))
        read.append(np.median(derived.transfer_s, axis=0) * 1e3)
        notes = [note["text"] for note in reports[0].emitted("note")]
        assert any("simulated" in note and fault in note for note in notes) == bool(faults)
    assert read[1] - read[0] == pytest.approx([ms, ms], abs=4)


def test_between_hosts_the_server_tells_who_waited_for_whose_push(workers: Workers) -> None:
    """Clocks are not compared there, and blocked times are long for all where a link is slow."""
    reports = clean(
        workers.run(
            "central_storage", cells.slow_steps, False, 40, 3, workers=2,
            faults=("slow=1:50ms/backward",), hosts=("one", "two", "one"),
        )
    )  # fmt: skip
    rows = joined(reports)
    assert not np.isnan(rows["wait_s"]).any()
    wait, blamed = record.sync_wait(rows)
    assert np.median(wait[:, 0]) == pytest.approx(0.05, abs=0.005)
    assert np.median(wait[:, 1]) == 0.0
    assert (blamed[:, 0] == 1).mean() >= 0.95
