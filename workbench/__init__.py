"""Workbench: distributed training in a notebook, with correct live numbers.

Importing this package loads no framework; every name below is loaded at its first use. In the
notebook: `%load_ext workbench`, `import workbench as wb`. On the engines the injected `wb` is this
same package. `docs/architecture.md` has the picture; the folders, from those without dependencies
to those that use all others:

    errors       the errors, each with what happened, what is allowed and the next step
    catalog/     the strategies, their abilities and their messages
    cookbook/    recipes for training
    data/        small data sets for lessons and tests
    shared/      modules that the notebook's side and the engines' side share
    devices/     the accelerators, their owners, and the devices that an engine sees
    engine/      what happens on an engine
    strategies/  how is a model trained on several workers: one file each
    cluster/     how are engines started, watched and ended
    history/     the data of a run, step by step
    prediction/  how fast would a run be with other workers, links or options
    views/       how are runs drawn
    export/      a plan as a folder that trains it elsewhere
    execution/   a run from its request to its end
    session/     one cluster, and everything that its user can do with it
    jobs/        runs on other machines: controlled there by a conductor, followed from here
    notebook/    the notebook's objects: its session, recipes, comparisons
    panels/      Workbench controlled with the mouse
    magics       the magics
    labs/        the exercises: made, checked, graded
    doctor/      checks of this machine, its GPUs and other hosts
    cli          the `workbench` command of a shell
    __main__     the same as `python -m workbench`
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_LAZY = {
    # notebook
    "Cluster": "workbench.session.cluster",
    "Run": "workbench.execution.run",
    "runs": "workbench.execution.registry",
    "compare": "workbench.notebook.compare",
    "predict": "workbench.views.explain.prediction",
    "load": "workbench.execution.registry",
    "attach": "workbench.session.attach",
    "job": "workbench.notebook.jobs",
    "submit": "workbench.notebook.jobs",
    "follow": "workbench.notebook.jobs",
    "jobs": "workbench.notebook.jobs",
    "resume": "workbench.notebook.session",
    "queue": "workbench.notebook.session",
    "sweep": "workbench.notebook.sweep",
    "choose": "workbench.notebook.auto",
    "published": "workbench.notebook.scaling",
    "strategies": "workbench.notebook.compare",
    "recipe": "workbench.notebook.recipes",
    "recipes": "workbench.notebook.recipes",
    "to_a_cell": "workbench.notebook.values",
    "calibrate": "workbench.notebook.compare",
    "diagram": "workbench.notebook.compare",
    "panel": "workbench.panels.show",
    "doctor": "workbench",
    # engines
    "fit": "workbench.engine.training.fit",
    "prepare": "workbench.engine.training.user_loops",
    "watch": "workbench.engine.training.user_loops",
    "log": "workbench.engine.training.notes",
    "options": "workbench.engine.training.notes",
    "checkpoint": "workbench.engine.checkpoints.checkpoints",
    "resumed_step": "workbench.engine.checkpoints.checkpoints",
    "leave_when": "workbench.engine.telemetry.notices",
    "run_job": "workbench.engine.job",
    # both
    "data": "workbench",
    "RunStopped": "workbench.errors",
    "WorkbenchError": "workbench.errors",
}

__all__ = [*_LAZY, "load_ipython_extension", "unload_ipython_extension"]


def need_a_system_that_works() -> None:
    """On Windows, report the requirement before an import of a POSIX module fails.

    Raises:
        ClusterError: This is Windows.
    """
    if sys.platform == "win32":
        from .errors import ClusterError

        raise ClusterError(
            "On Windows, Workbench needs WSL2, which runs Linux inside Windows.",
            seen="Python for Windows",
            allowed="Linux, macOS, WSL2",
            next_step="run `wsl --install` in PowerShell as administrator, restart "
            "Windows, open Ubuntu, and install Workbench and JupyterLab there",
            code="WB-CLUSTER-001",
        )


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'workbench' has no attribute {name!r}")
    if _LAZY[name] != "workbench.errors":
        need_a_system_that_works()
    if _LAZY[name] == "workbench":
        return importlib.import_module(f"workbench.{name}")
    value = getattr(importlib.import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def load_ipython_extension(shell: Any) -> None:
    """Register the magics and begin to pre-warm (`%load_ext workbench`)."""
    need_a_system_that_works()
    importlib.import_module("workbench.magics").register(shell)


def unload_ipython_extension(shell: Any) -> None:
    """Stop the cluster of the extension, unless the cell loads it again (`%reload_ext`)."""
    importlib.import_module("workbench.magics").unregister(shell)


if TYPE_CHECKING:
    from .engine.training.fit import fit as fit
    from .errors import RunStopped as RunStopped
    from .errors import WorkbenchError as WorkbenchError
    from .execution.registry import runs as runs
    from .execution.run import Run as Run
    from .session.cluster import Cluster as Cluster
