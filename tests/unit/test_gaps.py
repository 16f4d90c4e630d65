"""Timelines without the time in which everybody stood."""

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench.history.analysis.summary import summarise
from workbench.history.recent import closed
from workbench.history.store import RunHistory


def test_a_pause_is_cut_to_one_step_and_named() -> None:
    start_s = np.arange(10.0)[:, None] * 0.01 + np.zeros(2)
    start_s[6:] += 60.0
    found, cut = closed(start_s, np.full(start_s.shape, 0.01))
    assert np.flatnonzero(cut).tolist() == [6]
    assert np.diff(found[:, 0])[5] == pytest.approx(0.02)
    assert found[-1, 0] < 0.2


def test_time_in_which_one_worker_steps_stays() -> None:
    start_s = np.array([[0.0, 0.0], [0.01, 1.0], [1.0, 1.01]])
    length_s = np.array([[0.01, 1.0], [0.99, 0.01], [0.01, 0.01]])
    found, cut = closed(start_s, length_s)
    assert not cut.any()
    assert (found == start_s).all()


def test_what_is_not_there_is_left_alone() -> None:
    start_s = np.array([[np.nan], [np.nan]])
    found, cut = closed(start_s, np.ones((2, 1)))
    assert np.isnan(found).all()
    assert not cut.any()


def paused_history() -> RunHistory:
    """Return 100 steps of two workers, ten minutes of pause before the 96th."""
    rows = make_rows(100, 2)
    for name in ("start_s", "end_s"):
        rows[name][rows["step"] >= 96] += 600.0
    history = make_history(rows)
    ended_s = float(rows["start_s"][rows["step"] == 96].min())
    history.hear("paused", {"rank": 0, "step": 96, "t_s": ended_s - 600.0})
    history.hear("resumed", {"rank": 0, "step": 96, "t_s": ended_s})
    return history


def test_a_paused_run_shows_its_steps_and_the_time_it_trained() -> None:
    history = paused_history()
    shot = history.snapshot()
    line = shot.timeline
    assert line.cuts == (96,)
    assert np.ptp(line.start_s) < 10.0
    assert shot.elapsed_s < 10.0 < 600.0 < history.totals.wall_s


def test_a_comparison_leaves_the_pauses_out_of_the_time_and_of_the_loss_by_time() -> None:
    history = paused_history()
    found = summarise(history, {"name": "base"})
    assert found.wall_s == pytest.approx(history.totals.wall_s - 600.0)
    assert (np.diff(found.curve.t_s) > 0).all()
    assert found.curve.t_s[-1] < found.wall_s < 10.0


def test_a_pause_counts_once_its_next_step_is_there() -> None:
    history = make_history(make_rows(10, 1))
    before_s = history.snapshot().elapsed_s
    history.hear("paused", {"rank": 0, "step": 10, "t_s": 100.0})
    history.hear("resumed", {"rank": 0, "step": 10, "t_s": 160.0})
    assert history.snapshot().elapsed_s == before_s
