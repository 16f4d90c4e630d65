"""Models of timm and torchvision, as published, equal one device where their layers are cut apart.

A file of its own: importing them takes seconds.
"""

from __future__ import annotations

import sys
from pathlib import Path

import bench_models
import pytest
from workers import Workers

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(
        not (Path(sys.prefix) / "vision").is_dir(), reason="run-tests could not install timm"
    ),
]


@pytest.mark.parametrize("column", bench_models.columns())
def test_timms_vision_transformer_trains_as_on_one_device(workers: Workers, column: str) -> None:
    row = bench_models.run_case(workers, "timm_vit", column)
    assert row["outcome"] == "trained", row


@pytest.mark.parametrize("column", ["model_split", "hybrid"])
@pytest.mark.parametrize("name", ["torchvision_resnet18", "torchvision_vgg11"])
def test_torchvisions_models_train_as_on_one_device(
    workers: Workers, name: str, column: str
) -> None:
    row = bench_models.run_case(workers, name, column, steps=2)
    assert row["outcome"] == "trained", row
