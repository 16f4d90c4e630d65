"""Blind cases: what is drawn, what is hidden, and how predictions are scored."""

from __future__ import annotations

import pytest

from workbench.labs.blind import PRACTICE, STRATEGIES, choice_score, draw, prediction_score, size_of
from workbench.labs.checks.lab_9 import expected
from workbench.shared.faults import parse_fault

SEEDS = range(60)


def drawn():
    return [draw(seed, name, attempt) for seed in SEEDS for name in "AB" for attempt in range(4)]


def test_the_same_seed_draws_the_same_case():
    assert draw(7, "A") == draw(7, "A")
    assert len({draw(7, "A"), draw(8, "A"), draw(7, "B"), draw(7, "A", 1)}) == 4


@pytest.mark.parametrize("seed", [0, 9, 17])
def test_cases_and_attempts_of_a_seed_differ_in_what_wins(seed):
    def best(name, attempt=0):
        rates = expected(draw(seed, name, attempt))
        return max(rates, key=lambda strategy: round(rates[strategy], 3))

    assert {best(name) for name in "ABCD"} == set(STRATEGIES)
    assert {best("A", attempt) for attempt in range(4)} == set(STRATEGIES)


def test_choosing_by_habit_loses_somewhere():
    for strategy in STRATEGIES:
        shares = [rates[strategy] / max(rates.values()) for rates in map(expected, drawn())]
        assert max(shares) == pytest.approx(1)
        assert min(shares) < 0.7


def test_the_best_is_clearly_ahead_of_not_distributing_or_far_behind_it():
    for case in drawn():
        rates = expected(case)
        alone = rates.pop("one_device")
        ratio = max(rates.values()) / alone
        assert ratio > 1.25 or ratio < 0.8


def test_an_ideal_speed_up_is_never_near_what_mirrored_achieves():
    for case in drawn():
        ideal = case.workers * case.batch / case.whole_s
        assert ideal / expected(case)["mirrored"] > 1.8


def test_a_card_shows_nothing_of_what_is_hidden():
    case = draw(3, "A")
    hidden = (case.whole_s, case.latency_s, case.bytes_per_s)
    assert "_s=" not in repr(case)
    assert set(case.card) == {"batch", "workers", "size_bytes", "factors"}
    shown = case.table().text()
    assert "measure" in shown
    assert not any(f"{value:.3g}" in shown for value in hidden)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_faults_of_a_run_add_up_to_the_case(strategy):
    case = draw(5, "B")
    faults = [parse_fault(text) for text in case.faults(strategy)]
    slow = {fault.rank: fault.delay_s for fault in faults if fault.kind == "slow"}
    links = {fault.kind: fault for fault in faults if fault.kind != "slow"}
    if strategy == "one_device":
        assert slow == {0: pytest.approx(case.whole_s, rel=1e-3)}
        assert links == {}
    else:
        fastest = {rank: slow[rank] / factor for rank, factor in enumerate(case.factors)}
        assert sum(fastest.values()) == pytest.approx(case.whole_s, rel=1e-3)
        assert links["latency"].delay_s == pytest.approx(case.latency_s, rel=1e-3)
        assert links["bandwidth"].bytes_per_s == pytest.approx(case.bytes_per_s, rel=1e-3)


def test_the_practice_case_needs_every_term():
    rates = expected(PRACTICE)
    assert PRACTICE.size_bytes == size_of(1000) == 300_040
    assert rates["mirrored"] == pytest.approx(96 / (0.06 + 4 * (0.015 + 0.010)), rel=1e-3)
    assert rates["central_storage"] == pytest.approx(96 / (0.06 + 2 * (0.015 + 0.030)), rel=1e-3)


@pytest.mark.parametrize(
    ("predicted", "score"),
    [(100, 1.0), (200, 0.0), (50, 0.0), (1000, 0.0), (0, 0.0), (-5, 0.0), (float("nan"), 0.0),
     (2**0.5 * 100, 0.5)],
)  # fmt: skip
def test_a_prediction_is_scored_by_its_factor(predicted, score):
    assert prediction_score(predicted, 100) == pytest.approx(score)


def test_a_choice_is_scored_by_its_share_of_the_best():
    measured = {"one_device": 50.0, "mirrored": 100.0}
    assert choice_score("one_device", measured) == 0.5
    assert choice_score("mirrored", measured) == 1.0
