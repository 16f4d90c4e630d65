"""A lab's source becomes the students' and the instructors' notebook."""

from __future__ import annotations

import nbformat
import pytest
from nbformat import v4

from workbench.errors import PlanError, WorkbenchError
from workbench.labs import build

LAB = """# Lab 4: made up

Text.

```python
step = 1
```

More text.

```python exercise 4.1
# YOUR CODE 4.1
answer = None
```

```python solution 4.1
# YOUR CODE 4.1
answer = 42
```

```python right 4.1
answer = 42.0
```

```python wrong 4.1
answer = 41
```

```python wrong 4.1
answer = "42"
```

```python check 4.1
```

The end.
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "lab_4.md"
    path.write_text(LAB)
    return path


def test_the_file_is_read_in_its_order(path):
    lab = build.read(path)
    assert lab.number == 4
    kinds = [piece.kind for piece in lab.pieces]
    assert kinds == ["text", "step", "text", "exercise", "check", "text"]
    (exercise,) = lab.exercises
    assert exercise.solution.endswith("answer = 42")
    assert exercise.right == ["answer = 42.0"]
    assert exercise.wrong == ["answer = 41", 'answer = "42"']
    assert lab.pieces[4].source == 'labs.check("4.1")'


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("# YOUR CODE 4.1\nanswer = None", "answer = None", r"YOUR CODE 4\.1.*WB-PLAN-054"),
        ("python solution 4.1\n", "python wrong 4.1\n", r"a solution.*WB-PLAN-054"),
        ('```python wrong 4.1\nanswer = "42"\n```\n', "", r"2 wrong answers.*WB-PLAN-054"),
        ("```python check 4.1\n```\n", "", r"a check.*WB-PLAN-054"),
        ("python solution 4.1", "python answer 4.1", "WB-PLAN-053"),
        ("python solution 4.1", "python solution 4.2", "WB-PLAN-053"),
    ],
)
def test_what_is_missing_or_unknown_is_said(path, old, new, words):
    assert old in LAB
    path.write_text(LAB.replace(old, new, 1))
    with pytest.raises(PlanError, match=words):
        build.read(path)


@pytest.mark.parametrize("name", ["lab.md", "lab_4.txt", "lab_9.md"])
def test_a_file_that_is_no_lab_is_refused(path, name):
    with pytest.raises(PlanError, match="WB-PLAN-051"):
        build.read(path.with_name(name))


def test_students_get_the_empty_cell_and_instructors_the_solution(path):
    lab = build.read(path)
    student, solved = build.notebook(lab, "student"), build.notebook(lab, "solved")
    nbformat.validate(student)
    nbformat.validate(solved)
    text = "\n".join(cell.source for cell in student.cells)
    assert "answer = None" in text
    assert "42" not in text
    assert "answer = 42" in "\n".join(cell.source for cell in solved.cells)
    assert student.metadata["workbench"] == {"lab": 4, "version": "student"}
    exercise, check = student.cells[3], student.cells[4]
    assert exercise.metadata["workbench"] == {"exercise": "4.1"}
    assert check.metadata["workbench"] == {"check": "4.1"}


def test_a_step_that_gives_an_answer_away_has_no_output_for_students(path, tmp_path, monkeypatch):
    path.write_text(LAB.replace("```python\nstep = 1", "```python unseen\nstep = 1"))

    def execute(made, folder, lessons=()):
        for cell in made.cells:
            if cell.cell_type == "code":
                cell.outputs = [v4.new_output("display_data", {"text/plain": cell.source})]

    monkeypatch.setattr(build, "execute", execute)
    student, _ = build.build(path, tmp_path, tmp_path / "solved", run=True)
    cells = [c for c in nbformat.read(student, as_version=4).cells if c.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[], [], []]
    path.write_text(LAB)
    build.build(path, tmp_path, tmp_path / "solved", run=True)
    step, *others = [c for c in nbformat.read(student, as_version=4).cells if c.cell_type == "code"]
    assert step.outputs
    assert [cell.outputs for cell in others] == [[], []]


def test_outputs_of_cells_that_did_not_change_are_kept(path, tmp_path):
    student, solved = build.build(path, tmp_path, tmp_path / "solved", run=False)
    made = nbformat.read(student, as_version=4)
    data = {"image/svg+xml": "<svg/>", "text/html": "<svg/>", "text/plain": "a drawing"}
    made.cells[1].outputs = [v4.new_output("display_data", data)]
    nbformat.write(made, student)
    path.write_text(LAB.replace("More text.", "Other text."))
    build.build(path, tmp_path, tmp_path / "solved", run=False)
    (kept,) = nbformat.read(student, as_version=4).cells[1].outputs
    assert kept.data == {"image/svg+xml": "<svg/>", "text/plain": "a drawing"}
    path.write_text(LAB.replace("step = 1", "step = 2"))
    build.build(path, tmp_path, tmp_path / "solved", run=False)
    assert nbformat.read(student, as_version=4).cells[1].outputs == []
    assert solved.exists()


def test_a_build_without_a_run_keeps_nothing_that_may_hold_an_answer(path, tmp_path):
    student, _ = build.build(path, tmp_path, tmp_path / "solved", run=False)
    made = nbformat.read(student, as_version=4)
    for cell in made.cells:  # the file was opened, run and saved
        if cell.cell_type == "code":
            cell.outputs = [v4.new_output("display_data", {"text/plain": "42"})]
    nbformat.write(made, student)
    path.write_text(LAB.replace("```python\nstep = 1", "```python unseen\nstep = 1"))
    build.build(path, tmp_path, tmp_path / "solved", run=False)
    cells = [c for c in nbformat.read(student, as_version=4).cells if c.cell_type == "code"]
    assert [cell.outputs for cell in cells] == [[], [], []]


@pytest.mark.parametrize("cell", ["while True:\n    pass", "import os\nos._exit(1)"])
def test_a_lab_that_hangs_or_ends_the_kernel_is_said(cell, tmp_path, monkeypatch):
    monkeypatch.setattr(build, "CELL_TIMEOUT_S", 1)
    book = v4.new_notebook(cells=[v4.new_code_cell(cell)])
    with pytest.raises(WorkbenchError, match="WB-GEN-003"):
        build.execute(book, tmp_path)


TAUGHT = """# Lab 4: made up

```python
speedup = 1.2
```

```python lesson
speedup > 0
all(one < 1 for one in [speedup])
```

The end.
"""


def test_a_lesson_stands_in_no_notebook_and_keeps_all_cells_where_they_were(path):
    path.write_text(TAUGHT)
    lab = build.read(path)
    assert [piece.kind for piece in lab.pieces] == ["step", "text"] or len(lab.pieces) == 3
    (step,) = [piece for piece in lab.pieces if piece.kind == "step"]
    assert step.lessons == ["speedup > 0", "all(one < 1 for one in [speedup])"]
    for version in ("student", "solved"):
        assert "one < 1" not in "".join(c.source for c in build.notebook(lab, version).cells)


def test_a_lesson_without_a_cell_is_refused(path):
    path.write_text("```python lesson\nTrue\n```\n")
    with pytest.raises(PlanError, match="WB-PLAN-052"):
        build.read(path)


def test_a_run_that_does_not_show_the_lesson_stores_nothing(path, tmp_path):
    path.write_text(TAUGHT)
    with pytest.raises(WorkbenchError, match="WB-GEN-002") as caught:
        build.build(path, tmp_path / "to", tmp_path / "solved", run=True)
    assert "speedup=1.2" in str(caught.value)
    assert not (tmp_path / "to").exists()
    path.write_text(TAUGHT.replace("1.2", "0.57"))
    student, _ = build.build(path, tmp_path / "to", tmp_path / "solved", run=True)
    assert len(nbformat.read(student, as_version=4).cells) == 3
