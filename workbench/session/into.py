"""A run's final weights, put into a model of the notebook.

The notebook's side imports no framework: the model brings its own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import PlanError
from ..weights import fit_weights


def load_into(model: Any, arrays: Mapping[str, NDArray[Any]], framework: str) -> Any:
    """Copy weights into a PyTorch or Keras model, whichever framework they come from.

    Args:
        arrays: Weights by name, in the order of the run's model.
        framework: The run's framework.

    Raises:
        PlanError: The model has other parameters, or none yet.
    """
    keras, torch = sys.modules.get("keras"), sys.modules.get("torch")
    if keras is not None and isinstance(model, keras.Model):
        return _into_keras(model, arrays, framework)
    if torch is None or not hasattr(model, "load_state_dict"):
        raise PlanError(
            "load_into takes a torch module or a Keras model.",
            seen=type(model).__name__,
            code="WB-PLAN-106",
        )
    state = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    found = fit_weights(arrays, framework, shapes, "torch")
    tensors = {name: torch.from_numpy(np.array(array)) for name, array in found.items()}
    model.load_state_dict({**state, **tensors})
    return model


def _into_keras(model: Any, arrays: Mapping[str, NDArray[Any]], framework: str) -> Any:
    if not model.weights:
        raise PlanError(
            "The Keras model has no weights yet: it does not know the shape of its input.",
            seen=model.name,
            next_step="call it on a batch, or give it a keras.layers.Input, then load again",
            code="WB-PLAN-107",
        )
    variables: dict[str, Any] = {}
    for variable in model.weights:
        name, count = variable.path, 1
        while name in variables:  # as the engines name them
            name, count = f"{variable.path}_{count}", count + 1
        variables[name] = variable
    shapes = {name: tuple(variable.shape) for name, variable in variables.items()}
    for name, array in fit_weights(arrays, framework, shapes, "tensorflow").items():
        variables[name].assign(array)
    return model
