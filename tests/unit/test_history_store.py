from __future__ import annotations

import re
import threading

import numpy as np
import pytest
from history_rows import NAN, make_history, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.history.reducer import PENDING_ROWS, STORED, Joiner, LoggedColumn, RowTable
from workbench.history.store import RunHistory
from workbench.history.take_snapshot import COLUMNS
from workbench.history.totals import POINTS, Envelope
from workbench.shared.record import (
    FLAG_KERNEL_CLOCK,
    FLAG_SKEWED_CLOCK,
    MOMENTS,
    PARTS,
    RECORD,
)


def same(a: RunHistory, b: RunHistory) -> bool:
    return a.columns == b.columns and all(
        np.array_equal(a[name], b[name], equal_nan=True) for name in a.columns
    )


def test_a_row_per_worker_and_step_in_columns_of_equal_length() -> None:
    history = RunHistory([7, 3])
    rows = make_rows(6, 2)
    history.append(rows[:, 1])
    history.append(rows[:, 0])
    assert {len(history[name]) for name in history.columns} == {12}
    assert len(history) == 12
    assert history["step"].tolist() == [s for s in range(6) for _ in range(2)]
    assert history["rank"].tolist() == [0, 1] * 6
    assert history["engine"].tolist() == [7, 3] * 6
    assert set(history) == set(COLUMNS) - {"bubble_s"}


@given(seed=st.integers(0, 999), cuts=st.lists(st.integers(1, 79), max_size=8))
@settings(deadline=None, max_examples=40)
def test_the_order_and_size_of_batches_do_not_matter(seed: int, cuts: list[int]) -> None:
    rows = make_rows(20, 4, slow_rank=2, slow_s=0.02)
    whole = make_history(rows)
    shuffled = rows.reshape(-1)[np.random.default_rng(seed).permutation(80)]
    pieces = RunHistory(range(4))
    for batch in np.split(shuffled, sorted(set(cuts))):
        pieces.append(batch)
        len(pieces)  # reads between batches must not change the outcome either
    assert same(whole, pieces)
    assert pieces.totals.samples == whole.totals.samples == 20 * 4 * 8
    assert pieces.totals.blame_s == pytest.approx(whole.totals.blame_s)


def test_columns_hold_what_the_slow_worker_caused() -> None:
    history = make_history(make_rows(40, 3, slow_rank=1, slow_s=0.050))
    waits, rank = history["sync_wait_s"], history["rank"]
    assert np.median(waits[rank != 1]) == pytest.approx(0.050, rel=1e-4)
    assert (waits[rank == 1] == 0).all()
    assert (history["blamed_rank"][rank != 1] == 1).all()
    assert history["start_s"][0] == 0.0
    total = sum(history[part] for part in PARTS)
    assert total == pytest.approx(history["step_s"], rel=1e-6)


def test_the_loss_is_the_global_one_repeated_over_the_ranks() -> None:
    history = make_history(make_rows(3, 2))
    local = history["local_loss"].reshape(3, 2)
    assert history["loss"].reshape(3, 2) == pytest.approx(
        np.repeat(local.mean(axis=1, keepdims=True), 2, axis=1)
    )


def test_a_step_is_there_once_every_rank_has_reported_it() -> None:
    rows = make_rows(3, 2)
    history = RunHistory(range(2))
    history.append(rows[:, 0])
    assert len(history) == 0
    history.append(rows[:2, 1])
    assert len(history) == 4


def test_a_lost_row_does_not_hold_up_later_steps_and_stays_without_a_wait() -> None:
    rows = make_rows(5, 2, slow_rank=1, slow_s=0.02)
    history = RunHistory(range(2))
    history.append(rows[:, 0])
    history.append(np.delete(rows[:, 1], 2))
    assert np.unique(history["step"]).tolist() == [0, 1, 3, 4]
    history.finish()
    assert len(history) == 9
    lost = history["step"] == 2
    assert np.isnan(history["sync_wait_s"][lost]).all()
    assert np.isnan(history["loss"][lost]).all()
    assert history.totals.samples == 9 * 8
    assert history.totals.steps == 4


def test_waiting_rows_are_bounded_and_steps_are_given_up_whole() -> None:
    joiner = Joiner(4, limit=30)
    rows = make_rows(20, 4)
    complete, lost = joiner.add(rows[:, :3].reshape(-1))
    assert len(complete) == 0
    assert joiner.waiting <= 30
    assert len(lost) + joiner.waiting == 60
    assert set(np.unique(lost["step"], return_counts=True)[1]) == {3}


def test_rows_of_steps_that_are_given_up_count_in_the_totals() -> None:
    steps = PENDING_ROWS + 100
    rows = make_rows(steps, 2)
    history = RunHistory(range(2))
    history.append(rows[:, 0])  # the other worker never says anything
    history.finish()
    assert history.totals.samples == steps * 8


def test_a_row_sent_twice_counts_once() -> None:
    rows = make_rows(2, 2)
    history = RunHistory(range(2))
    history.append(np.concatenate([rows[:, 0], rows[:, 0]]))
    history.append(rows[:, 1])
    assert len(history) == 4
    assert history.totals.samples == 32


def test_rows_of_ranks_that_the_run_does_not_have_are_left_out() -> None:
    history = make_history(make_rows(2, 2))
    history.append(make_rows(2, 5)[:, 4])
    history.finish()
    assert len(history) == 4
    assert history.invalid_rows == 2


def test_asynchronous_rows_stand_alone() -> None:
    rows = make_rows(5, 3)
    rows["wait_s"], rows["staleness"] = 0.0, 2.0
    history = RunHistory(range(3), joined=False)
    history.append(rows[:4, 0])
    history.append(rows[:, 2])
    assert len(history) == 9
    assert history.totals.steps == 5
    assert history.totals.samples == 72
    assert (history["loss"] == history["local_loss"]).all()
    assert (history["staleness"] == 2.0).all()
    assert history.snapshot().extra["staleness"].mean == pytest.approx(2.0)
    assert history.snapshot().timeline.parts_s.shape == (5, 3, 5)


def test_stages_of_one_model_see_the_same_samples() -> None:
    history = make_history(make_rows(10, 4), data_parallel=False)
    assert history.totals.samples == 80
    assert history.snapshot().parallelism == "model"


def test_what_was_never_measured_is_nan_and_listed_with_the_reason() -> None:
    rows = make_rows(4, 2)
    rows["sent_bytes"] = NAN
    history = make_history(rows)
    history.hear("unmeasured", {"columns": ["sent_bytes"], "reason": "gloo does not count"})
    assert np.isnan(history["sent_bytes"]).all()
    assert history.unmeasured["sent_bytes"] == "gloo does not count"
    assert "staleness" in history.unmeasured
    assert "sync_wait_s" not in history.unmeasured
    assert np.isnan(history.totals.sent_bytes).all()


def test_an_empty_history_can_be_read() -> None:
    history = RunHistory(range(2))
    assert len(history) == 0
    assert len(history["loss"]) == 0
    assert history.unmeasured == {}
    shot = history.snapshot(state="starting")
    assert shot.step == 0
    assert np.isnan(shot.samples_per_s)
    assert shot.slow_rank is None
    assert np.isnan(history.totals.samples_per_s)


def test_an_unknown_column_is_named_with_those_that_exist() -> None:
    with pytest.raises(KeyError, match=r"losss.*sync_wait_s"):
        RunHistory(range(1))["losss"]


def test_beyond_the_memory_limit_steps_are_thinned_and_totals_stay_exact() -> None:
    rows = make_rows(60_000, 2, slow_rank=1, slow_s=0.001)
    rows["local_loss"][31_337] = 99.0
    small, large = make_history(rows, memory_limit_bytes=1), make_history(rows)
    assert large.stride == 1
    assert small.stride == 4
    assert len(small) == 2 * 15_000
    assert (small["step"] % 4 == 0).all()
    assert small.totals.samples == large.totals.samples == 60_000 * 16
    assert small.totals.parts_s == pytest.approx(large.totals.parts_s)
    assert small.totals.parts_s[0, 2] == pytest.approx(60.0, rel=1e-4)
    assert small.totals.blame_s[0, 1] == pytest.approx(60.0, rel=1e-4)
    assert re.search(r"\b4 steps", repr(small))
    # The spike's step is not stored any more; the curve still shows it.
    assert 99.0 not in small["loss"]
    assert small.snapshot().loss_curve.high.max() == 99.0


def test_thinned_rows_stay_aligned_in_every_column() -> None:
    table = RowTable(1)
    rows = np.zeros(70_000, STORED)
    rows["step"] = np.arange(70_000)
    rows["loss"] = rows["step"] * 2.0
    for start in range(0, 70_000, 777):
        table.append(rows[start : start + 777])
    step = table.column("step")
    assert (table.column("loss") == step * 2.0).all()
    assert step.tolist() == list(range(0, 70_000, table.stride))


def test_clocks_of_other_hosts_start_at_zero_each() -> None:
    rows = make_rows(4, 2)
    rows["flags"] = FLAG_SKEWED_CLOCK
    rows["start_s"][:, 1] += 5000.0
    rows["end_s"][:, 1] += 5000.0
    history = make_history(rows)
    assert history["start_s"][:2].tolist() == [0.0, 0.0]
    assert history.totals.wall_s == pytest.approx(4 * 0.016)


@pytest.mark.parametrize("joined", [True, False])
def test_curves_of_clocks_that_nobody_compared_begin_at_0_with_the_rates_of_all(
    joined: bool,
) -> None:
    rows = make_rows(200, 2)
    rows["flags"] = FLAG_SKEWED_CLOCK
    for name in MOMENTS:
        rows[name][:, 0] += 777600.0
    near, apart = RunHistory([0, 1], joined=joined), RunHistory([0, 1], joined=joined)
    near.append(make_rows(200, 2).reshape(-1))
    for rank in (0, 1):
        apart.append(rows[:, rank])
    there, here = apart.snapshot(), near.snapshot()
    assert there.loss_curve.t_s.min() == 0.0
    assert there.loss_curve.t_s.max() == pytest.approx(here.loss_curve.t_s.max(), abs=0.1)
    assert there.samples_per_s == pytest.approx(here.samples_per_s, rel=0.1)
    assert there.elapsed_s == pytest.approx(here.elapsed_s, abs=0.1)


def test_moments_on_the_kernels_clock_are_compared_and_their_waits_are_not() -> None:
    rows = make_rows(4, 2)
    rows["flags"] = FLAG_SKEWED_CLOCK | FLAG_KERNEL_CLOCK
    for name in MOMENTS:
        rows[name][:, 1] += 0.003
    history = make_history(rows)
    first = history["start_s"][:2]
    assert first[1] - first[0] == pytest.approx(
        float(rows["start_s"][0, 1] - rows["start_s"][0, 0])
    )
    plain = make_rows(4, 2)
    plain["flags"] = FLAG_SKEWED_CLOCK
    assert history["sync_wait_s"].tolist() == make_history(plain)["sync_wait_s"].tolist()


def test_logged_values_become_columns_of_the_same_length() -> None:
    history = make_history(make_rows(4, 2))
    for step in range(3):
        history.hear("log", {"step": step, "rank": 0, "values": {"lr": 0.1 * step}})
    assert "lr" in history.columns
    lr = history["lr"]
    assert lr[history["rank"] == 0][:3] == pytest.approx([0.0, 0.1, 0.2])
    assert np.isnan(lr[history["rank"] == 1]).all()
    assert history.snapshot().logged["lr"].mean == pytest.approx([0.0, 0.1, 0.2])


def test_a_logged_name_that_is_a_column_already_is_refused_in_a_note() -> None:
    history = make_history(make_rows(2, 1))
    history.hear("log", {"step": 0, "rank": 0, "values": {"loss": 5.0}})
    assert 5.0 not in history["loss"]
    assert any("loss" in note for note in history.snapshot().notes)


def test_logged_columns_are_bounded() -> None:
    column = LoggedColumn(limit=100)
    for step in range(1000):
        column.add(step, 0, float(step), 1.0)
    found = column.column(np.arange(1000), np.zeros(1000, np.int64))
    assert 50 <= np.isfinite(found).sum() <= 100


def test_the_history_becomes_a_data_frame() -> None:
    history = make_history(make_rows(5, 2))
    frame = history.to_pandas()
    assert tuple(frame.columns) == history.columns
    assert frame.groupby("rank")["samples"].sum().tolist() == [40, 40]


def test_threads_may_append_and_read_at_once() -> None:
    rows = make_rows(400, 4)
    history = RunHistory(range(4))

    def send(rank: int) -> None:
        for start in range(0, 400, 10):
            history.append(rows[start : start + 10, rank])

    def read() -> None:
        for _ in range(40):
            assert len(history) % 4 == 0
            history.snapshot()

    threads = [threading.Thread(target=send, args=(rank,)) for rank in range(4)]
    threads.append(threading.Thread(target=read))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(history, make_history(rows))


def test_a_callers_buffer_may_be_reused() -> None:
    rows = make_rows(3, 1)[:, 0].copy()
    history = RunHistory(range(1))
    history.append(rows)
    rows["local_loss"] = -1.0
    assert (history["loss"] > 0).all()


@given(st.lists(st.tuples(st.integers(0, 200_000), st.floats(-1e6, 1e6)), min_size=1, max_size=60))
@settings(deadline=None, max_examples=60)
def test_an_envelope_keeps_extremes_and_means_in_any_order(values: list[tuple[int, float]]) -> None:
    envelope = Envelope()
    step, value = (np.array(column, float) for column in zip(*values, strict=True))
    for at in range(0, len(step), 7):
        envelope.add(step[at : at + 7].astype(np.int64), step[at : at + 7], value[at : at + 7])
    curve = envelope.curve()
    assert len(curve) <= POINTS
    assert curve.high.max() == value.max()
    assert curve.low.min() == value.min()
    assert curve.step[0] == step.min()
    assert (np.diff(curve.step) > 0).all()
    assert (curve.low <= curve.mean + 1e-6).all()
    assert (curve.mean <= curve.high + 1e-6).all()


def test_an_envelope_leaves_out_what_was_not_measured() -> None:
    envelope = Envelope()
    envelope.add(np.arange(4), np.arange(4.0), np.array([1.0, NAN, np.inf, 3.0]))
    assert envelope.curve().mean.tolist() == [1.0, 3.0]
    envelope.add(np.arange(2), np.arange(2.0), np.array([NAN, NAN]))
    assert len(envelope.curve()) == 2


def test_records_and_stored_rows_stay_small() -> None:
    assert RECORD.itemsize == 88
    assert STORED.itemsize == 72


def test_columns_read_together_are_of_one_moment() -> None:
    rows = make_rows(2000, 2)
    history = make_history(rows[:1])
    feed = threading.Thread(target=lambda: [history.append(row) for row in rows[1:]])
    feed.start()
    while feed.is_alive():
        columns = history.together("step", "sync_wait_s", "bubble_s", "rank")
        assert len({len(values) for values in columns.values()}) == 1
    feed.join()
    assert len(history.together("step")["step"]) == 4000
    assert np.isnan(history.together("bubble_s")["bubble_s"]).all()
