"""TensorFlow's strategies of several machines, over two hosts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hosts.on_hosts import cluster_of, hosts_of, settled, started
from hosts.simulated_hosts import SimulatedHosts
from needs import need
from notebook_shell import Notebook

from workbench.session.cluster import Cluster

pytestmark = pytest.mark.tensorflow
need("tensorflow")

START_S = 180.0
CELL = """
import keras
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((1, 8, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
wb.fit(model, wb.data.digits("train", arrays=True), batch_size=64, steps=30,
       loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
       optimizer=lambda p: keras.optimizers.SGD(0.1))
"""


@pytest.fixture(scope="module")
def book(reached: SimulatedHosts) -> Iterator[Notebook]:
    with started("2 --launcher ssh --on xh1:1,xh2:1 --framework tensorflow") as book:
        yield book


@pytest.fixture
def cluster(book: Notebook) -> Iterator[Cluster]:
    cluster = cluster_of(book)
    yield cluster
    settled(cluster)


def test_workers_of_two_hosts_train_as_mirrored_does(cluster: Cluster) -> None:
    runs = [
        cluster.run(CELL, strategy=name, workers=2, framework="tensorflow").wait(START_S)
        for name in ("mirrored", "multi_worker_mirrored")
    ]
    truth, run = (one.history["loss"] for one in runs)
    assert run == pytest.approx(truth, abs=1e-5)
    history = runs[1].history
    assert [int((history["rank"] == rank).sum()) for rank in (0, 1)] == [30, 30]
    assert set(hosts_of(cluster).values()) == {"xh1", "xh2"}


def test_a_parameter_server_of_the_same_hosts_serves_both(cluster: Cluster) -> None:
    run = cluster.run(CELL, strategy="parameter_server", workers=2, framework="tensorflow")
    run.wait(START_S)
    assert run.state == "finished"
    assert {int(rank) for rank in run.history["rank"]} == {0, 1}
    loss = run.history["local_loss"]
    assert np.nanmean(loss[-10:]) < np.nanmean(loss[:10])
    assert len(hosts_of(cluster)) > 2
    assert set(hosts_of(cluster).values()) == {"xh1", "xh2"}
