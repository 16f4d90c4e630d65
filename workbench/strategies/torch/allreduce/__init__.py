"""All-reduce: every worker ends with the sum of all workers' tensors.

Each algorithm is one function that reads like its page in a textbook, written in sends and receives
(`links.py`). `backend` is the all-reduce of the process group (gloo, NCCL). `auto.py` measures
which is the fastest here. Each algorithm gives the sum, with equal bits on every worker.

    links        how do workers send to each other
    algorithms   ring, hierarchical, reduce to one, recursive doubling
    auto         which of them is the fastest here
    compression  how are fewer bytes sent
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ....engine.debugging.marks import ALL_REDUCE, waits_in
from . import algorithms

if TYPE_CHECKING:
    from .links import Links

BACKEND = "backend"


@waits_in(ALL_REDUCE)
def _backend(flat: torch.Tensor, links: Links) -> None:
    """Use the process group's own all-reduce; gloo and NCCL send as much as a ring does."""
    dist.all_reduce(flat, group=links.group)
    links.count(round(2 * (links.size - 1) * flat.numel() * flat.element_size() / links.size))


ALGORITHMS: dict[str, Callable[[torch.Tensor, Links], None]] = {
    BACKEND: _backend,
    "ring": algorithms.ring,
    "hierarchical": algorithms.hierarchical,
    "reduce_to_one": algorithms.reduce_to_one,
    "recursive_doubling": algorithms.recursive_doubling,
}


class AllReduce:
    """One algorithm over one group of workers.

    Args:
        name: A key of ALGORITHMS.
    """

    def __init__(self, name: str, links: Links) -> None:
        self.name, self.links = name, links
        self._algorithm = ALGORITHMS[name]

    @waits_in(ALL_REDUCE)
    def __call__(self, flat: torch.Tensor) -> None:
        """Replace a contiguous `flat`, shape (numbers,), by its sum over the workers.

        Raises:
            FitError: The workers' tensors differ in size; nothing was sent.
        """
        links = self.links
        if links.size == 1 or flat.numel() == 0:
            return
        links.agree(flat)
        if self.name == BACKEND:
            self._algorithm(flat, links)
            return
        staged = links.staged(flat)
        self._algorithm(staged, links)
        if staged is not flat:
            flat.copy_(staged)

    def mean(self, flat: torch.Tensor) -> None:
        """Replace `flat` by its mean over the workers."""
        flat /= self.links.size
        self(flat)
