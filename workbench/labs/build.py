"""Makes the notebooks of a lab from its source: the students' and the instructors'.

The source is a Markdown file with the lab's text, steps, exercises, solutions and wrong answers.
Prose is Markdown. A fenced block of `python` is a cell. The words after `python` give its kind:

    ```python                    a step: students get it as it is, with the figure it drew
    ```python unseen             a step whose output students should first produce themselves
    ```python exercise 3.2       the cell that students fill in; it has a line `# YOUR CODE 3.2`
    ```python solution 3.2       the cell that replaces it in the instructor's notebook
    ```python right 3.2          another answer that the check must pass; none is needed
    ```python wrong 3.2          a mistake that the check must find; at least two
    ```python check 3.2          the cell with `labs.check("3.2")`; its body may be empty
    ```python lesson             one condition per line, which must hold after the cells above; it
                                 is in no notebook, and without it the outputs are not stored

Solution, wrong answers and check follow their exercise, in this order.
"""

from __future__ import annotations

import ast
import builtins
import copy
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import PlanError, WorkbenchError
from .answers import PASSED
from .limit import exercise_of

if TYPE_CHECKING:
    from nbformat import NotebookNode

Version = Literal["student", "solved"]

CELL_TIMEOUT_S = 300
_NOT_SHOWN = "lesson not shown: "
_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python", "pygments_lexer": "ipython3"},
}
_TAGS = {"exercise": ["exercise"], "check": ["check", "nbval-check-output"]}


def notebook(lab: Lab, version: Version) -> NotebookNode:
    """Return a lab's notebook without outputs."""
    from nbformat import v4

    cells = []
    for place, piece in enumerate(lab.pieces):
        cell = _cell(piece, version)
        cell["id"] = f"lab{lab.number}-{place:02d}"
        cell.metadata["nbgrader"] = _nbgrader(piece, cell)
        cells.append(cell)
    metadata = {**_METADATA, "workbench": {"lab": lab.number, "version": version}}
    made: NotebookNode = v4.new_notebook(cells=cells, metadata=metadata)  # type: ignore[no-untyped-call,unused-ignore]
    return made


def _cell(piece: Piece, version: Version) -> NotebookNode:
    from nbformat import v4

    if piece.kind == "text":
        text: NotebookNode = v4.new_markdown_cell(piece.source)  # type: ignore[no-untyped-call,unused-ignore]
        return text
    source = piece.solution if piece.kind == "exercise" and version == "solved" else piece.source
    step = ["step", "unseen"] if piece.unseen else ["step"]
    metadata: dict[str, Any] = {"tags": _TAGS.get(piece.kind, step)}
    if piece.exercise:
        metadata["workbench"] = {piece.kind: piece.exercise}
    code: NotebookNode = v4.new_code_cell(source, metadata=metadata)  # type: ignore[no-untyped-call,unused-ignore]
    return code


def _nbgrader(piece: Piece, cell: NotebookNode) -> dict[str, Any]:
    """Return the metadata by which nbgrader knows a cell: to answer, to grade, or to restore.

    Source: nbgrader's documentation, "Cell metadata", schema version 3.
    """
    graded, answer = piece.kind == "check", piece.kind == "exercise"
    number = piece.exercise.replace(".", "-")
    name = f"check-{number}" if graded else f"answer-{number}" if answer else cell["id"]
    points = {"points": piece.points} if graded else {}
    return {
        "grade": graded, "solution": answer, "locked": not answer, "task": False,
        "grade_id": name, "schema_version": 3, "cell_type": cell.cell_type, **points,
    }  # fmt: skip


def execute(made: NotebookNode, folder: Path, lessons: Sequence[Sequence[str]] = ()) -> None:
    """Run a notebook in a new kernel; its outputs are those of this run.

    Args:
        lessons: For each cell, the conditions that must be true after it has run.

    Raises:
        WorkbenchError: A cell failed, took too long or ended the kernel, a check found something
            wrong, or a lesson does not hold.
    """
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, DeadKernelError

    client = NotebookClient(
        made,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        store_widget_state=False,
    )
    metadata, cells = copy.deepcopy(made.metadata), list(made.cells)
    made.cells = _with_lessons(cells, lessons)
    try:
        client.execute(env={**os.environ, "WORKBENCH_HOME": str(folder / "home")})
    except (CellControlSignal, DeadKernelError) as error:
        said = str(getattr(error, "evalue", ""))
        if said.startswith(_NOT_SHOWN):
            raise WorkbenchError(
                "The run does not show the result that the lab describes, so the lab's outputs "
                "were not stored.",
                seen=said.removeprefix(_NOT_SHOWN),
                next_step="build the lab again while nothing else runs; if that fails too, correct "
                "the lab",
                code="WB-GEN-002",
            ) from None
        raise WorkbenchError(f"A cell of the lab failed: {error}", code="WB-GEN-003") from None
    finally:
        made.metadata = metadata  # without the versions of the kernel that ran it
        made.cells = cells
    for cell in made.cells:
        if "check" in cell.metadata.get("tags", []) and not _passed(cell):
            raise WorkbenchError(
                "The solution of an exercise does not pass the check of this exercise.",
                seen=_plain(cell) or cell.source,
                code="WB-GEN-004",
            )


def _with_lessons(
    cells: Sequence[NotebookNode], lessons: Sequence[Sequence[str]]
) -> list[NotebookNode]:
    """Return the cells, each followed by a cell for its lesson, which fails if that is not true.

    The message of such a failure has the values of the names in the condition.
    """
    from nbformat import v4

    found = []
    for place, cell in enumerate(cells):
        found.append(cell)
        for condition in lessons[place] if place < len(lessons) else ():
            code = (
                f"if not ({condition}):\n"
                f"    raise RuntimeError({_NOT_SHOWN + condition!r} + {_values(condition)})"
            )
            found.append(v4.new_code_cell(code))  # type: ignore[no-untyped-call,unused-ignore]
    return found


def _values(condition: str) -> str:
    """Return an expression that gives the values of the names in a condition."""
    found = [node for node in ast.walk(ast.parse(condition)) if isinstance(node, ast.Name)]
    own = {node.id for node in found if isinstance(node.ctx, ast.Store)}  # of a comprehension
    names = {node.id: None for node in found if node.id not in own}
    said = ", ".join(f"{name}={{{name}!r:.200}}" for name in names if not hasattr(builtins, name))
    return f"f' ({said})'" if said else "''"


def _plain(cell: NotebookNode) -> str:
    return "\n".join(output.get("data", {}).get("text/plain", "") for output in cell.outputs)


def _passed(cell: NotebookNode) -> bool:
    return any(output.get("metadata", {}).get(PASSED) is True for output in cell.outputs)


def build(source: Path, to: Path, solved_to: Path, *, run: bool) -> list[Path]:
    """Write the two notebooks of a lab.

    Args:
        source: The file `lab_N.md`.
        to: Folder of the students' notebook `lab_N.ipynb`: steps keep the outputs of a run with the
            solutions, except `unseen` ones; exercises and checks have no outputs.
        solved_to: Folder of the instructors' `lab_N_solved.ipynb`, whose checks keep their outputs.
        run: Whether to run the lab for its outputs; otherwise unchanged cells keep theirs.
    """
    import nbformat

    lab = read(source)
    student, solved = notebook(lab, "student"), notebook(lab, "solved")
    for_students, for_instructors = (
        to / f"lab_{lab.number}.ipynb", solved_to / f"lab_{lab.number}_solved.ipynb"
    )  # fmt: skip
    if run:
        with tempfile.TemporaryDirectory() as folder:
            execute(solved, Path(folder), [piece.lessons for piece in lab.pieces])
        _take_outputs(student, solved)
    else:
        _keep_outputs(student, for_students, "step")
        _keep_outputs(solved, for_instructors, "check")
    for cell in solved.cells:
        if cell.cell_type == "code" and "check" not in cell.metadata["tags"]:
            cell.outputs = []
    for made, path in ((student, for_students), (solved, for_instructors)):
        for place, cell in enumerate(made.cells):
            if cell.cell_type == "code":  # nbval needs a number if there is an output
                cell["execution_count"] = place if cell.outputs else None
                cell.outputs = [_still(output, place) for output in cell.outputs]
        path.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(made, path)  # type: ignore[no-untyped-call,unused-ignore]
    return [for_students, for_instructors]


def _take_outputs(made: NotebookNode, executed: NotebookNode) -> None:
    for cell, ran in zip(made.cells, executed.cells, strict=True):
        if cell.cell_type == "code" and cell.metadata["tags"] == ["step"]:
            cell.outputs = copy.deepcopy(ran.outputs)


def _keep_outputs(made: NotebookNode, path: Path, kept: str) -> None:
    """Keep only the outputs of unchanged cells with that tag: others might contain an answer."""
    import nbformat

    if not path.exists():
        return
    old = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call,unused-ignore]
    outputs = {cell.source: cell.outputs for cell in old.cells if cell.cell_type == "code"}
    for cell in made.cells:
        tags = cell.metadata.get("tags", [])
        if kept in tags and "unseen" not in tags:
            cell.outputs = outputs.get(cell.source, [])


def _still(output: Any, place: int) -> Any:
    """Return an output as GitHub shows it: of a drawing only the SVG, as GitHub strips the HTML."""
    if "execution_count" in output:
        output["execution_count"] = place
    output.get("metadata", {}).pop(PASSED, None)
    data = output.get("data", {})
    if "image/svg+xml" in data:
        data.pop("text/html", None)
    return output


Kind = Literal["text", "step", "exercise", "check"]

_BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```[ \t]*$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(r"lab_(\d+)\.md")
_POINTS = re.compile(r"points=(\d+)")
WRONG = 2
"""How many wrong answers each exercise must have, besides the empty one."""


@dataclass
class Piece:
    """One cell of a lab.

    Attributes:
        exercise: Number of the exercise it belongs to; empty for text and steps.
        points: What a right answer is worth, for an exercise and its check.
        unseen: Whether students get a step without its output, which would show an answer.
        solution: The cell that replaces an exercise in the solved notebook.
        right: Other answers that its check must pass.
        wrong: Mistakes that its check must find.
        lessons: Conditions in its own names that must be true after it has run.
    """

    kind: Kind
    source: str
    exercise: str = ""
    points: float = 1.0
    unseen: bool = False
    solution: str = ""
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    lessons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Lab:
    """A lab as its file describes it."""

    number: int
    pieces: list[Piece]

    @property
    def exercises(self) -> list[Piece]:
        """Its exercises in order."""
        return [piece for piece in self.pieces if piece.kind == "exercise"]


def read(path: Path) -> Lab:
    """Return the lab in a file `lab_N.md`.

    Raises:
        PlanError: It cannot be read as a lab; the message names the invalid block.
    """
    named = _NAME.fullmatch(path.name)
    if named is None or not path.is_file():
        raise PlanError(
            "There is no such lab.", seen=str(path), allowed="a file lab_N.md", code="WB-PLAN-051"
        )
    lab = Lab(int(named[1]), _pieces(path.read_text(encoding="utf-8")))
    _verify(lab, path)
    return lab


def _pieces(text: str) -> list[Piece]:
    found: list[Piece] = []
    for piece in _in_order(text):
        if not isinstance(piece, Piece):
            cells = [one for one in found if one.kind != "text"]
            if not cells:
                raise PlanError(
                    "A `lesson` block must come after the first code cell of its lab.",
                    seen=piece[0],
                    code="WB-PLAN-052",
                )
            cells[-1].lessons += piece
        else:
            found.append(piece)
    return found


def _in_order(text: str) -> Iterator[Piece | list[str]]:
    """Yield the cells, and the conditions of each lesson as a list."""
    open_: dict[str, Piece] = {}
    at = 0
    for block in _BLOCK.finditer(text):
        if prose := text[at : block.start()].strip():
            yield Piece("text", prose)
        at = block.end()
        words, source = block[1].split(), block[2].rstrip("\n")
        worth = _POINTS.fullmatch(words[-1]) if words[:1] == ["exercise"] else None
        if worth:
            words.pop()
        kind, number = words if len(words) == 2 else (" ".join(words), "")
        if not words:
            yield Piece("step", source)
        elif words == ["lesson"]:
            yield [line for line in map(str.strip, source.splitlines()) if line]
        elif words == ["unseen"]:
            yield Piece("step", source, unseen=True)
        elif kind == "exercise" and number:
            yield (piece := Piece("exercise", source, number, float(worth[1]) if worth else 1.0))
            open_[number] = piece
        elif kind == "solution" and number in open_:
            open_[number].solution = source
        elif kind == "right" and number in open_:
            open_[number].right.append(source)
        elif kind == "wrong" and number in open_:
            open_[number].wrong.append(source)
        elif kind == "check" and number in open_:
            asked = source or f'labs.check("{number}")'
            yield Piece("check", asked, number, open_[number].points)
        else:
            raise PlanError(
                "A block of a lab is not valid.",
                seen=f"```python{block[1]}",
                allowed="`unseen` and `lesson` have no number after them. `exercise`, `solution`, "
                "`right`, `wrong` and `check` have the exercise's number after them. The block "
                "`exercise` comes before the other blocks of its exercise, and its first line can "
                "end with points=N",
                code="WB-PLAN-053",
            )
    if prose := text[at:].strip():
        yield Piece("text", prose)


def _verify(lab: Lab, path: Path) -> None:
    checked = {piece.exercise for piece in lab.pieces if piece.kind == "check"}
    for piece in lab.exercises:
        lacking = None
        if exercise_of(piece.source) != piece.exercise:
            lacking = f"a line `# YOUR CODE {piece.exercise}`"
        elif not piece.solution:
            lacking = "a solution"
        elif len(piece.wrong) < WRONG:
            lacking = f"{WRONG} wrong answers"
        elif piece.exercise not in checked:
            lacking = "a check"
        if lacking:
            raise PlanError(
                f"Exercise {piece.exercise} needs {lacking}.", seen=str(path), code="WB-PLAN-054"
            )
