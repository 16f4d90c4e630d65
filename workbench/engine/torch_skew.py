"""A source of data dealt out by class (`skew.py`)."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..errors import FitError
from .skew import dirichlet_shards, skewed_order
from .source import Source
from .torch_data import IndexedSource, TensorSource

CHUNK = 1024


def skewed(source: Source, workers: int, alpha: float, seed: int) -> Source:
    """Return the source with a shard of its own for each worker; the same seed, the same shards.

    Raises:
        FitError: The samples have no class, or cannot be told apart (a stream).
    """
    shards = dirichlet_shards(labels(source), workers, alpha, seed)
    dealt: Any = copy.copy(source)
    dealt.order = skewed_order(dealt.order, shards, seed)
    return dealt  # type: ignore[no-any-return]


def labels(source: Source) -> NDArray[np.int64]:
    """Return the class of each sample, shape (samples,).

    Raises:
        FitError: The samples have no class, or cannot be told apart.
    """
    if isinstance(source, TensorSource):
        target = source.tensors[-1] if len(source.tensors) == 2 else None
    elif isinstance(source, IndexedSource):
        target = _fetched(source)
    else:
        raise FitError(
            "A stream cannot be dealt out by class: its samples have no index.",
            seen=type(source).__name__,
            next_step="leave out -o skew, or use a data set with an index",
            code="WB-FIT-057",
        )
    if target is None or target.dim() != 1 or target.is_floating_point():
        raise FitError(
            "skew deals samples out by their class, and these have none.",
            seen="no pairs (x, y)" if target is None else f"y of {target.dtype}, {target.dim()}-d",
            allowed="pairs (x, y) with y one whole number per sample",
            next_step="leave out -o skew",
            code="WB-FIT-058",
        )
    return target.cpu().numpy().astype(np.int64)


def _fetched(source: IndexedSource) -> torch.Tensor | None:
    """Read the targets of all samples, once."""
    found = []
    count = len(source.dataset)
    for first in range(0, count, CHUNK):
        batch = source._fetch(list(range(first, min(first + CHUNK, count))))
        if not (isinstance(batch, (tuple, list)) and len(batch) == 2):
            return None
        if not isinstance(batch[1], torch.Tensor):
            return None
        found.append(batch[1])
    return torch.cat(found)
