"""Strategies with servers on real engines: servers come by themselves, and are nobody's worker."""

import os
import signal

import pytest
from lending import lent
from needs import need
from notebook_shell import WAIT_S

from workbench import catalog
from workbench.errors import RunError
from workbench.session import status

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

RECIPE = """
import torch, torch.nn as nn, workbench as wb
from workbench.engine.context import current
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(), batch_size=128, epochs={epochs},
       optimizer=lambda p: torch.optim.SGD(p, 0.1), eval_data=wb.data.digits("test"))
links = [link.way for link in current().links]
"""
SERVED = [e.name for e in catalog.strategies("torch") if e.servers or e.servers_option]


@pytest.fixture(scope="module")
def cluster():
    with lent(2, devices="cpu") as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", SERVED)
def test_a_run_brings_its_servers_and_counts_workers_only(cluster, strategy):
    run = cluster.run(RECIPE.format(epochs=2), strategy=strategy).wait(WAIT_S)
    assert run.state == "finished"
    assert set(run.history["rank"]) == {0, 1}
    assert set(run.history["engine"]) == {0, 1}
    assert len(run.evals) == 2
    assert run.weights()["1.weight"].shape == (16, 64)
    assert cluster.worker_ids == [0, 1]
    assert len(cluster.ids) > 2
    ways = cluster.pull(["links"], ids=[0, 1])
    assert set(ways[0]["links"]) == set(ways[1]["links"]) == {"shared_memory"}


def test_the_next_run_without_servers_spreads_over_workers_only(cluster):
    run = cluster.run(RECIPE.format(epochs=1), strategy="mirrored").wait(WAIT_S)
    assert set(run.history["rank"]) == {0, 1}
    task = cluster.execute("n = world_size")
    assert task.over.wait(WAIT_S)
    assert {i: v["n"] for i, v in cluster.pull(["n"], ids=[0, 1]).items()} == {0: 2, 1: 2}


def test_servers_are_not_listed_as_ranks(cluster):
    rows = status.rows(cluster)
    assert [row["rank"] for row in rows[:2]] == [0, 1]
    servers = [(row["rank"], row["device"]) for row in rows[2:]]
    assert servers
    assert set(servers) == {(None, "server")}


@pytest.mark.parametrize("strategy", SERVED)
def test_a_run_with_servers_stops(cluster, strategy):
    run = cluster.run(RECIPE.format(epochs=10_000), strategy=strategy)
    while run.state == "starting":
        run.over.wait(0.05)
    run.stop()
    run.wait(WAIT_S)
    assert run.state == "stopped"
    assert run.weights()["1.bias"].shape == (16,)


def test_a_server_that_dies_is_named(cluster):
    run = cluster.run(RECIPE.format(epochs=10_000), strategy=SERVED[0])
    while run.state == "starting":
        run.over.wait(0.05)
    (server,) = [e for e in cluster.engines if e.id == max(cluster.ids[2:3])]
    os.kill(server.pid, signal.SIGKILL)
    with pytest.raises(RunError, match=r"Server s0 .*WB-RUN-066"):
        run.wait(WAIT_S)
    again = cluster.run(RECIPE.format(epochs=1), strategy=SERVED[0]).wait(WAIT_S)
    assert again.state == "finished"
