"""Whatever way a loss comes about, several workers train what one device trains, or say so."""

from __future__ import annotations

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
    "method", "vae", "seq2seq", "parts", "both", "tied", "penalty", "unfreeze", "freeze",
    "new optimizer", "autograd.backward", "autograd.grad", "no_sync",
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


@pytest.mark.parametrize("kind", ["method", "unfreeze", "new optimizer", "autograd.backward"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_strategies_train_so_or_say_so(workers: Workers, name: str, kind: str) -> None:
    entry = catalog.lookup(name)
    truth = workers.truth(loop_cells.trained, kind)
    options = exact_options(entry) or {}
    reports = workers.run(name, loop_cells.trained, kind, workers=2, options=options)
    if kind == "new optimizer" and name != "local_sgd":
        assert all("one optimizer for the whole loop" in text for text in failures(reports))
        assert len(failures(reports)) == 2
        return
    if kind == "new optimizer":  # its momentum begins anew, as on one device
        assert reports[0].trained == 8
    clean(reports)
    assert_same(reports, truth, 1e-10)
