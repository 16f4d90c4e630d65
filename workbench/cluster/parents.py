"""The warm parents of one cluster: one for each framework that engines were asked to have.

The default framework's is started ahead of need. A second one is started when the first run of the
other framework asks for it, beside the first and under the same guards: nothing outlives the
kernel, whichever parent is left.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ..errors import ClusterError
from .processes import ExitCallback
from .warm_client import WarmParent, can_fork


class Parents:
    """Starts warm parents and finds the one that a process was forked from.

    Args:
        launcher: The cluster's launcher; only `local` engines are forked.
        on_exit: Called with the `Exit` of each child, whichever parent's.
        home: The cluster's folder.

    Attributes:
        on_taken: Called with the pid of a kernel that took the kept cluster over from us.
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
            return f"launcher {self._launcher} was named"
        return can_fork(framework)[1]

    def find(self, framework: str) -> WarmParent | None:
        """Return the framework's parent, None where it was not started."""
        return self._parents.get(framework)

    def start(self, framework: str) -> WarmParent:
        """Begin to import the framework in a parent, if none has; returns at once.

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
        """Return the framework's parent when it can fork; it then guards what the others do.

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
        """Have the cluster's folder gone when the kernel is, with a controller that uses it."""
        with self._lock:
            self._folder = folder
            parents = list(self._parents.values())
        for parent in parents:
            parent.guard_dir(folder)

    def guard(self, pid: int) -> None:
        """Have the controller gone when the kernel is."""
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
        """Let the engines outlive this kernel, those of parents to come too."""
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
            ClusterError: It is gone, or has an owner and `take` is false.
        """
        parent = WarmParent(framework=framework, folder=str(folder))
        self._hear(parent)
        parent.adopt(who, folder / f"warm-{framework}", take=take)
        self._folder, self._keep = folder, idle_timeout_s
        self._guarding.add(framework)
        self._parents[framework] = parent

    def release(self) -> None:
        """Let go of all of them; they go on without us."""
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
        """Signal a process through the parent that forked it; does nothing when it is gone."""
        with self._lock:
            owners = [parent for parent in self._parents.values() if parent.has(pid)]
        for parent in owners:
            with contextlib.suppress(ClusterError):
                parent.signal(pid, sig)

    def stop(self) -> None:
        """End all of them, with their children and what they guard; safe to call twice."""
        with self._lock:
            self._stopped = True
            parents = list(self._parents.values())
        for parent in parents:
            parent.stop()
