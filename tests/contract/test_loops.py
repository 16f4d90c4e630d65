"""Whatever way a loss comes about, several workers train what one device trains, or say so."""

from __future__ import annotations

import re
import time

import loop_cells
import numpy as np
import pytest
from strategy_cases import exact_options
from worker_reports import Report, assert_same, clean, failures, joined
from workers import Workers

from workbench import catalog

pytestmark = pytest.mark.torch

BACKEND, RING = {"allreduce": "backend"}, {"allreduce": "ring"}
OURS = {"backend": BACKEND, "ring": RING}
WAYS = [
    "method", "vae", "seq2seq", "parts", "both", "tied", "penalty", "unfreeze", "freeze", "grow",
    "new optimizer", "autograd.backward", "autograd.grad", "no_sync", "alone",
]  # fmt: skip
IN_FIT = ["method", "vae", "seq2seq", "tied", "penalty"]


def assert_trained(reports: list[Report], truth: Report) -> None:
    clean(reports)
    assert reports[0].trained == truth.trained
    assert_same(reports, truth, 1e-10)
    first = reports[0].weights
    assert all(np.array_equal(r.weights[n], first[n]) for r in reports for n in first)


@pytest.mark.parametrize("kind", WAYS)
@pytest.mark.parametrize("way", OURS)
def test_an_own_loop_trains_as_one_device_does(workers: Workers, way: str, kind: str) -> None:
    truth = workers.truth(loop_cells.trained, kind)
    reports = workers.run("mirrored", loop_cells.trained, kind, workers=2, options=OURS[way])
    assert_trained(reports, truth)
    assert truth.trained == 8
    sent = joined(reports)["sent_bytes"]
    if kind != "autograd.grad":  # averaged twice where it was not backward's
        trained = 8 * sum(value.size for value in truth.weights.values())
        if kind in ("method", "vae", "parts", "both"):
            whole = trained if kind != "vae" else sent.max()
            assert (sent == whole).all()  # a ring of two sends it once, and nothing is assumed
    assert (sent > 0).all()


@pytest.mark.parametrize("kind", IN_FIT)
@pytest.mark.parametrize("way", OURS)
def test_step_fn_trains_as_one_device_does(workers: Workers, way: str, kind: str) -> None:
    truth = workers.truth(loop_cells.trained, kind, False)
    reports = workers.run("mirrored", loop_cells.trained, kind, False, workers=2, options=OURS[way])
    assert_trained(reports, truth)
    assert (joined(reports)["sent_bytes"] > 0).all()


OTHERS = ["central_storage", "parameter_server", "local_sgd"]


@pytest.mark.parametrize(
    "kind", ["method", "unfreeze", "freeze", "new optimizer", "autograd.backward"]
)
@pytest.mark.parametrize("name", OTHERS)
def test_other_strategies_train_so_or_say_so(workers: Workers, name: str, kind: str) -> None:
    entry = catalog.lookup(name)
    truth = workers.truth(loop_cells.trained, kind, clipped=False)  # by hand only where averaged
    reports = workers.run(
        name, loop_cells.trained, kind, workers=2, options=exact_options(entry) or {},
        keywords={"clipped": False},
    )  # fmt: skip
    refused = {"new optimizer": "WB-FIT-129",
               "unfreeze": "WB-FIT-124"}  # fmt: skip
    if kind in refused and name != "local_sgd":
        assert [refused[kind] in text for text in failures(reports)] == [True, True]
        return
    if kind == "new optimizer":  # its momentum begins anew, as on one device
        assert reports[0].trained == 8
    clean(reports)
    assert_same(reports, truth, 1e-10)


@pytest.mark.parametrize("way", OURS)
def test_both_models_of_a_gan_are_averaged(workers: Workers, way: str) -> None:
    truth = workers.truth(loop_cells.gan)
    reports = workers.run("mirrored", loop_cells.gan, workers=2, options=OURS[way])
    assert_trained(reports, truth)
    assert truth.trained == 6  # the first pair's optimizer ends the steps
    for report in reports:
        assert report.value == pytest.approx(truth.value, abs=1e-10)
    assert not reports[0].emitted("warning")


def test_a_second_model_that_nobody_averages_is_told_of(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", loop_cells.gan, "one", workers=2))
    (told,) = reports[0].emitted("warning")
    assert "(8, 2), (8,), (4, 8), (4,)" in told["text"]
    assert reports[0].value != reports[1].value


def test_a_strategy_for_one_model_refuses_the_second(workers: Workers) -> None:
    reports = workers.run("local_sgd", loop_cells.gan, workers=2)
    assert ["WB-FIT-070" in str(r.error) for r in reports] == [True, True]


GUARDED = [
    ("mirrored", False, {}), ("mirrored", True, RING), ("central_storage", False, {}),
    ("central_storage", True, {}), ("parameter_server", False, {"sync": "true"}),
    ("local_sgd", False, {"every": "2"}), ("local_sgd", True, {"every": "2"}),
    ("hybrid", False, {"stages": "1"}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "own_loop", "options"),
    GUARDED,
    ids=[f"{name}-{'prepare' if own_loop else 'fit'}" for name, own_loop, _ in GUARDED],
)
def test_a_copy_that_differs_by_one_bit_ends_the_run_by_name(
    workers: Workers, name: str, own_loop: bool, options: dict[str, str]
) -> None:
    reports = workers.run(name, loop_cells.led_astray, own_loop, workers=2, options=options)
    for report in reports:
        error = str(report.error)
        assert error.startswith("FitError: ")
        assert "WB-FIT-113" in error
        assert re.search(r"step \d+.* 1.bias differs by up to", error)
        assert "rank 1 and rank 0" in error
        assert report.left == []
        assert report.trained < 24


def test_what_all_hold_under_tensor_parallel_is_compared_by_rounding(workers: Workers) -> None:
    for by, fails in (("a bit", False), ("noise", True)):
        reports = workers.run("tensor_parallel", loop_cells.led_astray, False, 2, by, workers=2)
        assert ["WB-FIT-113" in str(r.error) for r in reports] == [fails] * 2


@pytest.mark.parametrize("kind", ["bit", "steps"])
def test_a_rank_that_goes_its_own_way_is_caught(workers: Workers, kind: str) -> None:
    for own_loop in (True, False) if kind == "bit" else (True,):
        reports = workers.run("mirrored", loop_cells.diverging, kind, own_loop, workers=2)
        assert ["WB-FIT-113" in str(report.error) for report in reports] == [True, True]


def test_copies_are_described_at_the_end_of_a_loop(workers: Workers) -> None:
    cases = (
        ("central_storage", "none", True),
        ("mirrored", "none", True),
        ("mirrored", "after", False),
    )
    for strategy, kind, alike in cases:
        reports = clean(workers.run(strategy, loop_cells.diverging, kind, True, workers=2))
        first, second = (report.copy for report in reports)
        assert (first["rank"], second["rank"]) == (0, 1)
        assert first["like"] == second["like"]
        assert (first["digest"] == second["digest"]) == alike


def test_a_loops_own_ddp_is_compared_too(workers: Workers) -> None:
    clean(workers.run("mirrored", loop_cells.watched, "right", workers=2))
    reports = workers.run("mirrored", loop_cells.watched, "passed by", workers=2)
    assert ["WB-FIT-113" in str(report.error) for report in reports] == [True, True]


@pytest.mark.timing
def test_comparing_takes_no_time_to_speak_of(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", loop_cells.guarded, workers=2))
    assert all(report.value[0] < 0.005 for report in reports)
    assert all(report.value[1] >= 4 for report in reports)


@pytest.mark.parametrize("way", OURS)
def test_a_parameter_without_a_gradient_is_named(workers: Workers, way: str) -> None:
    reports = workers.run("mirrored", loop_cells.half_used, workers=2, options=OURS[way])
    for report in reports:
        assert "WB-FIT-110" in str(report.error)
        assert "'1.weight'" in str(report.error)


@pytest.mark.parametrize("way", OURS)
def test_workers_that_freeze_different_layers_are_told(workers: Workers, way: str) -> None:
    reports = workers.run("mirrored", loop_cells.one_freezes, workers=2, options=OURS[way])
    for place, report in enumerate(reports):
        assert "WB-FIT-154" in str(report.error)
        assert f"{place}.bias, {place}.weight" in str(report.error)
        assert f"{1 - place}.weight" not in str(report.error)


@pytest.mark.parametrize("way", OURS)
def test_a_worker_that_alone_freezes_a_layer_is_told_at_once(workers: Workers, way: str) -> None:
    """The others know of no change, and wait for it in the reduction."""
    began = time.monotonic()
    first, other = workers.run(
        "mirrored", loop_cells.one_freezes, True, workers=2, options=OURS[way]
    )
    assert time.monotonic() - began < 20  # with nobody there to interrupt them
    assert "WB-FIT-154" in str(first.error)
    assert all(named in str(first.error) for named in ("rank 0", "0.bias, 0.weight", "rank 1"))
    assert other.error is not None


def test_samples_of_sequences_are_counted_along_the_batch(workers: Workers) -> None:
    reports = clean(workers.run("mirrored", loop_cells.sequences, workers=2))
    assert (joined(reports)["samples"] == 10).all()


def test_a_loop_that_steps_by_hand_says_what_it_did(workers: Workers) -> None:
    reports = workers.run("mirrored", loop_cells.without_step, workers=2)
    assert [report.value for report in reports] == [["wb.prepare", 3, 0, 0]] * 2


def test_schedulers_after_the_loader_are_sent_to_keep(workers: Workers) -> None:
    (report,) = workers.run("one_device", loop_cells.prepared_as_elsewhere, workers=1)
    assert "WB-FIT-191" in str(report.error)
    assert "StepLR" in str(report.error)
    assert report.left == []


def test_sharded_says_what_a_method_goes_past(workers: Workers) -> None:
    reports = workers.run("sharded", loop_cells.trained, "parts", False, workers=2)
    for report in reports:
        assert "WB-FIT-130" in str(report.error)
        assert report.left == []


def test_a_rank_whose_loop_is_shorter_is_not_called_gone(workers: Workers) -> None:
    first, second = workers.run("mirrored", loop_cells.leaves_early, workers=2, options=RING)
    assert second.error is None
    assert "worker 1" in str(first.error)
    assert "WB-RUN-021" in str(first.error)


@pytest.mark.parametrize("kind", ["backward", "no_sync", "then synced", "autograd.grad"])
def test_clipping_sees_the_gradients_that_it_sees_under_plain_ddp(
    workers: Workers, kind: str
) -> None:
    found = [report.value for report in clean(workers.run(
        "mirrored", loop_cells.norms_clipped, kind, workers=2, options=BACKEND
    ))]  # fmt: skip
    for plain, ours in found:
        assert ours == pytest.approx(plain, rel=1e-6)
    alone = kind in ("no_sync", "autograd.grad")  # a worker's own: the step averages what is left
    assert (found[0][0] != found[1][0]) == alone


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("mirrored", {}), ("central_storage", {}), ("parameter_server", {"sync": True}),
        ("sharded", {}), ("local_sgd", {}), ("tensor_parallel", {}), ("model_split", {}),
    ],
)  # fmt: skip
def test_a_step_fn_that_calls_backward_is_refused(
    workers: Workers, strategy: str, options: dict
) -> None:
    for report in workers.run(strategy, loop_cells.own_backward, workers=2, options=options):
        assert "WB-FIT-155" in str(report.error)
