"""`wb.panel()` and `%panel`: the panel of this notebook, shown."""

from __future__ import annotations

from typing import Any

from ..errors import PlanError
from ..session.state import session
from ..views.live import in_notebook
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
        self.widget = PanelWidget(panel.do, panel.changed.set)
        pump.add(self.widget)

    def close(self) -> None:
        """Take the widget away; runs and the cluster go on."""
        self._pump.remove(self.widget)
        self.widget.close()

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
        )
    pump = shared()
    return PanelView(pump.panel, pump)
