"""The frames of the last failed cell, kept for `%cluster debug`.

They hold the user's variables, big tensors too. So only the newest failure is kept, until the next
cell begins or `%cluster free`.
"""

from __future__ import annotations

import contextlib
import io
import linecache
import sys
import traceback
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

from ...errors import RunStopped
from . import marks, stdin_bridge
from .debugger import Debugger, cell_over, variables

_RESUME = ("c", "cont", "continue", "n", "next", "s", "step", "r", "return", "unt", "until",
           "j", "jump")  # fmt: skip

_kept: BaseException | None = None
_debugger: Debugger | None = None


@contextlib.contextmanager
def cell() -> Iterator[None]:
    """Remove the rest of a debugger before a cell, and again after it."""
    clear()
    stdin_bridge.cell_begins()
    try:
        yield
    finally:
        cell_over()


def keep(error: BaseException | None) -> None:
    """Keep the failure of a cell; an interrupt and Stop are not failures."""
    global _kept, _debugger
    _debugger = None
    failed = isinstance(error, Exception) and not isinstance(error, RunStopped)
    _kept = error if failed and _traceback(error) is not None else None
    if _kept is None and error is not None:
        _let_go(error)


def clear() -> None:
    """Delete the failure, also in Python's own variables, so that its variables can be freed."""
    global _kept, _debugger
    error, _kept, _debugger = _kept, None, None
    if error is not None:
        _let_go(error)
    for name in ("last_exc", "last_type", "last_value", "last_traceback"):
        sys.__dict__.pop(name, None)


def _let_go(error: BaseException) -> None:
    """Empty an error's frames: they and the error hold each other until garbage is collected."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        traceback.clear_frames(one.__traceback__)
        one = one.__cause__ or one.__context__


def frames() -> dict[str, Any]:
    """Return the failure: `error`, `current` (index of the frame to begin with) and `frames`.

    Each frame has `index`, `file`, `line`, `function`, `where`, `source`, `yours` and `variables`
    (in short form, by name). Without a failure the answer is empty.
    """
    debugger = _open()
    if debugger is None or _kept is None:
        return {}
    found = [_frame(i, frame, line) for i, (frame, line) in enumerate(debugger.stack)]
    text = f"{type(_kept).__name__}: {_kept}"
    return {"error": text, "current": debugger.curindex, "frames": found}


def _frame(index: int, frame: FrameType, line: int) -> dict[str, Any]:
    code = frame.f_code
    yours = marks.is_yours(code.co_filename)
    return {
        "index": index,
        "file": code.co_filename,
        "line": line,
        "function": code.co_name,
        "where": marks.where(code.co_filename, line, code.co_name),
        "source": linecache.getline(code.co_filename, line, frame.f_globals).strip(),
        "yours": yours,
        "variables": variables(frame),
    }


def command(line: str) -> str | None:
    """Execute a command of pdb, or evaluate an expression, in the current frame.

    Returns:
        What pdb prints; None if no failure is kept.
    """
    debugger = _open()
    if debugger is None:
        return None
    word = debugger.parseline(line)[0]
    if word in _RESUME:
        return (
            "The cell has ended and cannot continue. "
            "You can inspect the cell with these commands: w, u, d, l, p, pp, a, locals.\n"
        )
    try:
        debugger.onecmd(debugger.precmd(line))
    except KeyboardInterrupt:
        debugger.message("*** interrupted")
    return debugger.take()


def evaluate(index: int, expression: str) -> dict[str, str]:
    """Evaluate in a frame; return `value` (its repr), or `error`."""
    debugger = _open()
    if debugger is None:
        return {"error": "this rank has no traceback to inspect"}
    if not 0 <= index < len(debugger.stack):
        return {"error": f"frames are numbered 0 to {len(debugger.stack) - 1}"}
    frame = debugger.stack[index][0]
    try:
        return {"value": repr(eval(expression, frame.f_globals, frame.f_locals))}
    except (Exception, KeyboardInterrupt) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _open() -> Debugger | None:
    """Return the debugger of the kept failure, at the innermost frame of the user's."""
    global _debugger
    if _kept is None:
        return None
    if _debugger is None:
        debugger = Debugger(io.StringIO(), io.StringIO())
        debugger.reset()
        debugger.setup(None, _traceback(_kept))
        files = [frame.f_code.co_filename for frame, _ in debugger.stack]
        mine = [i for i, name in enumerate(files) if marks.is_yours(name)]
        if mine:
            debugger.curindex = mine[-1]
            _select(debugger)
        _debugger = debugger
    return _debugger


def _select(debugger: Any) -> None:
    """Look at the frame of `curindex`, as `up` and `down` do."""
    debugger.curframe = debugger.stack[debugger.curindex][0]
    debugger.curframe_locals = debugger.curframe.f_locals
    debugger.lineno = None


def _traceback(error: BaseException | None) -> TracebackType | None:
    """Return the part of the traceback from the cell on; None if it does not contain the cell."""
    trace = None if error is None else error.__traceback__
    while trace is not None and not marks.is_cell(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace
