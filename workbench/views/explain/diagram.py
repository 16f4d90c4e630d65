"""The messages of a step, drawn: nodes are side by side, time runs down.

An arrow begins at its sender, when the message leaves, and ends lower at its receiver. Work is a
bar on its node's line. Every arrow carries `data-arrow="PHASE.ARROW"`: its place in
`Diagram.to_wire()`. A measured step is the same diagram with measured bytes and each worker's time.
The functions at the end are called by runs: the step, the blame matrix, and the what-if.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ...catalog.diagrams import KINDS, Arrow, Diagram, Node, Phase, messages
from ...history.analysis import blame as blames
from ...history.analysis import counterfactual
from ...history.analysis import step_picture as steps
from ...shared.record import PARTS
from ..text import UNKNOWN, milliseconds, number, size
from ..theme import PHASE_NAMES, Canvas, Picture, paragraph, svg_text, width_of
from . import blame as blame_view
from .blame import BlameMatrix, WhatIfPicture

if TYPE_CHECKING:
    from ...history.analysis.step_picture import StepPicture, WorkerStep
    from ...history.run_data import RunData

MARGIN, LEAST_WIDTH, LEAST_COLUMN = 12.0, 360.0, 34.0
_HEAD, _BAR, _MESSAGE, _STAIR = 22.0, 16.0, 40.0, 20.0
_DASHES = {
    "gradients": "", "weights": "6 3", "activations": "2 2.5", "average": "9 3 2 3", "work": "1 3",
}  # fmt: skip
Measured = Mapping[tuple[int, int], float]
"""Bytes by (phase, arrow)."""


class DiagramPicture(Picture):
    """A strategy's messages, shown as a figure.

    Attributes:
        data: The diagram.
    """

    def __init__(self, data: Diagram) -> None:
        self.data = data

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data that a browser can animate arrow by arrow."""
        return self.data.to_wire()

    def canvas(self) -> Canvas:
        """Return the drawing."""
        drawing = Drawing(self.data)
        drawing.head(self.data.term)
        drawing.phases()
        drawing.foot()
        return drawing.canvas(lines(self.data))

    def text(self) -> str:
        """Return the phases as lines."""
        return "\n".join(lines(self.data))


class Drawing:
    """A diagram that is being drawn; `y` is where the next band begins.

    Args:
        measured: Measured bytes, shown below the messages; None: only formulas.
    """

    def __init__(self, diagram: Diagram, measured: Measured | None = None) -> None:
        self.diagram, self.measured = diagram, measured
        columns = len(diagram.nodes)
        self.width = max(LEAST_WIDTH, 2 * MARGIN + columns * LEAST_COLUMN)
        self.column = min((self.width - 2 * MARGIN) / columns, 96.0)
        left = (self.width - columns * self.column) / 2
        self.x = {n.id: left + (i + 0.5) * self.column for i, n in enumerate(diagram.nodes)}
        self.body: list[str] = []
        self.y = 20.0

    def head(self, below: str) -> None:
        """Draw the title, the text below it, and the nodes."""
        self.body.append(svg_text(MARGIN, self.y, title(self.diagram), size=14, bold=True))
        self._paragraph(below, self.y + 17)
        self._nodes()

    def foot(self) -> None:
        """Draw the nodes again, the kinds of arrows, and the meaning of the formulas."""
        self._nodes()
        kinds = {a.kind: None for p in self.diagram.phases for a in p.arrows}
        x, self.y = MARGIN, self.y + 8
        for kind in kinds:
            words = KINDS[kind]
            if x > MARGIN and x + 26 + width_of(words, 10) > self.width - MARGIN:
                x, self.y = MARGIN, self.y + 15
            dash = f' stroke-dasharray="{_DASHES[kind]}"' if _DASHES[kind] else ""
            self.body.append(
                f'<path class="k-{kind} s" stroke-width="2" d="M{x:.1f} {self.y - 3:.1f}h20"'
                f"{dash}/>{svg_text(x + 25, self.y, words, size=10)}"
            )
            x += 40 + width_of(words, 10)
        self.y += 16 if kinds else 0
        for words in (*units(self.diagram), *self.diagram.notes, f"Source: {self.diagram.source}."):
            self._paragraph(words, self.y, size=9.5)

    def phases(self) -> None:
        """Draw all phases."""
        for index, phase in enumerate(self.diagram.phases):
            self.phase(index, phase)

    def phase(self, index: int, phase: Phase) -> None:
        """Draw one phase: its caption, its work, its messages."""
        caption = f"{index + 1}  {phase.title}"
        aside = formula(phase)
        self.body.append(svg_text(MARGIN, self.y + 4, caption, bold=True))
        free = self.width - 2 * MARGIN - width_of(caption) * 1.08
        if aside and width_of(aside, 10) > free:
            self.y += 14
        if aside:
            right = self.width - MARGIN
            self.body.append(svg_text(right, self.y + 4, aside, "m", size=10, anchor="end"))
        self._paragraph(phase.text, self.y + 18, size=10)
        if phase.arrows:
            self._messages(index, phase)
        elif phase.busy:
            self._bars(phase)
        self.y += 14

    def canvas(self, text: Sequence[str]) -> Canvas:
        """Return the finished drawing."""
        return Canvas(self.width, self.y + 4, self.body, title(self.diagram), " ".join(text))

    def _paragraph(self, words: str, y: float, size: float = 10.5) -> None:
        body, self.y = paragraph(MARGIN, y, words, self.width - 2 * MARGIN, size=size)
        self.body += body

    def _nodes(self) -> None:
        for node in self.diagram.nodes:
            x, wide = self.x[node.id], min(self.column - 5, 78.0)
            words = node.label if width_of(node.label, 10) < wide - 6 else short(node)
            kind = {"server": " k-weights", "store": " k-weights", "coordinator": " k-work"}
            edge = kind.get(node.kind, "")
            line = "s" if edge else "b"
            self.body.append(
                f'<g><title>{html.escape(hint(node))}</title><rect class="{line}{edge}" '
                f'x="{x - wide / 2:.1f}" y="{self.y:.1f}" width="{wide:.1f}" height="{_HEAD}" '
                f'rx="{11 if edge else 4}" stroke-width="{1.8 if edge else 1}"/>'
                f"{svg_text(x, self.y + 15, words, size=10, anchor='middle')}</g>"
            )
        self.y += _HEAD + 14

    def _line(self, height: float) -> None:
        for x in self.x.values():
            self.body.append(f'<path class="l" d="M{x:.1f} {self.y:.1f}v{height:.1f}"/>')

    def _bars(self, phase: Phase) -> None:
        self.y -= 4
        self._line(_BAR + 6)
        wide = min(self.column - 10, 60.0)
        for name in phase.busy:
            self._bar(name, self.y + 3, wide)
        self.y += _BAR + 10

    def _bar(self, name: str, y: float, wide: float) -> None:
        self.body.append(
            f'<rect class="k-compute f" x="{self.x[name] - wide / 2:.1f}" y="{y:.1f}" '
            f'width="{wide:.1f}" height="{_BAR}" rx="3"/>'
        )

    def _messages(self, index: int, phase: Phase) -> None:
        self.y -= 4
        orders = {(arrow.source, arrow.order) for arrow in phase.arrows}
        orders |= {(arrow.target, arrow.order + 1) for arrow in phase.arrows}
        work = sorted((order, name) for name, order in orders if name in phase.busy)
        begin = _BAR if work else 0.0  # a message leaves when its sender's work is done
        rise = begin + (_STAIR if work else _MESSAGE)
        last = max(arrow.order for arrow in phase.arrows)
        height = rise * (last + 1) + 4 + (begin if work and work[-1][0] > last else 0)
        self._line(height)
        for order, name in work:
            self._bar(name, self.y + 2 + order * rise, min(self.column - 10, 60.0))
        for place, arrow in enumerate(phase.arrows):
            top = self.y + 2 + arrow.order * rise
            self.body.append(self._arrow(f"{index}.{place}", arrow, top + begin, top + rise))
        self.y += height + 2
        if self.measured is not None:
            self._amounts(index, phase)

    def _arrow(self, place: str, arrow: Arrow, top: float, end: float) -> str:
        x, to = self.x[arrow.source], self.x[arrow.target]
        length = math.hypot(to - x, end - top)
        dx, dy = (to - x) / length, (end - top) / length
        back = 6.0
        tip_x, tip_y = to - dx * 1.5, end - dy * 1.5
        base_x, base_y = tip_x - dx * back, tip_y - dy * back
        head = (
            f"M{tip_x:.1f} {tip_y:.1f}L{base_x - dy * 3:.1f} {base_y + dx * 3:.1f}"
            f"L{base_x + dy * 3:.1f} {base_y - dx * 3:.1f}z"
        )
        dash = f' stroke-dasharray="{_DASHES[arrow.kind]}"' if _DASHES[arrow.kind] else ""
        return (
            f'<g class="wb-arrow k-{arrow.kind}" data-arrow="{place}">'
            f"<title>{html.escape(sentence(self.diagram, arrow))}</title>"
            f'<path class="s" stroke-width="1.6"{dash} d="M{x:.1f} {top:.1f}L{base_x:.1f} '
            f'{base_y:.1f}"/><path class="f" d="{head}"/><circle class="f" cx="{x:.1f}" '
            f'cy="{top:.1f}" r="2.2"/></g>'
        )

    def _amounts(self, index: int, phase: Phase) -> None:
        found: dict[str, float] = {}
        for place, arrow in enumerate(phase.arrows):
            amount = (self.measured or {}).get((index, place), math.nan)
            found[arrow.source] = found.get(arrow.source, 0.0) + amount
        small = 9.0 if self.column > 46 else 7.5
        for name, amount in found.items():
            words = size(amount) if math.isfinite(amount) else UNKNOWN
            self.body.append(
                svg_text(self.x[name], self.y + 8, words, size=small, anchor="middle", bold=True)
            )
        self.y += 14


def title(diagram: Diagram) -> str:
    """Return the title of the picture."""
    framework = {"torch": "PyTorch", "tensorflow": "TensorFlow"}[diagram.framework]
    several = "s" if diagram.workers != 1 else ""
    return f"{diagram.strategy} · {framework} · {diagram.workers} worker{several}"


def short(node: Node) -> str:
    """Return a name for narrow columns: `w0`, `d0`, `s0`, `c`."""
    return f"{node.label[0]}{''.join(c for c in node.label if c.isdigit())}"


def hint(node: Node) -> str:
    """Return the node's role and the state that it keeps."""
    return f"{node.label} holds {node.holds}" if node.holds else node.label


def formula(phase: Phase) -> str:
    """Return the size of each node's messages, and how often it sends them."""
    often = f"every {phase.every} steps" if phase.every > 1 else ""
    return ", ".join(part for part in (phase.formula, often) if part)


def units(diagram: Diagram) -> list[str]:
    """Return the meaning of the unknowns; the unknowns of all stages share one line."""
    found, numbered = [], set()
    for name, meaning in diagram.units.items():
        letter, number = name[0], name[1:]
        if not number.isdigit():
            found.append(f"{name}: {meaning}.")
        elif letter not in numbered and letter not in diagram.units:
            one = re.sub(rf"\b(\w+) {number}\b", r"a \1", meaning, count=1)
            found.append(f"{letter}: {one}.")
        numbered.add(letter)
    return found


def sentence(diagram: Diagram, arrow: Arrow) -> str:
    """Return one arrow in words."""
    times = f", {arrow.times} times" if arrow.times > 1 else ""
    ends = f"{diagram.node(arrow.source).label} to {diagram.node(arrow.target).label}"
    return f"{ends}: {KINDS[arrow.kind]}, {arrow.size.text}{times}"


def lines(diagram: Diagram) -> list[str]:
    """Return the diagram as lines of text."""
    found = [title(diagram), f"{diagram.term}", ""]
    for index, phase in enumerate(diagram.phases):
        aside = formula(phase)
        found.append(f"{index + 1}. {phase.title}{f' ({aside})' if aside else ''}: {phase.text}")
        if phase.arrows:
            found.append(f"   {', '.join(_arrows(diagram, phase))}")
    return [*found, "", *units(diagram), *diagram.notes, f"Source: {diagram.source}."]


def _arrows(diagram: Diagram, phase: Phase, most: int = 12) -> list[str]:
    ends = [
        f"{short(diagram.node(a.source))} -> {short(diagram.node(a.target))}" for a in phase.arrows
    ]
    left = len(ends) - most
    return [*ends[:most], f"and {left} more"] if left > 0 else ends


_LEAST_WAIT = 0.05
"""Share of the step from which on a wait's cause is in the headline."""


class StepDrawing(Picture):
    """A step, shown as a figure.

    Attributes:
        data: The step.
    """

    def __init__(self, data: StepPicture) -> None:
        self.data = data

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data that a browser can animate arrow by arrow."""
        return self.data.to_wire()

    def canvas(self) -> Canvas:
        """Return the drawing."""
        step = self.data
        drawing = Drawing(step.diagram, step.arrow_bytes)
        drawing.head(headline(step))
        for index, phase in enumerate(step.diagram.phases):
            drawing.phase(index, phase if phase.happens(step.step) else absent(phase))
        _times(drawing, step)
        drawing.foot()
        return drawing.canvas(self.text().splitlines())

    def text(self) -> str:
        """Return the step as lines: its messages with their bytes, then a line per worker."""
        step = self.data
        found = [f"{title(step.diagram)}: {headline(step)}", ""]
        for p, phase in enumerate(step.diagram.phases):
            shown = phase if phase.happens(step.step) else absent(phase)
            found.append(f"{p + 1}. {shown.title}: {shown.text}")
            for a, arrow in enumerate(shown.arrows):
                ends = f"{step.diagram.node(arrow.source).label} -> "
                ends += step.diagram.node(arrow.target).label
                amount = size(step.arrow_bytes.get((p, a)))
                found.append(f"   {ends}: {amount} ({formula(phase)})")
        return "\n".join([*found, "", *(_line(worker) for worker in step.workers)])


def headline(step: StepPicture) -> str:
    """Return the step's number, its duration, and the worker that the others waited for."""
    longest = max(worker.step_s for worker in step.workers)
    words = [f"step {step.step}" + (f" of {step.run}" if step.run else "")]
    words.append(milliseconds(longest * 1e3))
    blamed = {
        w.blamed for w in step.workers
        if w.blamed is not None and w.blamed != w.rank and _waited_s(w) >= _LEAST_WAIT * longest
    }  # fmt: skip
    if blamed:
        named = "workers" if len(blamed) > 1 else "worker"
        words.append(f"other workers waited for {named} {', '.join(map(str, sorted(blamed)))}")
    return " · ".join(words)


def _waited_s(worker: WorkerStep) -> float:
    return worker.parts_s[PARTS.index("sync_wait_s")]


def absent(phase: Phase) -> Phase:
    """Return a phase that was not part of the step."""
    words = f"This phase takes place every {phase.every} steps, and not in this step."
    return Phase(phase.title, words, every=phase.every)


def _times(drawing: Drawing, step: StepPicture) -> None:
    left, right = MARGIN + 58, drawing.width - MARGIN - 52
    body, y = drawing.body, drawing.y + 6
    body.append(svg_text(MARGIN, y, "What each worker did", bold=True))
    sent = "sent" if any(math.isfinite(w.sent_bytes) for w in step.workers) else ""
    body.append(svg_text(drawing.width - MARGIN, y, sent, "m", size=10, anchor="end"))
    together = step.diagram.together
    end = max((w.start_s if together else 0.0) + w.step_s for w in step.workers)
    scale, y = (right - left) / max(end, 1e-9), y + 9
    for worker in step.workers:
        begin = left + (worker.start_s * scale if together else 0.0)
        base = y + blame_view.ROW - 4
        body.append(svg_text(MARGIN, base, f"worker {worker.rank}", size=10))
        body.append(blame_view.step_boxes(begin, y, worker.parts_s, scale))
        words = size(worker.sent_bytes) if sent else ""
        body.append(svg_text(drawing.width - MARGIN, base, words, size=9.5, anchor="end"))
        y += blame_view.ROW + blame_view.GAP
    body.append(svg_text(left, y + 8, "0", "m", size=9.5))
    body.append(svg_text(right, y + 8, milliseconds(end * 1e3), "m", size=9.5, anchor="end"))
    more, y = blame_view.legend(MARGIN, y + 26, drawing.width - MARGIN)
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


def step_picture(run: RunData, step: int | None) -> StepDrawing:
    """Return what happened in a step, or in the latest one; see `Run.step_picture`."""
    plan = run.plan
    options = dict(plan.options)
    if options.get("allreduce") == "auto":
        options["allreduce"] = steps.chosen_algorithm(run.history.story) or "backend"
    diagram = messages(plan.strategy, len(run.engines), options, framework=plan.framework)
    return StepDrawing(steps.step_picture(run.history, diagram, run=run.name, step=step))


def blame(run: RunData, first: int | None, last: int | None) -> BlameMatrix:
    """Return which worker waited for which; see `Run.blame`."""
    return BlameMatrix(**vars(blames.blame(run.history, first, last)))


def what_if(
    run: RunData, without: int | None, first: int | None, last: int | None
) -> WhatIfPicture:
    """Return the run as it would have been without its straggler; see `Run.what_if`."""
    return WhatIfPicture(**vars(counterfactual.what_if(run.history, without, first, last)))
