"""The messages to the dashboard in the browser: a snapshot, or the changes since the last one.

A frame is a JSON head and one buffer of float32. The head holds words and small numbers. `arrays`
in the head says which part of the buffer is which table. Tables grow at their end. The browser
first drops `skip` rows from the front (the timeline slides). It then keeps `keep` rows, and the
rows in the buffer replace the rest. `base` names the frame that a delta builds on; a browser that
has another frame requests a full frame with `hello`.

`make_frame` is a pure function of two snapshots. `Dashboard` is the widget that receives the frames
and sends commands back.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import anywidget
import numpy as np
import traitlets
from numpy.typing import NDArray

from ...history.analysis.rows import RUN_COLORS
from ...shared import events
from .. import text, theme

if TYPE_CHECKING:
    from ...history.snapshot import Curve, Snapshot, Timeline

CURVE_COLUMNS = 4
"""Columns of a curve's table: step, mean, low, high."""

WORKER_COLUMNS = 10
"""Columns of the workers' table: rank, samples/s, potential/s, median wait in ms, five shares,
bubble's share."""


class Table(TypedDict):
    """Where one table's new rows are in the buffer.

    `offset` counts float32 values; the rows are `rows` x `columns`, row by row.
    """

    key: str
    skip: int
    keep: int
    rows: int
    columns: int
    offset: int


class Frame(TypedDict):
    """Kernel to browser. `head` holds only the keys that changed; if `full`, it holds all keys.

    `heard` says whether a message of any browser has reached the kernel yet.
    """

    type: Literal["frame"]
    seq: int
    base: int
    full: bool
    heard: bool
    head: dict[str, Any]
    arrays: list[Table]


class Hello(TypedDict):
    """Browser to kernel: a view was made, or a frame is missing; send a full frame."""

    type: Literal["hello"]


class Command(TypedDict):
    """Browser to kernel: a button was pressed. `fields` belong to the command."""

    type: Literal["command"]
    name: Literal["stop", "pause", "resume", "step", "scale"]
    fields: dict[str, Any]


Floats32 = NDArray[np.float32]


def make_frame(
    snapshot: Snapshot, previous: Snapshot | None, seq: int, base: int = -1, heard: bool = True
) -> tuple[Frame, bytes]:
    """Return the frame that takes a browser from `previous` to `snapshot`.

    Args:
        previous: The snapshot in the browser, of frame `base`; None for a full frame.
        seq: Number of this frame.

    Returns:
        The head, and the buffer of float32 in the machine's byte order (little-endian wherever
        browsers run).
    """
    head = make_head(snapshot)
    if previous is not None:
        known = make_head(previous)
        head = {k: v for k, v in head.items() if k not in known or known[k] != v}
    packer = _Packer()
    old_curves = _curves(previous) if previous is not None else {}
    for key, curve in _curves(snapshot).items():
        packer.add(key, *_curve_delta(curve, old_curves.get(key)))
    skip, keep = _timeline_overlap(
        snapshot.timeline, previous.timeline if previous is not None else None
    )
    packer.add("timeline", _timeline_rows(snapshot, skip_rows=keep), keep, skip)
    packer.add("workers", _worker_rows(snapshot), 0)
    frame: Frame = {
        "type": "frame",
        "seq": seq,
        "base": base if previous is not None else -1,
        "full": previous is None,
        "heard": heard,
        "head": head,
        "arrays": packer.tables,
    }
    return frame, packer.buffer()


def make_head(snapshot: Snapshot) -> dict[str, Any]:
    """Return the words and small numbers of a frame, JSON-ready."""
    origin = _origin(snapshot.timeline)
    return {
        "title": snapshot.name,
        "strategy": snapshot.strategy,
        "term": text.term(snapshot),
        "place": snapshot.place,
        "state": snapshot.state,
        "over": snapshot.state in events.OVER,
        "progress": text.progress(snapshot),
        "fraction": snapshot.done,
        "figures": text.figures(snapshot),
        "slow": text.slow(snapshot) or text.overfitting(snapshot),
        "banner": snapshot.banner,
        "staffing": None if snapshot.staffing is None else asdict(snapshot.staffing),
        "slow_rank": snapshot.slow_rank,
        "dropped": text.dropped(snapshot),
        "drawing": text.drawing(snapshot),
        "notes": list(snapshot.notes),
        "labels": [text.worker_label(w) for w in snapshot.workers],
        "evals": [_finite(e) for e in snapshot.evals],
        "changes": text.change_labels(snapshot),
        "curves": [f"more:{name}" for name in snapshot.more],
        "split": _split(snapshot),
        "bubbles": _bubbles(snapshot),
        "origin_s": origin,
        "cuts": list(snapshot.timeline.cuts),
        "color": snapshot.color,
        "description": text.describe(snapshot),
    }


def _split(snapshot: Snapshot) -> dict[str, Any] | None:
    """Return a pipeline's stages in words; None for other strategies."""
    split = snapshot.split
    if split is None:
        return None
    return {
        "title": text.TITLE,
        "names": list(text.NAMES),
        "caption": text.caption(split),
        "ideal": split.ideal_bubble,
        "columns": list(text.COLUMNS),
        "numeric": [name in text.NUMERIC for name in text.COLUMNS],
        "rows": [list(row) for row in text.rows(split)],
    }


def _bubbles(snapshot: Snapshot) -> list[list[str]]:
    """Return the bubble of each worker of a pipeline, and which part of it is excess."""
    if snapshot.split is None:
        return []
    return [list(text.bubble(w, snapshot.split).words) for w in snapshot.workers]


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    # JSON has no NaN; unknown values are left out.
    return {k: v for k, v in values.items() if not isinstance(v, float) or math.isfinite(v)}


def _origin(timeline: Timeline) -> float:
    """Return a time near the timeline's steps, so that float32 holds them to a microsecond.

    It moves every 64 s; rows that were sent before keep their origin.
    """
    if not len(timeline.step):
        return 0.0
    return math.floor(float(np.nanmin(timeline.start_s[-1])) / 64.0) * 64.0


def _curves(snapshot: Snapshot) -> dict[str, Curve]:
    found = {"loss": snapshot.loss_curve, "throughput": snapshot.throughput_curve}
    found.update({f"more:{name}": curve for name, curve in snapshot.more.items()})
    return found


def _curve_delta(curve: Curve, old: Curve | None) -> tuple[Floats32, int]:
    """Return the rows to send and how many of the old rows stay."""
    keep = _common_rows(curve, old) if old is not None else 0
    columns = (curve.step, curve.mean, curve.low, curve.high)
    rows = np.empty((len(curve) - keep, CURVE_COLUMNS), np.float32)
    for index, column in enumerate(columns):
        rows[:, index] = column[keep:]
    return rows, keep


def _common_rows(new: Curve, old: Curve) -> int:
    many = min(len(new), len(old))
    if not many:
        return 0
    pairs = ((new.step, old.step), (new.mean, old.mean), (new.low, old.low), (new.high, old.high))
    differs = np.zeros(many, bool)
    for one, other in pairs:
        a, b = one[:many], other[:many]
        differs |= (a != b) & ~((a != a) & (b != b))  # NaN equals NaN here
    first = int(differs.argmax())
    return first if differs[first] else many


def _timeline_overlap(new: Timeline, old: Timeline | None) -> tuple[int, int]:
    """Return how many old rows fall off the front and how many of the rest stay."""
    if old is None or not len(old.step) or not len(new.step):
        return 0, 0
    if old.start_s.shape[1:] != new.start_s.shape[1:]:
        return 0, 0
    skip = int(np.searchsorted(old.step, new.step[0]))
    many = min(len(old.step) - skip, len(new.step))
    if many <= 0:
        return 0, 0
    same = (new.step[:many] == old.step[skip : skip + many]) & (
        new.start_s[:many] == old.start_s[skip : skip + many]
    ).all(axis=1)
    keep = many if same.all() else int(same.argmin())
    if not keep or _origin(new) != _origin(old):
        return 0, 0
    return skip, keep


def _timeline_rows(snapshot: Snapshot, skip_rows: int) -> Floats32:
    """Return rows of step, then per rank: start (from the origin) and the five parts."""
    line = snapshot.timeline
    starts = line.start_s[skip_rows:, :, None] - _origin(line)
    cells = np.concatenate([starts, line.parts_s[skip_rows:]], axis=2)
    flat = cells.reshape(len(cells), cells.shape[1] * cells.shape[2])
    return np.column_stack([line.step[skip_rows:], flat]).astype(np.float32)


def _worker_rows(snapshot: Snapshot) -> Floats32:
    rows = [
        (w.rank, w.samples_per_s, w.potential_per_s, w.wait_ms, *w.share, w.bubble)
        for w in snapshot.workers
    ]
    return np.asarray(rows, np.float32).reshape(len(rows), WORKER_COLUMNS)


class _Packer:
    """Lays tables out one after the other in a single buffer."""

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self._chunks: list[Floats32] = []
        self._offset = 0

    def add(self, key: str, rows: Floats32, keep: int, skip: int = 0) -> None:
        """Append one table's new rows."""
        many, columns = rows.shape
        self.tables.append(
            {
                "key": key,
                "skip": skip,
                "keep": keep,
                "rows": many,
                "columns": columns,
                "offset": self._offset,
            }
        )
        self._chunks.append(rows.ravel())
        self._offset += rows.size

    def buffer(self) -> bytes:
        """Return all rows as one run of bytes."""
        return np.concatenate(self._chunks).tobytes() if self._chunks else b""


OnCommand = Callable[[str, dict[str, Any]], None]
COMMANDS = ("stop", "pause", "resume", "step", "scale")
KEPT = 3
"""How many finished dashboards can still answer a browser that requests their history."""
_REPEAT_FULL_S = 1.0
_HERE = Path(__file__).parent


class Dashboard(anywidget.AnyWidget):
    """The live view of one run.

    Args:
        title: Shown until the first frame arrives.
        on_command: Called with one of COMMANDS and its fields, on the
            thread on which the kernel handles widget messages; must return soon.
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
        """Send the changes since the last call; may be called from any thread."""
        with self._lock:
            previous, self._latest = self._latest, snapshot
            # The first frames may be lost before a browser has sent a message (its code loads while
            # the cell runs), and kernels without subshells hold its `hello` back until the end.
            now_s = time.monotonic()
            if not self._heard and now_s - self._full_at_s >= _REPEAT_FULL_S:
                previous = None
            self._send_frame(snapshot, previous)

    def finish(self) -> None:
        """Release the widget; call it after the output has been replaced.

        A page that was reloaded during the cell does not receive the replacement. It requests the
        widget when the kernel is idle again, so the latest few widgets that a browser has seen can
        still answer. Other widgets (in a notebook that runs without a browser) are closed at
        once, and their code is not saved with the notebook.
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
    """Let the browser's messages reach `widget` during a cell; return whether this was needed.

    Since 7.4 ipykernel sends a comm's messages to the shell that last used the comm
    (`BaseComm._reply_subshell_for`). For a widget that a running cell updates, this is the busy
    main shell: a press of Stop would wait until the cell ends. The browser chose a subshell. This
    function keeps that subshell, which restores the behaviour of ipykernel 7.1 to 7.3.
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
