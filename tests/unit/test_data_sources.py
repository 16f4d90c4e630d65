"""Whatever the user passes becomes shares of global batches."""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest

from workbench.errors import FitError

torch = pytest.importorskip("torch")

from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, TensorDataset  # noqa: E402

from workbench.engine.torch.data import (  # noqa: E402  # noqa: E402  # noqa: E402
    IndexedSource,
    StreamSource,
    TensorSource,
    batch_length,
    make_source,
    map_batch,
    slice_batch,
)

pytestmark = pytest.mark.torch


class Squares(Dataset[Any]):
    def __init__(self, size: int = 10) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"x": index, "y": index * index}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(torch.arange(10))


class Shuffled(IterableDataset[Any]):
    """A stream whose order depends on how often it was read, and on how far."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.passes = 0

    def __iter__(self) -> Any:
        for _ in range(10):
            yield torch.rand(1, generator=self.generator).item()
        self.passes += 1


class Sized(Shuffled):
    def __len__(self) -> int:
        return 10


def samples(source: Any, rank: int, workers: int, epoch: int = 0) -> list[int]:
    found: list[int] = []
    for share in source.epoch(epoch, rank, workers):
        data = share.data
        column = (
            data["x"]
            if isinstance(data, dict)
            else data[0]
            if isinstance(data, (tuple, list))
            else data
        )
        found += column.reshape(-1).tolist()[: share.samples]
    return found


def sources() -> dict[str, Any]:
    x = torch.arange(10)
    return {
        "tensors": ((x, x), TensorSource),
        "arrays": ((np.arange(10), np.arange(10)), TensorSource),
        "tensor set": (TensorDataset(x, x), TensorSource),
        "map style": (Squares(), IndexedSource),
        "list": ([(torch.tensor(i), i) for i in range(10)], IndexedSource),
        "loader": (DataLoader(TensorDataset(x, x), batch_size=4, shuffle=True), TensorSource),
        "dict loader": (DataLoader(Squares(), batch_size=4), IndexedSource),
        "stream": (Stream(), StreamSource),
        "stream loader": (DataLoader(Stream(), batch_size=4), StreamSource),
    }


@pytest.mark.parametrize("kind", list(sources()))
@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_workers_together_see_each_sample_once(kind: str, workers: int) -> None:
    data, expected = sources()[kind]
    source = make_source(data, 4, seed=1, shuffle=True)
    assert type(source) is expected
    seen = [sample for rank in range(workers) for sample in samples(source, rank, workers, 1)]
    assert sorted(seen) == list(range(10))


@pytest.mark.parametrize("kind", list(sources()))
def test_a_worker_without_a_sample_holds_one_that_does_not_count(kind: str) -> None:
    source = make_source(sources()[kind][0], 4, seed=1, shuffle=True)
    last = list(source.epoch(0, 0, 3))[-1]
    assert (last.samples, last.global_samples) == (0, 2)
    assert batch_length(last.data) == 1


def test_shares_go_on_over_epochs_and_count_steps() -> None:
    source = make_source((torch.arange(10),) * 2, 4, seed=0, shuffle=True)
    shares = list(islice(source.shares(0, 1), 7))
    assert [share.step for share in shares] == list(range(7))
    assert [share.epoch for share in shares] == [0, 0, 0, 1, 1, 1, 2]
    assert [share.global_samples for share in shares] == [4, 4, 2, 4, 4, 2, 4]


def test_a_loaders_batch_collate_and_drop_last_are_taken() -> None:
    loader = DataLoader(Squares(), batch_size=4, drop_last=True, collate_fn=lambda rows: rows)
    source = make_source(loader, None, seed=0, shuffle=True)
    assert (source.batch_size, source.steps_per_epoch) == (4, 2)
    assert next(source.epoch(0, 0, 1)).data == [Squares()[i] for i in range(4)]


@pytest.mark.parametrize("parts", [1, 2])
def test_a_tensor_datasets_batch_is_what_its_loader_gives(parts: int) -> None:
    dataset = TensorDataset(*[torch.arange(6.0)] * parts)
    loader = DataLoader(dataset, batch_size=4)
    share, _ = make_source(loader, None, seed=0, shuffle=True).epoch(0, 0, 1)
    assert type(share.data) is type(next(iter(loader)))
    assert len(share.data) == parts


def test_a_custom_sampler_gives_all_workers_one_order_and_leaves_the_seeds_alone() -> None:
    weights = torch.utils.data.WeightedRandomSampler([1.0] * 10, 12)
    source = make_source(
        DataLoader(Squares(), batch_size=4, sampler=weights), None, seed=3, shuffle=False
    )
    before = torch.random.get_rng_state()
    first = samples(source, 0, 1)
    torch.rand(5)
    again = samples(source, 0, 2), samples(source, 1, 2)
    assert len(first) == 12
    assert sorted(again[0] + again[1]) == sorted(first)
    torch.random.set_rng_state(before)
    samples(source, 0, 1)
    assert (torch.random.get_rng_state() == before).all()


def test_peeking_moves_no_random_state() -> None:
    class Noisy(Squares):
        def __getitem__(self, index: int) -> Any:
            return torch.rand(1), np.random.rand()

    source = make_source(Noisy(), 4, seed=0, shuffle=True)
    state, other = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    assert len(source.peek()) == 2
    assert (torch.random.get_rng_state() == state).all()
    assert (np.random.get_state()[1] == other).all()


def test_a_set_that_takes_many_is_asked_once_per_batch() -> None:
    from workbench import data as workbench_data

    made = workbench_data.synthetic(50, shape=(3,))
    source = make_source(made, 10, seed=0, shuffle=False)
    share = next(source.epoch(0, 1, 2))
    assert share.data[0].shape == (5, 3)
    assert (share.data[0][0] == made[5][0]).all()


@pytest.mark.parametrize(
    ("data", "batch", "words"),
    [
        (TensorDataset(torch.empty(0)), 4, "WB-FIT-054"),
        ((torch.ones(3), torch.ones(4)), 2, "WB-FIT-050"),
        (torch.ones(3), 2, "WB-FIT-055"),
        ("digits", 2, "WB-FIT-055"),
        (Squares(), None, "WB-FIT-049"),
        (DataLoader(Squares(), batch_size=None), None, "WB-FIT-051"),
        (DataLoader(Squares(3), batch_size=4, drop_last=True), None, "WB-FIT-053"),
    ],
)
def test_what_is_no_data_is_refused(data: Any, batch: int | None, words: str) -> None:
    with pytest.raises(FitError, match=words):
        make_source(data, batch, seed=0, shuffle=True)


def test_a_batch_sampler_of_ones_own_is_refused() -> None:
    class Own(BatchSampler):
        """Some other way to make batches."""

    loader = DataLoader(Squares(), batch_sampler=Own(range(10), 4, False))
    with pytest.raises(FitError, match="WB-FIT-052"):
        make_source(loader, None, seed=0, shuffle=True)


def test_an_empty_stream_says_so() -> None:
    class Nothing(IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(())

    source = make_source(Nothing(), 4, seed=0, shuffle=True)
    with pytest.raises(FitError, match="WB-FIT-048"):
        next(source.shares(0, 1))


def read(shares: Any, count: int) -> list[list[float]]:
    return [share.data.tolist() for share in islice(shares, count)]


@pytest.mark.parametrize("stream", [Shuffled, Sized])
@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6, 8])
def test_a_stream_that_is_read_from_a_later_step_has_the_same_order(
    stream: type[Shuffled], first: int
) -> None:
    whole = read(make_source(stream(), 4, seed=0, shuffle=False).shares(0, 1), 10)
    later = make_source(stream(), 4, seed=0, shuffle=False).shares(0, 1, first)
    assert read(later, 10 - first) == whole[first:]


def test_nested_batches_are_cut_and_mapped_whole() -> None:
    batch = {"ids": torch.arange(6), "pair": (torch.ones(6, 2), [torch.zeros(6)]), "scale": 3}
    part = slice_batch(batch, 2, 4, 6)
    assert part["ids"].tolist() == [2, 3]
    assert part["pair"][0].shape == (2, 2)
    assert part["pair"][1][0].shape == (2,)
    assert part["scale"] == 3
    assert map_batch(lambda t: t + 1, batch)["ids"].tolist() == [1, 2, 3, 4, 5, 6]
