"""Keras models, optimizers and schedulers as arguments of `wb.fit`; weights by name."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...errors import FitError


def build_module(model: Any) -> Any:
    """Return the Keras model that `wb.fit` was given, calling a function that makes one.

    Raises:
        FitError: It is neither, or of another framework.
    """
    built = model
    if not isinstance(model, (keras.Model, type)) and callable(model) and not foreign(model):
        built = model()
    if isinstance(built, keras.Model) and not isinstance(model, type):
        return built
    if isinstance(model, type):
        seen, step = f"class {model.__name__}", f"make an object: model = {model.__name__}(...)"
    elif built is not model:
        seen, step = (
            f"a function that returned {type(built).__name__}",
            "end the function with `return model`",
        )
    else:
        seen, step = type(built).__name__, "build a model, for example with keras.Sequential"
    raise FitError(
        "The model is not a Keras 3 model.",
        seen=foreign(built) or seen,
        allowed="a keras.Model, or a function without arguments that returns a model",
        next_step=_REBUILD.get(foreign(built), step),
        code="WB-FIT-042",
    )


_OLD, _TORCH = "a model of tf_keras (Keras 2)", "a torch module"
_REBUILD = {
    _OLD: "build the model with keras instead of tf_keras",
    _TORCH: "build a Keras model, or use --framework torch",
}


def foreign(model: Any) -> str:
    """Return the name of a model of tf_keras or of PyTorch; empty for all others."""
    kinds = {re.split(r"[.]", cls.__module__)[0] for cls in type(model).__mro__}
    if "tf_keras" in kinds:
        return _OLD
    return _TORCH if "torch" in kinds else ""


def sketch_module(model: Any) -> tuple[Any, None]:
    """Return the model; TensorFlow has no form of one without memory."""
    return build_module(model), None


def check_optimizer(optimizer: Any, model: Any) -> None:
    """Raise FitError unless `optimizer` is one of Keras', or a function that makes one."""
    if isinstance(optimizer, type) or not (
        isinstance(optimizer, keras.optimizers.Optimizer) or callable(optimizer)
    ):
        raise FitError(
            "`optimizer` must be a Keras optimizer or a function.",
            seen=optimizer,
            allowed="an optimizer of keras.optimizers, or a function (variables) -> optimizer",
            next_step="pass optimizer=keras.optimizers.SGD(0.1)",
            code="WB-FIT-043",
        )


def check_scheduler(scheduler: Any, optimizer: Any) -> None:
    """Raise FitError unless `scheduler` gives a learning rate for a step."""
    if scheduler is None:
        return
    try:
        float(scheduler(0))
    except Exception as error:
        raise FitError(
            "`scheduler` must be a function that receives the number of the step and returns the "
            "learning rate.",
            seen=f"scheduler(0) raised {type(error).__name__}: {error}",
            allowed="a function (step) -> learning rate, or a schedule of keras.optimizers",
            next_step="pass scheduler=keras.optimizers.schedules.ExponentialDecay(0.1, 100, 0.9)",
            code="WB-FIT-044",
        ) from error


def weight_names(model: Any) -> dict[str, Any]:
    """Return a model's weights by path, `sequential/dense/kernel`; equal paths get a number."""
    found: dict[str, Any] = {}
    for variable in model.weights:
        name, count = variable.path, 1
        while name in found:
            name, count = f"{variable.path}_{count}", count + 1
        found[name] = variable
    return found


def weight_shapes(model: Any) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight, in the model's order; empty before it is built."""
    return {name: tuple(variable.shape) for name, variable in weight_names(model).items()}


def load_weights(model: Any, arrays: dict[str, Any]) -> None:
    """Give a model weights by name, also while a step is traced; others are not changed."""
    variables, tracing = weight_names(model), not tf.executing_eagerly()
    with tf.init_scope():
        for name, array in arrays.items():
            # In a replica's context a variable with copies would have to ask the other replicas.
            for copy in _copies(variables[name].value) if tracing else [variables[name]]:
                copy.assign(array)


def _copies(value: Any) -> list[Any]:
    """Return the variables of TensorFlow's own that a distributed one is made of."""
    if isinstance(value, tf.distribute.DistributedValues):
        return list(value.values)
    return [getattr(value, "_v", value)]  # parameters on one device


def parameter_count(model: Any) -> int:
    """Return how many numbers the model trains."""
    return sum(int(np.prod(variable.shape)) for variable in model.trainable_variables)
