"""`workbench demo`, `lab`, `labs`, `grade`, `ps`, `stop` and `doctor`: the main tasks from a shell.

`ps` and `stop` are about the clusters of this user on this machine. `labs` makes labs from their
sources, `grade` runs the notebooks that students hand in. `lab` opens JupyterLab; if a user
confuses `lab` and `labs`, the error names the other command. This module also finds the folder of
the package's notebooks. `doctor` is a separate package; `run`, `compare`, `jobs`, `follow` and
`control` are in `jobs/`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cluster import folders
from .devices.leases import held_words
from .doctor.command import add_doctor_command, run_doctor
from .errors import ClusterError, PlanError, WorkbenchError
from .jobs import command as jobs
from .labs.course import commands as course
from .session.keeping import idle_words
from .views.table import COMPARISON, SHOWS

if TYPE_CHECKING:
    from nbformat import NotebookNode

    from .labs.grading.processes import Limits
    from .labs.grading.results import Saved

CELL_TIMEOUT_S = 300


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(
        prog="workbench", description="A Jupyter workbench for distributed training."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    demo = commands.add_parser("demo", help="run the quickstart notebook without a browser")
    demo.add_argument(
        "--out", type=Path, default=Path("workbench-demo"), help="folder for the results"
    )
    commands.add_parser(
        "lab", help="open JupyterLab with the notebooks; arguments after `lab` go to JupyterLab"
    )
    add_cluster_commands(commands)
    add_lab_commands(commands)
    add_doctor_command(commands)
    jobs.add_job_commands(commands)
    given, rest = parser.parse_known_args(argv)
    if rest and given.command != "lab":
        hint = f" ({OPENS})" if given.command == "labs" else ""
        parser.error(f"unrecognized arguments: {' '.join(rest)}{hint}")
    try:
        if given.command == "doctor":
            return run_doctor(given)
        if given.command in jobs.COMMANDS:
            return jobs.run_job_command(given)
        if given.command in ("ps", "stop"):
            return run_clusters(given)
        if given.command in course.COMMANDS:
            return course.run(given, notebooks_folder())
        if given.command in COMMANDS:
            return run_labs(given)
        return _demo(given.out) if given.command == "demo" else _lab(rest)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return 1


def _need(module: str) -> Any:
    try:
        return __import__(module)
    except ImportError:
        raise WorkbenchError(
            f"{module} is not installed.",
            next_step="pip install 'distributed-workbench[torch,lab]'",
            code="WB-GEN-001",
        ) from None


def _demo(out: Path) -> int:
    """Execute the quickstart, print its summary, write notebook and HTML."""
    nbformat = _need("nbformat")
    notebook = nbformat.read(notebooks_folder() / QUICKSTART, as_version=4)
    out.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    failed = _execute(notebook, out)
    executed, page = out / QUICKSTART, out / "quickstart.html"
    nbformat.write(notebook, executed)
    _write_html(notebook, page)
    print(_summary(notebook))
    print(f"\n{time.perf_counter() - began:.0f} s; executed notebook: {executed}, page: {page}")
    if failed is not None:
        print(f"\nThe notebook failed: {failed}", file=sys.stderr)
        return 1
    return 0


def _execute(notebook: NotebookNode, out: Path) -> Exception | None:
    from nbclient import NotebookClient
    from nbclient.exceptions import CellExecutionError
    from tqdm import tqdm

    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    bar = tqdm(total=len(code), desc="quickstart", unit="cell", file=sys.stdout)

    def done(cell: NotebookNode, **rest: Any) -> None:
        if cell.cell_type == "code":
            lines = [text for text in cell.source.splitlines() if text.strip(" #")]
            first = next((text for text in lines if not text.startswith("#")), "")
            bar.set_postfix_str(first[:40])
            bar.update()

    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(out)}},
        on_cell_executed=done,
    )
    try:
        client.execute()
    except CellExecutionError as error:
        return error
    finally:
        bar.close()
    return None


def _write_html(notebook: NotebookNode, page: Path) -> None:
    from nbconvert import HTMLExporter

    exporter = HTMLExporter()  # type: ignore[no-untyped-call,unused-ignore]
    body, _ = exporter.from_notebook_node(notebook)
    page.write_text(body)


def _summary(notebook: NotebookNode) -> str:
    """Return the text of the notebook's comparison, or of its last table otherwise."""
    tables = [
        output
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if "text/html" in output.get("data", {})
    ]
    compared = [one for one in tables if one.get("metadata", {}).get(SHOWS) == COMPARISON]
    if not tables:
        return "the notebook shows no table"
    return str((compared or tables)[-1]["data"]["text/plain"])


def _lab(rest: list[str]) -> int:
    """Open JupyterLab on a copy of the notebooks, so that the originals stay unchanged.

    Files that the copy already has belong to the user and are not changed.
    """
    check_opening(rest)
    _need("jupyterlab")
    target = Path.cwd() / "workbench-notebooks"
    target.mkdir(exist_ok=True)
    lacking = [
        path
        for path in sorted(notebooks_folder().iterdir())
        if path.is_file() and path.name[0] != "." and not (target / path.name).exists()
    ]
    for path in lacking:
        shutil.copy2(path, target)
    _trust([target / path.name for path in lacking if path.suffix == ".ipynb"])
    command = [sys.executable, "-m", "jupyterlab", str(target), *rest]
    return subprocess.call(command, env=dict(os.environ))


def _trust(notebooks: list[Path]) -> None:
    """Sign Workbench's notebooks, because Jupyter shows no drawings of unsigned notebooks."""
    nbformat = _need("nbformat")
    from nbformat.sign import NotebookNotary

    notary = NotebookNotary()  # type: ignore[no-untyped-call,unused-ignore]
    for path in notebooks:
        notary.sign(nbformat.read(path, as_version=4))  # type: ignore[no-untyped-call,unused-ignore]


NOBODY = "nobody"


def add_cluster_commands(commands: Any) -> None:
    """Add Workbench's commands to the command line."""
    listing = commands.add_parser("ps", help="list your clusters on this machine")
    listing.add_argument("--json", action="store_true", help="print JSON, for programs")
    stop = commands.add_parser("stop", help="end clusters, even if another notebook owns them")
    stop.add_argument(
        "id", nargs="*", metavar="ID", help="ids of clusters, as `workbench ps` lists them"
    )
    stop.add_argument("--all", action="store_true", help="end all your clusters on this machine")


def run_clusters(given: argparse.Namespace) -> int:
    """Run one of Workbench's commands; return its exit status.

    Raises:
        ClusterError: There is no cluster with this id.
    """
    if given.command == "ps":
        found = [describe(one) for one in folders.clusters()]
        print(json.dumps(found, indent=1) if given.json else table(found))
        if not given.json and (held := held_words()):
            print("\nGPUs of this machine that are reserved:", *held, sep="\n  ")
        return 0
    return _stop(given.id, everything=given.all)


def describe(found: folders.Found) -> dict[str, Any]:
    """Return one cluster as `--json` shows it; times in seconds."""
    about, owner = found.about, found.owner
    return {
        "id": found.id,
        "since_s": float(about["since"]),
        "age_s": max(0.0, time.time() - float(about["since"])),
        "engines": len(found.engines),
        "framework": about.get("framework", ""),
        "running": found.busy,
        "kept": found.kept,
        "owner_pid": None if owner is None else int(owner["pid"]),
        "notebook": about.get("notebook") or about.get("cwd", ""),
        "idle_s": found.idle_s,
        "idle_timeout_s": about.get("idle_timeout_s") or None,
        "gpus": sorted(about.get("reserved") or ()),
    }


COLUMNS = ("id", "since", "engines", "framework", "running", "owner", "idle for", "notebook")


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return the clusters as a table, one line each."""
    if not found:
        return "no clusters"
    lines = [COLUMNS, *(_row(one) for one in found)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(COLUMNS))]
    padded = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]
    return "\n".join(padded)


def _row(one: dict[str, Any]) -> tuple[str, ...]:
    owner = f"pid {one['owner_pid']}" if one["owner_pid"] is not None else NOBODY
    return (
        one["id"],
        time.strftime("%m-%d %H:%M", time.localtime(one["since_s"])),
        str(one["engines"]),
        one["framework"],
        one["running"] or "-",
        f"{owner}, kept" if one["kept"] else owner,
        idle_words(one["idle_s"]) if one["idle_s"] >= 1 else "-",
        one["notebook"] or "-",
    )


def _stop(ids: Sequence[str], *, everything: bool) -> int:
    found = {one.id: one for one in folders.clusters()}
    unknown = [name for name in ids if name not in found]
    if unknown or bool(ids) == everything:
        raise ClusterError(
            "There is no cluster with this id."
            if unknown
            else "`workbench stop` needs either ids of clusters or --all.",
            seen=", ".join(unknown) or None,
            allowed=", ".join(found) or "none: there is no cluster",
            next_step="`workbench ps` lists clusters; `workbench stop --all` ends all clusters",
            code="WB-CLUSTER-002",
        )
    left = []
    for one in found.values():
        if everything or one.id in ids:
            gone = folders.stop(one)
            left += [] if gone else [one.id]
            print(f"{one.id} {'stopped' if gone else 'is still running'}")
    if left:
        print(
            f"some processes of these clusters still run: {', '.join(left)}; to end them, run "
            f"`workbench stop {' '.join(left)}` again",
            file=sys.stderr,
        )
    return 1 if left else 0


COMMANDS = ("labs", "grade")
SOURCES = "lab_*.md"
OPENS = "`workbench lab` (without s) opens JupyterLab with the notebooks"
NOT_GRADED, INTERRUPTED = 2, 130
_GRADE = """\
Copies the student's answers from each notebook into a copy of the original lab,
and runs each copy in its own process.
Exit status: 0 if everything was graded and is correct; 1 if everything was graded,
but not everything is correct; 2 if something could not be graded, or an argument is
wrong."""


def add_lab_commands(commands: Any) -> None:
    """Add the commands to the parser of `workbench`."""
    labs = commands.add_parser(
        "labs", help="make the students' and the instructors' notebooks from the sources of labs"
    )
    # An empty list is refused below, by an error with a next step.
    labs.add_argument("sources", nargs="*", type=Path, help="files lab_N.md")
    labs.add_argument(
        "--to",
        type=Path,
        default=Path("notebooks"),
        help="folder of the students' notebooks (default: notebooks)",
    )
    labs.add_argument(
        "--solved-to",
        type=Path,
        help="folder of the instructors' notebooks (default: the folder of each lab_N.md)",
    )
    labs.add_argument(
        "--run",
        action="store_true",
        help="run each lab with its solutions, and save the outputs in the notebooks",
    )
    _add_grade(commands)
    course.add_commands(commands)


def _add_grade(commands: Any) -> None:
    grade = commands.add_parser(
        "grade", help="grade the notebooks that students handed in", description=_GRADE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    add = grade.add_argument
    add("notebooks", nargs="+", type=Path, metavar="NOTEBOOK",
        help="notebooks, or the folder that `workbench collect` has made")  # fmt: skip
    course.add_flags(add)
    add("--json", metavar="FILE",
        help="write all results to this file as JSON. If FILE is `-`, print the JSON to standard "
             "output")  # fmt: skip
    add("--limit", type=float, default=60.0, metavar="SECONDS",
        help="time limit of a cell (default 60)")  # fmt: skip
    add("--total", type=float, default=600.0, metavar="SECONDS",
        help="time limit of a notebook (default 600)")  # fmt: skip
    add("--memory", type=float, default=4.0, metavar="GB",
        help="memory limit of a notebook (default 4)")  # fmt: skip
    add("--disk", type=float, default=5.0, metavar="GB",
        help="limit for the size of all files that a notebook writes (default 5)")  # fmt: skip
    add("--jobs", type=int, default=1, metavar="N",
        help="number of notebooks that are graded at the same time (default 1). A number above 1 "
             "changes the times that labs measure")  # fmt: skip
    add("--lab", type=Path, metavar="FILE",
        help="the original lab (default: the lab to which the notebook belongs)")  # fmt: skip


def run_labs(given: argparse.Namespace) -> int:
    """Run one of these commands; return the exit status."""
    if given.command == "labs":
        return _make(given)
    try:
        return _grade(given)
    except WorkbenchError as error:
        print(error, file=sys.stderr)
        return NOT_GRADED
    except KeyboardInterrupt:
        is_kept = given.json not in (None, "-") and Path(given.json).is_file()
        kept = f"; {given.json} has the results so far" if is_kept else ""
        print(f"Interrupted: all processes were ended{kept}.", file=sys.stderr)
        return INTERRUPTED


def check_opening(rest: list[str]) -> None:
    """Raise an error if the arguments for JupyterLab contain a lab's source.

    Raises:
        PlanError: An argument is a lab's source; the message names the right command.
    """
    for before, text in zip(["", *rest], rest, strict=False):
        is_value = re.fullmatch(r"--([\w-]+-dir|\w+\.[\w.]+)", before)  # --ServerApp.root_dir DIR
        if text.startswith("-") or is_value:
            continue
        is_source = text.endswith(".md")
        if is_source or any(Path(text).glob(SOURCES)):
            raise PlanError(
                "`workbench lab` opens JupyterLab. This command does not make notebooks from the "
                "sources of labs (files lab_N.md).",
                seen=text,
                allowed="only flags of JupyterLab",
                next_step=f"workbench labs {text if is_source else Path(text) / SOURCES}",
                code="WB-PLAN-018",
            )


def _check_sources(sources: list[Path]) -> None:
    """Refuse an empty list, and files that are not lab sources; name the right command."""
    if not sources:
        raise PlanError(
            "`workbench labs` makes notebooks from the sources of labs (files lab_N.md), but no "
            "source was given.",
            allowed="files lab_N.md",
            next_step=f"workbench labs notebooks/solutions/lab_1.md; {OPENS}",
            code="WB-PLAN-019",
        )
    for source in sources:
        if source.is_dir() or source.suffix == ".ipynb":
            within = any(source.glob(SOURCES))
            raise PlanError(
                "`workbench labs` makes notebooks from the source files of labs, but the given "
                "path is not such a source file.",
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
    from .labs.grading.results import Graded, Saved, printable, status, text, to_json
    from .labs.grading.supervise import grade

    limits = _limits(given)
    roster = course.check_flags(given)
    given.notebooks = course.notebooks_in(given.notebooks)
    to_file = given.json not in (None, "-")
    isolation = find_out()
    known = (given.notebooks, asdict(limits), isolation)
    saved = Saved(Path(given.json), *known) if to_file else None

    def done(one: Graded) -> None:
        if saved is not None:
            with contextlib.suppress(OSError):  # the last attempt reports it
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
    course.record(graded, given, roster, Path() if given.lab else notebooks_folder())
    print(content if given.json == "-" else text(graded, isolation) + "\n", end="")
    return NOT_GRADED if lost else status(graded)


def _save(saved: Saved | None, content: str) -> bool:
    """Write all results to the file, if one is given; return whether that failed."""
    try:
        if saved is not None:
            saved.finish(content)
    except OSError as error:
        print(f"The file that --json names could not be written: {error}", file=sys.stderr)
        return True
    return False


def _limits(given: argparse.Namespace) -> Limits:
    """Return the limits, after checking all arguments."""
    from .labs.grading.processes import Limits
    from .labs.grading.reading import Unreadable
    from .labs.grading.runner import lab_of

    least = {"limit": 1, "total": 10, "memory": 0.5, "disk": 0.1, "jobs": 1}
    for name, value in least.items():
        seen = getattr(given, name)
        if not value <= seen < 10**7:  # NaN is refused too
            raise PlanError(
                f"--{name} is out of range.",
                seen=seen,
                allowed=f"{value} or more, and less than 10 million",
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
        folder, trouble = Path(given.json).absolute().parent, ""
        if Path(given.json).is_dir():
            trouble = "this is a folder"
        elif not folder.is_dir():
            trouble = f"there is no folder {folder}"
        elif not os.access(folder, os.W_OK):
            trouble = f"you have no permission to write in the folder {folder}"
        if trouble:
            raise PlanError(
                f"--json needs a file that can be written, but {trouble}.", seen=given.json,
                code="WB-PLAN-023",
            )  # fmt: skip
    return Limits(
        cell_s=given.limit, total_s=given.total, memory_gb=given.memory, disk_gb=given.disk
    )


QUICKSTART = "00_quickstart.ipynb"
SHARED = Path("share/distributed-workbench/notebooks")


def notebooks_folder() -> Path:
    """Return the folder with the notebooks, of the checkout or of the installed package.

    Raises:
        WorkbenchError: The folder does not exist.
    """
    for folder in (Path(__file__).parents[1] / "notebooks", Path(sys.prefix) / SHARED):
        if (folder / QUICKSTART).exists():
            return folder
    raise WorkbenchError(
        "Workbench's notebooks are not installed.",
        next_step="clone Workbench's repository with git, and install Workbench from the clone",
        code="WB-GEN-005",
    )


if __name__ == "__main__":
    raise SystemExit(main())
