"""TensorFlow's runs go on after the death of an engine, from the checkpoint."""

import contextlib
import os
import signal

import pytest
from needs import need
from notebook_shell import soon

import workbench as wb
from workbench.errors import PlanError

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

WAIT_S = 120
STEPS = 60
FIT = f"""
import time, numpy as np, keras
generator = np.random.default_rng(0)
x = generator.normal(size=(96, 8)).astype("float32")
y = generator.integers(0, 4, 96).astype("int64")
model = keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(16, activation="tanh"),
                          keras.layers.Dense(4)])
model.compile(optimizer=keras.optimizers.SGD(0.05),
              loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.02)
model.fit(x, y, epochs={STEPS // 4}, batch_size=24, verbose=0, callbacks=[Slow()])
"""


@pytest.fixture(scope="module")
def cluster():
    with wb.Cluster(2, framework="tensorflow") as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def whole(cluster):
    """Give each test living engines."""
    if dead := [e.id for e in cluster.engines if e.state == "dead"]:
        cluster.restart(dead)


def kill_at(cluster, run, engine, steps):
    assert soon(lambda: run.is_over or run.history.totals.steps >= steps, WAIT_S), run
    pid = next(one.pid for one in cluster.engines if one.id == engine)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def start(cluster, strategy, folder, source=FIT, **more):
    return cluster.run(
        source, strategy=strategy, framework="tensorflow", checkpoint=str(folder),
        checkpoint_every=10, **more,
    )  # fmt: skip


def test_the_engine_of_all_replicas_is_replaced(cluster, tmp_path):
    run = start(cluster, "mirrored", tmp_path)
    kill_at(cluster, run, run.members[0], 25)
    run.wait(WAIT_S)
    (done,) = run.recoveries
    assert done.step >= 10
    assert run.history.totals.steps == STEPS
    assert run.history.totals.samples == 24 * STEPS
    assert set(run.history.totals.rows.tolist()) == {STEPS}


@pytest.mark.parametrize("on_failure", ["replace", "continue"])
def test_a_worker_of_several_is_replaced_or_done_without(cluster, tmp_path, on_failure):
    run = start(cluster, "multi_worker_mirrored", tmp_path, on_failure=on_failure)
    kill_at(cluster, run, run.members[1], 25)
    run.wait(WAIT_S)
    (done,) = run.recoveries
    assert done.step >= 10
    assert done.workers == (2 if on_failure == "replace" else 1)
    assert run.history.totals.steps == STEPS


def test_a_parameter_servers_death_costs_the_steps_since_the_checkpoint(cluster, tmp_path):
    source = FIT.replace(", callbacks=[Slow()]", "").replace(f"epochs={STEPS // 4}", "epochs=200")
    run = start(cluster, "parameter_server", tmp_path, source)
    assert soon(lambda: run.is_over or any(tmp_path.glob("step-*")), WAIT_S)
    server = max(cluster.ids)
    assert server not in run.members
    kill_at(cluster, run, server, 25)
    run.wait(WAIT_S)
    (done,) = run.recoveries
    assert done.engines == (server,)
    assert done.step >= 10
    assert run.state == "finished"


def test_one_engine_that_holds_all_replicas_cannot_be_done_without(cluster, tmp_path):
    with pytest.raises(PlanError, match="WB-PLAN-088"):
        start(cluster, "mirrored", tmp_path, on_failure="continue")
