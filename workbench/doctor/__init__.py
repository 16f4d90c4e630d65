"""`workbench doctor`: checks this machine, its GPUs and other hosts, and says what to do next.

In a notebook, `wb.doctor()` is this package called. No module here loads a framework. Checks that
need a framework run in separate processes with a time limit, so that a hang is also a result.

    command    `workbench doctor` and `wb.doctor()`: the checks and their order
    report     the result of a check: ok, warn, fail, cannot be checked; as text, JSON, a table
    children   a process with a time limit, and the lines that it reports
    machine    checks of this machine that need no framework
    gpus       checks that need a driver, a GPU or a framework, and the stages of `--gpu-test`
    hosts      checks between this machine and others
    probes     (in a process of its own) what touches devices for the doctor
    stages     (in a process of its own) what `--gpu-test` does with real engines
    trials     (in a process of its own) what it measures, keeps and gives back
    faults     (in a process of its own) what it breaks on purpose
"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .report import Report


class _Doctor(ModuleType):
    """This package as a callable: `wb.doctor()` runs all checks."""

    def __call__(self, on: str = "", *, ports: str = "", listen: str = "") -> Report:
        """Check this machine; this takes about half a minute, or longer on a busy machine.

        Args:
            on: Other hosts to check over ssh, separated by commas.
            ports, listen: The ports and the address on which the notebook would listen, as for
                `%cluster start`.

        Returns:
            The results, which a notebook shows as a table; in programs use `.to_dict()`, `.json()`
            or `.text()`.
        """
        from .command import examine

        return examine(on, ports=ports, listen=listen)


sys.modules[__name__].__class__ = _Doctor
