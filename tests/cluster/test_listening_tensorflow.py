"""TensorFlow's gRPC servers cannot be bound to loopback: open during runs only, and said."""

from __future__ import annotations

from collections.abc import Iterator

import listening
import pytest
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench import catalog

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

START_S = 150
CELL = """
import keras
model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(10)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(*wb.data.digits("train", arrays=True), epochs=10**6, batch_size=64, verbose=0)
"""
SERVED = {"multi_worker_mirrored", "parameter_server"}
STRATEGIES = [e.name for e in catalog.strategies("tensorflow") if e.name != "tpu"]


@pytest.fixture(scope="module")
def cluster() -> Iterator[wb.Cluster]:
    with wb.Cluster(2, framework="tensorflow") as cluster:
        yield cluster


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_grpc_is_open_during_the_run_alone_and_the_user_is_told(
    cluster: wb.Cluster, strategy: str
) -> None:
    assert listening.beyond_loopback() == set()
    run = cluster.run(CELL, strategy=strategy)
    assert soon(lambda: run.history.totals.steps > 2 or run.is_over, START_S), run.state
    assert not run.is_over, run.error
    exposed = listening.beyond_loopback()
    notes = " ".join(run.history.story.notes)
    run.stop()
    assert run.wait(START_S).state == "stopped"
    assert {name.partition("-")[0] for name, _ in exposed} <= {"engine"}
    assert bool(exposed) == (strategy in SERVED)
    assert ("interface" in notes) == (strategy in SERVED)
    closed = soon(lambda: listening.beyond_loopback() == set())
    assert closed, (listening.beyond_loopback(), run.history.story.notes, cluster.engines)
