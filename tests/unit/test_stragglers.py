"""Who is slow for long, and which shares are made of it: on runs that are only simulated."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.execution.workers.stragglers import (
    MOST,
    Rule,
    Watch,
    best_shares,
    better_shares,
    equal_shares,
    median_of_others,
)
from workbench.shared.record import RECORD

RULE = Rule()


@dataclass
class World:
    """Workers that take each step together, in a made-up time, under the shares they are given.

    Attributes:
        sample_s: What a sample takes each worker.
        fixed_s: What a step takes each worker besides.
        jitter_s: Upper bound of what it takes more, at random.
    """

    sample_s: list[float]
    fixed_s: list[float] = field(default_factory=list)
    jitter_s: float = 0.0
    batch: int = 24
    at_s: float = 100.0
    step: int = 0
    changes: list[tuple[int, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.look_s = self.at_s
        self.random = np.random.default_rng(5)
        self.shares = equal_shares(self.batch, len(self.sample_s))
        self.watch = Watch(range(len(self.sample_s)), RULE)

    def rows(self, batch: int | None = None) -> np.ndarray:
        workers = len(self.sample_s)
        rows = np.zeros(workers, RECORD)
        shares = np.array(equal_shares(batch, workers) if batch else self.shares)
        own = shares * self.sample_s + np.array(self.fixed_s or [0.0] * workers)
        own += self.random.uniform(0, self.jitter_s, workers)
        rows["step"], rows["rank"], rows["samples"] = self.step, np.arange(workers), shares
        rows["data_wait_s"], rows["compute_s"] = 0.1 * own, 0.9 * own
        rows["start_s"], rows["end_s"] = self.at_s, self.at_s + own.max()
        self.at_s, self.step = self.at_s + own.max(), self.step + 1
        return rows

    def train(self, seconds: float) -> float:
        """Go on for a while, with other shares as soon as some are better; return samples/s."""
        began, first = self.at_s, self.step
        while self.at_s < began + seconds:
            self.watch.take(self.rows())
            pace = self.watch.pace() if self.at_s > self.look_s else None
            self.look_s += 0.25 * (self.at_s > self.look_s)
            if pace is not None and (shares := better_shares(pace, RULE)) is not None:
                self.shares = shares
                self.changes.append(shares)
                self.watch = Watch(range(len(shares)), RULE, self.step)
        return (self.step - first) * self.batch / (self.at_s - began)


def test_a_worker_of_half_the_speed_has_half_the_work() -> None:
    world = World([0.001, 0.002, 0.001])
    world.train(4)
    assert world.changes == [(10, 5, 9)]
    assert world.train(20) == pytest.approx(2500, rel=0.05)  # the ideal; 1500 with equal shares
    assert len(world.changes) == 1


def test_nothing_is_changed_before_it_has_been_so_for_long() -> None:
    world = World([0.001, 0.002, 0.001])
    world.train(RULE.seconds - 0.1)
    assert world.changes == []
    steps = World([0.1, 0.2, 0.1])  # few steps take long
    for _ in range(RULE.steps - 1):
        steps.watch.take(steps.rows())
    assert steps.watch.pace() is None


@pytest.mark.parametrize("jitter_s", [0.005, 0.02, 0.2])
@pytest.mark.parametrize("workers", [2, 3, 8])
def test_random_delays_change_nothing(workers: int, jitter_s: float) -> None:
    world = World([0.0005] * workers, jitter_s=jitter_s)
    world.train(200)
    assert world.changes == []


def test_a_straggler_among_random_delays_is_found_and_nothing_flaps() -> None:
    world = World([0.001, 0.004, 0.001], jitter_s=0.005)
    world.train(300)
    assert 1 <= len(world.changes) <= 2
    assert world.changes[-1][1] < 5


def test_shares_are_equal_again_when_it_has_recovered() -> None:
    world = World([0.001, 0.005, 0.001], fixed_s=[0.002] * 3)
    world.train(20)
    assert world.shares[1] <= 4
    world.sample_s[1] = 0.001
    world.train(30)
    assert world.shares == (8, 8, 8)
    changes = len(world.changes)
    world.train(60)
    assert len(world.changes) == changes


def test_another_worker_may_become_the_slow_one() -> None:
    world = World([0.001, 0.002, 0.001])
    world.train(10)
    world.sample_s = [0.002, 0.001, 0.001]
    world.train(20)
    assert world.shares[0] == 5
    assert world.shares[1] > 8


def test_a_fixed_delay_sheds_as_long_as_it_helps() -> None:
    world = World([0.005] * 3, fixed_s=[0.0, 0.04, 0.0])
    before = world.train(2)
    world.train(30)
    assert world.shares[1] < 8
    assert world.train(10) > 1.2 * before
    hopeless = World([0.001] * 3, fixed_s=[0.0, 0.5, 0.0])
    hopeless.train(60)
    assert hopeless.shares[1] == 1  # never less
    changes = len(hopeless.changes)
    hopeless.train(60)
    assert len(hopeless.changes) == changes


def test_nobody_is_slow_where_all_are() -> None:
    world = World([0.001] * 3)
    world.train(2)
    world.sample_s = [0.01] * 3
    world.train(60)
    assert world.changes == []


def test_steps_so_short_that_nobody_cares_are_left_alone() -> None:
    world = World([1e-5, 5e-5, 1e-5])
    world.train(5)
    assert world.changes == []


def test_the_smaller_batch_at_an_epochs_end_says_nothing() -> None:
    world = World([0.001] * 3)
    for step in range(600):
        world.watch.take(world.rows(4 if step % 5 == 4 else None))  # shares of 1, 1 and 2
    pace = world.watch.pace()
    assert pace is not None
    assert pace.samples == (8, 8, 8)
    assert better_shares(pace, RULE) is None


def test_a_batch_that_does_not_divide_makes_nobody_slow() -> None:
    world = World([0.05] * 3, batch=4)
    world.train(60)
    assert world.changes == []


def test_rows_come_in_any_order_and_some_never() -> None:
    world = World([0.01, 0.02])
    rows = np.concatenate([world.rows() for _ in range(150)])
    lost = rows[~((rows["rank"] == 1) & (rows["step"] % 10 == 0))]
    for rank in (1, 0):
        for first in range(0, 150, 10):
            batch = lost[(lost["step"] // 10 == first // 10) & (lost["rank"] == rank)]
            world.watch.take(batch)
    pace = world.watch.pace()
    assert pace is not None
    assert pace.slow == (False, True)
    assert pace.ratio[1] == pytest.approx(2, rel=1e-3)
    assert pace.seconds >= RULE.seconds


@given(st.lists(st.integers(0, 9), min_size=2, max_size=9))
def test_the_median_of_the_others_is_that(values: list[int]) -> None:
    found = median_of_others(np.array([values], float))[0]
    others = [np.median([*values[:place], *values[place + 1 :]]) for place in range(len(values))]
    assert found.tolist() == others


@given(
    st.lists(st.floats(1e-4, 1e-1), min_size=2, max_size=9),
    st.integers(0, 500),
)
def test_shares_are_a_batch_and_no_worker_could_give_one_sample_away_for_a_gain(
    cost_s: list[float], more: int
) -> None:
    workers = len(cost_s)
    batch = workers + more
    shares = best_shares(cost_s, batch)
    most = max(1, int(MOST * batch / workers))
    assert sum(shares) == batch
    assert all(1 <= share <= most for share in shares)
    times = np.array(cost_s) * shares
    slowest = int(np.argmax(times))
    if shares[slowest] > 1:
        for other in range(workers):
            if other != slowest and shares[other] < most:
                assert (shares[other] + 1) * cost_s[other] >= times[slowest] * (1 - 1e-9)
