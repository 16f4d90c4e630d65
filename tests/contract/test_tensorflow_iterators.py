"""Iterators over several devices end as soon as they are dropped, and give what they did."""

from __future__ import annotations

from typing import Any

import pytest
from needs import need

need("tensorflow")
pytestmark = pytest.mark.tensorflow

DEVICES = ["/cpu:0"] * 2


@pytest.fixture
def ops() -> Any:
    from tensorflow.python.data.ops import multi_device_iterator_ops

    return multi_device_iterator_ops


def batches(**options: bool) -> Any:
    import tensorflow as tf

    asked = tf.data.Options()
    for name, value in options.items():
        setattr(asked.autotune, name, value)
    numbers = tf.data.Dataset.range(64).map(lambda n: 2 * n, num_parallel_calls=tf.data.AUTOTUNE)
    return numbers.batch(4).prefetch(tf.data.AUTOTUNE).with_options(asked)


def tuned(dataset: Any) -> Any:
    return dataset.options().autotune.enabled


def test_iterators_made_in_a_cell_are_not_tuned_and_give_the_same_elements(
    ops: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from workbench.strategies.tensorflow.keras.replicated import datasets_kept

    kinds: list[Any] = []
    iterate = ops.iter if hasattr(ops, "iter") else iter
    monkeypatch.setattr(
        ops, "iter", lambda dataset: kinds.append(tuned(dataset)) or iterate(dataset), raising=False
    )
    seen = {}
    for kept in (False, True):
        kinds.clear()
        if kept:
            with datasets_kept():
                iterator = ops.OwnedMultiDeviceIterator(batches(), devices=DEVICES)
        else:
            iterator = ops.OwnedMultiDeviceIterator(batches(), devices=DEVICES)
        assert kinds == [False if kept else None] * len(DEVICES)
        seen[kept] = [int(n) for pair in iterator for part in pair for n in part]
        del iterator
    assert seen[True] == seen[False] == [2 * n for n in range(64)]


def test_what_the_users_data_set_says_about_tuning_holds(ops: Any) -> None:
    from workbench.strategies.tensorflow.keras.replicated import untuned

    assert tuned(untuned(batches())) is False
    assert tuned(untuned(batches(enabled=True))) is True
    assert untuned(None) is None


def test_tensorflows_own_iterators_are_as_before_after_a_cell(ops: Any) -> None:
    from workbench.strategies.tensorflow.keras.replicated import datasets_kept

    before = (ops.OwnedMultiDeviceIterator.__init__, ops._create_device_dataset)
    with datasets_kept():
        assert ops._create_device_dataset is not before[1]
    assert (ops.OwnedMultiDeviceIterator.__init__, ops._create_device_dataset) == before
