"""The labs' notebooks: run with their solutions by nbval, made from their sources, fit to show."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time

import nbformat
import pytest
from labs_by_hand import (
    REPOSITORY,
    SOLUTIONS,
    SOURCES,
    environment,
    marked,
    same_sources,
)

CELL_TIMEOUT_S = 180
MOST_BYTES = 1_000_000


def student(path):
    return nbformat.read(REPOSITORY / "notebooks" / f"{path.stem}.ipynb", as_version=4)


def solved(path):
    return nbformat.read(SOLUTIONS / f"{path.stem}_solved.ipynb", as_version=4)


def code(notebook, tag=""):
    return [
        cell
        for cell in notebook.cells
        if cell.cell_type == "code" and (not tag or tag in cell.metadata["tags"])
    ]


@pytest.mark.cluster
@pytest.mark.timing
@pytest.mark.timeout(900)
@pytest.mark.parametrize("path", [marked(path) for path in SOURCES])
def test_with_its_solutions_a_lab_runs_and_its_checks_say_what_they_said(
    tmp_path, path, record_property
):
    name = f"{path.stem}_solved.ipynb"
    shutil.copy(SOLUTIONS / name, tmp_path)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--nbval-lax"]
    began = time.perf_counter()
    done = subprocess.run(
        [*command, f"--nbval-cell-timeout={CELL_TIMEOUT_S}", name],
        cwd=tmp_path, env=environment(tmp_path) | {"PATH": os.environ["PATH"]},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    record_property("lab_s", time.perf_counter() - began)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(code(solved(path)))} passed" in done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_both_notebooks_are_what_the_source_makes_of_them(path):
    for version, made in (("student", student(path)), ("solved", solved(path))):
        sources, kinds = same_sources(path, version)
        assert [cell.source for cell in made.cells] == sources
        assert [cell.cell_type for cell in made.cells] == kinds


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_students_get_figures_and_no_answers(path):
    made = student(path)
    for tag in ("exercise", "check"):
        assert [cell.source for cell in code(made, tag) if cell.outputs] == []
    steps = [output for cell in code(made, "step") for output in cell.outputs]
    pictures = [o for o in steps if {"image/png", "image/svg+xml"} & set(o.get("data", {}))]
    assert pictures
    assert [o for o in steps if o.output_type == "error"] == []
    widgets = [o for o in steps if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert widgets == []
    size = (REPOSITORY / "notebooks" / f"{path.stem}.ipynb").stat().st_size
    assert size < MOST_BYTES


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_a_lab_says_its_goal_where_exercises_run_and_how_to_take_it_home(path):
    made = student(path)
    texts = [cell.source for cell in made.cells if cell.cell_type == "markdown"]
    assert "**Goal.**" in texts[0]
    assert "**Time.**" in texts[0]
    exercises = code(made, "exercise")
    assert 3 <= len(exercises) <= 8
    number = path.stem[4:]
    for place in range(1, len(exercises) + 1):
        titles = [t for t in texts if f"Exercise {number}.{place} (runs " in t]
        assert titles, f"the text of exercise {number}.{place} does not say where it runs"
    told = {
        m[1]: float(m[2])
        for m in re.finditer(r"Exercise (\S+) \([^)]*; (\d+) point", "\n".join(texts))
    }
    checks = [cell.metadata for cell in made.cells if "check" in cell.metadata.get("workbench", {})]
    for metadata in checks:
        exercise = metadata["workbench"]["check"]
        assert metadata["nbgrader"]["points"] == told.get(exercise, 1.0)
    together = "\n".join(texts)
    for words in ("## Summary", "Sources", "## Take it home"):
        assert words in together
    sources = "\n".join(cell.source for cell in code(made))
    assert "labs.beside(" in sources
    assert "labs.take_home(" in sources
