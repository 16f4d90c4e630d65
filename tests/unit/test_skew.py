from __future__ import annotations

import numpy as np
import pytest

from workbench.engine.training.shares import (
    dirichlet_shards,
    make_order,
    share_bounds,
    skewed_order,
)
from workbench.errors import FitError

LABELS = np.arange(400) % 10


def spread(shards: list[np.ndarray]) -> float:
    """Return how far the workers' mixtures of classes are from the whole's, 0 to 2."""
    shares = [np.bincount(LABELS[shard], minlength=10) / len(shard) for shard in shards]
    return float(np.mean([abs(share - 0.1).sum() for share in shares]))


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
def test_shards_are_all_samples_each_once(workers: int) -> None:
    shards = dirichlet_shards(LABELS, workers, 0.3, seed=4)
    assert len(shards) == workers
    assert sorted(np.concatenate(shards).tolist()) == list(range(400))


def test_the_same_seed_gives_the_same_shards() -> None:
    first, again, other = (dirichlet_shards(LABELS, 3, 0.3, seed) for seed in (4, 4, 5))
    assert all((a == b).all() for a, b in zip(first, again, strict=True))
    assert any(len(a) != len(b) or (a != b).any() for a, b in zip(first, other, strict=True))


def test_a_small_alpha_is_more_uneven() -> None:
    distances = [
        np.mean([spread(dirichlet_shards(LABELS, 4, alpha, seed)) for seed in range(5)])
        for alpha in (0.1, 1.0, 1000.0)
    ]
    assert distances[0] > 1.5 * distances[1] > 3 * distances[2]


def test_a_worker_without_a_sample_is_refused() -> None:
    with pytest.raises(FitError, match="WB-FIT-030"):
        dirichlet_shards(np.zeros(3, int), 4, 0.1, seed=0)


def test_each_workers_share_of_every_batch_is_from_its_shard() -> None:
    order = make_order(400, 30, seed=1, shuffle=True)
    shards = dirichlet_shards(LABELS, 3, 0.3, seed=1)
    dealt = skewed_order(order, shards, seed=1)
    assert dealt.steps_per_epoch == order.steps_per_epoch
    for batch in dealt.batches(0):
        for rank, shard in enumerate(shards):
            start, stop = share_bounds(len(batch), rank, 3)
            assert np.isin(batch[start:stop], shard).all()
    assert (dealt.epoch(1) == dealt.epoch(1)).all()
    assert (dealt.epoch(0) != dealt.epoch(1)).any()
