"""`labs.begin(3)`: the lab's engines, and a limit for exercises that never end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ..cluster import kept
from ..errors import PlanError
from ..session.state import session
from ..views.blocks import ProgressLine
from . import asking, limit
from .exercise import exercises

ENGINES = 3
"""What a Binder with 2 GB holds with room to spare."""

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
        RunError: A run is still going on.
    """
    count = len(exercises(lab))
    shell = _shell()
    if shell is not None:
        shell.extension_manager.load_extension("workbench")
        limit.install(shell, limit_s)
    asking.forget(lab)
    line = ProgressLine()
    try:
        words = _have(engines, framework, line)
    finally:
        line.done()
    print(f"Lab {lab}: {engines} engines are ready{words}; {count} exercises.")  # noqa: T201
    if others := _others():
        print(  # noqa: T201 - the notebook's output
            f"Other notebooks have a cluster too: {', '.join(others)}. Where memory is scarce, as "
            "on a Binder, shut their kernels down."
        )


def _have(engines: int, framework: str, line: ProgressLine) -> str:
    """Have exactly so many engines without variables; return what had to be done for it."""
    words = ""
    old = session.cluster
    if old is not None and (len(old.worker_ids) > engines or old.keeping.kept):
        if old.keeping.kept:
            raise PlanError(
                "The notebook works on a kept cluster; a lab clears its engines.",
                next_step="begin the lab in a notebook of its own, or %cluster stop first",
                code="WB-PLAN-045",
            )
        words = f" (a cluster of {len(old.worker_ids)} was stopped for it)"
        session.stop()
    elif old is not None:
        dropped = sum(old.free().values())
        words = f" ({dropped} variables of earlier cells were cleared)" if dropped else ""
    session.start(engines, framework=framework, progress=line)
    return words


def _others() -> list[str]:
    """Return the notebooks, or their folders, that hold a cluster on this machine besides us."""
    found = [one for one in kept.clusters() if one.owner and int(one.owner["pid"]) != os.getpid()]
    return sorted(
        Path(one.about.get("notebook") or one.about.get("cwd", "?")).name for one in found
    )


def _shell() -> Any:
    from IPython.core.getipython import get_ipython

    return get_ipython()  # type: ignore[no-untyped-call,unused-ignore]
