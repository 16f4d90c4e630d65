"""The kernel's handle on the warm parent: standard library only, safe from any thread."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from ..errors import ClusterError
from . import profile
from .door import knock
from .processes import Exit, can_fork, environment, signal_child, start_keeper
from .warm_wire import START_TIMEOUT_S, WarmWire

__all__ = ["Exit", "WarmParent", "can_fork", "start_keeper"]

STOP_TIMEOUT_S = 5.0


class WarmParent(WarmWire):
    """One warm parent process and what is asked of it.

    Args:
        framework: `torch` or `tensorflow`: what it imports.
        preload: Further modules to import when idle.
        folder: Of the cluster it belongs to, which also takes its log.
    """

    def __init__(
        self, framework: str = "torch", preload: Sequence[str] = (), folder: str = ""
    ) -> None:
        super().__init__()
        self.framework, self.folder = framework, folder
        self._preload = list(preload)
        self._kept = False

    # -- life ----------------------------------------------------------------------------------

    def start(self) -> WarmParent:
        """Start the process and return at once; a second call does nothing.

        Raises:
            ClusterError: It cannot work here (see `can_fork`).
        """
        with self._lock:
            if self._process is not None:
                return self
            possible, reason = can_fork(self.framework)
            if not possible:
                raise ClusterError("Engines cannot be forked from a warm parent.", seen=reason)
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
            take: Also when somebody else owns it, who is then told.

        Raises:
            ClusterError: It is gone, or has an owner.
        """
        me = profile.identity(os.getpid())
        try:
            self._process = psutil.Process(int(who["pid"]))
            sock, answer = knock(door, {**me, "take": take})
        except (OSError, psutil.Error) as error:
            raise ClusterError(
                "The cluster's warm parent cannot be reached.",
                seen=str(error),
                next_step="workbench ps lists the clusters there are",
            ) from error
        if "error" in answer:
            sock.close()
            owner = answer["owner"]["pid"]
            raise ClusterError(
                "The cluster belongs to another notebook.",
                seen=f"its kernel has pid {owner}",
                next_step="%cluster attach ID --take takes it from there",
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
        command = [sys.executable, "-m", "workbench.cluster.warm", "--fd", str(fd)]
        command += ["--framework", self.framework, "--log", self._log_path]
        return [*command, "--preload", *self._preload] if self._preload else command

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until engines can be forked.

        Raises:
            ClusterError: That failed, or took longer than `timeout_s`.
        """
        self.start()
        if not self.ready.wait(timeout_s):
            raise self._error(f"The warm parent was not ready within {timeout_s:g} s.")
        if self._failure:
            raise self._error(self._failure)

    @property
    def alive(self) -> bool:
        """Whether the process runs and listens to us."""
        return self._process is not None and not self._stopped and not self._failure

    @property
    def pid(self) -> int | None:
        """Its process id, or None before `start`."""
        return None if self._process is None else self._process.pid

    def stop(self) -> None:
        """End the process; it kills its children and all it guards, removes guarded folders."""
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
    ) -> int:
        """Fork an ipyparallel engine and return its process id.

        Args:
            argv: Arguments of `ipengine`.
            env: The whole environment; nothing of the parent's is added.
            cwd: Working directory.
            sys_path: The whole module search path.
            log_path: File that stdout and stderr are appended to.
            name: Shown by `ps` and `top` (15 characters).

        Raises:
            ClusterError: The warm parent is gone or could not fork.
        """
        answer = self.ask(
            "fork_engine", argv=list(argv), env=dict(env), cwd=cwd, sys_path=list(sys_path),
            log_path=log_path, name=name,
        )  # fmt: skip
        return int(answer["pid"])

    def fork_keeper(self, log_path: str = os.devnull) -> tuple[int, str, int]:
        """Fork the process that hosts the TCPStore; return its pid, host and port."""
        answer = self.ask("fork_keeper", log_path=log_path)
        return int(answer["pid"]), str(answer["host"]), int(answer["port"])

    def signal(self, pid: int, sig: int) -> bool:
        """Signal a process that was forked here; False when it is gone already.

        Directly where that is safe: the parent may be in the middle of an import that takes
        seconds. Else it is asked to.
        """
        parent_pid = self.pid
        if parent_pid is not None and self.has(pid) and signal_child(parent_pid, pid, sig):
            return True
        return bool(self.ask("signal", pid=pid, sig=int(sig))["sent"])

    def stop_pids(self, pids: Sequence[int], grace_s: float = 2.0) -> None:
        """SIGTERM forked processes and SIGKILL what is left after `grace_s`; returns at once."""
        self.ask("stop", pids=list(pids), grace_s=grace_s)

    def guard(self, pid: int) -> None:
        """Have a process that somebody else started killed when this kernel is gone."""
        self.ask("guard", pid=pid, create_time=psutil.Process(pid).create_time())

    def guard_dir(self, path: str | os.PathLike[str]) -> None:
        """Have a cluster's folder removed when this kernel is gone, and its controller ended.

        Returns at once, also while the parent is still importing: what has been sent is heeded even
        when this kernel dies before it is read. So a controller that is started after this call is
        never left behind, whether `guard` is reached or not.
        """
        self.tell("guard_dir", path=os.fspath(path))

    def keep(self, folder: Path, idle_timeout_s: float = 0.0) -> None:
        """Let the engines outlive this kernel.

        The parent then ends after the last engine, or when nothing has run for `idle_timeout_s`
        (0: never) while nobody owned it.
        """
        self.ask("keep", keep=True, folder=str(folder), idle_timeout_s=idle_timeout_s)
        self._kept = True

    def release(self) -> None:
        """Let go of a kept cluster's parent, which goes on without us."""
        with self._lock:
            self._stopped = self._released = True
            sock = self._sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def soon(self) -> None:
        """Say that engines will be wanted in a moment: idle imports are put off for 10 s.

        Returns at once, also while the parent is still importing.
        """
        self.tell("soon")

    def status(self) -> dict[str, Any]:
        """Return `children` (pid -> kind), `guarded`, `waiting` (imports) and `hazard`."""
        return self.ask("status")
