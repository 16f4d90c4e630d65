"""What a closure of Keras' `fit` or `evaluate` computes, and how it is added up.

    closure:      loss, changes of the metrics' state         one vector, fetched at once
    coordinator:  sum of the vectors --> state --> the logs that Keras shows

Metrics are not kept on the servers, where workers would overwrite each other's. How one batch
changes their state from the initial one can be added up for every metric that counts or averages.

Source: `keras/src/backend/tensorflow/trainer.py`.
"""

from __future__ import annotations

import importlib
import operator
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from ...errors import RunStopped


class Sums:
    """What closures returned, added up: loss, samples, changes of the metrics' state."""

    def __init__(self) -> None:
        self.loss, self.samples = 0.0, 0
        self.changes: Any = 0.0
        self._lock = threading.Lock()

    def add(self, values: Any, samples: int) -> float:
        """Add what one closure returned; return its loss."""
        vector = np.asarray(values, np.float64)
        with self._lock:
            self.loss += float(vector[0]) * samples
            self.samples += samples
            self.changes = self.changes + vector[1:]
        return float(vector[0])


def logs_of(model: Any, sums: Sums) -> dict[str, float]:
    """Return loss and metrics as Keras names them, from what closures added up."""
    if sums.samples == 0:
        raise RunStopped
    model.reset_metrics()
    tracker, metrics = model._loss_tracker, model._compile_metrics
    tracker.total.assign(sums.loss)
    tracker.count.assign(sums.samples)
    at = 0
    for variable in metrics.variables if metrics is not None else ():
        size = int(np.prod(variable.shape))
        change = np.reshape(sums.changes[at : at + size], variable.shape)
        variable.assign((np.asarray(variable) + change).astype(variable.dtype))
        at += size
    return {name: float(value) for name, value in model.get_metrics_result().items()}


class Graphs:
    """The functions of closures; a later call with the same compiled model is not traced again.

    Args:
        strategy: The tf.distribute strategy of the run.
    """

    def __init__(self, strategy: Any) -> None:
        tools = importlib.import_module("keras.src.trainers.data_adapters.data_adapter_utils")
        self._strategy, self._unpack = strategy, tools.unpack_x_y_sample_weight
        self._functions: Any = weakref.WeakKeyDictionary()  # by model

    def function(self, model: Any, feed: Any, *, training: bool) -> Any:
        """Return the function of a closure: that of an earlier call where nothing has changed."""
        traced = (
            model.optimizer, model._compile_loss, model._compile_metrics, model._loss_tracker,
            *model.trainable_variables,
        )  # fmt: skip
        functions = self._functions.setdefault(model, {})
        before, function = functions.get((training, feed.kind), ((), None))
        same = len(before) == len(traced) and all(map(operator.is_, before, traced))
        if function is None or not same:
            function = feed.function(self._body(model, training=training))
            functions[training, feed.kind] = traced, function
        return function

    def _body(self, model: Any, *, training: bool) -> Callable[[Any], Any]:
        strategy, unpack = self._strategy, self._unpack

        def replica(batch: Any) -> Any:
            x, y, weight = unpack(batch)
            keywords = {"training": training} if model._call_has_training_arg else {}
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                if training:
                    tape.watch([v.value for v in model.trainable_variables])
                output = model(x, **keywords)
                loss = model._compute_loss(
                    x=x, y=y, y_pred=output, sample_weight=weight, training=training
                )
                scaled = model.optimizer.scale_loss(loss) if training else loss
            if training:
                variables = model.trainable_variables
                gradients = tape.gradient(scaled, [v.value for v in variables])
                model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return _vector(loss, _changes(model, y, output, weight))

        return lambda batch: strategy.run(replica, args=(batch,))


def _changes(model: Any, y: Any, output: Any, weight: Any) -> list[Any]:
    """Return how one batch changes the state of the model's metrics, from the initial one."""
    metrics = model._compile_metrics
    if metrics is None:
        return []
    initial = metrics.stateless_reset_state()
    state = metrics.stateless_update_state(initial, y, output, sample_weight=weight)
    pairs = zip(state, initial, strict=True)
    return [tf.cast(after, tf.float64) - tf.cast(before, tf.float64) for after, before in pairs]


def _vector(loss: Any, changes: list[Any]) -> Any:
    """Return everything in one tensor: one thing to fetch. (1 + sizes of the changes,)"""
    return tf.concat([tf.reshape(tf.cast(one, tf.float64), [-1]) for one in (loss, *changes)], 0)
