"""What a worker holds between steps: parameters, buffers, gradients, optimizer state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch


def held_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Return the bytes of a worker's part of the model and of what is learnt with it.

    A partitioned tensor counts by the part that lies here; one without memory (device `meta`)
    counts nothing.
    """
    return bytes_of(_tensors(model, optimizer))


def bytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of tensors here; memory that several of them share counts once."""
    parts: dict[int, int] = {}
    for tensor in tensors:
        for part in _here(tensor):
            parts[part.data_ptr()] = max(part.nbytes, parts.get(part.data_ptr(), 0))
    return sum(parts.values())


def _tensors(model: torch.nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    for parameter in model.parameters():
        yield parameter.data
        if parameter.grad is not None:
            yield parameter.grad
    yield from model.buffers()
    if optimizer is not None:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _here(tensor: Any) -> Iterator[torch.Tensor]:
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if part.layout is torch.sparse_coo:  # has no memory of its own to point to
        yield from (part._indices(), part._values())
    elif not part.is_meta:
        yield part
