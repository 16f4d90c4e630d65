"""Keras models: their weights by name, and the model that an optimizer trains.

A Keras model can be copied from the servers: afterwards its variables are this engine's own. A
variable on a server is lost with the server. So its value is fetched while the cluster exists, and
put into a new variable after TensorFlow has been reset.
"""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ....engine.tensorflow.models import load_weights, weight_names


def by_name(model: Any) -> dict[str, NDArray[np.generic]]:
    """Return a model's weights as NumPy, by path; bfloat16, which NumPy lacks, is widened."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, variable in weight_names(model).items():
        array = np.asarray(keras.ops.convert_to_numpy(variable))
        arrays[name] = array.astype(np.float32) if array.dtype.kind == "V" else array
    return arrays


def under(strategy: Any) -> str:
    """Return the strategy under which something was made, in words; it is not the run's."""
    kind = type(strategy).__name__
    return "without a strategy" if not strategy or "Default" in kind else f"under another {kind}"


def owner(optimizer: Any) -> Any:
    """Return the model with the optimizer's variables; None if there is none."""
    return holder({id(variable) for variable in getattr(optimizer, "_trainable_variables", ())})


def holder(trained: set[int]) -> Any:
    """Return the model that trains the variables with these ids; None if there is none.

    If models contain models, it is the smallest one.
    """
    if not trained:
        return None
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), keras.Model)]
    holders = [m for m in models if trained <= {id(v) for v in m.trainable_variables}]
    return min(holders, key=lambda model: len(model.weights), default=None)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return a model's weights and its optimizer's variables, wherever they are stored."""
    slots = [] if optimizer is None else optimizer.variables
    return {
        "model": by_name(model),
        "optimizer": [np.array(keras.ops.convert_to_numpy(slot)) for slot in slots],
        "others": [np.array(keras.ops.convert_to_numpy(one)) for one in others(model)],
    }


def others(model: Any) -> list[Any]:
    """Return a model's other variables: seeds of its dropout, metrics of the epoch."""
    weights = {id(variable) for variable in model.weights}
    every = [*model.variables, *getattr(model, "metrics_variables", ())]
    return list({id(one): one for one in every if id(one) not in weights}.values())


def restore(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Continue from what `state_of` returned."""
    load_weights(model, state["model"])
    if optimizer is not None and not optimizer.built:
        optimizer.build(model.trainable_variables)
    rest = others(model)
    if len(rest) == len(state.get("others", ())):  # another way of training has other metrics
        for variable, array in zip(rest, state["others"], strict=True):
            variable.assign(array)
    for slot, array in zip(
        [] if optimizer is None else optimizer.variables, state["optimizer"], strict=True
    ):
        slot.assign(array)


class Homecoming:
    """The variables of a model, its optimizer and its metrics, on their way from the servers."""

    def __init__(self) -> None:
        self._model: Any = None
        self._optimizer: Any = None
        self._values: list[tuple[Any, NDArray[np.generic]]] = []
        self._weights: dict[str, NDArray[np.generic]] = {}

    def pack(self, model: Any, optimizer: Any) -> None:
        """Fetch the values; if the model is None there are none."""
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
        """Restore the variables' values, on this engine."""
        for variable, value in self._values:
            variable._value = tf.Variable(value, trainable=variable.trainable, dtype=variable.dtype)
        if self._model is not None:
            self._model._distribute_strategy = tf.distribute.get_strategy()
            self._model.train_function = self._model.test_function = None
            self._model.predict_function = None
        for optimizer in {self._optimizer, getattr(self._model, "optimizer", None)} - {None}:
            optimizer._distribution_strategy = tf.distribute.get_strategy()
            optimizer._trainable_variables_indices = {  # it identifies variables by their values
                optimizer._var_key(variable): index
                for index, variable in enumerate(optimizer._trainable_variables)
            }
        self._values.clear()


def _held_here(variable: Any) -> NDArray[np.generic]:
    """Return the value; for a variable with copies, this engine's copy, without communication."""
    value = variable._value
    if isinstance(value, tf.distribute.DistributedValues):
        value = value.values[0]
    return np.asarray(value)


def _remote(variable: Any) -> bool:
    return isinstance(variable, keras.Variable) and variable._value is not None
