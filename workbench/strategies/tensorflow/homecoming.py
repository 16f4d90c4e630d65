"""Takes a Keras model off the servers: afterwards its variables are this engine's own.

A variable on a server is gone with the server. So its value is fetched while the cluster is there,
and put into a new variable when TensorFlow has been made anew.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from .models import by_name


class Homecoming:
    """The variables of one model, and of its optimizer and metrics, on their way."""

    def __init__(self) -> None:
        self._model: Any = None
        self._optimizer: Any = None
        self._values: list[tuple[Any, NDArray[np.generic]]] = []
        self._weights: dict[str, NDArray[np.generic]] = {}

    def pack(self, model: Any, optimizer: Any) -> None:
        """Fetch the values; a model of None has none."""
        if model is None:
            return
        self._weights = by_name(model)
        variables = {id(v): v for v in model.variables}
        for holder in (optimizer, getattr(model, "optimizer", None), *model.metrics):
            variables |= {id(v): v for v in getattr(holder, "variables", ())}
        self._values = [(v, _held_here(v)) for v in variables.values() if _remote(v)]
        self._model, self._optimizer = model, optimizer

    @property
    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the model's weights by name."""
        return self._weights

    def unpack(self) -> None:
        """Give the variables their values back, on this engine."""
        for variable, value in self._values:
            variable._value = tf.Variable(value, trainable=variable.trainable, dtype=variable.dtype)
        if self._model is not None:
            self._model._distribute_strategy = tf.distribute.get_strategy()
            self._model.train_function = self._model.test_function = None
            self._model.predict_function = None
        for optimizer in {self._optimizer, getattr(self._model, "optimizer", None)} - {None}:
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            optimizer._trainable_variables_indices = {  # it knows variables by their values
                optimizer._var_key(variable): index
                for index, variable in enumerate(optimizer._trainable_variables)
            }
        self._values.clear()


def _held_here(variable: Any) -> NDArray[np.generic]:
    """Return the value; of a variable with copies this engine's, which asks nobody."""
    value = variable._value
    if isinstance(value, tf.distribute.DistributedValues):
        value = value.values[0]
    return np.asarray(value)


def _remote(variable: Any) -> bool:
    return isinstance(variable, keras.Variable) and variable._value is not None
