"""What every strategy must honour, whatever it is: parametrised over the catalog."""

from __future__ import annotations

from typing import Any

import cells
import model_cells
import numpy as np
import pytest
from strategy_cases import CASES, ENTRIES, EXACT, PREPARE, SEVERAL, exact_options, in_every_way, run
from worker_reports import assert_same, clean, joined
from workers import Workers

from workbench import catalog
from workbench.shared import record

pytestmark = pytest.mark.torch


VARIANTS: dict[str, dict[str, Any]] = {
    "uneven": {},
    "accumulate": {"accumulate": 3},
    "clip": {"clip": 0.05},
    "scheduler": {"scheduled": True},
    "fewer samples than workers": {"samples": 24, "batch": 22},
    "step_fn": {"pairs": False},
    "AdamW": {"optimizer": "AdamW"},
}
NEEDS = {
    "accumulate": "accumulate", "clip": "clip_norm", "scheduler": "scheduler",
    "step_fn": "step_fn", "uneven": "uneven_batches",
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("entry", "count"), EXACT)
def test_trains_exactly_as_one_device_does(
    workers: Workers, entry: catalog.Strategy, count: int, variant: str
) -> None:
    if not {NEEDS[v] for v in [variant] if v in NEEDS} <= entry.supports:
        pytest.skip(f"{entry.name} does not support {variant}")
    if variant == "AdamW" and count > 1 and entry.linear_only:
        pytest.skip("averaged parameters equal averaged gradients for linear optimizers alone")
    truth = workers.truth(cells.train, **VARIANTS[variant])
    reports = clean(run(workers, entry, cells.train, workers=count, keywords=VARIANTS[variant]))
    assert_same(reports, truth, 1e-10)
    for mine, theirs in zip(reports[0].value["evals"], truth.value["evals"], strict=True):
        assert mine == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize(("entry", "count"), EXACT)
def test_float32_stays_within_rounding(
    workers: Workers, entry: catalog.Strategy, count: int
) -> None:
    keywords = {"dtype": "float32"}
    truth = workers.truth(cells.train, **keywords)
    reports = clean(run(workers, entry, cells.train, workers=count, keywords=keywords))
    assert_same(reports, truth, 1e-5)


def test_a_strategy_without_all_reduce_is_caught(workers: Workers) -> None:
    truth = workers.truth(cells.train)
    for report in workers.run("mirrored", cells.without_all_reduce, True, workers=2):
        assert "WB-FIT-113" in str(report.error)
        assert report.trained == 1
    reports = clean(workers.run("mirrored", cells.without_all_reduce, False, workers=2))
    with pytest.raises(AssertionError, match=r"weight|bias"):
        assert_same(reports, truth, 1e-10)


@pytest.mark.parametrize("loader", ["plain", "custom_sampler", "processes"])
@pytest.mark.parametrize(("entry", "count"), [case for case in PREPARE if case in EXACT])
def test_an_own_loop_trains_as_fit_does(
    workers: Workers, entry: catalog.Strategy, count: int, loader: str
) -> None:
    keywords = {
        "custom_sampler": loader == "custom_sampler",
        "processes": int(loader == "processes"),
        "epochs": 1 if loader == "processes" else 3,
    }
    truth = workers.truth(cells.train_from_loader, False, **keywords)
    for own_loop in (True, False):
        reports = clean(
            run(workers, entry, cells.train_from_loader, own_loop, workers=count, keywords=keywords)
        )
        assert_same(reports, truth, 1e-10)
        assert reports[0].trained == len(truth.rows)


@pytest.mark.parametrize("persistent", [False, True])
def test_processes_that_load_the_data_have_ended_after_fit(
    workers: Workers, persistent: bool
) -> None:
    reports = clean(workers.run("mirrored", cells.processes_after_fit, persistent, workers=2))
    assert [report.value for report in reports] == [0, 0]


@pytest.mark.parametrize(("entry", "count"), CASES)
def test_stop_ends_all_workers_at_the_agreed_step(
    workers: Workers, entry: catalog.Strategy, count: int
) -> None:
    reports = clean(run(workers, entry, cells.stopped, False, workers=count))
    assert [report.value for report in reports] == [True] * count
    assert [report.trained for report in reports] == [6] * count


@pytest.mark.parametrize(("entry", "count"), PREPARE)
def test_stop_raises_in_an_own_loop(workers: Workers, entry: catalog.Strategy, count: int) -> None:
    reports = run(workers, entry, cells.stopped, True, workers=count)
    assert all(report.error and report.error.startswith("RunStopped") for report in reports)
    assert [report.trained for report in reports] == [6] * count
    assert [report.left for report in reports] == [[]] * count


@pytest.mark.parametrize(("entry", "count"), PREPARE)
def test_a_prepared_model_is_still_the_users(
    workers: Workers, entry: catalog.Strategy, count: int
) -> None:
    reports = clean(run(workers, entry, model_cells.copies, workers=count))
    assert reports[0].value == [True, True, True, ["0.weight", "0.bias"]]


@pytest.mark.parametrize(
    ("entry", "count", "own_loop"),
    in_every_way([case for case in SEVERAL if case.values[0].whole]),
)
def test_buffers_end_equal(
    workers: Workers, entry: catalog.Strategy, count: int, own_loop: bool
) -> None:
    reports = clean(run(workers, entry, model_cells.batchnorm, own_loop, workers=count))
    assert all(report.value == reports[0].value for report in reports)
    assert any(reports[0].value)


@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "prepare"])
def test_mirrored_says_that_batchnorm_sees_shares(workers: Workers, own_loop: bool) -> None:
    reports = clean(workers.run("mirrored", model_cells.batchnorm, own_loop, workers=2))
    told = [note["text"] for note in reports[0].emitted("note")]
    assert any("BatchNorm" in text for text in told)


WRONG = {
    "no data": "WB-FIT-005", "no model": "WB-FIT-005", "no module": "WB-FIT-059",
    "a class": "WB-FIT-059", "frozen": "WB-FIT-061", "no loss": "WB-FIT-017",
    "two losses": "WB-FIT-017", "loss class": "WB-FIT-018", "no batch": "WB-FIT-049",
    "zero epochs": "WB-FIT-014", "negative seed": "WB-FIT-015", "empty": "WB-FIT-054",
    "ragged": "WB-FIT-050", "odd data": "WB-FIT-055", "no pairs": "WB-FIT-007",
    "foreign optimizer": "WB-FIT-062", "odd optimizer": "WB-FIT-063",
    "precision": "precision", "clip": "clip_norm", "metrics": "WB-FIT-019", "eval": "eval_every",
    "names of metrics": "WB-FIT-193",
    "callback": "callback", "closure": "WB-FIT-046", "built closure": "WB-FIT-046",
}  # fmt: skip


@pytest.mark.parametrize("kind", WRONG)
def test_what_cannot_be_trained_is_refused_before_any_collective(
    workers: Workers, kind: str
) -> None:
    (report,) = clean(workers.run("one_device", model_cells.fails, kind))
    assert WRONG[kind] in report.value
    assert len(report.rows) == 0


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: entry.name)
def test_sparse_gradients_are_trained_with_or_refused(
    workers: Workers, entry: catalog.Strategy
) -> None:
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    count = 2 if exact_options(entry) is not None else 1
    reports = clean(
        run(
            workers,
            entry,
            model_cells.sparse_embedding,
            workers=min(count, entry.max_workers or count),
        )
    )
    if "sparse_gradients" not in entry.supports:
        assert all("WB-FIT-028" in report.value for report in reports)
        assert all(len(report.rows) == 0 for report in reports)
        return
    truth = workers.truth(model_cells.sparse_embedding)
    assert [report.value for report in reports] == ["trained"] * len(reports)
    assert_same(reports, truth, 1e-10)


def test_an_own_loop_on_one_device_may_use_a_closure(workers: Workers) -> None:
    (report,) = clean(workers.run("one_device", model_cells.own_closure))
    assert report.value
    assert len(report.rows) == 4


def test_a_batch_smaller_than_the_workers_is_refused_everywhere(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", model_cells.fails, "small batch", workers=2))
    assert ["WB-FIT-016" in report.value for report in reports] == [True, True]


def test_the_lines_overrides_win(workers: Workers) -> None:
    overrides = {"steps": 7, "batch_size": 50, "seed": 5}
    reports = clean(workers.run("mirrored", cells.train, workers=2, overrides=overrides))
    rows = joined(reports)
    assert rows.shape == (7, 2)
    assert (rows["samples"] == 25).all()
    assert reports[0].emitted("run_started")[0]["batch_size"] == 50


def test_unused_parameters_train_with_the_option(workers: Workers) -> None:
    options = {"find_unused_parameters": "true", "bucket_mb": "0.001"}
    keywords = {"unused": True}
    truth = workers.truth(cells.train, **keywords)
    reports = clean(
        workers.run("mirrored", cells.train, workers=2, options=options, keywords=keywords)
    )
    assert_same(reports, truth, 1e-10)


def test_a_loader_that_hides_its_class_is_watched(workers: Workers) -> None:
    (report,) = clean(workers.run("one_device", cells.watched_adapter))
    assert report.value == ("Adapter", {2.0})
    assert report.trained == 4
    assert not np.isnan(report.rows["data_wait_s"]).any()


def test_a_loop_with_its_own_ddp_is_recorded_as_it_is(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", cells.watched_loop, workers=2))
    rows = joined(reports)
    assert rows.shape == (30, 2)
    assert (rows["samples"] == 10).all()
    assert not np.isnan(rows["ready_s"]).any()
    assert not np.isnan(rows["local_loss"]).any()
    assert reports[0].value == ["DataLoader", True]


def test_waits_of_a_loop_that_averages_by_itself_are_unknown_not_0(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", cells.averaged_by_hand, workers=2))
    derived = record.derive(joined(reports))
    assert np.isnan(derived.sync_wait_s).all()
    assert np.isnan(derived.transfer_s).all()
    assert (derived.compute_s > 0).all()
    (told,) = reports[0].emitted("unmeasured")
    assert set(told["columns"]) >= {"sync_wait_s", "transfer_s"}


def test_workers_that_send_each_other_nothing_are_warned_of(workers: Workers) -> None:
    """Each trains a model of its own, although all figures of the run look right."""
    for averages, warnings in ((True, 0), (False, 1)):
        reports = clean(workers.run("mirrored", cells.averaged_by_hand, 4, averages, workers=2))
        assert [len(report.emitted("warning")) for report in reports] == [warnings] * 2


def test_a_killed_worker_ends_in_an_error_not_a_hang() -> None:
    pool = Workers(2)
    try:
        reports = pool.run("mirrored", cells.train, workers=2, faults=("kill=1@3",))
        assert reports[1].error == "died"
        assert reports[0].error
        assert "Connection" in reports[0].error
        assert "process group" not in reports[0].left
    finally:
        pool.close()
