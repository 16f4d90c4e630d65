"""Sends the panel's sections and the run's frames to the widgets, at most 5 times a second."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from ..history.snapshot import Snapshot
from ..session.run import Run
from ..views.panel.widget import PanelWidget
from .model import Panel

log = logging.getLogger("workbench.panels")

PERIOD_S = 0.2
SOONEST_S = 0.03
"""After a click widgets draw this soon, whatever the period."""
IDLE_S = 1.0
"""Where no run goes on, and nothing was clicked, this is often enough."""


class Pump:
    """One thread for all widgets of a panel; it ends when the last one is closed."""

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
            except Exception:  # the next tick may find it mended; without this thread all freeze
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
                self._thread = None  # who adds one from now on starts another thread
            return bool(self._widgets)

    def draw(self, widgets: tuple[PanelWidget, ...]) -> bool:
        """Send what changed; return whether a run goes on."""
        parts = self.panel.wire()
        run, snapshot = self._seen()
        for widget in widgets:
            with contextlib.suppress(Exception):  # a comm that is gone: the others go on
                widget.show(parts)
                if run is not None and snapshot is not None:
                    widget.frame(f"{run.name}#{run.number}", snapshot)
        return run is not None and not run.is_over

    def _seen(self) -> tuple[Run | None, Snapshot | None]:
        """Return the run on show and how it is; of one that is over, the same as the last time."""
        run = self._run_on_show()
        if run is None:
            return None, None
        key = (run, run.number, run.is_over)
        if self._drawn is None or self._drawn[0] != key or not run.is_over:
            self._drawn = key, run.snapshot()
        return run, self._drawn[1]
