"""How a closure gets its samples, and its injected delays.

    Resident: the arrays are sent to every worker once; a closure is told which samples to take
    Fed:      a closure is sent its samples

A closure's samples are the same on any worker, so the order is that of one device.

Injected delays are calls of Python on the worker. While a fault is active, a closure's function is
traced again with two such calls in it:

    began | pull, forward, backward . . . | delay | push

Python functions are not sent with a graph. A `PyFunc` finds its function by a token, in the
registry of the process that runs it. So the worker's engine registers its own functions under known
tokens (`WorkerFaults`).

Source: `tensorflow/python/ops/script_ops.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute.coordinator import values
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import gen_script_ops

RESIDENT_BYTES = 1 << 30
"""Larger arrays are sent in pieces."""

SENT_AHEAD = 256
"""The number of pieces whose order is sent together."""


def dealt(feed: Any, batches: Iterable[list[tuple[Any, int]]]) -> Iterator[list[tuple[Any, int]]]:
    """Yield each global batch as (arguments of the closure, samples) of its pieces."""
    most = SENT_AHEAD if isinstance(feed, Resident) else 1
    source = iter(batches)
    while chunk := list(islice(source, most)):
        args = feed.args([piece for batch in chunk for piece, _ in batch])
        for batch in chunk:
            yield [(next(args), samples) for _, samples in batch]


ORDER = tf.TensorSpec([None, None], tf.int64)
"""Places of samples, a row per piece.

The lengths are left open; otherwise each length would be traced.
"""

_placing: Any = weakref.WeakKeyDictionary()


def _place(coordinator: Any, specs: tuple[Any, ...]) -> Any:
    """Return the function that keeps arrays on a worker; traced once for each kind of them."""
    kept = _placing.setdefault(coordinator, {})
    if specs not in kept:
        kept[specs] = tf.function(
            lambda *parts: [tf.identity(part) for part in parts],
            autograph=False,
            input_signature=specs,
        )
    return kept[specs]


class Resident:
    """Arrays that are on every worker, together with an order of their samples.

    Every argument that the worker does not have yet costs a closure a separate round trip. So the
    order is sent in advance, many pieces at a time, and a closure gets only the number of its
    piece.

    Args:
        arrays: Nested arrays of one length.

    Attributes:
        kind: Equal for data that the same graph can take; closures of equal size are alike.
    """

    def __init__(self, coordinator: Any, arrays: Any) -> None:
        self._coordinator = coordinator
        self._structure = tf.nest.map_structure(lambda _: 0, arrays)
        parts = [tf.convert_to_tensor(array) for array in tf.nest.flatten(arrays)]
        specs = tuple(tf.TensorSpec([None, *part.shape[1:]], part.dtype) for part in parts)
        self.kind = (str(self._structure), specs)
        self._data = self._on_all(parts, specs)

    def _on_all(self, parts: list[Any], specs: tuple[Any, ...]) -> Any:
        place = _place(self._coordinator, specs)
        workers = self._coordinator._cluster.workers
        return values.PerWorkerValues(
            tuple(worker.create_resource(place, args=tuple(parts)) for worker in workers)
        )

    def args(self, pieces: list[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the closure for each piece: places of samples, in order."""
        sizes = [len(piece) for piece in pieces]
        widest = max(sizes)
        table = np.zeros((len(pieces), widest), np.int64)
        for row, piece in zip(table, pieces, strict=True):
            row[: len(piece)] = piece
        order = self._on_all([tf.constant(table)], (ORDER,))
        for number, size in enumerate(sizes):
            yield self._data, order, tf.constant(number), size

    def function(self, body: Callable[[Any], Any]) -> Any:
        """Return the closure's function, from a function of a batch.

        The function also works for other data of the same `kind`.
        """
        structure = self._structure

        def closure(data: Any, order: Any, number: Any, size: int) -> Any:
            places = tf.ensure_shape(order[0][number][:size], (size,))
            batch = [tf.gather(part, places) for part in data]
            return body(tf.nest.pack_sequence_as(structure, batch))

        return tf.function(closure, autograph=False)


class Fed:
    """Batches that are sent with their closure; they may differ from each other."""

    kind = None

    def args(self, pieces: list[Any]) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the closure for each batch."""
        for batch in pieces:
            yield (tf.nest.map_structure(tf.convert_to_tensor, batch),)

    def function(self, body: Callable[[Any], Any]) -> Any:
        """Return the closure's function, from a function of a batch."""
        return tf.function(body, autograph=False)


def fits(arrays: Any) -> bool:
    """Whether data are arrays that can be on every worker."""
    parts = tf.nest.flatten(arrays)
    return all(isinstance(part, np.ndarray) and part.dtype.kind in "biuf" for part in parts) and (
        sum(part.nbytes for part in parts) <= RESIDENT_BYTES
    )


BEGAN, DELAY = "workbench_began", "workbench_delay"
"""Tokens under which a worker's Python functions are called from the graphs that are sent to it."""


class Delays:
    """Makes variants of functions that have delays in them."""

    def __init__(self) -> None:
        self._began: Any = None  # in a graph that is traced with delays: when it began
        self._variants: Any = weakref.WeakKeyDictionary()

    def variant(self, function: Any) -> Any:
        """Return the function with delays in it; a plain Python function is not changed."""
        if not isinstance(function, polymorphic_function.Function):
            return function
        if function not in self._variants:
            self._variants[function] = self._delayed(function)
        return self._variants[function]

    def _delayed(self, function: Any) -> Any:
        inner = function.python_function
        if function._autograph:
            inner = autograph.tf_convert(inner, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED))

        def delayed(*args: Any, **keywords: Any) -> Any:
            self._began = gen_script_ops.py_func([], BEGAN, [tf.float64])[0]
            try:
                with tf.control_dependencies([self._began]):
                    return inner(*args, **keywords)
            finally:
                self._began = None

        return function._clone(python_function=tf.autograph.experimental.do_not_convert(delayed))

    def hold(self, gradients: Any) -> Any:
        """Delay gradients for as long as the worker says; nothing if there is no delay."""
        if self._began is None:
            return gradients
        gradients = list(gradients)
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        with tf.control_dependencies([part for part in parts if part is not None]):
            paused = gen_script_ops.py_func([self._began], DELAY, [tf.float64])
        with tf.control_dependencies(paused):
            return [None if g is None else tf.identity(g) for g in gradients]
