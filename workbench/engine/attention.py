"""What an engine asks its user, and whether it waits for an answer.

A cell that calls `breakpoint()` or `input()` needs words from the notebook while the cell blocks
the engine, so they travel on the control path:

    engine (the cell's thread)               kernel
    stopped: where, text           ------>   a prompt in the cell that blocks, or `%cluster debug`
                                   <------   hold            or go_on: nobody can answer here
    (waits)                        <------   line: a command
    answer: text                   ------>
    left: text                     ------>   the cell goes on

Nothing waits for somebody who is not there: without a `hold` within `HEARD_S` the cell goes on.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from . import debugpy_server

HEARD_S = 5.0
PATIENCE_S = 1800.0
"""How long the other ranks wait in a collective for one that is paused (see GROUP_TIMEOUT)."""

Send = Callable[[dict[str, Any]], None]


class Released(Exception):
    """Stop was pressed, or the cell is over: nobody is asked any more."""


class Attention:
    """One engine's questions; at most one at a time.

    Args:
        engine: Id of this engine.
        send: Sends a `debugger` message to the kernel; never waits.
    """

    def __init__(self, engine: int, send: Send) -> None:
        self.engine, self.send, self.pid = engine, send, os.getpid()
        self.busy = threading.Lock()
        self.deaf = ""  # why nothing is asked for the rest of this cell
        self.announce = True  # whether the user must be told: no cell of the notebook blocks
        self._number = 0
        self._stop: dict[str, Any] | None = None
        self._words: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()

    def ask(self, kind: str, where: str, text: str, patience_s: float = PATIENCE_S) -> str:
        """Say that the cell has stopped; return why it must go on, empty where it may wait.

        Args:
            kind: `debugger`, `input` or `password`.
            where: Place in the cell.
            text: What the user is shown first.
            patience_s: How long the other ranks wait.
        """
        if self.deaf:
            return self.deaf
        self._number += 1
        stop = {
            "engine": self.engine, "said": "stopped", "number": self._number, "asks": kind,
            "where": where, "text": text, "patience_s": patience_s, "since": time.time(),
        }  # fmt: skip
        self._stop = stop
        self.send(stop)
        end = time.monotonic() + HEARD_S
        while (left := end - time.monotonic()) > 0:
            try:
                word = self._words.get(timeout=left)
            except queue.Empty:
                break
            if word.get("number") == self._number and word.get("do") == "hold":
                self.announce = word.get("announce") is not False
                return ""
            if self._ends(word):
                self._stop = None
                return str(word.get("reason") or "the notebook says so")
        self._stop = None
        return "the notebook does not answer"

    def next_line(self) -> str:
        """Wait for the user's next line.

        Raises:
            Released: There will be none.
        """
        while True:
            word = self._words.get()
            if self._ends(word):
                raise Released(str(word.get("reason") or "the notebook says so"))
            if word.get("number") == self._number and word.get("do") == "line":
                return str(word.get("text", ""))

    def _ends(self, word: Mapping[str, Any]) -> bool:
        if word.get("do") == "release":
            return True
        return word.get("do") == "go_on" and word.get("number") == self._number

    def answer(self, text: str) -> None:
        """Say what came of the line."""
        said = {"engine": self.engine, "said": "answer", "number": self._number, "text": text}
        self.send(said)

    def leave(self, text: str = "") -> None:
        """Say that the cell goes on."""
        self._stop = None
        said = {"engine": self.engine, "said": "left", "number": self._number, "text": text}
        self.send(said)

    @property
    def where(self) -> str:
        """Where the cell waits for its user; empty while it does not."""
        stop = self._stop
        return str(stop["where"]) if stop is not None else ""

    def hear(self, word: Mapping[str, Any]) -> None:
        """Take the kernel's word; called on the control thread."""
        stop = self._stop
        if word.get("do") == "where":  # a notebook that has not heard the question
            if stop is not None:
                self.send(stop)
        elif word.get("do") == "serve":
            threading.Thread(target=self._serve, args=(word.get("port"),), daemon=True).start()
        elif stop is not None:
            self._words.put(word)

    def _serve(self, port: Any) -> None:
        """Serve debugpy, from a thread of its own: the cell may be busy or stuck."""
        said = debugpy_server.serve(port if isinstance(port, int) else 0)
        self.send({"engine": self.engine, "said": "served", **said})

    def release(self, reason: str) -> None:
        """Let the cell go on and ask nothing more in it; from any thread."""
        self.deaf = reason
        if self._stop is not None:
            self._words.put({"do": "release", "reason": reason})

    def cell_begins(self) -> None:
        """Ask again: another cell begins."""
        self.deaf = ""
        self._stop = None
        while not self._words.empty():
            self._words.get()


_attention: Attention | None = None


def install(engine: int, send: Send) -> Attention:
    """Have questions go to this kernel from now on; one that is open is asked there too."""
    global _attention
    if _attention is None or _attention.pid != os.getpid():
        _attention = Attention(engine, send)
    _attention.engine, _attention.send = engine, send
    return _attention


def current() -> Attention | None:
    """Return this engine's; None in a process that is no engine (a data loader's worker)."""
    if _attention is None or _attention.pid != os.getpid():
        return None
    return _attention


def paused_by_user() -> str:
    """Return where the user holds this rank (a debugger, a question); empty: nowhere."""
    if _attention is None:
        return ""
    return _attention.where or ("an attached debugger" if debugpy_server.holds() else "")


def release(reason: str) -> None:
    """Let a cell that waits for its user go on."""
    if _attention is not None:
        _attention.release(reason)


def hear(word: Mapping[str, Any]) -> None:
    """Take a `debugger` message of the kernel."""
    if _attention is not None:
        _attention.hear(word)


def cell_begins() -> None:
    """Take note that a cell begins."""
    if _attention is not None:
        _attention.cell_begins()
