"""Puts each layer of a model on the device of its stage, without a change to the model's code.

    Layer.__call__(dense_2)  ->  with tf.device("CPU:1"): dense_2(x)
    Optimizer.build          ->  the weights are moved before their slots are made beside them

Both are replaced for the time of a cell. A weight is moved by giving its tf.Variable the handle of
a copy on the other device: whoever holds the variable (the layer, the optimizer) need not know.

Source: `keras/src/layers/layer.py`, `tensorflow/python/distribute/one_device_strategy.py`.
"""

from __future__ import annotations

import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy

from .layers import Chain
from .models import holder
from .patches import Patches
from .stages import Stages

_here = threading.local()  # .depth: calls of layers around this one


class SplitStrategy(tf.distribute.Strategy):  # type: ignore[misc]
    """One replica; variables and their updates stay on the device they are on."""

    def __init__(self, device: str) -> None:
        super().__init__(_SplitExtended(self, device))


class _SplitExtended(one_device_strategy.OneDeviceExtended):  # type: ignore[misc]
    def _update(self, var: Any, fn: Any, args: Any, kwargs: Any, group: bool) -> Any:
        with tf.device(var.device), distribute_lib.UpdateContext(var.device):
            result = fn(var, *args, **kwargs)
        return result if group else tf.nest.map_structure(self._local_results, result)


class Placement:
    """Places the layers of the models that are trained while this is entered.

    Args:
        devices: One per stage.
        cut: Decides the stages of a built model.
        stages: Marks what enters a stage.

    Attributes:
        model: The model that is about to be trained, where that is known.
    """

    def __init__(self, devices: Sequence[str], cut: Callable[[Any], Chain], stages: Stages) -> None:
        self.model: Any = None
        self._devices, self._cut, self._stages = devices, cut, stages
        self._stage_of: Any = weakref.WeakKeyDictionary()
        self._placed: Any = weakref.WeakSet()
        self._patches = Patches()

    def __enter__(self) -> Placement:
        """Patch Keras."""
        self._patches.replace(keras.layers.Layer, "__call__", self._called)
        self._patches.replace(keras.optimizers.Optimizer, "build", self._builds)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches."""
        self._patches.undo()
        self.model = None

    def _called(self, original: Any) -> Any:
        placement = self

        @functools.wraps(original)
        def call(layer: Any, *args: Any, **keywords: Any) -> Any:
            if _symbolic(args):
                return original(layer, *args, **keywords)
            outermost = not getattr(_here, "depth", 0)
            if outermost and isinstance(layer, keras.Model):
                placement.place(layer, args)
                placement._stages.begin_pass()
            stage = placement._stage_of.get(layer)
            _here.depth = getattr(_here, "depth", 0) + 1
            try:
                if stage is None:
                    return original(layer, *args, **keywords)
                with tf.device(placement._devices[stage]):
                    args, keywords = placement._stages.enter(stage, args, keywords)
                    return original(layer, *args, **keywords)
            finally:
                _here.depth -= 1

        return call

    def _builds(self, original: Any) -> Any:
        placement = self

        @functools.wraps(original)
        def build(optimizer: Any, variables: Any) -> Any:
            model = placement.model or holder({id(variable) for variable in variables})
            if model is not None and model.built:
                placement.place(model, ())
            return original(optimizer, variables)

        return build

    def place(self, model: Any, args: tuple[Any, ...]) -> None:
        """Move a model's weights to their devices, once; build it first where need be."""
        if model in self._placed or (self.model is not None and model is not self.model):
            return
        with tf.init_scope():
            if not model.built:
                model.build(tf.nest.map_structure(lambda x: tuple(x.shape), args[0]))
            for layer, stage in self._cut(model).stage_of():
                self._stage_of[layer] = stage
                for variable in layer.variables:
                    move(variable.value, self._devices[stage])
        self._placed.add(model)


def _symbolic(args: Any) -> bool:
    """Whether Keras only looks at shapes: nothing is computed, and weights may not exist yet."""
    scope = importlib.import_module("keras.src.backend.common.stateless_scope")
    return scope.in_stateless_scope() or any(
        isinstance(leaf, keras.KerasTensor) for leaf in tf.nest.flatten(args)
    )


def move(variable: Any, device: str) -> None:
    """Give a tf.Variable memory on another device, with the same values."""
    wanted = tf.DeviceSpec.from_string(device)
    now = tf.DeviceSpec.from_string(variable.device)
    if (now.device_type, now.device_index) == (wanted.device_type, wanted.device_index):
        return
    with tf.device(device):
        copy = _plain(variable.read_value(), variable)
    variable._handle = copy._handle


def _plain(value: Any, like: Any) -> Any:
    """Return a variable of TensorFlow's own, made past the strategy's creators."""
    resource = importlib.import_module("tensorflow.python.ops.resource_variable_ops")
    return resource.ResourceVariable(
        value, trainable=like.trainable, dtype=like.dtype, shape=like.shape
    )
