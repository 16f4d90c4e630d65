from __future__ import annotations

from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.shared.events import OVER, InvalidTransitionError, LifeEvent, State, step

STATES, EVENTS = get_args(State), get_args(LifeEvent)


def walk(*events: str) -> str:
    state: State = "pending"
    for event in events:
        state = step(state, event)  # type: ignore[arg-type]
    return state


@pytest.mark.parametrize(
    ("events", "end"),
    [
        (("submit", "start", "finish"), "finished"),
        (("submit", "start", "pause", "resume", "finish"), "finished"),
        (("submit", "start", "stop", "finish"), "stopped"),
        (("submit", "start", "pause", "stop", "finish"), "stopped"),
        (("submit", "start", "fail"), "failed"),
        (("submit", "start", "recover", "start", "finish"), "finished"),
        (("submit", "recover", "recover", "start", "finish"), "finished"),
        (("submit", "start", "pause", "recover", "start", "finish"), "finished"),
        (("submit", "start", "recover", "stop", "finish"), "stopped"),
        (("submit", "start", "recover", "fail"), "failed"),
        (("submit", "start", "stop", "fail"), "failed"),
        (("submit", "stop", "finish"), "stopped"),
        (("stop",), "stopped"),
        (("fail",), "failed"),
    ],
)
def test_the_ways_a_run_can_go(events: tuple[str, ...], end: str) -> None:
    assert walk(*events) == end


@pytest.mark.parametrize(
    ("state", "event"),
    [("stopping", "stop"), ("paused", "pause"), ("running", "resume"), ("running", "start"),
     ("stopping", "pause"), ("stopping", "resume")],
)  # fmt: skip
def test_pressing_twice_changes_nothing(state: State, event: LifeEvent) -> None:
    assert step(state, event) == state


@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_what_is_over_stays_over(events: list[LifeEvent]) -> None:
    state: State = "pending"
    for event in events:
        before = state
        try:
            state = step(state, event)
        except InvalidTransitionError:
            continue
        assert state in STATES
        if before in OVER:
            assert state == before


@pytest.mark.parametrize("state", STATES)
def test_every_run_that_is_not_over_can_fail_or_stop(state: State) -> None:
    assert step(state, "fail") == (state if state in OVER else "failed")
    assert step(state, "stop") in (*OVER, "stopping")


@pytest.mark.parametrize(
    ("state", "event"),
    [("pending", "finish"), ("pending", "pause"), ("finished", "start"), ("finished", "submit")],
)
def test_what_makes_no_sense_tells_the_runs_story(state: State, event: LifeEvent) -> None:
    with pytest.raises(InvalidTransitionError, match=r"submit > start") as caught:
        step(state, event, ("submit", "start"))
    assert repr(event) in str(caught.value)
    assert repr(state) in str(caught.value)


def test_a_story_that_has_not_begun_is_told_as_nothing() -> None:
    with pytest.raises(InvalidTransitionError, match="so far: nothing"):
        step("pending", "resume")
