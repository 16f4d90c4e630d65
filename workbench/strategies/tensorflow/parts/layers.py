"""The chain of layers of a Keras model, and where it is cut into stages.

Each layer is put on the device of its stage, without a change to the model's code:

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
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy

from ....errors import FitError
from .models import holder
from .patches import Patches

if TYPE_CHECKING:
    from .stages import Stages


@dataclass(frozen=True)
class Chain:
    """The layers of a model in the order in which they are called, and the stages.

    Attributes:
        layers: A model inside the model counts as one layer.
        bounds: First layer of each stage, then the number of layers: (stages + 1,).
    """

    layers: list[Any]
    bounds: list[int]

    def table(self) -> list[dict[str, Any]]:
        """Return one row per stage."""
        rows = []
        for stage, (first, end) in enumerate(pairwise(self.bounds)):
            names = [layer.name for layer in self.layers[first:end]]
            rows.append(
                {
                    "stage": stage,
                    "rank": stage,
                    "layers": names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}",
                    "parameters": sum(map(count, self.layers[first:end])),
                    "microbatch_s": None,
                    "handed_bytes": None,
                }
            )
        return rows

    def stage_of(self) -> list[tuple[Any, int]]:
        """Return every layer with its stage."""
        spans = enumerate(pairwise(self.bounds))
        return [(layer, stage) for stage, (a, b) in spans for layer in self.layers[a:b]]


def table_text(rows: Sequence[dict[str, Any]]) -> str:
    """Return the stages as lines of text."""
    return "\n".join(
        f"  stage {row['stage']}: {row['layers']} ({row['parameters']:,} parameters)"
        for row in rows
    )


def count(layer: Any) -> int:
    """Return how many numbers a layer holds."""
    return sum(int(np.prod(variable.shape)) for variable in layer.variables)


def cut(model: Any, stages: int, split_at: str = "") -> Chain:
    """Decide the stages of a built model.

    Args:
        split_at: Layers that begin a stage, by name or number; empty: parameters are balanced.

    Raises:
        FitError: The model cannot be cut, or not so.
    """
    if not isinstance(model, (keras.Sequential, keras.src.models.Functional)):
        raise FitError(
            "Only models whose layers are known can be split.",
            seen=type(model).__name__,
            allowed="keras.Sequential, or a functional keras.Model(inputs, outputs)",
            next_step="write the model so, or train it under mirrored",
            code="WB-FIT-075",
        )
    layers = [one for one in model.layers if not isinstance(one, keras.layers.InputLayer)]
    if stages > len(layers):
        raise FitError(
            "There are more stages than layers.",
            seen=f"{stages} stages, {len(layers)} layers",
            allowed=f"at most {len(layers)} stages",
            next_step=f"use -n {len(layers)}",
            code="WB-FIT-076",
        )
    if split_at:
        return Chain(layers, given_bounds(layers, stages, split_at))
    return Chain(layers, balance([count(layer) for layer in layers], stages))


def given_bounds(layers: Sequence[Any], stages: int, split_at: str) -> list[int]:
    """Return the bounds that `split_at` names.

    Raises:
        FitError: A layer does not exist, or their number does not fit.
    """
    names = [layer.name for layer in layers]
    starts = []
    for word in (part.strip() for part in split_at.split(",")):
        number = int(word) if word.isdigit() else names.index(word) if word in names else -1
        if not 0 < number < len(layers):
            raise FitError(
                "A stage cannot begin there.",
                seen=f"split_at={word}",
                allowed=", ".join(f"{i} or {name}" for i, name in enumerate(names) if i),
                next_step="name layers of the model, but the first",
                code="WB-FIT-077",
            )
        starts.append(number)
    if starts != sorted(set(starts)):
        raise FitError(
            "The layers that begin a stage must be in the model's order, each once.",
            seen=f"split_at={split_at}",
            next_step=f"-o split_at={','.join(map(str, sorted(set(starts))))}",
            code="WB-FIT-078",
        )
    if len(starts) + 1 != stages:
        raise FitError(
            "split_at does not make one stage per device.",
            seen=f"{len(starts) + 1} stages for {stages} devices",
            allowed=f"{stages - 1} layers in split_at",
            next_step=f"use -n {len(starts) + 1}",
            code="WB-FIT-079",
        )
    return [0, *starts, len(layers)]


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """Return bounds of `stages` runs of layers, none empty, whose largest sum is the least.

    Of equal ones the one with the smallest squares is taken, so that layers without parameters do
    not decide.
    """
    total = [0, *accumulate(costs)]
    # best[end]: (largest sum, sum of squares, bounds) of the layers before `end`
    best = {end: (total[end], total[end] ** 2, [0, end]) for end in range(1, len(costs) + 1)}
    for stage in range(1, stages):
        best = {
            end: min(
                (max(top, total[end] - total[at]), squares + (total[end] - total[at]) ** 2,
                 [*bounds, end])
                for at, (top, squares, bounds) in best.items()
                if at < end
            )
            for end in range(stage + 1, len(costs) + 1)
        }  # fmt: skip
    return best[len(costs)][2]


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
