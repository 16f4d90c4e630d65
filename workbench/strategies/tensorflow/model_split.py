"""Model parallelism without a pipeline: the layers of one model are on several devices.

Each device holds only the parameters and the optimizer state of its own layers, so the model can be
larger than the memory of one device. The batch is not divided into microbatches, so the stages work
one after the other: while one stage computes, all other stages have nothing to do. So this strategy
saves memory, but never time.

    device 0:  x -> stage 0 --activations-->                    <--gradients-- stage 0  -> update
    device 1:       . . . . stage 1 --activations--> <--gradients-- stage 1   . . . . . -> update
    device 2:       . . . . . . . . . stage 2 -> loss -> stage 2 . . . . . .  . . . . . -> update

If all p stages take the same time, each stage is busy for 1/p of the step's time. The rest of the
time is its bubble. PyTorch's `model_split` makes the bubble smaller with microbatches.

Each layer does the same computations in the same order as on one device. So the result is the same
as on one device, except for possible rounding errors.

The option `split_at` names the layers that begin a stage. Without this option, Workbench chooses
the layers so that all stages have about the same number of parameters. In the source, the class
`Placement` moves the layers to their devices, and `parts/stages.py` measures when each stage is
busy.

Sources: Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 3 (model
parallelism); tf.device, https://www.tensorflow.org/guide/gpu#manual_device_placement.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.distribute import distribute_lib, one_device_strategy

from ...catalog import schedules
from ...engine.contract import NAN, Share
from ...engine.telemetry.recorder import StepResult
from ...errors import FitError
from ...shared import events
from .keras.replicated import Replicated
from .parts.models import holder
from .parts.stages import StageMarks, Stages
from .parts.steps import Patches

if TYPE_CHECKING:
    from .parts.stages import Stages


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
        FitError: The model cannot be cut, or not at these layers.
    """
    if not isinstance(model, (keras.Sequential, keras.src.models.Functional)):
        raise FitError(
            "The model cannot be split, because Workbench does not know the order of its layers.",
            seen=type(model).__name__,
            allowed="keras.Sequential, or a functional keras.Model(inputs, outputs)",
            next_step="write the model in one of these forms, or use the strategy `mirrored`",
            code="WB-FIT-075",
        )
    layers = [one for one in model.layers if not isinstance(one, keras.layers.InputLayer)]
    if stages > len(layers):
        raise FitError(
            "The model cannot be split into more stages than it has layers.",
            seen=f"{stages} stages for {len(layers)} layer{'s' * (len(layers) != 1)}",
            allowed=f"at most {len(layers)} stage{'s' * (len(layers) != 1)}",
            next_step=f"use -n {len(layers)}",
            code="WB-FIT-076",
        )
    if split_at:
        return Chain(layers, given_bounds(layers, stages, split_at))
    return Chain(layers, balance([count(layer) for layer in layers], stages))


def given_bounds(layers: Sequence[Any], stages: int, split_at: str) -> list[int]:
    """Return the bounds that `split_at` names.

    Raises:
        FitError: A layer does not exist, or the number of layers does not fit.
    """
    names = [layer.name for layer in layers]
    starts = []
    for word in (part.strip() for part in split_at.split(",")):
        number = int(word) if word.isdigit() else names.index(word) if word in names else -1
        if not 0 < number < len(layers):
            raise FitError(
                "`split_at` must name layers at which a stage can begin.",
                seen=f"split_at={word}",
                allowed="the number or the name of a layer: "
                + ", ".join(f"{i} or {name}" for i, name in enumerate(names) if i),
                next_step="name layers of the model, but not the first layer",
                code="WB-FIT-077",
            )
        starts.append(number)
    if starts != sorted(set(starts)):
        raise FitError(
            "`split_at` must name layers in the model's order, and each layer only once.",
            seen=f"split_at={split_at}",
            next_step=f"use -o split_at={','.join(map(str, sorted(set(starts))))}",
            code="WB-FIT-078",
        )
    if len(starts) + 1 != stages:
        raise FitError(
            "`split_at` must divide the model into as many stages as there are devices.",
            seen=f"split_at={split_at}, which makes {len(starts) + 1} stages for {stages} devices",
            allowed=f"exactly {stages - 1} layer" + "s" * (stages != 2) + " in split_at",
            next_step=f"use -n {len(starts) + 1}, or change split_at",
            code="WB-FIT-079",
        )
    return [0, *starts, len(layers)]


def balance(costs: Sequence[int], stages: int) -> list[int]:
    """Return the bounds of `stages` non-empty groups of layers; the largest sum is minimal.

    If several solutions are equal, the one with the smallest sum of squares is taken, so that
    layers without parameters do not decide.
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
    """Places the layers of the models that are trained inside this context.

    Args:
        devices: One per stage.
        cut: Decides the stages of a built model.
        stages: Marks the inputs of each stage.

    Attributes:
        model: The model that will be trained next, if that is known.
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
        """Move a model's weights to their devices, once; build the model first if necessary."""
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
    """Return a variable of TensorFlow's own, without the strategy's variable creators."""
    resource = importlib.import_module("tensorflow.python.ops.resource_variable_ops")
    return resource.ResourceVariable(
        value, trainable=like.trainable, dtype=like.dtype, shape=like.shape
    )


def naive_step(
    stages: Sequence[Any], devices: Sequence[str], loss_fn: Any, optimizer: Any, x: Any, y: Any
) -> float:
    """Take one step on the whole batch, which goes from device to device. Return its mean loss.

    Args:
        stages: A model for each device, with its variables on this device. The first gets x (B,
            ...), and each next one gets the output of the stage before.
    """
    with tf.GradientTape() as tape:
        for stage, device in zip(stages, devices, strict=True):
            with tf.device(device):
                x = stage(x, training=True)  # (B, width of the next stage)
        with tf.device(devices[-1]):
            loss = loss_fn(y, x)
    variables = [variable for stage in stages for variable in stage.trainable_variables]
    gradients = tape.gradient(loss, variables)  # back through the devices, the last one first
    optimizer.apply_gradients(zip(gradients, variables, strict=True))
    return float(loss)


class ModelSplit(Replicated):
    """One model on several devices; the stages are the ranks."""

    placement: Placement | None = None

    @property
    def shard(self) -> tuple[int, int]:
        """Send the whole batch through all stages."""
        return 0, 1

    def build(self) -> tf.distribute.Strategy:
        """Return a strategy with one replica, whose loss is computed where the last layer is."""
        return SplitStrategy(self.devices[-1])

    @contextlib.contextmanager
    def around_cell(self) -> Iterator[dict[str, Any]]:
        """Do what all strategies do, and place the layers of the model that is trained."""
        self.stages = Stages(self.devices, self.context.faults.replicas)
        self.placement = Placement(self.devices, self._cut, self.stages)
        with super().around_cell() as names, self.placement:
            columns = {
                "sent_bytes": (
                    "TensorFlow does not count the bytes that are sent between the devices"
                )
            }
            self.context.emit(events.Unmeasured(columns=columns))
            yield names

    def marks(self) -> StageMarks:
        """Return the object that measures each stage."""
        return StageMarks(self.distribution, self.stages)

    def _cut(self, model: Any) -> Chain:
        """Decide where to cut, and report it in a note."""
        if self._model is None:
            self._model = model
        chain = cut(model, len(self.devices), self.options["split_at"] or "")
        rows, ideal = chain.table(), schedules.ideal_bubble("naive", len(self.devices), 1, 1)
        self.context.emit(
            events.WasCut(rank=0, stages=rows, schedule="naive", microbatches=1, ideal_bubble=ideal)
        )
        self.context.emit(
            events.Noted(
                rank=0,
                text=f"The model has {len(rows)} stages, which compute one after the other. If "
                f"all stages take equally long, each stage is idle {ideal:.0%} of the time. A "
                f"split saves memory, not time.\n{table_text(rows)}",
            )
        )
        return chain

    def _trains(self, model: Any) -> None:
        super()._trains(model)
        if self.placement is not None:
            self.placement.model = model
        if getattr(model, "jit_compile", False):
            raise FitError(
                "`jit_compile` must be off, because XLA compiles a model for only one device.",
                seen="jit_compile=True",
                next_step="use model.compile(..., jit_compile=False)",
                code="WB-FIT-093",
            )

    def step(self, share: Share) -> StepResult:
        """Send the batch through all stages; the last one has the loss."""
        result = super().step(share)
        return replace(result, loss=result.replicas[-1].loss)

    def results(
        self,
        measured: Sequence[StepResult],
        samples: list[int],
        losses: list[float],
        spent_s: float,
    ) -> tuple[StepResult, ...]:
        """Return a result per stage: all count the whole batch's samples; the last has its loss."""
        stages = len(self.devices)
        measured = measured or [StepResult(0, NAN, NAN)] * stages
        every = zip(measured, [NAN] * (stages - 1) + losses, strict=True)
        return tuple(
            replace(one, samples=samples[0], loss=loss, has_loss=stage == stages - 1)
            for stage, (one, loss) in enumerate(every)
        )

    def close(self) -> None:
        """Release the user's model; its layers stay where they are."""
        super().close()
        self.placement = None
