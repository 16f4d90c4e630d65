"""Kept clusters outlive their kernel and are found again whole."""

import json
import time

import pytest
from keeping import end, line, listed, shell, start
from notebook_shell import soon

from workbench.cluster.processes import can_fork

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(not can_fork()[0], reason=can_fork()[1]),
]


def test_a_run_goes_on_without_its_kernel_and_is_restored_whole(stage):
    first = start(stage, "kept(10**6)")
    name = line(first)
    end(first)
    time.sleep(2)
    (about,) = listed(stage)
    assert (about["id"], about["engines"], about["running"]) == (name, 2, "run kept")
    assert (about["kept"], about["owner_pid"]) == (True, None)
    second = start(
        stage,
        f"""
cluster = wb.attach({name!r})
run = wb.runs["kept"]
before = run.history.totals.steps
deadline = time.time() + 20
while run.history.totals.steps < before + 20 and time.time() < deadline:
    time.sleep(0.01)
states = [run.state]
run.pause()
while run.state != "paused" and time.time() < deadline:
    time.sleep(0.01)
states.append(run.state)
run.resume()
run.stop()
run.wait(20)
seen = cluster.pull(["seen"])
task = cluster.execute("x = torch.ones(1); dist.all_reduce(x); total = x.item()")
task.over.wait(30)
report(run, states=states, seen=seen[1]["seen"], total=cluster.pull(["total"])[0]["total"])
cluster.stop()
say("stopped")
""",
    )
    found = json.loads(line(second))
    assert found["states"] == ["running", "paused"]
    assert (found["state"], found["seen"], found["total"]) == ("stopped", 41, 2.0)
    assert found["each"] == [2], "every row of both ranks once"
    assert found["rows"] == 2 * (found["last"] + 1)
    assert "hello" in found["printed"]
    assert line(second) == "stopped"
    end(second)
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"


def test_the_outcome_of_a_run_that_ended_meanwhile_is_found(stage):
    first = start(stage, "kept(60)")
    name = line(first)
    end(first)
    assert soon(lambda: listed(stage)[0]["running"] == "")
    second = start(
        stage,
        f"""
cluster = wb.attach({name!r})
run = wb.runs["kept"].wait(30)
report(run, weights=len(run.weights()))
again = cluster.run(run.plan.recipe, strategy="mirrored", steps=3).wait(60)
say(again.state)
""",
    )
    found = json.loads(line(second))
    assert (found["state"], found["rows"], found["weights"]) == ("finished", 120, 2)
    assert found["printed"] == ["hello", "goodbye"]
    assert line(second) == "finished"
    end(second)


def test_a_failure_meanwhile_is_found_too(stage):
    first = start(
        stage,
        """
cluster = wb.Cluster(2, keep=True)
task = cluster.execute("import time; print('before'); time.sleep(3); 1 / (1 - rank)")
time.sleep(0.5)
say(cluster.keeping.id)
""",
    )
    name = line(first)
    end(first)
    time.sleep(4)
    second = start(
        stage,
        f"""
cluster = wb.attach({name!r})
task = cluster.last_task
task.over.wait(20)
say("before" in board_text(task.board), "ZeroDivisionError" in str(task.failure()))
""",
    )
    assert line(second) == "True True"
    end(second)


def test_one_owner_at_a_time_and_take_takes_it(stage):
    first = start(
        stage,
        """
from workbench.notebook.session import session
session.cluster, run = kept(10**6)
session._have(session.cluster)
while not run.is_over:
    time.sleep(0.05)
say(run.error)
while not session.lost:
    time.sleep(0.05)
try:
    session.need_cluster()
except wb.WorkbenchError as error:
    say(error.what)
""",
    )
    name = line(first)
    second = start(
        stage,
        f"""
try:
    wb.attach({name!r})
except wb.WorkbenchError as error:
    say(error.what, "|", error.next_step)
cluster = wb.attach({name!r}, take=True)
run = wb.runs["kept"]
say(run.state)
before = run.history.totals.steps
while run.history.totals.steps < before + 20:
    time.sleep(0.01)
say("goes on")
""",
    )
    assert "%cluster attach ID --take" in line(second)
    assert "taken over" in line(first)
    assert "taken over" in line(first)
    assert line(second) in ("starting", "running")
    assert line(second) == "goes on"
    (about,) = listed(stage)
    assert about["owner_pid"] == second.pid
    end(first)
    time.sleep(1.5)
    assert listed(stage)[0]["engines"] == 2
    done = shell(stage, "stop", name)
    assert (done.returncode, done.stdout) == (0, f"{name} stopped\n")
    assert listed(stage) == []
    end(second)
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"
