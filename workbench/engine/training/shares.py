"""Which samples form which global batch, and which worker takes which of these samples.

The order is made for the global batch. After that, each batch is divided. So one seed gives one
order for any number of workers: runs can be compared with each other and with one device.

Strategies of any framework train on shares of global batches:

    epoch 0:  | batch 0: share of rank 0, share of rank 1, ... | batch 1 | ...
    epoch 1:  ...

A framework's own kinds of data are in `engine/torch/data.py` and `engine/tensorflow/data.py`.

Shards may differ from worker to worker, like data that were collected in different places. Source:
Hsu, Qi and Brown, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification, 2019. For each class, the shares of the workers are drawn from a symmetric Dirichlet
distribution. A large alpha gives each worker the same mixture of classes. With a small alpha each
worker sees few classes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count, cycle, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ...errors import FitError

if TYPE_CHECKING:
    from ..contract import Share

Indices = NDArray[np.int64]
Workers = int | Sequence[int]
"""How many workers take equal shares of a batch, or the weight of each worker's share."""


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of one epoch: shape (samples,), each index once."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def share_bounds(samples: int, rank: int, workers: Workers) -> tuple[int, int]:
    """Return the half-open range of a global batch that `rank` takes.

    Shares are contiguous and cover the batch once. Equal shares differ by at most one sample. If a
    batch has fewer samples than there are workers, some shares are empty. Weights are the numbers
    of samples that the workers take from a batch as large as the sum of the weights. Other batches
    are divided in proportion.
    """
    if not isinstance(workers, int):
        before, whole = sum(workers[:rank]), sum(workers)
        return before * samples // whole, (before + workers[rank]) * samples // whole
    return rank * samples // workers, (rank + 1) * samples // workers


@dataclass(frozen=True)
class Order:
    """The order of a run's samples.

    Attributes:
        samples: Samples in one epoch.
        batch_size: Global batch size.
        indices: A function that returns the order of an epoch, shape (samples,).
        drop_last: Whether a smaller last batch of an epoch is left out.
    """

    samples: int
    batch_size: int
    indices: Callable[[int], NDArray[Any]]
    drop_last: bool = False

    @property
    def steps_per_epoch(self) -> int:
        """Global batches in one epoch."""
        whole, rest = divmod(self.samples, self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def epoch(self, epoch: int) -> Indices:
        """Return the order of an epoch, shape (samples,)."""
        return np.asarray(self.indices(epoch), np.int64)

    def batches(self, epoch: int) -> list[Indices]:
        """Return the indices of each global batch of an epoch."""
        indices, size = self.epoch(epoch), self.batch_size
        return [indices[i * size : (i + 1) * size] for i in range(self.steps_per_epoch)]


def make_order(
    samples: int, batch_size: int, *, seed: int, shuffle: bool, drop_last: bool = False
) -> Order:
    """Return the usual order: for each epoch a permutation from (seed, epoch), or 0..n-1."""
    if shuffle:
        return Order(
            samples, batch_size, lambda epoch: permutation(samples, seed, epoch), drop_last
        )
    plain = np.arange(samples, dtype=np.int64)
    return Order(samples, batch_size, lambda epoch: plain, drop_last)


class Source(ABC):
    """Data that is divided into shares.

    Attributes:
        batch_size: Global batch size.
        samples: Samples in one epoch; None if the data has no known length.
        steps_per_epoch: Global batches in one epoch; None if the data has no known length.
        given: The loader that the user's own loop had, if there is one.
        own: Whether it has only this worker's samples, so that no other worker can take them.
        seekable: Whether an epoch can be given without reading the epochs before it. A stream
            cannot do this, even if its length is known: its order may depend on earlier epochs.
    """

    given: Any = None
    own = False
    seekable = True
    batch_size: int
    samples: int | None
    steps_per_epoch: int | None

    @abstractmethod
    def epoch(self, epoch: int, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        """Yield `rank`'s share of each global batch of one epoch; steps count from 0.

        Args:
            first: Step of the epoch to begin with.
        """

    def shares(self, rank: int, workers: Workers, first: int = 0) -> Iterator[Share]:
        """Yield `rank`'s share of each global batch, epoch after epoch, forever.

        Args:
            first: Step to begin with. Earlier steps are skipped during this call, not when the
                first share is asked for. So random states can be set after the call.
        """
        per_epoch = self.steps_per_epoch
        if per_epoch and self.seekable:
            return self._endless(rank, workers, first, *divmod(first, per_epoch))
        shares = self._endless(rank, workers, 0, 0, 0)
        for _ in range(first):
            next(shares)
        return shares

    def _endless(
        self, rank: int, workers: Workers, step: int, epoch: int, first: int
    ) -> Iterator[Share]:
        for at in count(epoch):
            for share in self.epoch(at, rank, workers, first):
                share.step = step
                step += 1
                yield share
            first = 0

    def close(self) -> None:  # noqa: B027 - most sources have no processes
        """End the processes that load the data, if the source has any."""

    def stay_on(self, device: str) -> None:  # noqa: B027 - most sources read their samples while training
        """Keep the samples on the worker's device, if the source supports it."""

    def peek(self) -> Any:
        """Return a batch of one sample without a change to any random state; None for streams."""
        return None


ATTEMPTS = 100


def dirichlet_shards(labels: NDArray[Any], workers: int, alpha: float, seed: int) -> list[Indices]:
    """Return each worker's samples; together these are all samples, each sample once.

    Args:
        labels: Class of each sample, shape (samples,).

    Raises:
        FitError: Some worker has no sample, even after several draws.
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
        "With this value of `skew`, at least one worker has no sample.",
        seen=f"skew={alpha:g}, samples: {len(labels)}, classes: {len(np.unique(labels))}, "
        f"workers: {workers}",
        next_step="increase `skew`, or use fewer workers. `skew` is the alpha of a Dirichlet "
        "distribution: 0.1 divides each class very unevenly among the workers, and 100 divides it "
        "nearly evenly",
        code="WB-FIT-030",
    )


def skewed_order(order: Order, shards: list[Indices], seed: int) -> Order:
    """Return an order in which each worker's share of every batch comes from its own shard.

    A worker uses its shard in a new order each time. If shards have different sizes, small shards
    are repeated within an epoch, and large shards are not used completely.
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


def own_order(order: Order, counts: Sequence[int], rank: int) -> Order:
    """Return an order of global batches for a worker that has only its own samples.

    The worker's share of each batch holds indices of its own samples, in the order of its epochs;
    it begins again when they are used up. The other shares are zeros, and nobody reads them.

    Args:
        order: The order of this worker's samples.
        counts: The number of samples that each worker has.
    """
    samples = sum(counts)

    def indices(epoch: int) -> Indices:
        dealt = np.zeros(samples, np.int64)
        mine = cycle(order.epoch(epoch))
        for first in range(0, samples, order.batch_size):
            total = min(order.batch_size, samples - first)
            start, stop = share_bounds(total, rank, len(counts))
            dealt[first + start : first + stop] = list(islice(mine, stop - start))
        return dealt

    return replace(order, samples=samples, indices=indices)


def _stream(shard: Indices, seed: list[int]) -> Any:
    rng = np.random.default_rng(seed)
    while True:
        yield from rng.permutation(shard)
