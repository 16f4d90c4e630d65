"""Checks during a run that workers which need the same batch have read the same batch.

Under model and tensor parallelism several workers read the same samples: the first stage of a
pipeline uses x, and the last stage uses y. A stream has no index, so under every strategy each
worker reads the whole stream and keeps its part. If the workers' random states differ, x and y no
longer belong together, or samples are used twice and others never. The loss curve then looks fine.

    worker r:   digest of its batch -> compare_set(place, digest and r) in the run's store
    store:      keeps the first worker's value, and returns it to every worker

So no worker waits for another worker, and workers at their own pace can be compared too. The worker
that comes later sees the difference and fails, and this ends the run for all.

When: at the places 0, 1, 2, 4, 8, .. and at each multiple of `FARTHEST`. Random states that differ
give other samples at once, so few comparisons are enough. A comparison takes about 0.1 ms, and
0.4 ms for each MB of the batch.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..debugging.marks import MESSAGE, waits_in
from . import group

if TYPE_CHECKING:
    from ..context import RunContext

FARTHEST = 512
"""The highest number of places between two comparisons."""


class SameBatch:
    """Compares the batches of workers that must read the same batch."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._own_store: Any = None

    def other(self, place: int, tensors: Iterable[torch.Tensor], *, about: str) -> int | None:
        """Return the rank of a worker that read other tensors at this place; None if all agree.

        Args:
            place: The number of the batch. Most places are not compared.
            about: What is compared; the same text on the workers that must agree, and on no others.
        """
        spec, membership = self._context.spec, self._context.membership
        if spec.world_size == 1 or (place & (place - 1) and place % FARTHEST):
            return None
        # A step that is repeated with other workers may draw other numbers.
        key = f"same batch/{spec.prefix}{membership.generation}/{about}/{place}"
        digest = str(_digest(tensors))
        first, rank = self._first(key, f"{digest} {spec.rank}").split()
        return None if first == digest else int(rank)

    @waits_in(MESSAGE)
    def _first(self, key: str, value: str) -> str:
        """Return the value of the worker that was first at this key."""
        if group.has_group():
            found: Any = dist  # torch has this function, but does not declare it as exported
            store = found.distributed_c10d._get_default_store()
        else:
            store = self._own_store = self._own_store or group.open_store(self._context.spec)
        kept: bytes = store.compare_set(key, "", value)
        return kept.decode()


def _digest(tensors: Iterable[torch.Tensor]) -> int:
    """Return a number that depends on shapes, dtypes and every byte, and on their order."""
    number = 0
    for tensor in tensors:
        dense = tensor.detach().cpu().to_dense() if tensor.is_sparse else tensor.detach().cpu()
        number = zlib.crc32(f"{tuple(dense.shape)} {dense.dtype}".encode(), number)
        if dense.numel():
            words = dense.reshape(-1).contiguous().view(torch.uint8)
            number = zlib.crc32(words.numpy().data, number)
    return number
