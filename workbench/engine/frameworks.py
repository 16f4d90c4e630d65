"""Which frameworks this engine has imported, and importing one beside another."""

from __future__ import annotations

import importlib
import os
import sys

from .. import catalog
from ..errors import ClusterError
from ..frameworks import import_environment


def imported() -> list[str]:
    """Return the frameworks that a cell can use at once."""
    return [name for name in catalog.FRAMEWORKS if name in sys.modules]


def load(framework: str) -> list[str]:
    """Import a framework beside what is here; variables stay. Return what is imported then.

    Raises:
        ClusterError: It cannot be imported here, or what it needs is here in another form.
    """
    os.environ.update(import_environment(framework, os.environ))
    try:
        importlib.import_module(framework)
        importlib.import_module(f"workbench.engine.{framework}_support")
    except ImportError as error:
        raise ClusterError(
            f"{framework} could not be imported on this engine.",
            seen=str(error),
            next_step=f"install it where the engine runs: "
            f"pip install 'distributed-workbench[{framework}]'",
            code="WB-CLUSTER-026",
        ) from error
    return imported()
