"""The panel's choice without a browser: its two parts, with a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.execution import allocator
from workbench.notebook.session import Session
from workbench.panels import strategies
from workbench.panels.model import Panel
from workbench.panels.recipe import RecipePart
from workbench.panels.strategies import StrategiesPart


class FakeCluster:
    def __init__(self, engines=2, framework="torch", device="cpu"):
        self.worker_ids = list(range(engines))
        self.framework, self.devices_asked, self._device = framework, device, device

    def lease(self, workers):
        return SimpleNamespace(words=[self._device] * workers)


@contextmanager
def choosing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Panel]:
    """Show the choice where both frameworks are installed."""
    monkeypatch.setattr("workbench.execution.requests.installed", lambda framework: True)
    monkeypatch.setattr(allocator, "installed", lambda framework: True)
    strategies._missing.cache_clear()
    yield Panel(Session(cluster=FakeCluster()), (RecipePart, StrategiesPart))
    strategies._missing.cache_clear()


def cards(panel: Panel) -> dict[str, Any]:
    return {card["name"]: card for card in panel.wire()["strategies"]["cards"]}


def do(panel: Panel, action: str, /, **fields: Any) -> tuple[Any, Any]:
    """Do an action; return its answer, and the newest error."""
    found = []
    panel.notices.clear()
    panel.do(action, fields, lambda value, **_: found.append(value))
    return (found or [None])[0], (panel.notices or [None])[-1]
