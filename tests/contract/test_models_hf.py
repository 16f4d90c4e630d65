"""Models of Hugging Face under every strategy. A file of its own: importing them takes seconds."""

from __future__ import annotations

import bench_models
import pytest
from needs import need
from workers import Workers

need("transformers")

pytestmark = pytest.mark.torch

MODELS = [name for name in bench_models.MODELS if name.startswith("hf_")]


@pytest.mark.parametrize("column", bench_models.columns())
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_on_one_device(workers: Workers, name: str, column: str) -> None:
    row = bench_models.run_case(workers, name, column)
    assert row["outcome"] == "trained", row
