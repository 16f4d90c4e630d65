"""Who waited for whom."""

from __future__ import annotations

import json

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench.errors import PlanError
from workbench.history.analysis.blame import blame

NAN = float("nan")


def test_an_injected_delay_reads_in_its_column_alone() -> None:
    found = blame(make_history(make_rows(40, 3, slow_rank=1, slow_s=0.050)))
    expected = np.zeros((3, 3))
    expected[[0, 2], 1] = 0.050
    assert found.mean_s == pytest.approx(expected, rel=1e-5)
    assert found.total_s == pytest.approx(40 * expected, rel=1e-5)
    assert found.worst == 1


def test_a_window_counts_its_steps_alone() -> None:
    rows = np.concatenate([
        make_rows(20, 2, slow_rank=0, slow_s=0.010),
        make_rows(20, 2, first=20, slow_rank=1, slow_s=0.030),
    ])  # fmt: skip
    history = make_history(rows)
    early, late = blame(history, last=19), blame(history, 20, 29)
    assert early.mean_s == pytest.approx(np.array([[0, 0], [0.010, 0]]), abs=1e-6)
    assert late.mean_s == pytest.approx(np.array([[0, 0.030], [0, 0]]), abs=1e-6)
    assert (late.steps.tolist(), late.worst, early.worst) == ([10, 10], 1, 0)


def test_a_window_of_everything_is_the_whole() -> None:
    for piped in (False, True):
        rows = make_rows(30, 3, slow_rank=2, slow_s=0.020)
        if piped:
            rows["bubble_s"] = rows["end_s"] - rows["start_s"] - rows["compute_s"]
            rows["ready_s"] = NAN
        history = make_history(rows)
        whole, window = blame(history), blame(history, 0, 29)
        assert whole.total_s[0, 2] == pytest.approx(30 * 0.020, rel=1e-3)
        assert window.total_s == pytest.approx(whole.total_s, rel=1e-4, abs=1e-6)


def test_a_long_run_says_that_a_window_counts_stored_steps() -> None:
    history = make_history(
        make_rows(40_000, 2, slow_rank=0, slow_s=0.005), memory_limit_bytes=1 << 20
    )
    assert history.stride > 1
    whole, window = blame(history), blame(history, 0)
    assert whole.steps.tolist() == [40_000] * 2
    assert window.stride == history.stride
    assert window.mean_s[1, 0] == pytest.approx(whole.mean_s[1, 0], rel=1e-3)


def test_waits_that_were_not_measured_are_unknown() -> None:
    rows = make_rows(10, 2, slow_rank=0, slow_s=0.01)
    rows["ready_s"] = NAN
    found = blame(make_history(rows))
    assert np.isnan(found.total_s[0, 1])
    assert np.isnan(found.total_s[1, 0])
    assert found.worst is None
    assert json.loads(json.dumps(found.to_wire(), allow_nan=False))["total_s"][0] == [0.0, None]


def test_a_window_that_ends_before_it_begins_is_refused() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-041"):
        blame(make_history(make_rows(5, 2)), 4, 2)
