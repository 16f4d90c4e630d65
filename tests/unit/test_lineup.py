"""Plans in a row: what waits, runs and is given up."""

from __future__ import annotations

import pytest
from fake_cluster import plans_of, states

from workbench.errors import PlanError, RunError
from workbench.session.queue_state import TAKEN_OUT, QueueState


def test_they_run_in_their_order_and_one_at_a_time() -> None:
    line = QueueState()
    a, b = line.add(plans_of("ab"))
    assert line.begin() is a
    assert line.begin() is None  # one runs
    line.settle(a, "finished")
    assert line.begin() is b
    line.settle(b, "failed", RunError("no", code="WB-RUN-000"))
    assert line.begin() is None
    assert line.done
    assert states(line.items) == {"a": "finished", "b": "failed"}


def test_only_what_waits_can_be_moved_and_removed() -> None:
    line = QueueState()
    a, b, c, d = line.add(plans_of("abcd"))
    line.begin()
    line.move(d.number, 0)
    assert [item.name for item in line.waiting] == ["d", "b", "c"]
    line.move(d.number, 99)
    assert [item.name for item in line.waiting] == ["b", "c", "d"]
    line.remove(b.number)
    for act in (lambda: line.remove(a.number), lambda: line.move(a.number, 1)):
        with pytest.raises(PlanError, match="WB-PLAN-109"):
            act()
    with pytest.raises(PlanError, match="WB-PLAN-110"):
        line.remove(b.number)
    line.clear()
    assert [item.name for item in line.items] == ["a"]
    assert b.state == c.state == d.state == "stopped"
    assert c.why == TAKEN_OUT


def test_a_new_batch_forgets_the_one_before_and_numbers_go_on() -> None:
    line = QueueState()
    (a,) = line.add(plans_of("a"))
    line.begin()
    line.add(plans_of("b"))  # the same batch: a is not over
    line.settle(a, "finished")
    b = line.begin()
    assert b is not None
    assert line.progress == 0.5
    line.settle(b, "finished")
    assert line.progress == 1.0
    (c,) = line.add(plans_of("c"))
    assert [item.number for item in line.items] == [c.number]
    assert c.number == 3
    assert line.progress == 0.0


def test_those_that_are_given_up_say_why() -> None:
    line = QueueState()
    line.add(plans_of("abc"))
    line.begin()
    line.give_up("a failed", [line.items[1]])
    assert [item.state for item in line.items] == ["running", "stopped", "waiting"]
    assert line.items[1].why == "a failed"
