"""The cluster's row: how many engines, start, restart, stop, and a line per engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..session.status import rows
from .part import Part, Wire, action

if TYPE_CHECKING:
    from .model import Panel


class ClusterPart(Part):
    """The cluster of the notebook."""

    name = "cluster"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._progress = ""

    def wire(self) -> Wire:
        """Its engines, and how far starting has come."""
        cluster = self.panel.session.cluster
        engines = [] if cluster is None else rows(cluster)
        return {
            "running": cluster is not None,
            "progress": self._progress,
            "lost": self.panel.session.lost,
            "engines": engines,
        }

    @action(slow=True)
    def start(self, count: int, devices: str = "auto") -> None:
        """Start engines, or add some."""
        try:
            self.panel.session.start(int(count), devices=devices, progress=self._tell)
        finally:
            self._progress = ""

    def _tell(self, text: object) -> None:
        self._progress = str(text)
        self.panel.changed.set()

    @action(slow=True)
    def restart(self, engine: int | None = None) -> None:
        """Replace one engine, or all, by fresh ones."""
        self.panel.session.need_cluster().restart(None if engine is None else [int(engine)])

    @action(slow=True)
    def stop(self) -> None:
        """End the cluster."""
        self.panel.session.stop()
