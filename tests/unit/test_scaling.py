"""Runs over several numbers of workers: speed-up, laws and their serial share, and the verdict."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from made_up_runs import make_run
from made_up_scaling import amdahl, run_of, strong
from predicted_runs import BATCH, scaled_runs, summary_of, true_step_s

from workbench.errors import PlanError
from workbench.history.analysis import comparison
from workbench.history.analysis.rows import Spread
from workbench.history.analysis.scaling.curves import records
from workbench.history.analysis.scaling.laws import fitted
from workbench.history.analysis.scaling.of_runs import mode_of, scaling, why_not, worth_showing
from workbench.notebook.compare import Compared
from workbench.notebook.scaling import Scaled, scaled
from workbench.prediction import predict

# -- the laws -------------------------------------------------------------------------------------


def test_a_known_serial_share_is_read_back_from_strong_scaling() -> None:
    found = scaling(strong())
    assert found is not None
    (curve,) = found.curves
    assert (curve.law.name, curve.law.fits) == ("Amdahl", True)
    assert curve.law.serial == pytest.approx(0.2, abs=1e-3)
    assert [point.speedup for point in curve.points] == pytest.approx(
        [1 / (0.2 + 0.8 / n) for n in (1, 2, 4, 8)], rel=1e-3
    )
    assert curve.law.limit == pytest.approx(5.0, rel=0.01)
    assert found.distribute
    assert "20 %" in found.verdict
    assert " 5.0x" in found.verdict


def test_a_known_serial_share_is_read_back_from_weak_scaling() -> None:
    """Gustafson: n workers do s + (1 - s) n times the work of one in the same time."""
    runs = [
        run_of(n, 0.1 * n / (0.3 + 0.7 * n), batch=64 * n,
               strategy="mirrored" if n > 1 else "one_device")
        for n in (1, 2, 4)
    ]  # fmt: skip
    found = scaling(runs)
    assert found is not None
    (curve,) = found.curves
    assert (curve.mode, curve.law.name, curve.law.fits) == ("weak", "Gustafson", True)
    assert curve.law.serial == pytest.approx(0.3, abs=1e-3)
    assert curve.points[-1].speedup == pytest.approx(0.3 + 0.7 * 4, rel=1e-3)
    assert any("batch grows" in note for note in found.notes)


def test_the_interval_of_the_serial_share_holds_the_true_one_as_often_as_it_says() -> None:
    rng, held, drawn = np.random.default_rng(7), 0, 400
    for _ in range(drawn):
        workers, rates = (1, 2, 4, 8), []
        for count in workers:
            true = 640 / (0.2 + 0.8 / count)
            mean = true * (1 + 0.02 * rng.standard_normal())
            rates.append(Spread(mean, low=mean * (1 - 1.96 * 0.02), high=mean * (1 + 1.96 * 0.02)))
        law = fitted("strong", workers, rates, rates[0], 1)
        held += law.low <= 0.2 <= law.high
    assert 0.92 <= held / drawn <= 0.995


def test_points_that_miss_the_law_widen_its_interval() -> None:
    exact, off = scaling(strong()), strong()
    off[2] = run_of(4, amdahl(4) * 1.08)
    widened = scaling(off)
    assert exact is not None
    assert widened is not None
    one, other = exact.curves[0].law, widened.curves[0].law
    assert other.fits
    assert other.high - other.low > 10 * (one.high - one.low)


@pytest.mark.parametrize(
    ("runs", "words"),
    [
        (lambda: strong((2,)), "least 3 "),
        (lambda: [run_of(n, amdahl(n)) for n in (2, 4, 8)], "one worker"),
        (lambda: strong(steps=3), "few steps"),
        (lambda: [run_of(1, 0.1), run_of(2, 0.15), run_of(4, 0.25)], "describe"),
        (lambda: [run_of(1, 0.1), run_of(2, 0.04), run_of(4, 0.015)], "speed-up"),
    ],
)  # fmt: skip
def test_a_law_is_not_drawn_where_it_does_not_hold(runs: Any, words: str) -> None:
    found = scaling(runs())
    assert found is not None
    law = found.curves[0].law
    assert not law.fits
    assert words in law.why_not
    assert any(words in note for note in found.notes)
    assert found.to_wire()["curves"][0]["law"]["serial"] is None


# -- what is held against what --------------------------------------------------------------------


def test_without_one_worker_speed_up_is_over_the_fewest_and_that_is_said() -> None:
    found = scaling([run_of(n, amdahl(n)) for n in (2, 4, 8)])
    assert found is not None
    assert not found.one_worker
    assert found.least == 2
    assert found.curves[0].points[0].speedup == 1
    assert any("2 workers" in note for note in found.notes)
    assert "of 2 workers" in found.verdict


def test_a_failed_run_in_the_middle_is_missing_and_the_rest_is_shown() -> None:
    runs = strong()
    runs[2] = run_of(4, amdahl(4), state="failed")
    found = scaling(runs)
    assert found is not None
    points = found.curves[0].points
    assert [point.missing for point in points] == ["", "", "failed", ""]
    assert math.isnan(points[2].speedup)
    assert points[3].measured
    assert any("mirrored" in note and "failed" in note for note in found.notes)
    wire = found.to_wire()["curves"][0]["points"]
    assert wire[2]["speedup"] is None
    assert json.dumps(found.to_wire(), allow_nan=False)


def test_a_seed_that_failed_is_left_out_of_the_others_mean() -> None:
    whole = scaling([*strong(), run_of(2, amdahl(2), seed=1)])
    torn = scaling([*strong(), run_of(2, 5.0, seed=1, state="failed", steps=2)])
    assert whole is not None
    assert torn is not None
    assert torn.curves[0].points[1].speedup == pytest.approx(whole.curves[0].points[1].speedup)


def test_runs_with_one_number_of_workers_show_none() -> None:
    runs = [run_of(2, 0.1), run_of(2, 0.1, strategy="sharded")]
    assert scaling(runs) is None
    assert "2 workers" in why_not(runs)
    with pytest.raises(PlanError, match=r"WB-PLAN-281"):
        scaled(runs)


@pytest.mark.parametrize(
    ("batches", "mode"),
    [
        ([(1, 64), (2, 64), (4, 64)], "strong"),
        ([(1, 64), (2, 128), (4, 256)], "weak"),
        ([(1, 64), (2, 64), (4, 64), (1, 128), (2, 128), (4, 128)], "strong"),
        ([(1, 64), (2, 128), (4, 256), (1, 128), (2, 256), (4, 512)], "weak"),
    ],
)
def test_strong_and_weak_scaling_are_told_apart_by_the_batches(
    batches: list[tuple[int, int]], mode: str
) -> None:
    runs = [run_of(n, 0.1, batch=batch, name=f"{n}-{batch}") for n, batch in batches]
    assert mode_of(runs) == mode
    found = scaling(runs)
    assert found is not None
    assert len(found.curves) == len(batches) // 3


def test_curves_of_one_strategy_are_named_by_what_differs() -> None:
    runs = [run_of(1, 0.1, strategy="one_device")]
    for mb, step_s in ((5, 0.06), (25, 0.05)):
        runs.append(
            replace(run_of(2, step_s, name=f"m{mb}"), options={"bucket_mb": mb, "compress": "none"})
        )
    found = scaling(runs)
    assert found is not None
    assert [curve.name for curve in found.curves] == [
        "mirrored bucket_mb=5",
        "mirrored bucket_mb=25",
    ]
    assert {curve.base.strategy for curve in found.curves} == {"one_device"}


def test_curves_of_other_recipes_are_named_as_their_runs_and_so_are_their_baselines() -> None:
    runs = [
        replace(run_of(n, 0.1 / n, strategy=strategy, name=f"{strategy}{counted}-lr={lr}"),
                recipe=str(lr))
        for lr in (1, 2)
        for n, strategy, counted in ((1, "one_device", ""), (2, "mirrored", "-n2"))
    ]  # fmt: skip
    found = scaling(runs)
    assert found is not None
    assert [curve.name for curve in found.curves] == ["mirrored-lr=1", "mirrored-lr=2"]
    assert [record["curve"] for record in records(found)] == [
        "one_device-lr=1", "one_device-lr=2", "mirrored-lr=1", "mirrored-lr=2"
    ]  # fmt: skip


def test_a_comparison_of_many_plans_with_one_number_of_workers_is_no_scaling() -> None:
    runs = [make_run("one_device"), make_run("mirrored", 4), make_run("sharded", 4)]
    assert not worth_showing(runs)
    assert worth_showing(strong())
    assert scaled(runs).scaling.workers == (1, 4)


# -- whether to distribute ------------------------------------------------------------------------


def test_what_gains_nothing_should_not_be_distributed_and_the_measured_reason_is_given() -> None:
    runs = [make_run("one_device", compute_s=0.01, transfer_s=0.0, data_s=0.0, other_s=0.0)]
    runs += [
        make_run(f"m{n}", n, strategy="mirrored", compute_s=0.01 / n, transfer_s=0.05, data_s=0.0,
                 other_s=0.0)
        for n in (2, 4)
    ]  # fmt: skip
    found = scaling(runs)
    assert found is not None
    assert found.distribute is False
    assert "mirrored with 4" in found.verdict
    assert "50 ms communicating" in found.verdict
    assert "2.5 ms computing" in found.verdict
    assert "10 ms" in found.verdict


@pytest.mark.parametrize(("batches", "told"), [((64, 64), True), ((32, 64), False)])
def test_undivided_computing_is_explained_only_where_workers_have_smaller_shares(
    batches: tuple[int, int], told: bool
) -> None:
    runs = [
        run_of(workers, 0.10 + 0.15 * (workers > 1), batch=batch)
        for workers, batch in zip((1, 2), batches, strict=True)
    ]
    found = scaling(runs)
    assert found is not None
    assert found.distribute is False
    assert ("cores" in found.verdict) is told
    assert ("small batch" in found.verdict) is told


def test_a_gain_within_the_doubt_is_no_gain() -> None:
    runs = [run_of(1, 0.1, strategy="one_device", noise=0.3, steps=20),
            run_of(2, 0.099, noise=0.3, steps=20)]  # fmt: skip
    found = scaling(runs)
    assert found is not None
    assert found.curves[0].points[-1].low < 1
    assert found.distribute is False
    assert "no clear" in found.verdict


def test_too_few_steps_for_an_interval_settle_nothing() -> None:
    found = scaling(strong((2, 4), steps=3))
    assert found is not None
    assert found.distribute is None
    assert "few steps" in found.verdict


def test_more_workers_than_pay_are_named() -> None:
    runs = [run_of(1, 0.1, strategy="one_device"), run_of(2, 0.055), run_of(4, 0.09)]
    found = scaling(runs)
    assert found is not None
    assert found.distribute
    assert "mirrored with 2 workers" in found.verdict
    assert "With 4 workers (1.11x)" in found.verdict


# -- costs ----------------------------------------------------------------------------------------


def test_an_epoch_costs_its_workers_hours() -> None:
    runs = [run_of(1, 0.1, strategy="one_device", epoch_samples=6400),
            run_of(2, 0.1, epoch_samples=6400)]  # fmt: skip
    found = scaling(runs, price=3.6)
    assert found is not None
    one, two = (point.cost for point in found.curves[0].points)
    # 100 steps of 0.1 s are 10 s of a worker at 0.001 a second.
    assert one is not None
    assert two is not None
    assert one.price == pytest.approx(0.01, rel=1e-6)
    assert two.price == pytest.approx(0.02, rel=1e-6)
    assert one.is_epoch
    assert one.low <= one.price <= one.high


def test_one_run_that_does_not_know_its_epoch_has_all_priced_by_the_million() -> None:
    runs = [run_of(1, 0.1, strategy="one_device", epoch_samples=6400), run_of(2, 0.1)]
    found = scaling(runs, price=3.6)
    assert found is not None
    assert [p.cost.is_epoch for p in found.curves[0].points if p.cost] == [False, False]


def test_without_the_size_of_an_epoch_a_million_samples_are_priced_and_that_is_said() -> None:
    found = scaling(strong(), price=2.5)
    assert found is not None
    cost = found.curves[0].points[0].cost
    assert cost is not None
    assert not cost.is_epoch
    assert any("million samples" in note for note in found.notes)
    assert Scaled(found).table().columns[-1].title == "cost of 1M samples"
    free = scaling(strong())
    assert free is not None
    assert all(point.cost is None for point in free.curves[0].points)


# -- exports --------------------------------------------------------------------------------------


def test_all_exports_hold_the_same_figures(tmp_path: Any) -> None:
    shown = scaled([*strong(), run_of(1, 0.105, name="mirrored-n1")], price=2.5)
    lines = list(csv.DictReader(io.StringIO(shown.to_csv())))
    assert [(line["curve"], line["workers"]) for line in lines] == [
        ("one_device", "1"), ("mirrored", "1"), ("mirrored", "2"), ("mirrored", "4"),
        ("mirrored", "8"),
    ]  # fmt: skip
    frame = shown.to_pandas()
    assert frame["speedup"].tolist() == pytest.approx([float(line["speedup"]) for line in lines])
    assert float(lines[-1]["serial_share"]) == pytest.approx(0.2, abs=0.03)
    assert "| mirrored | 8 |" in shown.to_markdown().replace("**", "")
    assert "<table" in shown.to_html()
    assert len(shown.table().rows) == 5
    for suffix, begin in ((".csv", b"curve,"), (".md", b"**"), (".html", b"<!doctype"),
                          (".json", b"{"), (".png", b"\x89PNG"), (".svg", b"<?xml")):  # fmt: skip
        assert shown.save(tmp_path / f"scaling{suffix}").read_bytes().startswith(begin)
    with pytest.raises(PlanError, match="WB-PLAN-279"):
        shown.save(tmp_path / "scaling.doc")


# -- what was predicted ---------------------------------------------------------------------------


def predicted_of(runs: list[Any], **given: Any) -> Scaled:
    return scaled([summary_of(run) for run in runs], runs=runs, **given)


@pytest.mark.parametrize(("weak", "counts"), [(False, (4, 8, 16)), (True, (4, 8, 16))])
def test_more_workers_than_two_gain_what_was_predicted_from_two(
    weak: bool, counts: tuple[int, ...]
) -> None:
    (curve,) = predicted_of(scaled_runs((2, 4), weak=weak)).scaling.curves
    assert curve.predicted is not None
    assert (curve.predicted.run, curve.predicted.workers) == ("mirrored-n2", 2)
    assert tuple(one.workers for one in curve.ahead) == counts
    rng = np.random.default_rng(5)
    whole_s = true_step_s(rng, 1, BATCH)
    for one in curve.ahead:
        each, grown = (BATCH, one.workers) if weak else (BATCH / one.workers, 1)
        truth = grown * whole_s / true_step_s(rng, one.workers, each)
        assert one.low < truth < one.high
        assert one.speedup == pytest.approx(truth, rel=0.05)
        assert one.samples_per_s == pytest.approx(one.speedup * curve.base.samples_per_s.mean)


def test_the_runs_that_a_prediction_is_held_against_tell_it_nothing() -> None:
    right, wrong = scaled_runs((2, 4)), scaled_runs((2, 4))
    wrong[-1] = scaled_runs((2, 4), seed=3, steps=60)[-1]
    one, other = (predicted_of(runs).scaling.curves[0] for runs in (right, wrong))
    assert one.known[-1].speedup != other.known[-1].speedup
    assert one.predicted == other.predicted
    alone = predicted_of(scaled_runs((2,))).scaling.curves[0]
    assert alone.ahead[0] == one.ahead[0]


def test_one_device_tells_how_work_changes_with_its_samples() -> None:
    runs = scaled_runs((2, 4))
    with_it, without = (predicted_of(some).scaling.curves[0] for some in (runs, runs[1:]))
    for one, other in zip(with_it.ahead, without.ahead, strict=False):
        wide = (other.high_per_s - other.low_per_s) / other.samples_per_s
        assert (one.high_per_s - one.low_per_s) / one.samples_per_s < 0.6 * wide


@pytest.mark.parametrize(
    ("counts", "beyond"),
    [((2,), (4,)), ((2, 4), (8, 16)), ((4,), (8, 16)), ((2, 4, 8), (16, 32)),
     ((2, 4, 8, 16, 32), (64,))],
)  # fmt: skip
def test_so_far_is_predicted_that_what_was_run_keeps_half_of_the_doublings(
    counts: tuple[int, ...], beyond: tuple[int, ...]
) -> None:
    """The batch of 64 has no samples for more than 64 workers."""
    found = predicted_of(scaled_runs(counts)).scaling
    assert tuple(one for one in found.axis if one > max(counts)) == beyond


@pytest.mark.parametrize(
    ("runs", "why"),
    [
        (lambda: scaled_runs((2, 4), steps=12), "few steps"),
        (
            lambda: scaled_runs((2, 4), strategy="tensor_parallel"),
            "tensor_parallel",
        ),
    ],
)
def test_why_a_curve_is_not_predicted_is_noted_and_is_no_error(runs: Any, why: str) -> None:
    shown = predicted_of(runs())
    (curve,) = shown.scaling.curves
    assert curve.predicted is not None
    assert curve.ahead == ()
    assert why in curve.predicted.why_not
    assert sum(curve.predicted.why_not[1:] in note for note in shown.scaling.notes) == 1
    assert shown.scaling.workers == shown.scaling.axis
    assert json.dumps(shown.to_wire(), allow_nan=False)


def test_a_fault_of_the_prediction_costs_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(predict, "predict", broken)
    shown = predicted_of(scaled_runs((2, 4)))
    assert any("ZeroDivisionError" in note for note in shown.scaling.notes)
    assert shown.scaling.curves[0].known[-1].measured


def test_exports_have_what_was_predicted_in_columns_of_its_own(tmp_path: Any) -> None:
    shown = predicted_of(scaled_runs((2, 4)))
    lines = list(csv.DictReader(io.StringIO(shown.to_csv())))
    assert [(line["workers"], line["state"]) for line in lines] == [
        ("1", "finished"), ("2", "finished"), ("4", "finished"), ("8", "predicted"),
        ("16", "predicted"),
    ]  # fmt: skip
    measured = [float(line["speedup"]) for line in lines if line["speedup"]]
    expected = [float(line["predicted_speedup"]) for line in lines if line["predicted_speedup"]]
    assert (len(measured), len(expected)) == (3, 3)
    assert measured[2] == pytest.approx(expected[0], rel=0.05)
    for line in lines[-2:]:
        empty = {"speedup", "samples_per_s", "step_s", "steps", "seeds", "compute_share", "cost"}
        assert {line[key] for key in empty} == {""}
        assert float(line["predicted_speedup_low"]) < float(line["predicted_speedup_high"])
        assert (line["predicted_from"], line["batch"]) == ("mirrored-n2", "64.0")
    frame = shown.to_pandas()
    assert frame["speedup"].isna().tolist() == [False, False, False, True, True]
    assert "predicted" in shown.to_markdown()
    assert [row[-1] for row in shown.table().rows][-2:] == ["predicted", "predicted"]
    (curve,) = shown.to_wire()["curves"]
    assert [one["workers"] for one in curve["points"]] == [1, 2, 4]
    assert [one["workers"] for one in curve["predicted"]["points"]] == [4, 8, 16]


def test_what_one_curve_assumes_alone_is_said_with_its_name() -> None:
    runs = scaled_runs((2, 4)) + scaled_runs((2, 4), steps=60, name="half", compress="fp16")[1:]
    notes = predicted_of(runs).scaling.notes
    assert len(set(notes)) == len(notes)
    rare = [note for note in notes if "extrapolated" in note]
    assert [note.partition(": ")[0] for note in rare] == ["mirrored compress=fp16"]


def test_a_figure_and_a_file_can_do_without_predictions(tmp_path: Any) -> None:
    shown = predicted_of(scaled_runs((2, 4)))
    assert shown.figure().scaling.axis == (1, 2, 4, 8, 16)
    bare = shown.figure(predicted=False).scaling
    assert bare.axis == (1, 2, 4)
    assert not any("redicted" in note for note in bare.notes)
    saved = json.loads(shown.save(tmp_path / "bare.json", predicted=False).read_text())
    assert saved["curves"][0]["predicted"] is None


def test_a_comparison_predicts_from_the_runs_that_it_was_made_of() -> None:
    runs = scaled_runs((2, 4))
    summaries = [summary_of(run) for run in runs]
    made = Compared(comparison.compare(summaries), summaries, runs)
    assert made.scaling().scaling.axis == (1, 2, 4, 8, 16)
    assert Compared(made.comparison, summaries).scaling().scaling.axis == (1, 2, 4)
