"""How a cell's errors are shown, as far as that differs from IPython's way.

IPython reads and colours the source of every frame, a third of a second each time. Where a cell is
interrupted all its workers do so at once and the user waits for it, so an interrupt is shown in
Python's own form: where it struck, in the cell's lines.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

# IPython imports these at the first error, when somebody waits for it; here it is done once, in the
# parent of all engines.
import stack_data  # noqa: F401

from . import places

_FILE = re.compile(r'^  File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


def short(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    numbers: Mapping[str, int],
) -> list[str]:
    """Return a traceback that begins in the cell, in Python's own form.

    Args:
        numbers: Number of the cell that each file is.
    """
    while trace is not None and not places.is_cell(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next

    def named(match: re.Match[str]) -> str:
        number = numbers.get(match["file"])
        return match[0] if number is None else f"  Cell In[{number}], line {match['line']}"

    lines = traceback.format_exception(kind, error, trace, chain=False)
    return [_FILE.sub(named, line).rstrip("\n") for line in lines]


def install(shell: Any) -> None:
    """Show interrupts of this IPython shell's cells in the short form."""

    def show(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> list[str]:
        lines = short(kind, error, trace, getattr(shell.compile, "_filename_map", {}))
        shell._showtraceback(kind, str(error), lines)
        return lines

    shell.set_custom_exc((KeyboardInterrupt,), show)
