"""The control path: authenticated, on loopback only, and dispensable."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest
import zmq
from lending import lent
from needs import need
from notebook_shell import WAIT_S, soon

import workbench as wb
from workbench.errors import ClusterError, RunError
from workbench.shared.messages import Hello
from workbench.shared.protocol import encode, new_key, pack

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS)
"""
ENDLESS = FIT.replace("STEPS", "10**7")


@pytest.fixture(scope="module")
def cluster():
    with lent(2) as cluster:
        yield cluster


def test_messages_with_a_wrong_key_are_counted_and_dropped(cluster):
    router = cluster.engine_set.router
    run = cluster.run(ENDLESS, strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 2)
    before, heard = router.rejected, []
    router._on_message, listener = (lambda *m: (heard.append(m), listener(*m))), router._on_message
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 1000)
        stranger.connect(router.url)
        stranger.send_multipart(pack(encode(Hello(engine=0)), new_key()))
        stranger.send_multipart([b"", b"{}"])
        stranger.send(b"garbage")
        assert soon(lambda: router.rejected == before + 3)
    router._on_message = listener
    assert not [m for _, m in heard if isinstance(m, Hello)]
    run.stop()
    assert run.wait(WAIT_S).state == "stopped"


def test_nothing_listens_beyond_loopback_while_a_run_goes_on(cluster):
    run = cluster.run(ENDLESS, strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 2)
    kernel = psutil.Process()
    family = [kernel, *kernel.children(recursive=True)]
    open_to = {
        (process.name(), connection.laddr.ip)
        for process in family
        if process.is_running()
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    run.stop()
    run.wait(WAIT_S)
    names = {name for name, _ in open_to}
    assert {"engine-0", "store-keeper"} <= names
    assert {ip.removeprefix("::ffff:") for _, ip in open_to} <= {"127.0.0.1", "::1"}


def test_without_the_control_socket_a_run_comes_home_over_ipyparallel(cluster):
    engines, before = cluster.engine_set, cluster.ids
    url, engines.router.url = engines.router.url, "tcp://127.0.0.1:9"
    engines._attach(before)
    engines.router.url = url
    for engine in before:
        engines.router.forget(engine)
    try:
        run = cluster.run(FIT.replace("STEPS", "6"), strategy="mirrored").wait(WAIT_S)
        assert run.state == "finished"
        assert len(run.history) == 12
        assert run.snapshot().total_steps == 6
        run = cluster.run(ENDLESS, strategy="mirrored")
        assert soon(lambda: run.history.totals.steps > 2)
        run.stop()
        assert run.wait(WAIT_S).state == "stopped"
        assert not engines.router.connected
        assert cluster.ids == before
    finally:
        cluster.restart()


def test_calls_end_when_their_engine_dies(cluster):
    import threading

    victim = cluster.engines[1]
    threading.Timer(0.5, lambda: os.kill(victim.pid, signal.SIGKILL)).start()
    with pytest.raises(ClusterError, match="SIGKILL"):
        cluster.engine_set.call([1], "time:sleep", (60,))
    assert soon(lambda: cluster.ids == [0])
    cluster.restart([1])
    assert cluster.engine_set.call([1], "os:getpid")[1] == cluster.engines[1].pid != victim.pid


def test_a_restart_ends_what_the_engine_was_doing(cluster):
    run = cluster.run(ENDLESS, strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 2)
    cluster.restart([1])
    with pytest.raises(RunError, match=r"Rank 1 .*WB-RUN-066"):
        run.wait(WAIT_S)
    again = cluster.run(FIT.replace("STEPS", "3"), strategy="mirrored").wait(WAIT_S)
    assert again.state == "finished"


def test_an_engine_that_is_gone_before_the_group_is_made_does_not_hang_the_others(cluster):
    victim = cluster.engines[1]
    os.kill(victim.pid, signal.SIGSTOP)  # it takes the call and never gets to it
    task = cluster.execute("import torch")
    assert not task.over.wait(0.3)
    os.kill(victim.pid, signal.SIGKILL)
    assert task.over.wait(WAIT_S)
    assert "Rank 1 is gone" in str(task.failure())
    assert cluster.ids == [0]
    cluster.restart([1])
    task = cluster.execute("import torch\nx = torch.ones(1); dist.all_reduce(x)")
    assert task.over.wait(WAIT_S)
    assert task.failure() is None


KERNEL = """
    import sys, time
    import workbench as wb
    cluster = wb.Cluster(2)
    run = cluster.run({source!r}, strategy="mirrored", name="orphan")
    while run.history.totals.steps < 20:
        time.sleep(0.01)
    print(run.folder, flush=True)
    time.sleep(600)
"""


def test_a_run_whose_kernel_was_killed_can_be_read_back():
    code = textwrap.dedent(KERNEL).format(source=ENDLESS)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as kernel:
        folder = Path(kernel.stdout.readline().strip())
        kernel.kill()
    run = wb.load(folder)
    assert run.state == "failed"
    assert run.name == "orphan"
    assert run.history.totals.steps >= 20
    assert len({len(run.history[name]) for name in run.history}) == 1
    assert json.loads((folder / "run.json").read_text())["strategy"] == "mirrored"
