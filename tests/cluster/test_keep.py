"""Kept clusters: they outlive their kernel, are found again whole, and end when forgotten."""

import json
import os
import subprocess
import sys
import time

import psutil
import pytest
from leftovers import Stage
from notebook_shell import WAIT_S, soon

from workbench.cluster.warm_client import can_fork

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.torch,
    pytest.mark.skipif(not can_fork()[0], reason=can_fork()[1]),
]
KEPT = """
SLOW = '''
import time, torch
from torch import nn
print("hello from", rank)
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)
seen = rank + 40
wb.fit(Slow(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS)
print("goodbye from", rank)
'''
def kept(steps, **settings):
    cluster = wb.Cluster(2, keep=True, **settings)
    run = cluster.run(SLOW.replace("STEPS", str(steps)), strategy="mirrored", name="kept")
    while run.history.totals.steps < 5:
        time.sleep(0.01)
        assert not run.is_over, run.error
    say(cluster.keeping.id)
    return cluster, run
"""
TAKEN = """
import json, numpy as np
def report(run, **more):
    steps = run.history["step"]
    board = run.task.board
    say(json.dumps(dict(
        state=run.state, error=str(run.error or ""), rows=len(steps),
        each=sorted(set(np.bincount(steps).tolist())), last=int(steps.max(initial=-1)),
        printed=[text for text in ("hello", "goodbye") if text in board_text(board)], **more)))
def board_text(board):
    return board.text()
"""


@pytest.fixture
def stage():
    stage = Stage()
    yield stage
    stage.close()


def start(stage, code, tail="time.sleep(600)"):
    return stage.kernel(KEPT + TAKEN + code, tail=tail)


def line(kernel):
    text = kernel.stdout.readline().strip()
    assert text, "the kernel's stand-in did not come up"
    return text


def end(kernel):
    kernel.kill()
    kernel.wait()
    kernel.stdout.close()


def shell(stage, *words):
    return subprocess.run(
        [sys.executable, "-m", "workbench.cli", *words],
        env=stage.env, capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip


def listed(stage):
    return json.loads(shell(stage, "ps", "--json").stdout)


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
from workbench.session.state import session
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
    assert "belongs to another notebook. | %cluster attach ID --take" in line(second)
    assert "taken over by another notebook" in line(first)
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


@pytest.mark.parametrize("owned", [True, False])
def test_a_cluster_that_was_forgotten_ends_itself(stage, owned):
    kernel = start(
        stage,
        """
cluster = wb.Cluster(1, keep=True, idle_timeout="3s")
say(cluster.keeping.id)
""",
    )
    line(kernel)
    if not owned:
        end(kernel)
        time.sleep(0.5)
        assert len(listed(stage)) == 1
    assert soon(lambda: listed(stage) == [])
    if owned:
        end(kernel)
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"


def test_what_runs_is_not_idle(stage):
    kernel = start(stage, 'kept(10**6, idle_timeout="2s")')
    line(kernel)
    end(kernel)
    time.sleep(5)
    assert [one["running"] for one in listed(stage)] == ["run kept"]
    assert shell(stage, "stop", "--all").returncode == 0


def test_a_kept_cluster_ends_when_asked_and_others_cannot_be_attached(stage):
    kernel = start(
        stage,
        """
plain = wb.Cluster(1)
say(plain.keeping.id)
for name in (plain.keeping.id, "no-such"):
    try:
        wb.attach(name)
    except wb.WorkbenchError as error:
        say(error.what)
say("done")
""",
    )
    name = line(kernel)
    assert "without --keep" in line(kernel)
    assert "no such kept cluster" in line(kernel)
    assert line(kernel) == "done"
    assert shell(stage, "stop", name).returncode == 0
    end(kernel)
    assert not stage.wait_empty()[1]


def test_rubbish_in_the_temporary_folder_troubles_nobody(stage):
    """What crashes left, half-written, and files of others by the same names."""

    def folder(name, **files):
        path = stage.temp / f"workbench-{name}"
        path.mkdir(mode=0o700)
        for stem, text in files.items():
            (path / f"{stem}.json").write_text(text)
        return path

    dead = json.dumps({"pid": 2**22 - 3, "create_time": 1.0})
    stale = [folder("stale", owner=dead, cluster="{"), folder("half", owner='{"pid": 1')]
    reused = json.dumps({"pid": os.getpid(), "create_time": psutil.Process().create_time() - 99})
    engines = {"0": {"pid": os.getpid(), "create_time": 5.0}}
    about = {"version": 1, "engines": engines, "parents": {}, "since": 0, "kept": True}
    stale.append(folder("reused", owner=reused, cluster=json.dumps(about)))
    foreign = folder("foreign", cluster="[]")
    (stage.temp / "workbench-file").write_text("not a folder")
    (stage.temp / "workbench-link").symlink_to(foreign)
    assert listed(stage) == []
    kernels = [
        start(stage, "cluster = wb.Cluster(1)\nsay(cluster.execute('1').over.wait(30))")
        for _ in range(2)
    ]
    for kernel in kernels:
        assert line(kernel) == "True"
    assert not any(path.exists() for path in stale)
    assert foreign.exists()
    assert len(listed(stage)) == 2
    for kernel in kernels:
        end(kernel)
    names = {"workbench-foreign", "workbench-file", "workbench-link"}
    assert soon(lambda: {path.name for path in stage.temp.iterdir()} == names)


CELL = """%%distributed mirrored --background --name base --plot text
import time, torch
from torch import nn
print("hello from", rank)
class Slow(nn.Linear):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)
wb.fit(Slow(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=10**6)
"""


def test_in_a_notebook_the_magics_keep_and_attach(stage):
    """The dashboard goes on below the cell that attached, in another notebook."""
    from jupyter_client.manager import start_new_kernel

    def notebook(run):
        manager, client = start_new_kernel(kernel_name="python3", env=stage.env)
        try:
            return run(lambda code: _texts(client, code))
        finally:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
            manager.cleanup_resources()

    def first(do):
        said = do("%load_ext workbench\n%cluster start 2 --keep  # for a while")
        do("import workbench as wb\nimport time")
        do(CELL)
        do("while not wb.runs['base'].is_over and wb.runs['base'].history.totals.steps < 5: pass")
        return said

    def second(do):
        do("%load_ext workbench\nimport workbench as wb, time")
        refused = do("%cluster attach nothing")
        shown = do(f"%cluster attach {name}\ntime.sleep(2)")
        state = do("print(_run.state, _run.history.totals.steps > 5)")
        do("_run.stop(); _run.wait(20)")
        ended = do("print(_run.state, list(wb.runs), 'hello' in _run.task.board.text())")
        do("%cluster stop")
        return refused, shown, state, ended

    said = notebook(first)
    assert "it ends with %cluster stop" in said
    name = said.partition("kept as ")[2].partition(":")[0]
    refused, shown, state, ended = notebook(second)
    assert "no such kept cluster" in refused
    assert name in refused, "it says which there are"
    assert "engine" in shown
    assert "base" in shown, "the run's dashboard"
    assert "running True" in state
    assert "stopped ['base'] True" in ended
    seconds, left = stage.wait_empty()
    assert not left, f"after {seconds:.1f} s: {left}"


def _texts(client, code):
    """Return all text that running a cell shows."""
    texts = []

    def hook(message):
        content = message["content"]
        texts.append(content.get("text", ""))
        texts.append(content.get("data", {}).get("text/plain", ""))
        texts.append(content.get("evalue", ""))

    client.execute_interactive(code, timeout=120, output_hook=hook)
    return "\n".join(texts)
