"""Plans that a cell runs itself, one after the other, on a cluster that is none."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from fake_cluster import WAIT_S, Cluster, finish, plan_of, plans_of, queue_on, states

from workbench.errors import RunError
from workbench.session.queue import Conduct, Queue
from workbench.shared.plan import Plan


def conduct_on(cluster: Cluster) -> Conduct:
    def conduct(plan: Plan, begun: Callable[[Any], None]) -> Any:
        run = cluster.start(plan)
        begun(run)
        if run.error is not None:
            raise run.error
        return run

    return conduct


def test_a_cell_runs_its_plans_itself_and_gets_the_runs() -> None:
    cluster = Cluster(finish)
    queue = queue_on(cluster)
    runs = queue.train(plans_of("ab"), conduct_on(cluster))
    assert runs == cluster.started
    assert states(queue.items) == {"a": "finished", "b": "finished"}
    assert not queue.busy


def test_a_cell_ends_when_the_rest_of_its_plans_is_taken_out() -> None:
    cluster = Cluster(finish)
    queue = queue_on(cluster)

    def conduct(plan: Plan, begun: Callable[[Any], None]) -> Any:
        queue.clear()
        return conduct_on(cluster)(plan, begun)

    assert queue.train(plans_of("abc"), conduct) == cluster.started
    assert states(queue.items) == {"a": "finished"}
    assert not queue.busy


def test_a_stopped_run_ends_the_rest_of_the_cell() -> None:
    cluster = Cluster(lambda run: run.end("stopped"))
    queue = queue_on(cluster)
    (run,) = queue.train(plans_of("ab"), conduct_on(cluster))
    assert run is cluster.started[0]
    assert states(queue.items) == {"a": "stopped", "b": "stopped"}


@pytest.mark.parametrize(
    "error", [RunError("rank 0 failed", code="WB-RUN-000"), KeyboardInterrupt()]
)
def test_a_failure_or_an_interrupt_ends_the_cell_and_is_raised(error: BaseException) -> None:
    cluster = Cluster(finish)
    queue = queue_on(cluster)

    def conduct(plan: Plan, begun: Callable[[Any], None]) -> Any:
        begun(cluster.start(plan))
        raise error

    with pytest.raises(type(error)):
        queue.train(plans_of("ab"), conduct)
    assert states(queue.items) == {"a": "failed", "b": "stopped"}
    assert not queue.busy
    queue.train(plans_of("c"), conduct_on(cluster))  # it works again


def test_an_interrupt_as_a_plan_begins_leaves_nothing_running() -> None:
    cluster = Cluster(finish)
    queue = queue_on(cluster)

    def interrupt(_: Queue) -> None:
        if queue.current is not None:
            raise KeyboardInterrupt

    undo = queue.listen(interrupt)
    with pytest.raises(KeyboardInterrupt):
        queue.train(plans_of("ab"), conduct_on(cluster))
    undo()
    assert queue.current is None
    assert not queue.busy
    assert cluster.started == []
    queue.train(plans_of("c"), conduct_on(cluster))
    assert states(queue.items) == {"c": "finished"}


def test_a_cell_does_not_push_in_while_the_queue_is_at_work() -> None:
    cluster = Cluster()
    queue = queue_on(cluster)
    queue.add(plans_of("ab"))
    cluster.next()
    with pytest.raises(RunError, match="WB-RUN-081"):
        queue.train(plans_of("c"), conduct_on(cluster))
    queue.stop_all()
    queue.wait(WAIT_S)


def test_what_is_added_while_a_cell_trains_runs_after_it_in_the_background() -> None:
    cluster = Cluster(finish)
    queue = queue_on(cluster)
    threads: dict[str, threading.Thread] = {}
    cluster.refuse = lambda plan: threads.update({plan.name: threading.current_thread()})

    def conduct(plan: Plan, begun: Callable[[Any], None]) -> Any:
        if plan.name == "a":
            queue.add(plan_of("later"))
        return conduct_on(cluster)(plan, begun)

    runs = queue.train(plans_of("ab"), conduct)
    assert [run.name for run in runs] == ["a", "b"]
    queue.wait(WAIT_S)
    assert [run.name for run in cluster.started] == ["a", "b", "later"]
    assert threads["b"] is threading.current_thread()
    assert threads["later"] is not threading.current_thread()


def refuse(*names: str) -> Callable[[Any], None]:
    def end(run: Any) -> None:
        if run.name in names:
            run.end("failed", RunError(f"{run.name} refuses", code="WB-RUN-000"))
        else:
            finish(run)

    return end


def test_what_may_pass_does_not_end_the_rest() -> None:
    cluster = Cluster(refuse("a"))
    queue = queue_on(cluster)
    runs = queue.train(plans_of("abc"), conduct_on(cluster), lambda error: "refuses" in str(error))
    assert [run.name for run in runs] == ["a", "b", "c"]
    assert states(queue.items) == {"a": "failed", "b": "finished", "c": "finished"}
    assert runs[0].error.what == "a refuses"


def test_where_all_fail_the_first_error_is_raised() -> None:
    cluster = Cluster(refuse("a", "b"))
    queue = queue_on(cluster)
    with pytest.raises(RunError, match="a refuses"):
        queue.train(plans_of("ab"), conduct_on(cluster), lambda error: True)
    assert states(queue.items) == {"a": "failed", "b": "failed"}
    assert not queue.busy
