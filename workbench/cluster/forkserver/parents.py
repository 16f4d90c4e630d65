"""The warm parents of one cluster: one for each framework of its engines.

The default framework's parent is started in advance. The first run of the other framework starts a
second parent in addition, with the same guards: no process outlives the kernel, even if only one
parent remains.

The store through which workers find each other, a TCPStore, has its own process.
"""

from __future__ import annotations

import contextlib
import os
import signal as signals
import subprocess
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from ...errors import ClusterError
from .. import processes
from ..processes import ExitCallback, can_fork, is_halted, start_keeper
from . import keeper
from .client import WarmParent


class Parents:
    """Starts warm parents, and finds the parent of a forked process.

    Args:
        launcher: The cluster's launcher; only `local` engines are forked.
        on_exit: Called with the `Exit` of each child of any parent.
        home: The cluster's folder.

    Attributes:
        on_taken: Called with the pid of a kernel that took the kept cluster over.
    """

    def __init__(self, launcher: str, on_exit: ExitCallback, home: Path | None = None) -> None:
        self._launcher, self._on_exit, self._home = launcher, on_exit, home
        self._keep: float | None = None  # the idle timeout of a kept cluster
        self.on_taken: Callable[[int], None] = lambda pid: None
        self._parents: dict[str, WarmParent] = {}
        self._folder: Path | None = None
        self._controller: int | None = None
        self._guarding: set[str] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def why_not(self, framework: str) -> str:
        """Return why engines with this framework cannot be forked; empty when they can."""
        if self._launcher != "local":
            return f"--launcher {self._launcher} was given"
        return can_fork(framework)[1]

    def find(self, framework: str) -> WarmParent | None:
        """Return the framework's parent, None if it was not started."""
        return self._parents.get(framework)

    def start(self, framework: str) -> WarmParent:
        """Begin to import the framework in a parent, if no parent has; returns at once.

        Raises:
            ClusterError: It cannot work here (see `why_not`), or the cluster was stopped.
        """
        with self._lock:
            if self._stopped:
                raise ClusterError(
                    "The cluster was stopped.", next_step="%cluster start", code="WB-CLUSTER-013"
                )
            parent = self._parents.get(framework)
            if parent is None or not parent.alive:
                if parent is not None:  # it ended, or could not import; so did its engines
                    parent.stop()
                parent = WarmParent(framework=framework, folder=str(self._home or ""))
                self._hear(parent)
                parent.start()
                self._parents[framework] = parent
                self._guarding.discard(framework)
            return parent

    def ready(self, framework: str) -> WarmParent:
        """Return the framework's parent when it can fork.

        It then has the same guards as the others.

        Raises:
            ClusterError: It did not come up.
        """
        parent = self.start(framework)
        if not parent.ready.is_set():
            parent.soon()
        parent.wait_ready()
        self._guard(framework, parent)
        return parent

    def guard_dir(self, folder: Path) -> None:
        """Remove the cluster's folder, and end its controller, when the kernel has ended."""
        with self._lock:
            self._folder = folder
            parents = list(self._parents.values())
        for parent in parents:
            parent.guard_dir(folder)

    def guard(self, pid: int) -> None:
        """End the controller when the kernel has ended."""
        with self._lock:
            self._controller = pid
            parents = dict(self._parents)
        for framework, parent in parents.items():
            self._guard(framework, parent)

    def _guard(self, framework: str, parent: WarmParent) -> None:
        with self._lock:
            if self._controller is None or self._folder is None or framework in self._guarding:
                return
            self._guarding.add(framework)
            pid, folder = self._controller, self._folder
        parent.guard_dir(folder)
        parent.guard(pid)
        if self._keep is not None:
            parent.keep(folder, self._keep)

    def _hear(self, parent: WarmParent) -> None:
        parent.on_exit(self._on_exit)
        parent.on_taken = lambda pid: self.on_taken(pid)

    # -- kept clusters -----------------------------------------------------------------------------

    def keep(self, folder: Path, idle_timeout_s: float) -> None:
        """Let the engines outlive this kernel, including engines of later parents."""
        with self._lock:
            self._keep = idle_timeout_s
            # The others are told when they are ready.
            parents = [self._parents[name] for name in self._guarding]
        for parent in parents:
            parent.keep(folder, idle_timeout_s)

    def adopt(
        self,
        framework: str,
        who: Mapping[str, Any],
        folder: Path,
        idle_timeout_s: float,
        take: bool,
    ) -> None:
        """Become the owner of a kept cluster's parent.

        Raises:
            ClusterError: It has ended, or has an owner and `take` is false.
        """
        parent = WarmParent(framework=framework, folder=str(folder))
        self._hear(parent)
        parent.adopt(who, folder / f"warm-{framework}", take=take)
        self._folder, self._keep = folder, idle_timeout_s
        self._guarding.add(framework)
        self._parents[framework] = parent

    def release(self) -> None:
        """Release all of them; they continue without this kernel."""
        with self._lock:
            self._stopped = True
            parents = list(self._parents.values())
        for parent in parents:
            parent.release()

    @property
    def living(self) -> dict[str, int]:
        """Pid of each parent that runs, by framework."""
        found = dict(self._parents)
        return {name: one.pid for name, one in found.items() if one.alive and one.pid}

    def signal(self, pid: int, sig: int) -> None:
        """Signal a process through the parent that forked it.

        Does nothing if the process has ended.
        """
        with self._lock:
            owners = [parent for parent in self._parents.values() if parent.has(pid)]
        for parent in owners:
            with contextlib.suppress(ClusterError):
                parent.signal(pid, sig)

    def stop(self) -> None:
        """End all parents, with their children and guarded processes; safe to call twice."""
        with self._lock:
            self._stopped = True
            parents = list(self._parents.values())
        for parent in parents:
            parent.stop()


END_S = 10.0
"""How long a killed keeper may take to end."""


class Store:
    """The keeper of one cluster's store, started when the first process group needs it.

    Args:
        folder: The cluster's.
        on_exit: Called with the keeper's end, if no warm parent reports it.
        elsewhere: Starts it on another host: returns pid, address and port there.

    Attributes:
        host, ports: Where the next keeper listens, as in `cluster_env.listening`.
        pid: Its process; 0 while there is none.
        process: The process object, if it was not forked from a warm parent.
    """

    def __init__(
        self,
        parents: Parents,
        folder: Path,
        on_exit: ExitCallback,
        elsewhere: Callable[[], tuple[int, str, int]] | None = None,
    ) -> None:
        self._parents, self._folder, self._on_exit = parents, folder, on_exit
        self._elsewhere = elsewhere
        self._address: tuple[str, int] | None = None
        self._lock = threading.Lock()
        self._gone = threading.Event()
        self.host = keeper.LOOPBACK
        self.ports: tuple[int, int] | None = None
        self.pid = 0
        self.process: subprocess.Popen[bytes] | None = None

    def address(self) -> tuple[str, int]:
        """Return its host and port; a keeper is started if there is none, or if it is halted."""
        with self._lock:
            if self.pid and self._elsewhere is None and is_halted(self.pid):
                with contextlib.suppress(OSError):
                    os.kill(self.pid, signals.SIGKILL)
                self._gone.wait(END_S)
            if self._address is None:
                self._address = self._start()
            return self._address

    def _start(self) -> tuple[str, int]:
        self._gone = threading.Event()
        if self._elsewhere is not None:
            self.pid, host, port = self._elsewhere()
            return host, port
        # The store is torch's: a parent that has imported it hosts one at once.
        warm = self._parents.find("torch")
        if warm is not None:
            log = str(self._folder / "log" / "keeper.log")
            self.pid, host, port = warm.fork_keeper(log, self.host, self.ports)
        else:
            self.process, host, port = start_keeper(str(self._folder), self.host, self.ports)
            self.pid = self.process.pid
            processes.watch(self.pid, self._on_exit)
        return host, port

    def left(self) -> None:
        """Note that its process ended: the next run gets a new one."""
        self._address, self.pid = None, 0
        self._gone.set()

    def end(self) -> None:
        """End the keeper and wait until it has ended: process groups are counted from 0 again.

        Raises:
            ClusterError: It does not end.
        """
        with self._lock:
            pid, gone = self.pid, self._gone
        if not pid or self._elsewhere is not None:
            return
        self._parents.signal(pid, signals.SIGKILL)
        self.stop()
        if not gone.wait(END_S):
            raise ClusterError(
                "Workbench could not end the rendezvous store (the process through which workers "
                "find each other).",
                seen=f"pid {pid}, for {END_S:g} s",
                next_step="run %cluster stop, then %cluster start",
                code="WB-CLUSTER-019",
            )

    def about(self) -> dict[str, Any]:
        """Return its description for another kernel, for `recall`."""
        with self._lock:
            return {"store": self._address, "store_pid": self.pid}

    def recall(self, about: Mapping[str, Any]) -> None:
        """Continue with the keeper that another kernel started, if it lives."""
        if about["store"] is not None and psutil.pid_exists(int(about["store_pid"])):
            host, port = about["store"]
            self._address, self.pid = (str(host), int(port)), int(about["store_pid"])

    def stop(self) -> None:
        """End the keeper, if no warm parent does."""
        if self.process is not None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            self.process.wait(timeout=5)
            self.process = None
