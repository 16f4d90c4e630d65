"""Keras models: their weights by name, and whose variables an optimizer trains."""

from __future__ import annotations

import gc
from typing import Any

import keras
import numpy as np
from numpy.typing import NDArray


def by_name(model: Any) -> dict[str, NDArray[np.generic]]:
    """Return a model's weights as NumPy, by path: `sequential/dense/kernel`.

    Of two weights with one path the second gets a number. bfloat16, which NumPy lacks, is widened.
    """
    arrays: dict[str, NDArray[np.generic]] = {}
    for variable in model.weights:
        name, count = variable.path, 1
        while name in arrays:
            name, count = f"{variable.path}_{count}", count + 1
        array = np.asarray(keras.ops.convert_to_numpy(variable))
        arrays[name] = array.astype(np.float32) if array.dtype.kind == "V" else array
    return arrays


def owner(optimizer: Any) -> Any:
    """Return the model whose variables an optimizer was given; None where there is none.

    The smallest of them, where models hold models.
    """
    trained = {id(variable) for variable in getattr(optimizer, "_trainable_variables", ())}
    if not trained:
        return None
    models = [thing for thing in gc.get_objects() if issubclass(type(thing), keras.Model)]
    holders = [m for m in models if trained <= {id(v) for v in m.trainable_variables}]
    return min(holders, key=lambda model: len(model.weights), default=None)
