"""Which samples form which global batch, and which worker takes which of them.

The order is made for the global batch and only then divided, so one seed gives one order whatever
the number of workers: runs can be compared, and checked against one device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


def permutation(samples: int, seed: int, epoch: int) -> Indices:
    """Return the order of one epoch: shape (samples,), each index once."""
    return np.random.default_rng([seed, epoch]).permutation(samples)


def share_bounds(samples: int, rank: int, workers: int) -> tuple[int, int]:
    """Return the half-open range of a global batch that `rank` takes.

    Shares are contiguous, cover the batch once, and differ by at most one sample; a batch with
    fewer samples than workers leaves some shares empty.
    """
    return rank * samples // workers, (rank + 1) * samples // workers


@dataclass(frozen=True)
class Order:
    """The order of a run's samples.

    Attributes:
        samples: Samples in one epoch.
        batch_size: Global batch size.
        indices: Gives the order of an epoch, shape (samples,).
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
    """Return the usual order: a permutation per epoch made from (seed, epoch), or 0..n-1."""
    if shuffle:
        return Order(
            samples, batch_size, lambda epoch: permutation(samples, seed, epoch), drop_last
        )
    plain = np.arange(samples, dtype=np.int64)
    return Order(samples, batch_size, lambda epoch: plain, drop_last)
