"""Models larger than one device: none builds the whole but rank 0, and training is the same.

A file of its own: importing Hugging Face's models takes seconds.
"""

from __future__ import annotations

from typing import Any

import bench_large_model
import large_cells
import numpy as np
import pytest
from needs import need
from worker_reports import assert_same, clean, failures
from workers import Workers

need("transformers")

pytestmark = pytest.mark.torch

UNITS = {"unit_mb": "0"}


def run(workers: Workers, cell: Any, *, options: Any = UNITS, **keywords: Any) -> Any:
    return workers.run("sharded", cell, workers=2, options=options, keywords=keywords)


@pytest.mark.parametrize("built", ["function", "rank 0"])
@pytest.mark.parametrize(
    "way",
    [
        {},
        {"recomputed": True},
        {"adapted": True, "tied": False},
        {"compiled": "aot_eager"},
    ],
    ids=["plain", "activations recomputed", "adapters alone", "compiled"],
)
def test_a_language_model_built_without_memory_trains_as_on_one_device(
    workers: Workers, way: dict[str, Any], built: str
) -> None:
    truth = workers.truth(large_cells.language_model, **{**way, "built": "real", "compiled": ""})
    reports = run(workers, large_cells.language_model, **way, built=built)
    if way.get("compiled"):  # the compiler's own threads stay behind
        assert failures(reports) == []
    else:
        clean(reports)
    assert_same(reports, truth, 1e-6)  # Llama's norms compute in float32
    for report in reports:
        assert report.value["devices"] == ["cpu"]
        assert report.value["tied"] == truth.value["tied"]
        assert report.value["trained"] == truth.value["trained"]


def test_half_the_bits_are_near_one_device(workers: Workers) -> None:
    truth = workers.truth(large_cells.language_model, built="real", precision="bf16")
    reports = clean(run(workers, large_cells.language_model, precision="bf16"))
    mean = np.mean([report.value["losses"] for report in reports], axis=0)
    assert np.allclose(mean, truth.value["losses"], atol=0.02)


def test_a_model_without_memory_anywhere_draws_its_weights(workers: Workers) -> None:
    reports = clean(run(workers, large_cells.language_model, built="meta", tied=True))
    losses = [report.value["losses"] for report in reports]
    assert 3.5 < np.mean(losses, axis=0)[0] < 5  # log 64 is 4.16
    assert np.mean(losses, axis=0)[-1] < np.mean(losses, axis=0)[0]
    assert all(report.value["tied"] for report in reports)


@pytest.mark.parametrize("kind", ["plain", "plain function", "own function", "normed function"])
def test_layers_of_torch_are_filled(workers: Workers, kind: str) -> None:
    first, second = clean(run(workers, large_cells.without_memory, kind=kind))
    assert np.isfinite(first.value["loss"])
    assert first.value["values"] == second.value["values"]
    if kind == "normed function":  # a buffer that is not saved has what `__init__` gave it
        assert 16.0 in first.value["values"]


@pytest.mark.parametrize(
    ("kind", "words"),
    [("own", "WB-FIT-160"), ("normed", "WB-FIT-160"), ("own broken", "no such file")],
)  # fmt: skip
def test_weights_that_nobody_can_draw_are_named_on_every_worker(
    workers: Workers, kind: str, words: str
) -> None:
    first, second = run(workers, large_cells.without_memory, kind=kind)
    assert words in str(first.error)
    assert "WB-FIT-161" in str(second.error)


@pytest.mark.parametrize(
    ("strategy", "way"),
    [("mirrored", "use sharded"), ("tensor_parallel", "use sharded"),
     ("model_split", "wb.fit(lambda: make_model(), ...)")],
)  # fmt: skip
def test_a_model_without_memory_is_refused_where_nobody_fills_it(
    workers: Workers, strategy: str, way: str
) -> None:
    reports = workers.run(strategy, large_cells.without_memory, workers=2)
    for report in reports:
        assert "WB-FIT-162" in str(report.error)
        assert way in str(report.error)


def test_only_rank_0_gets_the_whole(workers: Workers) -> None:
    options = {**UNITS, "gather": "first"}
    first, second = clean(run(workers, large_cells.language_model, options=options))
    assert first.value["devices"] == ["cpu"]
    assert "meta" in second.value["devices"]


def test_the_host_holds_a_model_of_a_gigabyte_once() -> None:
    row = bench_large_model.measure(2, "adapters", bench_large_model.WHOLE)
    assert row["model_bytes"] > 1e9
    assert max(row["peaks"].values()) <= bench_large_model.GOAL, row
