"""The orders of a user's own sampler depend on the epoch, and on nothing that was drawn before."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import (  # noqa: E402
    BatchSampler,
    DataLoader,
    RandomSampler,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from workbench.engine.torch.data import make_source  # noqa: E402
from workbench.engine.torch.same_batch import sampled  # noqa: E402

pytestmark = pytest.mark.torch

COUNT = 20


class Own(Sampler[int]):
    """Orders that come from a generator of NumPy or of Python."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator

    def __iter__(self) -> Iterator[int]:
        places = list(range(COUNT))
        self.generator.shuffle(places)
        return iter(places)

    def __len__(self) -> int:
        return COUNT


class Counting(Own):
    """Orders that come from a count of its epochs."""

    def __init__(self) -> None:
        self.epochs = 0

    def __iter__(self) -> Iterator[int]:
        self.epochs += 1
        return iter(np.random.default_rng(self.epochs).permutation(COUNT).tolist())


class Around(Own):
    """Another sampler's order."""

    def __init__(self, sampler: Any) -> None:
        self.inner = sampler

    def __iter__(self) -> Iterator[int]:
        return iter(self.inner)


def seeded() -> torch.Generator:
    return torch.Generator().manual_seed(3)


SAMPLERS: dict[str, Callable[[], Any]] = {
    "subset": lambda: SubsetRandomSampler(range(COUNT), generator=seeded()),
    "weighted": lambda: WeightedRandomSampler([1.0] * COUNT, COUNT, generator=seeded()),
    "with replacement": lambda: RandomSampler(
        range(COUNT), replacement=True, num_samples=COUNT, generator=seeded()
    ),
    "NumPy": lambda: Own(np.random.default_rng(3)),
    "older NumPy": lambda: Own(np.random.RandomState(3)),
    "Python": lambda: Own(random.Random(3)),
    "around another": lambda: Around(SubsetRandomSampler(range(COUNT), generator=seeded())),
    "counting": Counting,
}


def orders(sampler: Any, *epochs: int) -> list[list[int]]:
    indices = sampled(sampler, 5)
    return [indices(epoch).tolist() for epoch in epochs]


@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_who_begins_later_has_the_same_orders(kind: str) -> None:
    make = SAMPLERS[kind]
    whole = orders(make(), 0, 1, 2, 3, 4)
    assert len({tuple(order) for order in whole}) == 5
    assert orders(make(), 3, 4) == whole[3:]


@pytest.mark.parametrize("kind", list(SAMPLERS))
def test_who_asks_again_gets_the_same_order(kind: str) -> None:
    make = SAMPLERS[kind]
    whole = orders(make(), 0, 1, 2, 3)
    assert orders(make(), 0, 0, 1, 2, 2, 1, 3) == [whole[at] for at in (0, 0, 1, 2, 2, 1, 3)]


@pytest.mark.parametrize("kind", [name for name in SAMPLERS if name != "counting"])
def test_an_epoch_of_long_ago_is_drawn_again(kind: str) -> None:
    make = SAMPLERS[kind]
    whole = orders(make(), 0, 1, 2, 3, 4, 5)
    assert orders(make(), 5, 1, 5, 0) == [whole[at] for at in (5, 1, 5, 0)]


def test_the_first_order_is_the_one_of_plain_pytorch() -> None:
    plain = SAMPLERS["subset"]()
    assert orders(SAMPLERS["subset"](), 0, 1) == [list(plain), list(plain)]


def test_a_generator_that_also_draws_elsewhere_changes_no_order() -> None:
    whole = orders(SAMPLERS["subset"](), 0, 1, 2)
    sampler = SAMPLERS["subset"]()
    indices, found = sampled(sampler, 5), []
    for epoch in range(3):
        found.append(indices(epoch).tolist())
        torch.rand(7 + epoch, generator=sampler.generator)
    assert found == whole


def test_a_second_training_begins_with_the_first_order_too() -> None:
    sampler = SAMPLERS["subset"]()
    assert orders(sampler, 0, 1, 2) == orders(sampler, 0, 1, 2)


def test_a_plain_sampler_is_asked_for_the_wanted_epoch_only() -> None:
    asked: list[int] = []

    class Epochs(Around):
        def set_epoch(self, epoch: int) -> None:
            asked.append(epoch)

    for sampler in (SubsetRandomSampler(range(COUNT)), WeightedRandomSampler([1.0] * COUNT, COUNT)):
        assert orders(sampler, 4, 2, 4) == orders(copy.copy(sampler), 4, 2, 4)
        assert orders(sampler, 4)[0] != orders(sampler, 3)[0]
    orders(Epochs(range(COUNT)), 4, 2, 4)
    assert asked == [4, 2, 4]


def test_a_sampler_inside_a_batch_sampler_is_used() -> None:
    data = [(torch.tensor(float(i)), i) for i in range(COUNT)]
    batches = BatchSampler(SubsetRandomSampler(range(7, 14), generator=seeded()), 4, drop_last=True)
    source = make_source(DataLoader(data, batch_sampler=batches), None, seed=5, shuffle=False)
    wanted = orders(SubsetRandomSampler(range(7, 14), generator=seeded()), 0, 1)
    assert source.steps_per_epoch == 1
    for epoch, order in enumerate(wanted):
        (share,) = source.epoch(epoch, 0, 1)
        assert share.data[1].tolist() == order[:4]
