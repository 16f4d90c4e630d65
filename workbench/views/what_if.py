"""A run beside its ghost: the same steps without the straggler."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..history.ghost import Lanes
from ..history.what_if import WhatIf
from . import lanes
from .picture import Canvas, Picture, paragraph, say
from .units import UNKNOWN, duration, milliseconds, number

MARGIN, LEFT, WIDTH = 12.0, 66.0, 360.0
MODELS = {
    "synchronous": "each step ends when the last of the others was ready",
    "pipeline": "the busiest of the other stages sets the pace; understated, as filling stays",
    "asynchronous": "the worker is given the median rate of the others",
}


class WhatIfPicture(Picture, WhatIf):
    """The run as it was and as it would have been; see `history.what_if.WhatIf`."""

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data: medians, throughputs, both timelines."""
        return WhatIf.to_wire(self)

    def sentences(self) -> list[str]:
        """Return the result in words."""
        was, would = np.median(self.step_s) * 1e3, np.median(self.without_s) * 1e3
        shorter = f"a step would take {milliseconds(would)} instead of {milliseconds(was)} (median)"
        return [
            f"With worker {self.without} as fast as the median of the others {shorter}.",
            f"Throughput {number(self.without_per_s)} instead of {number(self.samples_per_s)} "
            f"samples/s, {self.speedup:.2f}x; {duration(self.saved_s)} saved in "
            f"{len(self.step)} steps.",
        ]

    def text(self) -> str:
        """Return the result and the model behind it."""
        found = [*self.sentences(), f"Model: {self.model}: {MODELS[self.model]}."]
        if self.stride > 1:
            found.append(f"Every {self.stride}th step is stored; these were recomputed.")
        for name, shown in (("as it was", self.real), ("the ghost", self.ghost)):
            found.append(f"{name}: the latest {len(shown.step)} steps in {_length(shown)}")
        return "\n".join(found)

    def canvas(self) -> Canvas:
        """Return both timelines on one scale, the ghost below."""
        body = [say(MARGIN, 20, f"What if: without worker {self.without}", size=14, bold=True)]
        y = 38.0
        for line in self.sentences():
            more, y = paragraph(MARGIN, y, line, WIDTH - 2 * MARGIN)
            body += more
        scale = (WIDTH - LEFT - MARGIN) / max(self.real.length_s, self.ghost.length_s, 1e-9)
        for name, shown in (("As it was", self.real), ("The ghost", self.ghost)):
            more, y = self._lanes(name, shown, y + 8, scale)
            body += more
        more, y = lanes.legend(MARGIN, y + 12, WIDTH - MARGIN)
        body += more
        more, y = paragraph(
            MARGIN,
            y + 2,
            f"Model: {self.model}: {MODELS[self.model]}.",
            WIDTH - 2 * MARGIN,
            size=9.5,
        )
        return Canvas(WIDTH, y, [*body, *more], f"Without worker {self.without}", self.text())

    def _lanes(self, name: str, shown: Lanes, y: float, scale: float) -> tuple[list[str], float]:
        words = f"{len(shown.step)} steps in {_length(shown)}"
        body = [say(MARGIN, y + 6, name, bold=True)]
        body.append(say(WIDTH - MARGIN, y + 6, words, "m", size=10, anchor="end"))
        y += 13
        top, height = y, shown.start_s.shape[1] * (lanes.ROW + lanes.GAP)
        for rank in range(shown.start_s.shape[1]):
            mark = rank == self.without
            label = say(MARGIN, y + lanes.ROW - 4, f"worker {rank}", size=10, bold=mark)
            body.append(label)
            for start, parts in zip(shown.start_s[:, rank], shown.parts_s[:, rank], strict=True):
                if start == start:
                    x = LEFT + float(start) * scale
                    body.append(lanes.step_boxes(x, y, parts.tolist(), scale))
            y += lanes.ROW + lanes.GAP
        if shown.length_s == shown.length_s:
            x = LEFT + shown.length_s * scale
            body.append(f'<path class="l" d="M{x:.1f} {top - 2:.1f}v{height:.1f}"/>')
        return body, y


def _length(shown: Lanes) -> str:
    return duration(shown.length_s) if shown.length_s == shown.length_s else UNKNOWN
