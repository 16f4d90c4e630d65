"""The dashboard as one SVG string, for notebooks that cannot load widgets.

The same layout as the widget, without scripts and without matplotlib: a frame costs a few
milliseconds. It follows the page's dark mode through `prefers-color-scheme`.

All bands share words, workers' labels and boxes. For a pipeline the drawing also shows each
worker's bubble and the table of its stages.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from ...history.snapshot import Curve, Floats, Snapshot, Split, Worker
from ...shared.record import PARTS
from .. import text
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

_CHART_WIDTH, _CHART_HEIGHT = 405, 130
_VISIBLE_STEPS = 12
_CURVE_POINTS = 240
_LABELS_HEIGHT = 14
"""Height of the words at marks above a curve."""
_LABEL_LETTER = 5.9
"""Width of a letter of these words."""
_POTENTIAL_RIGHT = 96  # the column's right edge, counted from the right margin


def run_svg(snapshot: Snapshot) -> str:
    """Return the run's present state as an SVG document."""
    body, y = _head(snapshot)
    pairs = (
        ("Loss", snapshot.loss_curve, run_color(snapshot.color), False),
        ("Throughput, samples/s", snapshot.throughput_curve, run_color(snapshot.color), True),
    )
    for index, (title, curve, color, from_zero) in enumerate(pairs):
        left = MARGIN + index * (_CHART_WIDTH + 22)
        changes = text.change_labels(snapshot)
        body += _chart(title, curve, left, y, color, from_zero, changes=changes)
    y += _CHART_HEIGHT + 46
    part, y = _timeline(snapshot, y)
    body += part
    part, y = _shares(snapshot, y)
    body += part
    if snapshot.split is not None:
        part, y = pipeline(snapshot, snapshot.split, y)
        body += part
    part, y = _more(snapshot, y)
    body += part
    return _document(body, y, text.describe(snapshot))


def _document(body: list[str], height: float, description: str) -> str:
    color = phase_colors()[HATCHED]
    style = (
        f".i{{fill:{INK['light']}}}.m{{fill:{MUTED['light']}}}.g{{stroke:{GRID['light']}}}"
        f".p{{fill:{PAPER['light']}}}.w{{fill:{color}}}"
        f".l{{stroke:{INK['light']}}}"
        "@media(prefers-color-scheme:dark){"
        f".i{{fill:{INK['dark']}}}.m{{fill:{MUTED['dark']}}}.g{{stroke:{GRID['dark']}}}"
        f".p{{fill:{PAPER['dark']}}}.l{{stroke:{INK['dark']}}}}}"
    )
    hatch = (
        '<pattern id="wb-hatch" width="6" height="6" patternUnits="userSpaceOnUse" '
        f'patternTransform="rotate(45)"><rect width="6" height="6" fill="{color}" '
        f'fill-opacity=".22"/><path d="M1 0v6" stroke="{color}" stroke-width="1.8"/></pattern>'
    )
    size = f'viewBox="0 0 {WIDTH} {height:.0f}" width="{WIDTH}" height="{height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} style="max-width:100%;height:auto" '
        f'role="img" aria-label="{escape(description)}" font-family="system-ui,sans-serif" '
        f'font-size="12"><style>{style}</style><defs>{hatch}</defs>'
        f'<rect class="p" width="100%" height="100%"/>{"".join(body)}</svg>'
    )


def _head(snapshot: Snapshot) -> tuple[list[str], float]:
    found = [text.progress(snapshot), *(f"{k} {v}" for k, v in text.figures(snapshot).items())]
    title = f"{text.title(snapshot)} · {snapshot.state}".split(" · ")
    body, y = [], 24.0
    for index, line in enumerate(lines(title, bold=True)):
        body.append(text_at(MARGIN, y + 18 * index, line, bold=True))
    y += 18 * len(body) + 2
    for line in lines(found):
        body.append(text_at(MARGIN, y, line))
        y += 18
    y -= 2
    slow = text.slow(snapshot)
    for said in (snapshot.banner, *text.findings(snapshot), *snapshot.notes):
        named = bool(slow) and said == slow
        for line in (
            line for one in said.splitlines() for line in lines([one.strip()], bold=named)
        ):
            body.append(text_at(MARGIN, y + 4, line, "w" if named else "m", bold=named))
            y += 18
    return body, y + 14


def _thin(curve: Curve) -> Curve:
    every = max(1, -(-len(curve) // _CURVE_POINTS))
    columns = (curve.step, curve.t_s, curve.mean, curve.low, curve.high)
    return Curve(*(column[::every] for column in columns))


def _chart(
    title: str,
    curve: Curve,
    left: float,
    top: float,
    color: str,
    from_zero: bool,
    width: float = _CHART_WIDTH,
    height: float = _CHART_HEIGHT,
    changes: Sequence[tuple[int, str]] = (),
) -> list[str]:
    last = text.number(float(curve.mean[-1])) if len(curve) else text.UNKNOWN
    body = [
        text_at(left, top, title, bold=True),
        text_at(left + width, top, last, anchor="end", bold=True),
    ]
    shown = _thin(curve)
    known = np.isfinite(shown.mean)
    if not known.any():
        return [*body, text_at(left + width / 2, top + height / 2, "no steps yet", "m")]
    low, high = float(np.nanmin(shown.low)), float(np.nanmax(shown.high))
    low = min(0.0, low) if from_zero else low
    span = (high - low) or abs(high) or 1.0
    plot_left, first = left + 40, float(shown.step[0])
    steps = max(float(shown.step[-1]) - first, 1.0)
    x = plot_left + (shown.step - first) / steps * (width - 40)
    shown_changes = [
        (plot_left + (step - first) / steps * (width - 40), step, said)
        for step, said in changes
        if first <= step <= first + steps
    ]
    if shown_changes:  # the words of changes are above the curve
        top, height = top + _LABELS_HEIGHT, height - _LABELS_HEIGHT

    def y(values: Floats) -> Floats:
        return top + 8 + (high - values) / span * height

    for tick in (low, low + span / 2, high):
        at = float(y(np.asarray(tick)))
        body.append(f'<path class="g" d="M{plot_left} {at:.1f}h{width - 40:.1f}"/>')
        body.append(text_at(plot_left - 5, at + 4, text.number(tick), "m", anchor="end"))
    # A band without its unknown points; a line that has a gap there.
    edge_x = np.concatenate([x[known], x[known][::-1]])
    edge_y = np.concatenate([y(shown.high)[known], y(shown.low)[known][::-1]])
    body.append(f'<path d="{_path(edge_x, edge_y)}z" fill="{color}" fill-opacity=".2"/>')
    body.append(
        f'<path d="{_path(x, y(shown.mean))}" fill="none" stroke="{color}" stroke-width="1.8"/>'
    )
    body += _marks(shown_changes, plot_left, left + width, top, height)
    bottom = top + height + 24
    body.append(text_at(plot_left, bottom, text.number(first), "m"))
    end = f"step {text.number(float(shown.step[-1]))}"
    return [*body, text_at(left + width, bottom, end, "m", anchor="end")]


def _marks(
    changes: Sequence[tuple[float, int, str]], left: float, right: float, top: float, height: float
) -> list[str]:
    """Draw where workers left or joined, with words if they have room."""
    wide = [len(said) * _LABEL_LETTER for _, _, said in changes]
    marks = list(zip((at for at, _, _ in changes), wide, strict=True))
    places = text.change_places(marks, left, right) if len(changes) <= text.MOST_LABELS else []
    body = []
    for index, (at, step, said) in enumerate(changes):
        body.append(
            f'<path class="l" d="M{at:.1f} {top - 4:.1f}v{height + 12:.1f}" fill="none" '
            f'stroke-opacity=".6" stroke-dasharray="4 2">'
            f"<title>{escape(said)} at step {step}</title></path>"
        )
        begin = places[index] if places else None
        if begin is not None:
            body.append(
                f'<text x="{begin:.1f}" y="{top + 2:.1f}" class="m" font-size="10.5">'
                f"{escape(said)}</text>"
            )
    return body


def _path(x: Floats, y: Floats) -> str:
    pieces, pen = [], False
    for a, b in zip(x.tolist(), y.tolist(), strict=True):
        if b != b:
            pen = False
            continue
        pieces.append(f"{'L' if pen else 'M'}{a:.1f} {b:.1f}")
        pen = True
    return "".join(pieces)


def _timeline(snapshot: Snapshot, y: float) -> tuple[list[str], float]:
    line = snapshot.timeline
    body = [text_at(MARGIN, y, "What each worker did", bold=True)]
    if not len(line.step):
        return body, y + 24
    starts, parts = line.start_s[-_VISIBLE_STEPS:], np.nan_to_num(line.parts_s[-_VISIBLE_STEPS:])
    begin = float(np.nanmin(starts))
    end = float(np.nanmax(starts + parts.sum(axis=2)))
    scale = (WIDTH - MARGIN - GUTTER) / max(end - begin, 1e-9)
    length = text.duration(end - begin)
    words = f"steps {line.step[-len(starts)]:.0f} to {line.step[-1]:.0f} · {length}"
    words += text.left_out(snapshot, _VISIBLE_STEPS)
    body.append(text_at(WIDTH - MARGIN, y, words, "m", anchor="end"))
    y += 8
    for rank, worker in enumerate(snapshot.workers):
        body.append(label(worker, y, snapshot.slow_rank))
        body += _row_boxes(starts[:, rank], parts[:, rank], begin, scale, y)
        y += ROW + GAP
    return body, y + 18


def _row_boxes(
    starts: Floats, parts: NDArray[np.float64], begin: float, scale: float, y: float
) -> list[str]:
    boxes = []
    for start, lengths in zip(starts.tolist(), parts.tolist(), strict=True):
        if start != start:
            continue
        x = GUTTER + (start - begin) * scale
        boxes.append(f'<path class="g" d="M{x:.1f} {y - 1:.1f}v{ROW + 2}"/>')
        for part, length in zip(PARTS, lengths, strict=True):
            if length > 0:
                boxes.append(box(x, y, length * scale, part))
                x += length * scale
    return boxes


def _shares(snapshot: Snapshot, y: float) -> tuple[list[str], float]:
    right = WIDTH - MARGIN
    body = [
        text_at(MARGIN, y, "Where the time went", bold=True),
        text_at(right - _POTENTIAL_RIGHT, y, "potential", "m", anchor="end"),
        text_at(right, y, "median wait", "m", anchor="end"),
    ]
    width = right - GUTTER - 180
    y += 8
    for worker in snapshot.workers:
        body.append(label(worker, y, snapshot.slow_rank))
        x = float(GUTTER)
        for part, share in zip(PARTS, worker.share, strict=True):
            if share > 0:
                body.append(box(x, y, share * width, part))
                body += say_percent(x, y, share, share * width)
                x += share * width
        potential = f"{text.number(worker.potential_per_s)}/s"
        body.append(text_at(right - _POTENTIAL_RIGHT, y + ROW - 6, potential, anchor="end"))
        body.append(text_at(right, y + ROW - 6, text.milliseconds(worker.wait_ms), anchor="end"))
        y += ROW + GAP
    return [*body, *_legend(y)], y + 30


def _legend(y: float) -> list[str]:
    body, x = [], float(GUTTER)
    for part, name in PHASE_NAMES.items():
        fill = "url(#wb-hatch)" if part == HATCHED else phase_colors()[part]
        body.append(f'<rect x="{x:.1f}" y="{y + 4:.1f}" width="14" height="10" fill="{fill}"/>')
        body.append(text_at(x + 20, y + 13, name))
        x += 110
    return body


def _more(snapshot: Snapshot, y: float) -> tuple[list[str], float]:
    """Draw all curves besides loss and throughput, three in a row."""
    body: list[str] = []
    curves = snapshot.more
    width, height = 263, 64
    for index, (name, curve) in enumerate(curves.items()):
        left, top = MARGIN + index % 3 * (width + 20), y + 14 + index // 3 * (height + 48)
        body += _chart(name, curve, left, top, series(index + 3), False, width, height)
    return body, y + -(-len(curves) // 3) * (height + 48) + 6


WIDTH, MARGIN, GUTTER = 860, 14, 110
ROW, GAP = 20, 4

_LETTERS = 115
"""How many letters of 12 points fit the width at least; pages have different fonts."""
_BOLD_LETTERS = 103


def text_at(
    x: float, y: float, words: str, kind: str = "i", *, anchor: str = "start", bold: bool = False
) -> str:
    """Return a line of words."""
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}"{weight}>'
        f"{escape(words)}</text>"
    )


def lines(parts: Sequence[str], *, bold: bool = False) -> list[str]:
    """Return parts with dots between them, in lines that fit; they break at a dot if possible."""
    most, found = _BOLD_LETTERS if bold else _LETTERS, list[str]()
    for part in parts:
        longer = f"{found[-1]} · {part}" if found else ""
        if longer and len(longer) <= most:
            found[-1] = longer
        else:
            found += textwrap.wrap(part, most) or [part]
    return found


def label(worker: Worker, y: float, slow_rank: int | None) -> str:
    """Return the label of a worker's row."""
    slow = worker.rank == slow_rank
    return text_at(MARGIN, y + ROW - 6, text.worker_label(worker), "w" if slow else "i", bold=slow)


def box(x: float, y: float, width: float, part: str) -> str:
    """Return the box of one of `record.PARTS`."""
    fill = "url(#wb-hatch)" if part == HATCHED else phase_colors()[part]
    return f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}" fill="{fill}"/>'


def say_percent(x: float, y: float, share: float, width: float) -> list[str]:
    """Return a share on a plate in the middle of its box, if the box is wide enough."""
    if width < 34:
        return []
    middle = x + width / 2
    plate = [f'<rect class="p" x="{middle - 17:.1f}" y="{y + 3:.1f}" width="34" height="14"/>']
    words = text_at(middle, y + ROW - 6, text.percent(share), anchor="middle", bold=True)
    return [*plate, words]


_BAR = WIDTH - MARGIN - GUTTER - 180
_BUBBLE_RIGHT = 96  # the column's right edge, counted from the right margin
_COLUMNS_AT = (MARGIN, 70, 170, 570, 710, WIDTH - MARGIN)
"""Positions of the columns in the stages' table: left edges of words, right edges of numbers."""
_LINE = 17


def pipeline(snapshot: Snapshot, split: Split, y: float) -> tuple[list[str], float]:
    """Return a bar per worker and the stages, and the y below them."""
    body, top = _bubbles(snapshot, split, y + 12)
    table, y = _stages(split, top)
    return [*body, *table], y


def _bubbles(snapshot: Snapshot, split: Split, y: float) -> tuple[list[str], float]:
    right = WIDTH - MARGIN
    body = [
        text_at(MARGIN, y, text.TITLE, bold=True),
        text_at(right - _BUBBLE_RIGHT, y, "bubble", "m", anchor="end"),
        text_at(right, y, "above ideal", "m", anchor="end"),
    ]
    y += 8
    top = y
    for worker in snapshot.workers:
        found = text.bubble(worker, split)
        body.append(label(worker, y, snapshot.slow_rank))
        if found.known:
            x = float(GUTTER)
            for size, part in (
                (found.ideal, HATCHED), (found.excess, ""), (1 - found.whole, BUSY),
            ):  # fmt: skip
                body.append(box(x, y, size * _BAR, part) if part else _full(x, y, size * _BAR))
                body += say_percent(x, y, size, size * _BAR)
                x += size * _BAR
        whole, beyond = found.words
        body.append(text_at(right - _BUBBLE_RIGHT, y + ROW - 6, whole, anchor="end"))
        body.append(text_at(right, y + ROW - 6, beyond, anchor="end"))
        y += ROW + GAP
    at = GUTTER + split.ideal_bubble * _BAR
    body.append(
        f'<path class="l" d="M{at:.1f} {top - 3:.1f}V{y:.1f}" stroke-dasharray="4 3" fill="none"/>'
    )
    return [*body, *_stages_legend(y)], y + 40


def _full(x: float, y: float, width: float) -> str:
    return f'<rect class="w" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{ROW}"/>'


def _stages_legend(y: float) -> list[str]:
    body, x = [], float(GUTTER)
    fills = ("url(#wb-hatch)", phase_colors()[HATCHED], phase_colors()[BUSY])
    for name, fill in zip(text.NAMES, fills, strict=True):
        body.append(f'<rect x="{x:.1f}" y="{y + 4:.1f}" width="14" height="10" fill="{fill}"/>')
        body.append(text_at(x + 20, y + 13, name))
        x += 140
    return body


def _stages(split: Split, y: float) -> tuple[list[str], float]:
    body = [text_at(MARGIN, y, text.caption(split), bold=True)]
    y += 20
    for index, cells in enumerate([text.COLUMNS, *text.rows(split)]):
        for x, name, cell in zip(_COLUMNS_AT, text.COLUMNS, cells, strict=True):
            anchor = "end" if name in text.NUMERIC else "start"
            body.append(text_at(x, y, cell, "m" if index == 0 else "i", anchor=anchor))
        y += _LINE
    return body, y + 12
