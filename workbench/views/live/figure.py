"""The picture that stays in the notebook when a run is over, drawn with matplotlib.

Only pipelines have two more bands: each worker's bubble, and the stages.
"""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...shared.cluster_env import export
from ...shared.record import PARTS
from .. import text
from ..drawing import (
    draw_percent,
    own_style,
    readable,
    shortened,
    spell,
    stack,
    style,
    width_in,
    worker_axis,
    wrapped,
)
from ..theme import (
    BUSY,
    GRID,
    HATCHED,
    INK,
    MUTED,
    PAPER,
    PHASE_NAMES,
    phase_colors,
    run_color,
    series,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

    from ...history.snapshot import Curve, Snapshot, Split

_WIDTH_IN, _DPI = 9.0, 110
_CHART_IN, _ROW_IN, _PAD_IN, _SMALL_IN = 2.1, 0.27, 0.75, 1.35
_PLOT_IN, _STRIP, _LABEL_PT = 3.85, 0.13, 7.5  # a curve's width; height of marks' words
_EDGE_IN = 0.09  # left and right of the headline
_NAME_LETTERS = 48
_VISIBLE_STEPS = 12


def run_bundle(snapshot: Snapshot) -> dict[str, Any]:
    """Return the outputs of a finished run that stay in the notebook.

    Returns:
        A MIME bundle with `image/png` (bytes) and `text/plain` of the same content.
    """
    return {"image/png": run_png(snapshot, PAPER["any"]), "text/plain": text.report(snapshot)}


class RunPicture:
    """A run's picture that displays itself as the last value of a cell."""

    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def __repr__(self) -> str:
        return text.report(self._snapshot)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, Any]:
        return run_bundle(self._snapshot)

    def save(self, path: str | Path) -> None:
        """Write the picture to a PNG file.

        Raises:
            RunError: The file cannot be written.
        """
        export(Path(path).expanduser(), run_png(self._snapshot))


def placeholder_bundle(title: str) -> dict[str, Any]:
    """Return a bundle of the same types as the final bundle, shown until the run is over.

    Tools that compare the first output of a cell (nbval) then find the same keys as in the saved
    notebook.
    """
    return {"image/png": _blank_png(), "text/plain": title}


def run_png(snapshot: Snapshot, paper: str = PAPER["light"]) -> bytes:
    """Return the picture of a run as PNG; `paper` is its background colour."""
    target = io.BytesIO()
    with own_style({"hatch.linewidth": 1.0}):
        figure = run_figure(snapshot)
        spell(figure)
        figure.savefig(target, format="png", dpi=_DPI, facecolor=paper)
    return target.getvalue()


def run_figure(snapshot: Snapshot) -> Figure:
    """Return the picture of a run: curves on top, timeline, shares, then additional curves."""
    from matplotlib.figure import Figure

    rows = max(1, len(snapshot.workers)) * _ROW_IN + _PAD_IN
    more = snapshot.more
    more_rows = -(-len(more) // 3)
    head = _head(snapshot)
    heights = [head.height_in, _CHART_IN, rows, rows + 0.2]
    if snapshot.split is not None:
        heights += [rows + 0.2, stages_height_in(snapshot.split)]
    heights += [_SMALL_IN] * more_rows
    figure = Figure(figsize=(_WIDTH_IN, sum(heights)), layout="constrained")
    bands: Any = figure.subfigures(len(heights), 1, height_ratios=heights)
    head.draw(bands[0])
    left, right = bands[1].subplots(1, 2)
    own = run_color(snapshot.color, "any")
    _draw_curve(left, snapshot.loss_curve, "Loss", own)
    _mark_evals(left, snapshot)
    _mark_changes(left, snapshot)
    _draw_curve(right, snapshot.throughput_curve, "Throughput, samples/s", own)
    if len(snapshot.throughput_curve):
        right.set_ylim(0, _room(snapshot.throughput_curve))
    _mark_changes(right, snapshot)
    _draw_timeline(bands[2].subplots(), snapshot)
    _draw_shares(bands[3].subplots(), snapshot)
    if snapshot.split is not None:
        draw_bubbles(bands[4].subplots(), snapshot, snapshot.split)
        draw_stages(bands[5], snapshot.split)
    _draw_more(bands[len(bands) - more_rows :], more)
    return figure


@dataclass(frozen=True)
class _Head:
    """The text above the curves, in lines that fit the width.

    Attributes:
        title, facts, blame: The run's name, its figures, and the slow worker.
    """

    title: list[str]
    facts: list[str]
    blame: list[str]

    _TITLE_IN, _LINE_IN, _GAP_IN = 0.2, 0.165, 0.07  # of the title, other lines, gaps

    @property
    def height_in(self) -> float:
        lines = len(self.facts) + max(1, len(self.blame))
        return len(self.title) * self._TITLE_IN + lines * self._LINE_IN + 3.3 * self._GAP_IN

    def draw(self, band: SubFigure) -> None:
        at_in, color = self._GAP_IN, INK["any"]
        for lines, size_pt, weight, line_in in (
            (self.title, 11, "bold", self._TITLE_IN),
            (self.facts, 9, "normal", self._LINE_IN),
            (self.blame, 9, "bold", self._LINE_IN),
        ):
            if lines is self.blame:
                color = phase_colors()[HATCHED]
            for line in lines:
                band.text(
                    _EDGE_IN / _WIDTH_IN, 1 - at_in / self.height_in, line, fontsize=size_pt,
                    weight=weight, va="top", color=color, parse_math=False,
                )  # fmt: skip
                at_in += line_in
            at_in += self._GAP_IN


def _head(snapshot: Snapshot) -> _Head:
    facts = [text.progress(snapshot), *(f"{k} {v}" for k, v in text.figures(snapshot).items())]
    failed = snapshot.banner if snapshot.state == "failed" else ""
    blame = [line for line in (failed, *text.findings(snapshot)) if line]
    named = replace(snapshot, name=shortened(snapshot.name, _NAME_LETTERS))
    title = readable(f"{text.title(named)} · {snapshot.state}").split(" · ")
    return _Head(_lines(title, 11, "bold"), _lines(facts, 9), _lines(blame, 9, "bold"))


def _lines(parts: list[str], size_pt: float, weight: str = "normal") -> list[str]:
    """Return parts with dots between them, in lines that fit; they break at a dot if possible."""
    most_in = _WIDTH_IN - 2 * _EDGE_IN
    lines: list[str] = []
    for part in parts:
        longer = f"{lines[-1]} · {part}" if lines else ""
        if longer and width_in(longer, size_pt, weight) <= most_in:
            lines[-1] = longer
        elif width_in(part, size_pt, weight) <= most_in:
            lines.append(part)
        else:
            lines += wrapped(part, size_pt, most_in, weight)
    return lines


def _draw_curve(axes: Axes, curve: Curve, title: str, color: str) -> None:
    if not len(curve):
        style(axes, title, "no steps")
        return
    style(axes, title, text.number(float(curve.mean[-1])))
    axes.grid(axis="y", color=GRID["any"], linewidth=0.8)
    axes.fill_between(curve.step, curve.low, curve.high, color=color, alpha=0.2, linewidth=0)
    axes.plot(curve.step, curve.mean, color=color, linewidth=1.6)
    axes.plot(curve.step[-1:], curve.mean[-1:], "o", color=color, markersize=3.5)
    axes.set_xlabel("step", fontsize=8, color=MUTED["any"], loc="right", labelpad=1)
    axes.locator_params(axis="x", integer=True, min_n_ticks=1)
    axes.margins(x=0.01)


def _room(curve: Curve) -> float | None:
    """Return the end of an axis from 0, with room above the curve; None for matplotlib's choice."""
    top = float(np.nanmax([*curve.high, *curve.mean, 0.0]))
    return 1.06 * top if np.isfinite(top) and top > 0 else None


def _mark_evals(axes: Axes, snapshot: Snapshot) -> None:
    points = [(e["step"], e["loss"]) for e in snapshot.evals if "step" in e and "loss" in e]
    for evaluation in snapshot.evals:
        if "step" in evaluation:
            axes.axvline(evaluation["step"], color=MUTED["any"], linewidth=0.8, linestyle=":")
    if points:
        steps, losses = zip(*points, strict=True)
        axes.plot(steps, losses, "D", color=INK["any"], markersize=3.5, label="eval loss")
        axes.legend(fontsize=8, frameon=False, labelcolor=MUTED["any"])


def _mark_changes(axes: Axes, snapshot: Snapshot) -> None:
    """Mark where workers left or joined; the words are in a strip above the curve."""
    curve = snapshot.loss_curve
    first, last = (float(curve.step[0]), float(curve.step[-1])) if len(curve) else (0.0, 0.0)
    changes = [one for one in text.change_labels(snapshot) if first <= one[0] <= last]
    if not changes:
        return
    low, high = axes.get_ylim()
    axes.set_ylim(low, high + _STRIP * (high - low))
    begin, end = axes.get_xlim()
    per_pt = (end - begin) / (72 * _PLOT_IN)
    marks = [(step / per_pt, 72 * width_in(label, _LABEL_PT)) for step, label in changes]
    places: Sequence[float | None] = [None] * len(marks)
    if len(marks) <= text.MOST_LABELS:
        places = text.change_places(marks, begin / per_pt, end / per_pt)
    for (step, label), place in zip(changes, places, strict=True):
        axes.axvline(step, color=MUTED["any"], linewidth=0.9, linestyle=(0, (4, 2)))
        if place is not None:
            axes.annotate(
                label, (place * per_pt, 0.985), xycoords=("data", "axes fraction"),
                fontsize=_LABEL_PT, color=MUTED["any"], va="top", ha="left",
            )  # fmt: skip


def _draw_timeline(axes: Axes, snapshot: Snapshot) -> None:
    line = snapshot.timeline
    if not len(line.step) or not snapshot.workers:
        style(axes, "What each worker did", "no steps")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    shown = slice(-_VISIBLE_STEPS, None)
    first, last = int(line.step[shown][0]), int(line.step[-1])
    words = f"steps {first} to {last}{text.left_out(snapshot, _VISIBLE_STEPS)}"
    style(axes, "What each worker did", words)
    starts = (line.start_s[shown] - np.nanmin(line.start_s[shown])) * 1e3
    parts = np.nan_to_num(line.parts_s[shown]) * 1e3
    rows = np.broadcast_to(np.arange(starts.shape[1]), starts.shape).ravel()
    begin = starts.copy()
    for index, part in enumerate(PARTS):
        stack(axes, rows, parts[:, :, index].ravel(), begin.ravel(), part)
        begin = begin + parts[:, :, index]
    axes.vlines(starts.ravel(), rows - 0.42, rows + 0.42, color=INK["any"], linewidth=1.0)
    axes.set_xlabel("ms", fontsize=8, color=MUTED["any"], loc="right", labelpad=1)
    worker_axis(axes, snapshot)
    axes.margins(x=0.005)


def _draw_shares(axes: Axes, snapshot: Snapshot) -> None:
    from matplotlib.patches import Patch

    style(axes, "Where the time went", "potential · median wait")
    rows = np.arange(len(snapshot.workers))
    share = np.asarray([w.share for w in snapshot.workers]).reshape(len(rows), len(PARTS))
    share = np.nan_to_num(share)
    begin = np.zeros(len(rows))
    for index, part in enumerate(PARTS):
        stack(axes, rows, share[:, index], begin, part)
        for row, size in enumerate(share[:, index].tolist()):
            if size >= 0.06:
                draw_percent(axes, float(begin[row]) + size / 2, row, size, part)
        begin = begin + share[:, index]
    for row, worker in enumerate(snapshot.workers):
        words = f"{text.number(worker.potential_per_s)}/s · {text.milliseconds(worker.wait_ms)}"
        axes.text(1.01, row, words, va="center", fontsize=8, color=INK["any"])
    axes.set_xlim(0, 1.17)
    axes.set_xticks([])
    worker_axis(axes, snapshot)
    colors = phase_colors()
    keys = [
        Patch(
            facecolor=(colors[p], 0.22) if p == HATCHED else colors[p],
            edgecolor=colors[p],
            hatch="//////" if p == HATCHED else None,
            linewidth=0,
            label=PHASE_NAMES[p],
        )
        for p in PARTS
    ]
    axes.legend(
        handles=keys, loc="upper left", bbox_to_anchor=(0, 0), ncols=len(keys), fontsize=8,
        frameon=False, borderaxespad=0.1, handlelength=1.3, columnspacing=1.4,
        labelcolor=INK["any"],
    )  # fmt: skip


def _draw_more(bands: Any, curves: dict[str, Curve]) -> None:
    """Draw all curves besides loss and throughput, three in a row."""
    names = list(curves)
    for row, band in enumerate(bands):
        for column, axes in enumerate(band.subplots(1, 3)):
            index = row * 3 + column
            if index < len(names):
                _draw_curve(axes, curves[names[index]], names[index], series(index + 3, "any"))
            else:
                axes.set_visible(False)


def _blank_png() -> bytes:
    """Return a transparent PNG of one pixel."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    head = struct.pack(">IIBBBBB", 1, 1, 8, 6, 0, 0, 0)
    pixel = zlib.compress(b"\0" * 5)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixel) + chunk(b"IEND", b"")


_LINE_IN, _TITLE_IN = 0.2, 0.44
_COLUMNS_AT = (0.012, 0.08, 0.2, 0.66, 0.81, 0.925)
"""Positions of the columns in the stages' table: left edges of words, right edges of numbers."""
_LABEL = 0.06


def draw_bubbles(axes: Axes, snapshot: Snapshot, split: Split) -> None:
    """Draw a bar per worker: the schedule's share hatched, the excess solid, then its work."""
    from matplotlib.patches import Patch

    style(axes, text.TITLE, "bubble · above ideal")
    color, busy = phase_colors()[HATCHED], phase_colors()[BUSY]
    for row, worker in enumerate(snapshot.workers):
        found = text.bubble(worker, split)
        if found.known:
            pieces = ((found.ideal, HATCHED), (found.excess, ""), (1 - found.whole, BUSY))
            begin = 0.0
            for size, part in pieces:
                if part:
                    stack(axes, row, size, begin, part)
                else:
                    axes.barh(row, size, left=begin, height=0.8, color=color, linewidth=0)
                if size >= _LABEL:
                    draw_percent(axes, begin + size / 2, row, size, part or "transfer_s")
                begin += size
        words = " · ".join(found.words)
        axes.text(1.01, row, words, va="center", fontsize=8, color=INK["any"])
    axes.axvline(split.ideal_bubble, color=INK["any"], linewidth=1, linestyle=(0, (3, 2)))
    axes.set_xlim(0, 1.17)
    axes.set_xticks([])
    worker_axis(axes, snapshot)
    keys = [
        Patch(facecolor=(color, 0.22), edgecolor=color, hatch="//////", linewidth=0),
        Patch(facecolor=color),
        Patch(facecolor=busy),
    ]
    axes.legend(
        handles=keys, labels=list(text.NAMES), loc="upper left", bbox_to_anchor=(0, 0),
        ncols=len(keys), fontsize=8, frameon=False, borderaxespad=0.1, handlelength=1.3,
        columnspacing=1.4, labelcolor=INK["any"],
    )  # fmt: skip


def stages_height_in(split: Split) -> float:
    """Return the height of the stages' table, inches."""
    return _TITLE_IN + _LINE_IN * (1 + len(text.rows(split)))


def draw_stages(band: SubFigure, split: Split) -> None:
    """Write the stages' table."""
    height_in = stages_height_in(split)

    def write(
        x: float, line: float, words: str, *, muted: bool = False, right: bool = False
    ) -> None:
        band.text(
            x, 1 - (0.06 + line * _LINE_IN) / height_in, words, fontsize=8, va="top",
            ha="right" if right else "left", color=MUTED["any"] if muted else INK["any"],
        )  # fmt: skip

    band.text(
        0.012, 1 - 0.04 / height_in, text.caption(split), fontsize=9.5, weight="bold", va="top",
        color=INK["any"],
    )  # fmt: skip
    for line, cells in enumerate([text.COLUMNS, *text.rows(split)]):
        for x, name, cell in zip(_COLUMNS_AT, text.COLUMNS, cells, strict=True):
            write(x, 1.3 + line, cell, muted=line == 0, right=name in text.NUMERIC)
