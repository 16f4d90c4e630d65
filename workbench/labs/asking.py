"""`labs.begin(3)` and `labs.check("3.2")`: what a lab's cells ask for.

The first starts the lab's engines, and sets a limit for exercises that never end. The second looks
at an answer, and remembers the result. `labs.can_run` says whether many engines may be started.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..cluster import folders
from ..cluster.forkserver import turns
from ..devices import limits
from ..errors import PlanError, WorkbenchError
from ..notebook.session import session
from ..views.blocks import ProgressLine
from ..views.table import Column, Table
from . import limit
from .answers import Check, Exercise, Finding, Report, Stuck, exercises, find
from .limit import last_end

if TYPE_CHECKING:
    from .side import Side

NBGRADER = "NBGRADER_EXECUTION"
"""Set by nbgrader while it runs a notebook: `autograde` or `validate`."""

_reports: dict[str, Report] = {}


def check(exercise: str, namespace: Mapping[str, Any] | Side | None = None) -> Report:
    """Look at the answer to an exercise; the notebook shows what is right and what is not.

    Args:
        exercise: Its number, such as `"3.2"`.
        namespace: Where the answer's names are, or the side to ask; the notebook by default.

    Raises:
        PlanError: There is no such exercise.
    """
    asked = find(exercise)
    looking = Check(asked.number, _notebook() if namespace is None else namespace)
    try:
        if namespace is None:
            _up_to_date(looking, asked)
        asked.look(looking)
    except Stuck:
        pass
    except WorkbenchError as error:
        looking.findings.append(Finding(False, error.what, error.next_step or ""))
    except (Exception, SystemExit) as error:  # an answer of a kind that the check did not foresee
        words = f"The answer could not be checked: {type(error).__name__}: {error}"
        hint = f"does the answer have the form that the text of exercise {asked.number} asks for?"
        looking.findings.append(Finding(False, words, hint))
    if namespace is None:
        _stopped_on_its_way(looking, asked)
    report = Report(asked.number, asked.title, asked.where, tuple(looking.findings))
    _reports[asked.number] = report
    if namespace is None and os.environ.get(NBGRADER) and not report.passed:
        raise AssertionError(report.text())  # by this nbgrader sees that the answer is not right
    return report


def progress(lab: int | None = None) -> Table:
    """Return a table of the exercises of a lab (or of all that were checked) and their results."""
    names = [e.number for e in exercises(lab)] if lab is not None else sorted(_reports)
    rows = [
        [n, find(n).title, _reports[n].verdict if n in _reports else "not checked"] for n in names
    ]
    done = sum(row[2] == "right" for row in rows)
    columns = [Column("exercise", "left"), Column("about", "left"), Column("", "left")]
    return Table(columns, rows, f"{done} of {len(rows)} right")


def can_run(engines: int, memory_bytes: float) -> bool:
    """Return whether a lab may start so many engines here.

    Args:
        memory_bytes: What must be free, of the machine's or of the container's memory.

    Returns:
        False also if an administrator's limit is lower, and while a lab is graded: several
        notebooks may be graded at once.
    """
    from .grading.processes import MARK

    if MARK in os.environ:
        return False
    most = limits.load().max_engines
    return (most is None or engines <= most) and turns.memory()[0] >= memory_bytes


def forget(lab: int) -> None:
    """Forget the results of a lab: it begins again."""
    for number in [n for n in _reports if n.startswith(f"{lab}.")]:
        del _reports[number]


def _up_to_date(looking: Check, asked: Exercise) -> None:
    """End the check if the answer is not from the present text of the exercise's cell."""
    ended = last_end(_shell(), asked.number)
    if ended is None:
        return
    looking.need(
        not ended.unread,
        f"The cell of exercise {asked.number} is not valid Python ({ended.error}), so no line of "
        "this cell was run.",
        "correct the line that the error message shows, run the cell, and check again",
    )
    there = asked.cell == "the engines"
    ran = "on the engines" if ended.on_engines else "in the notebook"
    looking.need(
        ended.on_engines == there,
        f"The cell of exercise {asked.number} was last run {ran}, but it must run "
        f"{'on the engines' if there else 'in the notebook'}.",
        "begin the cell with a line %%distributed, and run it again"
        if there
        else "remove the first line, which begins with %%, and run the cell again",
    )


def _stopped_on_its_way(looking: Check, asked: Exercise) -> None:
    """If an answer is not right, say also that its cell did not reach its end."""
    ended = last_end(_shell(), asked.number)
    wrong = any(not finding.right for finding in looking.findings)
    if ended is not None and ended.error and not ended.unread and wrong:
        words = f"The cell of exercise {asked.number} raised {ended.error} when it was last run."
        hint = "correct the line that raised the error: the lines after it have not been run"
        looking.findings.append(Finding(False, words, hint))


def _notebook() -> dict[str, Any]:
    shell = _shell()
    return {} if shell is None else dict(shell.user_ns)


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()  # type: ignore[no-untyped-call,unused-ignore]


ENGINES = 3
"""This many fit easily in a Binder session with 2 GB."""

LIMIT_S = 120.0


def begin(
    lab: int,
    engines: int = ENGINES,
    *,
    framework: str = "torch",
    limit_s: float | None = LIMIT_S,
) -> None:
    """Begin a lab, or begin it again: exactly `engines` engines run, and none holds variables.

    Args:
        framework: What the engines have imported.
        limit_s: Seconds after which the cell of an exercise is interrupted; None for no limit.

    Raises:
        PlanError: There is no such lab.
        ClusterError: The engines did not start.
        RunError: A run has not ended yet.
    """
    count = len(exercises(lab))
    shell = _shell()
    if shell is not None:
        shell.extension_manager.load_extension("workbench")
        limit.install(shell, limit_s)
    forget(lab)
    line = ProgressLine()
    try:
        words = _have(engines, framework, line)
    finally:
        line.done()
    print(f"Lab {lab}: {engines} engines are ready{words}; {count} exercises.")  # noqa: T201
    if others := _others():
        print(  # noqa: T201 - the notebook's output
            f"Other notebooks have a cluster too: {', '.join(others)}. If the machine has little "
            "memory (for example on Binder), shut down the kernels of these notebooks."
        )


def _have(engines: int, framework: str, line: ProgressLine) -> str:
    """Get exactly this many engines without variables; return in words what was done for it."""
    words = ""
    old = session.cluster
    if old is not None and (len(old.worker_ids) > engines or old.keeping.kept):
        if old.keeping.kept:
            raise PlanError(
                "This notebook's cluster was started with --keep, so its engines keep their "
                "variables. You may still need these variables, and the lab would delete them. So "
                "the lab did not begin.",
                next_step="begin the lab in another notebook, or run %cluster stop first",
                code="WB-PLAN-045",
            )
        words = f" (a cluster of {len(old.worker_ids)} engines was stopped)"
        session.stop()
    elif old is not None:
        dropped = sum(old.free().values())
        words = f" (deleted variables of earlier cells: {dropped})" if dropped else ""
    session.start(engines, framework=framework, progress=line)
    return words


def _others() -> list[str]:
    """Return the other notebooks, or their folders, that have a cluster on this machine."""
    found = [
        one for one in folders.clusters() if one.owner and int(one.owner["pid"]) != os.getpid()
    ]
    return sorted(
        Path(one.about.get("notebook") or one.about.get("cwd", "?")).name for one in found
    )
