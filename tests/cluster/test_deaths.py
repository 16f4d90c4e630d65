"""The death of any process of a cluster is named, and the cluster is of use after it."""

import asyncio
import contextlib
import os
import signal
import time

import psutil
import pytest
from lending import lent
from needs import need
from notebook_shell import WAIT_S, soon

from workbench.errors import ClusterError, RunError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """
import time, torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS,
       callbacks=[lambda step, logs: time.sleep(0.005)])
"""
ENDLESS, SHORT = FIT.replace("STEPS", "1_000_000"), FIT.replace("STEPS", "6")
AFTER = "\nx = torch.ones(1); dist.all_reduce(x)"


@pytest.fixture(scope="module")
def cluster():
    with lent(3) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def usable(cluster):
    """After each test the cluster is whole with the command that the error names, and trains."""
    yield
    busy = cluster.busy
    if busy is not None and not busy.is_over:
        busy.stop() if hasattr(busy, "stop") else busy.interrupt()
        assert soon(lambda: busy.is_over)
    if dead := [e.id for e in cluster.engines if e.state == "dead"]:
        cluster.restart(dead)
    assert cluster.run(SHORT, strategy="mirrored").wait(WAIT_S).state == "finished"


def going(cluster, steps=20, **more):
    run = cluster.run(ENDLESS, strategy="mirrored", **more)
    assert soon(lambda: run.is_over or run.history.totals.steps >= steps), run
    return run


def kill(pid, sig=signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, sig)


def pid_of(cluster, engine):
    return next(one.pid for one in cluster.engines if one.id == engine)


def ends(run):
    with pytest.raises(RunError) as failure:
        run.wait(WAIT_S)
    return str(failure.value)


@pytest.mark.timing
def test_a_kill_is_named_within_two_seconds_with_rank_pid_signal_and_memory(cluster):
    run, pid = going(cluster), pid_of(cluster, 1)
    began = time.perf_counter()
    kill(pid)
    assert soon(lambda: any("gone" in note for note in run.history.story.notes))
    named_s = time.perf_counter() - began
    text = ends(run)
    over_s = time.perf_counter() - began
    assert text.startswith(f"Rank 1 is gone: Engine 1 (pid {pid}) died: killed by SIGKILL (it used")
    assert "%cluster restart 1" in text
    assert named_s < 2.0
    assert over_s < 2.0 + 2.0  # the others end, too


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import ctypes; ctypes.string_at(0)", "killed by SIGSEGV (a segmentation fault"),
        ("import os; os.abort()", "killed by SIGABRT"),
        ("import os; os._exit(3)", "exited with code 3 ("),
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "killed by SIGBUS"),
    ],
)
def test_an_end_in_a_cell_is_named_with_what_its_log_says(cluster, code, said):
    source = f"import torch\nif rank == 1:\n    {code}{AFTER}"
    task = cluster.execute(source)
    assert task.over.wait(WAIT_S)
    text = str(task.failure())
    assert text.startswith("Rank 1 is gone: Engine 1 (pid ")
    assert said in text
    if "SIGSEGV" in said or "SIGABRT" in said:
        assert "Fatal Python error" in text
        assert '"the cell", line 3' in text


def test_a_kill_while_memory_grows_is_called_a_likely_lack_of_it(cluster, tmp_path):
    flag = tmp_path / "grown"
    source = (
        f"import torch, pathlib, psutil\nif rank == 1:\n"
        "    held = bytearray(psutil.virtual_memory().total // 8)\n"
        "    held[::4096] = b'1' * len(range(0, len(held), 4096))\n"
        f"    pathlib.Path({str(flag)!r}).touch()\n"
        "    while True: held.append(0)" + AFTER
    )
    task = cluster.execute(source)
    assert soon(flag.exists)
    kill(pid_of(cluster, 1))
    assert task.over.wait(WAIT_S)
    failure = task.failure()
    assert failure.code == "WB-RUN-066"
    assert "SIGKILL" in failure.what
    assert "memory" in failure.what


def test_running_out_of_a_limit_is_an_error_of_the_cell_and_nobody_dies(cluster):
    source = (
        "import resource, torch\nif rank == 1:\n"
        "    before = resource.getrlimit(resource.RLIMIT_AS)\n"
        "    used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize()\n"
        "    resource.setrlimit(resource.RLIMIT_AS, (used + (64 << 20), before[1]))\n"
        "    try:\n        bytearray(1 << 30)\n"
        "    finally:\n        resource.setrlimit(resource.RLIMIT_AS, before)" + AFTER
    )
    task = cluster.execute(source)
    assert task.over.wait(WAIT_S)
    assert "MemoryError" in str(task.failure())
    assert cluster.ids == [0, 1, 2]


def test_two_deaths_at_once_are_both_named(cluster):
    run = going(cluster)
    for engine in (0, 2):
        kill(pid_of(cluster, engine))
    text = ends(run)
    assert "Rank 0" in text
    assert "Rank 2" in text
    assert "%cluster restart 0 2" in text


def test_the_stores_keeper_may_die_while_a_run_goes_on(cluster):
    run = going(cluster)
    kill(cluster.engine_set._ground.store.pid)
    assert soon(lambda: any("store" in n for n in run.history.story.notes))
    steps = run.history.totals.steps
    assert soon(lambda: run.history.totals.steps > steps + 5)
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"


def test_without_the_controller_no_engine_can_be_reached_and_restart_brings_another(cluster):
    run, before = going(cluster), {e.pid for e in cluster.engines}
    kill(cluster.engine_set._ground.hub.controller.pid)
    text = ends(run)
    assert "ipyparallel's controller" in text
    assert "SIGKILL" in text
    assert "next:    %cluster restart" in text
    assert cluster.ids == []
    cluster.restart()
    assert cluster.ids == [0, 1, 2]
    assert not before & {e.pid for e in cluster.engines}


def part_of_controller(cluster):
    parts = psutil.Process(cluster.engine_set._ground.hub.controller.pid).children()
    return parts[1]


def test_a_dead_part_of_the_controller_is_noticed_and_named_and_restart_brings_another(cluster):
    run, part = going(cluster), part_of_controller(cluster)
    kill(part.pid)
    assert soon(lambda: not cluster.ids)
    text = ends(run)
    assert f"Scheduler (pid {part.pid}) ended: killed by SIGKILL" in text
    assert text.endswith("next:    %cluster restart")
    with pytest.raises(ClusterError, match="WB-CLUSTER-040") as failure:
        cluster.execute("1")
    assert f"(pid {part.pid})" in str(failure.value)
    assert failure.value.next_step == "%cluster restart"
    cluster.restart([0])
    assert cluster.ids == [0, 1, 2]


def test_a_controller_that_was_halted_gives_way_to_another_at_restart(cluster):
    kill(cluster.engine_set._ground.hub.controller.pid, signal.SIGSTOP)
    cluster.restart([1])
    assert cluster.ids == [0, 1, 2]


def test_restarts_after_the_controllers_death_leave_nothing_in_the_kernel(cluster):
    def again():
        kill(cluster.engine_set._ground.hub.controller.pid)
        assert soon(lambda: not cluster.ids)
        cluster.restart()
        time.sleep(0.3)  # a thread that was told to end has ended
        return psutil.Process().num_fds(), psutil.Process().num_threads()

    async def in_a_loop():  # as in a notebook's kernel, where ipyparallel keeps a thread for it
        return [again() for _ in range(3)]

    _, before, after = asyncio.run(in_a_loop())
    assert after <= before


def test_a_run_whose_engines_were_restarted_is_not_told_to_restart_them(cluster):
    run = going(cluster)
    cluster.restart()
    text = ends(run)
    assert "was restarted" in text
    assert "%cluster restart" not in text
    assert "next:    " in text


def test_when_the_warm_parent_took_all_along_one_workers_run_says_to_restart_all(cluster):
    run = cluster.run(ENDLESS, strategy="one_device", workers=1)
    assert soon(lambda: run.is_over or run.history.totals.steps > 5)
    kill(cluster.engine_set._ground.warm.pid)
    assert ends(run).endswith("next:    %cluster restart")
    cluster.restart()


def test_engines_end_with_their_warm_parent_and_another_forks_the_next(cluster):
    run = going(cluster)
    kill(cluster.engine_set._ground.warm.pid)
    text = ends(run)
    assert "warm parent" in text
    assert "also gone" in text
    cluster.restart()
    assert cluster.ids == [0, 1, 2]


def test_a_server_is_called_a_server(cluster):
    run = cluster.run(ENDLESS, strategy="central_storage")
    assert soon(lambda: run.is_over or run.history.totals.steps >= 5), run
    server = max(cluster.ids)
    kill(pid_of(cluster, server))
    assert f"Server s0 is gone: Engine {server} (pid" in ends(run)


def test_an_engine_that_dies_before_it_says_hello(cluster, monkeypatch):
    with contextlib.suppress(ClusterError):
        cluster.free()
    ids = cluster.ids
    monkeypatch.setenv("IPYTHONDIR", "/proc/nowhere")  # an engine cannot start with this
    with pytest.raises(ClusterError, match="WB-CLUSTER-018") as failure:
        cluster.restart([1])
    assert "engine 1" in str(failure.value)
    assert "/proc/nowhere" in str(failure.value)  # its log, and no other's
    assert "engine 0: " not in str(failure.value)
    monkeypatch.undo()
    assert cluster.ids == [engine for engine in ids if engine != 1]
    cluster.restart([1])  # under the id that the dead one had asked for
    assert cluster.ids == ids
