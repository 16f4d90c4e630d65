"""Runs labs as a student does, with every answer in their sources: right, wrong and empty."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from nbclient import NotebookClient
from nbformat import v4

from workbench.labs import build

REPOSITORY = Path(__file__).parents[1]
SOLUTIONS = REPOSITORY / "notebooks" / "solutions"
SOURCES = sorted(SOLUTIONS.glob("lab_*.md"), key=lambda path: int(path.stem[4:]))
NEEDS_TENSORFLOW = {7}
MISSING = importlib.util.find_spec("tensorflow") is None
CELL_TIMEOUT_S = 180


def marked(path: Path) -> Any:
    """Return a lab as a test's parameter, with the marks of the framework it needs."""
    marks = [pytest.mark.torch]
    if int(path.stem[4:]) in NEEDS_TENSORFLOW:
        reason = "tensorflow is not installed"
        marks = [pytest.mark.tensorflow, pytest.mark.skipif(MISSING, reason=reason)]
    return pytest.param(path, marks=marks, id=path.stem)


@dataclass(frozen=True)
class Tried:
    """The result of the check for one answer.

    Attributes:
        answer: `empty`, `wrong 1`, ..., `right 1`, ... or `solution`.
        text: The report as the student reads it.
    """

    exercise: str
    answer: str
    text: str

    @property
    def passed(self) -> bool:
        return ": right (" in self.text.partition("\n")[0]

    @property
    def is_right(self) -> bool:
        return self.answer == "solution" or self.answer.startswith("right")

    @property
    def has_hint(self) -> bool:
        return "hint: " in self.text


@dataclass(frozen=True)
class Proof:
    """All answers to a lab's exercises, tried in one kernel."""

    tried: list[Tried]
    errors: list[str]
    """What steps, checks and solutions raised; wrong answers may raise."""


def environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "WORKBENCH_HOME": str(folder / "home")}


def run(cells: list[Any], folder: Path) -> None:
    """Run cells in a separate kernel; errors stay in their outputs."""
    made = v4.new_notebook(cells=cells)
    client = NotebookClient(
        made, timeout=CELL_TIMEOUT_S, kernel_name="python3", allow_errors=True,
        resources={"metadata": {"path": str(folder)}}, store_widget_state=False,
    )  # fmt: skip
    client.execute(env=environment(folder))


def prove(path: Path, folder: Path) -> Proof:
    """Run a lab; at each exercise try the empty cell, each wrong answer, then the solution."""
    lab = build.read(path)
    checks = {piece.exercise: piece.source for piece in lab.pieces if piece.kind == "check"}
    cells = []
    for piece in lab.pieces:
        if piece.kind == "step":
            cells.append(v4.new_code_cell(piece.source, metadata={"says": ("", "step")}))
        elif piece.kind == "exercise":
            wrong = [(f"wrong {i}", text) for i, text in enumerate(piece.wrong, 1)]
            right = [(f"right {i}", text) for i, text in enumerate(piece.right, 1)]
            answers = [("empty", piece.source), *wrong, *right, ("solution", piece.solution)]
            for answer, text in answers:
                said = (piece.exercise, answer)
                cells.append(v4.new_code_cell(text, metadata={"gives": said}))
                cells.append(v4.new_code_cell(checks[piece.exercise], metadata={"says": said}))
    run(cells, folder)
    tried = [
        Tried(*cell.metadata["says"], plain(cell))
        for cell in cells
        if cell.metadata.get("says", ("",))[0]
    ]
    errors = [
        f"{cell.source}\n  {output.ename}: {output.evalue}"
        for cell in cells
        for output in cell.outputs
        if output.output_type == "error" and not _may_raise(cell)
    ]
    return Proof(tried, errors)


def _may_raise(cell: Any) -> bool:
    return str(cell.metadata.get("gives", ("", ""))[1]).startswith("wrong")


def plain(cell: Any) -> str:
    """Return the output of a cell, as text."""
    return "\n".join(output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def same_sources(path: Path, version: build.Version) -> tuple[list[str], list[str]]:
    """Return the cells that a lab's source asks for."""
    made = build.notebook(build.read(path), version)
    return [cell.source for cell in made.cells], [cell.cell_type for cell in made.cells]
