"""A course: what is handed out, collected, and written down."""

from __future__ import annotations

import csv
import json
import zipfile
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from handed_in import cells, write

from workbench import cli
from workbench.errors import PlanError
from workbench.labs.build import notebook, read
from workbench.labs.course import gradebook
from workbench.labs.course.collect import collect, student_of
from workbench.labs.course.feedback import write_feedback
from workbench.labs.course.release import release
from workbench.labs.grading.results import Graded, Outcome

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
SCHEMA = {
    "grade": bool, "solution": bool, "locked": bool, "task": bool, "grade_id": str,
    "schema_version": int, "cell_type": str, "points": float,
}  # fmt: skip
"""nbgrader's cell metadata, version 3 (nbgrader/nbgraderformat/v3.json)."""


def handed_in(path: Path, answer: str = "", lab: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    return write(path, cells({"1.2": f"# YOUR CODE 1.2\ntotal = {answer or 5}"}), lab=lab)


# -- nbgrader's metadata


@pytest.mark.parametrize("number", [1, 3, 6])
@pytest.mark.parametrize("version", ["student", "solved"])
def test_each_cell_has_metadata_that_nbgrader_takes(number: int, version: Any) -> None:
    made = notebook(read(NOTEBOOKS / "solutions" / f"lab_{number}.md"), version)
    ids = set()
    for cell in made.cells:
        meta = cell.metadata["nbgrader"]
        assert set(meta) <= set(SCHEMA)
        assert all(isinstance(value, SCHEMA[name]) for name, value in meta.items())
        assert meta["schema_version"] == 3
        assert meta["cell_type"] == cell.cell_type
        assert meta["grade"] == ("points" in meta)
        assert not (meta["solution"] and meta["locked"])
        assert meta["grade_id"] not in ids
        ids.add(meta["grade_id"])
    graded = [cell for cell in made.cells if cell.metadata["nbgrader"]["grade"]]
    answers = [cell for cell in made.cells if cell.metadata["nbgrader"]["solution"]]
    assert (
        len(graded)
        == len(answers)
        == len(read(NOTEBOOKS / "solutions" / f"lab_{number}.md").exercises)
    )


def test_nbgrader_itself_takes_the_notebooks() -> None:
    form = pytest.importorskip("nbgrader.nbgraderformat", reason="nbgrader is not installed")
    made = notebook(read(NOTEBOOKS / "solutions" / "lab_1.md"), "student")
    form.MetadataValidator().validate_nb(made)


# -- release


def test_a_lab_is_released_with_its_notebook_and_how_to_begin(tmp_path: Path) -> None:
    (made,) = release([1], NOTEBOOKS, tmp_path)
    assert made == tmp_path / "lab_1" / "lab_1.ipynb"
    assert made.read_bytes() == (NOTEBOOKS / "lab_1.ipynb").read_bytes()
    assert "lab_1.ipynb" in (made.parent / "README.md").read_text()
    assert release([1], NOTEBOOKS, tmp_path) == [made]  # again: nothing changes


def test_the_page_of_a_released_lab_says_its_points(tmp_path: Path) -> None:
    (made,) = release([13], NOTEBOOKS, tmp_path)
    page = (made.parent / "README.md").read_text()
    worth = gradebook.points_of(made)
    assert len(set(worth.values())) > 1
    assert f" {sum(worth.values()):g} points" in page
    assert all(f"{name} has {points:g}" in page for name, points in worth.items())


def test_another_version_that_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (made,) = release([1], NOTEBOOKS, tmp_path)
    made.write_text("mine")
    with pytest.raises(PlanError, match="WB-PLAN-335"):
        release([1], NOTEBOOKS, tmp_path)
    assert made.read_text() == "mine"


def test_a_lab_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-334"):
        release([1, 77], NOTEBOOKS, tmp_path)
    assert not list(tmp_path.iterdir())


# -- collect


@pytest.mark.parametrize(
    ("path", "student"),
    [
        ("ada/lab_3/lab_3.ipynb", "ada"),
        ("submitted/ada/lab_3/lab_3.ipynb", "ada"),
        ("ada/lab_3.ipynb", "ada"),
        ("ada_lab_3.ipynb", "ada"),
        ("lab_3-ada.ipynb", "ada"),
        ("Ada Lovelace_4711_assignsubmission_file_/lab_3.ipynb", "Ada-Lovelace"),
        ("Ada Lovelace_4711_assignsubmission_file/sub/My lab.ipynb", "Ada-Lovelace"),
        ("lovelaceada_12_345_lab_3.ipynb", "lovelaceada"),
        ("lovelaceada_LATE_12_345_lab_3-1.ipynb", "lovelaceada"),
        ("../../etc/lab_3.ipynb", "etc"),
        ("../lab_3.ipynb", "unknown"),
    ],
)
def test_whose_notebook_it_is(path: str, student: str) -> None:
    assert student_of(PurePosixPath(path)) == student


def test_notebooks_of_every_layout_are_sorted_by_student_and_lab(tmp_path: Path) -> None:
    there, to = tmp_path / "in", tmp_path / "submitted"
    handed_in(there / "ada" / "lab_1.ipynb")
    handed_in(there / "bob" / "lab_2" / "lab_2.ipynb", lab=2)
    handed_in(there / "ada" / ".ipynb_checkpoints" / "lab_1-checkpoint.ipynb", "7")
    with zipfile.ZipFile(there / "moodle.zip", "w") as archive:
        content = handed_in(tmp_path / "x.ipynb").read_bytes()
        archive.writestr("Cy Twombly_11_assignsubmission_file_/answer.ipynb", content)
        archive.writestr("../../../evil_lab_1.ipynb", content)
        archive.writestr("notes.txt", "no notebook")
    found = collect([there], to)
    paths = {path.relative_to(to).as_posix() for path in to.rglob("*.ipynb")}
    assert paths == {
        "ada/lab_1/lab_1.ipynb", "bob/lab_2/lab_2.ipynb", "Cy-Twombly/lab_1/lab_1.ipynb",
        "evil/lab_1/lab_1.ipynb",
    }  # fmt: skip
    assert {one.state for one in found} == {"new"}
    assert not (tmp_path.parent / "evil_lab_1.ipynb").exists()
    assert {one.state for one in collect([there], to)} == {"unchanged"}


def test_of_two_notebooks_of_a_student_the_newest_counts(tmp_path: Path) -> None:
    import os

    old, new = tmp_path / "a" / "ada" / "lab_1.ipynb", tmp_path / "b" / "ada" / "lab_1.ipynb"
    handed_in(old, "1"), handed_in(new, "2")
    os.utime(old, (1e9, 1e9))
    states = {one.place: one.state for one in collect([tmp_path / "a", tmp_path / "b"],
                                                      tmp_path / "to")}  # fmt: skip
    assert states == {str(old): "older", str(new): "new"}
    assert (tmp_path / "to/ada/lab_1/lab_1.ipynb").read_bytes() == new.read_bytes()


def test_what_was_collected_is_replaced_only_if_asked_for_and_then_kept(tmp_path: Path) -> None:
    source, to = tmp_path / "in" / "ada" / "lab_1.ipynb", tmp_path / "to"
    before = handed_in(source, "1").read_bytes()
    collect([tmp_path / "in"], to)
    after = handed_in(source, "2").read_bytes()
    target = to / "ada/lab_1/lab_1.ipynb"
    (kept,) = collect([tmp_path / "in"], to)
    assert (kept.state, target.read_bytes()) == ("kept", before)
    (replaced,) = collect([tmp_path / "in"], to, replace=True)
    assert (replaced.state, target.read_bytes()) == ("replaced", after)
    assert target.with_name("lab_1.ipynb.before").read_bytes() == before


def test_what_cannot_be_read_is_named_and_the_others_are_collected(tmp_path: Path) -> None:
    handed_in(tmp_path / "in/ada/lab_1.ipynb")
    (tmp_path / "in/bad_lab_1.ipynb").write_text("{")
    (tmp_path / "in/broken.zip").write_bytes(b"no zip")
    (tmp_path / "in/none_lab_1.ipynb").write_text(json.dumps({"cells": []}))
    found = collect([tmp_path / "in"], tmp_path / "to")
    assert sorted(one.state for one in found) == ["new", "unreadable", "unreadable", "unreadable"]
    assert all(one.why for one in found if one.state == "unreadable")


@pytest.mark.parametrize("name", ["missing", "file.txt"])
def test_a_place_without_notebooks_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("")
    with pytest.raises(PlanError, match="WB-PLAN-336"):
        collect([tmp_path / name], tmp_path / "to")


# -- gradebook


def graded(tmp_path: Path, student: str = "ada", right: tuple[str, ...] = ("1.1",)) -> Graded:
    path = handed_in(tmp_path / "submitted" / student / "lab_1" / "lab_1.ipynb")
    outcomes = [
        Outcome(number, state="right" if number in right else "wrong") for number in ("1.1", "1.2")
    ]
    return Graded(str(path), lab=1, outcomes=outcomes)


def rows_in(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_has_the_columns_of_nbgraders_export_and_the_points_of_the_lab(
    tmp_path: Path,
) -> None:
    roster = {"ada": gradebook.Student("ada", "Lovelace", "Ada", "ada@example.org")}
    row = gradebook.row_of(graded(tmp_path), {"1.1": 2.0, "1.2": 3.0}, roster)
    gradebook.update(tmp_path / "grades.csv", [row])
    (found,) = rows_in(tmp_path / "grades.csv")
    assert list(found) == list(gradebook.COLUMNS)
    assert found["assignment"] == "lab_1"
    assert (found["student_id"], found["last_name"]) == ("ada", "Lovelace")
    assert (found["score"], found["max_score"]) == ("2.0", "5.0")
    assert "1.2" in found["remarks"]


def test_rows_of_others_and_columns_of_the_teacher_stay(tmp_path: Path) -> None:
    book = tmp_path / "grades.csv"
    points = {"1.1": 1.0, "1.2": 1.0}
    gradebook.update(book, [gradebook.row_of(graded(tmp_path, "ada"), points, {})])
    book.write_text(book.read_text().replace("remarks\n", "remarks,oral\n").replace(
        "wrong\n", "wrong,excellent\n"))  # fmt: skip
    gradebook.update(book, [gradebook.row_of(graded(tmp_path, "bob"), points, {})])
    again = gradebook.row_of(graded(tmp_path, "ada", ("1.1", "1.2")), points, {})
    gradebook.update(book, [again])
    ada, bob = rows_in(book)
    assert (ada["student_id"], ada["score"], ada["oral"]) == ("ada", "2.0", "excellent")
    assert (bob["student_id"], bob["score"], bob["oral"]) == ("bob", "1.0", "")
    before = book.read_bytes()
    gradebook.update(book, [again])
    assert book.read_bytes() == before


def test_who_handed_in_nothing_has_a_row_that_replaces_no_other(tmp_path: Path) -> None:
    book, student = tmp_path / "grades.csv", gradebook.Student("ada")
    missing = gradebook.missing_row(student, "lab_1", 2.0)
    gradebook.update(book, [missing])
    (found,) = rows_in(book)
    assert (found["score"], found["remarks"]) == ("0.0", gradebook.MISSING)
    gradebook.update(book, [gradebook.row_of(graded(tmp_path), {}, {})])
    gradebook.update(book, [missing])
    (found,) = rows_in(book)
    assert found["score"] == "1.0"


def test_a_name_that_a_spreadsheet_would_calculate_is_text(tmp_path: Path) -> None:
    roster = {"ada": gradebook.Student("ada", "=cmd()")}
    book = tmp_path / "grades.csv"
    gradebook.update(book, [gradebook.row_of(graded(tmp_path), {}, roster)])
    assert rows_in(book)[0]["last_name"] == "'=cmd()"


def test_a_file_that_is_no_gradebook_is_left_alone(tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("name,phone\nada,1\n")
    with pytest.raises(PlanError, match="WB-PLAN-339"):
        gradebook.update(other, [])
    assert other.read_text() == "name,phone\nada,1\n"


@pytest.mark.parametrize("text", ["name\nada\n", "id\nada\nada\n", "id,email\n,x@y\n"])
def test_a_roster_needs_different_ids(text: str, tmp_path: Path) -> None:
    (tmp_path / "class.csv").write_text(text)
    with pytest.raises(PlanError, match="WB-PLAN-338"):
        gradebook.read_roster(tmp_path / "class.csv")


def test_points_are_those_of_the_lab_as_it_was_handed_out(tmp_path: Path) -> None:
    (made,) = release([1], NOTEBOOKS, tmp_path)
    usual = gradebook.points_of(made)
    assert set(usual.values()) == {1.0}
    book = json.loads(made.read_text())
    check = next(c for c in book["cells"] if c["metadata"].get("workbench", {}).get("check"))
    check["metadata"].setdefault("nbgrader", {})["points"] = 5
    made.write_text(json.dumps(book))
    number = check["metadata"]["workbench"]["check"]
    assert gradebook.points_of(made) == {**usual, number: 5.0}


# -- feedback, commands


def test_feedback_stands_below_each_exercise_and_quotes_as_code(tmp_path: Path) -> None:
    one = graded(tmp_path)
    one.outcomes[1].findings = [{"right": False, "words": "`x` is <b>5</b>", "hint": "add"}]
    path = write_feedback(one, {"1.1": 1.0, "1.2": 2.0}, tmp_path / "back")
    assert path == tmp_path / "back" / "ada" / "lab_1" / "lab_1.ipynb"
    made = json.loads(path.read_text())["cells"]
    said = [(i, c) for i, c in enumerate(made) if "feedback" in c["metadata"].get("tags", [])]
    assert len(said) == 2
    for place, cell in said:
        assert "YOUR CODE" in made[place - 1]["source"]
        assert cell["cell_type"] == "markdown"
    text = said[1][1]["source"]
    assert "0 of 2" in text
    assert "```text\n- 'x' is <b>5</b> (hint: add)\n```" in text
    scores = [c["metadata"]["nbgrader"]["score"] for c in made if c["metadata"].get("nbgrader")]
    assert scores == [1.0, 0.0]


def test_the_commands_say_what_they_did(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["release", "1", "--to", "out"]) == 0
    handed_in(tmp_path / "in/ada/lab_1.ipynb")
    (tmp_path / "class.csv").write_text("id\nada\nbob\n")
    assert cli.main(["collect", "in", "--to", "to", "--roster", "class.csv"]) == 0
    said = capsys.readouterr().out
    assert "bob" in said
    assert (tmp_path / "to/ada/lab_1/lab_1.ipynb").is_file()
    handed_in(tmp_path / "in/ada/lab_1.ipynb", "9")
    assert cli.main(["collect", "in", "--to", "to"]) == 1  # another one is there
    assert cli.main(["collect", "nowhere"]) == 1
