"""What every strategy's measured times must honour: parametrised over the catalog."""

from __future__ import annotations

import cells
import numpy as np
import pytest
from strategy_cases import CASES, SEVERAL, in_every_way, run
from worker_reports import clean, joined, more_ms
from workers import Workers

from workbench import catalog
from workbench.shared import record

pytestmark = [pytest.mark.torch, pytest.mark.timing]


@pytest.mark.parametrize(("entry", "count", "own_loop"), in_every_way(CASES))
def test_records_cover_the_run(
    workers: Workers, entry: catalog.Strategy, count: int, own_loop: bool
) -> None:
    reports = clean(run(workers, entry, cells.slow_steps, own_loop, workers=count))
    rows = joined(reports)
    assert rows.shape == (30, count)
    assert (rows["step"] == np.arange(30)[:, None]).all()
    assert (rows["rank"] == np.arange(count)).all()
    counted = rows["samples"].sum(axis=1) if entry.data_parallel else rows["samples"].max(axis=1)
    assert (counted == 12).all()
    derived = record.derive(rows)
    assert derived.step_s.min() >= 0.010
    named = 1 - derived.other_s / derived.step_s
    assert np.quantile(named, 0.02) >= 0.95
    assert named.max() <= 1.001
    for report, step_s in zip(reports, derived.step_s.T, strict=True):
        assert step_s.sum() == pytest.approx(report.train_s, rel=0.01)


@pytest.mark.parametrize(
    ("entry", "count", "own_loop", "place"),
    [
        pytest.param(*case.values, place, id=f"{case.id}-{place}")
        for case in in_every_way([c for c in SEVERAL if not c.values[0].takes_turns])
        for place in ("data", "forward", "backward")
        if place == "forward" or case.values[1] == 2  # two workers show the rest
    ],
)
def test_an_injected_delay_is_read_back_as_the_others_wait(
    workers: Workers, entry: catalog.Strategy, count: int, own_loop: bool, place: str
) -> None:
    faults = (f"slow=1:50ms/{place}",)
    reports = clean(
        run(workers, entry, cells.slow_steps, own_loop, 20, 2, workers=count, faults=faults)
    )
    derived = record.derive(joined(reports))
    wait_ms = np.median(derived.sync_wait_s, axis=0) * 1e3
    others = [rank for rank in range(count) if rank != 1]
    assert wait_ms[others] == pytest.approx(50, abs=5)
    assert wait_ms[1] == 0
    assert (derived.blamed_rank[:, others] == 1).mean() >= 0.95


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize(
    ("entry", "count"), [case for case in SEVERAL if case.values[0].takes_turns]
)
def test_an_injected_delay_is_read_back_as_the_others_bubble(
    workers: Workers, entry: catalog.Strategy, count: int, place: str
) -> None:
    """Where workers take turns, what a slow one costs the step is the others' idle time.

    It may be less than the delay: others do what they have at hand meanwhile.
    """
    rows = joined(
        clean(
            run(
                workers, entry, cells.slow_steps, False, 60, 6, workers=count,
                faults=(f"slow=1:50ms/{place}",), by_turns=True,
            )
        )
    )  # fmt: skip
    busy_ms = more_ms(rows["compute_s"])
    idle_ms = more_ms(rows["bubble_s"])
    later_ms = more_ms(rows["end_s"] - rows["start_s"])
    others = [rank for rank in range(count) if rank != 1]
    assert busy_ms[1] == pytest.approx(50, abs=5)
    assert more_ms(rows["compute_s"], 0.5)[1] <= 55
    assert (later_ms > 20).all()
    assert idle_ms[others] == pytest.approx(later_ms[others], abs=5)
    assert idle_ms[1] == pytest.approx(later_ms[1] - 50, abs=5)


def test_what_was_injected_counts_in_its_phase(workers: Workers) -> None:
    for place, column in (("data", "data_wait_s"), ("backward", "compute_s")):
        reports = clean(
            workers.run(
                "one_device", cells.slow_steps, False, 60, faults=(f"slow=0:20ms/{place}",),
                by_turns=True,
            )
        )  # fmt: skip
        derived = record.derive(joined(reports))
        for name in ("data_wait_s", "compute_s"):
            truth = 20 if name == column else 0
            assert more_ms(getattr(derived, name))[0] == pytest.approx(truth, abs=3)
            assert more_ms(getattr(derived, name), 0.5)[0] <= truth + 3


def test_a_blocked_collective_raises_when_its_sockets_are_shut(workers: Workers) -> None:
    waited, _ = clean(workers.run("mirrored", cells.blocked, workers=2))
    assert 0.1 < waited.value < 5
