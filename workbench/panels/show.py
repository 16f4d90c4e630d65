"""`wb.panel()` and `%panel`: the panel of this notebook, shown.

This module lists the parts in the order in which they are created. A `Pump` sends them and the
run's frames to the widgets, at most 5 times a second.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import PlanError
from ..notebook.session import session
from ..views.blocks import Publish, in_notebook, notebook_publisher
from ..views.comparison.exports import kept_bundle
from ..views.panel import PanelWidget
from ..views.places import WidgetBundle
from .cluster import ClusterPart, QueuePart
from .comparison import ComparisonPart
from .live import FaultsPart, LivePart, TeachingPart
from .model import Panel, Part
from .recipe import RecipePart
from .scaling import ScalingPart
from .strategies import StrategiesPart

if TYPE_CHECKING:
    from ..execution.run import Run
    from ..history.snapshot import Snapshot


class PanelView:
    """One display of the notebook's panel.

    Attributes:
        panel: The model that all displays share.
        widget: The widget in the browser.
    """

    def __init__(self, panel: Panel, pump: Pump) -> None:
        self.panel, self._pump = panel, pump
        self.widget = PanelWidget(panel.do, self._opened, self._left)
        self._publish: Publish | None = None
        self._kept: dict[str, str] = {}
        pump.add(self.widget)

    def _opened(self) -> None:
        """A browser shows it (again)."""
        self._pump.add(self.widget)
        if self._publish is not None and self._keep not in self.panel.keepers:
            self.panel.keepers.append(self._keep)

    def _left(self) -> None:
        """No browser shows it any more: its cell was run again or its output was cleared."""
        self._pump.remove(self.widget)
        with contextlib.suppress(ValueError):
            self.panel.keepers.remove(self._keep)

    def close(self) -> None:
        """Close the widget; runs, the cluster and saved pictures stay."""
        self._left()
        self.widget.close()

    def _keep(self, name: str, thing: Any) -> None:
        """Show the saved pictures, folded below the panel, for readers without a kernel."""
        if self._publish is None:
            return
        known = name in self._kept
        display_id = self._kept.setdefault(name, f"workbench-kept-{uuid.uuid4().hex}")
        self._publish(kept_bundle(thing.comparison), display_id, known)

    def _ipython_display_(self) -> None:
        self._publish = notebook_publisher()
        self._publish(self._repr_mimebundle_(), f"workbench-panel-{uuid.uuid4().hex}", False)
        self._opened()

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        found = WidgetBundle(self.widget)
        found["text/plain"] = (
            "The Workbench panel is not shown here. Run wb.panel() in a notebook to open the panel."
        )
        return found

    def __repr__(self) -> str:
        return "<The panel of Workbench>"


_pump: Pump | None = None


def shared() -> Pump:
    """Return the model that all panels of this notebook share."""
    global _pump
    if _pump is None:
        model = Panel(session, PARTS)
        live = model.parts["live"]
        assert isinstance(live, LivePart)
        _pump = Pump(model, live.run)
    return _pump


def panel() -> PanelView:
    """Return the Workbench panel for display in the notebook.

    All panels of a notebook show the same cluster, the same settings and the same runs as the
    magics.

    Raises:
        PlanError: This is not a notebook.
    """
    if not in_notebook():
        raise PlanError(
            "The panel needs a notebook.",
            seen="no Jupyter kernel",
            next_step="open a notebook in JupyterLab; in a script, call "
            "wb.Cluster(...).run(...) and wb.compare(...)",
            code="WB-PLAN-076",
        )
    pump = shared()
    return PanelView(pump.panel, pump)


PARTS: tuple[type[Part], ...] = (
    ClusterPart,
    RecipePart,
    StrategiesPart,
    QueuePart,
    LivePart,
    FaultsPart,
    ComparisonPart,
    ScalingPart,
    TeachingPart,
)


log = logging.getLogger("workbench.panels")

PERIOD_S = 0.2
SOONEST_S = 0.03
"""Delay until widgets are drawn after a click."""
IDLE_S = 1.0
"""Period of updates if no run is active and the user has not clicked."""


class Pump:
    """One thread for all widgets of a panel; it ends after the last widget is closed."""

    def __init__(self, panel: Panel, run_on_show: Callable[[], Run | None]) -> None:
        self.panel, self._run_on_show = panel, run_on_show
        self._widgets: list[PanelWidget] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._drawn: tuple[tuple[Run, int, bool], Snapshot] | None = None
        self.cpu_s = 0.0

    def add(self, widget: PanelWidget) -> None:
        """Keep a widget up to date."""
        with self._lock:
            if widget not in self._widgets:
                self._widgets.append(widget)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._main, name="workbench-panel-view", daemon=True
                )
                self._thread.start()
        self.panel.changed.set()

    def remove(self, widget: PanelWidget) -> None:
        """Forget a widget."""
        with self._lock, contextlib.suppress(ValueError):
            self._widgets.remove(widget)
        self.panel.changed.set()

    @property
    def widgets(self) -> tuple[PanelWidget, ...]:
        """The widgets that are kept up to date."""
        with self._lock:
            return tuple(self._widgets)

    def _main(self) -> None:
        while self._has_widgets():
            before, busy = time.thread_time(), False
            try:
                busy = self.draw(self.widgets)
            except Exception:  # the next tick can succeed; without this thread all widgets freeze
                log.exception("The panel could not be drawn")
            self.cpu_s += time.thread_time() - before
            time.sleep(SOONEST_S)
            self.panel.changed.wait((PERIOD_S if busy else IDLE_S) - SOONEST_S)
            self.panel.changed.clear()
        for part in self.panel.parts.values():
            part.close()

    def _has_widgets(self) -> bool:
        with self._lock:
            if not self._widgets:
                self._thread = None  # a later `add` starts another thread
            return bool(self._widgets)

    def draw(self, widgets: tuple[PanelWidget, ...]) -> bool:
        """Send what changed; return whether a run is active."""
        parts = self.panel.wire()
        run, snapshot = self._seen()
        for widget in widgets:
            with contextlib.suppress(Exception):  # its comm is closed; the others continue
                widget.show(parts)
                if run is not None and snapshot is not None:
                    widget.frame(f"{run.name}#{run.number}", snapshot)
        return run is not None and not run.is_over

    def _seen(self) -> tuple[Run | None, Snapshot | None]:
        """Return the displayed run and its snapshot; for an ended run, the last snapshot."""
        run = self._run_on_show()
        if run is None:
            return None, None
        key = (run, run.number, run.is_over)
        if self._drawn is None or self._drawn[0] != key or not run.is_over:
            self._drawn = key, run.snapshot()
        return run, self._drawn[1]
