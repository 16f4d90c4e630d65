"""Where engines cannot be forked, ipyparallel's own launcher starts them."""

import os
import signal

import psutil
import pytest
from needs import need
from notebook_shell import WAIT_S, soon
from warm_support import gone

import workbench as wb
from workbench.cluster.processes import FORK
from workbench.errors import RunError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

FIT = """
import torch
from torch import nn
wb.fit(nn.Linear(64, 10), wb.data.synthetic(256, shape=(64,), classes=10), batch_size=32,
       loss=nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01), steps=STEPS)
"""


@pytest.fixture(scope="module")
def cluster():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(FORK, "off")
        with wb.Cluster(2) as cluster:
            yield cluster


def test_cells_and_runs_work_without_a_warm_parent(cluster):
    assert cluster.engine_set._ground.warm is None
    keeper = cluster.engine_set._ground.store
    task = cluster.execute("import torch\nx = torch.ones(1); dist.all_reduce(x); seen = x.item()")
    assert task.over.wait(WAIT_S)
    assert task.failure() is None
    assert keeper.process.poll() is None
    assert cluster.pull(["seen"]) == {0: {"seen": 2.0}, 1: {"seen": 2.0}}
    run = cluster.run(FIT.replace("STEPS", "4"), strategy="mirrored").wait(WAIT_S)
    assert len(run.history) == 8


def test_one_ranks_error_ends_the_others_wait(cluster):
    task = cluster.execute(
        "import torch\nif rank == 1: raise ValueError('mine')\ndist.all_reduce(torch.ones(1))"
    )
    assert task.over.wait(WAIT_S)
    assert "ValueError: mine" in str(task.failure())
    assert cluster.ids == [0, 1]


def test_a_run_stops_at_an_agreed_step(cluster):
    run = cluster.run(FIT.replace("STEPS", "10**7"), strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 2)
    run.stop()
    run.wait(WAIT_S)
    assert run.state == "stopped"
    steps = run.history["step"]
    ends = [int(steps[run.history["rank"] == rank].max()) for rank in (0, 1)]
    assert ends[0] == ends[1]


def test_an_interrupt_ends_a_wait_for_a_worker_that_never_comes(cluster):
    task = cluster.execute("import torch\nif rank == 0: dist.all_reduce(torch.ones(1))")
    assert soon(lambda: 1 in task.outcomes)
    task.interrupt()
    assert task.over.wait(WAIT_S)
    assert cluster.ids == [0, 1]


def test_a_killed_engine_is_noticed_and_comes_back_under_its_id(cluster):
    run = cluster.run(FIT.replace("STEPS", "10**7"), strategy="mirrored")
    assert soon(lambda: run.history.totals.steps > 2)
    os.kill(cluster.engines[1].pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"Rank 1 .*WB-RUN-066"):
        run.wait(WAIT_S)
    assert cluster.ids == [0]
    assert cluster.restart([1]) == [1]
    run = cluster.run(FIT.replace("STEPS", "3"), strategy="mirrored").wait(WAIT_S)
    assert run.state == "finished"
    assert cluster.add(1) == [2]


def test_parameters_on_a_server_are_trained(cluster):
    run = cluster.run(FIT.replace("STEPS", "4"), strategy="central_storage").wait(WAIT_S)
    assert run.state == "finished"
    assert run.summarise().sent_step_bytes > 0


def test_stop_leaves_no_process(cluster):
    family = [child.pid for child in psutil.Process().children(recursive=True)]
    family += [engine.pid for engine in cluster.engines]
    keeper = cluster.engine_set._ground.store.process.pid
    assert keeper in family
    cluster.stop()
    assert not gone([*(engine.pid for engine in cluster.engines), keeper], timeout_s=15)
