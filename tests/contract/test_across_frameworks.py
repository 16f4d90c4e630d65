"""The same recipe in both frameworks: from the same weights, the same losses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from needs import need
from tf_harness import clean, run
from workers import Workers

need("tensorflow")
pytestmark = [pytest.mark.tensorflow, pytest.mark.torch]

STEPS = 50
KERAS = """
import keras
model = keras.Sequential(LAYERS)
result = wb.fit(
    model, wb.data.digits("train", arrays=True), optimizer=keras.optimizers.SGD(0.1),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), batch_size=64, steps=50,
)
"""
DENSE = """[
    keras.layers.Flatten(), keras.layers.Dense(32, "relu"), keras.layers.Dense(10)
]"""
MAPS = """[
    keras.layers.Permute((2, 3, 1)), keras.layers.Conv2D(4, 3, activation="tanh"),
    keras.layers.MaxPooling2D(2), keras.layers.Flatten(), keras.layers.Dense(10)
]"""


def in_torch(convolution, steps=50):
    import torch
    from torch import nn

    from workbench import data
    from workbench.engine.training.fit import fit

    dense = [nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)]
    maps = [nn.Conv2d(1, 4, 3), nn.Tanh(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 10)]
    model = nn.Sequential(*(maps if convolution else dense))
    fit(
        model, data.digits("train"), loss=nn.CrossEntropyLoss(), batch_size=64, steps=steps,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip


def stored(folder: Path, framework: str, weights: dict[str, Any]) -> str:
    """Write weights as a run leaves them."""
    folder.mkdir(parents=True)
    np.savez(folder / "weights.npz", **weights)
    (folder / "run.json").write_text(json.dumps({"framework": framework}))
    return str(folder)


@pytest.mark.parametrize("convolution", [False, True], ids=["dense", "convolution"])
def test_from_the_same_weights_both_frameworks_give_the_same_losses(
    workers: Workers, tmp_path: Path, convolution: bool
) -> None:
    cell = KERAS.replace("LAYERS", MAPS if convolution else DENSE)
    (first,) = workers.run("one_device", in_torch, convolution, 3)
    assert first.error is None, first.error
    folder = stored(tmp_path / "torch", "torch", first.weights)

    (ours,) = workers.run("one_device", in_torch, convolution, init_from=folder)
    assert ours.error is None, ours.error
    theirs = clean(run("one_device", cell, init_from=folder))
    assert len(ours.rows) == len(theirs.rows) == STEPS
    far = abs(ours.rows["local_loss"] - theirs.rows["local_loss"][:, 0]).max()
    assert far <= 1e-4
    assert ours.rows["local_loss"][-1] < ours.rows["local_loss"][0]

    folder = stored(tmp_path / "keras", "tensorflow", theirs.weights)
    (on,) = workers.run("one_device", in_torch, convolution, 2, init_from=folder)
    further = clean(run("one_device", cell, init_from=folder, overrides={"steps": 2}))
    assert on.rows["local_loss"][:2] == pytest.approx(further.rows["local_loss"][:2, 0], abs=1e-4)
    assert on.rows["local_loss"][0] < ours.rows["local_loss"][0]


def test_another_model_is_refused_and_model_fit_takes_weights(tmp_path: Path) -> None:
    begin = "import keras, numpy as np\nx, y = np.ones((8, 2), 'float32'), np.ones((8, 1))\n"
    cell = begin + "model = keras.Sequential([keras.layers.Dense(1)])\n"
    cell += "model.compile(optimizer=keras.optimizers.SGD(0.0), loss='mse')\n"
    cell += "model.fit(x, y, batch_size=8)"
    weights = {"0.weight": np.array([[2.0, 3.0]]), "0.bias": np.array([1.0])}
    folder = stored(tmp_path / "fits", "torch", weights)
    report = clean(run("mirrored", cell, 2, init_from=folder))
    assert [array.ravel().tolist() for array in report.weights.values()] == [[2.0, 3.0], [1.0]]
    folder = stored(tmp_path / "other", "torch", {**weights, "1.weight": np.ones((1, 1))})
    report = run("mirrored", cell, 2, init_from=folder)
    assert report.error is not None
    assert "WB-PLAN-151" in report.error
    assert report.trained == 0
