"""A comparison's figures by name, sorted, and as JSON for a browser."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from history_rows import make_summary
from made_up_runs import CASES, MIB, compared, eight, make_run, partial

from workbench.errors import PlanError
from workbench.history.analysis import comparison as fields
from workbench.history.analysis.comparison import ALL_POINTS, MOST_POINTS, compare, thinned
from workbench.history.analysis.rows import SHARES, shares_of


def record_of(run, *others):
    comparison = compare([run, *others])
    return fields.records(comparison.rows, comparison.metrics)[0]


def test_figures_are_the_measured_ones() -> None:
    run = make_run("mirrored", 4, held_bytes=2 * MIB, evals={"accuracy": 0.5}, transfer_s=0.004,
                   compute_s=0.01, data_s=0.002, other_s=0.004)  # fmt: skip
    found = record_of(run)
    assert found["workers"] == 4
    assert found["step_s"] == pytest.approx(0.02)
    assert found["compute_share"] == pytest.approx(0.5)
    assert found["transfer_share"] == pytest.approx(0.2)
    assert found["sync_wait_share"] == pytest.approx(0)
    assert found["sent_bytes_per_step"] == 4 * 1000
    assert found["sent_bytes"] == 60 * 4 * 1000
    assert found["memory_bytes_per_worker"] == pytest.approx(2 * MIB * 1.3)
    assert found["eval_accuracy"] == 0.5
    assert found["staleness_mean"] is None
    assert found["speedup"] is None
    assert found["relative"] == 1


def test_a_pipelines_bubble_stands_in_the_place_of_sync_wait() -> None:
    """Of a step of 13 ms: compute 6, data 2, blocked 4, of which the bubble is 4."""
    run = make_run("model_split", 2, bubble_s=0.004, transfer_s=0.004, compute_s=0.006)
    found = shares_of(run)
    assert math.isnan(found["sync_wait_s"])
    assert found["bubble_s"] == pytest.approx(4 / 13)
    assert found["transfer_s"] == pytest.approx(0, abs=1e-6)
    assert record_of(make_run("mirrored", 2))["bubble_share"] is None


@pytest.mark.parametrize("case", CASES)
def test_known_shares_add_up_to_the_step(case: str) -> None:
    for row in compared(case).rows:
        shares = [row.shares[part] for part in SHARES if math.isfinite(row.shares[part])]
        assert sum(shares) == pytest.approx(1) or not shares


def test_the_verdict_blames_a_pipelines_bubble() -> None:
    one = make_run("one_device", compute_s=0.005, transfer_s=0.0, data_s=0.0)
    split = make_run("model_split", 2, bubble_s=0.007, transfer_s=0.007, compute_s=0.003)
    verdict = compare([one, split]).verdict
    assert "7.0 ms" in verdict
    assert "bubble" in verdict


def test_what_only_some_seeds_measured_is_their_mean() -> None:
    whole = make_run("mirrored-seed0", 2, strategy="mirrored", held_bytes=MIB)
    empty = make_run("mirrored-seed1", 2, strategy="mirrored", seed=1, steps=0, state="failed")
    row = compare([whole, replace(empty, steps=60)]).rows[0]
    assert row.names == ("mirrored-seed0", "mirrored-seed1")
    assert row.state == "1 finished, 1 failed"
    assert row.step_s == pytest.approx(whole.step_s)
    assert row.parts_s == pytest.approx(whole.parts_s)
    assert row.samples_per_s.count == 1
    assert row.memory_bytes == pytest.approx(whole.memory_bytes)


@pytest.mark.parametrize("descending", [True, False])
def test_rows_are_sorted_by_a_figure(descending: bool) -> None:
    comparison = compare(eight())
    rows = fields.ordered(comparison.rows, comparison.metrics, "step_s", descending=descending)
    steps = [row.step_s for row in rows]
    assert steps == sorted(steps, reverse=descending)
    assert len(set(steps)) > 4


@pytest.mark.parametrize("descending", [True, False])
def test_rows_that_lack_a_figure_stand_last(descending: bool) -> None:
    comparison = compare(partial())
    rows = fields.ordered(comparison.rows, comparison.metrics, "final_loss", descending=descending)
    known = [math.isfinite(row.final_loss.mean) for row in rows]
    assert known == sorted(known, reverse=True)
    assert not all(known)


def test_metrics_sort_by_their_own_name_and_words_by_the_alphabet() -> None:
    comparison = compare(eight())
    for name in ("accuracy", "eval_accuracy", "run", "strategy", "state"):
        assert fields.ordered(comparison.rows, comparison.metrics, name, descending=False)
    names = fields.ordered(comparison.rows, comparison.metrics, "run", descending=False)
    assert [row.name for row in names] == sorted(row.name for row in comparison.rows)


def test_an_unknown_figure_is_refused_with_the_nearest_one() -> None:
    comparison = compare(eight())
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'samples_per_s'"):
        fields.ordered(comparison.rows, comparison.metrics, "sample_per_s", descending=True)


@pytest.mark.parametrize("case", CASES)
def test_the_wire_is_plain_json_without_nan(case: str) -> None:
    comparison = compared(case)
    wire = json.loads(json.dumps(comparison.to_wire(), allow_nan=False))
    assert len(wire["rows"]) == len(comparison.rows)
    assert wire["rows"][wire["baseline"]]["run"] == comparison.baseline
    assert {curve["run"] for curve in wire["curves"]} == {c.name for c in comparison.curves}
    for curve in wire["curves"]:
        sizes = {len(curve[name]) for name in curve if name not in ("run", "row")}
        assert len(sizes) == 1
        assert sizes.pop() <= MOST_POINTS


def test_the_wire_of_eight_plans_and_three_seeds_is_small() -> None:
    runs = eight(steps=2000, seeds=3, stem="a_rather_long_name_for_a_run_of_")
    comparison = compare(runs)
    text = json.dumps(comparison.to_wire())
    assert (len(comparison.rows), len(comparison.curves)) == (8, 24)
    assert len(text) < 200_000
    points = sum(len(curve["step"]) for curve in comparison.to_wire()["curves"])
    assert 0.8 * ALL_POINTS < points <= ALL_POINTS


def test_a_few_curves_keep_three_hundred_points_that_reach_their_ends() -> None:
    run = make_run("mirrored", 2, steps=2000)
    (curve,) = compare([run]).to_wire()["curves"]
    assert len(curve["step"]) == MOST_POINTS
    assert curve["samples"][-1] == pytest.approx(run.curve.samples[-1])
    assert curve["t_s"][-1] == pytest.approx(run.curve.t_s[-1], rel=1e-4)
    assert max(curve["high"]) == pytest.approx(run.curve.high.max(), rel=1e-3)
    for axis in ("step", "t_s", "samples"):
        assert np.all(np.diff(curve[axis]) > 0)


def test_curves_without_a_band_send_none() -> None:
    (curve,) = compare([make_run("mirrored", 2, steps=50)]).to_wire()["curves"]
    assert "low" not in curve


def test_what_was_not_measured_is_null() -> None:
    wire = compare(partial()).to_wire()
    nothing = next(row for row in wire["rows"] if row["run"] == "nothing")
    for key in ("samples_per_s", "step_s", "compute_share", "final_loss", "sent_bytes_per_step"):
        assert nothing[key] is None


def test_staleness_and_memory_are_sent_whole() -> None:
    (row,) = compare([make_run("parameter_server", 4, late=2.0, held_bytes=MIB)]).to_wire()["rows"]
    assert sum(row["staleness"]) == 240
    assert len(row["memory_bytes"]) == 4
    assert row["spread"]["final_loss"] == [pytest.approx(row["final_loss"], rel=1e-4)]


def test_rows_of_one_name_are_told_apart() -> None:
    runs = [make_summary("same", meta_seed=7), make_summary("same", meta_seed=7)]
    comparison = compare(runs)
    assert [row.name for row in comparison.rows] == ["same", "same (2)"]
    assert comparison.to_wire()["baseline"] == 0


def test_long_curves_are_thinned_without_losing_their_band() -> None:
    curve = make_summary("mirrored", steps=500).curve
    thin = thinned(curve, 110)
    assert len(thin.loss) <= 110
    assert thin.high.max() == curve.high.max()
    assert thin.low.min() == curve.low.min()
    assert thin.loss[0] == pytest.approx(curve.loss[: 500 // 110].mean(), rel=0.2)
    assert np.all(np.diff(thin.step) > 0)
    assert thin.step[-1] == curve.step[-1]
