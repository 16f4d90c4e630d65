"""Engines get the framework that a run or a cell asks for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable

from ..cluster.engines import Engines
from ..cluster.processes import installed
from ..errors import PlanError
from ..members import ranges

PREWARM = "WORKBENCH_PREWARM"
LOAD = "workbench.engine.entry:load"
VARIABLES = "workbench.engine.entry:variables"
LOAD_TIMEOUT_S = 180.0


def bring(engines: Engines, ids: Iterable[int], framework: str) -> list[int]:
    """Have a framework on engines before they are asked for anything; return those replaced.

    An engine that holds no variable of the user's gives way to one that was forked with the
    framework, under the same id. One that does imports the framework beside what it has.

    Raises:
        ClusterError: An engine could not be replaced, or could not import it.
    """
    lacking = [i for i in ids if framework not in engines.engines[i].frameworks]
    if not lacking:
        return []
    held = engines.call(lacking, VARIABLES)
    bare = [i for i in lacking if not held[i]] if engines.can_fork(framework) else []
    rest = [i for i in lacking if i not in bare]
    if rest:
        _say(rest, framework)
    if bare:
        engines.restart(bare, framework)
    for engine, names in engines.call(rest, LOAD, (framework,), LOAD_TIMEOUT_S).items():
        engines.engines[engine].frameworks = set(names)
    return bare


def _say(ids: list[int], framework: str) -> None:
    one = len(ids) == 1
    sys.stdout.write(
        f"{'Engine' if one else 'Engines'} {ranges(ids)} hold{'s' if one else ''} variables, so "
        f"{'it imports' if one else 'they import'} {framework} beside them: once, and it takes "
        "some seconds.\n"
    )


def prewarmed() -> str | None:
    """Return the framework to have ready before anybody asks; None where the user wants none.

    Raises:
        PlanError: The environment's setting is not understood.
    """
    asked = os.environ.get(PREWARM, "")
    if asked == "off":
        return None
    if asked not in ("", "torch", "tensorflow"):
        raise PlanError(
            f"{PREWARM} is not understood.",
            seen=asked,
            allowed="torch, tensorflow, off",
            code="WB-PLAN-105",
        )
    return asked or default_framework()


_notebooks: list[Callable[[], str | None]] = []


def notebook_framework() -> str:
    """Return the framework of the notebook's cluster, or of the one it would start."""
    return next(filter(None, (ask() for ask in _notebooks)), None) or default_framework()


def know_notebook(framework: Callable[[], str | None]) -> None:
    """Have the notebook's session say what its cluster's framework is; None: it has no cluster."""
    _notebooks[:] = [framework]


def default_framework() -> str:
    """Return the framework of a cluster that is not told one: what is set, or installed."""
    asked = os.environ.get(PREWARM, "")
    if asked in ("torch", "tensorflow"):
        return asked
    return "tensorflow" if installed("tensorflow") and not installed("torch") else "torch"
