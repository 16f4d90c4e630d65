"""What `model.fit` is given, as batches in pieces for closures.

Arrays are taken in the order of one device (`engine/order.py`); everything else by Keras' own data
adapters: `keras/src/trainers/data_adapters`.
"""

from __future__ import annotations

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.context import RunContext
from ...engine.order import make_order, share_bounds
from ...engine.tensorflow_data import batch_length, slice_batch
from .feeds import Fed, Resident, fits
from .keras_batches import DEFAULT_BATCH


class Data(ABC):
    """Batches of one epoch, in pieces for closures.

    Attributes:
        batch_size: Global batch; None where it is not known.
        steps: Global batches in an epoch; None where nobody knows.
        feed: How a piece gets to its worker.
    """

    feed: Any
    batch_size: int | None
    steps: int | None

    @abstractmethod
    def batches(self, epoch: int, pieces: int) -> Iterator[list[tuple[Any, int]]]:
        """Yield each global batch as (what `feed` takes, samples) of each piece."""

    @abstractmethod
    def sample(self) -> Any:
        """Return a batch, of the right shapes."""


class ArrayData(Data):
    """Arrays, each of shape (samples, ...)."""

    def __init__(
        self, coordinator: Any, arrays: Any, batch_size: int, steps: int | None, seed: int, *,
        shuffle: bool,
    ) -> None:  # fmt: skip
        self._arrays, self.batch_size = arrays, batch_size
        length = batch_length(arrays)
        self._order = make_order(length, batch_size, seed=seed, shuffle=bool(shuffle))
        self.steps = steps or self._order.steps_per_epoch
        self._resident = fits(arrays)
        self.feed = Resident(coordinator, arrays) if self._resident else Fed()

    def batches(self, epoch: int, pieces: int) -> Iterator[list[tuple[Any, int]]]:
        for _, batch in zip(range(self.steps or 0), self._order.batches(epoch), strict=False):
            places = np.asarray(batch, np.int64)
            chosen = [places[a:b] for a, b in _bounds(len(places), pieces)]
            yield [(part if self._resident else self._take(part), len(part)) for part in chosen]

    def _take(self, places: Any) -> Any:
        return tf.nest.map_structure(lambda array: array[places], self._arrays)

    def sample(self) -> Any:
        return self._take(np.zeros(1, np.int64))


class AdapterData(Data):
    """Whatever else Keras takes: tf.data sets, PyDatasets, generators."""

    def __init__(self, adapter: Any, steps: int | None) -> None:
        self._adapter, self.feed = adapter, Fed()
        self.steps = steps or adapter.num_batches
        self._limit = steps
        self._waiting: Iterator[Any] | None = None  # an endless set goes on with the next epoch
        self._first = next(iter(adapter.get_numpy_iterator()))
        self.batch_size = adapter.batch_size or batch_length(self._first)

    def batches(self, epoch: int, pieces: int) -> Iterator[list[tuple[Any, int]]]:
        self._adapter.on_epoch_begin()
        source = self._waiting or iter(self._adapter.get_numpy_iterator())
        self._waiting = source if self._limit else None
        done = 0
        while self._limit is None or done < self._limit:
            batch = next(source, None)
            if batch is None:
                self._waiting = None
                break
            done += 1
            bounds = _bounds(batch_length(batch), pieces)
            yield [(slice_batch(batch, a, b), b - a) for a, b in bounds]
        self._adapter.on_epoch_end()

    def sample(self) -> Any:
        return slice_batch(self._first, 0, 1)


def _bounds(samples: int, pieces: int) -> list[tuple[int, int]]:
    bounds = [share_bounds(samples, index, pieces) for index in range(pieces)]
    return [(a, b) for a, b in bounds if b > a]


def as_arrays(parts: list[Any]) -> list[Any] | None:
    """Return the parts as NumPy; None where one of them is something else."""
    leaves = [leaf for leaf in tf.nest.flatten(parts) if leaf is not None]
    if not all(isinstance(leaf, (np.ndarray, tf.Tensor, tf.Variable)) for leaf in leaves):
        return None
    return [
        tf.nest.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), part)
        for part in parts
    ]


class Reader:
    """Reads what calls of `fit`, `evaluate` and `predict` are given, with the line's overrides."""

    def __init__(self, context: RunContext, coordinator: Any) -> None:
        self._context, self._coordinator = context, coordinator
        self._adapters = importlib.import_module("keras.src.trainers.data_adapters")
        self._tools = importlib.import_module("keras.src.trainers.data_adapters.data_adapter_utils")
        self._slicing = importlib.import_module("keras.src.trainers.data_adapters.array_slicing")

    def data(self, call: dict[str, Any]) -> tuple[Data, Data | None]:
        """Return the data to train on, and to validate with (None without)."""
        given, parts = self._context.spec.overrides, (call["x"], call["y"], call["sample_weight"])
        self._context.options_read = True
        if "batch_size" in given:
            call["batch_size"] = given["batch_size"]
        validation = call["validation_data"]
        if call["validation_split"] and validation is None:
            parts, validation = self._slicing.train_validation_split(
                parts, validation_split=call["validation_split"]
            )
        make = functools.partial(self._make, call["batch_size"])
        weights, steps = call["class_weight"], call["steps_per_epoch"]
        data = make(parts, weights, steps, shuffle=call["shuffle"])
        if validation is None:
            return data, None
        held = self._tools.unpack_x_y_sample_weight(validation)
        make = functools.partial(self._make, call.get("validation_batch_size") or data.batch_size)
        return data, make(held, None, call.get("validation_steps"), shuffle=False)

    def _make(
        self, batch_size: int | None, parts: Any, class_weight: Any, steps: int | None, *,
        shuffle: bool,
    ) -> Data:  # fmt: skip
        x, y, weight = parts
        arrays = as_arrays([x, y, weight])
        if arrays is not None:
            x, y, weight = arrays
            if class_weight is not None:
                weight = np.asarray(
                    self._tools.class_weight_to_sample_weights(y, class_weight), np.float32
                )
            batch = tuple(part for part in (x, y, weight) if part is not None)
            seed = int(self._context.spec.overrides.get("seed", 0))
            return ArrayData(
                self._coordinator, batch, batch_size or DEFAULT_BATCH, steps, seed, shuffle=shuffle
            )
        adapter = self._adapters.get_data_adapter(
            x=x, y=y, sample_weight=weight, batch_size=batch_size or DEFAULT_BATCH,
            steps_per_epoch=steps, shuffle=shuffle, class_weight=class_weight,
        )  # fmt: skip
        return AdapterData(adapter, steps)

    def inputs(self, call: dict[str, Any]) -> Iterator[Any]:
        """Yield the model's inputs of each batch that `predict` is given."""
        adapter = self._adapters.get_data_adapter(
            x=call["x"], batch_size=call["batch_size"] or DEFAULT_BATCH,
            steps_per_epoch=call["steps"], shuffle=False,
        )  # fmt: skip
        for batch in adapter.get_numpy_iterator():
            yield self._tools.unpack_x_y_sample_weight(batch)[0]
