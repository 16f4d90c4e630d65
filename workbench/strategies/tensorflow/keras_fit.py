"""`model.fit`, unchanged for the user, reports to the run while a cell is under way.

The backend trainer's `fit` is replaced for the time of a cell. It checks what would go wrong
silently, applies the line's overrides, and adds one callback after the user's own:

    on_train_batch_begin
    train_function        one step, or steps_per_execution of them
    on_train_batch_end    the steps are recorded; Pause waits here, Stop ends fit here
    on_epoch_end          validation is reported

Source: `keras/src/backend/tensorflow/trainer.py`.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from ...engine import settings
from ...engine.context import RunContext
from ...engine.initial import initialise
from ...engine.tensorflow_support import parameter_count
from ...errors import FitError, RunStopped
from ..base import NAN
from .mistakes import check_batched, check_call, check_size
from .steps import Steps

clock = time.perf_counter
DEFAULT_BATCH = 32
LINE = ("epochs", "steps", "batch_size")


class KerasFit:
    """Replaces `fit` while it is entered.

    Args:
        trained: Called with each model that `fit` has begun to train.

    Attributes:
        under_way: Whether a `fit` is going on.
    """

    def __init__(
        self, context: RunContext, steps: Steps, distribution: Any, trained: Callable[[Any], None]
    ) -> None:
        self.context, self.steps, self.distribution = context, steps, distribution
        self.under_way = False
        self._trained = trained
        self._trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
        self._original: Any = None

    def __enter__(self) -> KerasFit:
        """Replace `fit`."""
        owner = self._trainer.TensorFlowTrainer
        self._original = original = owner.fit
        watch = self

        @functools.wraps(original)
        def fit(model: Any, *args: Any, **keywords: Any) -> Any:
            return watch.fit(model, args, keywords)

        owner.fit = fit
        return self

    def __exit__(self, *error: object) -> None:
        """Put Keras' own `fit` back."""
        self._trainer.TensorFlowTrainer.fit = self._original

    def fit(self, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Train as Keras does, recorded.

        Raises:
            FitError: Something would train wrongly; nothing was trained.
            RunStopped: Stop was pressed before the first step.
        """
        if self.under_way:  # a callback of the user's trains another model
            return self._original(model, *args, **keywords)
        given = inspect.signature(self._original).bind(model, *args, **keywords)
        given.apply_defaults()
        call = given.arguments
        settings.check_supported(self.context.entry, "keras", ())
        check_model(model, self.distribution)
        check_call(model, call, self.distribution)
        batch = Batches(call, self.context, self.distribution.num_replicas_in_sync)
        batch.override()
        settings.warn_if_trained(self.context, model)
        callback = Reports(self, model, call, batch)
        if isinstance(call["callbacks"], keras.callbacks.CallbackList):
            call["callbacks"].append(callback)
        else:
            callbacks = call["callbacks"] or []
            several = isinstance(callbacks, (list, tuple))
            call["callbacks"] = [*(callbacks if several else [callbacks]), callback]
        if call["verbose"] == "auto":
            call["verbose"] = 0  # the dashboard says it all
        self.under_way = True
        self._trained(model)
        try:
            return self._original(*given.args, **given.kwargs)
        finally:
            self.under_way = False


def check_model(model: Any, distribution: Any) -> None:
    """Raise FitError unless the model was built in the strategy's scope."""
    owner = getattr(model, "_distribute_strategy", None)
    if owner is distribution:
        return
    raise FitError(
        "The model was built outside this run's strategy, so it cannot train under it.",
        seen=f"built under {type(owner).__name__}" if owner else "built under no strategy",
        allowed=f"built under {type(distribution).__name__}",
        next_step="build and compile it in the cell that trains it; that cell runs in the scope",
    )


class Batches:
    """What a call of `fit` says about batches, with the line's overrides.

    Attributes:
        size: Global batch; None where it is not known.
        samples: Samples in an epoch; None where they are not known.
        total_steps: After how many steps the line ends training; None: with the last epoch.
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
            FitError: It cannot, or the data has its batches made already.
        """
        given, call = self._context.spec.overrides, self._call
        self._context.options_read = True
        arrays = not isinstance(call["x"], (tf.data.Dataset, keras.utils.PyDataset)) and hasattr(
            _first(call["x"]), "__len__"
        )
        if "batch_size" in given:
            if not arrays:
                raise FitError(
                    "The data set has its batches made already, so --batch-size is out of place.",
                    seen=type(call["x"]).__name__,
                    next_step="read wb.options.get('batch_size', 64) where the data set is batched",
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
        self._check_divides()
        self._limit(given)

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
            self._note_rest()
            return
        below, above = size - size % replicas, size + replicas - size % replicas
        raise FitError(
            "The batch cannot be divided evenly: unequal shares would change the training.",
            seen=f"batch of {size} over {replicas} replicas",
            allowed=f"a multiple of {replicas}",
            next_step=" or ".join(self._words(near) for near in (above, below) if near),
        )

    def _words(self, size: int) -> str:
        made = isinstance(self._call["x"], tf.data.Dataset)
        return f"data.batch({size})" if made else f"batch_size={size}"

    def _note_rest(self) -> None:
        if self.size is None or self.samples is None or self._call["steps_per_epoch"]:
            return
        rest = self.samples % self.size
        if rest % self._replicas and self._context.spec.rank == 0:
            text = (
                f"The last batch of an epoch has {rest} samples, which {self._replicas} replicas "
                "cannot share evenly: those of the smaller share count for a little more."
            )
            self._context.emit("note", rank=0, text=text)

    @property
    def steps_per_epoch(self) -> int | None:
        """Batches in an epoch; None where they are not known."""
        if self._call["steps_per_epoch"]:
            return int(self._call["steps_per_epoch"])
        if self.samples is not None and self.size:
            return -(-self.samples // self.size)
        if isinstance(self._call["x"], tf.data.Dataset):
            count = int(self._call["x"].cardinality())
            return count if count > 0 else None
        return None

    def samples_of(self, batch: int) -> int:
        """Return how many samples the batch of that number has; 0 where nobody knows."""
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
    """Return the batch size of a tf.data set where it is fixed."""
    leaves = tf.nest.flatten(data.element_spec)
    shape = getattr(leaves[0], "shape", None) if leaves else None
    if shape is not None and shape.rank and shape[0] is not None:
        return int(shape[0])
    sizes = getattr(data, "_batch_size", None)
    return None if sizes is None else int(sizes)


class Reports(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the steps of one `fit`, and carries Stop and Pause into it."""

    def __init__(
        self, owner: KerasFit, model: Any, call: Mapping[str, Any], batch: Batches
    ) -> None:
        super().__init__()
        self._owner, self._context, self._steps = owner, owner.context, owner.steps
        self._epochs = call["epochs"] - call["initial_epoch"]
        self._batch = batch
        self._base = self._context.trained
        self._mean = (0, 0.0)  # samples and summed loss of the epoch so far
        self._trains = weakref.ref(model)

    def on_train_begin(self, logs: Any = None) -> None:
        """Announce the run; a Stop that came before the first step ends it here."""
        initialise(self._context, self._trains())
        per_epoch = self._batch.steps_per_epoch
        total = self._batch.total_steps or (per_epoch * self._epochs if per_epoch else None)
        self._steps.announce(
            parameter_count(self._trains()),
            batch_size=self._batch.size,
            total_steps=None if total is None else self._base + total,
            epochs=None if self._batch.total_steps else self._epochs,
        )
        self._steps.start_s = NAN
        if not self._steps.enter():
            raise RunStopped

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """What lies between epochs belongs to no step."""
        self._mean = (0, 0.0)
        self._steps.skip()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Record the steps done; hold or end `fit` where that was asked for."""
        samples = self._batch.samples_of(batch)
        self._steps.end(self._steps.unmarked(samples, self._difference(samples, logs)))
        limit = self._batch.total_steps
        done = limit is not None and self._context.trained - self._base >= limit
        if done or not self._steps.enter():
            trainer: Any = self.model
            trainer.stop_training = True

    def _difference(self, samples: int, logs: Mapping[str, Any] | None) -> float:
        """Return the batch's own loss; Keras shows the epoch's running mean."""
        if not logs or "loss" not in logs or not samples:
            return NAN
        count, total = self._mean
        self._mean = (count + samples, float(logs["loss"]) * (count + samples))
        return (self._mean[1] - total) / samples

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the epoch, and its validation where there was one."""
        context, step = self._context, self._context.trained - 1
        context.emit("epoch", rank=context.spec.rank, epoch=epoch, step=step)
        values = {
            name.removeprefix("val_"): float(value)
            for name, value in (logs or {}).items()
            if name.startswith("val_")
        }
        if values and context.spec.rank == 0:
            seconds = clock() - self._steps.start_s
            context.emit("eval", step=step, epoch=epoch, values=values, seconds=seconds)
