"""Shards that differ from worker to worker, as data collected in different places does.

Source: Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated
Visual Classification, 2019: for each class, the shares of the workers are drawn from a symmetric
Dirichlet distribution. A large alpha gives each worker the same mixture of classes; with a small
one each worker sees few of them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FitError
from .order import Indices, Order, share_bounds

ATTEMPTS = 100


def dirichlet_shards(labels: NDArray[Any], workers: int, alpha: float, seed: int) -> list[Indices]:
    """Return each worker's samples; together they are all samples, each once.

    Args:
        labels: Class of each sample, shape (samples,).

    Raises:
        FitError: Some worker is left without a sample, however often it is drawn.
    """
    rng = np.random.default_rng([seed, workers])
    for _ in range(ATTEMPTS):
        parts: list[list[Indices]] = [[] for _ in range(workers)]
        for label in np.unique(labels):
            samples = rng.permutation(np.flatnonzero(labels == label))
            share = rng.dirichlet(np.full(workers, alpha))
            cuts = (np.cumsum(share)[:-1] * len(samples)).round().astype(int)
            for part, chosen in zip(parts, np.split(samples, cuts), strict=True):
                part.append(chosen)
        shards = [np.sort(np.concatenate(part)).astype(np.int64) for part in parts]
        if all(len(shard) for shard in shards):
            return shards
    raise FitError(
        "With so much skew some worker is left without a sample.",
        seen=f"skew={alpha:g}, {len(labels)} samples of {len(np.unique(labels))} classes over "
        f"{workers} workers",
        next_step="raise skew, or use fewer workers",
        code="WB-FIT-030",
    )


def skewed_order(order: Order, shards: list[Indices], seed: int) -> Order:
    """Return an order in which each worker's share of every batch comes from its own shard.

    A worker goes through its shard in a new order each time; where shards are of unequal size,
    small ones come round more often within an epoch, and large ones are not seen whole.
    """
    workers = len(shards)

    def indices(epoch: int) -> Indices:
        dealt = np.empty(order.samples, np.int64)
        streams = [_stream(shard, [seed, epoch, r]) for r, shard in enumerate(shards)]
        for first in range(0, order.samples, order.batch_size):
            total = min(order.batch_size, order.samples - first)
            for rank in range(workers):
                start, stop = share_bounds(total, rank, workers)
                for place in range(first + start, first + stop):
                    dealt[place] = next(streams[rank])
        return dealt

    return replace(order, indices=indices)


def _stream(shard: Indices, seed: list[int]) -> Any:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(shard)
