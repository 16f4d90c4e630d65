"""Sends the panel's sections and the run's frames to the widgets, at most 5 times a second."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from ..session.run import Run
from ..views.panel.widget import PanelWidget
from .model import Panel

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
        self.cpu_s = 0.0

    def add(self, widget: PanelWidget) -> None:
        """Keep a widget up to date."""
        with self._lock:
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
            before = time.thread_time()
            busy = self.draw(self.widgets)
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
        run = self._run_on_show()
        snapshot = None if run is None else run.snapshot()
        for widget in widgets:
            with contextlib.suppress(Exception):  # a comm that is gone: the others go on
                widget.show(parts)
                if run is not None and snapshot is not None:
                    widget.frame(f"{run.name}#{run.number}", snapshot)
        return run is not None and not run.is_over
