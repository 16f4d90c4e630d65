"""Where code stands, in the user's words: `cell line 7 in step`, `train.py:41 in load_batch`."""

from __future__ import annotations

import os
import re
import sysconfig
from pathlib import Path

_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    {_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1]) + os.sep}
)


def is_cell(filename: str) -> bool:
    """Whether the file is a cell of the notebook."""
    return _CELL.search(filename) is not None


def is_yours(filename: str) -> bool:
    """Whether the user wrote the file: a cell, or a module that was not installed."""
    if is_cell(filename):
        return True
    if filename.startswith("<") or f"{os.sep}site-packages{os.sep}" in filename:
        return False
    return not os.path.abspath(filename).startswith(_LIBRARIES)


def where(filename: str, line: int, function: str, *, earlier: bool = False) -> str:
    """Return a place as it is shown; `earlier`: a cell is another one than that which runs."""
    inside = "" if function == "<module>" else f" in {function}"
    if is_cell(filename):
        return f"{'earlier cell, line' if earlier else 'cell line'} {line}{inside}"
    shown = filename
    if not filename.startswith("<"):
        here = os.getcwd() + os.sep
        shown = filename[len(here) :] if filename.startswith(here) else os.path.basename(filename)
    return f"{shown}:{line}{inside}"
