"""What closures returned is fetched several at a time, and told one by one."""

from __future__ import annotations

import math

import pytest
from needs import need

need("tensorflow")
pytestmark = pytest.mark.tensorflow


@pytest.fixture
def fetcher(monkeypatch):
    from workbench.strategies.tensorflow.coordinator import closures

    monkeypatch.setattr(closures, "LOCAL", "CPU:0")
    one = closures.Fetcher()
    yield one
    one.close()
    assert not one._thread.is_alive()


def test_each_is_told_its_own_values(fetcher):
    import tensorflow as tf

    told = []

    def tell(values):
        told.append(values.tolist())
        return values.sum()

    vectors = [[float(number), 1.0] for number in range(40)]
    numbers = [fetcher.fetch(tf.constant(float(number)), float) for number in range(40)]
    pending = [fetcher.fetch(tf.constant(vector), tell) for vector in vectors]
    fetcher.settle()
    assert sorted(told) == vectors
    assert [one.values()["local_loss"] for one in numbers] == list(range(40))
    assert [one.loss for one in pending] == [number + 1.0 for number in range(40)]
    assert all(one.tensors is None for one in pending)  # or their worker would keep them


def test_several_take_fewer_fetches(fetcher, monkeypatch):
    import tensorflow as tf

    from workbench.strategies.tensorflow.coordinator import closures

    calls = []
    original = closures._column
    monkeypatch.setattr(
        closures, "_column", lambda *args: calls.append(len(args[0])) or original(*args)
    )
    for number in range(30):
        fetcher.fetch(tf.constant(float(number)), float)
    fetcher.settle()
    assert sum(calls) == 30
    assert len(calls) < 30


def test_a_loss_that_is_lost_stays_unknown_and_holds_nobody_up(fetcher):
    import tensorflow as tf

    def lost(values):
        raise RuntimeError("its worker has died")

    broken = fetcher.fetch({"loss": tf.constant(1.0)}, lost)
    whole = fetcher.fetch(tf.constant([2.0, 3.0]), lambda values: values[0])
    fetcher.settle()
    assert math.isnan(broken.values()["local_loss"])
    assert whole.values()["local_loss"] == 2.0
