"""What students get: a lab's notebook, and a page that says how to begin."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from ...errors import PlanError
from ..answers import labs
from .gradebook import points_of

_README = """\
# Lab {lab}

Open `lab_{lab}.ipynb` in JupyterLab and run its cells from top to bottom.

- Fill in each cell that has the line `# YOUR CODE`. Do not change the other cells: the grader
  replaces each of these cells by the original cell.
- Run the check below each exercise. The check says what is right and what is wrong, and gives a
  hint.
- Save the notebook and hand in the file `lab_{lab}.ipynb`. Do not rename it.

The lab has {count} exercises and {points:g} points in total: {each}. For an exercise you
get either all of its points or no points. To run the lab, install
`distributed-workbench[{extras}]`. After this installation, the lab needs no
internet connection.
"""


def release(numbers: Sequence[int], notebooks: Path, to: Path) -> list[Path]:
    """Write each lab's folder `lab_N` with its notebook and a README; return the notebooks.

    A notebook that is there already and equal is left alone.

    Args:
        notebooks: The folder with the students' notebooks.

    Raises:
        PlanError: There is no such lab, or the folder has another version of its notebook.
    """
    known = [number for number in labs() if (notebooks / f"lab_{number}.ipynb").is_file()]
    unknown = [number for number in numbers if number not in known]
    if unknown:
        raise PlanError(
            "There is no such lab.",
            seen=", ".join(map(str, unknown)),
            allowed=", ".join(map(str, known)),
            code="WB-PLAN-334",
        )
    made = []
    for number in numbers:
        source = notebooks / f"lab_{number}.ipynb"
        target = to / f"lab_{number}" / source.name
        if target.exists() and target.read_bytes() != source.read_bytes():
            raise PlanError(
                "The folder already has another version of this notebook.",
                seen=str(target),
                next_step="move this version to another place, or use another folder: --to FOLDER",
                code="WB-PLAN-335",
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, target)
        more = ",tensorflow" if "tensorflow" in source.read_text("utf-8") else ""
        points = points_of(source)
        each = ", ".join(f"{name} has {worth:g}" for name, worth in points.items())
        page = _README.format(
            lab=number,
            count=len(points),
            points=sum(points.values()),
            each=each,
            extras=f"torch{more},lab",
        )
        (target.parent / "README.md").write_text(page, encoding="utf-8")
        made.append(target)
    return made
