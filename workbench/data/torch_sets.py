"""The data sets as PyTorch data sets; loaded only when one is requested."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, TensorDataset

from . import encode

if TYPE_CHECKING:
    from .generated import Pair, Payments, Ratings, Synthetic, Tissue


class ArraySet(TensorDataset):
    """Pairs (x, y) held in memory; a batch is read with one index operation.

    Attributes:
        x: All samples, shape (samples, ...).
        y: All targets.
    """

    def __init__(self, pair: Pair) -> None:
        super().__init__(*(torch.from_numpy(part) for part in pair))
        self.x, self.y = self.tensors


class TextSet(ArraySet):
    """Blocks of text with their vocabulary."""

    def __init__(self, pair: Pair, vocabulary: str) -> None:
        super().__init__(pair)
        self.vocabulary = vocabulary

    def encode(self, text: str) -> torch.Tensor:
        """Return a text as numbers, shape (len(text),)."""
        return torch.from_numpy(encode(text))

    def decode(self, numbers: Iterable[Any]) -> str:
        """Return the text that the numbers encode."""
        return "".join(self.vocabulary[int(number)] for number in numbers)


class SyntheticSet(Dataset[Any]):
    """Samples that are computed when they are requested."""

    def __init__(self, made: Synthetic | Ratings | Tissue | Payments) -> None:
        self._made = made

    def __len__(self) -> int:
        return self._made.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        x, y = self.take(np.array([index % len(self)]))
        return x[0], y[0]

    def take(self, places: NDArray[np.int64]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the samples at `places` (n,) as one batch."""
        x, y = self._made.take(places)
        return torch.from_numpy(x), torch.from_numpy(y)
