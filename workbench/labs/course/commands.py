"""`workbench release` and `workbench collect`, and what `workbench grade` writes for a course."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import PlanError
from . import gradebook
from .collect import SAID, collect
from .feedback import write_feedback
from .release import release

if TYPE_CHECKING:
    from ..grading.results import Graded

COMMANDS = ("release", "collect")
_NOT_COLLECTED = 1


def add_commands(commands: Any) -> None:
    """Add the two commands to the parser of `workbench`."""
    out = commands.add_parser("release", help="write the notebooks that students get")
    out.add_argument("labs", nargs="+", type=int, metavar="LAB", help="numbers of labs")
    out.add_argument("--to", type=Path, default=Path("release"), help="folder (default: release)")
    into = commands.add_parser(
        "collect", help="copy the students' notebooks into one folder for each student and lab"
    )
    into.add_argument(
        "places", nargs="+", type=Path, metavar="PLACE", help="folders, zip files and notebooks"
    )
    into.add_argument(
        "--to", type=Path, default=Path("submitted"), help="folder (default: submitted)"
    )
    into.add_argument(
        "--roster",
        type=Path,
        metavar="FILE",
        help="CSV file with all students; with this file, the output also lists the students "
        "whose notebooks are missing",
    )
    into.add_argument(
        "--replace", action="store_true", help="replace notebooks that were collected before"
    )


def add_flags(add: Any) -> None:
    """Add what a course needs to the flags of `workbench grade`."""
    add("--csv", type=Path, metavar="FILE",
        help="write the points to this gradebook (a CSV file); the rows of other students and "
             "labs do not change")  # fmt: skip
    add("--roster", type=Path, metavar="FILE",
        help="CSV file with all students; with this file, the gradebook also gets a row for each "
             "student whose notebook is missing")  # fmt: skip
    add("--feedback", type=Path, metavar="FOLDER",
        help="write copies of the notebooks, with points and the results of the checks, to this "
             "folder")  # fmt: skip


def run(given: argparse.Namespace, notebooks: Path) -> int:
    """Run one of the two commands; return the exit status.

    Raises:
        PlanError: An argument does not fit.
    """
    if given.command == "release":
        for path in release(given.labs, notebooks, given.to):
            print(path)
        return 0
    roster = gradebook.read_roster(given.roster) if given.roster else {}
    found = collect(given.places, given.to, replace=given.replace)
    for one in found:
        of_lab = "" if one.lab is None else f", lab {one.lab}"
        why = f": {one.why}" if one.why else ""
        print(f"{one.student}{of_lab}: {SAID[one.state]}{why} ({one.place})")
    labs = sorted({one.lab for one in found if one.lab is not None})
    for lab in labs if roster else ():
        there = {one.student for one in found if one.lab == lab}
        if missing := [student for student in roster if student not in there]:
            print(f"lab {lab}: no notebook from {', '.join(missing)}")
    counted = Counter(one.state for one in found)
    collected = counted["new"] + counted["replaced"] + counted["unchanged"]
    print(f"{collected} of {len(found)} notebooks are in {given.to}")
    return _NOT_COLLECTED if counted["unreadable"] or counted["kept"] else 0


def notebooks_in(paths: Sequence[Path]) -> list[Path]:
    """Return the notebooks to grade; a folder stands for those that `collect` has put there."""
    found: list[Path] = []
    for path in paths:
        inside = sorted(path.glob("*/lab_*/lab_*.ipynb")) if path.is_dir() else []
        found += inside or [path]
    return found


def check_flags(given: argparse.Namespace) -> dict[str, gradebook.Student]:
    """Check the flags of a course before anything is graded; return the roster.

    Raises:
        PlanError: The gradebook cannot be written, or the roster cannot be read.
    """
    if given.csv is not None and not gradebook.writable(given.csv):
        raise PlanError(
            "The file of --csv cannot be written.",
            seen=str(given.csv),
            allowed="a file in a folder that exists; you must be allowed to write in this folder",
            code="WB-PLAN-340",
        )
    if given.csv is not None:
        gradebook.update(given.csv, [])  # refuses a file that is no gradebook
    return gradebook.read_roster(given.roster) if given.roster else {}


def record(
    graded: Sequence[Graded],
    given: argparse.Namespace,
    roster: dict[str, gradebook.Student],
    notebooks: Path,
) -> None:
    """Write the gradebook and the feedback that were asked for.

    Args:
        notebooks: The folder of the labs as they were handed out.
    """
    if given.csv is None and given.feedback is None:
        return
    original = {one.lab: given.lab or notebooks / f"lab_{one.lab}.ipynb" for one in graded}
    known = [one for one in graded if one.lab is not None and original[one.lab].is_file()]
    points = {one.lab: gradebook.points_of(original[one.lab]) for one in known}
    if given.feedback is not None:
        for one in known:
            write_feedback(one, points[one.lab], given.feedback)
    if given.csv is not None:
        rows = [gradebook.row_of(one, points[one.lab], roster) for one in known]
        there = {(row["assignment"], row["student_id"]) for row in rows}
        for lab, worth in points.items():
            rows += [
                gradebook.missing_row(student, f"lab_{lab}", sum(worth.values()))
                for student in roster.values()
                if (f"lab_{lab}", student.student_id) not in there
            ]
        gradebook.update(given.csv, rows)
