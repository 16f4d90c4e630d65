"""The batches of a call of `model.fit`, with the line's overrides applied.

All arguments are checked before anything is trained.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from ....engine.tensorflow.models import foreign
from ....errors import FitError, nearest
from ....shared import events
from ..parts.models import under

if TYPE_CHECKING:
    from ....engine.context import RunContext

DEFAULT_BATCH = 32
"""Keras' default."""


class Batches:
    """The batches of a call of `fit`, with the overrides of the magic's line.

    Attributes:
        size: Global batch; None if it is not known.
        samples: Samples in an epoch; None if not known.
        total_steps: The line ends training after this number of steps; None: after the last epoch.
    """

    def __init__(self, call: Mapping[str, Any], context: RunContext, replicas: int) -> None:
        self._call: Any = call
        self._context, self._replicas = context, replicas
        self.total_steps: int | None = None
        self.samples: int | None = None
        self.size: int | None = None

    def override(self) -> None:
        """Apply the line's overrides and check that the batch can be divided.

        Raises:
            FitError: It cannot be divided, or the data is already divided into batches.
        """
        given, call = self._context.spec.overrides, self._call
        self._context.options_read = True
        arrays = not isinstance(call["x"], (tf.data.Dataset, keras.utils.PyDataset)) and hasattr(
            _first(call["x"]), "__len__"
        )
        if "batch_size" in given:
            if not arrays:
                raise FitError(
                    "--batch-size cannot be used with this data set, because the data set is "
                    "already divided into batches.",
                    seen=type(call["x"]).__name__,
                    next_step="remove --batch-size, and set the batch size where the cell makes "
                    "the data set",
                    code="WB-FIT-072",
                )
            call["batch_size"] = given["batch_size"]
        if arrays:
            self.size = call["batch_size"] or DEFAULT_BATCH
            self.samples = len(_first(call["x"]))
            if call["validation_split"]:
                self.samples = math.floor(self.samples * (1 - call["validation_split"]))
        elif isinstance(call["x"], tf.data.Dataset):
            check_batched(call["x"])
            self.size = _static_batch(call["x"])
            check_size(call["batch_size"], self.size)
        elif inspect.isgenerator(call["x"]) and not call["steps_per_epoch"]:
            self._note_lost()
        self._check_divides()
        self._limit(given)
        self._note_rest()

    def _limit(self, given: Mapping[str, Any]) -> None:
        call = self._call
        if "epochs" in given:
            call["epochs"] = call["initial_epoch"] + given["epochs"]
        if "steps" in given:
            self.total_steps = given["steps"]
            per_epoch = self.steps_per_epoch
            epochs = -(-given["steps"] // per_epoch) if per_epoch else given["steps"]
            call["epochs"] = call["initial_epoch"] + epochs

    def _check_divides(self) -> None:
        size, replicas = self.size, self._replicas
        if size is None or size % replicas == 0:
            return
        below, above = size - size % replicas, size + replicas - size % replicas
        raise FitError(
            "The batch size must be a multiple of the number of replicas. Otherwise the replicas "
            "get shares of different sizes, which changes the training.",
            seen=f"a batch of {size} samples for {replicas} replicas",
            allowed=f"a batch size that is a multiple of {replicas}",
            next_step="use " + " or ".join(self._words(near) for near in (above, below) if near),
            code="WB-FIT-073",
        )

    def _words(self, size: int) -> str:
        if isinstance(self._call["x"], tf.data.Dataset):
            return f"data.batch({size})"
        in_line = "batch_size" in self._context.spec.overrides
        return f"--batch-size {size}" if in_line else f"batch_size={size}"

    def _note_rest(self) -> None:
        if self.size is None or self.samples is None or self._call["steps_per_epoch"]:
            return
        if self.total_steps is not None and self.total_steps < (self.steps_per_epoch or 0):
            return  # training ends before this batch
        rest = self.samples % self.size
        if rest % self._replicas and self._context.spec.rank == 0:
            text = (
                f"The last batch of an epoch has {rest} sample{'s' * (rest > 1)}, which "
                f"{self._replicas} replicas cannot share evenly. So the shares have different "
                "sizes, but each share counts equally in the update. Each sample of a smaller "
                "share then counts a little more."
            )
            if rest < self._replicas:
                text += (
                    " A replica without a sample can turn the model's weights into NaN if the "
                    "model has BatchNorm. Drop the last batch, or choose another batch size."
                )
            self._context.emit(events.Noted(rank=0, text=text))

    def _note_lost(self) -> None:
        if self._context.spec.rank == 0:
            text = (
                "Keras trains on fewer batches than the Python generator yields. Keras "
                "reads some batches only to build the model. At the end of an epoch, Keras also "
                "drops the batches that it has read in advance. With tf.data.Dataset or "
                "keras.utils.PyDataset, no batch is lost."
            )
            self._context.emit(events.Noted(rank=0, text=text))

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch; None if the number is not known."""
        if self._call["steps_per_epoch"]:
            return int(self._call["steps_per_epoch"])
        if self.samples is not None and self.size:
            return -(-self.samples // self.size)
        if isinstance(self._call["x"], tf.data.Dataset):
            count = int(self._call["x"].cardinality())
            return count if count > 0 else None
        return None

    def samples_of(self, batch: int) -> int:
        """Return how many samples the batch with this number has; 0 if that is not known."""
        if not self.size:
            return 0
        if self.samples is None:
            return self.size
        return max(0, min(self.size, self.samples - batch * self.size))


def _first(data: Any) -> Any:
    """Return the first array of nested data."""
    leaves = tf.nest.flatten(data)
    return leaves[0] if leaves else None


def _static_batch(data: tf.data.Dataset) -> int | None:
    """Return the batch size of a tf.data set if it is fixed."""
    leaves = tf.nest.flatten(data.element_spec)
    shape = getattr(leaves[0], "shape", None) if leaves else None
    if shape is not None and shape.rank and shape[0] is not None:
        return int(shape[0])
    sizes = getattr(data, "_batch_size", None)
    return None if sizes is None else int(sizes)


def check_call(model: Any, call: Mapping[str, Any], distribution: Any) -> None:
    """Check the model that `fit` was called on, and what kind of data it was given.

    Raises:
        FitError: Naming what is wrong and the next step; nothing was trained.
    """
    check_compiled(model, distribution)
    check_given(model, call)
    check_kind(call["x"])


def check_compiled(model: Any, distribution: Any) -> None:
    """Raise FitError unless the model was compiled, in the strategy's scope."""
    if not getattr(model, "compiled", False):
        raise FitError(
            "The model must be compiled before `fit`, because `fit` needs a loss and an optimizer.",
            seen=f"{model.name}.fit(...) without model.compile(...)",
            next_step="call model.compile(optimizer='adam', loss=...) in the same cell, before "
            "model.fit",
            code="WB-FIT-082",
        )
    made = getattr(model.optimizer, "_distribution_strategy", distribution)
    if made is not distribution:
        raise FitError(
            "The optimizer was made outside the scope of this run's strategy, so this run cannot "
            "use it.",
            seen=f"an optimizer made {under(made)}",
            allowed=f"an optimizer made in the scope of this run's {type(distribution).__name__}",
            next_step="make the optimizer in the cell that trains, because that cell runs in the "
            "strategy's scope",
            code="WB-FIT-083",
        )


def check_given(model: Any, call: Mapping[str, Any]) -> None:
    """Raise FitError if data or labels are missing, or are lists of numbers."""
    data, labels = call["x"], call["y"]
    if data is None:
        raise FitError(
            "`model.fit` was called without data.",
            seen=f"{model.name}.fit(...) without the argument x",
            allowed="arrays, a tf.data.Dataset, or a keras.utils.PyDataset",
            next_step="call model.fit(x, y, ...)",
            code="WB-FIT-084",
        )
    for name, one in (("x", data), ("y", labels)):
        if _is_of_numbers(one):
            raise FitError(
                f"`{name}` must be an array, not a list of numbers.",
                seen=f"{name} is a {type(one).__name__} with {len(one)} elements",
                next_step="pass numpy.array(x), numpy.array(y)",
                code="WB-FIT-085",
            )
    own = any(_is_own(model, name) for name in ("train_step", "compute_loss"))
    loss = getattr(model, "loss", None)
    if labels is None and hasattr(data, "shape") and loss is not None and not own:
        raise FitError(
            "`model.fit` was called without labels, but the model's loss needs labels.",
            seen=f"x of shape {tuple(data.shape)}, y=None, loss={_named(loss)}",
            next_step="call model.fit(x, y, ...), or model.fit(x, x) if the input is also the "
            "target",
            code="WB-FIT-086",
        )


def _is_of_numbers(data: Any) -> bool:
    while isinstance(data, (list, tuple)) and len(data):
        data = data[0]
        if isinstance(data, (int, float)):
            return True
    return False


def _is_own(model: Any, method: str) -> bool:
    return getattr(type(model), method) is not getattr(keras.Model, method)


def _named(loss: Any) -> str:
    return loss if isinstance(loss, str) else str(getattr(loss, "name", type(loss).__name__))


def bound(original: Any, model: Any, args: Any, keywords: Any) -> inspect.BoundArguments:
    """Return the arguments of a method of Keras' trainer, defaults included.

    Raises:
        FitError: The method has no argument with this name.
    """
    signature = inspect.signature(original)
    for name in keywords:
        if name not in signature.parameters:
            guess = nearest(name, signature.parameters)
            raise FitError(
                f"The function `{original.__name__}` has no argument with this name.",
                seen=name,
                next_step=f"did you mean {guess!r}?" if guess else f"remove {name}",
                code="WB-FIT-087",
            )
    given = signature.bind(model, *args, **keywords)
    given.apply_defaults()
    return given


def check_kind(data: Any) -> None:
    """Raise FitError for PyTorch's data sets and loaders."""
    if foreign(data) and not hasattr(data, "numpy"):  # a tensor can be used like an array
        raise FitError(
            "PyTorch data cannot be used in a TensorFlow run.",
            seen=f"{type(data).__module__}.{type(data).__name__}",
            allowed="arrays, a tf.data.Dataset, or a keras.utils.PyDataset",
            next_step="convert tensors x and y to arrays: model.fit(x.numpy(), y.numpy(), ...); or "
            "use data of Workbench: model.fit(*wb.data.digits('train', arrays=True), ...)",
            code="WB-FIT-088",
        )


def check_batched(data: tf.data.Dataset) -> None:
    """Raise FitError if a tf.data set certainly gives single samples instead of batches."""
    shapes = [getattr(spec, "shape", None) for spec in tf.nest.flatten(data.element_spec)]
    kinds = [type(one).__name__ for one in _chain(data)]
    batched = any("Batch" in kind or "Window" in kind for kind in kinds)
    sliced = any("TensorSlice" in kind for kind in kinds) and not batched
    if sliced or any(shape is not None and shape.rank == 0 for shape in shapes):
        raise FitError(
            "The tf.data.Dataset gives single samples, not batches.",
            seen=f"elements with shapes {', '.join(map(str, shapes))}",
            next_step="call .batch(64) on the data set",
            code="WB-FIT-089",
        )


def check_size(given: int | None, made: int | None) -> None:
    """Raise FitError if `batch_size` differs from that of a tf.data set's batches.

    Args:
        given: The argument of `fit`.
        made: Size of the data set's batches; None if it is not fixed.
    """
    if given is None or made is None or given == made:
        return
    raise FitError(
        "`batch_size` differs from the size of the batches in the data set.",
        seen=f"batches of {made} in the data set, batch_size={given}",
        next_step=f"remove batch_size, or make the data set with batches of {given} samples",
        code="WB-FIT-090",
    )


def note_keras_2(context: RunContext) -> None:
    """Report that `tf_keras` is not recorded, if a cell imports it and no training was seen."""
    if "tf_keras" in sys.modules:
        text = (
            "tf_keras (Keras 2) is imported. Workbench does not record the training of "
            "a Keras 2 model, and cannot stop this training. Write the model with keras (Keras 3)."
        )
        context.emit(events.Noted(rank=context.spec.rank, text=text))


def _chain(data: tf.data.Dataset) -> Iterator[tf.data.Dataset]:
    """Yield a data set and all it was made from."""
    yield data
    for one in data._inputs():
        yield from _chain(one)


BATCH_HOOKS = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
OWN_STEPS = ("train_step", "test_step", "compute_metrics")
OTHER_WAY = "write your own loop: coordinator.schedule(step, args=...), then coordinator.join()"


def check_steps(model: Any) -> None:
    """Raise FitError if the model has its own step methods: closures run those of Keras."""
    own = [
        name for name in OWN_STEPS if getattr(type(model), name) is not getattr(keras.Model, name)
    ]
    if own:
        raise FitError(
            "The model defines its own step methods (such as `train_step`), but the workers can "
            "run only the step methods of keras.Model.",
            seen=f"{type(model).__name__}.{own[0]}",
            allowed="models that use the step methods of keras.Model",
            next_step=OTHER_WAY,
            code="WB-FIT-091",
        )


def check_callbacks(callbacks: Any) -> None:
    """Raise FitError if a callback must be called between batches."""
    given = getattr(callbacks, "callbacks", callbacks) or []
    for callback in given if isinstance(given, (list, tuple)) else [given]:
        kind = type(callback)
        hooks = [
            h for h in BATCH_HOOKS if getattr(kind, h) is not getattr(keras.callbacks.Callback, h)
        ]
        named = next((n for n in ("save_freq", "update_freq") if getattr(callback, n, None)), None)
        every = named and getattr(callback, named)
        own = f"{kind.__name__}({named}={every!r})" if kind.__module__.startswith("keras.") else ""
        if own and every in (None, "epoch"):
            hooks = []  # Keras' own callbacks, which work without their calls after batches
        if hooks:
            raise FitError(
                "Strategy parameter_server cannot call a callback for each batch, because its "
                "workers train on the batches in no fixed order.",
                seen=own or f"{kind.__name__}.{hooks[0]}",
                allowed="callbacks that are not called for each batch, for example callbacks with "
                "on_epoch_begin, on_epoch_end or on_train_end",
                next_step=f"use {named}='epoch'" if own else OTHER_WAY,
                code="WB-FIT-092",
            )
