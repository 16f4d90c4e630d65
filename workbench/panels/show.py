"""`wb.panel()` and `%panel`: the panel of this notebook, shown."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any

from ..errors import PlanError
from ..session.state import session
from ..views.blocks import Publish, in_notebook, notebook_publisher
from ..views.exports import kept_bundle
from ..views.panel.widget import PanelWidget
from .live import LivePart
from .model import Panel
from .parts import PARTS
from .pump import Pump


class PanelView:
    """One display of the notebook's panel.

    Attributes:
        panel: The model that all displays share.
        widget: What the browser draws.
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
        """No browser shows it any more: its cell was run again, or its output cleared."""
        self._pump.remove(self.widget)
        with contextlib.suppress(ValueError):
            self.panel.keepers.remove(self._keep)

    def close(self) -> None:
        """Take the widget away; runs, the cluster and what was kept stay."""
        self._left()
        self.widget.close()

    def _keep(self, name: str, thing: Any) -> None:
        """Show below the panel, folded, what a saved notebook has without a kernel."""
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
        bundle = self.widget._repr_mimebundle_()
        found = dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})
        found["text/plain"] = "The panel of Workbench. Run wb.panel() again to use it."
        return found

    def __repr__(self) -> str:
        return "<The panel of Workbench>"


_pump: Pump | None = None


def shared() -> Pump:
    """Return the one that all panels of this notebook share."""
    global _pump
    if _pump is None:
        model = Panel(session, PARTS)
        live = model.parts["live"]
        assert isinstance(live, LivePart)
        _pump = Pump(model, live.run)
    return _pump


def panel() -> PanelView:
    """Return the workbench's panel, to be shown by the notebook.

    Every panel of a notebook shows the same cluster, choice and runs as the magics do.

    Raises:
        PlanError: This is no notebook.
    """
    if not in_notebook():
        raise PlanError(
            "The panel needs a notebook.",
            seen="no Jupyter kernel",
            next_step="jupyter lab, or wb.Cluster(...).run(...) and wb.compare(...) in scripts",
            code="WB-PLAN-076",
        )
    pump = shared()
    return PanelView(pump.panel, pump)
