"""What a cell calls to stop or to ask: `breakpoint()`, `pdb.set_trace()`, `input()`, `getpass()`.

Each of them would wait at a terminal, which engines do not have; these ask in the notebook, or say
that nobody can answer.
"""

from __future__ import annotations

import builtins
import getpass
import os
import pdb
import sys
import threading
from typing import Any, Literal

from ..errors import RunError
from . import attention, debugpy_server, places
from .attention import Released
from .debugger import LiveDebugger, patience_s, say

_live: LiveDebugger | None = None


def stop_here(*args: Any, header: str | None = None, **keywords: Any) -> None:
    """Stand for `breakpoint()` and `pdb.set_trace()`: hold the cell in the caller's frame."""
    global _live
    frame = sys._getframe(1)
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    asks = attention.current()
    if asks is None:
        say("breakpoint() in a process that the engine started: passed by")
        return
    if header:
        say(header)
    if debugpy_server.stop(frame):
        return
    if asks.busy.locked():
        say("a breakpoint was met while this rank is paused at another one: passed by")
        return
    if _live is None or _live._attention is not asks:
        _live = LiveDebugger(asks)
    _live.hold(frame)


def ask(prompt: object = "", *, password: bool = False) -> str:
    """Stand for `input()`: ask in the notebook.

    Raises:
        RunError: Nobody can answer.
    """
    name = "getpass()" if password else "input()"
    asks = attention.current()
    reason = "this process is no engine of the cluster"
    if asks is not None and asks.busy.acquire(blocking=False):
        try:
            frame = sys._getframe(1)
            where = places.where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            kind: Literal["input", "password"] = "password" if password else "input"
            sys.stdout.flush()
            reason = asks.ask(kind, where, str(prompt), patience_s())
            if not reason:
                try:
                    return asks.next_line()
                finally:
                    asks.leave()
        except Released as release:
            reason = str(release)
        finally:
            asks.busy.release()
    elif asks is not None:
        reason = "this rank is paused already"
    raise RunError(
        f"{name} was called on an engine, where nobody can type: {reason}.",
        seen=str(prompt),
        next_step="ask in a cell of the notebook, then %push the value to the engines",
        code="WB-RUN-004",
    )


def _ask_password(prompt: str = "Password: ", stream: Any = None) -> str:
    return ask(prompt, password=True)


def install() -> None:
    """Take the place of everything that would wait at a terminal which engines do not have."""
    sys.breakpointhook = stop_here
    pdb.set_trace = stop_here
    builtins.input = ask
    getpass.getpass = _ask_password
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # engines of other launchers have a pipe that nobody writes to


def cell_over() -> None:
    """Leave nothing of a debugger behind: no tracing, no breakpoints."""
    global _live
    if _live is not None and threading.current_thread() is threading.main_thread():
        _live.end()
        _live = None
