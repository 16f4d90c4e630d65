"""The live dashboard: one widget that is sent binary frames and sends commands back.

Data goes out as custom messages, never as synced state, so that nothing large lands in a saved
notebook and every frame costs the kernel about a millisecond of CPU.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import traitlets

from ...history.analysis.rows import RUN_COLORS
from .. import theme
from .frames import make_frame

if TYPE_CHECKING:
    from ...history.snapshot import Snapshot

OnCommand = Callable[[str, dict[str, Any]], None]
COMMANDS = ("stop", "pause", "resume", "step")
KEPT = 3
"""Finished dashboards that can still be asked for their history."""
_REPEAT_FULL_S = 1.0
_HERE = Path(__file__).parent


class Dashboard(anywidget.AnyWidget):
    """The live view of one run.

    Args:
        title: Shown until the first frame arrives.
        on_command: Called with `stop`, `pause`, `resume` or `step` and its fields, on whichever
            thread the kernel handles widget messages on; must return soon.
    """

    _esm = (_HERE / "dashboard.js").read_text(encoding="utf-8")
    _css = (_HERE / "dashboard.css").read_text(encoding="utf-8")
    title = traitlets.Unicode("").tag(sync=True)
    palette = traitlets.Dict().tag(sync=True)

    def __init__(self, title: str, on_command: OnCommand) -> None:
        super().__init__(title=title, palette=palette())
        self._on_command = on_command
        self._lock = threading.Lock()
        self._latest: Snapshot | None = None
        self._seq = 0
        self._heard = False
        self._full_at_s = 0.0
        self.on_msg(self._receive)
        deliver_while_busy(self)

    def update(self, snapshot: Snapshot) -> None:
        """Send what changed since the last call; may be called from any thread."""
        with self._lock:
            previous, self._latest = self._latest, snapshot
            # Until a browser has spoken it may have missed the first frames (its code loads while
            # the cell runs), and kernels without subshells hold its `hello` back until the end.
            now_s = time.monotonic()
            if not self._heard and now_s - self._full_at_s >= _REPEAT_FULL_S:
                previous = None
            self._send_frame(snapshot, previous)

    def finish(self) -> None:
        """Let go of the widget; call it once the output has been replaced.

        A page that was reloaded while the cell blocked is not told of the replacement and asks
        for the widget when the kernel is idle again, so the latest few that a browser has seen
        stay able to answer. Others (a notebook that is executed without a browser) are closed at
        once, and their code is dropped from the state that is saved with the notebook.
        """
        if self._heard:
            _finished.append(self)
            retired = _finished.popleft() if len(_finished) > KEPT else None
        else:
            retired = self
        if retired is not None:
            retired._retire()

    def _retire(self) -> None:
        with self._lock:
            self._latest = None
            self._esm = "export default {}"
            self._css = ""
        self.close()

    def _send_frame(self, snapshot: Snapshot, previous: Snapshot | None) -> None:
        base, self._seq = self._seq, self._seq + 1
        frame, buffer = make_frame(snapshot, previous, self._seq, base, self._heard)
        if frame["full"]:
            self._full_at_s = time.monotonic()
        self.send(frame, [buffer])

    def _receive(self, _: Any, content: Any, buffers: Any) -> None:
        kind = content.get("type") if isinstance(content, dict) else None
        self._heard = True
        if kind == "hello":
            with self._lock:
                if self._latest is not None:
                    self._send_frame(self._latest, None)
        elif kind == "command" and content.get("name") in COMMANDS:
            fields = content.get("fields")
            self._on_command(content["name"], fields if isinstance(fields, dict) else {})


_finished: deque[Dashboard] = deque()


def deliver_while_busy(widget: Any) -> bool:
    """Let the browser's messages reach `widget` while a cell blocks; return whether it was needed.

    Since 7.4 ipykernel sends a comm's messages to the shell that last used the comm
    (`BaseComm._reply_subshell_for`). For a widget that a running cell updates that is the busy
    main shell, so a press of Stop would wait for the cell to end. Keeping the shell the browser
    chose, its own subshell, restores what 7.1 to 7.3 did.
    """
    comm: Any = getattr(widget, "comm", None)
    if not hasattr(comm, "_reply_subshell_for"):
        return False
    comm._reply_subshell_for = lambda data, default: default
    return True


def palette() -> dict[str, Any]:
    """Return the colours of both modes, with the phases in drawing order."""
    return {
        mode: {
            "phases": list(theme.phase_colors(mode).values()),
            "series": list(theme.SERIES_DARK if mode == "dark" else theme.SERIES_LIGHT),
            "runs": [theme.run_color(number, mode) for number in range(RUN_COLORS)],
            "ink": theme.INK[mode],
            "muted": theme.MUTED[mode],
            "grid": theme.GRID[mode],
            "paper": theme.PAPER[mode],
        }
        for mode in ("light", "dark")
    } | {
        "names": list(theme.PHASE_NAMES.values()),
        "hatched": list(theme.PHASE_NAMES).index(theme.HATCHED),
        "busy": list(theme.PHASE_NAMES).index(theme.BUSY),
    }
