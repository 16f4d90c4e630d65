"""Weights of one model put into another of the same form, also across frameworks; pure.

Within a framework weights are found by name; those of Keras in their order where the names differ
(a model built a second time may be called `sequential_1`). Across frameworks they come in order:
layer after layer, and within a layer in the order both frameworks use (matrix, bias; scale, shift,
mean, variance). What differs is how a layer's matrix lies in memory:

| | PyTorch | Keras |
|---|---|---|
| dense | (out, in) | (in, out) |
| convolution | (out, in, height, width) | (height, width, in, out) |
| dense behind flattened maps | rows by (channel, place) | rows by (place, channel) |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import NDArray

from .errors import PlanError

Arrays = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]

KERNEL = "kernel"
COUNTERS = ("num_batches_tracked",)
"""Of PyTorch's BatchNorm; Keras has none."""


def fit_weights(
    arrays: Arrays, source: str, shapes: Shapes, target: str
) -> dict[str, NDArray[Any]]:
    """Return the arrays under a model's names, in the shapes it has.

    Args:
        arrays: A run's weights by name, in the order of its model.
        source: The framework they come from.
        shapes: Shape of each weight of the model, in its order.
        target: The model's framework.

    Raises:
        PlanError: The models are not of the same form.
    """
    if source == target:
        found = _same_framework(arrays, shapes, numbered=target == "tensorflow")
    else:
        found = _across(arrays, source, shapes, target)
    for name, array in found.items():
        if tuple(array.shape) != tuple(shapes[name]):
            raise _unlike(f"{name} of shape {tuple(array.shape)}", f"{tuple(shapes[name])}")
    return found


def _same_framework(arrays: Arrays, shapes: Shapes, *, numbered: bool) -> dict[str, NDArray[Any]]:
    if set(arrays) == set(shapes):
        return {name: arrays[name] for name in shapes}
    if not numbered or len(arrays) != len(shapes):
        strange = sorted(set(arrays) ^ set(shapes))
        raise _unlike(", ".join(strange[:6]), "the same weights")
    return dict(zip(shapes, arrays.values(), strict=True))


def _across(arrays: Arrays, source: str, shapes: Shapes, target: str) -> dict[str, NDArray[Any]]:
    given = [(name, array) for name, array in arrays.items() if not name.endswith(COUNTERS)]
    wanted = [name for name in shapes if not name.endswith(COUNTERS)]
    if len(given) != len(wanted):
        raise _unlike(f"{len(given)} weights", f"{len(wanted)} weights")
    channels = 0  # of the latest convolution that no dense layer has followed yet
    found = {}
    for (name, array), own in zip(given, wanted, strict=True):
        keras_name = own if target == "tensorflow" else name
        if keras_name.rpartition("/")[2] != KERNEL:
            found[own] = array
            continue
        to_keras = target == "tensorflow"
        found[own] = _kernel(array, to_keras, channels)
        channels = _channels(array, to_keras) if array.ndim > 2 else 0
    return found


def _channels(kernel: NDArray[Any], from_torch: bool) -> int:
    """Return how many maps a convolution gives."""
    return int(kernel.shape[0] if from_torch else kernel.shape[-1])


def _kernel(array: NDArray[Any], to_keras: bool, channels: int) -> NDArray[Any]:
    """Return a layer's matrix as the other framework lays it out."""
    if array.ndim != 2:
        places = range(2, array.ndim) if to_keras else range(array.ndim - 2)
        axes: Sequence[int] = (
            (*places, 1, 0) if to_keras else (array.ndim - 1, array.ndim - 2, *places)
        )
        return array.transpose(axes)
    rows = array.T if to_keras else array  # (in, out)
    if channels and rows.shape[0] % channels == 0 and rows.shape[0] > channels:
        places = rows.shape[0] // channels
        shape = (channels, places) if to_keras else (places, channels)
        rows = rows.reshape(*shape, -1).swapaxes(0, 1).reshape(rows.shape)
    return rows if to_keras else rows.T


def _unlike(seen: str, allowed: str) -> PlanError:
    return PlanError(
        "The model's parameters are not the run's.",
        seen=seen,
        allowed=allowed,
        next_step="build the model as the cell did",
        code="WB-PLAN-151",
    )
