"""The kernel's handle on the warm parent: standard library and psutil only, from any thread.

Each message in either direction is one line of JSON. Commands have a number, and answers repeat it.
Events (a child ended, imports are done, another kernel took over) have no number.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any

import psutil

from ...errors import ClusterError
from ...shared import cluster_env
from .. import folders
from ..processes import (
    FORK,
    Exit,
    ExitCallback,
    can_fork,
    environment,
    is_halted,
    left_unreaped,
    signal_child,
    start_keeper,
)
from . import keeper
from .owner import knock

__all__ = ["Exit", "WarmParent", "can_fork", "start_keeper"]

log = logging.getLogger("workbench.cluster")

STOP_TIMEOUT_S = 5.0
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 30.0
LOG_TAIL_LINES = 20
LOOK_S = 1.0
PATIENCE = 3
"""This many checks in a row must find a silent parent halted (SIGSTOP) before it is given up."""
_NAME = "The process that forks engines (the warm parent)"


class WarmParent:
    """One warm parent process and the requests to it.

    Args:
        framework: `torch` or `tensorflow`: what it imports.
        preload: Further modules to import when idle.
        folder: The cluster's folder, which also contains its log.
    """

    def __init__(
        self, framework: str = "torch", preload: Sequence[str] = (), folder: str = ""
    ) -> None:
        self.ready = threading.Event()
        """Set when engines can be forked, or when it is certain that they never can."""
        self.warmed = threading.Event()
        """Set when the second stage (what the first training step imports) is loaded too."""
        self.report: dict[str, Any] = {}
        self.put_off = ""
        """Why the import waits until engines are requested, in words; empty if it does not wait."""
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
        """Called with the pid of a kernel that took the kept cluster over."""
        self.framework, self.folder = framework, folder
        self._preload = list(preload)
        self._kept = False

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> WarmParent:
        """Start the process and return at once; a second call does nothing.

        Raises:
            ClusterError: A warm parent cannot work here (see `can_fork`).
        """
        with self._lock:
            if self._process is not None:
                return self
            possible, reason = can_fork(self.framework)
            if not possible:
                raise ClusterError(
                    "Engines cannot be forked from a warm parent (a process that has already "
                    "imported the framework).",
                    seen=reason,
                    code="WB-CLUSTER-020",
                )
            ours, theirs = socket.socketpair()
            where = os.path.join(self.folder, "log") if self.folder else None
            log_fd, self._log_path = tempfile.mkstemp(
                prefix="workbench-warm-", suffix=".log", dir=where
            )
            with theirs, os.fdopen(log_fd, "ab") as log:
                self._process = subprocess.Popen(
                    self._command(theirs.fileno()),
                    pass_fds=[theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment(self.framework, self.folder),
                    cwd="/",
                    start_new_session=True,
                )
            self._sock = ours
        self._begin_to_read()
        return self

    def adopt(self, who: Mapping[str, Any], door: Path, *, take: bool = False) -> WarmParent:
        """Become the owner of a kept cluster's warm parent.

        Args:
            who: Its pid and start time.
            door: Where it listens.
            take: Even if another kernel owns it; that kernel is then told.

        Raises:
            ClusterError: It has ended, or has an owner.
        """
        me = folders.identity(os.getpid())
        try:
            self._process = psutil.Process(int(who["pid"]))
            sock, answer = knock(door, {**me, "take": take})
        except (OSError, psutil.Error) as error:
            raise ClusterError(
                "The process that forks the cluster's engines (the warm parent) cannot be reached.",
                seen=str(error),
                next_step="`workbench ps` lists the running clusters",
                code="WB-CLUSTER-021",
            ) from error
        if "error" in answer:
            sock.close()
            owner = answer["owner"]["pid"]
            raise ClusterError(
                "The cluster belongs to another notebook.",
                seen=f"the other notebook's kernel has pid {owner}",
                next_step="take the cluster over: %cluster attach ID --take",
                code="WB-CLUSTER-022",
            )
        self._sock, self._kept = sock, True
        self.report = answer["report"]
        self._forked = {int(pid) for pid in answer["children"]}
        self.ready.set()
        self.warmed.set()
        self._begin_to_read()
        for end in answer["exits"]:
            self._forked.add(end["pid"])
            self._take(end)
        return self

    def _command(self, fd: int) -> list[str]:
        command = [sys.executable, "-m", "workbench.cluster.forkserver.server", "--fd", str(fd)]
        command += ["--framework", self.framework, "--log", self._log_path]
        return [*command, "--preload", *self._preload] if self._preload else command

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until engines can be forked.

        Raises:
            ClusterError: That failed, or took longer than `timeout_s`.
        """
        self.start()
        if not self.ready.wait(timeout_s):
            raise self._error(f"{_NAME} was not ready within {timeout_s:g} s.")
        if self._failure:
            raise self._error(self._failure)

    @property
    def alive(self) -> bool:
        """Whether the process runs and listens to this kernel."""
        return self._process is not None and not self._stopped and not self._failure

    @property
    def pid(self) -> int | None:
        """Its process id, or None before `start`."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the process.

        It kills its children and guarded processes, and removes guarded folders.
        """
        with self._lock:
            self._stopped = True
            process, sock = self._process, self._sock
        if process is None or sock is None:
            return
        with contextlib.suppress(OSError):
            if self._kept:
                sock.sendall(b'{"cmd": "keep", "keep": false}\n')
            sock.shutdown(socket.SHUT_RDWR)
        try:
            process.wait(STOP_TIMEOUT_S)
        except (subprocess.TimeoutExpired, psutil.TimeoutExpired):
            process.kill()
            process.wait()
        if self._reader is not None and self._reader is not threading.current_thread():
            self._reader.join(STOP_TIMEOUT_S)
        sock.close()
        with contextlib.suppress(OSError):
            os.unlink(self._log_path)

    # -- what it does --------------------------------------------------------------------------

    def fork_engine(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        cwd: str,
        sys_path: Sequence[str],
        log_path: str,
        name: str = "ipengine",
        together: int = 1,
    ) -> int:
        """Fork an ipyparallel engine and return its process id.

        Args:
            argv: Arguments of `ipengine`.
            env: The whole environment; nothing of the parent's is added.
            cwd: Working directory.
            sys_path: The whole module search path.
            log_path: File that stdout and stderr are appended to.
            name: Shown by `ps` and `top` (15 characters).
            together: The number of engines that are forked one after the other. If they are many,
                the parent first imports what each of them would import later.

        Raises:
            ClusterError: The warm parent has ended or could not fork.
        """
        answer = self.ask(
            "fork_engine", argv=list(argv), env=dict(env), cwd=cwd, sys_path=list(sys_path),
            log_path=log_path, name=name, together=together,
        )  # fmt: skip
        return int(answer["pid"])

    def fork_keeper(
        self,
        log_path: str = os.devnull,
        host: str = keeper.LOOPBACK,
        ports: tuple[int, int] | None = None,
    ) -> tuple[int, str, int]:
        """Fork the process that hosts the TCPStore; return its pid, host and port.

        Args:
            log_path: As of an engine.
            host: The address of this host on which it listens.
            ports: The first and last allowed port; None: any.

        Raises:
            ClusterError: It cannot listen there, or the parent is gone or could not fork.
        """
        answer = self.ask("fork_keeper", log_path=log_path, host=host, ports=ports)
        if "unheard" in answer:
            raise cluster_env.cannot_listen(host, ports, answer["unheard"])
        return int(answer["pid"]), str(answer["host"]), int(answer["port"])

    def signal(self, pid: int, sig: int) -> bool:
        """Signal a process that was forked here; False if it is already gone.

        The signal is sent directly if this is safe, because the parent may be busy with an import
        for seconds. Otherwise the parent is asked to send it.
        """
        parent_pid = self.pid
        if parent_pid is not None and self.has(pid) and signal_child(parent_pid, pid, sig):
            return True
        return bool(self.ask("signal", pid=pid, sig=int(sig))["sent"])

    def stop_pids(self, pids: Sequence[int], grace_s: float = 2.0) -> None:
        """SIGTERM forked processes and SIGKILL the rest after `grace_s`; returns at once."""
        self.ask("stop", pids=list(pids), grace_s=grace_s)

    def guard(self, pid: int) -> None:
        """Let the parent kill another process when this kernel has ended."""
        self.ask("guard", pid=pid, create_time=psutil.Process(pid).create_time())

    def guard_dir(self, path: str | os.PathLike[str]) -> None:
        """Let the parent remove a cluster's folder and controller when this kernel has ended.

        Returns at once, also while the parent is still importing: a sent command is executed even
        if this kernel dies before it is read. So a controller that is started after this call
        always ends, even if `guard` is never called.
        """
        self.tell("guard_dir", path=os.fspath(path))

    def keep(self, folder: Path, idle_timeout_s: float = 0.0) -> None:
        """Let the engines outlive this kernel.

        The parent then ends after the last engine, or when nothing has run for `idle_timeout_s`
        (0: never) while it had no owner.
        """
        self.ask("keep", keep=True, folder=str(folder), idle_timeout_s=idle_timeout_s)
        self._kept = True

    def release(self) -> None:
        """Release a kept cluster's parent, which continues without this kernel."""
        with self._lock:
            self._stopped = self._released = True
            sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def soon(self) -> None:
        """Announce that engines will be needed soon: idle imports are postponed for 10 s.

        Returns at once, also while the parent is still importing.
        """
        self.tell("soon")

    def status(self) -> dict[str, Any]:
        """Return `children` (pid -> kind), `guarded`, `waiting` (imports) and `hazard`."""
        return self.ask("status")

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
            raise self._error(f"{_NAME} did not answer {cmd!r} within {timeout_s:g} s.") from None
        if "error" in answer:
            raise self._error(f"{_NAME} refused {cmd}: {answer['error']}")
        return answer

    def _await(self, future: Future[dict[str, Any]], timeout_s: float) -> dict[str, Any]:
        """Return an answer; if the parent is halted, stop waiting early.

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
                    f"The process that forks engines (the warm parent, pid {pid}) is suspended: it "
                    "has received SIGSTOP.",
                    next_step="%cluster restart",
                    code="WB-CLUSTER-023",
                )

    def tell(self, cmd: str, **fields: Any) -> Future[dict[str, Any]]:
        """Send one command without waiting; the answer is the future's result.

        Raises:
            ClusterError: The parent is gone.
        """
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._sock is None or self._stopped or self._failure:
                raise self._error(self._failure or f"{_NAME} is not running.")
            number = next(self._numbers)
            self._pending[number] = future
            try:
                line = json.dumps({"id": number, "cmd": cmd, **fields}).encode() + b"\n"
                self._sock.sendall(line)
            except OSError as error:
                self._pending.pop(number, None)
                raise self._error(f"{_NAME} cannot be reached ({error}).") from error
        return future

    # -- reading -------------------------------------------------------------------------------

    def _begin_to_read(self) -> None:
        self._reader = threading.Thread(target=self._read, name="workbench-warm", daemon=True)
        self._reader.start()
        self._looker = threading.Thread(target=self._look, name="workbench-warm-look", daemon=True)
        self._looker.start()

    def _look(self) -> None:
        """Report the ends of processes while the halted parent cannot."""
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
                self._failure = self._failure or f"{_NAME} has ended."
            pending, self._pending = list(self._pending.values()), {}
        for future in pending:
            future.set_result({"error": "the warm parent ended"})
        self.ready.set()
        parent = ""
        if self._process is not None and not self._stopped:
            code = self._process.wait() or 0  # None of a process that is not our child
            end = Exit(self._process.pid, code if code >= 0 else None, -code if code < 0 else None)
            parent = (
                "the process that forks engines (the warm parent; pid "
                f"{end.pid}; ended with {end.text})"
            )
        # Its children died with it (PR_SET_PDEATHSIG), and no process reports this.
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
                self._failure = f"{_NAME} cannot be used: {message['error']}."
            self.ready.set()

    def _ended(self, end: Exit) -> None:
        with self._lock:
            if end.pid in self._exits:  # already reported while the parent was halted
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
        step = "run %cluster stop, then %cluster start"
        if package := self.report.get("lacks"):
            step = f"repair {package} in the engines' Python environment, then {step}"
        elif "error" in self.report:  # it is not safe to fork
            step = f"run %env {FORK}=off (engines are then not forked), then {step[4:]}"
        return ClusterError(
            f"{what}\n{tail}".rstrip(),
            next_step=step,
            code="WB-CLUSTER-024",
        )


def _tell(callback: ExitCallback, end: Exit) -> None:
    try:
        callback(end)
    except Exception:  # an error in one listener must not stop the others
        log.exception("A callback failed after the end of process %d", end.pid)
