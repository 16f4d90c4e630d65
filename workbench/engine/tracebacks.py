"""How a cell's errors are shown, as far as that differs from IPython's way.

Frames of libraries are left out, and their number is said: a beginner looks for their own line, and
`--traceback full` shows the others. Code that TensorFlow generated from a function of the user's is
shown as the line they wrote.

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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

# IPython imports these at the first error, when somebody waits for it; here it is done once, in the
# parent of all engines.
import stack_data  # noqa: F401

from ..errors import WorkbenchError
from . import generated, places
from .advice import plain

_own_format = warnings.formatwarning
_GROUPS: tuple[type[BaseException], ...] = (
    (builtins.BaseExceptionGroup,) if sys.version_info >= (3, 11) else ()
)

FULL = "full"
KINDS = ("short", FULL)
"""Ways to show a traceback: the user's own lines, or every frame."""
_MODULE = "<module>"
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>")


def short(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    *,
    chain: bool = False,
) -> list[str]:
    """Return a traceback that begins in the cell, in Python's own form.

    Args:
        chain: Whether to show what it was raised from, too.
    """
    while trace is not None and not places.is_cell(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    lines = traceback.format_exception(kind, error, trace, chain=chain)
    return [places.name_cells(line).rstrip("\n") for line in lines]


@dataclass(frozen=True)
class Written:
    """A frame of code that was generated from the user's: shown as the line they wrote.

    Has what IPython asks of its own records.
    """

    filename: str
    lineno: int
    function: str
    source: str
    frame: FrameType
    _sd: None = None

    def text(self) -> str:
        """Return the place, and the line."""
        head = places.name_cells(f'File "{self.filename}", line {self.lineno}')
        return f"{head}, in {self.function}\n----> {self.lineno} {self.source}\n"


Shown = TracebackType | Written


def fold(trace: TracebackType | None) -> tuple[list[Shown], list[FrameType]]:
    """Divide a traceback into what the user wrote and the frames of libraries.

    What stands before the cell belongs to neither. Frames of comprehensions, which Python 3.12 has
    no more, are one with the function they stand in.

    Returns:
        Runs of the user's frames, each a traceback of its own, and those that are left out.
    """
    shown: list[tuple[FrameType, int, int] | Written] = []
    left_out: list[FrameType] = []
    begun = False
    while trace is not None:
        frame, line, at = trace.tb_frame, trace.tb_lineno, trace.tb_lasti
        trace = trace.tb_next
        name = frame.f_code.co_filename
        begun = begun or places.is_cell(name)
        if not begun:
            continue
        written = generated.written(frame, line)
        last = shown[-1] if shown else None
        if written is not None:
            shown.append(Written(*written, frame))
        elif generated.is_generated(name) or not places.is_yours(name):
            left_out.append(frame)
        elif (
            frame.f_code.co_name in _COMPREHENSIONS
            and isinstance(last, tuple)
            and last[0].f_code.co_filename == name
        ):
            shown[-1] = (last[0], last[1], line)
        else:
            shown.append((frame, at, line))
    found: list[Shown] = []
    for one in reversed(shown):
        if isinstance(one, Written):
            found.insert(0, one)
        elif found and isinstance(found[0], TracebackType):
            found[0] = TracebackType(found[0], *one)
        else:
            found.insert(0, TracebackType(None, *one))
    return found, left_out


def left_out_words(frames: Sequence[FrameType]) -> str:
    """Return what is said of frames that are not shown; empty where there are none."""
    if not frames:
        return ""
    names = list(dict.fromkeys(places.package(f.f_code.co_filename) for f in frames))
    one = len(frames) == 1
    last = frames[-1].f_code.co_name
    return (
        f"    [{len(frames)} frame{'' if one else 's'} of {', '.join(names)} "
        f"{'is' if one else 'are'} folded, the last in {last}(); --traceback full shows "
        f"{'it' if one else 'them'}]\n"
    )


class Folding:
    """Has an IPython shell show the user's own lines, and say how many others there are."""

    def __init__(self, shell: Any) -> None:
        self.kind = KINDS[0]
        own = shell.InteractiveTB
        self._records, self._record, self._last = (
            own.get_records, own.format_record, own.format_exception
        )  # fmt: skip
        self._left_out = ""
        own.get_records, own.format_record = self.get_records, self.format_record
        own.format_exception = self.format_exception

    def get_records(self, trace: TracebackType, context: int, offset: int) -> Any:
        """Return IPython's records of the user's frames."""
        self._left_out = ""
        if self.kind == FULL:
            return self._records(trace, context, offset)
        shown, left_out = fold(trace)
        self._left_out = left_out_words(left_out)
        records: list[Any] = []
        for one in shown:
            if isinstance(one, Written):
                records.append(one)
            else:
                records += _at_their_lines(self._records(one, context, 0), one)
        return records

    def format_record(self, record: Any) -> str:
        """Return a record as text, without the comment that stands for the magic's line."""
        if isinstance(record, Written):
            return record.text()
        text: str = self._record(record)
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if _PLACE_OF_MAGIC.match(plain(line)) is None)

    def format_exception(self, kind: Any, error: Any) -> list[str]:
        """Return what is left out, and the error itself."""
        named = places.name_cells if self.kind == FULL else places.fold_text
        lines = [named(line) for line in self._last(kind, error)]
        left_out, self._left_out = self._left_out, ""
        return [left_out, *lines] if left_out else lines


def _at_their_lines(records: list[Any], trace: TracebackType | None) -> list[Any]:
    """Return IPython's records with the lines at which their frames were left.

    Where IPython reads a frame's source by itself, it takes the line that the frame has reached
    since: that of an `except` block, mostly.
    """
    lines = {}
    while trace is not None:
        lines[id(trace.tb_frame)] = trace.tb_lineno
        trace = trace.tb_next
    for record in records:
        if getattr(record, "_sd", None) is None:
            record.lineno = lines.get(id(record.frame), record.lineno)
    return records


def told(error: BaseException, trace: TracebackType | None) -> list[str]:
    """Return an error of ours as it is shown: the user's lines that led to it, then what it says.

    Its message says what to do, so there is nothing to read in the lines around.
    """
    shown, _ = fold(trace)
    lines: list[str] = []
    for one in shown:
        if isinstance(one, Written):
            lines += one.text().splitlines()
        else:
            lines += [line for frame in traceback.extract_tb(one) for line in _place(frame)]
    return [*lines, *([""] if lines else []), f"{type(error).__name__}: {error}"]


def _place(frame: traceback.FrameSummary) -> list[str]:
    where = places.name_cells(f'File "{frame.filename}", line {frame.lineno}')
    inside = "" if frame.name == _MODULE else f", in {frame.name}"
    return [f"{where}{inside}", f"----> {frame.lineno} {frame.line}"]


_PLACE_OF_MAGIC = re.compile(r"\s+1 #\s*$")


def install(shell: Any) -> None:
    """Show the errors of this IPython shell's cells so from now on; may be called again."""

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
        ours = isinstance(error, WorkbenchError) and all(one.kind != FULL for one in _folding)
        lines = told(error, trace) if ours else short(kind, error, trace, chain=not interrupt)
        shell._showtraceback(kind, str(error), lines)
        return lines

    places.number_cells(numbers)
    shell.set_custom_exc((KeyboardInterrupt, WorkbenchError, *_GROUPS), show)
    if not _folding:
        _folding.append(Folding(shell))
    _name_cells_in_warnings(numbers)


_folding: list[Folding] = []


def show_as(kind: str) -> None:
    """Show the errors of the next cell in one of `KINDS`."""
    for folding in _folding:
        folding.kind = kind


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
