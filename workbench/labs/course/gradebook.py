"""Points of a class as CSV, in the columns of `nbgrader export`.

Source of the columns: the class `CsvExportPlugin` of nbgrader 0.9. One column is ours: `remarks`
says which exercises are not right. Points come from the checks' cells of the lab as it was handed
out (`metadata.nbgrader.points`), so a teacher may change them there.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from ...errors import PlanError
from ...shared.cluster_env import export
from ...views.comparison.exports import csv_cell
from .collect import student_of

if TYPE_CHECKING:
    from ..grading.results import Graded

COLUMNS = (
    "assignment", "duedate", "timestamp", "student_id", "last_name", "first_name", "email",
    "raw_score", "late_submission_penalty", "score", "max_score", "remarks",
)  # fmt: skip
MISSING = "not handed in"


@dataclass(frozen=True)
class Student:
    """A row of the roster."""

    student_id: str
    last_name: str = ""
    first_name: str = ""
    email: str = ""


def read_roster(path: Path) -> dict[str, Student]:
    """Return the students of a CSV file by id.

    Args:
        path: A file with a column `student_id` or `id`, and if possible `last_name`, `first_name`
            and `email`. These are the columns of `nbgrader db student import`.

    Raises:
        PlanError: It cannot be read, has no such column, or names a student twice.
    """
    try:
        rows = list(csv.DictReader(io.StringIO(path.read_text("utf-8-sig"))))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise PlanError(
            "The roster (the list of students) cannot be read.", seen=f"{path}: {error}",
            allowed="a CSV file in UTF-8", code="WB-PLAN-337",
        ) from None  # fmt: skip
    found: dict[str, Student] = {}
    for number, row in enumerate(rows, 2):
        student = row.get("student_id") or row.get("id")
        if not student or student in found:
            raise PlanError(
                "Each row of the roster needs an id that no other row has.",
                seen=f"{path}, line {number}: {student or 'no id'}",
                allowed="a column student_id (or id) with a different value in each row",
                code="WB-PLAN-338",
            )
        names = {name: row.get(name) or "" for name in ("last_name", "first_name", "email")}
        found[student] = Student(student, **names)
    return found


def points_of(lab: Path) -> dict[str, float]:
    """Return the points of each exercise in a lab as it was handed out; 1 where none are given."""
    found: dict[str, float] = {}
    for cell in json.loads(lab.read_text("utf-8")).get("cells", []):
        metadata = cell.get("metadata", {})
        exercise = metadata.get("workbench", {}).get("check")
        if exercise:
            found[exercise] = float(metadata.get("nbgrader", {}).get("points", 1))
    return found


def row_of(
    graded: Graded, points: Mapping[str, float], roster: Mapping[str, Student]
) -> dict[str, object]:
    """Return the row of a graded notebook."""
    path = Path(graded.file)
    student_id = student_of(PurePosixPath(*path.absolute().parts[-3:]))
    student = roster.get(student_id, Student(student_id))
    score = sum((points.get(one.exercise, 1.0) for one in graded.outcomes if one.passed), 0.0)
    not_right = [f"{one.exercise} {one.state}" for one in graded.outcomes if not one.passed]
    unknown = roster and student_id not in roster
    remarks = [*graded.problems, *not_right, *(["not on the roster"] if unknown else [])]
    at = path.stat().st_mtime if path.exists() else 0.0
    return {
        "assignment": f"lab_{graded.lab}", "duedate": "",
        "timestamp": datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S"),
        "student_id": student_id, "last_name": student.last_name,
        "first_name": student.first_name, "email": student.email, "raw_score": score,
        "late_submission_penalty": 0.0, "score": score, "max_score": sum(points.values(), 0.0),
        "remarks": "; ".join(remarks),
    }  # fmt: skip


def missing_row(student: Student, assignment: str, max_score: float) -> dict[str, object]:
    """Return the row of a student who handed in nothing."""
    return {
        "assignment": assignment, "duedate": "", "timestamp": "", "student_id": student.student_id,
        "last_name": student.last_name, "first_name": student.first_name, "email": student.email,
        "raw_score": 0.0, "late_submission_penalty": 0.0, "score": 0.0, "max_score": max_score,
        "remarks": MISSING,
    }  # fmt: skip


def update(path: Path, rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows to a gradebook; rows of other students and assignments stay.

    A row of the same student and assignment is replaced, except that "not handed in" replaces
    nothing. Columns that a teacher has added are kept. The file is complete at any moment.

    Raises:
        PlanError: The file is not such a gradebook.
    """
    kept: dict[tuple[str, str], dict[str, object]] = {}
    columns = list(COLUMNS)
    if path.exists():
        reader = csv.DictReader(io.StringIO(path.read_text("utf-8-sig")))
        names = list(reader.fieldnames or ())
        if not {"assignment", "student_id", "score"} <= set(names):
            raise PlanError(
                "The file exists, but it is not a gradebook.",
                seen=f"{path}: {', '.join(names) or 'empty'}",
                allowed=f"the columns {', '.join(COLUMNS)}",
                next_step="use another file: --csv FILE",
                code="WB-PLAN-339",
            )
        columns += [name for name in names if name not in columns]
        kept = {(row["assignment"], row["student_id"]): dict(row) for row in reader}
    for row in rows:
        key = str(csv_cell(row["assignment"])), str(csv_cell(row["student_id"]))
        if row["remarks"] == MISSING and key in kept:
            continue
        kept[key] = {**kept.get(key, {}), **{name: csv_cell(one) for name, one in row.items()}}
    target = io.StringIO()
    writer = csv.DictWriter(target, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(kept[key] for key in sorted(kept))
    export(path, target.getvalue().encode())


def writable(path: Path) -> bool:
    """Whether a file can be written there."""
    folder = path.absolute().parent
    return folder.is_dir() and os.access(folder, os.W_OK) and not path.is_dir()
