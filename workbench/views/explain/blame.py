"""Which worker waited for which, as a matrix, and a run next to its ghost: tables, figures, text.

The ghost has the same steps without the straggler. Workers' time is drawn as rows of boxes: one row
per worker, one box per part of a step.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ...history.analysis.blame import Blame
from ...history.analysis.counterfactual import Lanes, WhatIf
from ...shared.record import PARTS
from ..table import Column, Table
from ..text import UNKNOWN, duration, milliseconds, number
from ..theme import PHASE_NAMES, Canvas, Picture, paragraph, svg_text, width_of

MARGIN, GUTTER, LEAST_WIDTH, MOST_CELL, LEAST_CELL = 12.0, 64.0, 360.0, 74.0, 36.0


class BlameMatrix(Picture, Blame):
    """Waits of each worker for each other worker; see `history.blame.Blame`."""

    def table(self) -> Table:
        """Return the matrix as a table: means of a step, and totals next to them."""
        columns = [Column("waited", "left")]
        columns += [Column(f"for worker {rank}") for rank in range(self.ranks)]
        columns += [Column("total"), Column("per step")]
        rows = [self._cells(rank) for rank in range(self.ranks)]
        return Table(columns, rows, self.sentence(), self.notes())

    def html(self) -> str:
        """Return the figure, and a folded table."""
        return (
            f'<div style="max-width:100%">{self.canvas().svg()}<details style="font-size:12px">'
            f"<summary>This figure as a table</summary>{self.table().html()}</details></div>"
        )

    def text(self) -> str:
        """Return the table as text."""
        return self.table().text()

    def sentence(self) -> str:
        """Return which worker is to blame, in one sentence."""
        most = self.most
        if most is None:
            unknown = any(math.isnan(v) for v in self.total_s.ravel())
            return "Waits were not measured." if unknown else "No worker waited for another."
        if self.worst is None:
            return "No single worker is clearly the cause of these waits."
        caused = np.nansum(self.total_s[:, self.worst])
        waited = duration(float(caused))
        return f"The other workers waited {waited} in total for worker {self.worst}."

    def notes(self) -> list[str]:
        """Return which steps were counted."""
        return [
            f"{self._counted()}. Rows: waiting workers. Columns: the workers that caused the "
            'waits. The values in the column "total" are sums. All other values are means per step.'
        ]

    def _counted(self) -> str:
        kind = "stored steps" if self.stride > 1 else "steps"
        words = f"Counted: {int(self.steps.max(initial=0))} {kind}"
        if self.first is not None or self.last is not None:
            last = "the end" if self.last is None else f"step {self.last}"
            words += f", from step {self.first or 0} to {last}"
        if self.stride > 1:
            words += f" (one of every {self.stride} steps is stored)"
        return words

    def canvas(self) -> Canvas:
        """Return the matrix as squares: a longer wait is darker."""
        n = self.ranks
        cell = min(max((LEAST_WIDTH - 2 * MARGIN - GUTTER) / n, LEAST_CELL), MOST_CELL)
        width = max(LEAST_WIDTH, 2 * MARGIN + GUTTER + n * cell)
        body = [svg_text(MARGIN, 20, "Who waited for whom", size=14, bold=True)]
        body.append(svg_text(MARGIN, 37, self.sentence(), "m", size=10.5))
        name = "worker " if cell >= 52 else "w"
        left, top = MARGIN + GUTTER, 62.0
        for rank in range(n):
            at = left + (rank + 0.5) * cell
            body.append(svg_text(at, top - 6, f"{name}{rank}", size=10, anchor="middle"))
        high, row = max([float(v) for v in self.mean_s.ravel() if v == v] or [0.0]), cell * 0.6
        for waiter in range(n):
            body.append(
                svg_text(MARGIN, top + row * (waiter + 0.5) + 3, f"worker {waiter}", size=10)
            )
            for cause in range(n):
                place = (left + cause * cell, top + waiter * row, cell - 3, row - 3)
                body.append(self._square(waiter, cause, high, place))
        y = top + n * row + 14
        rows = "Row: the waiting worker. Column: the worker that caused the wait"
        for line in (rows, "Mean per step, in ms", self._counted()):
            body.append(svg_text(MARGIN, y, f"{line}.", "m", size=9.5))
            y += 13
        return Canvas(width, y, body, "Who waited for whom", self.text())

    def _square(
        self, waiter: int, cause: int, high: float, place: tuple[float, float, float, float]
    ) -> str:
        x, y, width, height = place
        value = float(self.mean_s[waiter, cause])
        shade = 0.75 * value / high if high > 0 and value == value else 0.0
        words = UNKNOWN if value != value else milliseconds(value * 1e3)
        known = "not measured" if value != value else f"{words} per step"
        hint = f"worker {waiter} waits for worker {cause}: {known}"
        if waiter == cause:
            words, hint = "", f"worker {waiter} does not wait for itself"
        wide = width >= 46
        edge = "l" if shade < 0.02 else "k-wait s"
        text = words if wide else words.removesuffix(" ms")
        return (
            f"<g><title>{html.escape(hint)}</title>"
            f'<rect class="k-wait f" fill-opacity="{shade:.2f}" x="{x:.1f}" y="{y:.1f}" '
            f'width="{width:.1f}" height="{height:.1f}" rx="3"/>'
            f'<rect class="{edge}" '
            f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"/>'
            f"{svg_text(x + width / 2, y + height / 2 + 3.5, text, size=10, anchor='middle')}</g>"
        )

    def _cells(self, waiter: int) -> list[str]:
        mean, total = self.mean_s[waiter], self.total_s[waiter]
        cells = [
            "" if cause == waiter else _time(float(mean[cause])) for cause in range(self.ranks)
        ]
        whole = float(total.sum())
        return [
            f"worker {waiter}", *cells, duration(whole) if whole == whole else UNKNOWN,
            _time(float(mean.sum())),
        ]  # fmt: skip


def _time(seconds: float) -> str:
    return UNKNOWN if seconds != seconds else milliseconds(seconds * 1e3)


WHAT_IF_MARGIN, LEFT, WIDTH = 12.0, 66.0, 360.0
MODELS = {
    "synchronous": "the estimate assumes that the other workers never wait for worker {worker}. So "
    "in each step, the exchange of tensors begins when the last of the other workers is ready",
    "pipeline": "the busiest worker decides how long a step takes. Time saved per step = busy time "
    "of worker {worker} − longest busy time among the other workers. If this "
    "difference is negative, no time is saved. If worker {worker} were faster, the pipeline "
    "would also fill and drain in less time. The estimate leaves out this effect, so the real gain "
    "would be larger",
    "asynchronous": "a step of worker {worker} would take as long as the median step of the other "
    "workers",
}


class WhatIfPicture(Picture, WhatIf):
    """The run as it was and as it would have been; see `counterfactual.WhatIf`."""

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data: mean steps, throughputs, both timelines."""
        return WhatIf.to_wire(self)

    def sentences(self) -> list[str]:
        """Return the result in words."""
        was, would = (milliseconds(s.mean() * 1e3) for s in (self.step_s, self.without_s))
        return [
            f"If worker {self.without} were as fast as the median of the other workers, the mean "
            f"time of a step would be {would} instead of {was}.",
            f"The throughput would be {number(self.without_per_s)} instead of "
            f"{number(self.samples_per_s)} samples/s ({self.speedup:.2f}x). "
            f"{len(self.step)} steps together would take {duration(self.saved_s)} less time.",
        ]

    def _estimate(self) -> str:
        return f"Estimate ({self.model}): {MODELS[self.model].format(worker=self.without)}."

    def text(self) -> str:
        """Return the result and the model behind it."""
        found = [*self.sentences(), self._estimate()]
        if self.stride > 1:
            found.append(
                f"Only one of every {self.stride} steps is stored and used in this estimate."
            )
        for name, shown in (("measured", self.real), ("recomputed", self.ghost)):
            took = "took" if shown is self.real else "would take"
            found.append(f"{name}: the latest {len(shown.step)} steps {took} {_length(shown)}")
        return "\n".join(found)

    def canvas(self) -> Canvas:
        """Return both timelines on one scale, the recomputed one below."""
        body = [
            svg_text(
                WHAT_IF_MARGIN,
                20,
                f"What if worker {self.without} were as fast as the others",
                size=14,
                bold=True,
            )
        ]
        y = 38.0
        for line in self.sentences():
            more, y = paragraph(WHAT_IF_MARGIN, y, line, WIDTH - 2 * WHAT_IF_MARGIN)
            body += more
        scale = (WIDTH - LEFT - WHAT_IF_MARGIN) / max(self.real.length_s, self.ghost.length_s, 1e-9)
        for name, shown in (("Measured", self.real), ("Recomputed", self.ghost)):
            more, y = self._lanes(name, shown, y + 8, scale)
            body += more
        more, y = legend(WHAT_IF_MARGIN, y + 12, WIDTH - WHAT_IF_MARGIN)
        body += more
        more, y = paragraph(
            WHAT_IF_MARGIN,
            y + 2,
            self._estimate(),
            WIDTH - 2 * WHAT_IF_MARGIN,
            size=9.5,
        )
        return Canvas(
            WIDTH,
            y,
            [*body, *more],
            f"What if worker {self.without} were as fast as the others",
            self.text(),
        )

    def _lanes(self, name: str, shown: Lanes, y: float, scale: float) -> tuple[list[str], float]:
        words = f"{len(shown.step)} steps in {_length(shown)}"
        body = [svg_text(WHAT_IF_MARGIN, y + 6, name, bold=True)]
        body.append(svg_text(WIDTH - WHAT_IF_MARGIN, y + 6, words, "m", size=10, anchor="end"))
        y += 13
        top, height = y, shown.start_s.shape[1] * (ROW + GAP)
        for rank in range(shown.start_s.shape[1]):
            mark = rank == self.without
            label = svg_text(WHAT_IF_MARGIN, y + ROW - 4, f"worker {rank}", size=10, bold=mark)
            body.append(label)
            for start, parts in zip(shown.start_s[:, rank], shown.parts_s[:, rank], strict=True):
                if start == start:
                    x = LEFT + float(start) * scale
                    body.append(step_boxes(x, y, parts.tolist(), scale))
            y += ROW + GAP
        if shown.length_s == shown.length_s:
            x = LEFT + shown.length_s * scale
            body.append(f'<path class="l" d="M{x:.1f} {top - 2:.1f}v{height:.1f}"/>')
        return body, y


def _length(shown: Lanes) -> str:
    return duration(shown.length_s) if shown.length_s == shown.length_s else UNKNOWN


ROW, GAP = 16.0, 5.0
_CLASSES = dict(zip(PARTS, ("data", "compute", "wait", "weights", "other"), strict=True))


def box(x: float, y: float, width: float, part: str, *, height: float = ROW) -> str:
    """Return the box of one of `record.PARTS`; waiting is hatched."""
    if part == "sync_wait_s":
        return (
            f'<rect class="k-wait s" stroke-width=".7" style="fill:url(#HATCH)" x="{x:.1f}" '
            f'y="{y:.1f}" width="{width:.2f}" height="{height:g}"/>'
        )
    return (
        f'<rect class="k-{_CLASSES[part]} f" x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" '
        f'height="{height:g}"/>'
    )


def step_boxes(x: float, y: float, parts_s: Sequence[float], scale: float) -> str:
    """Return a step's boxes from x on; parts that are NaN or 0 have none.

    Args:
        scale: Units of the drawing per second.
    """
    found, words = [], []
    for part, seconds in zip(PARTS, parts_s, strict=True):
        if seconds > 0:
            found.append(box(x, y, seconds * scale, part))
            x += seconds * scale
        words.append(f"{PHASE_NAMES[part]} {milliseconds(seconds * 1e3)}")
    return f"<g><title>{html.escape(', '.join(words))}</title>{''.join(found)}</g>"


def legend(x: float, y: float, right: float) -> tuple[list[str], float]:
    """Return the meanings of the boxes, in as many lines as needed, and the y below."""
    body, left = [], x
    for part, name in PHASE_NAMES.items():
        wide = 17 + width_of(name, 10)
        if x > left and x + wide > right:
            x, y = left, y + 15
        body += [box(x, y - 8, 11, part, height=9), svg_text(x + 15, y, name, size=10)]
        x += wide + 11
    return body, y + 15
