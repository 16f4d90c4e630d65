"""The quickstart notebooks: executed cell by cell by nbval, its stored outputs compared."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOK = FOLDER / "00_quickstart.ipynb"
CELL_TIMEOUT_S = 120

pytestmark = [pytest.mark.cluster]
MISSING = importlib.util.find_spec("tensorflow") is None
EVERY = [
    pytest.param(NOTEBOOK, marks=pytest.mark.torch),
    pytest.param(
        FOLDER / "01_tensorflow.ipynb",
        marks=[
            pytest.mark.tensorflow,
            pytest.mark.skipif(MISSING, reason="tensorflow is not installed"),
        ],
    ),
]


def run_nbval(path: Path, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    shutil.copy(path, folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *flags]
    command += [f"--nbval-cell-timeout={CELL_TIMEOUT_S}", path.name]
    return subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "WORKBENCH_HOME": str(folder / "home")},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.mark.parametrize("path", EVERY, ids=lambda path: path.stem)
def test_every_cell_runs_and_gives_the_stored_output(tmp_path, path):
    stored = nbformat.read(path, as_version=4)
    done = run_nbval(path, tmp_path, "--nbval")
    cells = sum(cell.cell_type == "code" for cell in stored.cells)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{cells} passed" in done.stdout


@pytest.mark.torch
def test_the_comparison_can_fail(tmp_path):
    """A stored output that is wrong must be noticed, else the test above proves nothing."""
    stored = nbformat.read(NOTEBOOK, as_version=4)
    cell = next(c for c in stored.cells if c.cell_type == "code" and "%%rank 0" in c.source)
    changed = nbformat.from_dict(stored)
    wrong = nbformat.v4.new_notebook(metadata=changed.metadata)
    wanted = changed.cells.index(cell)
    wrong.cells = [c for c in changed.cells[: wanted + 1] if c.cell_type == "code"]
    for output in wrong.cells[-1].outputs:
        output["data"]["text/plain"] = "something else"
    wrong.cells.append(nbformat.v4.new_code_cell("%cluster stop", outputs=[]))
    path = tmp_path / "wrong.ipynb"
    nbformat.write(wrong, path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval"]
    done = subprocess.run(
        [*command, f"--nbval-cell-timeout={CELL_TIMEOUT_S}", path.name],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "1 failed" in done.stdout


RUNNERS = {
    "papermill": ["papermill", NOTEBOOK.name, "done.ipynb"],
    "nbconvert": ["nbconvert", "--to", "notebook", "--execute", NOTEBOOK.name, "--output", "done"],
}


@pytest.mark.torch
@pytest.mark.parametrize("runner", RUNNERS)
def test_programs_that_run_notebooks_run_it(tmp_path, runner):
    pytest.importorskip(runner, reason=f"{runner} is not installed")
    shutil.copy(NOTEBOOK, tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", *RUNNERS[runner]],
        cwd=tmp_path,
        env={**os.environ, "WORKBENCH_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [c for c in nbformat.read(tmp_path / "done.ipynb", 4).cells if c.cell_type == "code"]
    assert all(cell.execution_count for cell in cells)
    outputs = [output for cell in cells for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    bundles = [output["data"] for output in outputs if "data" in output]
    assert len([b for b in bundles if "image/png" in b]) == 4
    assert not [b for b in bundles if "application/vnd.jupyter.widget-view+json" in b]


@pytest.mark.parametrize("path", [path for case in EVERY for path in case.values])
def test_saved_outputs_need_no_kernel(path):
    """A widget in a saved notebook shows an error where there is no kernel: none may be left."""
    stored = nbformat.read(path, as_version=4)
    bundles = [
        output["data"]
        for cell in stored.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "data" in output
    ]
    assert not [b for b in bundles if "application/vnd.jupyter.widget-view+json" in b]
    pictures = [b for b in bundles if "image/png" in b]
    assert len(pictures) >= 4
    assert all(b["text/plain"].strip() for b in pictures)
