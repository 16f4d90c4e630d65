from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from history_rows import NAN, make_history, make_rows

from workbench.history.events import Story
from workbench.history.store import RunHistory
from workbench.shared.events import Healed, Joined, Left, Topic, read


def test_a_snapshot_names_the_worker_the_others_wait_for() -> None:
    shot = make_history(make_rows(80, 4, slow_rank=1, slow_s=0.050)).snapshot()
    assert shot.slow_rank == 1
    assert shot.slow_ms == pytest.approx(50, rel=1e-3)
    assert shot.blame_s[0, 1] == pytest.approx(80 * 0.050, rel=1e-3)
    assert [round(w.wait_ms) for w in shot.workers] == [50, 0, 50, 50]
    assert shot.workers[0].potential_per_s > 3 * shot.workers[1].potential_per_s


@pytest.mark.parametrize(("slow_s", "compute_s"), [(0.0009, 0.001), (0.004, 0.1)])
def test_a_small_wait_makes_no_straggler(slow_s: float, compute_s: float) -> None:
    rows = make_rows(80, 3, slow_rank=0, slow_s=slow_s, compute_s=compute_s)
    assert make_history(rows).snapshot().slow_rank is None


def test_nobody_stands_out_when_ranks_take_turns_at_being_slow() -> None:
    history = RunHistory(range(3))
    for step in range(60):
        rows = make_rows(1, 3, first=step, slow_rank=step % 3, slow_s=0.05)
        history.append(rows.reshape(-1))
    assert history.snapshot().slow_rank is None


def test_the_straggler_is_the_present_one() -> None:
    history = make_history(make_rows(300, 2, slow_rank=0, slow_s=0.05))
    for rank in range(2):
        history.append(make_rows(100, 2, first=300, slow_rank=1, slow_s=0.05)[:, rank])
    assert history.snapshot().slow_rank == 1


def test_shares_add_up_and_so_does_computes_own() -> None:
    shot = make_history(make_rows(50, 2)).snapshot()
    for worker in shot.workers:
        assert sum(worker.share) == pytest.approx(1)
    assert shot.compute_share == pytest.approx(10 / 16, rel=1e-4)
    assert shot.unmeasured == ()


def test_throughput_is_over_all_workers_and_the_latest_seconds() -> None:
    fast, slow = make_rows(100, 2), make_rows(400, 2, compute_s=0.094)
    slow["step"] += 100
    for name in ("start_s", "end_s", "ready_s"):
        slow[name] += 100 * 0.016
    history = make_history(np.concatenate([fast, slow]))
    assert history.snapshot(state="running").samples_per_s == pytest.approx(160, rel=0.01)
    whole = 500 * 16 / (100 * 0.016 + 400 * 0.1)
    assert history.snapshot(state="finished").samples_per_s == pytest.approx(whole, rel=1e-6)
    curve = history.snapshot().throughput_curve
    assert curve.mean[[0, -1]] == pytest.approx([1000, 160], rel=1e-6)


def alone(step_s: Sequence[float], steps: int = 80, gap_s: float = 0.0) -> list[np.ndarray]:
    """Return rows of workers that take their steps alone; `gap_s` is a pause after 40 % of them."""
    lanes = []
    for rank, spent in enumerate(step_s):
        rows = make_rows(steps, len(step_s))[:, rank]
        rows["start_s"] = 100.0 + spent * np.arange(steps)
        rows["start_s"][rows["start_s"] > 100.0 + 0.4 * steps * spent] += gap_s
        rows["end_s"] = rows["start_s"] + spent
        lanes.append(rows)
    return lanes


@pytest.mark.parametrize("at_once", [7, 10_000])
def test_the_curve_of_workers_that_step_alone_is_their_rate_at_each_time(at_once: int) -> None:
    """Two at 8 samples each 10 ms, the third each 100 ms, which trains alone from 0.8 s on."""
    lanes = alone([0.01, 0.01, 0.1])
    history = RunHistory(range(3), joined=False)
    for first in range(0, 80, at_once):
        for rows in lanes:
            history.append(rows[first : first + at_once])
    curve = history.snapshot().throughput_curve
    assert np.all(np.diff(curve.step) > 0)
    assert np.all(np.diff(curve.t_s) > 0)
    together = curve.t_s < 0.78
    assert curve.mean[together] == pytest.approx(1680, rel=1e-6)
    assert curve.mean[curve.t_s > 0.82] == pytest.approx(80, rel=1e-6)
    width = np.diff(curve.t_s).min()
    assert len(curve) * width == pytest.approx(8, rel=0.02)
    assert (curve.mean * width).sum() == pytest.approx(3 * 80 * 8, rel=0.02)
    # At 0.8 s two have taken 80 steps and the third 8; at the end all have taken 80.
    assert np.interp(0.8, curve.t_s, curve.step) == pytest.approx(168 / 3, abs=1)
    assert curve.step[[0, -1]] == pytest.approx([0, 80], abs=0.5)


def test_a_worker_within_its_step_does_not_lower_the_end_of_the_curve() -> None:
    fast, slow = alone([0.01, 0.3])
    history = RunHistory(range(2), joined=False)
    history.append(fast[:40])
    history.append(slow[:1])  # its second step will end at 0.6 s
    curve = history.snapshot(state="running").throughput_curve
    assert curve.mean == pytest.approx(800 + 8 / 0.3, rel=1e-6)
    assert curve.t_s[-1] == pytest.approx(0.3, abs=0.01)


def test_time_between_steps_is_no_part_of_the_curve_of_workers_that_step_alone() -> None:
    history = RunHistory(range(2), joined=False)
    for rows in alone([0.01, 0.01], gap_s=5.0):
        history.append(rows)
    curve = history.snapshot().throughput_curve
    assert curve.mean == pytest.approx(1600, rel=1e-6)
    assert curve.t_s[-1] == pytest.approx(5.8, abs=0.03)


def test_pauses_and_evaluations_do_not_lower_the_throughput() -> None:
    rows = make_rows(100, 1)
    rows["start_s"][50:] += 10
    rows["end_s"][50:] += 10
    history = make_history(rows)
    history.hear("paused", {"rank": 0, "step": 50, "t_s": 5.0})
    history.hear("resumed", {"rank": 0, "step": 50, "t_s": 11.0})
    history.hear("eval", {"step": 50, "epoch": 0, "values": {"accuracy": 0.5}, "seconds": 4.0})
    # The last evaluation comes after the last step, so it is no part of the wall time.
    history.hear("eval", {"step": 99, "epoch": 1, "values": {"accuracy": 0.6}, "seconds": 9.0})
    assert (history.totals.paused_s, history.totals.eval_s) == (6.0, 13.0)
    assert history.totals.wall_s == pytest.approx(11.6)
    assert history.totals.train_s == pytest.approx(1.6)
    assert history.totals.samples_per_s == pytest.approx(500)


def test_the_timeline_holds_the_latest_steps_of_every_worker() -> None:
    shot = make_history(make_rows(200, 3)).snapshot()
    assert shot.timeline.step.tolist() == list(range(140, 200))
    assert shot.timeline.start_s.shape == (60, 3)
    assert shot.timeline.start_s[0, 0] == pytest.approx(140 * 0.016)
    assert shot.timeline.parts_s.sum(axis=2) == pytest.approx(0.016, abs=1e-6)


def test_parts_never_measured_are_named_and_do_not_poison_the_picture() -> None:
    rows = make_rows(10, 2)
    rows["exposed_s"], rows["ready_s"] = NAN, NAN
    shot = make_history(rows).snapshot()
    assert shot.unmeasured == ("sync_wait_s", "transfer_s")
    assert np.isfinite(shot.timeline.parts_s).all()
    assert [np.isfinite(worker.share).all() for worker in shot.workers] == [True, True]
    assert [np.isnan(worker.wait_ms) for worker in shot.workers] == [True, True]


def test_a_long_run_is_drawn_with_few_points() -> None:
    shot = make_history(make_rows(5000, 2)).snapshot()
    assert 128 < len(shot.loss_curve) <= 512
    assert shot.loss_curve.step[-1] <= 4999
    assert shot.step == 5000


def test_a_snapshot_does_not_change_afterwards() -> None:
    history = make_history(make_rows(10, 2))
    before = history.snapshot()
    loss, blame = before.loss_curve.mean.copy(), before.blame_s.copy()
    for rank in range(2):
        history.append(make_rows(2000, 2, first=10, slow_rank=0, slow_s=0.1)[:, rank])
    history.snapshot()
    assert np.array_equal(before.loss_curve.mean, loss)
    assert np.array_equal(before.blame_s, blame)


def test_events_tell_the_runs_story() -> None:
    history = RunHistory([4, 9])
    for rank in (1, 0):
        history.hear("run_started", {"rank": rank, "total_steps": 40, "device": f"cuda:{rank}"})
    history.hear("epoch", {"rank": 0, "epoch": 2, "step": 20})
    for _ in range(2):  # both ranks report the same evaluation
        history.hear("eval", {"step": 20, "epoch": 2, "values": {"loss": 0.5}, "seconds": 1.0})
    history.hear("note", {"rank": 0, "text": "global batch 64 = 2 x 32"})
    history.hear("note", {"rank": 1, "text": "global batch 64 = 2 x 32"})
    shot = history.snapshot(name="base", strategy="mirrored", state="running", dropped=3)
    assert shot.total_steps == 40
    assert [worker.device for worker in shot.workers] == ["cuda:0", "cuda:1"]
    assert [worker.engine for worker in shot.workers] == [4, 9]
    assert shot.evals == [{"step": 20, "epoch": 2, "loss": 0.5}]
    assert shot.notes == ("global batch 64 = 2 x 32",)
    assert (shot.epoch, shot.dropped, shot.name) == (2, 3, "base")
    assert history.totals.eval_s == 1.0


def test_how_each_rank_ended_is_kept() -> None:
    story = Story()
    story.fold(read("run_finished", {"rank": 1, "steps": 7}), 0.0)
    story.fold(read("run_finished", {"rank": 0, "steps": 6}), 0.0)
    assert story.finished[1]["steps"] == 7
    assert story.finished[0]["steps"] == 6


def test_a_death_is_told_once_by_whoever_says_more() -> None:
    story = Story()
    story.fold(read("note", {"text": "Rank 1 learns."}), 1.0)
    for engine in (1, 2):
        story.fold(read("death", {"text": f"Engine {engine} is gone.", "engine": engine}), 2.0)
    story.fold(read("note", {"text": "Engine 1 died, the others go on.", "deaths": [1]}), 3.0)
    expected = ["Rank 1 learns.", "Engine 2 is gone.", "Engine 1 died, the others go on."]
    assert story.notes == expected
    assert [moment.kind for moment in story.moments] == ["note", "death", "death", "note"]
    story.fold(read("death", {"text": "Engine 1 is gone.", "engine": 1}), 4.0)
    assert story.notes == [*expected, "Engine 1 is gone."]  # the one that took its place


def test_what_notes_are_about_is_kept_beside_their_words() -> None:
    story = Story()
    for number in range(200):
        story.fold(read("note", {"text": f"{number}"}), 0.0)
    story.fold(read("warning", {"text": "", "topic": "trained_before"}), 0.0)
    for step in (7, 9):  # the first one counts
        story.fold(read("note", {"text": "lost", "topic": "loss_lost", "value": step}), 0.0)
    story.fold(read("note", {"text": "of a later version", "topic": "unheard_of", "value": 1}), 0.0)
    assert story.facts == {Topic.TRAINED_BEFORE: None, Topic.LOSS_LOST: 7}


def test_notes_are_bounded() -> None:
    story = Story()
    for number in range(500):
        story.fold(read("warning", {"text": f"{number}"}), 0.0)
    assert len(story.notes) == 100


def split_event(pipelines: int = 1) -> dict[str, object]:
    rows = [
        {"stage": stage, "rank": stage % 2, "layers": f"{stage}", "parameters": 10 * (stage + 1),
         "microbatch_s": 0.002, "handed_bytes": 512 if stage < 3 else 0}
        for stage in range(4)
    ]  # fmt: skip
    return {
        "rank": 0, "stages": rows, "schedule": "interleaved", "microbatches": 4,
        "microbatch_samples": 8, "pipelines": pipelines, "ideal_bubble": 0.2,
    }  # fmt: skip


def test_a_pipelines_bubbles_are_shares_of_each_workers_time_and_its_stages_are_known() -> None:
    rows = make_rows(50, 4, compute_s=0.010)
    rows["end_s"] = rows["start_s"] + 0.1
    rows["bubble_s"] = rows["exposed_s"] = rows["wait_s"] = [0.030, 0.080, 0.080, 0.080]
    rows["compute_s"] = [0.050, 0.010, 0.010, 0.010]
    history = make_history(rows)
    assert history.snapshot().split is None
    history.hear("split", split_event(2))
    shot = history.snapshot()
    assert [w.bubble for w in shot.workers] == pytest.approx([3 / 8, 8 / 9, 8 / 9, 8 / 9], rel=1e-5)
    assert shot.split is not None
    assert [stage.ranks for stage in shot.split.stages] == [(0, 2), (1, 3), (0, 2), (1, 3)]
    assert shot.split.stages[1].parameters == 20
    assert shot.slow_rank == 0
    assert shot.slow_ms == pytest.approx(50, rel=1e-3)  # the excess, not the whole bubble
    assert shot.blame_s[2, 0] == pytest.approx(50 * 0.050, rel=1e-3)


def test_a_wait_for_data_is_no_part_of_the_bubble_and_none_of_the_work() -> None:
    """Two stages in turn: half of what is no wait for data is idle, however long that wait is."""
    for data_s in (0.0, 0.070):
        rows = make_rows(50, 2, compute_s=0.010, data_s=data_s)
        rows["bubble_s"] = rows["exposed_s"] = rows["wait_s"] = 0.010
        rows["end_s"] = rows["start_s"] + data_s + 0.020
        assert [w.bubble for w in make_history(rows).snapshot().workers] == pytest.approx([0.5] * 2)


def test_elsewhere_a_worker_has_no_bubble() -> None:
    shot = make_history(make_rows(5, 2)).snapshot()
    assert all(np.isnan(w.bubble) for w in shot.workers)


def _went_away(joined: bool = True) -> tuple[RunHistory, np.ndarray]:
    """Return a history of three workers in which rank 1 is missing from step 30 on, and all rows.

    Rank 2 holds the others up.
    """
    history = RunHistory(range(3), joined=joined)
    rows = make_rows(120, 3, slow_rank=2, slow_s=0.02)
    history.append(rows[:30].reshape(-1))
    if joined:
        history.regroup(30, [0, 2])
    history.event(Healed(ranks=[1], step=30, seconds=0.1, workers=2))
    history.append(rows[30:50, [0, 2]].reshape(-1))
    return history, rows


def test_a_run_without_waits_is_as_far_as_its_slowest_worker() -> None:
    rows = make_rows(40, 3)
    history = RunHistory(range(3), joined=False)
    history.hear("run_started", {"total_steps": 40})
    for rank, steps in ((0, 40), (1, 10), (2, 30)):
        history.append(rows[:steps, rank])
    shot = history.snapshot(framework="torch")
    assert (shot.step, shot.least_step, shot.done) == (40, 10, 0.25)
    assert history.snapshot(framework="tensorflow").done == 80 / 120  # steps of one queue
    history.event(Healed(ranks=[1], step=10, seconds=0.1, workers=2))
    shot = history.snapshot(framework="torch")
    assert (shot.least_step, shot.done) == (30, 80 / 120)


@pytest.mark.parametrize("joined", [True, False])
def test_nothing_is_drawn_of_a_worker_while_it_is_away(joined: bool) -> None:
    history, _ = _went_away(joined)
    shot = history.snapshot()
    assert [worker.away for worker in shot.workers] == [False, True, False]
    assert np.isnan(shot.timeline.start_s[-20:, 1]).all()
    assert not shot.timeline.parts_s[-20:, 1].any()
    assert np.isfinite(shot.timeline.start_s[-20:, [0, 2]]).all()


def test_a_workers_latest_steps_stand_beside_those_of_the_others_with_a_gap() -> None:
    history, rows = _went_away()
    history.regroup(50, [0, 1, 2])
    history.event(Joined(ranks=[1], step=50, seconds=0.1, workers=3))
    history.append(rows[50:60].reshape(-1))
    line = history.snapshot().timeline
    assert line.step.tolist() == list(range(60))
    there = np.isfinite(line.start_s)
    assert there[:, [0, 2]].all()
    assert np.flatnonzero(~there[:, 1]).tolist() == list(range(30, 50))
    assert np.allclose(line.start_s[there[:, 1], 1], line.start_s[there[:, 1], 0])


def test_steps_in_which_a_worker_was_away_count_for_no_mean_of_its_own() -> None:
    history, rows = _went_away()
    shot = history.snapshot()
    assert shot.slow_rank == 2
    assert shot.slow_ms == pytest.approx(20, rel=1e-3)  # what rank 0 waits, alone
    assert shot.workers[1].wait_ms == pytest.approx(20, rel=1e-3)
    assert shot.workers[1].potential_per_s == pytest.approx(shot.workers[0].potential_per_s)
    history.regroup(50, [0, 1, 2])
    history.append(rows[50:].reshape(-1))
    assert history.snapshot().workers[1].wait_ms == pytest.approx(20, rel=1e-3)


def test_who_is_away_is_known_until_it_comes_again_or_the_run_begins_anew() -> None:
    story = Story()
    story.fold(Healed(ranks=[1], step=5, workers=2), 1.0)
    story.fold(Left(ranks=[2], step=6, workers=1), 2.0)
    assert story.away == {1, 2}
    story.fold(Joined(ranks=[1], step=9, workers=2), 3.0)
    assert story.away == {2}
    story.rewind(4)
    assert story.away == set()
    assert len(story.changes) == 3  # they have been all the same
