"""When several workers are faster: made-up steps of which the answer is known by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pytest
from history_rows import make_history, make_rows, make_summary

from workbench.history.analysis.comparison import compare
from workbench.history.analysis.rows import FAR, ComparisonRow, payoff_of, sentence_of
from workbench.history.analysis.steady import LEAST_STEPS, Steady, mean_of, steady_of

ONE = {"transfer_s": 0.0, "data_s": 0.0, "other_s": 0.001, "compute_s": 0.004}
PLAN = {"transfer_s": 0.006, "data_s": 0.0, "other_s": 0.001, "compute_s": 0.002}


def rows_of(plan: dict[str, object] | None = None, one: dict[str, object] | None = None):
    compared = compare([
        make_summary("one_device", **{**ONE, **(one or {})}),
        make_summary("mirrored", **{"ranks": 2, **PLAN, **(plan or {})}),
    ])  # fmt: skip
    return compared, *compared.rows


def steady(work_s: float, fixed_s: float, *, samples: float = 32, error_s: float = 0.0) -> Steady:
    return Steady(100, work_s + fixed_s, work_s, error_s, samples)


def pair(one: Steady, plan: Steady, **changed: object) -> tuple[ComparisonRow, ComparisonRow]:
    """Rows whose throughput follows from their steps."""
    _, first, second = rows_of()
    a, b = (
        replace(row, steady=s, samples_per_s=replace(row.samples_per_s, mean=s.samples / s.step_s))
        for row, s in ((first, one), (second, plan))
    )
    return a, replace(b, **changed)


def test_the_break_even_is_where_both_steps_take_as_long() -> None:
    """4 k + 1 = 2 k + 7 at k = 3: a step of 13 ms, a batch of 96."""
    compared, one, mirrored = rows_of()
    assert mirrored.payoff is not None
    assert mirrored.payoff.kind == "begins"
    assert mirrored.payoff.factor == pytest.approx(3, rel=1e-4)
    assert mirrored.payoff.step_s == pytest.approx(0.013, rel=1e-4)
    assert mirrored.payoff.samples == pytest.approx(96, rel=1e-4)
    assert one.payoff is None
    assert re.search(
        r"mirrored .*one_device .* 96 samples .*\(3x .*one_device .*13 ms", compared.outlook
    )


def test_at_the_break_even_batch_the_model_has_equal_steps() -> None:
    a, b = pair(steady(0.010, 0.002), steady(0.004, 0.020))
    found = payoff_of(a, b)
    assert found is not None
    assert found.factor * 0.010 + 0.002 == pytest.approx(found.factor * 0.004 + 0.020)
    assert found.step_s == pytest.approx(found.factor * 0.010 + 0.002)


def test_a_plan_that_pays_is_told_down_to_which_batch() -> None:
    """40 k + 1 = 20 k + 7 at k = 0.3."""
    compared, _, mirrored = rows_of({"compute_s": 0.020}, {"compute_s": 0.040})
    assert mirrored.payoff is not None
    assert mirrored.payoff.kind == "pays"
    assert mirrored.payoff.factor == pytest.approx(0.3, rel=1e-4)
    assert re.search(r"one_device .* 10 samples .*\(0.3x .*one_device .*13 ms", compared.outlook)


def test_waiting_for_a_worker_that_is_always_slower_counts_as_work() -> None:
    """The slow worker computes as long as one device: a larger batch makes the others wait longer.

    Read from the mean worker, the same rows would promise a break-even.
    """
    rows = make_rows(50, 2, compute_s=0.002, slow_rank=1, slow_s=0.002, data_s=0.0)
    found = steady_of(make_history(rows))
    assert found is not None
    assert found.work_s == pytest.approx(0.004, rel=1e-3)
    _, _, mirrored = rows_of({"slow_rank": 1, "slow_s": 0.002})
    assert mirrored.payoff is not None
    assert mirrored.payoff.kind == "undivided"


def test_undivided_work_has_two_possible_causes_where_workers_may_share_cores() -> None:
    shared = {"threads": 1, "devices": ("cpu", "cpu")}
    one, plan = pair(steady(0.004, 0.001), steady(0.0041, 0.008), **shared)
    one = replace(one, threads=2, devices=("cpu",))
    found = payoff_of(one, plan)
    assert found is not None
    assert found.kind == "undivided"
    assert math.isnan(found.factor)
    said = sentence_of(found, one, plan)
    assert "cores" in said
    assert "small batch" in said
    assert re.search(r"\b1/2 .* 4\.1 ms .*one_device.* 4\.0 ms ", said)


def test_undivided_work_elsewhere_is_left_open() -> None:
    one, plan = pair(steady(0.004, 0.001), steady(0.0041, 0.008), devices=("cuda:0 H200",) * 2)
    found = payoff_of(one, plan)
    assert found is not None
    said = sentence_of(found, one, plan)
    assert found.kind == "undivided"
    assert "cores" not in said
    assert "small batch" in said


@pytest.mark.parametrize(
    ("kind", "one", "plan"),
    [
        ("begins", steady(0.004, 0.001), steady(0.002, 0.007)),
        ("pays", steady(0.040, 0.001), steady(0.020, 0.007)),
        ("far", steady(0.004, 0.0), steady(0.002, 0.002 * FAR * 1.1)),
    ],
)
def test_a_break_even_names_what_it_assumes(kind: str, one: Steady, plan: Steady) -> None:
    a, b = pair(one, plan)
    found = payoff_of(a, b)
    assert found is not None
    assert found.kind == kind
    assert "grows" in sentence_of(found, a, b)


def test_a_break_even_far_beyond_these_runs_gets_no_number() -> None:
    one, plan = pair(steady(0.004, 0.0), steady(0.002, 0.002 * FAR * 1.1))
    found = payoff_of(one, plan)
    assert found is not None
    assert found.kind == "far"
    assert math.isnan(found.factor)
    said = sentence_of(found, one, plan)
    assert "30 times" in said


@pytest.mark.parametrize(
    ("one", "plan", "changed"),
    [
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007), {"shares_batch": False},
                     id="model split"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007), {"faults": ("slow=1:5ms",)},
                     id="fault"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007), {"recipe": "z"}, id="recipe"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007), {"framework": "tensorflow"},
                     id="framework"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007), {"workers": 1}, id="one worker"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007, samples=64), {}, id="batch"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.007, error_s=0.001), {}, id="noise"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.001), {}, id="no cost"),
        pytest.param(steady(0.004, 0.001), steady(0.002, 0.003), {}, id="equal here"),
        pytest.param(steady(0.400, 0.001), steady(0.200, 0.003), {}, id="far below"),
    ],
)  # fmt: skip
def test_nothing_is_said_where_the_model_does_not_hold(one, plan, changed) -> None:
    assert payoff_of(*pair(one, plan, **changed)) is None


def test_a_plan_that_is_slower_on_the_whole_is_not_said_to_pay() -> None:
    """Its first steps cost more than the later ones gain: the verdict speaks of the whole run."""
    one, plan = pair(steady(0.040, 0.001), steady(0.020, 0.007))
    slower = replace(plan, samples_per_s=replace(plan.samples_per_s, mean=1.0))
    assert payoff_of(one, plan) is not None
    assert payoff_of(one, slower) is None


def test_without_one_device_nothing_is_said() -> None:
    compared = compare([make_summary("mirrored", ranks=2, **PLAN), make_summary("fsdp", ranks=2)])
    assert compared.outlook == ""
    assert [row.payoff for row in compared.rows] == [None, None]


def test_the_first_plan_to_pay_is_named() -> None:
    compared = compare([
        make_summary("one_device", **ONE),
        make_summary("mirrored", ranks=2, **{**PLAN, "transfer_s": 0.012}),
        make_summary("local_sgd", ranks=2, **PLAN),
    ])  # fmt: skip
    assert "local_sgd" in compared.outlook


def test_few_steps_are_no_typical_step() -> None:
    assert steady_of(make_history(make_rows(LEAST_STEPS - 1, 2))) is None
    assert steady_of(make_history(make_rows(LEAST_STEPS, 2))) is not None
    assert steady_of(make_history(make_rows(0, 2))) is None


def test_the_first_steps_are_left_out_of_the_typical_one() -> None:
    rows = make_rows(60, 1, **ONE)
    rows["end_s"][:5] += 10
    rows["compute_s"][:5] += 10
    found = steady_of(make_history(rows))
    assert found is not None
    assert found.work_s == pytest.approx(0.004, rel=1e-3)
    assert found.fixed_s == pytest.approx(0.001, rel=1e-2)


def test_seeds_that_differ_widen_the_error() -> None:
    calm = mean_of([steady(0.004, 0.001)] * 3)
    apart = mean_of([steady(w, 0.001) for w in (0.003, 0.004, 0.005)])
    assert calm is not None
    assert apart is not None
    assert calm.error_s == 0
    assert apart.work_s == pytest.approx(0.004)
    assert apart.error_s == pytest.approx(0.001 / math.sqrt(3))
    assert mean_of([steady(0.004, 0.001), None]) is None
