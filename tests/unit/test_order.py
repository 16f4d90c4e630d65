"""The order of samples is made for the global batch and only then divided."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.engine.training.shares import Order, make_order, permutation, share_bounds

sizes = st.integers(1, 200)


@given(samples=st.integers(0, 500), workers=st.integers(1, 17))
def test_shares_cover_a_batch_once_and_differ_by_at_most_one(samples: int, workers: int) -> None:
    bounds = [share_bounds(samples, rank, workers) for rank in range(workers)]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == samples
    assert all(left[1] == right[0] for left, right in pairwise(bounds))
    counts = [stop - start for start, stop in bounds]
    assert max(counts) - min(counts) <= 1


@given(samples=sizes, batch=sizes, workers=st.integers(1, 8), seed=st.integers(0, 99))
def test_no_sample_is_lost_or_doubled(samples: int, batch: int, workers: int, seed: int) -> None:
    order = make_order(samples, batch, seed=seed, shuffle=True)
    seen: list[int] = []
    for indices in order.batches(3):
        for rank in range(workers):
            start, stop = share_bounds(len(indices), rank, workers)
            seen += indices[start:stop].tolist()
    assert sorted(seen) == list(range(samples))


@given(samples=sizes, batch=sizes, seed=st.integers(0, 99))
def test_one_seed_gives_one_global_order_whatever_the_workers(
    samples: int, batch: int, seed: int
) -> None:
    order = make_order(samples, batch, seed=seed, shuffle=True)
    for workers in (2, 3):
        for indices in order.batches(0):
            parts = [
                indices[slice(*share_bounds(len(indices), r, workers))] for r in range(workers)
            ]
            assert np.concatenate(parts).tolist() == indices.tolist()


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = {tuple(permutation(20, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    assert permutation(20, 1, 1).tolist() == permutation(20, 1, 1).tolist()


def test_without_shuffling_the_order_is_the_datas() -> None:
    order = make_order(7, 3, seed=5, shuffle=False)
    assert [batch.tolist() for batch in order.batches(4)] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize(("drop_last", "steps"), [(False, 3), (True, 2)])
def test_drop_last_leaves_the_uneven_batch_out(drop_last: bool, steps: int) -> None:
    order = make_order(7, 3, seed=0, shuffle=True, drop_last=drop_last)
    assert order.steps_per_epoch == steps == len(order.batches(0))


def test_any_function_of_the_epoch_can_give_the_order() -> None:
    order = Order(4, 2, lambda epoch: np.full(4, epoch))
    assert [batch.tolist() for batch in order.batches(2)] == [[2, 2], [2, 2]]


@given(
    weights=st.lists(st.integers(0, 50), min_size=1, max_size=9).filter(any),
    samples=st.integers(0, 500),
)
def test_weighted_shares_cover_a_batch_once(weights: list[int], samples: int) -> None:
    for size in (samples, sum(weights)):
        bounds = [share_bounds(size, rank, weights) for rank in range(len(weights))]
        assert bounds[0][0] == 0
        assert bounds[-1][1] == size
        assert all(left[1] == right[0] for left, right in pairwise(bounds))
    assert [stop - start for start, stop in bounds] == weights
