"""An engine's questions to its user, and the wait for an answer.

A cell that calls `breakpoint()` or `input()` needs input from the notebook while the cell blocks
the engine, so questions and answers use the control path:

    engine (the cell's thread)               kernel
    stopped: where, text           ------>   a prompt in the cell that blocks, or `%cluster debug`
                                   <------   hold            or go_on: nobody can answer here
    (waits)                        <------   line: a command
    answer: text                   ------>
    left: text                     ------>   the cell continues

The cell does not wait for a user who is not there: without a `hold` within `HEARD_S` it continues.

For VS Code, debugpy listens on loopback, in the engine's own process.
"""

from __future__ import annotations

import importlib
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any, Literal

from ...shared.messages import (
    Answered,
    Down,
    GoOn,
    Hold,
    Left,
    Repeat,
    Serve,
    Served,
    Stopped,
    ToUser,
    Typed,
)

HEARD_S = 5.0
PATIENCE_S = 1800.0
"""How long the other ranks wait in a collective for one that is paused (see GROUP_TIMEOUT)."""

Said = Stopped | Answered | Left | Served
Send = Callable[[Said], None]


class Released(Exception):
    """Stop was pressed, or the cell is over: no more questions are asked."""


@dataclass(frozen=True)
class _Release:
    """This engine's own message that the cell continues."""

    reason: str


class StdinBridge:
    """One engine's questions; at most one at a time.

    Args:
        engine: Id of this engine.
        send: Sends a message to the kernel; never waits.
    """

    def __init__(self, engine: int, send: Send) -> None:
        self.engine, self.send, self.pid = engine, send, os.getpid()
        self.busy = threading.Lock()
        self.deaf = ""  # why no question is asked in the rest of this cell
        self.announce = True  # whether the user must be told: no cell of the notebook blocks
        self._number = 0
        self._stop: Stopped | None = None
        self._words: queue.SimpleQueue[ToUser | _Release] = queue.SimpleQueue()

    def ask(
        self,
        kind: Literal["debugger", "input", "password"],
        where: str,
        text: str,
        patience_s: float = PATIENCE_S,
    ) -> str:
        """Report that the cell has stopped; return why it must continue, empty if it may wait.

        Args:
            kind: `debugger`, `input` or `password`.
            where: Place in the cell.
            text: The first text shown to the user.
            patience_s: How long the other ranks wait.
        """
        if self.deaf:
            return self.deaf
        self._number += 1
        stop = Stopped(
            engine=self.engine, number=self._number, asks=kind,
            where=where, text=text, patience_s=patience_s, since=time.time(),
        )  # fmt: skip
        self._stop = stop
        self.send(stop)
        end = time.monotonic() + HEARD_S
        while (left := end - time.monotonic()) > 0:
            try:
                word = self._words.get(timeout=left)
            except queue.Empty:
                break
            if isinstance(word, Hold) and word.number == self._number:
                self.announce = word.announce
                return ""
            if reason := self._ends(word):
                self._stop = None
                return reason
        self._stop = None
        return "the notebook does not answer"

    def next_line(self) -> str:
        """Wait for the user's next line.

        Raises:
            Released: There will be no more lines.
        """
        while True:
            word = self._words.get()
            if reason := self._ends(word):
                raise Released(reason)
            if isinstance(word, Typed) and word.number == self._number:
                return word.text

    def _ends(self, word: ToUser | _Release) -> str:
        """Return why the cell continues; empty if it waits."""
        if isinstance(word, _Release) or (isinstance(word, GoOn) and word.number == self._number):
            return word.reason or "the notebook ended the pause"
        return ""

    def answer(self, text: str) -> None:
        """Send the result of the line."""
        self.send(Answered(engine=self.engine, number=self._number, text=text))

    def leave(self, text: str = "") -> None:
        """Report that the cell continues."""
        self._stop = None
        self.send(Left(engine=self.engine, number=self._number, text=text))

    @property
    def where(self) -> str:
        """Where the cell waits for its user; empty while it does not."""
        stop = self._stop
        return stop.where if stop is not None else ""

    def hear(self, word: Down) -> None:
        """Accept a message of the kernel; called on the control thread."""
        stop = self._stop
        match word:
            case Repeat():  # a notebook that has not received the question
                if stop is not None:
                    self.send(stop)
            case Serve():
                threading.Thread(target=self._serve, args=(word.port,), daemon=True).start()
            case ToUser():
                if stop is not None:
                    self._words.put(word)

    def _serve(self, port: int) -> None:
        """Serve debugpy, from a thread of its own: the cell may be busy or stuck."""
        self.send(Served(engine=self.engine, **serve(port)))

    def release(self, reason: str) -> None:
        """Let the cell continue and ask no more questions in it; from any thread."""
        self.deaf = reason
        if self._stop is not None:
            self._words.put(_Release(reason))

    def cell_begins(self) -> None:
        """Ask again: another cell begins."""
        self.deaf = ""
        self._stop = None
        while not self._words.empty():
            self._words.get()


_attention: StdinBridge | None = None


def install(engine: int, send: Send) -> StdinBridge:
    """Send questions to this kernel from now on; an open one is asked there too."""
    global _attention
    if _attention is None or _attention.pid != os.getpid():
        _attention = StdinBridge(engine, send)
    _attention.engine, _attention.send = engine, send
    return _attention


def current() -> StdinBridge | None:
    """Return this engine's questions.

    None in a process that is not an engine (a loader's worker).
    """
    if _attention is None or _attention.pid != os.getpid():
        return None
    return _attention


def paused_by_user() -> str:
    """Return where the user holds this rank (a debugger, a question); empty: nowhere."""
    if _attention is None:
        return ""
    return _attention.where or ("an attached debugger" if holds() else "")


def release(reason: str) -> None:
    """Let a cell that waits for its user continue."""
    if _attention is not None:
        _attention.release(reason)


def hear(word: Down) -> None:
    """Pass a message of the kernel to a cell that waits for its user."""
    if _attention is not None:
        _attention.hear(word)


def cell_begins() -> None:
    """Note that a cell begins."""
    if _attention is not None:
        _attention.cell_begins()


HOST = "127.0.0.1"

_served: int | None = None


def serve(port: int) -> dict[str, Any]:
    """Let debuggers attach to this engine; a second call keeps the port.

    The adapter runs in this process, so that no other process outlives the engine.

    Args:
        port: 0 takes any free port.

    Returns:
        `port`, and `before` (whether it was served already); or `missing` or `taken` (why not).
    """
    global _served
    if _served is not None:
        return {"port": _served, "before": True}
    try:
        debugpy = importlib.import_module("debugpy")
    except ImportError as error:
        return {"missing": str(error)}
    _leave_ours_alone()
    try:
        port = _free(port)
        debugpy.listen((HOST, port), in_process_debug_adapter=True)
    except (OSError, RuntimeError) as error:
        return {"taken": str(error)}
    _served = port
    return {"port": port, "before": False}


def _free(port: int) -> int:
    """Return the port if it is free; debugpy would report an error too late, on a thread."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((HOST, port))
        return int(probe.getsockname()[1])


def _leave_ours_alone() -> None:
    """Exempt this engine's own threads: it must answer the notebook while a debugger holds it."""
    for thread in threading.enumerate():
        if thread.name.startswith("workbench-"):
            about = vars(thread)
            about["pydev_do_not_trace"] = about["is_pydev_daemon_thread"] = True


def holds() -> bool:
    """Whether an attached debugger holds the main thread."""
    if _served is None:
        return False
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code.co_name == "_do_wait_suspend":
            return True
        frame = frame.f_back
    return False


def stop(frame: FrameType) -> bool:
    """Stop in `frame` if a debugger is attached; return whether one is."""
    if _served is None:
        return False
    debugpy: Any = sys.modules["debugpy"]
    if not debugpy.is_client_connected():
        return False
    importlib.import_module("pydevd").settrace(
        suspend=True, trace_only_current_thread=True, patch_multiprocessing=False,
        stop_at_frame=frame,
    )  # fmt: skip
    return True
