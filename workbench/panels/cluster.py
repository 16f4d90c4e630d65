"""The cluster's row: the number of engines, start, restart, stop, and one line per engine.

Below the row is the queue. Run adds the selected strategies to it; `wb.queue` and magics use the
same queue.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..cluster.hosts.configuration import installed
from ..cluster.hosts.settings import LOCAL, MPI, SLURM, SSH
from ..devices import limits
from ..errors import ClusterError
from ..execution.run import Run
from .choice import MOST
from .model import Part, Wire, action

if TYPE_CHECKING:
    from ..cluster.progress import Progress
    from ..cluster.vitals import EngineVitals
    from ..session.cluster import Cluster
    from ..session.queue import Queue
    from .model import Panel

LOG_LINES = 200
FIELDS: dict[str, tuple[str, ...]] = {
    LOCAL: (), SSH: ("on",), SLURM: ("nodes", "partition", "time"), MPI: ()
}  # fmt: skip
"""The fields of the row per launcher; the magic's line and the launchers' file have more settings.
"""


class ClusterPart(Part):
    """The cluster of the notebook, started from the panel or elsewhere."""

    name = "cluster"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._progress: Progress | None = None
        self._watching = threading.Lock()
        self._watched: Cluster | None = None
        self._undo: Callable[[], None] = lambda: None
        self._engines: list[Wire] = []
        self._where: dict[str, str] = {"launcher": LOCAL}
        self._launchers = [{"name": name, "fields": list(FIELDS[name])} for name in installed()]
        self._starter = 0  # the thread that starts engines for the panel
        self._cancelled = False
        self._noted: set[str] = set()  # what the user was told, once

    def wire(self) -> Wire:
        """Its engines, and the progress of a start."""
        session = self.panel.session
        self._watch(session.cluster)
        cluster, progress = session.cluster, self._progress
        return {
            "running": cluster is not None,
            "count": 0 if cluster is None else len(cluster.worker_ids),
            "asked": self.panel.choice.engines,
            "at_work": self._at_work(),
            "devices": "auto" if cluster is None else cluster.devices_asked,
            "framework": None if cluster is None else cluster.framework,
            "kept": cluster is not None and cluster.keeping.kept,
            "progress": None if progress is None else progress.to_wire(),
            "launchers": self._launchers,
            "where": self._where if cluster is None else _where(cluster),
            "lost": session.lost,
            "engines": self._engines,
        }

    def _at_work(self) -> str:
        """Return the work that would be lost if the engines ended now; empty: none."""
        cluster = self.panel.session.cluster
        if cluster is None or not cluster.is_busy:
            return ""
        busy = cluster.busy
        what = (
            f"run {busy.name}" if isinstance(busy, Run) and not busy.is_over else "a running cell"
        )
        waiting = sum(item.state == "waiting" for item in cluster.queue().items)
        queued = f"{waiting} run{'s' if waiting > 1 else ''} in the queue"
        return f"{what} and {queued}" if waiting else what

    def close(self) -> None:
        """Stop sampling, because no panel is shown."""
        self._watch(None)

    def _watch(self, cluster: Cluster | None) -> None:
        with self._watching:  # the last panel can close while the next one opens
            if cluster is self._watched:
                return
            self._undo()
            self._watched, self._engines = cluster, []
            self._undo = lambda: None
            if cluster is not None:
                self._undo = cluster.vitals.watch(self._seen)

    def _seen(self, vitals: Sequence[EngineVitals]) -> None:
        self._engines = [one.to_wire() for one in vitals]
        self.panel.changed.set()

    # -- what is done ------------------------------------------------------------------------------

    @action()
    def asked(self, count: object = None) -> None:
        """Store the number in the Engines field; Run starts so many engines."""
        typed = str(count)
        if typed.isdecimal() and 1 <= int(typed) <= MOST["workers"]:
            self.panel.choice.engines = int(typed)

    @action(slow=True)
    def start(self, count: int, devices: str = "auto") -> None:
        """Start engines, or add engines until there are `count`."""
        self.bring(int(count), devices.strip() or "auto")

    @action()
    def where(
        self,
        launcher: str = LOCAL,
        on: str = "",
        nodes: str = "",
        partition: str = "",
        time: str = "",
    ) -> None:
        """Store the place for new engines; Start and Run use it."""
        typed = {"on": on, "nodes": nodes, "partition": partition, "time": time}
        said = {name: text.strip() for name, text in typed.items() if text.strip()}
        self._where = {"launcher": launcher, **said}

    @action()
    def cancel(self) -> None:
        """Cancel a running start, as Interrupt does for a start in a cell."""
        self._cancelled = True

    def bring(self, count: int, devices: str = "auto") -> None:
        """Start engines, and report the progress."""
        session, where, settings = self.panel.session, self._where, {}
        if session.cluster is None and where["launcher"] != LOCAL:
            takes = ("launcher", *FIELDS.get(where["launcher"], ()))
            settings = {name: where[name] for name in takes if name in where}
        self._starter, self._cancelled = threading.get_ident(), False
        try:
            with limits.telling(self._note):
                session.start(count, devices=devices, progress=self._tell, **settings)
        except KeyboardInterrupt:
            raise ClusterError(
                "The start was cancelled.",
                next_step="press Start to try again",
                code="WB-CLUSTER-075",
            ) from None
        finally:
            self._progress, self._starter = None, 0

    def _note(self, words: str) -> None:
        if words not in self._noted:
            self._noted.add(words)
            self.panel.say(self.name, words)

    def _tell(self, progress: Progress) -> None:
        self._progress = progress
        self.panel.changed.set()
        if self._cancelled and threading.get_ident() == self._starter:
            raise KeyboardInterrupt

    @action(slow=True)
    def restart(self, engine: int | None = None) -> None:
        """Replace one engine, or all engines, by new engines with the same ids."""
        self.panel.session.need_cluster().restart(None if engine is None else [int(engine)])

    @action(slow=True)
    def stop(self) -> None:
        """End the cluster and its work."""
        self.panel.session.stop()

    @action(slow=True)
    def log(self, engine: int) -> Any:
        """The last lines of an engine's log."""
        text = self.panel.session.need_cluster().logs(int(engine))
        return "\n".join(text.splitlines()[-LOG_LINES:])


def _where(cluster: Cluster) -> Wire:
    """Return the place of a cluster's engines, in the form of the row's fields."""
    launch = cluster.launch
    hosts = (f"{one.name}:{one.slots}" if one.slots else one.name for one in launch.on)
    nodes = str(launch.nodes or "")
    return {"launcher": launch.launcher, "on": ",".join(hosts), "nodes": nodes,
            "partition": launch.partition, "time": launch.time}  # fmt: skip


class QueuePart(Part):
    """The queued plans, their progress and their remaining time."""

    name = "queue"

    def wire(self) -> Wire:
        """The queue of the notebook's cluster; empty if there is no cluster."""
        cluster = self.panel.session.cluster
        if cluster is None:
            return {"items": [], "busy": False, "progress": 1.0, "remaining_s": None,
                    "rough": False, "keep_going": False, "cell": False}  # fmt: skip
        queue = cluster.queue()
        wire = queue.to_wire()
        return {**wire, "cell": cluster.is_busy and not wire["busy"]}

    @action(slow=True)
    def run(self) -> None:
        """Add the selected strategies with their seeds at the end of the queue."""
        session, choice = self.panel.session, self.panel.choice
        choice.check(choice.framework_in(session))
        if session.cluster is None or not session.cluster.worker_ids:
            part = self.panel.parts["cluster"]
            assert isinstance(part, ClusterPart)
            part.bring(max(choice.workers or 1, choice.engines))
        cluster = session.need_cluster()
        cluster.queue(choice.plans(session))

    @action()
    def stop_all(self) -> None:
        """End the current run and drop the waiting plans."""
        self._queue().stop_all()

    @action()
    def remove(self, number: int) -> None:
        """Remove a waiting plan."""
        self._queue().remove(int(number))

    @action()
    def move(self, number: int, to: int) -> None:
        """Move a waiting plan to place `to` among the waiting plans, counted from 0."""
        self._queue().move(int(number), int(to))

    @action()
    def clear(self) -> None:
        """Remove all waiting plans."""
        self._queue().clear()

    @action()
    def keep_going(self, on: bool) -> None:
        """Whether the next plan begins after a plan has failed."""
        self._queue().keep_going = bool(on)

    def _queue(self) -> Queue:
        return self.panel.session.need_cluster().queue()
