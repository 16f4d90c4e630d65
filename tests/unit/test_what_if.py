"""What if one worker were as fast as the others."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench.errors import PlanError, RunError
from workbench.history.analysis.counterfactual import what_if
from workbench.history.store import RunHistory

NAN = float("nan")


def test_without_the_straggler_steps_are_what_they_are_without_the_fault() -> None:
    slow = make_history(make_rows(30, 3, slow_rank=1, slow_s=0.050))
    clean = make_rows(30, 3)
    whole = float((clean["end_s"] - clean["start_s"])[0, 0])
    found = what_if(slow)
    assert (found.without, found.model) == (1, "synchronous")
    assert found.without_s == pytest.approx(np.full(30, whole), rel=1e-3)
    assert found.saved_s == pytest.approx(30 * 0.050, rel=1e-3)
    assert found.speedup == pytest.approx((whole + 0.050) / whole, rel=1e-3)
    assert found.samples_per_s == pytest.approx(24 / (whole + 0.050), rel=1e-3)


def test_the_next_slowest_is_still_waited_for() -> None:
    rows = make_rows(20, 3, slow_rank=1, slow_s=0.050)
    rows["ready_s"][:, 2] += 0.020
    rows["compute_s"][:, 2] += 0.020
    rows["exposed_s"][:, 2] -= 0.020
    found = what_if(make_history(rows), 1)
    assert found.step_s - found.without_s == pytest.approx(np.full(20, 0.030), rel=1e-3)


def test_without_another_worker_nothing_is_saved() -> None:
    found = what_if(make_history(make_rows(20, 3, slow_rank=1, slow_s=0.050)), 0)
    assert found.saved_s == pytest.approx(0.0, abs=1e-6)
    assert found.speedup == pytest.approx(1.0)


def test_the_ghost_fits_its_steps() -> None:
    found = what_if(make_history(make_rows(30, 4, slow_rank=2, slow_s=0.040)))
    real, ghost = found.real, found.ghost
    lengths = ghost.parts_s.sum(axis=2)
    assert lengths == pytest.approx(np.tile(found.without_s[-8:, None], (1, 4)), rel=1e-3)
    assert (ghost.parts_s >= -1e-9).all()
    assert ghost.start_s[1:] == pytest.approx(ghost.start_s[:-1] + lengths[:-1], rel=1e-3)
    assert real.length_s - ghost.length_s == pytest.approx(8 * 0.040, rel=1e-3)
    json.dumps(found.to_wire(), allow_nan=False)


def test_workers_who_meet_now_and_then_save_at_the_meeting() -> None:
    rows = make_rows(16, 2)
    for name in ("ready_s", "exposed_s"):
        rows[name] = NAN
    rows["wait_s"] = 0.0
    slow, meeting = 0.010, slice(3, None, 4)
    rows["compute_s"][:, 1] += slow
    length = np.full((16, 2), 0.014)
    length[:, 1] += slow
    length[meeting, 0] += 4 * slow  # worker 0 waits for all four delays
    rows["wait_s"][meeting, 0] = rows["exposed_s"][meeting, 0] = 4 * slow
    ends = 100.0 + np.cumsum(length, axis=0)
    rows["start_s"], rows["end_s"] = ends - length, ends
    rows["waited_for"][meeting, 0] = 1
    found = what_if(make_history(rows), 1)
    assert found.step_s.sum() == pytest.approx(16 * 0.024, rel=1e-3)
    assert found.without_s.sum() == pytest.approx(16 * 0.014, rel=1e-3)
    assert found.ghost.parts_s[:, :, 2] == pytest.approx(np.zeros((8, 2)), abs=1e-6)


def test_in_a_pipeline_the_busiest_other_stage_sets_the_pace() -> None:
    rows = make_rows(10, 3, slow_rank=0, slow_s=0.030, compute_s=0.050)
    rows["bubble_s"] = rows["end_s"] - rows["start_s"] - rows["compute_s"]
    rows["ready_s"] = NAN
    found = what_if(make_history(rows))
    assert (found.without, found.model) == (0, "pipeline")
    assert found.saved_s == pytest.approx(10 * 0.030, rel=1e-3)


def own_paces(steps: int, workers: int) -> Any:
    """Return rows of workers that wait for nobody; the last one is half as fast (32 ms)."""
    rows = make_rows(steps, workers)
    rows["ready_s"], rows["wait_s"] = NAN, 0.0
    rows["end_s"][:, -1] += 0.016
    spent = rows["end_s"] - rows["start_s"]
    rows["end_s"] = 100.0 + np.cumsum(spent, axis=0)
    rows["start_s"] = rows["end_s"] - spent
    return rows


def test_a_run_ends_with_its_slowest_worker_although_nobody_waits_for_it() -> None:
    found = what_if(make_history(own_paces(60, 3), joined=False), 2)
    assert found.model == "asynchronous"
    assert found.samples_per_s == pytest.approx(3 * 60 * 8 / (60 * 0.032), rel=1e-3)
    assert found.speedup == pytest.approx(2, rel=1e-3)
    assert found.saved_s == pytest.approx(60 * 0.016, rel=1e-3)
    assert found.without_s.mean() == pytest.approx(0.016, rel=1e-3)
    assert found.step_s.mean() == pytest.approx(0.016 * 4 / 3, rel=1e-3)


def test_in_a_run_that_goes_on_a_faster_worker_takes_more_steps() -> None:
    rows, history = own_paces(60, 3), RunHistory(range(3), joined=False)
    for rank, steps in ((0, 60), (1, 60), (2, 30)):
        history.append(rows[:steps, rank])
    found = what_if(history, 2)
    assert found.speedup == pytest.approx(3 / 2.5, rel=1e-3)


def test_by_default_it_is_the_worker_with_clearly_longer_steps_if_nobody_waits() -> None:
    assert what_if(make_history(own_paces(60, 3), joined=False)).without == 2
    alike = make_rows(60, 3)
    alike["wait_s"] = 0.0
    with pytest.raises(PlanError, match="WB-PLAN-043"):
        what_if(make_history(alike, joined=False))


def test_what_cannot_be_answered_is_said() -> None:
    history = make_history(make_rows(10, 2))
    with pytest.raises(PlanError, match="WB-PLAN-043"):
        what_if(history)
    with pytest.raises(PlanError, match="WB-PLAN-044"):
        what_if(history, 2)
    with pytest.raises(PlanError, match="WB-PLAN-042"):
        what_if(make_history(make_rows(10, 1)), 0)
    rows = make_rows(10, 2)
    rows["ready_s"] = NAN
    with pytest.raises(RunError, match="WB-RUN-047"):
        what_if(make_history(rows), 0)
    with pytest.raises(RunError, match="WB-RUN-046"):
        what_if(history, 0, first=50)
