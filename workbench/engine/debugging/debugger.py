"""The debugger of an engine: Python's pdb with its prompt in the notebook.

Commands come as lines from the kernel (`stdin_bridge.py`); the answer is what pdb prints.

A cell calls `breakpoint()`, `pdb.set_trace()`, `input()` or `getpass()` to stop or to ask. Each of
them would wait at a terminal, which engines do not have. Here they ask in the notebook, or report
that nobody can answer.
"""

from __future__ import annotations

import bdb
import builtins
import ctypes
import getpass
import io
import linecache
import os
import pdb
import sys
import threading
from types import FrameType, TracebackType
from typing import Any, Literal

from ...errors import RunError
from .. import context
from . import marks, stdin_bridge
from .marks import describe
from .stdin_bridge import Released, StdinBridge

HOW = "run the cell with --background, then open the debugger with %cluster debug {engine}"
QUIT = "You left the debugger with `q`, which ends the cell."
_NOT_HERE = ("debug", "interact", "run", "restart")
_SKIP = [f"{name}{end}" for name in ("workbench", "IPython", "ipykernel", "ipyparallel", "asyncio")
         for end in ("", ".*")]  # fmt: skip


class Debugger(pdb.Pdb):
    """pdb as the notebook shows it: places in the cell, `locals`, nothing that reads a terminal."""

    def __init__(self, stdin: Any, stdout: io.StringIO) -> None:
        super().__init__(stdin=stdin, stdout=stdout, nosigint=True, readrc=False, skip=_SKIP)
        self.out = stdout
        self.prompt = ""
        self.interrupted = False

    def take(self) -> str:
        """Return what was printed since the last time."""
        text = self.out.getvalue()
        self.out.seek(0)
        self.out.truncate()
        return text

    def get_stack(
        self, f: FrameType | None, t: TracebackType | None
    ) -> tuple[list[tuple[FrameType, int]], int]:
        """Return the stack from the cell on, without our frames that called the cell."""
        stack, index = super().get_stack(f, t)
        files = [frame.f_code.co_filename for frame, _ in stack]
        first = next((i for i, name in enumerate(files) if marks.is_cell(name)), 0)
        if index < first:
            return stack, index
        return stack[first:], index - first

    def format_stack_entry(self, frame_lineno: tuple[FrameType, int], lprefix: str = ": ") -> str:
        """Return a frame's place and line."""
        frame, line = frame_lineno
        code = frame.f_code
        text = linecache.getline(code.co_filename, line, frame.f_globals).strip()
        return f"{marks.where(code.co_filename, line, code.co_name)}{lprefix}{text}"

    def do_locals(self, arg: str) -> None:
        """Show the frame's variables."""
        for name, text in variables(self.curframe).items():  # type: ignore[arg-type]
            self.message(f"{name} = {text}")

    def onecmd(self, line: str) -> bool:
        """Execute a line, unless it would read from a terminal."""
        word = self.parseline(line)[0]
        if word is not None and self._means_variable(word, line):
            line = "!" + line
        elif word in _NOT_HERE:
            why = "needs a terminal, which engines do not have"
            if word in ("run", "restart"):
                why = "cannot restart a cell: leave the debugger with `q`, then run the cell again"
            self.error(f"`{word}` {why}")
            return False
        done = super().onecmd(line)
        if self.interrupted:
            self.interrupted = False
            self.on_interrupt()
        return bool(done)

    def _means_variable(self, word: str, line: str) -> bool:
        """Whether the text means `w.shape` or `n = 3`, not the pdb command with this name."""
        follows = line.strip()[len(word) :].lstrip()
        if not follows.startswith((".", "[", "(", "=")) or self.curframe is None:
            return False
        return word in self.curframe.f_locals or word in self.curframe.f_globals

    def _error_exc(self) -> None:
        self.interrupted = isinstance(sys.exc_info()[1], KeyboardInterrupt)
        super()._error_exc()  # type: ignore[misc]

    def on_interrupt(self) -> None:
        """Ignore an interrupt of a command."""


class _Lines:
    """Replaces the debugger's stdin: each line is a command from the notebook."""

    def __init__(self, owner: LiveDebugger) -> None:
        self._owner = owner

    def readline(self) -> str:
        return self._owner.next_command() + "\n"


class LiveDebugger(Debugger):
    """Holds a cell at a breakpoint while its user looks around."""

    def __init__(self, asks: StdinBridge) -> None:
        super().__init__(_Lines(self), io.StringIO())
        self._attention = asks
        self._open = False
        self._between = False  # two statements of the cell

    def hold(self, frame: FrameType) -> None:
        """Stop in `frame`, at the line that requested it; then follow the user's commands."""
        self.reset()
        outer = [frame]
        while outer[-1].f_back is not None:
            outer.append(outer[-1].f_back)
        self.botframe: FrameType | None = outer[-1]
        self.interaction(frame)
        if self.quitting:
            raise RunError(QUIT, code="WB-RUN-008")
        if self.breaks or self.stopframe is not self.botframe:
            for one in outer:
                one.f_trace = self.trace_dispatch
            sys.settrace(self.trace_dispatch)

    def interaction(self, frame: Any, traceback: Any = None) -> None:
        """Hold the cell in `frame` until a command lets it continue."""
        self._open = self._between = False
        if not self._attention.busy.acquire(blocking=False):
            tell("another thread of this rank is already paused, so this thread continues")
            self.set_continue()
            return
        try:
            super().interaction(frame, traceback)
        finally:
            self._attention.busy.release()
            if self._open:
                self._open = False
                self._attention.leave(self.take())

    def next_command(self) -> str:
        """Answer the last command and wait for the next one."""
        asks, text = self._attention, self.take()
        try:
            if self._open:
                asks.answer(text)
            elif not self._begin(text):
                return "continue"
            return asks.next_line()
        except Released as release:
            tell(f"the pause has ended: {release}")
            asks.deaf = str(release)
            self.clear_all_breaks()
            return "continue"

    def _begin(self, text: str) -> bool:
        """Announce the stop; return whether the cell is held."""
        asks = self._attention
        frame, line = self.stack[self.curindex]
        where = marks.where(frame.f_code.co_filename, line, frame.f_code.co_name)
        was_deaf = bool(asks.deaf)
        reason = asks.ask("debugger", where, text, patience_s())
        if not reason:
            self._open = True
            if asks.announce:
                tell(f"paused at {where}; %cluster debug {asks.engine} opens the debugger")
            return True
        if not was_deaf:
            how = HOW.format(engine=asks.engine)
            tell(
                f"breakpoint() at {where}: {reason}, so the cell continues "
                "and ignores later breakpoints too."
            )
            tell(f"To stop at breakpoints, {how}.")
            asks.deaf = reason
        self.clear_all_breaks()
        return False

    def default(self, line: str) -> None:
        """Run a statement in the frame; its assignments stay when the cell continues."""
        super().default(line)
        frame = self.curframe
        if frame is not None and sys.version_info < (3, 13):  # later ones write through
            to_fast = ctypes.pythonapi.PyFrame_LocalsToFast
            to_fast(ctypes.py_object(frame), ctypes.c_int(0))

    def _cmdloop(self) -> None:
        self.cmdloop()  # an interrupt belongs to the cell, not to the prompt

    def on_interrupt(self) -> None:
        """End the cell at an interrupt, as it would without a debugger."""
        raise KeyboardInterrupt

    def stop_here(self, frame: FrameType) -> bool:
        """Whether a step ends in this frame; IPython runs a cell statement by statement."""
        if not self._between:
            return bool(super().stop_here(frame))
        self._between = not _is_statement(frame)
        return not self._between

    def user_call(self, frame: FrameType, argument_list: None) -> None:
        """Step into a function; a cell's next statement is not a call."""
        if not _is_statement(frame):
            super().user_call(frame, argument_list)

    def user_return(self, frame: FrameType, return_value: Any) -> None:
        """Step out of a function; from a statement, to the cell's next one."""
        if _is_statement(frame):
            self._between = True
            self.set_step()
        else:
            super().user_return(frame, return_value)

    def trace_dispatch(self, frame: FrameType, event: str, arg: Any) -> Any:
        """Follow the program; `q` ends the cell with its own message."""
        try:
            return super().trace_dispatch(frame, event, arg)
        except bdb.BdbQuit:
            sys.settrace(None)
            raise RunError(QUIT, code="WB-RUN-009") from None

    def end(self) -> None:
        """Stop following: the cell is over."""
        self.clear_all_breaks()
        sys.settrace(None)


def _is_statement(frame: FrameType) -> bool:
    return frame.f_code.co_name == "<module>" and marks.is_cell(frame.f_code.co_filename)


def variables(frame: FrameType) -> dict[str, str]:
    """Return a frame's variables in short form, without imports and IPython's own."""
    hidden = {"In", "Out", "get_ipython", "exit", "quit"}
    kinds = (type(sys), type(variables), type)
    found = {}
    for name, value in list(frame.f_locals.items()):
        outer = frame.f_code.co_name == "<module>"
        if outer and (name.startswith("_") or name in hidden or isinstance(value, kinds)):
            continue
        found[name] = describe(value)
    return found


def patience_s() -> float:
    """Return how long the other ranks wait for this one."""
    run = context.current()
    limit = run.spec.options.get("timeout_s") if run is not None else None
    return float(limit or stdin_bridge.PATIENCE_S)


def tell(text: str) -> None:
    """Show a text to the user, below the cell."""
    print(f"[debugger] {text}", flush=True)  # noqa: T201 - part of the cell's output


_live: LiveDebugger | None = None


def stop_here(*args: Any, header: str | None = None, **keywords: Any) -> None:
    """Replace `breakpoint()` and `pdb.set_trace()`: hold the cell in the caller's frame."""
    global _live
    frame = sys._getframe(1)
    if os.environ.get("PYTHONBREAKPOINT") == "0":
        return
    asks = stdin_bridge.current()
    if asks is None:
        tell("breakpoint() was ignored, because it runs in a child process of an engine")
        return
    if header:
        tell(header)
    if stdin_bridge.stop(frame):
        return
    if asks.busy.locked():
        tell("breakpoint() was ignored, because this rank is already paused")
        return
    if _live is None or _live._attention is not asks:
        _live = LiveDebugger(asks)
    _live.hold(frame)


def ask(prompt: object = "", *, password: bool = False) -> str:
    """Replace `input()`: ask in the notebook.

    Raises:
        RunError: No answer is possible.
    """
    name = "getpass()" if password else "input()"
    asks = stdin_bridge.current()
    reason = "this process is not an engine of the cluster"
    if asks is not None and asks.busy.acquire(blocking=False):
        try:
            frame = sys._getframe(1)
            where = marks.where(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
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
        reason = "this rank is already paused"
    raise RunError(
        f"{name} cannot read an answer here: {reason}.",
        seen=str(prompt) or None,
        next_step=f"call {name} in a cell without %%distributed, then copy the value to the "
        "engines with %push",
        code="WB-RUN-004",
    )


def _ask_password(prompt: str = "Password: ", stream: Any = None) -> str:
    return ask(prompt, password=True)


def install() -> None:
    """Replace all functions that would wait at a terminal, which engines do not have."""
    sys.breakpointhook = stop_here
    pdb.set_trace = stop_here
    builtins.input = ask
    getpass.getpass = _ask_password
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)  # engines of other launchers have a pipe without a writer


def cell_over() -> None:
    """Remove all of a debugger: tracing and breakpoints."""
    global _live
    if _live is not None and threading.current_thread() is threading.main_thread():
        _live.end()
        _live = None
