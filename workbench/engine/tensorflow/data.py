"""Data for TensorFlow strategies: the user's data, as shares of global batches.

Shares are NumPy arrays; a strategy puts them on its devices. Arrays and map-style data sets are
taken in the same order as under PyTorch (`engine/training/shares.py`): one seed, one order. A
tf.data set has its own order, and every engine reads all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...errors import FitError
from ..contract import Share
from ..training.shares import Order, Source, Workers, make_order, share_bounds

KINDS = (
    "(x, y) arrays, a tf.data.Dataset, a keras.utils.PyDataset, or a data set with __len__ and "
    "__getitem__"
)


class ArraySource(Source):
    """Arrays of equal length, each of shape (samples, ...), or a data set with an index."""

    def __init__(self, data: Any, order: Order) -> None:
        self.data, self.order = data, order
        self.samples, self.batch_size = order.samples, order.batch_size
        self.steps_per_epoch = order.steps_per_epoch

    def epoch(self, epoch: int, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        batches = islice(enumerate(self.order.batches(epoch)), first, None)
        for step, batch in batches:
            start, stop = share_bounds(len(batch), rank, workers)
            # An engine without a sample holds one that does not count.
            chosen = batch[start:stop] if stop > start else batch[:1]
            yield Share(self._take(chosen), stop - start, len(batch), step, epoch)

    def _take(self, places: Any) -> Any:
        if isinstance(self.data, tuple):
            taken = tuple(array[places] for array in self.data)
            return taken if len(taken) > 1 else taken[0]
        if hasattr(self.data, "take"):
            return self.data.take(places)
        samples = [self.data[int(place)] for place in places]
        return tf.nest.map_structure(lambda *parts: np.stack(parts), *samples)

    def peek(self) -> Any:
        return self._take(np.zeros(1, np.int64))


class StreamSource(Source):
    """Something that yields global batches: a tf.data set, a PyDataset."""

    seekable = False

    def __init__(self, data: Any, batch_size: int, steps_per_epoch: int | None) -> None:
        self.data, self.batch_size = data, batch_size
        self.samples, self.steps_per_epoch = None, steps_per_epoch

    def epoch(self, epoch: int, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        empty = True
        for step, batch in enumerate(self._batches()):
            empty = False
            if step < first:
                continue
            total = batch_length(batch)
            start, stop = share_bounds(total, rank, workers)
            # An engine without a sample holds one that does not count.
            held = (start, stop) if stop > start else (0, 1)
            yield Share(slice_batch(batch, *held), stop - start, total, step, epoch)
        if empty:
            raise FitError(
                "The data set returned no sample.",
                seen=f"{type(self.data).__name__}, epoch {epoch}",
                next_step="make the data set begin again in each epoch, or pass epochs=1"
                if epoch
                else None,
                code="WB-FIT-031",
            )

    def _batches(self) -> Iterator[Any]:
        if isinstance(self.data, tf.data.Dataset):
            yield from self.data.as_numpy_iterator()
            return
        for index in range(len(self.data)):
            yield tf.nest.map_structure(np.asarray, self.data[index])
        self.data.on_epoch_end()

    def peek(self) -> Any:
        if not isinstance(self.data, tf.data.Dataset):
            return slice_batch(tf.nest.map_structure(np.asarray, self.data[0]), 0, 1)
        # Made up, since reading one would move the set's random state.
        return tf.nest.map_structure(
            lambda spec: np.zeros(
                [1, *(size or 1 for size in spec.shape[1:])], spec.dtype.as_numpy_dtype
            ),
            self.data.element_spec,
        )


def batch_length(batch: Any) -> int:
    """Return how many samples a batch holds: the first array's first dimension."""
    leaves = tf.nest.flatten(batch)
    if not leaves or not np.ndim(leaves[0]):
        raise FitError(
            "A batch must contain an array with one row for each sample.",
            seen=type(batch).__name__,
            next_step="let the data set return batches (x, y) with one row of x and one row of y "
            "for each sample",
            code="WB-FIT-032",
        )
    return len(leaves[0])


def slice_batch(batch: Any, start: int, stop: int) -> Any:
    """Return samples `start` to `stop` of a batch of any nesting."""
    return tf.nest.map_structure(lambda array: array[start:stop], batch)


def make_source(data: Any, batch_size: int | None, *, seed: int, shuffle: bool) -> Source:
    """Turn the user's data into a source.

    Args:
        data: A tuple of arrays or tensors of equal length, a tf.data set, a PyDataset, or an
            object with a length and an index.
        batch_size: Global batch size; None means that of a tf.data set or PyDataset.
        shuffle: Ignored for data that is already divided into batches.

    Raises:
        FitError: It is none of these, is empty, has no batch size, or has another one.
    """
    if _of_torch(data):
        raise FitError(
            "PyTorch data cannot be used in a TensorFlow run.",
            seen=f"{type(data).__module__}.{type(data).__name__}",
            allowed=KINDS,
            next_step="pass arrays: (x.numpy(), y.numpy()), or wb.data.digits(..., arrays=True)",
            code="WB-FIT-033",
        )
    if isinstance(data, tf.data.Dataset):
        return _from_dataset(data, batch_size)
    if isinstance(data, keras.utils.PyDataset):
        _not_empty(len(data), data)
        size = batch_length(tf.nest.map_structure(np.asarray, data[0]))
        _same_batch(size, batch_size, f"let the PyDataset return batches of {batch_size}")
        return StreamSource(data, size, len(data))
    if batch_size is None:
        raise FitError(
            "batch_size is missing.",
            allowed="a whole number: how many samples all workers together use in one step",
            next_step="pass batch_size=64",
            code="WB-FIT-034",
        )
    if isinstance(data, (tuple, list)) and data and all(_is_array(part) for part in data):
        arrays = tuple(np.asarray(part) for part in data)
        lengths = [len(array) for array in arrays]
        if len(set(lengths)) > 1:
            raise FitError("The arrays have unequal lengths.", seen=lengths, code="WB-FIT-035")
        _not_empty(lengths[0], data)
        return ArraySource(arrays, make_order(lengths[0], batch_size, seed=seed, shuffle=shuffle))
    indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if not indexed or isinstance(data, (str, bytes, Mapping, tuple, list)) or _is_array(data):
        raise FitError(
            "wb.fit cannot read `data` of this type.",
            seen=type(data).__name__,
            allowed=KINDS,
            next_step="use wb.fit(model, (x, y), ...)",
            code="WB-FIT-036",
        )
    _not_empty(len(data), data)
    return ArraySource(data, make_order(len(data), batch_size, seed=seed, shuffle=shuffle))


def _from_dataset(data: tf.data.Dataset, batch_size: int | None) -> StreamSource:
    made = batched(data)
    if made is not None:
        _same_batch(made, batch_size, f"use data.unbatch().batch({batch_size})")
    elif batch_size is None:
        raise FitError(
            "batch_size is missing: the tf.data.Dataset is not batched.",
            next_step="pass batch_size=64, or data.batch(64)",
            code="WB-FIT-037",
        )
    else:
        data, made = data.batch(batch_size), batch_size
    steps = int(data.cardinality())
    if steps == 0:
        raise FitError("The data set is empty.", seen=type(data).__name__, code="WB-FIT-038")
    return StreamSource(data, made, steps if steps > 0 else None)


def batched(data: Any) -> int | None:
    """Return the latest batch size of a tf.data set; None if it has none."""
    size = getattr(data, "_batch_size", None)
    if size is not None:
        return int(size)
    if type(data).__name__ == "_UnbatchDataset":
        return None
    inputs = data._inputs() if hasattr(data, "_inputs") else []
    return batched(inputs[0]) if len(inputs) == 1 else None


def _same_batch(made: int, asked: int | None, other_way: str) -> None:
    if asked not in (None, made):
        raise FitError(
            "The data set is already divided into batches of another size.",
            seen=f"batches of {made}, batch_size={asked}",
            next_step=f"remove batch_size, or {other_way}",
            code="WB-FIT-039",
        )


def _is_array(part: Any) -> bool:
    return isinstance(part, (np.ndarray, tf.Tensor, tf.Variable))


def _of_torch(data: Any) -> bool:
    parts = data if isinstance(data, (tuple, list)) else (data,)
    return any(
        cls.__module__.partition(".")[0] == "torch" for part in parts for cls in type(part).__mro__
    )


def _not_empty(length: int, data: Any) -> None:
    if length == 0:
        raise FitError("The data set is empty.", seen=type(data).__name__, code="WB-FIT-040")


def divisible(loader: Any, *, seed: int) -> Source:
    """Refuse: users' own loops are divided by `strategy` itself.

    Raises:
        FitError: Always.
    """
    raise FitError(
        "In your own TensorFlow loop, wb.prepare does not accept a loader.",
        seen=type(loader).__name__,
        next_step="divide the data with strategy.experimental_distribute_dataset(data)",
        code="WB-FIT-041",
    )


def global_batch(loader: Any, workers: int) -> int | None:
    """Return None: the samples of a step are only known when it runs."""
    return None
