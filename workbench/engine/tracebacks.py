"""How a cell's errors are shown, as far as that differs from IPython's way.

Cells are named as the notebook names them, not by the file of this process in which their source
lies, so that equal warnings and errors of several ranks are equal.

IPython reads and colours the source of every frame, a third of a second each time. Where a cell is
interrupted all its workers do so at once and the user waits for it, so an interrupt is shown in
Python's own form: where it struck, in the cell's lines.
"""

from __future__ import annotations

import builtins
import linecache
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

# IPython imports these at the first error, when somebody waits for it; here it is done once, in the
# parent of all engines.
import stack_data  # noqa: F401

from . import places

_own_format = warnings.formatwarning
_GROUPS: tuple[type[BaseException], ...] = (
    (builtins.BaseExceptionGroup,) if sys.version_info >= (3, 11) else ()
)

_FILE = re.compile(r'^(?P<before>[ |+-]*)File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE)


def short(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    numbers: Mapping[str, int],
    *,
    chain: bool = False,
) -> list[str]:
    """Return a traceback that begins in the cell, in Python's own form.

    Args:
        numbers: Number of the cell that each file is.
        chain: Whether to show what it was raised from, too.
    """
    while trace is not None and not places.is_cell(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next

    def named(match: re.Match[str]) -> str:
        number = numbers.get(match["file"])
        if number is None:
            return match[0]
        return f"{match['before']}Cell In[{number}], line {match['line']}"

    lines = traceback.format_exception(kind, error, trace, chain=chain)
    return [_FILE.sub(named, line).rstrip("\n") for line in lines]


def install(shell: Any) -> None:
    """Show interrupts and groups of errors of this IPython shell's cells in the short form."""

    def numbers() -> Mapping[str, int]:
        found: Mapping[str, int] = getattr(shell.compile, "_filename_map", {})
        return found

    def show(
        shell: Any,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
        tb_offset: int | None = None,
    ) -> list[str]:
        interrupt = issubclass(kind, KeyboardInterrupt)
        lines = short(kind, error, trace, numbers(), chain=not interrupt)
        shell._showtraceback(kind, str(error), lines)
        return lines

    shell.set_custom_exc((KeyboardInterrupt, *_GROUPS), show)
    _name_cells_in_warnings(numbers)


def _name_cells_in_warnings(numbers: Callable[[], Mapping[str, int]]) -> None:
    def formatwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        line: str | None = None,
    ) -> str:
        number = numbers().get(filename)
        if number is None:
            return _own_format(message, category, filename, lineno, line)
        text = _own_format(
            message, category, "", lineno, line or linecache.getline(filename, lineno)
        )
        return f"Cell In[{number}]{text}"

    warnings.formatwarning = formatwarning
