"""Run: what is picked goes into the cluster's queue, which `wb.queue` and magics use as well."""

from __future__ import annotations

from ..session.queue import Queue
from .cluster import ClusterPart
from .part import Part, Wire, action


class QueuePart(Part):
    """The plans in a row, how far they are and how long they will take yet."""

    name = "queue"

    def wire(self) -> Wire:
        """The queue of the notebook's cluster; empty where there is none."""
        cluster = self.panel.session.cluster
        if cluster is None:
            return {"items": [], "busy": False, "progress": 1.0, "remaining_s": None,
                    "rough": False, "keep_going": False, "cell": False}  # fmt: skip
        queue = cluster.queue()
        wire = queue.to_wire()
        return {**wire, "cell": cluster.is_busy and not wire["busy"]}

    @action(slow=True)
    def run(self) -> None:
        """Put the picked strategies with their seeds at the end of the queue."""
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
        """End the present run and let none of the others begin."""
        self._queue().stop_all()

    @action()
    def remove(self, number: int) -> None:
        """Take out a plan that waits."""
        self._queue().remove(int(number))

    @action()
    def move(self, number: int, to: int) -> None:
        """Have a plan that waits begin as the `to`-th of those that wait, from 0."""
        self._queue().move(int(number), int(to))

    @action()
    def clear(self) -> None:
        """Take out all plans that wait."""
        self._queue().clear()

    @action()
    def keep_going(self, on: bool) -> None:
        """Whether the next plan begins after one has failed."""
        self._queue().keep_going = bool(on)

    def _queue(self) -> Queue:
        return self.panel.session.need_cluster().queue()
