from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from history_rows import NAN, make_history, make_rows, make_summary
from made_up_runs import CASES, make_run

from workbench.errors import RunError
from workbench.history.analysis import rows as analysis_rows
from workbench.history.analysis import summary
from workbench.history.analysis.comparison import compare
from workbench.history.analysis.rows import Spread
from workbench.history.analysis.summary import RunSummary, summarise
from workbench.history.store import RunHistory
from workbench.shared.record import PARTS
from workbench.views import text

ONE = {"transfer_s": 0.0, "compute_s": 0.020}


def test_speedup_and_efficiency_are_against_one_device() -> None:
    compared = compare([
        make_summary("mirrored", ranks=4, compute_s=0.005),
        make_summary("one_device", **ONE),
    ])  # fmt: skip
    mirrored, one = compared.rows
    assert compared.has_one_device
    assert compared.baseline == "one_device"
    assert one.speedup == pytest.approx(1.0)
    assert mirrored.speedup == pytest.approx(23 / 11, rel=1e-6)
    assert mirrored.efficiency == pytest.approx(23 / 44, rel=1e-6)
    assert compared.notes == ()


@pytest.mark.parametrize(("compute_s", "doubted"), [(0.001, True), (0.005, False)])
def test_a_speedup_above_the_number_of_workers_is_doubted(compute_s: float, doubted: bool) -> None:
    """A step of one device takes 23 ms; one of two workers 7 ms (3.3x) or 11 ms (2.1x) of noise."""
    runs = [
        make_summary("one_device", **ONE),
        make_summary("mirrored", ranks=2, compute_s=compute_s),
    ]
    runs[1] = replace(runs[1], low_per_s=0.8 * runs[1].samples_per_s)
    found = [note for note in compare(runs).notes if "mirrored" in note]
    assert bool(found) is doubted
    faulty = replace(runs[0], faults=("slow=0:50ms",))
    assert not any("mirrored" in note for note in compare([faulty, runs[1]]).notes)


def test_own_batchnorms_explain_why_losses_differ() -> None:
    history = make_history(make_rows(20, 2))
    history.hear("note", {"text": "Norms.", "topic": "own_norms"})
    own = summarise(history, {"name": "b", "strategy": "mirrored"})
    notes = compare([make_summary("one_device"), own]).notes
    assert any("BatchNorm" in note and " b," in note for note in notes)
    assert not any("BatchNorm" in note for note in compare([own]).notes)
    assert not any("BatchNorm" in n for n in compare([make_summary("a"), make_summary("b")]).notes)


def test_a_run_that_still_trains_is_not_called_failed() -> None:
    runs = [make_summary("a"), replace(make_summary("b"), state="running", total_steps=100)]
    compared = compare(runs)
    assert [row.state for row in compared.rows] == ["finished", "running"]
    (note,) = [note for note in compared.notes if note.startswith("b ")]
    assert "running after 20 of 100" in note
    assert "did not" not in note


def test_without_one_device_there_is_no_speedup_and_it_is_said() -> None:
    compared = compare([make_summary("mirrored", ranks=2), make_summary("fsdp", ranks=2)])
    assert [row.speedup for row in compared.rows] == [None, None]
    assert [row.efficiency for row in compared.rows] == [None, None]
    assert compared.rows[1].relative == pytest.approx(1.0)
    assert any("one_device" in note and "mirrored" in note for note in compared.notes)


def test_seeds_of_one_plan_share_a_row_with_mean_and_spread() -> None:
    runs = [
        make_summary(f"mirrored-seed{seed}", ranks=2, meta_strategy="mirrored", meta_seed=seed,
                     meta_accuracy=0.9 + 0.01 * seed)
        for seed in range(3)
    ]  # fmt: skip
    compared = compare(runs)
    (row,) = compared.rows
    assert row.name == "mirrored"
    assert row.seeds == (0, 1, 2)
    assert row.evals["accuracy"].mean == pytest.approx(0.91)
    assert row.evals["accuracy"].std == pytest.approx(0.01)
    assert compared.metrics == ("accuracy",)
    assert [(curve.name, curve.row) for curve in compared.curves] == [(run.name, 0) for run in runs]


def test_the_same_plan_and_seed_twice_are_two_rows() -> None:
    runs = [make_summary(name, ranks=2, meta_strategy="mirrored") for name in ("a", "b")]
    assert [row.name for row in compare(runs).rows] == ["a", "b"]


def test_other_options_make_another_row() -> None:
    runs = [
        make_summary(f"m{size}", meta_strategy="mirrored", meta_seed=size,
                     meta_options={"bucket_mb": size})
        for size in (1, 25)
    ]  # fmt: skip
    assert len(compare(runs).rows) == 2


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"recipe": "zzz"}, "recipe"),
        ({"batch_size": 64}, "a 32, b 64"),
        ({"total_steps": 40}, "a 20, b 40"),
        ({"seed": 7}, "a 0; b 7"),
        ({"trained_before": True}, "b .*earlier"),
        ({"diverged": True}, "b .*diverge"),
        ({"state": "stopped", "total_steps": 20, "steps": 12}, "b .*stopped"),
        ({"faults": ("slow=1:50ms",)}, r"b .*slow=1:50ms"),
    ],
)
def test_what_makes_a_comparison_unfair_is_said(change: dict[str, object], says: str) -> None:
    first = make_summary("a", meta_strategy="one_device")
    second = replace(make_summary("b", meta_strategy="mirrored", ranks=2), **change)
    assert any(re.search(says, note) for note in compare([first, second]).notes)


def test_notes_name_runs_of_one_name_as_the_table_does() -> None:
    good = replace(make_summary("train", meta_strategy="one_device"), batch_size=24)
    bad = replace(make_summary("train", ranks=2, meta_strategy="mirrored"),
                  batch_size=48, state="failed", steps=12)  # fmt: skip
    compared = compare([good, bad])
    assert [row.name for row in compared.rows] == ["train", "train (2)"]
    assert compared.labels == ("train", "train (2)")
    assert [curve.name for curve in compared.curves] == ["train", "train (2)"]
    (failed,) = (note for note in compared.notes if "failed" in note)
    assert failed.startswith("train (2) ")
    assert any("train 24, train (2) 48" in note for note in compared.notes)
    assert any(re.search(r"train 20, train \(2\) 12\b", note) for note in compared.notes)


def test_no_two_runs_have_the_same_label() -> None:
    twice = make_summary("a", meta_strategy="mirrored")
    seeds = [make_summary("b", meta_strategy="mirrored", meta_seed=seed) for seed in (1, 2)]
    taken = make_summary("a (2)", meta_strategy="fsdp")
    compared = compare([twice, taken, twice, *seeds])
    assert [row.names for row in compared.rows] == [("a", "b", "b"), ("a (2)",), ("a",)]
    assert compared.labels == ("a", "a (2)", "a (3)", "b", "b (2)")


def test_the_steps_of_a_busiest_worker_are_told_from_those_asked_for() -> None:
    one = replace(make_run("one", strategy="one_device", steps=23), total_steps=23)
    server = replace(make_run("server", 2, late=1.0, steps=25), total_steps=22)
    assert compare([one, server]).rows[1].steps == 25
    notes = compare([one, server]).notes
    assert any(re.search(r"one 23, server 22 .*\b25\b", note) for note in notes)


def test_a_run_that_continued_another_is_told_with_the_steps_of_its_own() -> None:
    rows = make_rows(40, 1, first=80, samples=32)
    meta = {"name": "b", "strategy": "mirrored", "recipe": "abc", "seed": 0, "batch_size": 32}
    resumed = replace(summarise(make_history(rows), meta), total_steps=120)
    assert (resumed.first_step, resumed.steps) == (80, 40)
    notes = compare([make_summary("a", meta_strategy="one_device"), resumed]).notes
    assert any(re.search(r"a 20, b 120 \(40 ", note) for note in notes)
    assert any(re.search(r"^b .*\b80\b.*\b40\b", note) for note in notes)
    assert make_summary("a").first_step == 0
    cut_off = replace(resumed, state="failed")
    assert any(re.search(r"^b .*failed.* 120 of 120", note) for note in compare([cut_off]).notes)


def test_a_fair_comparison_has_nothing_to_say() -> None:
    first = make_summary("a", meta_strategy="one_device")
    assert compare([first, make_summary("b", meta_strategy="mirrored", ranks=2)]).notes == ()


def test_asynchronous_updates_are_not_passed_off_as_the_same_steps() -> None:
    one, mirrored = make_run("one_device"), make_run("mirrored", 2)
    server = make_run("parameter_server", 2, late=1.0)
    fair, told = compare([one, mirrored]).notes, compare([one, mirrored, server]).notes
    assert any("parameter_server" in note for note in set(told) - set(fair))
    assert not any("parameter_server" in note for note in compare([server]).notes)


def test_other_devices_are_named_but_not_their_numbers() -> None:
    def on(run: RunSummary, *devices: str) -> RunSummary:
        pairs = zip(run.workers_table, devices, strict=True)
        return replace(run, workers_table=tuple(replace(w, device=d) for w, d in pairs))

    one = on(make_run("one_device"), "cuda:0 NVIDIA H200")
    two = on(make_run("mirrored", 2), "cuda:0 NVIDIA H200", "cuda:1 NVIDIA H200")
    cpu = on(make_run("sharded", 2), "cpu", "cpu")
    assert compare([one, two]).notes == ()
    told = "one_device NVIDIA H200; sharded cpu"
    assert any(told in note for note in compare([one, cpu]).notes)


def test_the_last_loss_of_asynchronous_workers_is_the_last_in_time() -> None:
    """Whichever worker's rows come first: on disk they stand worker by worker."""
    rows = make_rows(20, 2)
    rows["start_s"][:, 0] += 1e-3
    rows["end_s"][:, 0] += 1e-3
    for ranks in ((0, 1), (1, 0)):
        history = RunHistory(range(2), joined=False)
        for rank in ranks:
            history.append(rows[:, rank])
            len(history)  # takes in what was appended
        assert summarise(history, {}).final_loss == rows["local_loss"][-1, 0]


def test_a_run_that_diverged_is_named_and_in_no_mean() -> None:
    rows = make_rows(20, 1)
    rows["local_loss"][10:] = NAN
    history = make_history(rows)
    meta = {"name": "b-seed1", "strategy": "b", "state": "finished", "recipe": "abc", "seed": 1,
            "batch_size": 32}  # fmt: skip
    diverged = summarise(history, meta)
    whole = make_summary("b-seed0", meta_strategy="b")
    compared = compare([whole, diverged])
    assert compared.rows[0].final_loss.count == 1
    assert any("b-seed1" in note for note in compared.notes)


def test_the_words_of_a_note_make_no_run_diverge() -> None:
    history = make_history(make_rows(4, 1))
    history.hear("note", {"text": "The loss is no number since step 2."})
    summary = summarise(history, {"name": "b"})
    assert not summary.diverged
    assert not any("diverged" in note for note in compare([make_summary("a"), summary]).notes)
    history.hear("note", {"text": "Oh dear.", "topic": "loss_lost", "value": 2})
    assert summarise(history, {"name": "b"}).diverged


@pytest.mark.parametrize("case", CASES)
def test_runs_of_every_kind_compare(case: str) -> None:
    compared = compare(CASES[case]())
    assert len(compared.rows) == len(CASES[case]()) or case == "seeds"
    for row in compared.rows:
        if not row.steps:
            assert math.isnan(row.step_s)
            assert all(math.isnan(share) for share in row.shares.values())


def test_the_verdict_says_why_the_slower_strategy_is_slower() -> None:
    compared = compare([
        make_summary("one_device", compute_s=0.004, transfer_s=0.0, data_s=0.0, other_s=0.001),
        make_summary("mirrored", ranks=2, compute_s=0.0021, transfer_s=0.009, data_s=0.0,
                     other_s=0.0),
    ])  # fmt: skip
    assert re.match(r"one_device is 2\.2 times .*mirrored", compared.verdict)
    assert compared.verdict.endswith("2.1 ms and spends 9.0 ms on communication.")


@pytest.mark.parametrize("seconds", [0.0, 4e-5, 0.000692, 0.000996, 0.0021, 0.00996, 0.048, 0.7])
def test_the_verdict_writes_times_as_all_views_do(seconds: float) -> None:
    assert analysis_rows.milliseconds(seconds) == text.milliseconds(seconds * 1e3)


def test_the_verdict_names_waiting_for_the_slowest() -> None:
    compared = compare([
        make_summary("one_device", compute_s=0.004, transfer_s=0.0),
        make_summary("mirrored", ranks=4, slow_rank=0, slow_s=0.060, compute_s=0.001),
    ])  # fmt: skip
    assert "waits 45 ms for the slowest worker" in compared.verdict


def test_the_verdict_says_what_more_workers_gained() -> None:
    compared = compare([
        make_summary("one_device", **ONE),
        make_summary("mirrored", ranks=4, compute_s=0.005),
    ])  # fmt: skip
    facts = "mirrored is 2.1 times .*one_device.* 11 ms .* 23 ms.* 4 workers .* 45 %"
    assert re.search(facts, compared.verdict)


def test_the_verdict_calls_close_throughputs_equal() -> None:
    runs = [make_summary(name, ranks=2) for name in ("mirrored", "fsdp")]
    assert "equally fast" in compare(runs).verdict


@pytest.mark.parametrize(("slow_s", "apart"), [(0.005, True), (0.200, False)])
def test_the_verdict_does_not_claim_what_the_seeds_do_not_show(slow_s: float, apart: bool) -> None:
    """One seed of the slower strategy happens to take `slow_s` a step, the other 5 ms."""
    runs = [
        make_summary("one_device", compute_s=compute_s, meta_seed=seed)
        for seed, compute_s in enumerate((0.005, slow_s))
    ]
    runs += [make_summary("mirrored", ranks=2, compute_s=0.0025, meta_seed=seed) for seed in (0, 1)]
    verdict = compare(runs).verdict
    assert ("not certain" in verdict) is not apart
    assert verdict.startswith("mirrored is ") is apart


def test_the_verdict_does_not_judge_by_a_handful_of_steps() -> None:
    whole, other = make_summary("one_device"), make_summary("fsdp", ranks=2, compute_s=0.1)
    halted = make_summary("mirrored", ranks=2, steps=3, compute_s=1e-4, meta_state="stopped")
    assert "mirrored" not in compare([whole, other, halted]).verdict
    assert "No verdict" in compare([whole, halted]).verdict


def test_one_run_has_no_verdict_and_none_is_an_error() -> None:
    assert compare([make_summary("mirrored")]).verdict == ""
    with pytest.raises(RunError, match="WB-RUN-035"):
        compare([])


def test_runs_without_steps_are_compared_without_inventing_numbers() -> None:
    empty = make_summary("mirrored", steps=0, ranks=2, meta_state="failed")
    compared = compare([make_summary("one_device"), empty])
    row = compared.rows[1]
    assert math.isnan(row.samples_per_s.mean)
    assert math.isnan(row.final_loss.mean)
    assert "No verdict" in compared.verdict
    assert any("mirrored" in note and "failed" in note for note in compared.notes)


def test_loss_curves_go_by_step_time_and_samples() -> None:
    summary = make_summary("mirrored", ranks=2, steps=40)
    curve = summary.curve
    assert curve.samples[-1] == 40 * 32
    assert curve.t_s[-1] == pytest.approx(39 * 0.016)
    assert curve.step.tolist() == list(range(40))
    assert (curve.low <= curve.loss).all()


def test_a_summary_holds_whole_run_figures() -> None:
    rows = make_rows(50, 3, slow_rank=2, slow_s=0.02, samples=4)
    history = make_history(rows)
    history.hear("run_started", {"rank": 0, "total_steps": 50, "batch_size": 12, "device": "cpu"})
    summary = summarise(history, {"name": "base", "strategy": "mirrored"})
    assert (summary.steps, summary.samples, summary.batch_size) == (50, 600, 12)
    assert summary.total_steps == 50
    assert summary.samples_per_s == pytest.approx(12 / 0.036, rel=1e-6)
    assert sum(summary.share) == pytest.approx(1)
    assert sum(summary.parts_s) == pytest.approx(summary.step_s)
    assert summary.sent_bytes == 150_000
    assert [round(w.wait_ms) for w in summary.workers_table] == [20, 20, 0]
    assert summary.final_loss == pytest.approx(history["loss"][-1])


@pytest.mark.parametrize(("data_parallel", "batch"), [(True, 48), (False, 24)])
def test_a_batch_that_nobody_told_is_that_of_a_typical_step(
    data_parallel: bool, batch: int
) -> None:
    rows = make_rows(20, 2, samples=24)
    rows["samples"][9::10] = 5
    history = make_history(rows, data_parallel=data_parallel)
    assert summarise(history, {}).batch_size == batch
    assert summarise(history, {"batch_size": 64}).batch_size == 64
    assert summarise(make_history(make_rows(0, 2)), {}).batch_size is None
    assert summarise(make_history(make_rows(5, 2, samples=0)), {}).batch_size is None


def test_a_summary_names_what_was_not_measured() -> None:
    rows = make_rows(5, 2)
    rows["exposed_s"], rows["ready_s"], rows["sent_bytes"] = NAN, NAN, NAN
    summary = summarise(make_history(rows), {})
    assert summary.unmeasured == ("sync_wait_s", "transfer_s")
    assert set(summary.unmeasured) <= set(PARTS)
    assert math.isnan(summary.sent_bytes)


def test_a_spread_leaves_out_what_was_not_measured() -> None:
    spread = Spread.of([1.0, NAN, 3.0])
    assert (spread.mean, spread.count) == (2.0, 2)
    assert spread.std == pytest.approx(np.sqrt(2))
    assert math.isnan(Spread.of([1.0]).std)
    assert Spread.of([]).count == 0


@pytest.mark.parametrize(
    ("told", "recorded", "batch"),
    [(32, 64, 64), (64, 64, 64), (64, 43, 64), (64, 70, 64), (None, 48, 48), (32, None, 32)],
)
def test_the_batch_of_a_loop_that_accumulates_is_what_an_update_takes(
    told: int | None, recorded: int | None, batch: int
) -> None:
    assert summary._batch(told, recorded) == batch
