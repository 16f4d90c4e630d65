"""Makes the notebooks of a lab from its source: the students' and the instructors'."""

from __future__ import annotations

import ast
import builtins
import copy
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import WorkbenchError
from .report import PASSED
from .source import Lab, Piece, read

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


def execute(made: NotebookNode, folder: Path, lessons: Sequence[Sequence[str]] = ()) -> None:
    """Run a notebook in a kernel of its own; its outputs are those of this run.

    Args:
        lessons: By cell what must be true once it has run.

    Raises:
        WorkbenchError: A cell failed, took too long or ended the kernel, a check found something
            wrong, or the run does not show a lesson.
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
                "The run does not show what the lab says, so its outputs are not stored.",
                seen=said.removeprefix(_NOT_SHOWN),
                next_step="run it again while nothing else runs; if it stays so, the lab is wrong",
                code="WB-GEN-002",
            ) from None
        raise WorkbenchError(f"A cell of the lab failed: {error}", code="WB-GEN-003") from None
    finally:
        made.metadata = metadata  # without the versions of the kernel that ran it
        made.cells = cells
    for cell in made.cells:
        if "check" in cell.metadata.get("tags", []) and not _passed(cell):
            raise WorkbenchError(
                "A check does not pass on the solution.",
                seen=_plain(cell) or cell.source,
                code="WB-GEN-004",
            )


def _with_lessons(
    cells: Sequence[NotebookNode], lessons: Sequence[Sequence[str]]
) -> list[NotebookNode]:
    """Return the cells with one more behind each that has a lesson: it fails where that is not so.

    The values of the names in a condition are told with it.
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
    """Return an expression that says what the names in a condition stand for."""
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
            solutions, but for those that are to be seen by oneself; exercises and checks have none.
        solved_to: Folder of the instructors' `lab_N_solved.ipynb`, whose checks keep their outputs.
        run: Whether to run the lab for its outputs; else those of cells that have not changed stay.
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
            if cell.cell_type == "code":  # nbval wants a number where there is an output
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
    """Keep the outputs of unchanged cells with that tag alone: others might hold an answer."""
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
    """Return an output as GitHub shows it: of a drawing the SVG, for it strips those in HTML."""
    if "execution_count" in output:
        output["execution_count"] = place
    output.get("metadata", {}).pop(PASSED, None)
    data = output.get("data", {})
    if "image/svg+xml" in data:
        data.pop("text/html", None)
    return output
