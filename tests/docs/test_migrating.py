"""Both sides of each diff of docs/migrating.md train, and end with the same weights."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from doc_pages import DOCS, REPOSITORY
from needs import need
from real_kernel import Kernel, kernel

pytestmark = pytest.mark.cluster
PAGE = (DOCS / "migrating.md").read_text("utf-8")
TWO_DEVICES = """
import tensorflow as tf
tf.config.set_logical_device_configuration(
    tf.config.list_physical_devices("CPU")[0], [tf.config.LogicalDeviceConfiguration()] * 2)
"""
"""What stands for two GPUs in TensorFlow."""


def sides(title: str) -> tuple[str, str]:
    """Return the code of a section before the change and after it."""
    chapter = PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    block = re.search(r"```diff\n(.*?)\n```", chapter, re.DOTALL)
    assert block is not None, f"no diff below {title}"
    lines = block[1].split("\n")
    before = "\n".join(line[1:] for line in lines if not line.startswith("+"))
    return before, "\n".join(line[1:] for line in lines if not line.startswith("-"))


def as_a_script(source: str, folder: Path, *launcher: str) -> None:
    """Run a script in a folder, which then holds what it saved."""
    (folder / "train.py").write_text(source, "utf-8")
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, "train.py"], cwd=folder, env=env, text=True, timeout=150,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]


@pytest.fixture(scope="module")
def notebook(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    with kernel(tmp_path_factory.mktemp("moved")) as found:
        found.ok("%load_ext workbench\nimport workbench as wb\n%cluster start 2")
        yield found


def as_a_cell(source: str, notebook: Kernel, to: Path) -> dict[str, np.ndarray]:
    """Run a cell under its strategy and return the weights that the notebook gets."""
    notebook.ok(source)
    notebook.ok(f"import numpy as np; np.savez({str(to)!r}, **wb.runs[-1].weights())")
    with np.load(to) as found:
        return dict(found)


def saved_by_torch(path: Path) -> dict[str, np.ndarray]:
    import torch

    return {name: one.numpy() for name, one in torch.load(path).items()}


def assert_equal(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> None:
    assert sorted(before) == sorted(after)
    for name, values in before.items():
        np.testing.assert_allclose(after[name], values, rtol=0, atol=1e-6, err_msg=name)


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
FROM = [
    pytest.param("From torchrun and DistributedDataParallel", TORCHRUN, "torch", id="torchrun"),
    pytest.param("From Accelerate and `notebook_launcher`", (), "accelerate", id="accelerate"),
    pytest.param("From Lightning", (), "lightning", id="lightning"),
]


@pytest.mark.torch
@pytest.mark.parametrize(("title", "launcher", "package"), FROM)
def test_the_cell_trains_the_weights_of_the_script(title, launcher, package, notebook, tmp_path):
    need(package)
    before, after = sides(title)
    as_a_script(before, tmp_path, *launcher)
    assert_equal(
        saved_by_torch(tmp_path / "model.pt"), as_a_cell(after, notebook, tmp_path / "cell.npz")
    )


@pytest.mark.torch
def test_the_cell_trains_the_weights_of_code_for_horovod(notebook, tmp_path):
    need("torch")
    before, after = sides("From Horovod")
    saved = tmp_path / "model.pt"
    notebook.ok(f"%%distributed horovod\n{before.replace('model.pt', str(saved))}")
    assert_equal(saved_by_torch(saved), as_a_cell(after, notebook, tmp_path / "cell.npz"))


@pytest.mark.tensorflow
def test_the_cell_trains_the_weights_of_a_script_with_tf_distribute(notebook, tmp_path):
    need("tensorflow")
    before, after = sides("From `tf.distribute`")
    save = "np.savez('model.npz', *[one.numpy() for one in model.trainable_variables])"
    as_a_script(f"{TWO_DEVICES}{before}\n{save}\n", tmp_path)
    trained = as_a_cell(after, notebook, tmp_path / "cell.npz")
    with np.load(tmp_path / "model.npz") as kept:
        expected = [kept[name] for name in kept.files]
    assert len(expected) == len(trained)
    for values, found in zip(expected, trained.values(), strict=True):
        np.testing.assert_allclose(found, values, rtol=0, atol=1e-6)
