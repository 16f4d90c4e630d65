"""What `model.fit` is given, as batches in pieces for closures.

Arrays are taken in the order of one device (`engine/order.py`); everything else by Keras' own data
adapters: `keras/src/trainers/data_adapters`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from ...engine.order import make_order, share_bounds
from ...engine.tensorflow_data import batch_length, slice_batch
from .feeds import Fed, Resident, fits


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
