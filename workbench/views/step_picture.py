"""One step as it was: the strategy's diagram with measured bytes, and each worker's time."""

from __future__ import annotations

import math
from typing import Any

from ..catalog.messages import Phase
from ..history.step_picture import StepPicture, WorkerStep
from ..metrics import PARTS
from . import diagram, lanes
from .picture import Canvas, Picture, say
from .theme import PHASE_NAMES
from .units import UNKNOWN, milliseconds, number, size

_LEAST_WAIT = 0.05
"""Share of the step that a wait must take for its cause to stand in the headline."""


class StepDrawing(Picture):
    """A step, shown as a figure.

    Attributes:
        data: What is drawn.
    """

    def __init__(self, data: StepPicture) -> None:
        self.data = data

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data that a browser can animate arrow by arrow."""
        return self.data.to_wire()

    def canvas(self) -> Canvas:
        """Return the drawing."""
        step = self.data
        drawing = diagram.Drawing(step.diagram, step.arrow_bytes)
        drawing.head(headline(step))
        for index, phase in enumerate(step.diagram.phases):
            drawing.phase(index, phase if phase.happens(step.step) else absent(phase))
        _times(drawing, step)
        drawing.foot()
        return drawing.canvas(self.text().splitlines())

    def text(self) -> str:
        """Return the step as lines: its messages with their bytes, then a line per worker."""
        step = self.data
        found = [f"{diagram.title(step.diagram)}: {headline(step)}", ""]
        for p, phase in enumerate(step.diagram.phases):
            shown = phase if phase.happens(step.step) else absent(phase)
            found.append(f"{p + 1}. {shown.title}: {shown.text}")
            for a, arrow in enumerate(shown.arrows):
                ends = f"{step.diagram.node(arrow.source).label} -> "
                ends += step.diagram.node(arrow.target).label
                amount = size(step.arrow_bytes.get((p, a)))
                found.append(f"   {ends}: {amount} ({diagram.formula(phase)})")
        return "\n".join([*found, "", *(_line(worker) for worker in step.workers)])


def headline(step: StepPicture) -> str:
    """Return which step it is, how long it took, and who was waited for."""
    longest = max(worker.step_s for worker in step.workers)
    words = [f"step {step.step}" + (f" of {step.run}" if step.run else "")]
    words.append(milliseconds(longest * 1e3))
    blamed = {
        w.blamed for w in step.workers
        if w.blamed is not None and w.blamed != w.rank and _waited_s(w) >= _LEAST_WAIT * longest
    }  # fmt: skip
    if blamed:
        words.append(f"waited for worker {', '.join(map(str, sorted(blamed)))}")
    return " · ".join(words)


def _waited_s(worker: WorkerStep) -> float:
    return worker.parts_s[PARTS.index("sync_wait_s")]


def absent(phase: Phase) -> Phase:
    """Return a phase that was not part of the step."""
    return Phase(phase.title, f"Not part of this step: it comes every {phase.every} steps.",
                 every=phase.every)  # fmt: skip


def _times(drawing: diagram.Drawing, step: StepPicture) -> None:
    left, right = diagram.MARGIN + 58, drawing.width - diagram.MARGIN - 52
    body, y = drawing.body, drawing.y + 6
    body.append(say(diagram.MARGIN, y, "What each worker did", bold=True))
    sent = "sent" if any(math.isfinite(w.sent_bytes) for w in step.workers) else ""
    body.append(say(drawing.width - diagram.MARGIN, y, sent, "m", size=10, anchor="end"))
    together = step.diagram.together
    end = max((w.start_s if together else 0.0) + w.step_s for w in step.workers)
    scale, y = (right - left) / max(end, 1e-9), y + 9
    for worker in step.workers:
        begin = left + (worker.start_s * scale if together else 0.0)
        base = y + lanes.ROW - 4
        body.append(say(diagram.MARGIN, base, f"worker {worker.rank}", size=10))
        body.append(lanes.step_boxes(begin, y, worker.parts_s, scale))
        words = size(worker.sent_bytes) if sent else ""
        body.append(say(drawing.width - diagram.MARGIN, base, words, size=9.5, anchor="end"))
        y += lanes.ROW + lanes.GAP
    body.append(say(left, y + 8, "0", "m", size=9.5))
    body.append(say(right, y + 8, milliseconds(end * 1e3), "m", size=9.5, anchor="end"))
    more, y = lanes.legend(diagram.MARGIN, y + 26, drawing.width - diagram.MARGIN)
    body += more
    drawing.y = y + 2


def _line(worker: WorkerStep) -> str:
    parts = ", ".join(
        f"{PHASE_NAMES[part]} {milliseconds(seconds * 1e3)}"
        for part, seconds in zip(PARTS, worker.parts_s, strict=True)
    )
    words = f"worker {worker.rank}: step {milliseconds(worker.step_s * 1e3)}: {parts}; "
    words += f"sent {size(worker.sent_bytes)}"
    if math.isfinite(worker.staleness):
        words += f"; staleness {number(worker.staleness)}"
    return words + f"; loss {number(worker.loss) if math.isfinite(worker.loss) else UNKNOWN}"
