"""Collated batches of any nesting: counted, cut, mapped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..errors import FitError


def batch_length(data: Any) -> int:
    """Return how many samples a collated batch holds: the first tensor's first dimension.

    Raises:
        FitError: There is no tensor in it.
    """
    for tensor in tensors_of(data):
        if tensor.dim():
            return len(tensor)
    raise FitError(
        "A batch without a tensor cannot be counted.",
        seen=type(data).__name__,
        next_step="let the collate function return tensors whose first dimension is the batch",
        code="WB-FIT-045",
    )


def tensors_of(data: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested tuples, lists and mappings."""
    if isinstance(data, torch.Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_of(value)
    elif isinstance(data, (tuple, list)):
        for value in data:
            yield from tensors_of(value)


def map_batch(
    function: Callable[[torch.Tensor], Any],
    data: Any,
    other: Callable[[Any], Any] = lambda value: value,
) -> Any:
    """Apply `function` to every tensor of nested tuples, lists, mappings; `other` to the rest."""
    if isinstance(data, torch.Tensor):
        return function(data)
    if isinstance(data, Mapping):
        mapped = {key: map_batch(function, value, other) for key, value in data.items()}
        try:
            return type(data)(mapped)  # type: ignore[call-arg]
        except TypeError:
            return mapped
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(map_batch(function, value, other) for value in data))
    if isinstance(data, (tuple, list)):
        return type(data)(map_batch(function, value, other) for value in data)
    return other(data)


def slice_batch(data: Any, start: int, stop: int, total: int) -> Any:
    """Return samples start..stop of a collated batch of `total` samples."""
    if isinstance(data, (list, tuple)) and len(data) == total and not list(tensors_of(data)):
        return data[start:stop]
    return map_batch(lambda t: t[start:stop] if t.dim() and len(t) == total else t, data)
