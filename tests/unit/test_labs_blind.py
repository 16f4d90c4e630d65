"""Blind tasks: what is sealed, when it counts, and what is said; runs are stood in for."""

from __future__ import annotations

import re
import time
from types import SimpleNamespace

import numpy as np
import pytest

from workbench.errors import PlanError
from workbench.labs import asking, blind
from workbench.labs.blind import STRATEGIES
from workbench.labs.checks.lab_9 import ENOUGH, expected


def history(rate, workers=1, steps=9, batch=96):
    """Rows of workers that take `rate` samples per second together, but for a warm-up."""
    rows = steps * workers
    steps_of = np.repeat(np.arange(steps), workers)
    step_s = np.where(steps_of < blind.WARM_UP, 10.0, batch / rate)
    return {
        "rank": np.tile(np.arange(workers), steps), "step": steps_of, "step_s": step_s,
        "samples": np.full(rows, batch / workers),
    }  # fmt: skip


@pytest.fixture
def begun(monkeypatch):
    """Cases of seed 17; a run achieves exactly what the formulae say."""

    def train(case, strategy, name, steps):
        rate = expected(case)[strategy]
        return SimpleNamespace(began=time.time(), history=history(rate, case.workers), name=name)

    monkeypatch.setattr(blind, "train", train)
    blind.begin()
    blind.play_as("Ada Lovelace")
    yield
    blind.begin(0)


def checked(name):
    return asking.check({"A": "9.4", "B": "9.5"}[name], {})


def test_a_run_is_rated_by_its_typical_steps_after_warm_up():
    assert blind.rate_of(SimpleNamespace(history=history(480, workers=3))) == pytest.approx(480)


def test_rates_of_workers_that_do_not_wait_add_up():
    rows = history(100, workers=2)
    rows["step_s"] = np.where(rows["rank"] == 0, 1.0, 4.0)
    rate = blind.rate_of(SimpleNamespace(history=rows))
    assert rate == pytest.approx(48 / 1 + 48 / 4)


def test_an_honest_prediction_of_the_best_passes(begun):
    case = blind.case("A")
    rates = expected(case)
    best = max(rates, key=rates.__getitem__)
    blind.seal(case, best, rates[best] * 1.3)
    table = blind.run(case)
    assert checked("A").passed
    assert best in blind.score().text()
    assert "choice 1.00 of 1" in table.text()


def played(student, best, strategy, measured):
    """Play the student's first case in which `best` wins, as if it had measured these shares."""
    for attempt in range(4):
        rates = expected(blind.draw(blind.seed_of(student), "A", attempt))
        case = blind.case("A", student)
        best_here = max(rates, key=rates.__getitem__) == best
        sealed = strategy if best_here else "one_device"
        blind.seal(case, sealed, rates[sealed])
        blind.run(case)
        if best_here:
            for name, share in measured.items():
                play = blind.latest("A")
                play.runs[name].history = history(rates[best] * share, case.workers)
            return checked("A")
    raise AssertionError(best)


@pytest.mark.parametrize("share", [0.8, 0.86, 1.0, 1.1])
def test_a_second_best_strategy_is_refused_whatever_was_measured(begun, share):
    report = played("Student 5", "mirrored", "parameter_server", {"parameter_server": share})
    assert [finding.right for finding in report.findings] == [True, True, False]


def test_the_best_strategy_passes_whatever_was_measured(begun):
    report = played("Student 5", "mirrored", "mirrored", {"parameter_server": 1.3})
    assert report.passed


def test_in_each_case_every_other_strategy_is_clearly_refused_or_ties():
    for seed in range(500):
        for attempt in range(4):
            rates = expected(blind.draw(seed, "A", attempt))
            shares = [rate / max(rates.values()) for rate in rates.values()]
            assert all(share < ENOUGH - 0.04 or share > 1 - 1e-9 for share in shares)


def test_a_check_that_passes_says_which_attempt_it_was(begun):
    for attempt in range(3):
        rates = expected(case := blind.case("A"))
        best = max(rates, key=rates.__getitem__)
        blind.seal(case, best, rates[best])
        blind.run(case)
        report = checked("A")
        assert report.passed
        assert re.findall(r"attempt (\d+)", repr(report)) == [str(attempt + 1)]


def test_a_case_that_is_not_sealed_says_whose_case_is_open(begun):
    case = blind.case("A")
    blind.seal(case, "mirrored", 100)
    blind.run(case)
    blind.cards("A", student="Alan Turing")
    assert "'alan turing'" in repr(checked("A"))
    assert "blind.play_as" in repr(checked("A"))


def test_a_prediction_after_the_run_does_not_count(begun):
    case = blind.case("A")
    measured = {name: blind.measure(case, name) for name in STRATEGIES}
    best = max(measured, key=measured.__getitem__)
    blind.seal(case, best, measured[best])
    assert "not count" in blind.run(case).text()
    report = checked("A")
    assert not report.passed
    assert "sealed after" in repr(report)
    assert "0.00" in blind.score().text()


def test_a_run_of_the_case_before_the_seal_is_found_by_its_time_too(begun):
    case = blind.case("B")
    blind.seal(case, "one_device", 1.0)
    blind.run(case)
    play = blind.latest("B")
    assert play.honest
    play.runs["mirrored"].began = play.sealed_at - 1
    assert not play.honest


def test_a_sealed_prediction_cannot_be_changed_once_the_case_is_open(begun, capsys):
    case = blind.case("A")
    blind.seal(case, "mirrored", 100)
    blind.seal(case, "one_device", 200)
    assert blind.latest("A").strategy == "one_device"
    blind.run(case)
    capsys.readouterr()
    blind.seal(case, "mirrored", 300)
    assert (blind.latest("A").strategy, blind.latest("A").predicted) == ("one_device", 200)
    assert capsys.readouterr().out.startswith("Case A ")


def test_a_case_that_was_run_comes_back_with_other_numbers(begun, capsys):
    first = blind.case("A")
    assert blind.case("A") == first
    blind.seal(first, "mirrored", 100)
    blind.run(first)
    again = blind.case("A")
    assert again != first
    assert "new numbers" in capsys.readouterr().out
    assert "no sealed" in repr(checked("A"))
    with pytest.raises(PlanError, match="WB-PLAN-046"):
        blind.measure(first, "mirrored")


@pytest.mark.parametrize(
    ("strategy", "rate", "words"),
    [(None, None, "give a"), ("mirrored", None, "give a"), ("ring", 5, "'ring'"),
     ("mirrored", "fast", "'fast'"), ("mirrored", -1, "-1.0 "),
     ("mirrored", float("nan"), "nan "), (["mirrored"], 5, "['mirrored']")],
)  # fmt: skip
def test_what_cannot_be_sealed_is_said_and_not_raised(begun, capsys, strategy, rate, words):
    case = blind.case("A")
    blind.seal(case, strategy, rate)
    assert blind.run(case) is None
    said = capsys.readouterr().out
    assert words in said
    assert "blind.seal(...)" in said
    assert not checked("A").passed


def test_an_ideal_speed_up_chosen_by_habit_is_refused_with_hints(begun):
    case = blind.case("A")
    blind.seal(case, "mirrored", case.workers * case.batch / case.whole_s)
    blind.run(case)
    report = checked("A")
    assert not report.passed
    wrong = [finding for finding in report.findings if not finding.right]
    assert len(wrong) == 2
    assert all(finding.hint for finding in wrong)


def test_the_check_of_a_case_never_names_the_best(begun):
    case = blind.case("B")
    rates = expected(case)
    best, worst = (pick(rates, key=rates.__getitem__) for pick in (max, min))
    blind.seal(case, worst, rates[worst])
    blind.run(case)
    assert best not in repr(checked("B"))


def test_a_prediction_that_was_never_run_is_not_scored(begun):
    blind.seal(blind.case("A"), "mirrored", 100)
    assert "not run" in repr(checked("A"))
    assert not re.search(r"\d", blind.score().text())


def test_odd_cases_strategies_and_sizes_are_refused(begun):
    with pytest.raises(PlanError, match=r"case.*WB-PLAN-037"):
        blind.case("Z")
    with pytest.raises(PlanError, match="WB-PLAN-046"):
        blind.time_step(None)
    with pytest.raises(PlanError, match=r"strategy.*WB-PLAN-037"):
        blind.measure(blind.case("A"), "sharded")
    with pytest.raises(PlanError, match="WB-PLAN-047"):
        blind.time_message(blind.practice(), 0)


def test_each_student_has_cases_of_their_own_and_keeps_them(begun):
    hers = blind.case("A")
    his = blind.case("A", "Alan Turing")
    assert his != hers
    assert his == blind.draw(blind.seed_of("Alan Turing"), "A")
    assert blind.case("A", "  ada  LOVELACE ") == hers


def test_a_name_that_comes_back_has_no_fresh_case(begun):
    case = blind.case("A")
    blind.seal(case, "mirrored", 100)
    blind.run(case)
    blind.play_as("Alan Turing")
    assert blind.case("A", "Ada Lovelace") != case


def test_a_case_of_no_student_is_refused(begun):
    blind.begin(17)
    case = blind.case("A")
    blind.seal(case, "mirrored", 100)
    blind.run(case)
    assert "no student" in repr(checked("A"))


def test_a_case_with_numbers_of_another_seed_is_refused(begun, monkeypatch):
    monkeypatch.setattr(blind, "_seed", 17)
    case = blind.case("A")
    blind.seal(case, "mirrored", 100)
    blind.run(case)
    assert "The numbers" in repr(checked("A"))


def test_beginning_again_forgets_what_was_sealed(begun):
    blind.seal(blind.case("A"), "mirrored", 100)
    blind.begin(17)
    assert blind.latest("A") is None
    assert "no sealed" in repr(checked("A"))
