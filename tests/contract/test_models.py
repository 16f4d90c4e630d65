"""Models as public code writes them, under every strategy: they train, and equal one device.

The cells are those of `benchmarks/bench_models.py`, which prints them as a table.
"""

from __future__ import annotations

import bench_models
import pytest
from workers import Workers

pytestmark = pytest.mark.torch

MODELS = [name for name in bench_models.MODELS if not name.startswith("hf_")]


@pytest.mark.parametrize("column", bench_models.columns())
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_device(workers: Workers, name: str, column: str) -> None:
    row = bench_models.run_case(workers, name, column)
    assert row["outcome"] == "trained", row


def test_vgg_trains_in_stages(workers: Workers) -> None:
    row = bench_models.run_case(workers, "vgg", "model_split")
    assert row["outcome"] == "trained", row
