"""Who waited for whom, as a matrix: a table, a figure, and text."""

from __future__ import annotations

import html
import math

import numpy as np

from ..history.blame import Blame
from .picture import Canvas, Picture, say
from .table import Column, Table
from .units import UNKNOWN, duration, milliseconds

MARGIN, GUTTER, LEAST_WIDTH, MOST_CELL, LEAST_CELL = 12.0, 64.0, 360.0, 74.0, 36.0


class BlameMatrix(Picture, Blame):
    """Waits of each worker for each other one; see `history.blame.Blame`."""

    def table(self) -> Table:
        """Return the matrix as a table: means of a step, totals beside them."""
        columns = [Column("waited", "left")]
        columns += [Column(f"for worker {rank}") for rank in range(self.ranks)]
        columns += [Column("in all"), Column("per step")]
        rows = [self._cells(rank) for rank in range(self.ranks)]
        return Table(columns, rows, self.sentence(), self.notes())

    def html(self) -> str:
        """Return the figure, and the table to unfold."""
        return (
            f'<div style="max-width:100%">{self.canvas().svg()}<details style="font-size:12px">'
            f"<summary>The same as a table</summary>{self.table().html()}</details></div>"
        )

    def text(self) -> str:
        """Return the table as text."""
        return self.table().text()

    def sentence(self) -> str:
        """Return who is to blame, in one sentence."""
        most = self.most
        if most is None:
            unknown = any(math.isnan(v) for v in self.total_s.ravel())
            return "Waits were not measured." if unknown else "Nobody waited for anybody."
        if self.worst is None:
            return "Nobody stands out: such waits come by chance."
        caused = np.nansum(self.total_s[:, self.worst])
        return f"The others waited {duration(float(caused))} in all for worker {self.worst}."

    def notes(self) -> list[str]:
        """Return which steps were counted."""
        return [f"{self._counted()}. A row waited, a column was waited for; means are per step."]

    def _counted(self) -> str:
        words = f"Counted: {int(self.steps.max(initial=0))} steps"
        if self.first is not None or self.last is not None:
            words += f", {self.first or 0} to {'the end' if self.last is None else self.last}"
        if self.stride > 1:
            words += f"; every {self.stride}th step is stored, and only these are counted"
        return words

    def canvas(self) -> Canvas:
        """Return the matrix as squares, the darker the longer the wait."""
        n = self.ranks
        cell = min(max((LEAST_WIDTH - 2 * MARGIN - GUTTER) / n, LEAST_CELL), MOST_CELL)
        width = max(LEAST_WIDTH, 2 * MARGIN + GUTTER + n * cell)
        body = [say(MARGIN, 20, "Who waited for whom", size=14, bold=True)]
        body.append(say(MARGIN, 37, self.sentence(), "m", size=10.5))
        name = "worker " if cell >= 52 else "w"
        left, top = MARGIN + GUTTER, 62.0
        for rank in range(n):
            at = left + (rank + 0.5) * cell
            body.append(say(at, top - 6, f"{name}{rank}", size=10, anchor="middle"))
        high, row = max([float(v) for v in self.mean_s.ravel() if v == v] or [0.0]), cell * 0.6
        for waiter in range(n):
            body.append(say(MARGIN, top + row * (waiter + 0.5) + 3, f"worker {waiter}", size=10))
            for cause in range(n):
                place = (left + cause * cell, top + waiter * row, cell - 3, row - 3)
                body.append(self._square(waiter, cause, high, place))
        y = top + n * row + 14
        for line in ("Row: who waited. Column: whom for. Mean of a step, ms", self._counted()):
            body.append(say(MARGIN, y, f"{line}.", "m", size=9.5))
            y += 13
        return Canvas(width, y, body, "Who waited for whom", self.text())

    def _square(
        self, waiter: int, cause: int, high: float, place: tuple[float, float, float, float]
    ) -> str:
        x, y, width, height = place
        value = float(self.mean_s[waiter, cause])
        shade = 0.75 * value / high if high > 0 and value == value else 0.0
        words = UNKNOWN if value != value else milliseconds(value * 1e3)
        words = "" if waiter == cause else words
        wide = width >= 46
        hint = f"worker {waiter} for worker {cause}: {words or 'itself'} a step"
        edge = "l" if shade < 0.02 else "k-wait s"
        text = words if wide else words.removesuffix(" ms")
        return (
            f"<g><title>{html.escape(hint)}</title>"
            f'<rect class="k-wait f" fill-opacity="{shade:.2f}" x="{x:.1f}" y="{y:.1f}" '
            f'width="{width:.1f}" height="{height:.1f}" rx="3"/>'
            f'<rect class="{edge}" '
            f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3"/>'
            f"{say(x + width / 2, y + height / 2 + 3.5, text, size=10, anchor='middle')}</g>"
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
