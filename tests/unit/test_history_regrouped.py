"""Rows of a run whose workers change: when a step is complete."""

from __future__ import annotations

import numpy as np
from history_rows import make_rows

from workbench.history.store import RunHistory


def test_steps_are_complete_with_the_rows_of_those_who_took_them() -> None:
    history, rows = RunHistory(range(3)), make_rows(30, 3)
    for rank in (0, 2):  # rank 1 is missing from step 10 to step 19
        history.append(rows[:10, rank])
    history.append(rows[:8, 1])  # and its last two rows went with it
    history.hold()
    history.append(rows[10:11, 1])  # it had taken a step that the others took anew
    for rank in (0, 2):
        history.append(rows[10:20, rank])
    assert history.totals.steps == 8
    history.regroup(10, [0, 2])
    assert history.totals.steps == 18
    history.settle_before(10)
    assert history.totals.steps == 20
    history.hold()
    for rank in (0, 2, 1):
        history.append(rows[20:, rank])
        assert history.totals.steps == 20  # nobody knows yet whether rank 1 takes part
    history.regroup(20, [0, 1, 2])
    assert history.totals.steps == 30
    assert history.totals.rows.tolist() == [30, 18, 30]
    blamed = history["blamed_rank"][history["step"] == 15]
    assert set(blamed.tolist()) <= {-1, 0, 2}
    loss = history["loss"]
    assert np.isnan(loss[np.isin(history["step"], (8, 9))]).all()
    assert not np.isnan(loss[~np.isin(history["step"], (8, 9))]).any()
    assert history.phases == [(10, (0, 2)), (20, (0, 1, 2))]


def test_a_change_that_never_came_about_leaves_no_trace() -> None:
    history, rows = RunHistory(range(3)), make_rows(12, 3)
    history.regroup(5, [0, 1])
    history.regroup(5, [0])  # another one died before they took a step
    history.append(rows[:5].reshape(-1))
    history.append(rows[5:, 0])
    assert history.totals.steps == 12
    assert history.phases == [(5, (0,))]
