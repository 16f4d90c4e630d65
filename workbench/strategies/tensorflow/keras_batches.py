"""What a call of `model.fit` says about batches, with the line's overrides applied."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import keras
import tensorflow as tf

from ... import events
from ...engine.context import RunContext
from ...errors import FitError
from .mistakes import check_batched, check_size

DEFAULT_BATCH = 32
"""Keras' own, where `fit` is not told."""


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
            code="WB-FIT-073",
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
            if rest < self._replicas:
                text += (
                    " A replica without a sample can turn weights into NaN (BatchNorm): leave the "
                    "rest out, or choose another batch size."
                )
            self._context.emit(events.Noted(rank=0, text=text))

    def _note_lost(self) -> None:
        if self._context.spec.rank == 0:
            text = (
                "Keras reads a Python generator ahead, and trains on fewer batches than it yields: "
                "those read to build the model and at an epoch's end are lost. tf.data.Dataset and "
                "keras.utils.PyDataset lose none."
            )
            self._context.emit(events.Noted(rank=0, text=text))

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
