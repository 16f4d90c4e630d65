"""`workbench labs` and `grade`: labs made from their sources, and what students hand in.

`workbench lab`, which opens JupyterLab, is one letter away: who mixes them up is led to the other.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import PlanError, WorkbenchError

if TYPE_CHECKING:
    from .labs.grading.limits import Limits
    from .labs.grading.saving import Saved

COMMANDS = ("labs", "grade")
SOURCES = "lab_*.md"
OPENS = "workbench lab (without s) opens JupyterLab on the notebooks"
NOT_GRADED, INTERRUPTED = 2, 130
_GRADE = """\
Runs each notebook's exercises in the lab as it was handed out, in processes of its own.
Exit status: 0 all graded and all right; 1 all graded, something is not right; 2 something could
not be graded, or an argument is wrong."""


def add_commands(commands: Any) -> None:
    """Add the commands to the parser of `workbench`."""
    labs = commands.add_parser(
        "labs", help="make the students' and the instructors' notebooks from the labs' sources"
    )
    # None at all is refused below, by an error that leads on.
    labs.add_argument("sources", nargs="*", type=Path, help="files lab_N.md")
    labs.add_argument("--to", type=Path, default=Path("notebooks"), help="the students' notebooks")
    labs.add_argument(
        "--solved-to", type=Path, help="the instructors' (default: where the source is)"
    )
    labs.add_argument(
        "--run", action="store_true", help="run each lab with its solutions and keep the outputs"
    )
    _add_grade(commands)


def _add_grade(commands: Any) -> None:
    grade = commands.add_parser(
        "grade", help="grade notebooks that students have handed in", description=_GRADE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = grade.add_argument
    add("notebooks", nargs="+", type=Path, metavar="NOTEBOOK")
    add("--json", metavar="FILE", help="write everything there as JSON; - for standard output")
    add("--limit", type=float, default=60.0, metavar="SECONDS", help="for a cell (default 60)")
    add("--total", type=float, default=600.0, metavar="SECONDS",
        help="for a notebook (default 600)")  # fmt: skip
    add("--memory", type=float, default=4.0, metavar="GB", help="for a notebook (default 4)")
    add("--disk", type=float, default=5.0, metavar="GB",
        help="for the files of a notebook (default 5)")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="notebooks at once (default 1: labs measure times)")  # fmt: skip
    add("--lab", type=Path, metavar="FILE",
        help="the lab as handed out (default: the one that the notebook names)")  # fmt: skip


def run(given: argparse.Namespace) -> int:
    """Do what one of these commands asks for; return the exit status."""
    if given.command == "labs":
        return _make(given)
    try:
        return _grade(given)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return NOT_GRADED
    except KeyboardInterrupt:
        is_kept = given.json not in (None, "-") and Path(given.json).is_file()
        kept = f"; {given.json} has what was graded" if is_kept else ""
        print(f"Interrupted: all was ended{kept}.", file=sys.stderr)
        return INTERRUPTED


def check_opening(rest: list[str]) -> None:
    """Refuse labs' sources among what is to be passed on to JupyterLab.

    Raises:
        PlanError: There is one; it names the command that takes them.
    """
    for before, text in zip(["", *rest], rest, strict=False):
        is_value = re.fullmatch(r"--([\w-]+-dir|\w+\.[\w.]+)", before)  # --ServerApp.root_dir DIR
        if text.startswith("-") or is_value:
            continue
        is_source = text.endswith(".md")
        if is_source or any(Path(text).glob(SOURCES)):
            raise PlanError(
                "workbench lab opens JupyterLab; it makes no notebooks from labs' sources.",
                seen=text,
                allowed="flags of JupyterLab",
                next_step=f"workbench labs {text if is_source else Path(text) / SOURCES}",
                code="WB-PLAN-018",
            )


def _check_sources(sources: list[Path]) -> None:
    """Refuse what is no source of a lab, and nothing at all; lead to what was meant."""
    if not sources:
        raise PlanError(
            "workbench labs makes notebooks from labs' sources; none was given.",
            allowed="files lab_N.md",
            next_step=f"workbench labs notebooks/solutions/lab_1.md; {OPENS}",
            code="WB-PLAN-019",
        )
    for source in sources:
        if source.is_dir() or source.suffix == ".ipynb":
            within = any(source.glob(SOURCES))
            raise PlanError(
                "workbench labs makes notebooks from labs' sources; this is none.",
                seen=str(source),
                allowed="files lab_N.md",
                next_step=f"workbench labs {source / SOURCES}" if within else OPENS,
                code="WB-PLAN-020",
            )


def _make(given: argparse.Namespace) -> int:
    import time

    from .labs.build import build

    _check_sources(given.sources)
    for source in given.sources:
        began = time.perf_counter()
        made = build(source, given.to, given.solved_to or source.parent, run=given.run)
        took = f" ({time.perf_counter() - began:.0f} s)" if given.run else ""
        print(f"{source}: {', '.join(map(str, made))}{took}")
    return 0


def _grade(given: argparse.Namespace) -> int:
    from dataclasses import asdict

    from .labs.grading.isolation import find_out
    from .labs.grading.outcome import Graded, printable
    from .labs.grading.saving import Saved
    from .labs.grading.showing import status, text, to_json
    from .labs.grading.supervise import grade
    from .shipped import notebooks_folder

    limits = _limits(given)
    to_file = given.json not in (None, "-")
    isolation = find_out()
    known = (given.notebooks, asdict(limits), isolation)
    saved = Saved(Path(given.json), *known) if to_file else None

    def done(one: Graded) -> None:
        if saved is not None:
            with contextlib.suppress(OSError):  # the last time it is said
                saved.add(one)
        words = f"{one.points}/{len(one.outcomes)}" if one.outcomes else "not graded"
        name = printable(one.file, also="")
        print(f"{name}: {words}, {one.seconds:.0f} s", file=sys.stderr, flush=True)

    graded = grade(
        given.notebooks, notebooks=Path() if given.lab else notebooks_folder(),
        canonical=given.lab, limits=limits, jobs=given.jobs, done=done, isolation=isolation,
    )  # fmt: skip
    content = to_json(graded, asdict(limits), isolation)
    lost = _save(saved, content)
    print(content if given.json == "-" else text(graded, isolation) + "\n", end="")
    return NOT_GRADED if lost else status(graded)


def _save(saved: Saved | None, content: str) -> bool:
    """Write everything to the file, if there is one; say whether that failed."""
    try:
        if saved is not None:
            saved.finish(content)
    except OSError as error:
        print(f"--json could not be written: {error}", file=sys.stderr)
        return True
    return False


def _limits(given: argparse.Namespace) -> Limits:
    """Return the limits, once all arguments make sense."""
    from .labs.grading.limits import Limits
    from .labs.grading.reading import Unreadable
    from .labs.grading.runner import lab_of

    least = {"limit": 1, "total": 10, "memory": 0.5, "disk": 0.1, "jobs": 1}
    for name, value in least.items():
        seen = getattr(given, name)
        if not value <= seen < 10**7:  # so is what is no number
            raise PlanError(
                f"--{name} is out of range.",
                seen=seen,
                allowed=f"{value} or more",
                code="WB-PLAN-021",
            )
    if given.lab is not None:
        try:
            lab_of(given.lab)
        except Unreadable as why:
            raise PlanError(
                f"--lab cannot be used: {why}", seen=str(given.lab), code="WB-PLAN-022"
            ) from None
    if given.json not in (None, "-"):
        folder = Path(given.json).absolute().parent
        if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(given.json).is_dir():
            raise PlanError("--json cannot be written there.", seen=given.json, code="WB-PLAN-023")
    return Limits(
        cell_s=given.limit, total_s=given.total, memory_gb=given.memory, disk_gb=given.disk
    )
