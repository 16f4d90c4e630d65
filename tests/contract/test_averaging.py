"""How mirrored averages gradients: every all-reduce and compression, on real processes."""

from __future__ import annotations

from typing import Any

import cells
import model_cells
import numpy as np
import pytest
import server_cells
from worker_reports import Report, assert_same, clean, failures, joined
from workers import Workers

from workbench import catalog
from workbench.shared import record
from workbench.shared.events import Topic

pytestmark = pytest.mark.torch

MIRRORED = catalog.lookup("mirrored")
ALGORITHMS = MIRRORED.option("allreduce").choices
OWN = [name for name in ALGORITHMS if name not in ("auto", "backend")]
# Compressions that lose nothing: all numbers are chosen, matrices are sent whole.
LOSSLESS = ("topk:1", "powersgd:64")
EXACT = [{"allreduce": name} for name in ALGORITHMS] + [{"compress": c} for c in LOSSLESS]
LOSSY = ["fp16", "bf16", "topk:0.2", "powersgd:2"]


def label(options: dict[str, str]) -> str:
    return ",".join(options.values())


def equal_to_the_last_bit(reports: list[Report]) -> bool:
    first = reports[0].weights
    return all(
        np.array_equal(report.weights[name], first[name]) for report in reports for name in first
    )


@pytest.mark.parametrize("keywords", [{}, {"accumulate": 3, "clip": 0.05}], ids=["", "accumulate"])
@pytest.mark.parametrize("options", EXACT, ids=label)
def test_every_way_of_averaging_is_exact(
    workers: Workers, options: dict[str, str], keywords: dict[str, Any]
) -> None:
    truth = workers.truth(cells.train, **keywords)
    reports = clean(
        workers.run("mirrored", cells.train, workers=3, options=options, keywords=keywords)
    )
    assert_same(reports, truth, 1e-10)
    assert equal_to_the_last_bit(reports)


@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "prepare"])
def test_of_a_table_the_rows_in_use_are_counted(workers: Workers, own_loop: bool) -> None:
    """Each of two workers has six samples: a row of each table, with its number, to one other."""
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    keywords = {"rows": 4000, "own_loop": own_loop}
    truth = workers.truth(server_cells.tables, **keywords)
    reports = clean(workers.run("mirrored", server_cells.tables, workers=2, keywords=keywords))
    assert_same(reports, truth, 1e-12)
    head = 14 * 8  # dense, and whole: 2 (n-1)/n of it
    for report in reports:
        rows = (report.rows["sent_bytes"] - head) / (8 + 24)
        assert (rows == rows.round()).all()
        assert (rows >= 10).all()  # a row that two samples use is there once
        assert (rows <= 12).all()


def test_rows_of_several_micro_batches_are_counted_once(workers: Workers) -> None:
    if workers.kind == "fakegpu":
        pytest.skip("the tests' GPU has no sparse kernels")
    keywords = {"rows": 3, "accumulate": 3}  # rows 0 and 1 alone are used, in every micro-batch
    reports = clean(workers.run("mirrored", server_cells.tables, workers=2, keywords=keywords))
    for report in reports:
        assert (report.rows["sent_bytes"] <= 14 * 8 + 2 * 2 * (8 + 24)).all()


@pytest.mark.parametrize("options", [{"allreduce": "ring"}, {"compress": "topk:1"}], ids=label)
def test_an_own_loop_is_averaged_too(workers: Workers, options: dict[str, str]) -> None:
    truth = workers.truth(cells.train_from_loader, True)
    reports = clean(
        workers.run("mirrored", cells.train_from_loader, True, workers=3, options=options)
    )
    assert_same(reports, truth, 1e-10)
    assert (joined(reports)["sent_bytes"] > 0).all()


@pytest.mark.parametrize("compress", LOSSY)
def test_compressed_training_comes_close(workers: Workers, compress: str) -> None:
    keywords = {"steps": 80, "dtype": "float32"}
    truth = workers.truth(cells.train, **keywords)
    options = {"compress": compress}
    reports = clean(
        workers.run("mirrored", cells.train, workers=2, options=options, keywords=keywords)
    )
    assert equal_to_the_last_bit(reports)
    begin = record.derive(joined([truth])).loss[0]
    best, ours = truth.value["evals"][-1]["loss"], reports[0].value["evals"][-1]["loss"]
    assert begin - ours >= 0.7 * (begin - best)
    different = max(
        abs(reports[0].weights[name] - value).max() for name, value in truth.weights.items()
    )
    assert different > 1e-6  # it did compress
    whole = 2 * 195 / 2 * 4  # a ring of two sends the 195 numbers once
    assert (joined(reports)["sent_bytes"] < 0.7 * whole).all()


WAITS = [*OWN, "fp16", "topk:0.5", "powersgd:1"]


@pytest.mark.timing
@pytest.mark.parametrize("own_loop", [False, True], ids=["fit", "prepare"])
@pytest.mark.parametrize("way", WAITS)
def test_waits_stay_true(workers: Workers, way: str, own_loop: bool) -> None:
    options = {"allreduce" if way in OWN else "compress": way}
    faults = ("slow=1:50ms/backward",)
    reports = clean(
        workers.run(
            "mirrored", cells.slow_steps, own_loop, 20, 2,
            workers=3, options=options, faults=faults,
        )
    )  # fmt: skip
    derived = record.derive(joined(reports))
    wait_ms = np.median(derived.sync_wait_s, axis=0) * 1e3
    assert wait_ms[[0, 2]] == pytest.approx(50, abs=5)
    assert wait_ms[1] == 0
    assert (derived.blamed_rank[:, [0, 2]] == 1).mean() >= 0.95


OUTPUTS = ["dict", "dataclass", "tuple", "parameter", "twice", "loss"]


@pytest.mark.parametrize("kind", OUTPUTS)
def test_whatever_the_model_returns_is_averaged(workers: Workers, kind: str) -> None:
    truth = workers.truth(model_cells.outputs, kind)
    reports = clean(
        workers.run("mirrored", model_cells.outputs, kind, workers=2, options={"allreduce": "ring"})
    )
    assert_same(reports, truth, 1e-10)
    assert equal_to_the_last_bit(reports)
    rows = joined(reports)
    assert not np.isnan(rows["ready_s"]).any()
    # What is ready is stamped before the all-reduce, whose time must be seen as exposed.
    assert (rows["exposed_s"] > 0).all()
    assert (rows["ready_s"] < rows["end_s"] - rows["exposed_s"] + 1e-4).all()


def test_a_compiled_model_is_averaged(workers: Workers) -> None:
    truth = workers.truth(model_cells.outputs, "plain")
    options = {"allreduce": "ring"}
    reports = workers.run("mirrored", model_cells.outputs, "compiled", workers=2, options=options)
    assert failures(reports) == []  # the compiler's own threads stay behind
    assert_same(reports, truth, 1e-10)


def test_unused_parameters_are_named_or_allowed(workers: Workers) -> None:
    keywords = {"unused": True}
    options = {"allreduce": "ring"}
    reports = workers.run("mirrored", cells.train, workers=2, options=options, keywords=keywords)
    for report in reports:
        assert "WB-FIT-110" in str(report.error)
        assert "idle" in str(report.error)
    options["find_unused_parameters"] = "true"
    truth = workers.truth(cells.train, **keywords)
    reports = clean(
        workers.run("mirrored", cells.train, workers=2, options=options, keywords=keywords)
    )
    assert_same(reports, truth, 1e-10)


@pytest.mark.parametrize("options", [{"allreduce": "backend"}, {"allreduce": "ring"}], ids=label)
def test_different_models_are_refused_everywhere(workers: Workers, options: dict[str, str]) -> None:
    reports = clean(
        workers.run("mirrored", model_cells.different_models, workers=3, options=options)
    )
    assert ["WB-FIT-127" in report.value for report in reports] == [True] * 3


def test_topk_has_no_use_for_an_all_reduce(workers: Workers) -> None:
    options = {"allreduce": "ring", "compress": "topk:0.1"}
    reports = workers.run("mirrored", cells.train, workers=2, options=options)
    assert all("WB-FIT-108" in str(report.error) for report in reports)


@pytest.mark.timing
def test_latency_is_simulated_and_counts_as_transfer(workers: Workers) -> None:
    options, faults = {"allreduce": "ring"}, ("latency=10ms",)
    reports = clean(workers.run("mirrored", cells.train, workers=3, options=options, faults=faults))
    transfer_ms = 1e3 * np.median(record.derive(joined(reports)).transfer_s)
    assert transfer_ms == pytest.approx(40, abs=8)  # 2 (n-1) rounds


@pytest.mark.timing
def test_auto_avoids_what_the_simulated_link_makes_slow(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", cells.train, workers=3, faults=("latency=20ms",)))
    (note,) = reports[0].emitted("note")
    assert note["topic"] == Topic.ALLREDUCE_CHOSEN
    assert note["value"] not in ("ring", "backend")
    assert note["value"] in note["text"]


def test_the_backend_is_out_of_the_simulations_reach(workers: Workers) -> None:
    options, faults = {"allreduce": "backend"}, ("bandwidth=10MB/s",)
    reports = workers.run("mirrored", cells.train, workers=2, options=options, faults=faults)
    assert all("WB-FIT-109" in str(report.error) for report in reports)


@pytest.mark.parametrize(
    ("options", "warnings"),
    [
        ({"allreduce": "backend"}, 1),
        ({"allreduce": "backend", "compress": "fp16"}, 1),
        ({"allreduce": "ring"}, 0),
        ({"compress": "topk:1"}, 0),
    ],
    ids=lambda value: label(value) if isinstance(value, dict) else "",
)
def test_a_link_that_is_slowed_during_the_run_warns_where_it_has_no_effect(
    workers: Workers, options: dict[str, str], warnings: int
) -> None:
    reports = clean(
        workers.run("mirrored", cells.train_on_links_that_become_slow, workers=2, options=options)
    )
    assert [len(report.emitted("warning")) for report in reports] == [warnings, 0]


def test_auto_measures_once(workers: Workers) -> None:
    notes = [
        [fields["text"] for fields in report.emitted("note")]
        for _ in range(2)
        for report in clean(workers.run("mirrored", cells.train, workers=3))[:1]
    ]
    assert notes[0] == notes[1]  # the same figures to the digit


@pytest.mark.parametrize("way", OWN)
def test_a_killed_worker_ends_in_an_error_on_all_others(way: str) -> None:
    pool = Workers(3)
    try:
        reports = pool.run(
            "mirrored", cells.train, workers=3, options={"allreduce": way}, faults=("kill=1@3",)
        )
        assert reports[1].error == "died"
        for report in (reports[0], reports[2]):
            assert "Connection closed by peer" in str(report.error)
            assert report.left == []
    finally:
        pool.close()


@pytest.mark.parametrize("way", OWN)
def test_through_the_group_messages_give_the_same_sums(workers: Workers, way: str) -> None:
    near, far = (
        clean(workers.run("mirrored", cells.without_sockets, apart, workers=3,
                          options={"allreduce": way}))
        for apart in (None, 1)
    )  # fmt: skip
    assert [report.value for report in near] == [True] * 3
    assert [report.value for report in far] == [False] * 3  # one cannot, so nobody does
    assert equal_to_the_last_bit([*near, *far])
    assert (joined(near)["sent_bytes"] == joined(far)["sent_bytes"]).all()
