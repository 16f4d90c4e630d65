"""Arguments of `wb.fit` that change how it trains, not what: precision, compile, callbacks."""

from __future__ import annotations

import fit_cells
import model_cells
import numpy as np
import pytest
from worker_reports import Report, assert_same, clean, failures
from workers import Workers

pytestmark = pytest.mark.torch


def values(reports: list[Report]) -> list[dict]:
    assert failures(reports) == []
    return [report.value for report in reports]


@pytest.mark.parametrize(("precision", "met"), [("bf16", "bfloat16"), ("fp16", "float16")])
def test_autocast_computes_in_half_precision_and_keeps_float32_parameters(
    workers: Workers, precision: str, met: str
) -> None:
    (plain,) = values(workers.run("one_device", fit_cells.precise))
    for name, count in (("one_device", 1), ("mirrored", 2)):
        keywords = {"precision": precision}
        for found in values(workers.run(name, fit_cells.precise, workers=count, keywords=keywords)):
            assert found["met"] == [f"torch.{met}"]
            assert found["parameters"] == ["torch.float32"]
            if count == 1:
                assert np.allclose(found["losses"], plain["losses"], rtol=0.05)
                assert found["losses"] != plain["losses"]


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_a_compiled_model_trains_as_the_plain_one(workers: Workers, backend: str) -> None:
    (plain,) = values(workers.run("one_device", fit_cells.precise))
    keywords = {"backend": backend}
    (compiled,) = values(workers.run("one_device", fit_cells.precise, keywords=keywords))
    assert np.allclose(compiled["losses"], plain["losses"], atol=1e-5)
    assert compiled["met"] == []  # the probe never ran as plain Python


@pytest.mark.parametrize("strategy", ["one_device", "mirrored", "tensor_parallel", "model_split"])
def test_a_layer_that_evaluates_does_so_after_an_evaluation_too(
    workers: Workers, strategy: str
) -> None:
    count = 1 if strategy == "one_device" else 2
    reports = workers.run(strategy, fit_cells.frozen_statistics, workers=count)
    held = [found[0] for found in values(reports)]
    assert held[0] == [0.0] * 8
    assert all(mean in ([0.0] * 8, None) for mean in held)
    assert all(found[1] == [False, True, True, True] for found in values(reports))
    told = [fields["text"] for name, fields in reports[0].events if name == "warning"]
    assert not [text for text in told if "microbatch" in text]  # it normalises over none


def test_a_step_fn_that_returns_a_dictionary_is_told_to_return_its_loss(workers: Workers) -> None:
    for report in workers.run("mirrored", fit_cells.returns_a_dictionary, workers=2):
        assert "WB-FIT-192" in str(report.error)
        assert "loss, logits" in str(report.error)


def test_callbacks_hear_steps_epochs_and_the_end(workers: Workers) -> None:
    for found in values(workers.run("mirrored", fit_cells.called_back, workers=2)):
        heard = [tuple(event) for event in found["heard"]]
        assert [step for kind, step in heard if kind == "step"] == list(range(8))
        assert [epoch for kind, epoch in heard if kind == "epoch"] == [0, 1]
        assert heard[-1] == ("end", None)
        assert [(one["step"], one["epoch"]) for one in found["evals"]] == [(2, 0), (5, 1), (7, 1)]
        assert all(0 <= one["right"] <= 1 for one in found["evals"])


@pytest.mark.parametrize("own_loop", [False, True])
def test_lazy_layers_get_their_shapes_from_the_data(workers: Workers, own_loop: bool) -> None:
    reports = clean(workers.run("mirrored", model_cells.lazy, own_loop, workers=2))
    assert reports[0].value == [[16, 8], [16], [3, 16], [3]]
    assert_same(reports, workers.truth(model_cells.lazy), 1e-10)


def test_lazy_layers_that_the_data_does_not_fit_are_named(workers: Workers) -> None:
    reports = workers.run("mirrored", model_cells.lazy, False, True, workers=2)
    for report in reports:
        assert "WB-FIT-047" in report.error
