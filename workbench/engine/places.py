"""Where code stands, in the user's words: `cell line 7 in step`, `train.py:41 in load_batch`."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Mapping
from pathlib import Path

_CELL = re.compile(r"ipykernel_\d+[/\\]\d+\.py$|^<ipython-input-")
_PATHS = sysconfig.get_paths()
_LIBRARIES = tuple(
    {_PATHS[name] + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    | {str(Path(__file__).parents[1]) + os.sep}
)


_FILE = re.compile(
    r'(?P<before>^|[ \t|+-]*)File "(?P<file>[^"]+)", line (?P<line>\d+)', re.MULTILINE
)
_numbers: list[Callable[[], Mapping[str, int]]] = []


def number_cells(numbers: Callable[[], Mapping[str, int]]) -> None:
    """Say from now on which number of the notebook each file of a cell has."""
    _numbers[:] = [numbers]


def cell_number(filename: str) -> int | None:
    """Return the number of the cell that lies in this file; None where it is none."""
    return _numbers[0]().get(filename) if _numbers else None


def name_cells(text: str) -> str:
    """Return a text whose `File "...", line 3` say `Cell In[7], line 3` where they mean a cell."""

    def named(match: re.Match[str]) -> str:
        number = cell_number(match["file"])
        if number is None:
            return match[0]
        return f"{match['before']}Cell In[{number}], line {match['line']}"

    return _FILE.sub(named, text)


def fold_text(text: str) -> str:
    """Return a message without the libraries' frames of a traceback that it quotes.

    What a loader's worker process raised travels as text: `Original Traceback ...`.
    """
    if "Traceback (most recent call last)" not in text:
        return name_cells(text)
    kept, skips = [], False
    for line in text.split("\n"):
        if found := _FILE.match(line):
            skips = not is_yours(found["file"])
        elif not line.startswith("    "):
            skips = False
        if not skips:
            kept.append(line)
    return name_cells("\n".join(kept))


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


def package(filename: str) -> str:
    """Return which package or library a file that the user did not write belongs to."""
    inside = filename.rpartition(f"{os.sep}site-packages{os.sep}")[2] or filename
    if filename.startswith(str(Path(__file__).parents[1]) + os.sep):
        return "workbench"
    if filename.startswith("<") or f"{os.sep}site-packages{os.sep}" not in filename:
        return "Python"
    return inside.partition(os.sep)[0].removesuffix(".py")


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
