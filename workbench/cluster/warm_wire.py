"""What is said to a warm parent and heard from it: one line of JSON each, from any thread.

Standard library and psutil only. Commands have a number under which they are answered; events (a
child ended, imports are done, another kernel took over) have none.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import psutil

from ..errors import ClusterError
from .processes import Exit, ExitCallback, is_halted, left_unreaped

log = logging.getLogger("workbench.cluster")

START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
LOG_TAIL_LINES = 20
LOOK_S = 1.0
PATIENCE = 3
"""Looks in a row that must find a silent parent halted (SIGSTOP) before it is given up."""


class WarmWire:
    """One warm parent's socket: commands go out, answers and events come in."""

    def __init__(self) -> None:
        self.ready = threading.Event()
        """Set when engines can be forked, and also when that will never be."""
        self.warmed = threading.Event()
        """Set when the second stage (what the first training step imports) is loaded too."""
        self.report: dict[str, Any] = {}
        self.put_off = ""
        """Why the import was left until engines are asked for, in words; empty where it was not."""
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._pending: dict[int, Future[dict[str, Any]]] = {}
        self._callbacks: list[ExitCallback] = []
        self._forked: set[int] = set()
        self._exits: dict[int, Exit] = {}
        self._process: subprocess.Popen[bytes] | psutil.Process | None = None
        self._sock: socket.socket | None = None
        self._reader: threading.Thread | None = None
        self._looker: threading.Thread | None = None
        self._log_path = ""
        self._failure = ""
        self._stopped = self._released = False
        self._over = threading.Event()
        self.on_taken: Callable[[int], None] = lambda pid: None
        """Called with the pid of a kernel that took the kept cluster over from us."""

    def on_exit(self, callback: ExitCallback) -> Callable[[], None]:
        """Call `callback(exit)` in our reader thread when a child ended; returns an undo."""
        with self._lock:
            self._callbacks.append(callback)

        def undo() -> None:
            with self._lock, contextlib.suppress(ValueError):
                self._callbacks.remove(callback)

        return undo

    def exit_of(self, pid: int) -> Exit | None:
        """How a child ended, or None while it lives."""
        return self._exits.get(pid)

    def has(self, pid: int) -> bool:
        """Whether a process was forked here and lives, as far as is known."""
        return pid in self._forked and pid not in self._exits

    def ask(self, cmd: str, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Send one command and return the answer.

        Raises:
            ClusterError: The parent is gone, refused, or stayed silent.
        """
        if timeout_s is None:
            timeout_s = ANSWER_TIMEOUT_S if self.ready.is_set() else START_TIMEOUT_S
        future = self.tell(cmd, **fields)
        try:
            answer = self._await(future, timeout_s)
        except FutureTimeout:
            raise self._error(f"The warm parent did not answer {cmd} in {timeout_s:g} s.") from None
        if "error" in answer:
            raise self._error(f"The warm parent refused {cmd}: {answer['error']}")
        return answer

    def _await(self, future: Future[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Return an answer; one that is halted gives none, so that is not waited for to the end.

        Raises:
            ClusterError: The parent is halted.
            FutureTimeout: There is no answer in time.
        """
        end_s, halted = time.monotonic() + timeout_s, 0
        while True:
            try:
                return future.result(max(0.0, min(LOOK_S, end_s - time.monotonic())))
            except FutureTimeout:
                if time.monotonic() >= end_s:
                    raise
            pid = 0 if self._process is None else self._process.pid
            halted = halted + 1 if is_halted(pid) else 0
            if halted >= PATIENCE:
                raise ClusterError(
                    f"The warm parent that forks engines (pid {pid}) was halted by SIGSTOP.",
                    next_step="%cluster restart",
                )

    def tell(self, cmd: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send one command without waiting; the answer is the future's result.

        Raises:
            ClusterError: The parent is gone.
        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._sock is None or self._stopped or self._failure:
                raise self._error(self._failure or "The warm parent is not running.")
            number = next(self._numbers)
            self._pending[number] = future
            try:
                line = json.dumps({"id": number, "cmd": cmd, **fields}).encode() + b"\n"
                self._sock.sendall(line)
            except OSError as error:
                self._pending.pop(number, None)
                raise self._error(f"The warm parent cannot be reached ({error}).") from error
        return future

    # -- reading -------------------------------------------------------------------------------

    def _begin_to_read(self) -> None:
        self._reader = threading.Thread(target=self._read, name="workbench-warm", daemon=True)
        self._reader.start()
        self._looker = threading.Thread(target=self._look, name="workbench-warm-look", daemon=True)
        self._looker.start()

    def _look(self) -> None:
        """Tell of the ends of processes while the parent, which is halted, does not."""
        while not self._over.wait(LOOK_S):
            process = self._process
            if process is None or not is_halted(process.pid):
                continue
            for pid in list(self._forked - self._exits.keys()):
                if (end := left_unreaped(pid)) is not None:
                    self._ended(end)

    def _read(self) -> None:
        sock = self._sock
        assert sock is not None
        with contextlib.suppress(OSError), sock.makefile("rb") as lines:
            for line in lines:
                self._take(json.loads(line))
        self._over.set()
        if self._looker is not None:
            self._looker.join(LOOK_S)
        with self._lock:
            if not self._stopped:
                self._failure = self._failure or "The warm parent ended."
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            future.set_result({"error": "it ended"})
        self.ready.set()
        parent = ""
        if self._process is not None and not self._stopped:
            code = self._process.wait() or 0  # None of a process that is not our child
            end = Exit(self._process.pid, code if code >= 0 else None, -code if code < 0 else None)
            parent = f"the warm parent it was forked from (pid {end.pid}): {end.text}"
        # Its children died with it (PR_SET_PDEATHSIG) and nobody is left to tell us so.
        for pid in set() if self._released else self._forked - self._exits.keys():
            self._ended(Exit(pid, None, signal.SIGKILL, parent=parent))

    def _take(self, message: dict[str, Any]) -> None:
        event = message.get("event")
        if event is None:
            with self._lock:
                future = self._pending.pop(message["id"], None)
            if "pid" in message:
                self._forked.add(message["pid"])
            if future is not None:
                future.set_result(message)
        elif event == "exit":
            self._ended(
                Exit(message["pid"], message["code"], message["signal"], message.get("held", 0))
            )
        elif event == "warmed":
            self.warmed.set()
        elif event == "later":
            self.put_off = str(message["why"])
        elif event == "taken":
            self._stopped = self._released = True
            self.on_taken(int(message["pid"]))
        else:
            self.report = message
            if event == "failed":
                self._failure = f"The warm parent cannot fork engines: {message['error']}."
            self.ready.set()

    def _ended(self, end: Exit) -> None:
        with self._lock:
            if end.pid in self._exits:  # told already, while the parent was halted
                return
            self._exits[end.pid] = end
            callbacks = list(self._callbacks)
        for callback in callbacks:
            _tell(callback, end)

    def _error(self, what: str) -> ClusterError:
        tail = ""
        with contextlib.suppress(OSError):
            lines = Path(self._log_path).read_text(errors="replace").splitlines()
            tail = "\n".join(lines[-LOG_TAIL_LINES:])
        return ClusterError(
            f"{what}\n{tail}".rstrip(),
            next_step="%cluster stop, then start again; --launcher local starts engines without it",
        )


def _tell(callback: ExitCallback, end: Exit) -> None:
    try:
        callback(end)
    except Exception:  # one listener's mistake must not deafen the others
        log.exception("A listener failed on the end of process %d", end.pid)
