"""Pipelines: every schedule exact, the split, the bubble, memory, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import split_cells as cells
from worker_reports import Report, assert_same, clean, failures, joined, more_ms
from workers import Workers

from workbench.shared import record

pytestmark = pytest.mark.torch

SCHEDULES = ["naive", "gpipe", "1f1b", "interleaved", "zero_bubble"]


def split(workers: Workers, count: int, options: dict[str, Any], **keywords: Any) -> list[Report]:
    return clean(
        workers.run("model_split", cells.deep, workers=count, options=options, keywords=keywords)
    )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_every_schedule_trains_as_one_device_does(
    workers: Workers, schedule: str, count: int
) -> None:
    reports = split(workers, count, {"schedule": schedule})
    assert_same(reports, workers.truth(cells.deep), 1e-10)
    losses = joined(reports)["local_loss"]
    assert (~np.isnan(losses)).sum(axis=1).tolist() == [1] * 20
    assert [report.value["evals"] for report in reports] == [reports[0].value["evals"]] * count
    assert reports[0].value["evals"][0] == pytest.approx(
        workers.truth(cells.deep).value["evals"][0], abs=1e-10
    )


@pytest.mark.parametrize("form", ["convolutional", "residual", "function", "lambda", "list"])
def test_every_form_of_model_is_cut_and_exact(workers: Workers, form: str) -> None:
    reports = split(workers, 2, {}, form=form)
    assert_same(reports, workers.truth(cells.deep, form=form), 1e-10)
    held = [set(report.value["held"]) for report in reports]
    assert not held[0] & held[1]
    assert all(held)


@pytest.mark.parametrize(
    ("form", "split_at", "schedule"),
    [
        ("in place", "1", "1f1b"),  # a stage begins with what changes its input
        ("in place", "3", "zero_bubble"),
        ("transposed", "3", "gpipe"),
        ("transposed", "5", "zero_bubble"),
    ],
)
def test_layers_in_place_and_values_out_of_order_may_stand_at_a_cut(
    workers: Workers, form: str, split_at: str, schedule: str
) -> None:
    reports = split(workers, 2, {"split_at": split_at, "schedule": schedule}, form=form)
    assert_same(reports, workers.truth(cells.deep, form=form), 1e-10)


@pytest.mark.parametrize("form", ["tied", "tied function"])
def test_a_parameter_that_two_stages_share_makes_the_same_step_in_both(
    workers: Workers, form: str
) -> None:
    keywords = {"form": form, "adamw": True, "extra": {"clip_norm": 0.05}}
    reports = split(workers, 2, {"split_at": "3"}, **keywords)
    truth = workers.truth(cells.deep, **keywords)
    for report in reports:
        assert {"1.weight", "3.weight"} <= report.weights.keys()
        for name, value in report.weights.items():
            assert abs(value - truth.weights[name]).max() <= 1e-10, name
    first, second = (report.weights["1.weight"] for report in reports)
    assert np.array_equal(first, second)
    assert {*reports[0].weights, *reports[1].weights} == truth.weights.keys()


@pytest.mark.parametrize("name", ["model_split", "hybrid"])
def test_a_model_that_computes_its_own_loss_trains(workers: Workers, name: str) -> None:
    reports = clean(workers.run(name, cells.methods, workers=2))
    truth = workers.truth(cells.methods)
    assert_same(reports, truth, 1e-10)
    assert reports[0].value[0] == pytest.approx(truth.value[0], abs=1e-10)


@pytest.mark.parametrize(
    ("options", "keywords"),
    [
        ({"microbatches": 5}, {}),
        ({"microbatches": 7, "schedule": "gpipe"}, {"batch": 23}),
        ({"microbatches": 16, "schedule": "zero_bubble"}, {"batch": 50}),
        ({"schedule": "interleaved", "stages_per_worker": 3, "microbatches": 4}, {}),
        ({"schedule": "gpipe"}, {"adamw": True}),
        ({}, {"built": True}),
        ({}, {"built": True, "adamw": True, "extra": {"clip_norm": 0.05}}),
        ({"split_at": "4"}, {}),
        ({"split_at": "blocks.1"}, {"form": "residual"}),
    ],
    ids=lambda value: "-".join(f"{k}={v}" for k, v in value.items()) or "plain",
)
def test_microbatches_that_do_not_divide_and_other_options_are_exact(
    workers: Workers, options: dict[str, Any], keywords: dict[str, Any]
) -> None:
    assert_same(
        split(workers, 2, options, **keywords), workers.truth(cells.deep, **keywords), 1e-10
    )


def test_the_split_is_shown_and_can_be_given(workers: Workers) -> None:
    reports = split(workers, 2, {"split_at": "4", "microbatches": 4}, steps=1)
    (event,) = reports[0].emitted("split")
    assert [row["layers"] for row in event["stages"]] == ["0 to 3.0", "3.1 to 5"] or [
        row["rank"] for row in event["stages"]
    ] == [0, 1]
    assert sum(row["parameters"] for row in event["stages"]) == 8 * 16 + 16 + 3 * 272 + 51
    assert event["ideal_bubble"] == pytest.approx(1 / 5)
    assert event["microbatch_samples"] == 6
    assert event["pipelines"] == 1
    assert not reports[1].emitted("split")


def test_state_is_that_of_one_device_whatever_the_number_of_workers(workers: Workers) -> None:
    truth = workers.truth(cells.continued, 9)
    reports = clean(workers.run("model_split", cells.continued, 4, workers=2))
    assert [report.value for report in reports] == [[0, 1, 2, 3]] * 2
    merged = {**reports[0].weights, **reports[1].weights}
    for name, value in truth.weights.items():
        assert abs(merged[name] - value).max() <= 1e-10


@pytest.mark.timing
def test_naive_hands_an_injected_delay_on_in_full(workers: Workers) -> None:
    rows = joined(
        clean(
            workers.run(
                "model_split", cells.sleeping, 2, 3, 1, 50, workers=3,
                options={"schedule": "naive"}, faults=("slow=1:50ms",), by_turns=True,
            )
        )
    )  # fmt: skip
    blame = record.derive(rows[np.arange(50) // 5 % 2 == 1])
    assert (blame.blamed_rank[:, [0, 2]] == 1).mean() >= 0.9
    assert (blame.blamed_rank[:, 1] == -1).all()
    assert np.median(blame.blamed_s, axis=0) * 1e3 == pytest.approx([50, 0, 50], abs=5)
    assert more_ms(rows["bubble_s"])[[0, 2]] == pytest.approx(50, abs=5)
    assert (more_ms(rows["bubble_s"], 0.5)[[0, 2]] <= 55).all()
    assert abs(more_ms(rows["bubble_s"])[1]) < 5


@pytest.mark.timing
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_others_bubble_names_the_slow_stage(workers: Workers, schedule: str) -> None:
    reports = clean(
        workers.run(
            "model_split", cells.sleeping, 5, 3, 4, 15, workers=3, options={"schedule": schedule},
            faults=("slow=1:50ms",),
        )
    )  # fmt: skip
    derived = record.derive(joined(reports)[2:])
    assert (derived.blamed_rank[:, [0, 2]] == 1).mean() >= 0.9
    assert (derived.blamed_rank[:, 1] == -1).all()
    assert np.median(derived.blamed_s, axis=0) * 1e3 == pytest.approx([50, 0, 50], abs=5)


@pytest.mark.timing
@pytest.mark.parametrize(("schedule", "microbatches"), [("gpipe", 8), ("1f1b", 8), ("naive", 1)])
def test_the_bubble_is_near_the_schedules_ideal(
    workers: Workers, schedule: str, microbatches: int
) -> None:
    options = {"schedule": schedule, "microbatches": microbatches}
    reports = clean(
        workers.run(
            "model_split", cells.sleeping, 15, 3, microbatches, 6, workers=3, options=options
        )
    )
    rows = joined(reports)[1:]
    shares = rows["bubble_s"].sum(axis=1) / (rows["end_s"] - rows["start_s"]).sum(axis=1)
    share = shares.min()  # what else runs on this machine only adds to it
    ideal = reports[0].emitted("split")[0]["ideal_bubble"]
    assert ideal == pytest.approx(2 / (microbatches + 2))
    assert share == pytest.approx(ideal, abs=0.05)
    assert np.median(record.derive(rows).blamed_s) == 0  # stages are equal: nobody's fault
    assert (rows["wait_s"] <= rows["bubble_s"] + 1e-6).all()
    assert rows["wait_s"].sum() >= 0.5 * rows["bubble_s"].sum()


def test_a_model_larger_than_a_workers_memory_trains() -> None:
    """640 MB of weights; a worker may take 500 MB more than it has, weights and gradients."""
    pool = Workers(4)  # limits do not suit processes that others use
    # Cut evenly: by measured times, a busy machine may give one of them too many.
    options = {"microbatches": 4, "split_at": "3,6,9"}
    try:
        whole = pool.run("one_device", cells.memory, 640, 12, 500)
        assert any("memory" in error.lower() for error in failures(whole))
        clean(pool.run("model_split", cells.memory, 640, 12, 500, workers=4, options=options))
        # Where even the share does not fit, nobody waits for the worker that cannot go on.
        short = pool.run("model_split", cells.memory, 640, 12, 120, workers=4, options=options)
        assert len(failures(short)) == 4
        assert all("memory" in error.lower() for error in failures(short))
    finally:
        pool.close()


REFUSED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "branching": (
        {},
        ("WB-FIT-148", "in forward, line", "data-dependent", "wb.fit([first, second]"),
    ),
    "view": ({}, ("WB-FIT-142", "Layer 1")),
    "shapes": ({}, ("WB-FIT-143", "layer 1")),
    "few layers": ({}, ("WB-FIT-137", "1 layer for 2 stages")),
    "list": ({}, ("WB-FIT-135", "-n 3")),
    "odd input": ({}, ("WB-FIT-134", "dict")),
    "uneven": ({}, ("WB-FIT-144", "7 samples", "use a batch_size")),
    "fp16": ({}, ("fp16", "bf16")),
    "accumulate": ({}, ("WB-FIT-027", "accumulate")),
    "too few": ({"microbatches": 1}, ("WB-PLAN-080", "gpipe")),
    "too many": ({"microbatches": 11}, ("more microbatches than samples",)),
    "naive": ({"schedule": "naive", "microbatches": 4}, ("WB-PLAN-079",)),
    "rounds": ({"schedule": "interleaved", "microbatches": 5}, ("rounds", "microbatches=4")),
    "virtual": ({"schedule": "gpipe", "stages_per_worker": 2}, ("one stage per worker",)),
    "split_at": ({"split_at": "9"}, ("WB-FIT-138", "0, 1, 2")),
    "split_at order": ({"split_at": "0"}, ("WB-FIT-139",)),
    "split_at count": ({"split_at": "1,2"}, ("WB-FIT-140", "3 stages")),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_a_pipeline_cannot_train_is_refused_on_every_rank(workers: Workers, kind: str) -> None:
    options, words = REFUSED[kind]
    reports = clean(workers.run("model_split", cells.fails, kind, workers=2, options=options))
    for report in reports:
        for word in words:
            assert word in report.value
        assert len(report.rows) == 0


def test_batchnorm_is_warned_of_and_a_stream_is_cut_at_its_first_batch(workers: Workers) -> None:
    reports = clean(workers.run("model_split", cells.batchnorm, workers=2))
    assert [report.value for report in reports] == [3, 3]
    (warning,) = reports[0].emitted("warning")
    assert "BatchNorm layers: 1." in warning["text"]
    assert "(4 of" in warning["text"]
    assert not reports[1].emitted("warning")
