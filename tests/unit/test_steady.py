"""Warm-up is found from the data, and a rate says how far it can be believed."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from history_rows import make_history, make_rows

from workbench.history.analysis.comparison import compare
from workbench.history.analysis.steady import interval, rate_of, warm_up_of
from workbench.history.analysis.summary import RunSummary, summarise

MEASURED = Path(__file__).parents[2] / "docs/measured/waits.npz"


def noisy(steps: int, step_s: float, *, seed: int = 0, spread: float = 0.1) -> np.ndarray:
    return step_s * np.random.default_rng(seed).lognormal(0.0, spread, steps)


def run_of(name: str, step_s: np.ndarray, *, ranks: int = 1, seed: int = 0) -> RunSummary:
    """A run whose steps take so long, all of it compute but 0.1 ms."""
    rows = make_rows(len(step_s), ranks, samples=64 // ranks)
    ends = step_s.cumsum()
    rows["end_s"] = 100 + ends[:, None]
    rows["start_s"] = 100 + (ends - step_s)[:, None]
    rows["compute_s"], rows["data_wait_s"] = step_s[:, None] - 1e-4, 0.0
    rows["ready_s"] = rows["end_s"] - 1e-4
    rows["exposed_s"] = 0.0
    meta = {"name": name, "strategy": name, "state": "finished", "recipe": "a", "seed": seed,
            "batch_size": 64}  # fmt: skip
    return summarise(make_history(rows), meta)


@pytest.mark.parametrize("count", [20, 25, 60, 300])
@pytest.mark.parametrize("first", [1, 3])
def test_slow_first_steps_are_warm_up_and_later_ones_are_not(count: int, first: int) -> None:
    step_s = noisy(count, 0.001, spread=0.05)
    step_s[:first] = 0.22
    step_s[count * 2 // 3] = 0.05  # one long step in mid-run is no warm-up
    assert first <= warm_up_of(step_s) <= max(first + 2, 5)


def test_steps_that_are_alike_have_no_warm_up() -> None:
    assert warm_up_of(np.full(40, 0.01)) == 0
    cut = [warm_up_of(noisy(100, 0.01, seed=seed)) for seed in range(100)]
    assert np.mean(np.array(cut) == 0) > 0.8


def test_a_run_that_gets_slower_later_has_no_warm_up() -> None:
    step_s = noisy(60, 0.001)
    step_s[10:] += 0.05
    assert warm_up_of(step_s) == 0


def test_the_first_step_does_not_turn_a_comparison_round() -> None:
    """One worker makes a step in 0.55 ms, two take 0.96: but his first one took 0.22 s."""
    alone, together = noisy(25, 0.00055, spread=0.05), noisy(25, 0.00096, seed=1, spread=0.05)
    alone[0], together[0] = 0.22, 0.16
    compared = compare([run_of("one_device", alone), run_of("mirrored", together, ranks=2)])
    one, two = compared.rows
    assert two.all_per_s > one.all_per_s  # with all steps it is upside down
    assert two.relative == pytest.approx(0.57, abs=0.05)
    assert two.relative_low < two.relative < two.relative_high < 1
    assert re.match(r"one_device is 1\.[78] times .*mirrored", compared.verdict)
    assert one.warm_up >= 1
    assert one.step_s == pytest.approx(0.00055, rel=0.1)
    assert "1 step of one_device" in compared.rates


def test_where_intervals_overlap_no_difference_is_told() -> None:
    for seed in range(20):
        pair = [noisy(25, 0.01, seed=2 * seed + i, spread=0.4) for i in (0, 1)]
        verdict = compare([run_of("a", pair[0]), run_of("b", pair[1])]).verdict
        assert " times " not in verdict
        assert "not certain" in verdict


def test_a_difference_beyond_the_intervals_is_told() -> None:
    pair = [noisy(60, step_s, seed=i) for i, step_s in enumerate((0.010, 0.012))]
    verdict = compare([run_of("a", pair[0]), run_of("b", pair[1])]).verdict
    assert verdict.startswith("a is 1.2 times ")


def test_the_interval_holds_the_true_rate_in_about_95_of_100_runs() -> None:
    """Neighbouring steps are alike: each is half of the one before."""
    held = []
    for seed in range(300):
        rng = np.random.default_rng(seed)
        noise = rng.normal(0, 0.1, 120)
        for i in range(1, 120):
            noise[i] += 0.5 * noise[i - 1]
        step_s = 0.01 * (1 + noise)
        low, high = interval([np.full(120, 64.0)], [step_s])
        held.append(low <= 6400 <= high)
    assert 0.88 <= np.mean(held) <= 0.99


def test_the_same_steps_give_the_same_interval() -> None:
    step_s = noisy(40, 0.01)
    given = [np.full(40, 8.0)], [step_s]
    assert interval(*given) == interval(*given)


def test_too_few_steps_have_no_interval() -> None:
    assert np.isnan(interval([np.full(4, 8.0)], [np.full(4, 0.01)])).all()
    rate = rate_of(make_history(make_rows(4, 2)))
    assert rate is not None
    assert np.isnan(rate.low)
    assert rate_of(make_history(make_rows(0, 2))) is None


def test_a_worker_on_its_own_that_ended_long_before_another_adds_no_rate_of_its_beginning() -> None:
    rows = make_rows(60, 2, compute_s=0.010)
    rows["end_s"][:, 1] += 0.016  # half as fast
    rate = rate_of(make_history(rows, joined=False))
    assert rate is not None
    assert rate.mean == pytest.approx(2 * 60 * 8 / (60 * 0.032), rel=1e-6)
    assert rate.low <= rate.mean <= rate.high


def test_a_fast_worker_that_ends_in_the_slow_ones_warm_up_counts_all_the_same() -> None:
    rows = make_rows(60, 2, compute_s=0.002)
    rows["end_s"][:, 1] += 0.040  # 50 ms
    rows["end_s"][:15, 1] += 0.004
    spent_s = float((rows["end_s"] - rows["start_s"])[:, 1].sum())
    rate = rate_of(make_history(rows, joined=False))
    assert rate is not None
    assert rate.warm_up > 0
    assert rate.mean == pytest.approx(2 * 60 * 8 / spent_s, rel=0.05)


def test_a_slow_start_of_one_worker_on_its_own_does_not_change_the_rate_of_all() -> None:
    rows = make_rows(100, 3, compute_s=0.010)
    rows["end_s"][:, 1] += 0.030  # 46 ms instead of 16
    rows["end_s"][:20, 2] += 0.008
    rate = rate_of(make_history(rows, joined=False))
    assert rate is not None
    assert rate.mean == pytest.approx(3 * 100 * 8 / (100 * 0.046), rel=0.01)


def test_a_long_runs_rate_is_that_of_all_steps() -> None:
    rows = make_rows(40_000, 2)
    rows["end_s"][1::2] += 0.016  # every second step is longer, and not stored
    history = make_history(rows, memory_limit_bytes=1 << 20)
    assert history.stride > 1
    rate = rate_of(history)
    assert rate is not None
    assert rate.mean == pytest.approx(16 / 0.024, rel=1e-3)


def test_halves_of_one_recorded_run_are_not_called_different_often() -> None:
    """Each half of a run is the other one's equal, but for what the computer did meanwhile."""
    told = []
    for rows in np.load(MEASURED).values():
        step_s = (rows["end_s"] - rows["start_s"]).max(axis=1)[20:].astype(float)
        parts = [step_s[half::2] for half in (0, 1)]
        verdict = compare([run_of("a", parts[0]), run_of("b", parts[1])]).verdict
        told.append(re.match(r"[ab] is [\d.]+ times", verdict))
    assert not any(told)
