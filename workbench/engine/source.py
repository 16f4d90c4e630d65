"""What a strategy trains on, whatever the framework: data in shares of global batches.

    epoch 0:  | batch 0: share of rank 0, share of rank 1, ... | batch 1 | ...
    epoch 1:  ...

A framework's own kinds of data are in `torch_data.py` and `tensorflow_data.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from itertools import count
from typing import Any

from ..strategies.base import Share


class Source(ABC):
    """Data in shares.

    Attributes:
        batch_size: Global batch size.
        samples: Samples in one epoch; None where the data does not say.
        steps_per_epoch: Global batches in one epoch; None where the data does not say.
        given: The loader that the user's own loop had, where there is one.
    """

    given: Any = None
    batch_size: int
    samples: int | None
    steps_per_epoch: int | None

    @abstractmethod
    def epoch(self, epoch: int, rank: int, workers: int, first: int = 0) -> Iterator[Share]:
        """Yield `rank`'s share of each global batch of one epoch; steps count from 0.

        Args:
            first: Step of the epoch to begin with.
        """

    def shares(self, rank: int, workers: int, first: int = 0) -> Iterator[Share]:
        """Yield `rank`'s share of each global batch, epoch after epoch, for ever.

        Args:
            first: Step to begin with; what comes before it is passed over now, not when the first
                share is asked for, so that random states can be set in between.
        """
        per_epoch = self.steps_per_epoch
        if per_epoch:
            return self._endless(rank, workers, first, *divmod(first, per_epoch))
        shares = self._endless(rank, workers, 0, 0, 0)
        for _ in range(first):  # a stream of unknown length: only reading tells
            next(shares)
        return shares

    def _endless(
        self, rank: int, workers: int, step: int, epoch: int, first: int
    ) -> Iterator[Share]:
        for at in count(epoch):
            for share in self.epoch(at, rank, workers, first):
                share.step = step
                step += 1
                yield share
            first = 0

    def peek(self) -> Any:
        """Return a batch of one sample without moving any random state; None for streams."""
        return None
