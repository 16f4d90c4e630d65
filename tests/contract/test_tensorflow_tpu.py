"""Where no TPU answers, the error comes within seconds and the engine trains on."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from needs import need
from tf_harness import clean, run

need("tensorflow")
pytestmark = pytest.mark.tensorflow

TRAIN = """
import keras, numpy as np
model = keras.Sequential([keras.layers.Dense(3)])
model.compile("sgd", "mse")
model.fit(np.ones((8, 2), "float32"), np.ones((8, 3), "float32"), batch_size=4)
"""
LIMIT_S = 15  # of a wait that had no end; 5 on a quiet machine


def refused(words, **settings):
    began = time.perf_counter()
    report = run("tpu", TRAIN, 2, **settings)
    assert time.perf_counter() - began < LIMIT_S
    assert report.error is not None
    assert all(word in report.error for word in words), report.error
    assert clean(run("mirrored", TRAIN, 2)).trained == 2


@pytest.fixture
def silent():
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def test_a_machine_without_a_tpu_is_told_from_one_with(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    refused(["No TPU was found", "TPU_NAME=local", "TensorFlow:", "mirrored"])


def test_an_address_where_nobody_listens(monkeypatch, silent):
    port = silent.getsockname()[1]
    silent.close()
    monkeypatch.setenv("TPU_NAME", f"grpc://127.0.0.1:{port}")
    refused(["No TPU answers", f"127.0.0.1:{port}", "TPU_NAME"])


def test_an_address_that_listens_and_says_nothing(monkeypatch, silent):
    monkeypatch.setenv("TPU_NAME", f"grpc://127.0.0.1:{silent.getsockname()[1]}")
    refused(["No TPU answers", "timed out"])


def test_an_address_that_speaks_something_else(monkeypatch, silent):
    def answer():
        line, _ = silent.accept()
        with line:
            line.recv(100)
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    monkeypatch.setenv("COLAB_TPU_ADDR", f"127.0.0.1:{silent.getsockname()[1]}")
    refused(["WB-CLUSTER-048", "gRPC"])
    thread.join(5)


def test_delays_cannot_be_injected(monkeypatch):
    monkeypatch.setenv("TPU_NAME", "local")
    refused(["--inject", "slow=0:50ms"], faults=("slow=0:50ms",))
