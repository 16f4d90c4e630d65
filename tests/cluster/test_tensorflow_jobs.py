"""Jobs of TensorFlow: one process, or several that TF_CONFIG names."""

from __future__ import annotations

import json
import socket

import numpy as np
import pytest
from job_folders import done, job_folder, run_of, started
from needs import need

import workbench as wb

pytestmark = [pytest.mark.cluster, pytest.mark.tensorflow]
need("tensorflow")

CELL = """
import keras
keras.utils.set_random_seed(0)
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10)])
model.compile(optimizer="sgd", loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = wb.data.digits("train", arrays=True)
model.fit(x[:512].reshape(512, 64), y[:512], epochs=1, batch_size=64, shuffle=False, verbose=0)
"""
KEY = "WORKBENCH_JOB_KEY"


def folder_of(where, strategy):
    where.mkdir()
    return job_folder(where, CELL, strategy, 2, framework="tensorflow")


def configs(count):
    """TF_CONFIG of each worker, on ports that are free."""
    with socket.socket() as one, socket.socket() as other:
        for probe in (one, other):
            probe.bind(("127.0.0.1", 0))
        ports = [probe.getsockname()[1] for probe in (one, other)]
    cluster = {"worker": [f"127.0.0.1:{port}" for port in ports[:count]]}
    return [
        json.dumps({"cluster": cluster, "task": {"type": "worker", "index": i}})
        for i in range(count)
    ]


def test_replicas_of_one_process_and_two_processes_train_the_same(tmp_path):
    alone = folder_of(tmp_path / "alone", "mirrored")
    with started(alone, 1, RANK="", WORLD_SIZE="") as processes:
        assert done(processes) == [0], (alone / "out-0.txt").read_text()
    both = folder_of(tmp_path / "both", "multi_worker_mirrored")
    about = [{"TF_CONFIG": text, KEY: "k" * 32} for text in configs(2)]
    with started(both, 2, each=about) as processes:
        assert done(processes) == [0, 0], (both / "out-0.txt").read_text()
    one, two = wb.load(run_of(alone)), wb.load(run_of(both))
    assert (one.state, two.state) == ("finished", "finished")
    assert set(one.history["rank"]) == set(two.history["rank"]) == {0, 1}
    assert one.history.totals.steps == two.history.totals.steps == 8
    for name, array in one.weights().items():
        assert np.allclose(array, two.weights()[name], atol=1e-6)


def test_processes_without_a_key_are_refused_before_they_meet(tmp_path):
    folder = folder_of(tmp_path / "both", "multi_worker_mirrored")
    about = [{"TF_CONFIG": text, KEY: ""} for text in configs(2)]
    with started(folder, 2, each=about) as processes:
        assert done(processes) == [1, 1]
    assert "WB-PLAN-192" in (folder / "out-0.txt").read_text()
    assert not (folder / "runs").exists()
