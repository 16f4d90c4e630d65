"""How far a start is: a share that only grows, words, and listeners that may fail."""

from __future__ import annotations

import json

import pytest

from workbench.cluster import progress

STORY = [
    progress.preparing(False, False, "torch"),
    progress.preparing(True, False, "torch"),
    progress.preparing(True, True, "torch"),
    progress.importing("torch"),
    progress.starting(8),
    *(progress.forked(k, 8) for k in range(1, 9)),
    *(progress.connected(k, 8) for k in range(9)),
    progress.ready(8),
]


def test_the_share_only_grows_and_ends_at_one() -> None:
    shares = [one.fraction for one in STORY]
    assert shares == sorted(shares)
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares[-2] == pytest.approx(1.0)  # all connected
    assert len(set(shares)) > 15


def test_as_text_it_is_the_line_of_the_notebook() -> None:
    assert f"{progress.connected(3, 8)} ..." == "connecting engines: 3 of 8 ..."
    assert str(progress.starting(1)) == "starting 1 engine"


def test_what_is_still_waited_for_is_named() -> None:
    assert str(progress.preparing(False, False, "torch")) == (
        "starting the controller, importing torch"
    )
    assert str(progress.preparing(True, False, "")) == "waiting for the controller"
    assert str(progress.preparing(True, True, "tensorflow")) == "importing tensorflow"


def test_the_wire_is_json_and_has_the_share() -> None:
    wire = json.loads(json.dumps(progress.forked(4, 8).to_wire()))
    assert wire == {
        "stage": "fork", "done": 4, "total": 8, "fraction": 0.75,
        "text": "starting engines: 4 of 8",
    }  # fmt: skip


def test_nothing_is_said_twice_in_a_row() -> None:
    heard: list[progress.Progress] = []
    tell = progress.steady(heard.append)
    for one in (STORY[0], STORY[0], STORY[1], STORY[1], STORY[0]):
        tell(one)
    assert heard == [STORY[0], STORY[1], STORY[0]]


def test_a_listener_that_fails_costs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: progress.Progress) -> None:
        raise ValueError("the widget is closed")

    progress.steady(fail)(STORY[0])
    assert "the widget is closed" in caplog.text
