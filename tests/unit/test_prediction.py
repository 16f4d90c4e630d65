"""Predictions of runs whose truth is known."""

from __future__ import annotations

import json

import numpy as np
import pytest
from predicted_runs import GRADIENTS_BYTES, draw_own, made_run, ring_run

from workbench.errors import PlanError, RunError
from workbench.prediction.predict import Prediction, predict

A, B = 0.004, 1e-8
SIMULATED = ("bandwidth=100MB/s", "latency=4ms")


def true_ring(workers: int, rng: np.random.Generator) -> float:
    """Return the mean step of a ring of so many workers."""
    own = draw_own(rng, 4000, workers).max(axis=1).mean()
    return float(own + 2 * (workers - 1) * (A + B * GRADIENTS_BYTES / workers))


def point(found: Prediction, workers: int) -> tuple[float, float, float]:
    return next(p.step_s for p in found.points if p.workers == workers)


def test_a_simulated_link_is_known_and_the_slowest_of_many_is_drawn() -> None:
    rng = np.random.default_rng(1)
    run = ring_run(rng, A, B, faults=SIMULATED)
    found = predict([run], [2, 4, 16, 64], scaling="weak")
    for workers in (2, 4, 16, 64):
        middle, low, high = point(found, workers)
        truth = true_ring(workers, rng)
        assert low <= truth <= high
        assert middle == pytest.approx(truth, rel=0.06)
        shares = next(p.share for p in found.points if p.workers == workers)
        assert sum(shares) == pytest.approx(1.0)
    json.dumps(found.to_wire(), allow_nan=False)


def test_two_sizes_settle_messages_and_bytes_of_a_link_that_is_not_known() -> None:
    rng = np.random.default_rng(2)
    whole = ring_run(rng, A, B)
    half = ring_run(rng, A, B, size_bytes=GRADIENTS_BYTES / 2, compress="fp16", name="half")
    found = predict([whole, half], 32, scaling="weak")
    middle, low, high = point(found, 32)
    truth = true_ring(32, rng)
    assert low <= truth <= high
    assert high - low < 0.5 * truth
    assert not any("One kind of message" in note for note in found.notes)


def test_one_size_leaves_open_what_a_message_costs_and_says_so() -> None:
    rng = np.random.default_rng(3)
    found = predict([ring_run(rng, A, B)], 32, scaling="weak")
    middle, low, high = point(found, 32)
    assert low <= true_ring(32, rng) <= high
    assert high - low > 0.5 * middle
    assert any("One kind of message" in note for note in found.notes)


def test_a_given_link_takes_the_place_of_the_measured_one() -> None:
    rng = np.random.default_rng(4)
    found = predict([ring_run(rng, A, B)], 8, scaling="weak", link="8Mbit", latency="1ms")
    own = draw_own(rng, 4000, 8).max(axis=1).mean()
    truth = own + 14 * (1e-3 + 1e-6 * GRADIENTS_BYTES / 8)
    assert point(found, 8)[0] == pytest.approx(truth, rel=0.05)
