"""Workers that need the same batch read the same one: orders of samplers, and checks during a run.

**Orders.** A user's own sampler may give orders that depend on what it did before: on the state of
its own generator, or on a count of its epochs. A worker that begins later (a resume, a new engine)
did not see this. So each worker draws the orders of all epochs, from the first epoch on, and keeps
the newest orders. A worker that continues with other workers finds the order of its epoch again.

    epoch 0: generator's first state -> order 0, next state
    epoch 1: next state              -> order 1, ...

The states of the generators are kept here, and the user's generators do not change. So it does not
matter if the user's data set draws from the same generator, or if the cell trains twice.

**Checks.** They show during a run whether the workers have read the same batch.

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

import copy
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.utils.data import (
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ..debugging.marks import MESSAGE, waits_in
from . import group

if TYPE_CHECKING:
    from ..context import RunContext

KEPT = 2
"""How many orders are kept: a worker may have begun an epoch when it repeats a step before it."""

STATELESS = {
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
}
"""PyTorch's samplers: without a generator, their order depends only on the global random state."""


def sampled(sampler: Any, seed: int) -> Callable[[int], NDArray[np.int64]]:
    """Return a function that returns the sampler's order of an epoch."""
    generators = list(_generators(sampler))
    if not generators and (type(sampler) in STATELESS or hasattr(sampler, "set_epoch")):
        return lambda epoch: _drawn(sampler, seed, epoch)
    first = [_state(one) for one in generators]
    states, following = first, 0
    drawn: dict[int, NDArray[np.int64]] = {}

    def indices(epoch: int) -> NDArray[np.int64]:
        nonlocal states, following
        if epoch in drawn:
            return drawn[epoch]
        if epoch < following:
            states, following = first, 0
            drawn.clear()
        for number in range(following, epoch + 1):
            users = [_state(one) for one in generators]
            _set_states(generators, states)
            try:
                drawn[number] = _drawn(sampler, seed, number)
                states, following = [_state(one) for one in generators], number + 1
            finally:
                _set_states(generators, users)
            drawn.pop(number - KEPT, None)
        return drawn[epoch]

    return indices


def _drawn(sampler: Any, seed: int, epoch: int) -> NDArray[np.int64]:
    """Draw an order with global random states that depend only on the seed and the epoch."""
    if hasattr(sampler, "set_epoch"):
        sampler.set_epoch(epoch)
    state = random.getstate(), np.random.get_state()
    mixed = int(np.random.SeedSequence([seed, epoch]).generate_state(1)[0])
    try:
        random.seed(mixed)
        np.random.seed(mixed)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mixed)
            return np.fromiter((int(i) for i in sampler), np.int64)
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])


def _generators(sampler: Any, depth: int = 3) -> Iterator[Any]:
    """Yield the generators of a sampler, and of the samplers that it uses."""
    for value in getattr(sampler, "__dict__", {}).values():
        if isinstance(
            value, (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
        ):
            yield value
        elif isinstance(value, Sampler) and depth:
            yield from _generators(value, depth - 1)


def _state(generator: Any) -> Any:
    if isinstance(generator, np.random.Generator):
        return copy.deepcopy(generator.bit_generator.state)
    for name in ("get_state", "getstate"):
        if hasattr(generator, name):
            return getattr(generator, name)()
    raise TypeError(type(generator))


def _set_states(generators: list[Any], states: list[Any]) -> None:
    for generator, state in zip(generators, states, strict=True):
        if isinstance(generator, np.random.Generator):
            generator.bit_generator.state = state
        elif hasattr(generator, "set_state"):
            generator.set_state(state)
        else:
            generator.setstate(state)


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
