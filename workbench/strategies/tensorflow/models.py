"""Keras models: their weights by name, and whose variables an optimizer trains."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray

from ...engine.tensorflow_models import load_weights, weight_names


def by_name(model: Any) -> dict[str, NDArray[np.generic]]:
    """Return a model's weights as NumPy, by path; bfloat16, which NumPy lacks, is widened."""
    arrays: dict[str, NDArray[np.generic]] = {}
    for name, variable in weight_names(model).items():
        array = np.asarray(keras.ops.convert_to_numpy(variable))
        arrays[name] = array.astype(np.float32) if array.dtype.kind == "V" else array
    return arrays


def owner(optimizer: Any) -> Any:
    """Return the model whose variables an optimizer was given; None where there is none."""
    return holder({id(variable) for variable in getattr(optimizer, "_trainable_variables", ())})


def holder(trained: set[int]) -> Any:
    """Return the model that trains the variables of those ids; None where there is none.

    The smallest of them, where models hold models.
    """
    if not trained:
        return None
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), keras.Model)]
    holders = [m for m in models if trained <= {id(v) for v in m.trainable_variables}]
    return min(holders, key=lambda model: len(model.weights), default=None)


def state_of(model: Any, optimizer: Any) -> dict[str, Any]:
    """Return a model's weights and its optimizer's variables, whatever holds them."""
    slots = [] if optimizer is None else optimizer.variables
    return {
        "model": by_name(model),
        "optimizer": [np.array(keras.ops.convert_to_numpy(slot)) for slot in slots],
        "others": [np.array(keras.ops.convert_to_numpy(one)) for one in others(model)],
    }


def others(model: Any) -> list[Any]:
    """Return what a model has besides weights: seeds of its dropout, metrics of the epoch."""
    weights = {id(variable) for variable in model.weights}
    every = [*model.variables, *getattr(model, "metrics_variables", ())]
    return list({id(one): one for one in every if id(one) not in weights}.values())


def restore(model: Any, optimizer: Any, state: dict[str, Any]) -> None:
    """Go on from what `state_of` gave."""
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
