"""How far a start is: a share that only grows, words, and listeners that may fail."""

from __future__ import annotations

import json
import re

import pytest

from workbench.cluster import progress

STORY = [
    progress.preparing(False, False, "torch"),
    progress.preparing(True, False, "torch"),
    progress.preparing(True, True, "torch"),
    progress.asking("asking Slurm for a job"),
    progress.queued("PENDING", "Priority", 7),
    progress.queued("PENDING", "Resources", 1, 3700.0),
    *(progress.hosts(k, 3) for k in range(4)),
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
    both = str(progress.preparing(False, False, "torch"))
    assert "controller" in both
    assert "torch" in both
    assert str(progress.preparing(True, False, "")).endswith("controller")
    assert str(progress.preparing(True, True, "tensorflow")) == "importing tensorflow"


def test_the_wire_is_json_and_has_the_share() -> None:
    wire = json.loads(json.dumps(progress.forked(4, 8).to_wire()))
    assert wire == {
        "stage": "fork", "done": 4, "total": 8, "fraction": 0.75, "endless": False,
        "text": "starting engines: 4 of 8",
    }  # fmt: skip


def test_a_queue_says_state_reason_and_place_and_a_wait_that_nobody_knows_the_end_of() -> None:
    first = progress.queued("PENDING")
    assert str(first).endswith(": pending")
    third = str(progress.queued("PENDING", "Resources", 3))
    assert re.search(r": pending \(Resources\), .* 3$", third)
    second = str(progress.queued("PENDING", "Priority", 2, 130.0))
    assert re.search(r": pending \(Priority\), .* 2, 2 min 10 s ", second)
    assert str(progress.queued("", "", 0, 7500.0)).count("2 h 5 min 0 s") == 1
    assert first.to_wire()["endless"]
    assert not progress.hosts(1, 3).endless


def test_hosts_are_counted_also_while_nobody_knows_how_many_come() -> None:
    assert str(progress.hosts(2, 3)).endswith(": 2 of 3")
    assert str(progress.hosts(0, 0)).endswith(": 0")
    assert progress.hosts(0, 0).fraction == progress.hosts(0, 3).fraction


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
