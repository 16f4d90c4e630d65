"""Where the steps of TensorFlow's replicas leave what they saw, until Python reads it."""

from __future__ import annotations

import pytest
from needs import need

need("tensorflow")
pytestmark = pytest.mark.tensorflow


@pytest.fixture(autouse=True, scope="module")
def devices():
    """Two logical CPU devices, as engines have."""
    from workbench.engine.tensorflow.support import configure

    configure(2, 2)


def _log(hosts=("CPU:0", "CPU:0")):
    from workbench.strategies.tensorflow.parts.traced_step import StepLog

    return StepLog(hosts)


def _step(log, reductions=1):
    """Return a graph that appends a step in which replica r was ready at r and blocked until 10."""

    import tensorflow as tf

    @tf.function
    def step(began):
        number = tf.cast(began, tf.float64)
        parts = [
            [
                tf.stack([number, tf.constant(32.0, tf.float64)]),
                tf.zeros(2, tf.float64),
                tf.stack(
                    [number + 100.0, tf.ones_like(number), *[number + float(replica)] * reductions]
                ),
            ]
            for replica in range(2)
        ]
        log.append(parts, [number + 10.0] * reductions)

    return step


def _losses(steps):
    return [[one.loss for one in step] for step in steps]


def test_steps_are_read_once_and_in_order():
    import tensorflow as tf

    log = _log()
    step = _step(log)
    for began in (1, 2, 3):
        step(tf.constant(began))
    first = log.take()
    assert _losses(first) == [[101.0] * 2, [102.0] * 2, [103.0] * 2]
    assert [one.samples for one in first[0]] == [32, 32]
    assert [one.exposed_s for one in first[0]] == [10.0, 9.0]
    assert first[0][1].ready_s - first[0][0].ready_s == pytest.approx(1.0, abs=1e-6)
    assert log.take() == []
    step(tf.constant(4))
    assert _losses(log.take()) == [[104.0] * 2]


def test_functions_with_another_number_of_reductions_share_a_log():
    import tensorflow as tf

    log = _log()
    one, three = _step(log), _step(log, reductions=3)
    for began, step in enumerate((three, one, three)):
        step(tf.constant(began))
    assert _losses(log.take()) == [[100.0] * 2, [101.0] * 2, [102.0] * 2]


def test_each_device_keeps_the_rows_of_its_replicas():
    import tensorflow as tf

    log = _log(("CPU:0", "CPU:1"))
    _step(log)(tf.constant(1))
    (step,) = log.take()
    assert [one.exposed_s for one in step] == [10.0, 9.0]


def test_a_log_that_nobody_reads_keeps_the_newest_steps_whole(monkeypatch):
    import tensorflow as tf

    from workbench.strategies.tensorflow.parts import traced_step

    monkeypatch.setattr(traced_step, "MOST", 100)
    log = _log()
    step = _step(log)
    for began in range(50):
        step(tf.constant(began))
    losses = _losses(log.take())
    assert losses[-1] == [149.0] * 2
    assert losses == [[100.0 + began] * 2 for began in range(50 - len(losses), 50)]
    assert 5 < len(losses) < 10  # a step leaves 14 numbers


def test_a_long_run_is_read_step_by_step():
    import tensorflow as tf

    log = _log()
    step = _step(log)
    for began in range(100):  # far more numbers than a list that is read may hold
        step(tf.constant(began))
        assert _losses(log.take()) == [[100.0 + began] * 2]


def test_what_was_computed_meanwhile_is_forgotten():
    import tensorflow as tf

    log = _log()
    step = _step(log)
    step(tf.constant(1))
    log.clear()
    step(tf.constant(2))
    assert _losses(log.take()) == [[102.0] * 2]
