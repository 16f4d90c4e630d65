"""Balancing against brute force; schedules' rules; forms of layers."""

from __future__ import annotations

import itertools
import random

import pytest

pytest.importorskip("torch")

from workbench.errors import FitError
from workbench.strategies.torch.split.balance import balance, stage_times
from workbench.strategies.torch.split.schedules import (
    SCHEDULES,
    chosen_microbatches,
    stages_per_worker,
)

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("seed", range(20))
def test_the_balance_is_the_best_there_is(seed: int) -> None:
    draw = random.Random(seed)
    layers, stages = draw.randint(1, 9), draw.randint(1, 4)
    stages = min(stages, layers)
    layer_s = [draw.random() ** 3 for _ in range(layers)]
    cut_s = [draw.random() * 0.3 for _ in range(layers - 1)]
    bounds = balance(layer_s, cut_s, stages)
    every = [[0, *cuts, layers] for cuts in itertools.combinations(range(1, layers), stages - 1)]
    best = min(max(stage_times(layer_s, cut_s, one)) for one in every)
    assert bounds in every
    assert max(stage_times(layer_s, cut_s, bounds)) == pytest.approx(best, rel=1e-12)


def test_cuts_that_move_little_are_preferred() -> None:
    assert balance([1, 0, 0, 1], [0.5, 0.1, 0.5], 2) == [0, 2, 4]


def test_more_stages_than_layers_cannot_be() -> None:
    with pytest.raises(ValueError, match="2 layers cannot make 3 stages"):
        balance([1.0, 1.0], [0.0], 3)


def test_the_default_is_two_microbatches_per_worker_within_the_batch() -> None:
    assert chosen_microbatches("1f1b", None, 4, 64) == 8
    assert chosen_microbatches("gpipe", None, 4, 5) == 5
    assert chosen_microbatches("naive", None, 4, 64) == 1
    with pytest.raises(FitError, match="at least one microbatch per worker"):
        chosen_microbatches("1f1b", 3, 4, 64)
    with pytest.raises(FitError, match="more microbatches than samples"):
        chosen_microbatches("1f1b", None, 4, 3)


def test_stages_per_worker_belong_to_looped_schedules() -> None:
    assert [stages_per_worker(name, None) for name in SCHEDULES] == [1, 1, 1, 2, 1]
    assert stages_per_worker("interleaved", 4) == 4
    with pytest.raises(FitError, match="one stage per worker"):
        stages_per_worker("gpipe", 2)


def test_the_ideal_bubbles_are_those_of_the_papers() -> None:
    ideal = {name: kind.ideal(4, 8, 2 if kind.looped else 1) for name, kind in SCHEDULES.items()}
    assert ideal["gpipe"] == ideal["1f1b"] == pytest.approx(3 / 11)
    assert ideal["interleaved"] == pytest.approx(3 / 19)
    assert SCHEDULES["naive"].ideal(4, 1, 1) == pytest.approx(3 / 4)
    assert SCHEDULES["zero_bubble"].ideal(4, 8, 1) == pytest.approx(1 / 9)
