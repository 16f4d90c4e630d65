"""The activity of an engine, written into its cluster's folder.

    doing/engine-<i>.jsonl      busy or not, since when, with which call, how the last call ended:
    the last line is the present state
    doing/out-<i>-<n>.jsonl     the call's output, in segments: the first and the latest

`workbench ps` shows it. A notebook that takes over a kept cluster reads here what was printed, and
how a cell ended, while no notebook was connected.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..shared.cluster_env import Page

if TYPE_CHECKING:
    from ..shared.messages import CellOutcome

DOING = "doing"
SEGMENT_BYTES = 256 << 10
LATEST_SEGMENTS = 8
OUTPUTS = frozenset(
    {"stream", "display_data", "execute_result", "error", "clear_output", "update_display_data"}
)


class Diary:
    """One engine's activity log.

    Args:
        folder: The cluster's folder.
        outputs: Whether to record the output; only a kept cluster needs it.
    """

    def __init__(self, folder: Path, engine: int, *, outputs: bool) -> None:
        self._folder, self._engine, self._outputs = folder / DOING, engine, outputs
        self._call = ""
        self._segment, self._size = 0, 0
        self._wrote = True  # perhaps an earlier log did
        self._page = Page(self._folder / f"engine-{engine}.jsonl")
        self._lock = threading.Lock()
        self._write({"busy": False})

    def begin(self, call: str, what: str) -> None:
        """A cell begins; the outputs of the cell before are deleted."""
        with self._lock:
            self._segment, self._size, self._call = 0, 0, call
            if self._wrote:
                for path in self._folder.glob(f"out-{self._engine}-*.jsonl"):
                    path.unlink(missing_ok=True)
            self._wrote = False
        self._write({"busy": True, "call": call, "what": what})

    def end(self, outcome: CellOutcome) -> None:
        """The cell is over; all its output has been written."""
        with self._lock:
            call, self._call = self._call, ""
        self._write({"busy": False, "call": call, "outcome": outcome.to_wire()})

    def output(self, kind: str, content: Mapping[str, Any]) -> None:
        """Something was printed or shown."""
        if not (self._outputs and self._call and kind in OUTPUTS):
            return
        line = json.dumps([kind, content], default=str).encode() + b"\n"
        with self._lock, contextlib.suppress(OSError):
            if self._size and self._size + len(line) > SEGMENT_BYTES:
                self._turn_over()
            path = self._path(self._segment)
            self._wrote = True
            with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
                file.write(line)
            self._size += len(line)

    def _turn_over(self) -> None:
        self._segment, self._size = self._segment + 1, 0
        old = self._segment - LATEST_SEGMENTS
        if old > 0:  # the first segment shows the beginning
            self._path(old).unlink(missing_ok=True)

    def _path(self, segment: int) -> Path:
        return self._folder / f"out-{self._engine}-{segment:06d}.jsonl"

    def _write(self, fields: Mapping[str, Any]) -> None:
        self._page.write({"pid": os.getpid(), "since": time.time(), "call": "", **fields})

    def close(self) -> None:
        """Close the file; another log follows."""
        self._page.close()


def tee(send: Callable[..., Any], diary: Callable[[], Diary | None]) -> Callable[..., Any]:
    """Return a session's `send` that also writes outputs down."""

    def send_and_note(stream: Any, what: Any, content: Any = None, *args: Any, **rest: Any) -> Any:
        page = diary()
        if page is not None:
            if isinstance(what, str):
                page.output(what, content or {})
            elif isinstance(what, Mapping):
                page.output(str(what.get("msg_type", "")), what.get("content") or {})
        return send(stream, what, content, *args, **rest)

    return send_and_note
