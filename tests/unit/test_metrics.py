from __future__ import annotations

import numpy as np
import pytest
from history_rows import NAN, make_rows
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from workbench.shared import record
from workbench.shared.record import FLAG_SKEWED_CLOCK, RECORD

SHAPES = st.tuples(st.integers(1, 5), st.integers(1, 6))
SECONDS = st.floats(0.0, 2.0, allow_nan=False, width=32)


@st.composite
def any_rows(draw: st.DrawFn) -> np.ndarray:
    """Rows as engines can measure them: the blocked time covers at least the wait."""
    shape = draw(SHAPES)
    data, compute, transfer, other = (draw(hnp.arrays(float, shape, elements=SECONDS))
                                      for _ in range(4))  # fmt: skip
    rows = np.zeros(shape, RECORD)
    for name in ("wait_s", "staleness", "bubble_s"):
        rows[name] = NAN
    rows["waited_for"] = -1
    rows["start_s"] = 50.0
    rows["ready_s"] = 50.0 + data + compute
    rows["data_wait_s"], rows["compute_s"] = data, compute
    rows["exposed_s"] = rows["ready_s"].max(axis=1, keepdims=True) - rows["ready_s"] + transfer
    rows["end_s"] = rows["ready_s"] + rows["exposed_s"] + other
    rows["samples"] = draw(hnp.arrays(np.uint32, shape, elements=st.integers(0, 64)))
    rows["local_loss"] = draw(hnp.arrays(float, shape, elements=st.floats(-5, 5)))
    return rows


def test_an_injected_delay_is_read_back_as_the_others_wait() -> None:
    wait, blamed = record.sync_wait(make_rows(30, 3, slow_rank=1, slow_s=0.050))
    assert wait[:, [0, 2]] == pytest.approx(0.050, abs=1e-6)
    assert (wait[:, 1] == 0).all()
    assert (blamed[:, [0, 2]] == 1).all()
    assert (blamed[:, 1] == -1).all()


def test_transfer_is_what_the_wait_leaves_of_the_blocked_time() -> None:
    derived = record.derive(make_rows(30, 3, slow_rank=1, slow_s=0.050, transfer_s=0.003))
    assert derived.sync_wait_s[:, [0, 2]] == pytest.approx(0.050, abs=1e-6)
    assert derived.transfer_s == pytest.approx(0.003, abs=1e-6)


def test_blame_of_a_wait_that_the_strategy_measured_is_the_strategys() -> None:
    """Rows of workers at their own pace come one by one; nobody's `ready_s` is comparable."""
    rows = make_rows(4, 3).reshape(-1)[:, None]
    rows["ready_s"] = NAN
    rows["wait_s"], rows["waited_for"] = 0.0, -1
    rows["wait_s"][[2, 3], 0], rows["waited_for"][[2, 3], 0] = 0.050, [0, -1]
    wait, blamed = record.sync_wait(rows, workers=3)
    assert wait[:, 0].tolist() == pytest.approx([0, 0, 0.050, 0.050] + [0] * 8)
    assert blamed[:, 0].tolist() == [-1, -1, 0] + [-1] * 9


@given(any_rows())
@settings(deadline=None, max_examples=60)
def test_at_least_one_rank_waits_for_nobody(rows: np.ndarray) -> None:
    wait, blamed = record.sync_wait(rows)
    assert (wait.min(axis=1) == 0).all()
    assert (wait >= 0).all()
    assert ((blamed == -1) == (wait == 0)).all()


@given(any_rows())
@settings(deadline=None, max_examples=60)
def test_the_parts_add_up_to_the_step(rows: np.ndarray) -> None:
    derived = record.derive(rows)
    total = sum(getattr(derived, part) for part in record.PARTS)
    assert total == pytest.approx(derived.step_s, abs=1e-9)


@given(any_rows())
@settings(deadline=None, max_examples=60)
def test_the_global_loss_lies_between_the_local_ones(rows: np.ndarray) -> None:
    loss = record.global_loss(rows["local_loss"], rows["samples"])
    for value, local, samples in zip(loss, rows["local_loss"], rows["samples"], strict=True):
        counted = local[samples > 0]
        if len(counted):
            assert counted.min() - 1e-9 <= value <= counted.max() + 1e-9
        else:
            assert np.isnan(value)


def test_a_ragged_last_batch_weighs_the_loss_by_samples() -> None:
    loss = record.global_loss(np.array([[1.0, 3.0]]), np.array([[30, 10]]))
    assert loss == pytest.approx([1.5])


def test_a_rank_without_a_loss_does_not_count() -> None:
    stages = np.array([[False, True]])
    assert record.global_loss(np.array([[NAN, 3.0]]), np.array([[8, 8]]), stages).tolist() == [3.0]
    returned = np.array([[True, True]])
    assert np.isnan(record.global_loss(np.array([[NAN, 3.0]]), np.array([[8, 8]]), returned)).all()
    assert record.global_loss(np.array([[NAN, 3.0]]), np.array([[0, 8]]), returned).tolist() == [3]
    loss = record.global_loss(np.array([[NAN, 3.0]]), np.array([[8, 8]]))
    assert loss == pytest.approx([3.0])


def test_with_skewed_clocks_the_least_blocked_rank_is_the_slow_one() -> None:
    rows = make_rows(5, 3, slow_rank=2, slow_s=0.040)
    rows["ready_s"][:, 0] += 1000.0  # a host whose clock is far ahead
    rows["flags"][:, 0] = FLAG_SKEWED_CLOCK
    wait, blamed = record.sync_wait(rows)
    assert wait[:, :2] == pytest.approx(0.040, abs=1e-6)
    assert (blamed[:, :2] == 2).all()


def test_a_wait_is_never_longer_than_the_time_blocked() -> None:
    rows = make_rows(1, 2, slow_rank=1, slow_s=0.5)
    rows["exposed_s"][0, 0] = 0.2
    assert record.sync_wait(rows)[0][0, 0] == pytest.approx(0.2)


def test_a_wait_the_strategy_measured_itself_wins() -> None:
    rows = make_rows(1, 2, slow_rank=1, slow_s=0.5)
    rows["wait_s"][0, 0] = 0.125
    assert record.sync_wait(rows)[0][0, 0] == 0.125


def test_an_unknown_ready_time_gives_no_wait_rather_than_zero() -> None:
    rows = make_rows(2, 2)
    rows["ready_s"][0, 1] = NAN
    wait, blamed = record.sync_wait(rows)
    assert np.isnan(wait[0]).all()
    assert (blamed[0] == -1).all()
    assert (wait[1] == 0).all()


def test_unmeasured_communication_is_unknown_and_its_time_is_in_other() -> None:
    rows = make_rows(3, 2)
    rows["exposed_s"], rows["ready_s"] = NAN, NAN
    derived = record.derive(rows)
    assert np.isnan(derived.transfer_s).all()
    assert derived.other_s == pytest.approx(derived.step_s - 0.012, abs=1e-6)


def test_a_single_worker_is_known_to_wait_and_send_nothing() -> None:
    rows = make_rows(3, 1)
    rows["exposed_s"], rows["ready_s"] = NAN, NAN
    derived = record.derive(rows)
    assert (derived.sync_wait_s == 0).all()
    assert (derived.transfer_s == 0).all()


def test_a_row_of_several_workers_that_stands_alone_has_no_wait_of_its_own() -> None:
    rows = make_rows(3, 1)
    assert np.isnan(record.derive(rows, workers=4).sync_wait_s).all()


def pipeline_rows(busy_s: list[float], step_s: float = 0.1) -> np.ndarray:
    """Five steps of a pipeline whose workers are busy for so long, and then wait."""
    rows = make_rows(5, len(busy_s))
    rows["end_s"], rows["compute_s"] = rows["start_s"] + step_s, busy_s
    rows["bubble_s"] = rows["exposed_s"] = rows["wait_s"] = step_s - np.asarray(busy_s)
    return rows


def test_the_excess_of_a_bubble_is_for_the_bottleneck_and_the_rest_for_nobody() -> None:
    derived = record.derive(pipeline_rows([0.030, 0.080, 0.078]))
    assert derived.blamed_rank.tolist() == [[1, -1, -1]] * 5  # 2 ms are no more than 5 %
    assert derived.blamed_s == pytest.approx(np.array([[0.050, 0, 0]] * 5), abs=1e-6)
    assert derived.sync_wait_s[:, 0] == pytest.approx(0.070)  # the schedule's share included


def test_nobody_is_blamed_for_the_bubble_of_equal_stages() -> None:
    derived = record.derive(pipeline_rows([0.070, 0.071, 0.069]))
    assert (derived.blamed_rank == -1).all()
    assert (derived.blamed_s == 0).all()
    assert (derived.sync_wait_s > 0.02).all()


def test_what_if_takes_the_stragglers_lead_off_the_step() -> None:
    rows = make_rows(4, 3, slow_rank=0, slow_s=0.030)
    whole = rows["end_s"][:, 0] - rows["start_s"][:, 0]
    assert record.what_if(rows) == pytest.approx(whole - 0.030)
    alone = make_rows(4, 1)
    assert record.what_if(alone) == pytest.approx((alone["end_s"] - alone["start_s"])[:, 0])


def test_potential_tells_apart_workers_whose_rates_are_equal() -> None:
    derived = record.derive(make_rows(10, 2, slow_rank=1, slow_s=0.010))
    quick, slow = (
        record.potential(np.full(10, 8.0), derived.step_s[:, r], derived.sync_wait_s[:, r])
        for r in range(2)
    )
    assert quick / slow == pytest.approx(26 / 16, rel=1e-5)


def test_potential_and_residual_of_nothing_are_unknown() -> None:
    assert np.isnan(record.potential(np.zeros(1), np.zeros(1), np.zeros(1)))
    assert np.isnan(record.residual(np.zeros(1), 0.0))


def test_the_residual_is_the_time_outside_steps_and_pauses() -> None:
    assert record.residual(np.array([4.0, 4.0]), 12.0, paused_s=2.0) == pytest.approx(1 / 6)
