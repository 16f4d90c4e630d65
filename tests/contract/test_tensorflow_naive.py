"""TensorFlow's strategies compute what the naive functions at the top of their files compute."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from needs import need
from tf_harness import Report, clean, run

from workbench.shared import record

need("tensorflow")
pytestmark = pytest.mark.tensorflow

STEPS, BATCH = 8, 24
TOLERANCE = 1e-10

NETWORK = """
import keras, numpy as np

def network(*kinds):
    widths = {"hidden": (8, 16, "tanh"), "out": (16, 4, None)}
    rng = np.random.default_rng(1)
    model = keras.Sequential()
    for kind, (inside, outside, activation) in widths.items():
        kernel = rng.normal(size=(inside, outside)) / 4
        if kind in kinds:
            layer = keras.layers.Dense(outside, activation)
            layer.build((None, inside))
            layer.kernel.assign(kernel)
            model.add(layer)
    return model

def make_optimizer(*variables):
    return keras.optimizers.SGD(0.2, momentum=0.9)

loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
"""
"""What makes the network, or some layers of it, always the same."""

FIT = (
    NETWORK
    + """
model = network("hidden", "out")
wb.fit(model, (x, y), loss=loss_fn, optimizer=make_optimizer, batch_size=BATCH, steps=STEPS,
       shuffle=False)
after = [variable.numpy() for variable in model.trainable_variables]
"""
)


@pytest.fixture(autouse=True)
def in_double() -> Iterator[None]:
    import keras

    before = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(before[0])
    keras.config.set_dtype_policy(before[1])


@functools.cache
def data() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(BATCH * STEPS, 8)), rng.integers(0, 4, BATCH * STEPS)


def batches() -> list[tuple[Any, Any]]:
    x, y = data()
    return list(zip(np.split(x, STEPS), np.split(y, STEPS), strict=True))


def fast(strategy: str, workers: int) -> Report:
    x, y = data()
    names = {"x": x, "y": y, "BATCH": BATCH, "STEPS": STEPS}
    return clean(run(strategy, FIT, workers, names=names))


def parts() -> Any:
    """Return what makes the network, outside of any run."""
    names: dict[str, Any] = {}
    exec(NETWORK, names)
    return names["network"], names["make_optimizer"](), names["loss_fn"]


def assert_same(report: Report, losses: list[float], variables: Any) -> None:
    after = report.names["after"]
    for mine, theirs in zip(variables, after, strict=True):
        assert abs(mine.numpy() - theirs).max() <= TOLERANCE
    assert abs(np.array(losses) - record.derive(report.rows).loss).max() <= TOLERANCE


def test_one_device() -> None:
    from workbench.strategies.tensorflow.one_device import naive_step

    report = fast("one_device", 1)
    network, optimizer, loss_fn = parts()
    model = network("hidden", "out")
    losses = [naive_step(model, loss_fn, optimizer, x, y) for x, y in batches()]
    assert_same(report, losses, model.trainable_variables)


def test_mirrored() -> None:
    import tensorflow as tf

    from workbench.strategies.tensorflow.mirrored import naive_step

    report, devices = fast("mirrored", 2), ["CPU:0", "CPU:1"]
    replicas = []
    for device in devices:
        with tf.device(device):
            network, optimizer, loss_fn = parts()
            replicas.append((network("hidden", "out"), optimizer))
    losses = [naive_step(replicas, devices, loss_fn, x, y) for x, y in batches()]
    for model, _ in replicas:
        assert_same(report, losses, model.trainable_variables)


def test_central_storage() -> None:
    from workbench.strategies.tensorflow.central_storage import naive_step

    report, devices = fast("central_storage", 2), ["CPU:0", "CPU:1"]
    network, optimizer, loss_fn = parts()
    model = network("hidden", "out")
    losses = [naive_step(model, devices, loss_fn, optimizer, x, y) for x, y in batches()]
    assert_same(report, losses, model.trainable_variables)


def test_model_split() -> None:
    import tensorflow as tf

    from workbench.strategies.tensorflow.model_split import naive_step

    report, devices = fast("model_split", 2), ["CPU:0", "CPU:1"]
    network, optimizer, loss_fn = parts()
    stages = []
    for device, layer in zip(devices, ("hidden", "out"), strict=True):
        with tf.device(device):
            stages.append(network(layer))
    losses = [naive_step(stages, devices, loss_fn, optimizer, x, y) for x, y in batches()]
    assert_same(report, losses, [v for stage in stages for v in stage.trainable_variables])
    where = [stage.trainable_variables[0].value.device[-5:] for stage in stages]
    assert where == devices
