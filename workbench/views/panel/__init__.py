"""The panel's widget: sends changed sections and frames, and forwards the actions of controls.

The browser draws each section with one script, in the same folder as this file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from ..live.frames import deliver_while_busy, make_frame, palette

if TYPE_CHECKING:
    from ...history.snapshot import Snapshot

OnDo = Callable[[str, dict[str, Any], Callable[..., None]], None]
"""`on_do(name, fields, reply)`: a control was used; `reply` answers the browser that sent it, with
a value, or with `failed=True`."""

_HERE = Path(__file__).parent
_FIRST, _LAST = ("kit.js",), ("shell.js",)


def script() -> str:
    """Return the panel's program."""
    dashboard = (_HERE.parent / "live" / "dashboard.js").read_text(encoding="utf-8")
    between = sorted(p.name for p in _HERE.glob("*.js") if p.name not in (*_FIRST, *_LAST))
    files = [(_HERE / name).read_text(encoding="utf-8") for name in (*_FIRST, *between, *_LAST)]
    return "\n".join([dashboard.partition("\nexport default")[0], *files])


def style() -> str:
    """Return the panel's style sheet; the dashboard's style sheet comes first."""
    own = [path.read_text(encoding="utf-8") for path in sorted(_HERE.glob("*.css"))]
    return "\n".join([(_HERE.parent / "live" / "dashboard.css").read_text(encoding="utf-8"), *own])


class PanelWidget(anywidget.AnyWidget):
    """One display of the panel.

    Args:
        on_do: See `OnDo`; called on the thread on which the kernel handles widget messages.
        on_hello: Called when a browser has opened the widget and needs the whole state.
        on_bye: Called when the last view in a browser has closed.
    """

    _esm = script()
    _css = style()
    palette = traitlets.Dict().tag(sync=True)
    me = traitlets.Unicode().tag(sync=True)

    def __init__(
        self, on_do: OnDo, on_hello: Callable[[], None], on_bye: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(palette=palette())
        self.me = self.model_id or ""  # for the browser's question whether it exists
        self._on_do, self._on_hello, self._on_bye = on_do, on_hello, on_bye
        self._lock = threading.Lock()
        self._sent: dict[str, Any] = {}
        self._run, self._latest, self._seq = "", None, 0
        self.heard = False
        self.on_msg(self._receive)
        deliver_while_busy(self)

    _latest: Snapshot | None

    def show(self, parts: Mapping[str, Any]) -> None:
        """Send the sections that changed since the last call."""
        with self._lock:
            changed = {k: v for k, v in parts.items() if self._sent.get(k) != v}
            self._sent.update(changed)
            if changed:
                self.send({"type": "parts", "parts": changed})

    def frame(self, run: str, snapshot: Snapshot) -> None:
        """Send the changes in the run that the panel shows.

        Args:
            run: The run's key: another run begins with a full frame.
        """
        with self._lock:
            previous = self._latest if run == self._run else None
            if previous is snapshot:
                return
            self._run, self._latest = run, snapshot
            base, self._seq = self._seq, self._seq + 1
            frame, buffer = make_frame(snapshot, previous, self._seq, base, True)
            self.send({**frame, "run": run}, [buffer])

    def forget(self) -> None:
        """Send all sections again in the next call."""
        with self._lock:
            self._sent.clear()
            self._run, self._latest = "", None

    def _receive(self, _: Any, content: Any, buffers: Any) -> None:
        if not isinstance(content, dict):
            return
        self.heard = True
        kind = content.get("type")
        if kind == "hello":
            self.forget()
            self._on_hello()
        elif kind == "bye":
            self._on_bye()
        elif kind == "do" and isinstance(content.get("name"), str):
            number, fields = content.get("id"), content.get("fields")
            self.send({"type": "ack", "id": number})
            self._on_do(
                content["name"],
                fields if isinstance(fields, dict) else {},
                lambda value, failed=False: self.send(
                    {"type": "reply", "id": number, "value": value, "failed": failed}
                ),
            )
