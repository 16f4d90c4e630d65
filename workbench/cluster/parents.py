"""The warm parents of one cluster: one for each framework that engines were asked to have.

The default framework's is started ahead of need. A second one is started when the first run of the
other framework asks for it, beside the first and under the same guards: nothing outlives the
kernel, whichever parent is left.
"""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

from ..errors import ClusterError
from .processes import ExitCallback
from .warm_client import WarmParent, can_fork


class Parents:
    """Starts warm parents and finds the one that a process was forked from.

    Args:
        launcher: The cluster's launcher; only `local` engines are forked.
        on_exit: Called with the `Exit` of each child, whichever parent's.
    """

    def __init__(self, launcher: str, on_exit: ExitCallback) -> None:
        self._launcher, self._on_exit = launcher, on_exit
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
                raise ClusterError("The cluster was stopped.", next_step="%cluster start")
            parent = self._parents.get(framework)
            if parent is None or not parent.alive:
                if parent is not None:  # it ended, or could not import; so did its engines
                    parent.stop()
                parent = WarmParent(framework=framework)
                parent.on_exit(self._on_exit)
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
