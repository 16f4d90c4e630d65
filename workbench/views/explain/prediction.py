"""A prediction, what-ifs and the choice of a strategy as figure, table and words.

The figure has one axis of workers and one of samples per second, both in doublings. Rings on dashes
are predicted points, with a band as their interval. Dots are measured runs. The shaded part is
beyond the range that the runs can predict.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ... import catalog
from ...prediction import predict as predicting
from ...prediction import variants as changing
from ...prediction.choose import Choice, Row
from ...prediction.model import CAUSES
from ...prediction.predict import Prediction
from ...prediction.variants import Ranking
from ..table import Column, Table
from ..text import milliseconds, number, percent, size
from ..theme import Canvas, Picture, paragraph, svg_text, width_of

if TYPE_CHECKING:
    from ...history.run_data import RunData
    from ...prediction.predict import Measured

MARGIN, LEFT, WIDTH, PLOT = 12.0, 52.0, 380.0, 170.0
RIGHT, RING = WIDTH - MARGIN, 5.0
_SAID = ("a worker's own work", "waiting for other workers", "sending and receiving messages")
"""`CAUSES` in a sentence."""


class PredictionPicture(Picture, Prediction):
    """A prediction that displays itself; see `prediction.predict.Prediction`."""

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for NaN."""
        return Prediction.to_wire(self)

    def beside(self, *runs: RunData) -> PredictionPicture:
        """Return the same prediction with later measured runs, as dots next to the dashes.

        Raises:
            PlanError: A run has another strategy.
            RunError: A run has too few steps.
        """
        return PredictionPicture(**vars(predicting.beside(self, runs)))

    def sentence(self) -> str:
        """Return the prediction for the most workers in words."""
        last = self.points[-1]
        middle, low, high = last.samples_per_s
        many = f"{last.workers} worker" + ("s" if last.workers > 1 else "")
        words = f"With {many}, {self.strategy} would reach {number(middle)} samples/s"
        words += f" ({number(low)} to {number(high)}); a step would take {_time(last.step_s[0])}"
        most = max(range(len(CAUSES)), key=lambda k: last.share[k])
        part = f"{_SAID[most]} ({percent(last.share[most])})"
        return f"{words}. The largest part of this step would be {part}."

    def table(self) -> Table:
        """Return a row per number of workers."""
        columns = [Column("workers"), Column("step"), Column("90 % of runs"), Column("samples/s"),
                   Column("90 % of runs"), *(Column(cause) for cause in CAUSES),
                   Column("", "left")]  # fmt: skip
        rows = [
            [str(m.workers), _time(m.step_s), "", number(m.samples_per_s), "", "", "", "",
             f"measured: {m.run}{self._held(m)}"]
            for m in self.measured
        ]  # fmt: skip
        for p in self.points:
            rates, steps = p.samples_per_s, p.step_s
            rows.append(
                [str(p.workers), _time(steps[0]), f"{_time(steps[1])} to {_time(steps[2])}",
                 number(rates[0]), f"{number(rates[1])} to {number(rates[2])}",
                 *(percent(share) for share in p.share),
                 "predicted, less certain" if p.far else "predicted"]
            )  # fmt: skip
        notes = [
            f"Link: {self.link}. {_SCALING[self.scaling]} The prediction is for runs of "
            f"{self.steps} steps."
        ]
        return Table(columns, rows, self.sentence(), [*notes, *self.notes])

    def _held(self, measured: Measured) -> str:
        """Return in words whether the interval contains a run that the prediction did not use."""
        at = [p for p in self.points if p.workers == measured.workers]
        if not _alike(self, measured):
            return ", with a different batch size"
        if measured.run in self.runs or not at:
            return ""
        inside = at[0].step_s[1] <= measured.step_s <= at[0].step_s[2]
        off = at[0].step_s[0] / measured.step_s - 1
        where = "inside" if inside else "outside"
        much = percent(abs(off))
        how = (
            "the predicted and the measured step time differ by less than 1 %"
            if much == percent(0)
            else f"the predicted step time is {much} {'shorter' if off < 0 else 'longer'} than the "
            "measured step time"
        )
        return f", step time {where} the predicted interval; {how}"

    def text(self) -> str:
        """Return the table as text."""
        return self.table().text()

    def html(self) -> str:
        """Return the figure and the table; text that both contain appears once."""
        table = replace(self.table(), title="").html()
        return f'<div style="max-width:100%">{self._drawn(notes=False).svg()}{table}</div>'

    def canvas(self) -> Canvas:
        """Return the figure."""
        return self._drawn()

    def _drawn(self, *, notes: bool = True) -> Canvas:
        body = [svg_text(MARGIN, 20, "Predicted", size=14, bold=True)]
        more, y = paragraph(MARGIN, 38, self.sentence(), WIDTH - 2 * MARGIN)
        body += more
        top = y + 20
        plot = _Plot(self, top)
        body += [*plot.shade(), *plot.grid(), *plot.band(), *plot.line(), *plot.dots()]
        y = top + PLOT + 46
        legend = "Circles: predicted. Band: should contain 90 % of runs. Dots: measured."
        if not all(_alike(self, m) for m in self.measured):
            legend += " Faint dots: measured with a different batch size than the predictions."
        if any(p.far for p in self.points):
            legend += " Shaded area: less certain, because too few workers or steps were measured."
        more, y = paragraph(MARGIN, y, legend, WIDTH - 2 * MARGIN, size=9.5)
        body += more
        for note in self.notes if notes else ():
            more, y = paragraph(MARGIN, y + 3, note, WIDTH - 2 * MARGIN, size=9.5)
            body += more
        return Canvas(WIDTH, y + 4, body, "Predicted samples per second", self.text())


def _alike(shown: Prediction, measured: Measured) -> bool:
    """Whether a run had the predicted batch for its number of workers; otherwise it is faint."""
    first = shown.points[0]
    grows = shown.scaling == "weak" and catalog.lookup(shown.strategy, "torch").data_parallel
    per = measured.workers / first.workers if grows else 1.0
    return not abs(measured.batch / per - first.batch) > 0.01 * first.batch


_SCALING = {
    "strong": "The global batch is the same for every number of workers.",
    "weak": "Each worker's share of a batch stays the same, so the global batch grows with the "
    "number of workers.",
}


def _time(seconds: float) -> str:
    return milliseconds(seconds * 1e3) if seconds < 10 else f"{seconds:.1f} s"


class _Plot:
    """The axes of a prediction's figure."""

    def __init__(self, shown: Prediction, top: float) -> None:
        self.shown, self.top = shown, top
        counts = [p.workers for p in shown.points] + [m.workers for m in shown.measured]
        rates = [v for p in shown.points for v in p.samples_per_s]
        rates += [m.samples_per_s for m in shown.measured]
        self.x0, self.x1 = math.log2(min(counts)), math.log2(max(counts))
        self.y0, self.y1 = math.log2(min(rates)), math.log2(max(rates))
        if self.x1 - self.x0 < 1:
            self.x0, self.x1 = self.x0 - 0.5, self.x1 + 0.5
        gap = max(0.25, 0.06 * (self.y1 - self.y0))
        self.y0, self.y1 = self.y0 - gap, self.y1 + gap

    def at(self, workers: float, rate: float) -> tuple[float, float]:
        """Return the position of a point."""
        right = RIGHT - 14
        x = LEFT + (math.log2(workers) - self.x0) / (self.x1 - self.x0) * (right - LEFT)
        y = self.top + PLOT * (self.y1 - math.log2(rate)) / (self.y1 - self.y0)
        return x, y

    def grid(self) -> list[str]:
        """Return the axes with their numbers."""
        foot = self.top + PLOT
        found = [f'<path class="l" d="M{LEFT - 6} {self.top:.1f}V{foot:.1f}H{RIGHT}"/>']
        found.append(svg_text(MARGIN, self.top - 7, "samples/s", "m", size=9.5))
        middle = (LEFT + RIGHT) / 2
        found.append(svg_text(middle, foot + 28, "workers", "m", size=9.5, anchor="middle"))
        counts = {p.workers for p in self.shown.points} | {m.workers for m in self.shown.measured}
        last = -1e9
        for count in sorted(counts):
            x, _ = self.at(count, 2**self.y0)
            if x - last > 22:
                found.append(svg_text(x, foot + 14, str(count), size=10, anchor="middle"))
                last = x
        for rate in _round(2**self.y0, 2**self.y1):
            y = self.at(2**self.x0, rate)[1]
            found.append(svg_text(LEFT - 10, y + 3, number(rate), "m", size=9.5, anchor="end"))
            found.append(
                f'<path class="l" stroke-dasharray="1 4" d="M{LEFT - 6} {y:.1f}H{RIGHT}"/>'
            )
        return found

    def shade(self) -> list[str]:
        """Return a shade where points are beyond the range that the runs can predict."""
        far = [p.workers for p in self.shown.points if p.far]
        near = [p.workers for p in self.shown.points if not p.far]
        near += [m.workers for m in self.shown.measured]
        near = [count for count in near if far and count < min(far)]
        if not far:
            return []
        edge = math.sqrt(min(far) * max(near)) if near else 2**self.x0
        x = self.at(edge, 2**self.y0)[0]
        return [f'<rect fill="currentColor" fill-opacity=".07" x="{x:.1f}" y="{self.top:.1f}" '
                f'width="{RIGHT - x:.1f}" height="{PLOT}"/>']  # fmt: skip

    def band(self) -> list[str]:
        """Return the interval; for a single point a vertical stroke."""
        points = self.shown.points
        if len(points) == 1:
            (x, a), (_, b) = (
                self.at(points[0].workers, points[0].samples_per_s[k]) for k in (1, 2)
            )
            return [f'<path class="k-compute s" stroke-width="5" stroke-opacity=".3" '
                    f'd="M{x:.1f} {a:.1f}V{b:.1f}"/>']  # fmt: skip
        low = [self.at(p.workers, p.samples_per_s[1]) for p in points]
        high = [self.at(p.workers, p.samples_per_s[2]) for p in reversed(points)]
        return [f'<path class="k-compute f" fill-opacity=".18" d="M{_path([*low, *high])}z"/>']

    def line(self) -> list[str]:
        """Return the medians, joined by dashes."""
        places = [self.at(p.workers, p.samples_per_s[0]) for p in self.shown.points]
        found = [
            f'<path class="k-compute s" stroke-width="1.6" stroke-dasharray="5 3" d="M{piece}"/>'
            for piece in (_between(*ends) for ends in itertools.pairwise(places)) if piece
        ]  # fmt: skip
        for point, (x, y) in zip(self.shown.points, places, strict=True):
            middle, low, high = (number(rate) for rate in point.samples_per_s)
            hint = f"{point.workers} workers: {middle} samples/s ({low} to {high})"
            found.append(
                f'<g><title>{hint}</title><circle class="k-compute s" '
                f'stroke-width="1.6" cx="{x:.1f}" cy="{y:.1f}" r="{RING}"/></g>'
            )
        return found

    def dots(self) -> list[str]:
        """Return dots for the measured runs."""
        found = []
        for m in self.shown.measured:
            x, y = self.at(m.workers, m.samples_per_s)
            hint = f"measured, {m.workers} workers: {number(m.samples_per_s)}"
            faint = "" if _alike(self.shown, m) else ' fill-opacity=".45"'
            found.append(
                f'<g><title>{hint}</title><circle class="k-weights f"{faint} cx="{x:.1f}" '
                f'cy="{y:.1f}" r="3"/></g>'
            )
        return found


def _between(one: tuple[float, float], other: tuple[float, float]) -> str:
    """Return a line from ring to ring; empty if the rings touch."""
    (x, y), (to_x, to_y) = one, other
    length = math.hypot(to_x - x, to_y - y)
    if length <= 2 * RING:
        return ""
    dx, dy = RING * (to_x - x) / length, RING * (to_y - y) / length
    return _path([(x + dx, y + dy), (to_x - dx, to_y - dy)])


def _round(low: float, high: float) -> list[float]:
    """Return a few round numbers between two positive ones; evenly spread if none is round."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 5, 7)):
        found = [step * 10.0**power for power in powers for step in steps]
        found = [value for value in found if low <= value <= high]
        if len(found) > 2:
            return found[:: math.ceil(len(found) / 5)]
    return [low * (high / low) ** ((k + 0.5) / 4) for k in range(4)]


def _path(places: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in places)


class RankingPicture(Picture, Ranking):
    """Changes to a run, best first; see `prediction.variants.Ranking`."""

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data."""
        return Ranking.to_wire(self)

    def sentence(self) -> str:
        """Return the best change in words."""
        best = self.variants[0]
        if best.speedup[0] < 1.005:
            return "None of these changes would make the run faster."
        low, high = best.speedup[1:]
        return (
            f"With {best.text} a step would take {_time(best.step_s[0])} instead of "
            f"{_time(self.step_s)}. The throughput would be {best.speedup[0]:.2f} times as "
            f"high. In 90 % of runs with this change, the throughput would be {low:.2f} to "
            f"{high:.2f} times as high."
        )

    def table(self) -> Table:
        """Return a row per change, best first."""
        columns = [Column("change", "left", 44), Column("step"), Column("90 % of runs"),
                   Column("samples/s"), Column("speed-up"),
                   *(Column(cause) for cause in CAUSES)]  # fmt: skip
        rows = [["no change", _time(self.step_s), "", number(self.samples_per_s), "1.00x",
                 *(percent(share) for share in self.share)]]  # fmt: skip
        rows += [
            [v.text, _time(v.step_s[0]), f"{_time(v.step_s[1])} to {_time(v.step_s[2])}",
             number(v.samples_per_s), f"{v.speedup[0]:.2f}x",
             *(percent(share) for share in v.share)]
            for v in self.variants
        ]  # fmt: skip
        return Table(columns, rows, self.sentence(), self.notes)

    def text(self) -> str:
        """Return the table as text."""
        return self.table().text()

    def html(self) -> str:
        """Return the figure and the table; text that both contain appears once."""
        table = replace(self.table(), title="").html()
        return f'<div style="max-width:100%">{self.canvas().svg()}{table}</div>'

    def canvas(self) -> Canvas:
        """Return each step as a bar of its causes, the best change first."""
        body = [svg_text(MARGIN, 20, "What if", size=14, bold=True)]
        more, y = paragraph(MARGIN, 38, self.sentence(), WIDTH - 2 * MARGIN)
        body += more
        rows = [("no change", self.step_s, self.share, "")]
        rows += [
            (v.text, v.step_s[0], v.share, f", speed-up {v.speedup[0]:.2f}x") for v in self.variants
        ]
        scale = (WIDTH - 2 * MARGIN - 146) / max(step_s for _, step_s, _, _ in rows)
        for words, step_s, share, gained in rows:
            y += 6
            body.append(svg_text(MARGIN, y + 6, words, size=10))
            x = MARGIN
            for part, kind in zip(share, ("compute", "wait", "weights"), strict=True):
                width = part * step_s * scale
                body.append(f'<rect class="k-{kind} f" x="{x:.1f}" y="{y + 10:.1f}" '
                            f'width="{width:.2f}" height="11"/>')  # fmt: skip
                x += width
            body.append(svg_text(x + 5, y + 19, _time(step_s) + gained, size=10))
            y += 24
        x, y = MARGIN, y + 14
        for cause, kind in zip(CAUSES, ("compute", "wait", "weights"), strict=True):
            body.append(f'<rect class="k-{kind} f" x="{x:.1f}" y="{y - 8}" width="9" height="9"/>')
            body.append(svg_text(x + 13, y, cause, "m", size=9.5))
            x += 30 + width_of(cause, 9.5)
        return Canvas(WIDTH, y + 12, body, "What if", self.text())


class ChoicePicture(Picture, Choice):
    """Strategies for a cell, fastest first; see `prediction.choose.Choice`."""

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for NaN."""
        return Choice.to_wire(self)

    def table(self) -> Table:
        """Return a row per strategy, fastest first."""
        columns = [Column("strategy", "left"), Column("workers"), Column("samples/s"),
                   Column("interval"), Column("step"), Column("memory/worker"),
                   Column("basis of this rate", "left", 60)]  # fmt: skip
        rows = [
            [row.candidate.name, str(row.candidate.workers), _best(row), _interval(row),
             _time(row.step_s) if row.step_s == row.step_s else "",
             size(row.memory_bytes) if row.memory_bytes == row.memory_bytes else "", row.why]
            for row in self.rows
        ]  # fmt: skip
        strong = frozenset(k for k, row in enumerate(self.rows) if row is self.winner)
        return Table(columns, rows, self._title(), self._notes(), strong)

    def _title(self) -> str:
        return f"Chosen: {self.reason}"

    def _notes(self) -> list[str]:
        known = self.seconds == self.seconds
        spent = ""
        if known:
            spent = f"The short runs took {_time(self.seconds)} in total. "
        text = (
            'The column "interval" shows a 95 % interval for measured rates, and a 90 % interval '
            "for predicted rates."
        )
        return [f"{spent}{text}", *self.notes]

    def text(self) -> str:
        """Return the table as text."""
        return self.table().text()

    def html(self) -> str:
        """Return the figure, and a folded table."""
        return (
            f'<div style="max-width:100%">{self.canvas().svg()}<details style="font-size:12px">'
            f"<summary>All figures</summary>{self.table().html()}</details></div>"
        )

    def canvas(self) -> Canvas:
        """Return a line per strategy: dots for measured values, rings for predictions."""
        wide = WIDTH + 140
        body = [svg_text(MARGIN, 20, "Which strategy?", size=14, bold=True)]
        more, y = paragraph(MARGIN, 38, self.reason, wide - 2 * MARGIN)
        body += more
        shown = [row for row in self.rows if row.known != "out"]
        out = [row for row in self.rows if row.known == "out"]
        most = max((row.samples_per_s[2] for row in shown), default=1.0)
        left, right = MARGIN + 176, wide - MARGIN - 58
        scale = (right - left) / most
        y += 4
        for row in shown:
            middle, low, high = (left + scale * rate for rate in row.samples_per_s)
            y += 20
            name = row.candidate.name
            body.append(svg_text(left - 8, y + 4, name if len(name) < 28 else f"{name[:27]}…",
                                 size=10.5, anchor="end", bold=row is self.winner))  # fmt: skip
            body.append(f'<path class="l" stroke-dasharray="1 4" d="M{left} {y}H{right:.1f}"/>')
            body.append(
                f"<g><title>{name}: {row.why}</title>{_mark(row, middle, low, high, y)}</g>"
            )
            body.append(svg_text(right + 8, y + 4, _best(row), "m" * (row.known == "bounded"),
                                 size=10))  # fmt: skip
        y += 26
        legend = "Samples per second. Dots: measured. Circles: predicted. Coloured bars: "
        legend += "intervals. Grey bars: upper bounds."
        more, y = paragraph(MARGIN, y, legend, wide - 2 * MARGIN, size=9.5)
        body += more
        if out:
            said = "; ".join(f"{row.candidate.name}: {row.why}" for row in out)
            more, y = paragraph(MARGIN, y + 3, f"Left out: {said}.", wide - 2 * MARGIN, size=9.5)
            body += more
        return Canvas(wide, y + 2, body, "Which strategy?", self.text())


def _best(row: Row) -> str:
    if row.known == "out":
        return ""
    if row.known == "bounded":
        return f"≤ {number(row.samples_per_s[2])}"
    return number(row.samples_per_s[0])


def _interval(row: Row) -> str:
    if row.known not in ("measured", "predicted"):
        return ""
    return f"{number(row.samples_per_s[1])} to {number(row.samples_per_s[2])}"


def _mark(row: Row, middle: float, low: float, high: float, y: float) -> str:
    """Return the mark of a rate on its line."""
    if row.known == "bounded":
        return (
            f'<path class="l" stroke-width="4" d="M{low:.1f} {y}H{high:.1f}"/>'
            f'<path class="l" stroke-width="1.4" d="M{high:.1f} {y - 5}V{y + 5}"/>'
        )
    line = (
        f'<path class="k-compute s" stroke-width="5" stroke-opacity=".3" '
        f'd="M{low:.1f} {y}H{high:.1f}"/>'
    )
    kind = "k-weights f" if row.known == "measured" else "k-compute s"
    return f'{line}<circle class="{kind}" stroke-width="1.6" cx="{middle:.1f}" cy="{y}" r="3.6"/>'


def predict(
    runs: RunData | Sequence[RunData], workers: int | Sequence[int], **given: Any
) -> PredictionPicture:
    """Return a prediction for other numbers of workers, from one or more short runs.

    Args:
        runs: The run to predict, or a list whose first run is the run to predict. More runs make
            the prediction better. A run with another batch size shows how a worker's computation
            depends on its number of samples. A run with other messages shows the fixed cost of a
            message, which does not depend on its bytes.
        workers: One number of workers, or several numbers.
        given: `link="100Gbit"` and `latency="20us"` replace the measured values. Without a latency,
            a message keeps its measured (or simulated) fixed cost. `strategy=` and `options={...}`
            replace the strategy and options of the run. `scaling="weak"` keeps the number of
            samples per worker constant; `scaling="strong"` keeps the batch constant.
            `batch_size=` and `steps=` are those of the predicted run. `per_host=` is the number of
            workers on a host. Give `gradient_bytes=` if the first run sent no messages.

    Raises:
        PlanError: The requested run is impossible, or it cannot be predicted.
        RunError: The runs do not contain enough measurements.
    """
    many = [runs] if hasattr(runs, "history") else list(runs)
    return PredictionPicture(**vars(predicting.predict(many, workers, **given)))  # type: ignore[arg-type]


def what_if(
    run: RunData, variants: Sequence[Mapping[str, Any]] | None, changes: Mapping[str, Any]
) -> RankingPicture:
    """Return the effect of changes on a run; see `Run.what_if`."""
    asked = dict(changes)
    beside = asked.pop("beside", ())
    every = list(variants) if variants is not None else [asked]
    others = [beside] if hasattr(beside, "history") else list(beside)
    return RankingPicture(**vars(changing.rank(run, every, others)))
