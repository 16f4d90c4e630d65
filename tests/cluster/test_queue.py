"""Plans in the background, one after the other, on a real cluster; and how its engines are."""

from __future__ import annotations

import threading

import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from run_cells import ENDLESS, FIT

import workbench as wb
from workbench.cluster.progress import Progress

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

SHORT = FIT.replace("STEPS", "40")


def test_two_strategies_with_two_seeds_run_in_the_background(book, cluster):
    queue = cluster.queue()
    seen, left, threads, moment = [], [], set(), {}

    turn = threading.Lock()

    def look(queue):
        with turn:  # it is called on several threads
            seen.append(queue.progress)
        left.append(queue.remaining_s)
        threads.add(threading.current_thread())
        item = queue.current
        if item is not None and item.run is not None:
            moment[item.name] = item.run.state

    undo = queue.listen(look)
    items = queue.sweep(SHORT, ["one_device", "mirrored"], seeds=2, name="swept")
    book.refused("%%distributed mirrored --plot off\n" + SHORT, "WB-RUN-081")
    assert queue.busy
    queue.wait(4 * WAIT_S)
    undo()
    names = [f"swept-{s}-seed{k}" for s in ("one_device", "mirrored") for k in range(2)]
    assert [item.name for item in items] == names
    assert [item.state for item in items] == ["finished"] * 4, [item.error for item in items]
    assert all(wb.runs[name].state == "finished" for name in names)
    assert all(wb.runs[name].history.totals.steps == 40 for name in names)
    assert [run.name for run in queue.runs] == names
    assert seen == sorted(seen)
    assert seen[0] == 0.0
    assert seen[-1] == 1.0
    known = [seconds for seconds in left if seconds is not None]
    assert left[0] is None  # nothing to tell it from yet
    assert known[-1] == 0.0
    assert max(known) > 0.0
    assert set(moment) == set(names)
    assert threading.main_thread() in threads  # what was added was told there
    assert len(threads) > 1
    assert wb.queue() is queue


def test_a_plan_that_fails_leaves_the_next_one_its_engines(cluster):
    queue = cluster.queue(keep_going=True)
    bad, good = queue.sweep(["raise ValueError('never')", SHORT], "mirrored", name="pair")
    queue.wait(2 * WAIT_S)
    assert (bad.state, good.state) == ("failed", "finished")
    assert "never" in str(bad.error)
    cluster.queue(keep_going=False)


def test_stop_all_ends_an_endless_run_and_gives_the_cluster_back(book, cluster):
    queue = cluster.queue()
    first, second = queue.sweep(ENDLESS, "mirrored", seeds=2, name="endless")
    assert soon(lambda: first.run is not None and first.run.history.totals.steps > 2)
    (row, *_) = cluster.vitals.now()
    assert row.state in ("training", "waiting")
    assert row.rank == 0
    queue.stop_all()
    queue.wait(WAIT_S)
    assert (first.state, second.state) == ("stopped", "stopped")
    assert second.run is None
    assert "rank 1" in book.ok("%%distributed\nprint(rank)").text


def test_vitals_see_an_engine_work_and_wait(book, cluster):
    task = cluster.execute(
        "import time\n"
        "if rank == 0:\n"
        "    until = time.time() + 6\n"
        "    while time.time() < until: pass\n"
        "dist.barrier()"
    )
    assert soon(lambda: cluster.vitals.now()[1].state == "waiting")
    busy, waits = cluster.vitals.now()[:2]
    assert busy.state == "cell"
    assert waits.doing == "waiting in barrier"
    assert busy.cpu_percent > waits.cpu_percent
    assert task.over.wait(WAIT_S)
    found = cluster.vitals.now()
    assert {one.doing for one in found[:2]} == {"idle"}
    assert all(one.memory_kind == "PSS" and one.memory_bytes > 1 << 20 for one in found[:2])
    text = book.ok("%cluster").text
    assert "CPU" in text
    assert "MiB" in text


@pytest.fixture(scope="module")
def stopped():
    """A cluster of its own that was stopped in the middle of its queue; what was told meanwhile."""
    told: list[Progress] = []
    with wb.Cluster(2, progress=told.append) as cluster:
        queue = cluster.queue()
        items = queue.sweep(ENDLESS, "mirrored", seeds=2, name="cut")
        assert soon(lambda: items[0].run is not None and items[0].run.history.totals.steps > 2)
    queue.wait(WAIT_S)
    return told, items


def test_a_start_tells_how_far_it_is(stopped):
    told, _ = stopped
    shares = [one.fraction for one in told]
    assert shares == sorted(shares)
    assert told[0].stage == "controller"
    assert {"fork", "connect", "ready"} <= {one.stage for one in told}
    assert shares[-1] == 1.0
    assert [one.done for one in told if one.stage == "fork"] == [0, 1, 2]


def test_a_cluster_that_is_stopped_takes_its_queue_along(stopped):
    _, (first, second) = stopped
    assert first.state in ("stopped", "failed")
    assert (second.state, second.run) == ("stopped", None)
    assert "was stopped" in second.why
