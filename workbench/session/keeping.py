"""The record in a cluster's folder: its state, how long it can be idle, and its owner.

`cluster.json` is written again at each change. `task.jsonl` gets one line for each cell and run.
`cluster/folders.py` reads both.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ..cluster import folders
from ..devices import limits
from ..errors import PlanError
from ..shared.cluster_env import Page

if TYPE_CHECKING:
    from .access import ClusterAccess

log = logging.getLogger("workbench.session")
KEPT_IDLE_S = 24 * 3600.0
"""After how long a kept cluster that was forgotten ends itself, unless the user says otherwise."""
LOOKS = 20  # per idle timeout
NOTEBOOK = "JPY_SESSION_NAME"  # which Jupyter sets to the notebook's path


class Keeping:
    """The bookkeeping of one cluster.

    Args:
        keep: Whether it outlives this kernel.
        idle_timeout: `30m`, `never`, or seconds; by default a day for a kept cluster.

    Attributes:
        task: The cell or run that has started on the engines and is not settled yet.
        on_end: Called with the reason when the cluster ended by itself or another notebook took it
            over.

    Raises:
        PlanError: The idle timeout is not valid.
    """

    def __init__(
        self, cluster: ClusterAccess, keep: bool, idle_timeout: str | float | None
    ) -> None:
        self._cluster, self.kept = cluster, keep
        self.idle_timeout_s = _idle_s(idle_timeout, keep)
        self.since = time.time()
        self.task: dict[str, Any] | None = None
        self.on_end: Callable[[str], None] = lambda reason: None
        self._last_work = time.monotonic()
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._noted: dict[str, Any] | None = {}  # what it says; nothing yet
        self._unwritten = ""  # what was said of a folder that cannot be written to
        self._described: object = None  # what cluster.json says that no engine's change tells
        engines = cluster.engine_set
        if keep and not engines.kept:
            engines.keep(self.idle_timeout_s if math.isfinite(self.idle_timeout_s) else 0.0)

    @property
    def id(self) -> str:
        """The id of the cluster for `%cluster attach` and `workbench stop`."""
        return folders.cluster_id(self._cluster.engine_set.folder())

    def begin(self) -> None:
        """Start to describe the engines in the folder and to check whether they are used."""
        engines = self._cluster.engine_set
        engines.on_change = self.write
        engines.when_taken(self._taken)
        self.write()
        if math.isfinite(self.idle_timeout_s):
            threading.Thread(target=self._watch, name="workbench-idle", daemon=True).start()

    def end(self) -> None:
        """Note that the cluster is stopped or released."""
        self._over.set()
        with self._lock:
            if self._page is not None:
                self._page.close()

    def touch(self) -> None:
        """Note that the cluster is in use."""
        self._last_work = time.monotonic()

    def begun(self, task: Mapping[str, Any] | None) -> None:
        """Record the task that the engines will run; None: the task is settled."""
        self.task = None if task is None else dict(task)
        self.touch()
        self._write(whole=False)

    def write(self) -> None:
        """Describe the cluster in its folder; an error here must not make a cell fail."""
        self._write(whole=True)

    def _write(self, *, whole: bool) -> None:
        with self._lock:
            if self._over.is_set():
                return
            try:
                folder, changing = self._cluster.engine_set.folder(), self._changing()
                if self._page is not None and self._page.path.parent != folder:
                    # The controller had died, so the cluster now has another folder.
                    self._page.close()
                    self._page, self._noted, whole = None, {}, True
                if whole or changing != self._described:
                    folders.write(folder, self.about())
                    self._described, self._unwritten = changing, ""
                if self._noted != self.task:
                    if self._page is None:
                        self._page = Page(folder / folders.TASK)
                    self._page.write(self.task)
                    self._noted = self.task
            except OSError as error:
                self._tell_unwritten(error)
            except Exception:
                log.warning("The cluster's folder could not be updated", exc_info=True)

    def _tell_unwritten(self, error: OSError) -> None:
        """Report once, not with each cell, why the folder cannot be written to."""
        why = error.strerror or str(error)
        if why != self._unwritten:
            self._unwritten = why
            log.warning(
                "The cluster's folder cannot be written: %s (%s). Cells and runs continue. But it "
                "is possible that `workbench ps` and `%%cluster attach` do not find this cluster "
                "or its runs. If the disk of the cluster's folder is full, delete some files on "
                "this disk.",
                why,
                self._cluster.engine_set.folder(),
            )

    def _changing(self) -> object:
        """Return the facts that can change between cells without a message."""
        cluster, pool = self._cluster, self._cluster.pool
        servers, leases = sorted(pool.servers), list(pool.devices.settled)
        held = list(pool.devices.reservations.files)
        return cluster.framework, os.getcwd(), servers, leases, held, list(cluster.hearing.folders)

    def about(self) -> dict[str, Any]:
        """Return the content of the cluster's record: processes, owner, runs."""
        cluster, pool = self._cluster, self._cluster.pool
        return {
            **cluster.engine_set.about(),
            "kept": self.kept,
            "idle_timeout_s": self.idle_timeout_s if math.isfinite(self.idle_timeout_s) else 0.0,
            "since": self.since,
            "owner": folders.identity(os.getpid()),
            "notebook": os.environ.get(NOTEBOOK, ""),
            "cwd": os.getcwd(),
            "devices": cluster.devices_asked,
            "servers": sorted(pool.servers),
            "leases": {str(n): asdict(one) for n, one in pool.devices.settled.items()},
            "reserved": {gpu: str(f) for gpu, f in pool.devices.reservations.files.items()},
            "runs": [[n, str(folder)] for n, folder in list(cluster.hearing.folders.items())],
        }

    # -- doing nothing -----------------------------------------------------------------------------

    def _watch(self) -> None:
        look_s = min(10.0, max(0.05, self.idle_timeout_s / LOOKS))
        while not self._over.wait(look_s):
            if self._cluster.is_busy:
                self.touch()
            if time.monotonic() - self._last_work > self.idle_timeout_s:
                self._cluster.stop()
                self.on_end(
                    f"the cluster was idle for {idle_words(self.idle_timeout_s)} (--idle-timeout)"
                )
                return

    # -- another owner -----------------------------------------------------------------------------

    def _taken(self, pid: int) -> None:
        """Note that another kernel has taken the cluster; called on the warm parent's thread."""
        reason = f"another notebook took over the cluster (the other kernel has pid {pid})"
        threading.Thread(target=self._lose, args=(reason,), name="workbench-taken").start()

    def _lose(self, reason: str) -> None:
        self._cluster.release(f"This notebook no longer has the cluster: {reason}.")
        self.on_end(reason)


def _idle_s(asked: str | float | None, keep: bool) -> float:
    """Return the idle timeout that applies; an administrator's limit can shorten it."""
    given = KEPT_IDLE_S if keep else math.inf
    if asked is not None:
        try:
            given = limits.duration_s(asked)
        except (ValueError, TypeError):
            raise PlanError(
                "The value of idle_timeout is not a valid time.",
                seen=asked,
                allowed='a time: "45m", "2h", "90s", or "never"',
                code="WB-PLAN-108",
            ) from None
    return limits.load().idle_timeout(given)


def idle_words(seconds: float) -> str:
    """Return a time in words: `45 s`, `12 min`, `3.5 h`, `2 d`."""
    for size_s, unit in ((86400.0, "d"), (3600.0, "h"), (60.0, "min")):
        if seconds >= size_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds:.3g} s"
