"""The gate holds workers at an agreed step."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.telemetry.step_gate import CANNOT, Gate
from workbench.shared.messages import Purpose

WAIT_S = 10


def in_thread(function: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


def test_an_open_gate_lets_every_step_start() -> None:
    gate = Gate()
    assert all(gate.enter(step) for step in range(100))
    assert not gate.stopping
    assert gate.paused_s == 0


def test_halt_answers_with_the_step_begun() -> None:
    gate = Gate()
    assert gate.halt() == -1
    gate = Gate()
    gate.enter(4)
    assert gate.halt() == 4


def test_a_stop_lets_the_agreed_step_happen_and_no_more() -> None:
    gate = Gate()
    gate.enter(4)
    gate.halt()
    gate.halt_at("stop", 5)
    assert gate.enter(5)
    assert not gate.enter(6)
    assert gate.stopping


@pytest.mark.parametrize(("purpose", "alone"), [("leave", False), ("leave_alone", True)])
def test_a_worker_that_must_leave_stops_and_nothing_lets_it_go_on(
    purpose: Purpose, alone: bool
) -> None:
    gate = Gate()
    gate.enter(4)
    gate.halt_at("pause", 4)
    gate.halt_at(purpose, -1)
    gate.resume()
    gate.halt_at("pause", 9)
    assert not gate.enter(5)
    assert (gate.stopping, gate.leaving, gate.leaves_alone) == (True, True, alone)


def test_a_stop_is_no_leave() -> None:
    gate = Gate()
    gate.halt_at("stop", 3)
    gate.halt_at("leave", 9)
    assert not gate.enter(4)
    assert (gate.stopping, gate.leaving) == (True, False)


@pytest.mark.parametrize(
    ("purpose", "named", "may_start"), [("stop", 3, False), ("pause", 4, True)]
)
def test_after_halt_no_step_starts_until_one_is_named(
    purpose: Purpose, named: int, may_start: bool
) -> None:
    gate = Gate()
    assert gate.enter(3)
    assert gate.halt() == 3
    answers: list[bool] = []
    thread = in_thread(lambda: answers.append(gate.enter(4)))
    thread.join(0.2)
    assert thread.is_alive()  # it waits, since nobody has said which step is the last
    assert answers == []
    assert gate.halt() == 3  # so the step that waits has not begun
    gate.halt_at(purpose, named)
    thread.join(WAIT_S)
    assert answers == [may_start]


@given(begun=st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_the_step_after_the_furthest_is_in_everybodys_reach(begun: list[int]) -> None:
    # An all-reduce keeps ranks within one step of each other.
    positions = [max(begun) - step % 2 for step in begun]
    gates = [Gate() for _ in positions]
    for gate, step in zip(gates, positions, strict=True):
        gate.enter(step)
    common = max(gate.halt() for gate in gates) + 1
    for gate, step in zip(gates, positions, strict=True):
        gate.halt_at("stop", common)
        assert all(gate.enter(later) for later in range(step + 1, common + 1))
        assert not gate.enter(common + 1)


def test_a_pause_is_announced_lifted_and_timed() -> None:
    gate = Gate()
    paused, resumed = threading.Event(), []
    gate.on_pause = lambda step: paused.set()
    gate.on_resume = resumed.append
    gate.enter(0)
    gate.halt_at("pause", 0)
    answers: list[bool] = []
    thread = in_thread(lambda: answers.append(gate.enter(1)))
    assert paused.wait(WAIT_S)
    assert answers == []
    gate.resume()
    thread.join(WAIT_S)
    assert answers == [True]
    assert resumed == [1]
    assert gate.paused_s > 0


def test_advance_lets_a_paused_worker_do_so_many_steps() -> None:
    gate = Gate()
    gate.halt_at("pause", 0)
    gate.advance(2)
    assert gate.enter(1)
    assert gate.enter(2)
    paused = threading.Event()
    gate.on_pause = lambda step: paused.set()
    thread = in_thread(lambda: gate.enter(3))
    assert paused.wait(WAIT_S)
    gate.resume()
    thread.join(WAIT_S)
    assert not thread.is_alive()


def test_a_worker_that_waits_has_not_begun_the_step() -> None:
    gate = Gate()
    waiting = threading.Event()
    gate.on_pause = lambda step: waiting.set()
    gate.enter(3)
    gate.halt_at("pause", 3)
    entered: list[bool] = []
    thread = in_thread(lambda: entered.append(gate.enter(4)))
    assert waiting.wait(WAIT_S)
    assert gate.halt() == 3
    gate.halt_at("stop", 3)
    thread.join(WAIT_S)
    assert entered == [False]


def test_stop_wins_over_a_pause() -> None:
    gate = Gate()
    gate.halt_at("pause", 0)
    paused = threading.Event()
    gate.on_pause = lambda step: paused.set()
    answers: list[bool] = []
    thread = in_thread(lambda: answers.append(gate.enter(1)))
    assert paused.wait(WAIT_S)
    gate.halt_at("stop", 0)
    gate.resume()
    thread.join(WAIT_S)
    assert answers == [False]


# -- other shares ----------------------------------------------------------------------------------


@given(begun=st.lists(st.integers(0, 50), min_size=1, max_size=6))
def test_new_shares_hold_from_one_step_on_for_all(begun: list[int]) -> None:
    positions = [max(begun) - step % 2 for step in begun]
    gates = [Gate() for _ in positions]
    for gate, step in zip(gates, positions, strict=True):
        gate.deals = True
        gate.enter(step)
    first = max(gate.ask_to_deal() for gate in gates) + 1
    for gate, step in zip(gates, positions, strict=True):
        gate.deal(first, (3, 1))
        for later in range(step + 1, first):
            assert gate.enter(later)
            assert not gate.dealt
        assert gate.enter(first)
        assert gate.dealt
        assert gate.take_portions() == (3, 1)
        assert gate.enter(first + 1)
        assert not gate.dealt


def test_nobody_begins_a_step_between_question_and_shares() -> None:
    gate = Gate()
    gate.deals = True
    gate.enter(3)
    assert gate.ask_to_deal() == 3
    entered: list[bool] = []
    thread = in_thread(lambda: entered.append(gate.enter(4)))
    thread.join(0.2)
    assert entered == []
    gate.deal(4, (2, 2))
    thread.join(WAIT_S)
    assert entered == [True]
    assert gate.take_portions() == (2, 2)


def test_a_question_that_is_called_off_lets_all_go_on_as_before() -> None:
    gate = Gate()
    gate.deals = True
    gate.enter(3)
    gate.ask_to_deal()
    entered: list[bool] = []
    thread = in_thread(lambda: entered.append(gate.enter(4)))
    gate.drop_deal()
    thread.join(WAIT_S)
    assert entered == [True]
    assert not gate.dealt


def test_a_training_whose_shares_stay_is_not_held() -> None:
    gate = Gate()
    gate.enter(3)
    assert gate.ask_to_deal() == CANNOT
    gate.deal(4, (2, 2))
    assert gate.enter(4)
    assert not gate.dealt


@pytest.mark.parametrize("purpose", ["stop", "pause"])
def test_stop_and_pause_are_agreed_on_beside_new_shares(purpose: Purpose) -> None:
    gate = Gate()
    gate.deals = True
    gate.enter(3)
    gate.ask_to_deal()
    assert gate.halt() == 3
    entered: list[bool] = []
    thread = in_thread(lambda: entered.append(gate.enter(4)))
    gate.deal(4, (2, 2))
    thread.join(0.2)
    assert entered == []  # a step of Stop or Pause has yet to be named
    gate.halt_at(purpose, 4)
    thread.join(WAIT_S)
    assert entered == [True]
    assert gate.take_portions() == (2, 2)
    if purpose == "stop":
        assert not gate.enter(5)


def test_a_stop_in_the_middle_of_a_question_ends_the_worker() -> None:
    gate = Gate()
    gate.deals = True
    gate.enter(3)
    gate.ask_to_deal()
    gate.halt()
    entered: list[bool] = []
    thread = in_thread(lambda: entered.append(gate.enter(4)))
    gate.halt_at("stop", 3)
    thread.join(WAIT_S)
    assert entered == [False]
