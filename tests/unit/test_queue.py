"""Plans in a row: what waits, runs and is given up; errors, stops, clusters that die."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cookbook import Recipe
from workbench.errors import ClusterError, PlanError, RunError
from workbench.plan import Plan, make_plan
from workbench.session import pacing
from workbench.session import queue as queues
from workbench.session.checks import BusyError
from workbench.session.lineup import TAKEN_OUT, Item, Lineup
from workbench.session.queue import Queue
from workbench.session.sweep import sweep

WAIT_S = 20


def plan_of(name: str, strategy: str = "mirrored") -> Plan:
    return make_plan(Recipe("wb.fit()"), strategy, workers=2, name=name)


def plans_of(names: str) -> list[Plan]:
    return [plan_of(name) for name in names]


def states(items: list[Item]) -> dict[str, str]:
    return {item.name: item.state for item in items}


# -- the row itself --------------------------------------------------------------------------------


def test_they_run_in_their_order_and_one_at_a_time() -> None:
    line = Lineup()
    a, b = line.add(plans_of("ab"))
    assert line.begin() is a
    assert line.begin() is None  # one runs
    line.settle(a, "finished")
    assert line.begin() is b
    line.settle(b, "failed", RunError("no"))
    assert line.begin() is None
    assert line.done
    assert states(line.items) == {"a": "finished", "b": "failed"}


def test_only_what_waits_can_be_moved_and_removed() -> None:
    line = Lineup()
    a, b, c, d = line.add(plans_of("abcd"))
    line.begin()
    line.move(d.number, 0)
    assert [item.name for item in line.waiting] == ["d", "b", "c"]
    line.move(d.number, 99)
    assert [item.name for item in line.waiting] == ["b", "c", "d"]
    line.remove(b.number)
    for act in (lambda: line.remove(a.number), lambda: line.move(a.number, 1)):
        with pytest.raises(PlanError, match="does not wait any more"):
            act()
    with pytest.raises(PlanError, match="no such plan"):
        line.remove(b.number)
    line.clear()
    assert [item.name for item in line.items] == ["a"]
    assert b.state == c.state == d.state == "stopped"
    assert c.why == TAKEN_OUT


def test_a_new_batch_forgets_the_one_before_and_numbers_go_on() -> None:
    line = Lineup()
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
    line = Lineup()
    line.add(plans_of("abc"))
    line.begin()
    line.give_up("a failed", [line.items[1]])
    assert [item.state for item in line.items] == ["running", "stopped", "waiting"]
    assert line.items[1].why == "a failed"


# -- the queue, on a cluster that is none ----------------------------------------------------------


class Run:
    """A run that ends when a test says so."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.name, self.state = plan, plan.name, "running"
        self.error: RunError | None = None
        self._over = threading.Event()
        self.step = 0

    @property
    def is_over(self) -> bool:
        return self._over.is_set()

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(step=self.step, total_steps=10, elapsed_s=self.step * 0.1)

    def end(self, state: str = "finished", error: RunError | None = None) -> None:
        self.state, self.error = state, error
        self.step = 10 if state == "finished" else self.step
        self._over.set()

    def stop(self) -> None:
        self.end("stopped")


class Cluster:
    """Starts fake runs; `behave(run)` may end them at once."""

    def __init__(self, behave: Callable[[Run], None] = lambda run: None) -> None:
        self.started: list[Run] = []
        self.behave = behave
        self.framework, self.worker_ids = "torch", [0, 1]
        self.refuse: Callable[[Plan], None] = lambda plan: None
        self.began = threading.Semaphore(0)

    @property
    def is_busy(self) -> bool:
        return any(not run.is_over for run in self.started)

    def start(self, plan: Plan, **_: Any) -> Run:
        self.refuse(plan)
        assert not self.is_busy
        run = Run(plan)
        self.started.append(run)
        self.behave(run)
        self.began.release()
        return run

    def next(self) -> Run:
        assert self.began.acquire(timeout=WAIT_S)
        return self.started[-1]


def finish(run: Run) -> None:
    run.end()


def queue_on(cluster: Cluster, **more: Any) -> Queue:
    return Queue(cluster, **more)  # type: ignore[arg-type]


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
        run.end("failed", RunError("rank 1 failed")) if run.name == "b" else run.end()

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
            raise PlanError("The folder holds other checkpoints.")

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
        raise ClusterError("All engines are dead.")

    cluster.refuse = gone
    run.end("failed", RunError("Engine 0 died."))
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
    assert b.why == "the queue was stopped"
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
            raise BusyError("Another one is going on: a cell.")

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
    run.end("failed", RunError("The cluster was stopped."))
    queue.wait(WAIT_S)
    assert (b.state, b.why) == ("stopped", queues.CLOSED)
    with pytest.raises(ClusterError, match="takes no plans"):
        queue.add(plan_of("c"))


def test_the_queue_waits_for_a_cell_that_was_quicker() -> None:
    cluster = Cluster(finish)
    turns: list[str] = []

    def refuse(plan: Plan) -> None:
        turns.append(plan.name)
        if len(turns) < 3:
            raise BusyError("Another one is going on: a cell.")

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
        run.end("failed", RunError("rank 1 failed")) if run.name.startswith("b") else run.end()

    queue = queue_on(Cluster(behave), keep_going=True)
    queue.add([plan_of("a"), plan_of("b").with_seed(3)])
    queue.wait(WAIT_S)
    wire = json.loads(json.dumps(queue.to_wire()))
    assert wire["progress"] == 1.0
    assert wire["remaining_s"] == 0.0
    assert [item["state"] for item in wire["items"]] == ["finished", "failed"]
    assert wire["items"][1]["seed"] == 3
    assert "rank 1 failed" in wire["items"][1]["error"]


# -- in a cell -------------------------------------------------------------------------------------


def conduct_on(cluster: Cluster) -> queues.Conduct:
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


@pytest.mark.parametrize("error", [RunError("rank 0 failed"), KeyboardInterrupt()])
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
    with pytest.raises(RunError, match="queue is at work"):
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


# -- many plans at once ----------------------------------------------------------------------------


def test_a_sweep_is_every_recipe_under_every_strategy_with_every_seed() -> None:
    plans = sweep(
        Cluster(), ["wb.fit(a)", "wb.fit(b)"], ["one_device", "mirrored"], seeds=2, name="n",
        epochs=3, options={},
    )  # fmt: skip
    assert [plan.name for plan in plans] == [
        f"n-{r}-{s}-seed{k}" for r in (1, 2) for s in ("one_device", "mirrored") for k in (0, 1)
    ]
    assert {plan.overrides["epochs"] for plan in plans} == {3}
    assert plans[0].recipe != plans[-1].recipe


def test_a_sweep_of_one_is_the_plain_plan() -> None:
    (plan,) = sweep(Cluster(), "wb.fit(a)", "mirrored")  # type: ignore[arg-type]
    assert (plan.name, plan.workers, plan.overrides) == ("", 2, {})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"strategies": []}, "at least one strategy"),
        ({"recipes": []}, "at least one recipe"),
        ({"seeds": 0}, "count something"),
        ({"seeds": [-1]}, "seed"),
        ({"strategies": ["mirrored", "nonsense"]}, "nonsense"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_whole(more: dict[str, Any], words: str) -> None:
    queue = queue_on(Cluster(finish))
    asked = {"recipes": "wb.fit(a)", "strategies": "mirrored", **more}
    with pytest.raises(PlanError, match=words):
        queue.sweep(asked.pop("recipes"), asked.pop("strategies"), **asked)
    assert queue.items == []
