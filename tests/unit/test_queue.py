"""Plans in the background: their order, errors, stops, clusters that die; without a cluster."""

from __future__ import annotations

import json
import threading

import pytest
from fake_cluster import WAIT_S, Cluster, Run, finish, plan_of, plans_of, queue_on, states

from workbench.errors import ClusterError, PlanError, RunError
from workbench.execution.requests import BusyError
from workbench.session import queue as pacing
from workbench.session.queue import Queue
from workbench.shared.plan import Plan


def test_plans_run_in_the_background_one_after_the_other() -> None:
    cluster = Cluster()
    queue = queue_on(cluster)
    items = queue.add(plans_of("abc"))
    for name in "abc":
        run = cluster.next()
        assert run.name == name
        assert queue.busy
        run.end()
    queue.wait(WAIT_S)
    assert [item.state for item in items] == ["finished"] * 3
    assert queue.runs == cluster.started
    assert queue.progress == 1.0
    assert queue.remaining_s == 0.0
    assert not queue.busy


def test_the_queue_begins_again_when_more_is_added_later() -> None:
    cluster = Cluster(finish)
    queue = queue_on(cluster)
    queue.add(plan_of("a"))
    queue.wait(WAIT_S)
    queue.add(plan_of("b"))
    queue.wait(WAIT_S)
    assert [run.name for run in cluster.started] == ["a", "b"]


@pytest.mark.parametrize("keep_going", [False, True])
def test_after_a_failure_the_rest_is_given_up_unless_told_otherwise(keep_going: bool) -> None:
    def behave(run: Run) -> None:
        run.end(
            "failed", RunError("rank 1 failed", code="WB-RUN-000")
        ) if run.name == "b" else run.end()

    queue = queue_on(Cluster(behave), keep_going=keep_going)
    a, b, c, d = queue.add(plans_of("abcd"))
    queue.wait(WAIT_S)
    assert (a.state, b.state) == ("finished", "failed")
    assert "rank 1 failed" in str(b.error)
    assert [c.state, d.state] == (["finished"] * 2 if keep_going else ["stopped"] * 2)
    assert c.why == ("" if keep_going else "b failed")
    assert c.run is None or keep_going


def test_a_plan_that_cannot_begin_fails_like_one_that_ends_badly() -> None:
    cluster = Cluster(finish)

    def refuse(plan: Plan) -> None:
        if plan.name == "a":
            raise PlanError("The folder holds other checkpoints.", code="WB-PLAN-000")

    cluster.refuse = refuse
    queue = queue_on(cluster, keep_going=True)
    a, b = queue.add(plans_of("ab"))
    queue.wait(WAIT_S)
    assert (a.state, a.run, b.state) == ("failed", None, "finished")
    assert "other checkpoints" in str(a.error)


def test_a_cluster_that_dies_ends_the_queue_even_if_it_keeps_going() -> None:
    cluster = Cluster()
    queue = queue_on(cluster, keep_going=True)
    a, b, c = queue.add(plans_of("abc"))
    run = cluster.next()

    def gone(plan: Plan) -> None:
        raise ClusterError("All engines are dead.", code="WB-CLUSTER-000")

    cluster.refuse = gone
    run.end("failed", RunError("Engine 0 died.", code="WB-RUN-000"))
    queue.wait(WAIT_S)
    assert (a.state, b.state, c.state) == ("failed", "failed", "stopped")
    assert isinstance(b.error, ClusterError)
    assert c.why == "b failed"


def test_stop_ends_the_present_run_and_the_next_begins() -> None:
    cluster = Cluster()
    queue = queue_on(cluster)
    a, b = queue.add(plans_of("ab"))
    cluster.next()
    queue.stop()
    assert cluster.next().name == "b"
    cluster.started[-1].end()
    queue.wait(WAIT_S)
    assert (a.state, b.state) == ("stopped", "finished")


def test_stop_all_ends_the_present_run_and_gives_up_the_rest() -> None:
    cluster = Cluster()
    queue = queue_on(cluster)
    a, b, c = queue.add(plans_of("abc"))
    cluster.next()
    queue.stop_all()
    queue.wait(WAIT_S)
    assert [item.state for item in (a, b, c)] == ["stopped"] * 3
    assert len(cluster.started) == 1
    assert "was stopped" in b.why
    queue.add(plan_of("d"))  # it takes plans again
    cluster.next().end()
    queue.wait(WAIT_S)
    assert states(queue.items) == {"d": "finished"}


def test_what_is_added_while_a_stopped_run_winds_down_begins() -> None:
    cluster = Cluster()
    winding = threading.Event()
    queue = queue_on(cluster)
    (a,) = queue.add([plan_of("a")])
    run = cluster.next()
    run.stop = winding.set  # type: ignore[method-assign]
    queue.stop_all()
    (b,) = queue.add([plan_of("b")])
    assert winding.wait(WAIT_S)
    run.end("stopped")
    cluster.next().end()
    queue.wait(WAIT_S)
    assert (a.state, b.state) == ("stopped", "finished")


def test_stop_reaches_a_plan_that_waits_for_the_cluster_and_the_next_begins() -> None:
    cluster = Cluster(finish)
    asked = threading.Event()

    def refuse(plan: Plan) -> None:
        if plan.name == "a":
            asked.set()
            raise BusyError("Another one is going on: a cell.", code="WB-RUN-000")

    cluster.refuse = refuse
    queue = queue_on(cluster)
    a, b = queue.add(plans_of("ab"))
    assert asked.wait(WAIT_S)
    queue.stop()
    queue.wait(WAIT_S)
    assert (a.state, a.run, b.state) == ("stopped", None, "finished")


def test_stop_all_reaches_a_run_that_is_just_being_started() -> None:
    cluster = Cluster()
    starting, go = threading.Event(), threading.Event()

    def refuse(plan: Plan) -> None:
        starting.set()
        assert go.wait(WAIT_S)

    cluster.refuse = refuse
    queue = queue_on(cluster)
    (item,) = queue.add([plan_of("a")])
    assert starting.wait(WAIT_S)
    queue.stop_all()
    go.set()
    queue.wait(WAIT_S)
    assert item.state == "stopped"
    assert cluster.started[0].state == "stopped"


def test_a_closed_queue_starts_nothing_and_takes_nothing() -> None:
    cluster = Cluster()
    queue = queue_on(cluster)
    _, b = queue.add(plans_of("ab"))
    run = cluster.next()
    queue.close()
    run.end("failed", RunError("The cluster was stopped.", code="WB-RUN-000"))
    queue.wait(WAIT_S)
    assert (b.state, b.why) == ("stopped", pacing.CLOSED)
    with pytest.raises(ClusterError, match="WB-CLUSTER-041"):
        queue.add(plan_of("c"))


def test_the_queue_waits_for_a_cell_that_was_quicker() -> None:
    cluster = Cluster(finish)
    turns: list[str] = []

    def refuse(plan: Plan) -> None:
        turns.append(plan.name)
        if len(turns) < 3:
            raise BusyError("Another one is going on: a cell.", code="WB-RUN-000")

    cluster.refuse = refuse
    queue = queue_on(cluster)
    (item,) = queue.add([plan_of("a")])
    queue.wait(WAIT_S)
    assert item.state == "finished"
    assert turns == ["a"] * 3


def test_listeners_hear_of_every_change_and_may_fail(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[tuple[str, ...]] = []

    def fail(_: Queue) -> None:
        raise ValueError("a view was closed")

    queue = queue_on(Cluster(finish))
    queue.listen(fail)
    queue.listen(lambda q: heard.append(tuple(item.state for item in q.items)))
    queue.add(plans_of("ab"))
    queue.wait(WAIT_S)
    assert ("finished", "running") in heard
    assert heard[-1] == ("finished", "finished")
    assert "a view was closed" in caplog.text


def test_who_listens_no_more_hears_nothing() -> None:
    heard: list[Queue] = []
    queue = queue_on(Cluster(finish))
    undo = queue.listen(heard.append)
    queue.clear()
    assert heard == [queue]
    undo()
    queue.clear()
    assert heard == [queue]


def test_progress_follows_the_steps_and_never_falls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "TICK_S", 0.005)
    cluster = Cluster()
    queue = queue_on(cluster)
    queue.add(plans_of("ab"))
    seen: list[float] = []
    turn = threading.Lock()  # listeners are called on several threads

    def look(queue: Queue) -> None:
        with turn:
            seen.append(queue.progress)

    queue.listen(look)
    for _ in range(2):
        run = cluster.next()
        for step in range(1, 11):
            run.step = step
            wanted = (len(cluster.started) - 1 + step / 10) / 2
            reached = threading.Event()
            undo = queue.listen(lambda q, w=wanted, r=reached: r.set() if q.progress >= w else None)
            assert reached.wait(WAIT_S)
            undo()
        run.end()
    queue.wait(WAIT_S)
    assert seen == sorted(seen)
    assert len({round(one, 2) for one in seen}) >= 15


def test_the_wire_is_json_with_states_errors_and_seeds() -> None:
    def behave(run: Run) -> None:
        run.end("failed", RunError("rank 1 failed", code="WB-RUN-000")) if run.name.startswith(
            "b"
        ) else run.end()

    queue = queue_on(Cluster(behave), keep_going=True)
    queue.add([plan_of("a"), plan_of("b").with_seed(3)])
    queue.wait(WAIT_S)
    wire = json.loads(json.dumps(queue.to_wire()))
    assert wire["progress"] == 1.0
    assert wire["remaining_s"] == 0.0
    assert [item["state"] for item in wire["items"]] == ["finished", "failed"]
    assert wire["items"][1]["seed"] == 3
    assert "rank 1 failed" in wire["items"][1]["error"]
