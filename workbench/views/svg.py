"""The dashboard as one SVG string, for notebooks that cannot load widgets.

The same layout as the widget, without scripts and without matplotlib: a frame costs a few
milliseconds. It follows the page's dark mode through `prefers-color-scheme`.
"""

from __future__ import annotations

from html import escape

import numpy as np
from numpy.typing import NDArray

from ..history.snapshot import Curve, Floats, Snapshot
from ..metrics import PARTS
from . import text, units
from .svg_parts import GAP, GUTTER, MARGIN, ROW, WIDTH, box, label, lines, say, say_percent
from .svg_pipeline import pipeline
from .theme import GRID, HATCHED, INK, MUTED, PAPER, PHASE_NAMES, phase_colors, run_color, series

_CHART_WIDTH, _CHART_HEIGHT = 405, 130
_VISIBLE_STEPS = 12
_CURVE_POINTS = 240
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
        body += _chart(title, curve, left, y, color, from_zero)
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
        body.append(say(MARGIN, y + 18 * index, line, bold=True))
    y += 18 * len(body) + 2
    for line in lines(found):
        body.append(say(MARGIN, y, line))
        y += 18
    y -= 2
    slow = text.slow(snapshot)
    for said in (snapshot.banner, slow, text.dropped(snapshot), *snapshot.notes):
        named = bool(slow) and said == slow
        for line in (
            line for one in said.splitlines() for line in lines([one.strip()], bold=named)
        ):
            body.append(say(MARGIN, y + 4, line, "w" if named else "m", bold=named))
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
) -> list[str]:
    last = units.number(float(curve.mean[-1])) if len(curve) else units.UNKNOWN
    body = [
        say(left, top, title, bold=True),
        say(left + width, top, last, anchor="end", bold=True),
    ]
    shown = _thin(curve)
    known = np.isfinite(shown.mean)
    if not known.any():
        return [*body, say(left + width / 2, top + height / 2, "no steps yet", "m")]
    low, high = float(np.nanmin(shown.low)), float(np.nanmax(shown.high))
    low = min(0.0, low) if from_zero else low
    span = (high - low) or abs(high) or 1.0
    plot_left, first = left + 40, float(shown.step[0])
    steps = max(float(shown.step[-1]) - first, 1.0)
    x = plot_left + (shown.step - first) / steps * (width - 40)

    def y(values: Floats) -> Floats:
        return top + 8 + (high - values) / span * height

    for tick in (low, low + span / 2, high):
        at = float(y(np.asarray(tick)))
        body.append(f'<path class="g" d="M{plot_left} {at:.1f}h{width - 40:.1f}"/>')
        body.append(say(plot_left - 5, at + 4, units.number(tick), "m", anchor="end"))
    # A band without its unknown points; a line that breaks at them.
    edge_x = np.concatenate([x[known], x[known][::-1]])
    edge_y = np.concatenate([y(shown.high)[known], y(shown.low)[known][::-1]])
    body.append(f'<path d="{_path(edge_x, edge_y)}z" fill="{color}" fill-opacity=".2"/>')
    body.append(
        f'<path d="{_path(x, y(shown.mean))}" fill="none" stroke="{color}" stroke-width="1.8"/>'
    )
    bottom = top + height + 24
    body.append(say(plot_left, bottom, units.number(first), "m"))
    end = f"step {units.number(float(shown.step[-1]))}"
    return [*body, say(left + width, bottom, end, "m", anchor="end")]


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
    body = [say(MARGIN, y, "What each worker did", bold=True)]
    if not len(line.step):
        return body, y + 24
    starts, parts = line.start_s[-_VISIBLE_STEPS:], np.nan_to_num(line.parts_s[-_VISIBLE_STEPS:])
    begin = float(np.nanmin(starts))
    end = float(np.nanmax(starts + parts.sum(axis=2)))
    scale = (WIDTH - MARGIN - GUTTER) / max(end - begin, 1e-9)
    length = units.duration(end - begin)
    words = f"steps {line.step[-len(starts)]:.0f} to {line.step[-1]:.0f} · {length}"
    words += text.left_out(snapshot, _VISIBLE_STEPS)
    body.append(say(WIDTH - MARGIN, y, words, "m", anchor="end"))
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
        say(MARGIN, y, "Where the time went", bold=True),
        say(right - _POTENTIAL_RIGHT, y, "potential", "m", anchor="end"),
        say(right, y, "median wait", "m", anchor="end"),
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
        potential = f"{units.number(worker.potential_per_s)}/s"
        body.append(say(right - _POTENTIAL_RIGHT, y + ROW - 6, potential, anchor="end"))
        body.append(say(right, y + ROW - 6, units.milliseconds(worker.wait_ms), anchor="end"))
        y += ROW + GAP
    return [*body, *_legend(y)], y + 30


def _legend(y: float) -> list[str]:
    body, x = [], float(GUTTER)
    for part, name in PHASE_NAMES.items():
        fill = "url(#wb-hatch)" if part == HATCHED else phase_colors()[part]
        body.append(f'<rect x="{x:.1f}" y="{y + 4:.1f}" width="14" height="10" fill="{fill}"/>')
        body.append(say(x + 20, y + 13, name))
        x += 110
    return body


def _more(snapshot: Snapshot, y: float) -> tuple[list[str], float]:
    """Draw the strategy's and the user's own curves, three in a row."""
    body: list[str] = []
    curves = {**snapshot.extra, **snapshot.logged}
    width, height = 263, 64
    for index, (name, curve) in enumerate(curves.items()):
        left, top = MARGIN + index % 3 * (width + 20), y + 14 + index // 3 * (height + 48)
        body += _chart(name, curve, left, top, series(index + 3), False, width, height)
    return body, y + -(-len(curves) // 3) * (height + 48) + 6
