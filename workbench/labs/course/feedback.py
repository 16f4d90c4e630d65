"""What students get back: their notebook, with the points and findings below each exercise."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from ..limit import exercise_of
from .collect import student_of

if TYPE_CHECKING:
    from ..grading.results import Graded, Outcome

FOLDER = "feedback"


def write_feedback(graded: Graded, points: Mapping[str, float], to: Path) -> Path | None:
    """Write a copy of a notebook with its results; return its path, or None if it has none.

    Below each exercise a text cell says the points and what the check found. The check's cell has
    `score` in `metadata.nbgrader`, where nbgrader's own feedback puts it.
    """
    path = Path(graded.file)
    if not graded.outcomes or not path.is_file():
        return None
    book = json.loads(path.read_text("utf-8-sig"))
    outcomes = {one.exercise: one for one in graded.outcomes}
    cells: list[dict[str, Any]] = []
    for cell in book.get("cells", []):
        cells.append(cell)
        number = _exercise(cell, outcomes)
        if number is not None:
            one, most = outcomes.pop(number), points.get(number, 1.0)
            score = most if one.passed else 0.0
            nbgrader = cell.setdefault("metadata", {}).setdefault("nbgrader", {})
            nbgrader.update(score=score, points=most)
            cells.append(_said(one, score, most))
    cells += [_said(one, 0.0, points.get(one.exercise, 1.0)) for one in outcomes.values()]
    book["cells"] = cells
    student = student_of(PurePosixPath(*path.absolute().parts[-3:]))
    target = to / student / f"lab_{graded.lab}" / f"lab_{graded.lab}.ipynb"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(json.dumps(book, indent=1, ensure_ascii=False), encoding="utf-8")
    return target


def _exercise(cell: Mapping[str, Any], outcomes: Mapping[str, Outcome]) -> str | None:
    """Return the exercise whose answer is in a cell; None for other cells."""
    source = cell.get("source", "")
    text = "".join(source) if isinstance(source, list) else str(source)
    number = exercise_of(text) if cell.get("cell_type") == "code" else None
    return number if number in outcomes else None


def _said(one: Outcome, score: float, most: float) -> dict[str, Any]:
    """Return a text cell for one exercise. What a check found may quote the student: as code."""
    lines = [f"**Exercise {one.exercise}: {score:g} of {most:g}** ({one.state})"]
    found = [
        f"{'+' if finding.get('right') else '-'} {finding.get('words', '')}"
        + (f" (hint: {finding['hint']})" if finding.get("hint") else "")
        for finding in one.findings
    ]
    if one.error:
        found.append(f"! {one.error}")
    if found:
        text = "\n".join(found).replace("`", "'")
        lines.append(f"```text\n{text}\n```")
    return {
        "cell_type": "markdown", "id": f"feedback-{one.exercise.replace('.', '-')}",
        "metadata": {"tags": [FOLDER], "workbench": {"feedback": one.exercise}},
        "source": "\n\n".join(lines),
    }  # fmt: skip
