"""A history as series by step: every value once, none too early, and not too many."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from history_rows import NAN, make_history, make_rows

from workbench.history.analysis import series as feed
from workbench.history.analysis.series import Feed
from workbench.history.disk import RunWriter
from workbench.history.store import RunHistory


def series(*batches):
    found = defaultdict(list)
    for batch in batches:
        for one in batch.scalars:
            found[one.tag].append((one.step, one.value))
    return dict(found)


def give(history, rows):
    for rank in range(rows.shape[1]):
        history.append(rows[:, rank])


def test_values_are_the_historys():
    history = make_history(make_rows(10, 2, slow_rank=1, slow_s=0.02))
    found = series(Feed(history).fresh())
    first = history["rank"] == 0
    steps = history["step"][first].tolist()
    assert found["loss"] == list(zip(steps, history["loss"][first], strict=True))
    assert [v for _, v in found["sync_wait_s/rank_0"]] == list(history["sync_wait_s"][first])
    for part in ("data_wait", "compute", "sync_wait", "transfer", "other"):
        wanted = history[f"{part}_s"][first] / history["step_s"][first]
        assert [v for _, v in found[f"{part}_share/rank_0"]] == pytest.approx(wanted)
    longest = np.maximum(history["step_s"][first], history["step_s"][~first])
    assert [v for _, v in found["samples_per_s"]] == pytest.approx(16 / longest)


def test_shares_of_a_worker_add_up_to_one():
    found = series(Feed(make_history(make_rows(5, 3))).fresh())
    shares = [v for tag, v in found.items() if tag.endswith("_share/rank_2")]
    assert sum(np.array([value for _, value in values]) for values in shares) == pytest.approx(1.0)


def test_what_was_not_measured_is_left_out():
    found = series(Feed(make_history(make_rows(5, 2))).fresh())
    assert not any(tag.startswith(("staleness", "bubble")) for tag in found)


def test_every_value_comes_once():
    rows = make_rows(30, 2)
    history, parts = RunHistory(range(2)), []
    follower = Feed(history)
    for at in range(0, 30, 7):
        give(history, rows[at : at + 7])
        parts.append(follower.fresh())
        assert not follower.fresh().scalars
    parts.append(follower.fresh(over=True))
    assert series(*parts) == series(Feed(make_history(rows)).fresh())


def test_a_step_comes_when_all_workers_have_done_it():
    rows = make_rows(10, 2)
    history = RunHistory(range(2))
    follower = Feed(history)
    history.append(rows[:, 0])
    history.append(rows[:4, 1])
    assert [step for step, _ in series(follower.fresh())["loss"]] == [0, 1, 2, 3]


def test_asynchronous_steps_wait_for_the_slowest_worker():
    rows = make_rows(6, 2)
    history = RunHistory(range(2), joined=False)
    follower = Feed(history)
    history.append(rows[:, 0])
    history.append(rows[:2, 1])
    first = series(follower.fresh())
    assert [step for step, _ in first["step_s/rank_0"]] == [0, 1, 2, 3, 4, 5]
    assert first["loss"] == [(s, pytest.approx(rows["local_loss"][s].mean())) for s in (0, 1)]
    rate = sum(8 / (r["end_s"] - r["start_s"]) for r in rows[0])
    assert first["samples_per_s"][0][1] == pytest.approx(rate, rel=1e-6)
    history.append(rows[2:4, 1])
    assert [step for step, _ in series(follower.fresh())["loss"]] == [2, 3]
    assert [step for step, _ in series(follower.fresh(over=True))["loss"]] == [4, 5]


def test_one_workers_nan_is_the_logged_loss_of_an_asynchronous_step():
    rows = make_rows(2, 2)
    rows["local_loss"][1, 1] = NAN
    history = RunHistory(range(2), joined=False)
    follower = Feed(history)
    history.append(rows.reshape(-1))
    assert [step for step, value in series(follower.fresh())["loss"] if value == value] == [0]


def test_an_asynchronous_step_is_given_once_though_its_rows_come_in_many_turns():
    rows = make_rows(200, 2)
    history = RunHistory(range(2), joined=False)
    follower, parts = Feed(history), []
    history.append(rows[:, 0])
    parts.append(follower.fresh())
    history.append(rows[:, 1])
    parts += [follower.fresh() for _ in range(8)]
    parts.append(follower.fresh(over=True))
    assert [step for step, _ in series(*parts)["loss"]] == list(range(200))


def test_a_dead_asynchronous_worker_holds_back_a_bounded_number_of_steps(monkeypatch):
    monkeypatch.setattr(feed, "PENDING_STEPS", 20)
    rows = make_rows(60, 2)
    history = RunHistory(range(2), joined=False)
    follower = Feed(history)
    history.append(rows[:1, 1])
    history.append(rows[:, 0])
    parts = [follower.fresh(), follower.fresh()]
    assert [step for step, _ in series(*parts)["loss"]] == list(range(45))
    assert [step for step, _ in series(follower.fresh(over=True))["loss"]] == list(range(45, 60))


def test_long_runs_give_a_bounded_number_of_points(monkeypatch):
    monkeypatch.setattr(feed, "OCTAVE_POINTS", 1)
    rows = make_rows(4096, 1)
    history = make_history(rows)
    steps = [step for step, _ in series(Feed(history).fresh(over=True))["loss"]]
    assert len(steps) <= 7 * feed.LEAST_STEPS + 1
    assert steps[:64] == list(range(64)), "the beginning is whole"
    assert steps[-1] == 4095, "and how it ended is there"
    assert steps == sorted(set(steps))


def test_a_last_step_that_was_left_out_comes_at_the_end(monkeypatch):
    monkeypatch.setattr(feed, "OCTAVE_POINTS", 1)
    history = make_history(make_rows(100, 1))
    follower = Feed(history)
    while batch := series(follower.fresh()):
        assert max(step for step, _ in batch["loss"]) <= 98
    assert series(follower.fresh(over=True))["loss"] == [(99, history["loss"][-1])]


def test_the_steps_of_a_fast_run_are_spread_over_turns():
    rows = make_rows(300, 2)
    follower = Feed(make_history(rows))
    parts = [follower.fresh() for _ in range(3)]
    assert all(0 < len(part.scalars) <= 1.1 * feed.TURN_POINTS for part in parts)
    parts.append(follower.fresh(over=True))
    assert series(*parts) == series(Feed(make_history(rows)).fresh(over=True))
    assert [step for step, _ in series(*parts)["loss"]] == list(range(300))


def test_a_run_that_stays_too_fast_is_thinned_out():
    history, follower, given = RunHistory(range(2)), None, 0
    follower = Feed(history)
    for at in range(0, 50_000, 1000):
        give(history, make_rows(1000, 2, first=at))
        given += len(follower.fresh().scalars)
    assert given <= 50 * 1.1 * feed.TURN_POINTS
    last = follower.fresh(over=True)
    assert len(last.scalars) <= 1.1 * feed.OCTAVE_POINTS
    assert series(last)["loss"][-1][0] == 49_999


def test_evaluations_and_logged_columns():
    history = make_history(make_rows(6, 2))
    follower = Feed(history)
    history.hear("eval", {"step": 3, "epoch": 0, "values": {"accuracy": 0.5, "note": "text"}})
    history.hear("log", {"rank": 0, "step": 2, "values": {"lr": 0.1}})
    history.hear("log", {"rank": 1, "step": 2, "values": {"lr": 0.2, "bad": NAN}})
    found = series(follower.fresh())
    assert found["eval/accuracy"] == [(3, 0.5)]
    assert found["log/lr"] == [(2, 0.1)]
    assert found["log/lr/rank_1"] == [(2, 0.2)]
    assert not {"eval/note", "log/bad", "log/bad/rank_1"} & set(found)
    history.hear("log", {"rank": 0, "step": 5, "values": {"lr": 0.05, "new": 1.0}})
    history.hear("log", {"rank": 0, "step": 2, "values": {"late": 2.0}})
    found = series(follower.fresh())
    assert found == {"log/lr": [(5, 0.05)], "log/new": [(5, 1.0)], "log/late": [(2, 2.0)]}


def test_a_run_that_goes_back_gives_its_steps_again(tmp_path):
    rows = make_rows(10, 2)
    writers = [RunWriter(tmp_path, rank) for rank in range(2)]
    for rank, writer in enumerate(writers):
        writer.append_records(rows[:, rank].tobytes())
    history = make_history(rows)
    history.hear("eval", {"step": 8, "epoch": 0, "values": {"accuracy": 0.5}})
    follower = Feed(history)
    follower.fresh()
    history.rewind(6, tmp_path)
    give(history, make_rows(6, 2, first=6))
    batch = follower.fresh()
    assert batch.rewound == 6
    assert [step for step, _ in series(batch)["loss"]] == [6, 7, 8, 9, 10, 11]
    assert follower.fresh().rewound is None
    history.hear("eval", {"step": 8, "epoch": 0, "values": {"accuracy": 0.75}})
    assert series(follower.fresh())["eval/accuracy"] == [(8, 0.75)]
    for writer in writers:
        writer.close()


def test_times_count_from_the_first_step():
    history = make_history(make_rows(5, 1))
    found = [one.t_s for one in Feed(history).fresh().scalars if one.tag == "loss"]
    assert found == pytest.approx(history["start_s"] + history["step_s"])
