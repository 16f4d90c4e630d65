"""What is known of each plan and number of workers: points, curves, and their figures by name.

Speed-up is samples per second over those of one worker; efficiency is speed-up per worker. What was
predicted stands beside what was measured, never in its place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ..rows import SHARES, ComparisonRow, Spread

if TYPE_CHECKING:
    from .laws import Law, Mode

_NAN = float("nan")
BEYOND = (2, 4)
"""So many times the most workers that were run are predicted."""
PREDICTED = "predicted"
"""State of a number of workers that was not run."""


@dataclass(frozen=True)
class Cost:
    """What one epoch costs, or a million samples where an epoch's size is not known.

    Attributes:
        samples: Of the epoch, or 1e6.
        is_epoch: Whether they are one epoch.
    """

    price: float
    low: float
    high: float
    samples: float
    is_epoch: bool


@dataclass(frozen=True)
class Point:
    """One number of workers on a curve.

    Attributes:
        row: Its runs, over their seeds.
        batch: Global batch; NaN where not known.
        speedup, low, high: Over the baseline, with the least and the greatest that the intervals
            of both allow; NaN where nothing was measured.
        missing: Why nothing was measured, in words; empty where something was.
        cost: None where no price was given.
    """

    workers: int
    row: ComparisonRow
    batch: float
    speedup: float
    low: float
    high: float
    missing: str = ""
    cost: Cost | None = None

    @property
    def measured(self) -> bool:
        """Whether there is a speed-up."""
        return math.isfinite(self.speedup)


@dataclass(frozen=True)
class PredictedPoint:
    """One number of workers as it was predicted.

    Attributes:
        samples_per_s, low_per_s, high_per_s: Median, and the ends of the interval that holds 90 %
            of such runs.
        speedup, low, high: The same over the baseline's rate as it was measured.
        far: Whether it lies beyond what the runs can tell of.
    """

    workers: int
    samples_per_s: float
    low_per_s: float
    high_per_s: float
    speedup: float
    low: float
    high: float
    far: bool = False


@dataclass(frozen=True)
class Predicted:
    """What the rest of a curve was expected to be, predicted from its fewest workers.

    Attributes:
        run, workers: What it was predicted from: a run's name, and its number of workers.
        points: By number of workers, all of them more than that; none where nothing is predicted.
        why_not: Why nothing is, in a sentence; empty where something is.
        notes: What was assumed.
    """

    run: str
    workers: int
    points: tuple[PredictedPoint, ...] = ()
    why_not: str = ""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Curve:
    """One plan with several numbers of workers.

    Attributes:
        name: The strategy, with what tells it from other curves.
        points: By number of workers; those that are not measured too, and the baseline where the
            plan was not run with so many workers itself.
        baseline: What speed-ups are over.
        law: Of its kind of scaling.
        color: Number of its colour.
        predicted: None where nobody asked for it.
    """

    name: str
    mode: Mode
    points: tuple[Point, ...]
    baseline: Point
    law: Law
    color: int
    predicted: Predicted | None = None

    @property
    def base(self) -> ComparisonRow:
        """The runs that speed-ups are over."""
        return self.baseline.row

    @property
    def known(self) -> tuple[Point, ...]:
        """The points that were measured."""
        return tuple(point for point in self.points if point.measured)

    @property
    def ahead(self) -> tuple[PredictedPoint, ...]:
        """The points that were predicted."""
        return self.predicted.points if self.predicted is not None else ()

    def expected(self, workers: int) -> PredictedPoint | None:
        """Return what so many workers were predicted to gain; None where nothing was."""
        return next((point for point in self.ahead if point.workers == workers), None)


@dataclass(frozen=True)
class Scaling:
    """Curves over the numbers of workers.

    Attributes:
        verdict: Whether to distribute, and what is gained, in one or two sentences.
        distribute: Whether something is gained beyond doubt; None where that is not known.
        notes: What is missing, relative, or to be known beside the figures.
        price: Of a worker-hour; None where not given.
        one_worker: Whether speed-ups are over one worker; else over the least number there is.
    """

    curves: tuple[Curve, ...]
    verdict: str
    distribute: bool | None
    notes: tuple[str, ...] = ()
    price: float | None = None
    one_worker: bool = True

    @property
    def workers(self) -> tuple[int, ...]:
        """All numbers of workers, least first."""
        return tuple(sorted({point.workers for curve in self.curves for point in curve.points}))

    @property
    def least(self) -> int:
        """The number of workers of the baseline."""
        return self.curves[0].base.workers

    @property
    def beyond(self) -> tuple[int, ...]:
        """Numbers of workers to predict beyond those that were run: twice and four times the most.

        An axis of doublings has them all; what was measured keeps at least half of it.
        """
        least, most = self.workers[0], self.workers[-1]
        return tuple(times * most for times in BEYOND if times * least <= most)

    @property
    def axis(self) -> tuple[int, ...]:
        """All numbers of workers that were run or predicted, least first."""
        ahead = {point.workers for curve in self.curves for point in curve.ahead}
        return tuple(sorted({*self.workers, *ahead}))

    def to_wire(self) -> dict[str, Any]:
        """Return everything as plain JSON data; what was not measured is null."""
        return _wire(self)


Value = str | int | float | None


@dataclass(frozen=True)
class Field:
    """One figure of a point: its key with the unit, and its value."""

    key: str
    value: Callable[[Curve, Point], Value] = field(repr=False)


FIELDS: tuple[Field, ...] = (
    Field("curve", lambda curve, point: plan_of(curve, point)),
    Field("strategy", lambda curve, point: point.row.strategy),
    Field("framework", lambda curve, point: point.row.framework),
    Field("scaling", lambda curve, point: curve.mode),
    Field("workers", lambda curve, point: point.workers),
    Field("batch", lambda curve, point: _known(point.batch)),
    Field("state", lambda curve, point: point.row.state),
    Field("seeds", lambda curve, point: " ".join(map(str, point.row.seeds))),
    Field("steps", lambda curve, point: point.row.steps if point.row.names else None),
    Field("samples_per_s", lambda curve, point: _known(point.row.samples_per_s.mean)),
    Field("samples_per_s_low", lambda curve, point: _known(point.row.samples_per_s.low)),
    Field("samples_per_s_high", lambda curve, point: _known(point.row.samples_per_s.high)),
    Field("base_workers", lambda curve, point: curve.base.workers),
    Field("speedup", lambda curve, point: _known(point.speedup)),
    Field("speedup_low", lambda curve, point: _known(point.low)),
    Field("speedup_high", lambda curve, point: _known(point.high)),
    Field("efficiency", lambda curve, point: _known(efficiency(curve, point)[0])),
    Field("efficiency_low", lambda curve, point: _known(efficiency(curve, point)[1])),
    Field("efficiency_high", lambda curve, point: _known(efficiency(curve, point)[2])),
    Field("step_s", lambda curve, point: _known(point.row.step_s)),
    *(
        Field(
            f"{part.removesuffix('_s')}_share",
            lambda curve, point, part=part: _known(point.row.shares.get(part)),  # type: ignore[misc]
        )
        for part in SHARES
    ),
    Field("cost", lambda curve, point: _known(point.cost and point.cost.price)),
    Field("cost_low", lambda curve, point: _known(point.cost and point.cost.low)),
    Field("cost_high", lambda curve, point: _known(point.cost and point.cost.high)),
    Field("cost_samples", lambda curve, point: _known(point.cost and point.cost.samples)),
    Field("law", lambda curve, point: curve.law.name if curve.law.fits else None),
    Field("serial_share", lambda curve, point: _law(curve, curve.law.serial)),
    Field("serial_share_low", lambda curve, point: _law(curve, curve.law.low)),
    Field("serial_share_high", lambda curve, point: _law(curve, curve.law.high)),
    *(
        Field(
            f"predicted_{key}",
            lambda curve, point, name=name: _expected(curve, point, name),  # type: ignore[misc]
        )
        for key, name in (
            ("samples_per_s", "samples_per_s"),
            ("samples_per_s_low", "low_per_s"),
            ("samples_per_s_high", "high_per_s"),
            ("speedup", "speedup"),
            ("speedup_low", "low"),
            ("speedup_high", "high"),
        )
    ),
    Field("predicted_from", lambda curve, point: _predicted_from(curve, point)),
)
"""The figures of a point, in the order of export."""


def efficiency(curve: Curve, point: Point | PredictedPoint) -> tuple[float, float, float]:
    """Return speed-up per worker, over the baseline's: mean, and the ends of its interval."""
    per = curve.base.workers / point.workers
    return point.speedup * per, point.low * per, point.high * per


def records(scaling: Scaling) -> list[dict[str, Value]]:
    """Return the figures of each point by key."""
    return [
        {one.key: one.value(curve, point) for one in FIELDS} for curve, point in lines_of(scaling)
    ]


def lines_of(scaling: Scaling) -> list[tuple[Curve, Point]]:
    """Return `rows_of`, each curve followed by the numbers of workers that were only predicted."""
    found = _yardsticks(scaling)
    for curve in scaling.curves:
        run = {point.workers for point in curve.points}
        found += _own(curve)
        found += [(curve, _not_run(curve, one)) for one in curve.ahead if one.workers not in run]
    return found


def _not_run(curve: Curve, ahead: PredictedPoint) -> Point:
    """Return a point of which nothing was measured, so that lines of both kinds are alike."""
    last = curve.points[-1]
    each = last.batch if curve.mode == "strong" else last.batch / last.workers * ahead.workers
    row = replace(
        last.row, name="", names=(), states=(PREDICTED,), seeds=(), workers=ahead.workers,
        samples_per_s=Spread(_NAN, count=0), step_s=_NAN, shares={},
    )  # fmt: skip
    return Point(ahead.workers, row, each, _NAN, _NAN, _NAN)


def rows_of(scaling: Scaling) -> list[tuple[Curve, Point]]:
    """Return each curve's points; a baseline that is another strategy's comes first, and once."""
    return _yardsticks(scaling) + [one for curve in scaling.curves for one in _own(curve)]


def _yardsticks(scaling: Scaling) -> list[tuple[Curve, Point]]:
    found: list[tuple[Curve, Point]] = []
    for curve in scaling.curves:
        if is_other(curve) and all(curve.base is not point.row for _, point in found):
            found.append((curve, curve.baseline))
    return found


def _own(curve: Curve) -> list[tuple[Curve, Point]]:
    other = is_other(curve)
    return [(curve, p) for p in curve.points if not (other and p.row is curve.base)]


def is_other(curve: Curve) -> bool:
    """Whether a curve is held against another strategy's runs."""
    return curve.base.strategy != curve.points[-1].row.strategy


def plan_of(curve: Curve, point: Point) -> str:
    """Return the curve's name, or that of the baseline where it is another strategy's."""
    if not (is_other(curve) and point.row is curve.base):
        return curve.name
    own = curve.name.removeprefix(curve.points[-1].row.strategy)
    # Curves of other recipes are named as their runs are, and each has a baseline of its own.
    return curve.base.strategy + own if own.startswith("-") else curve.base.strategy


def _expected(curve: Curve, point: Point, name: str) -> float | None:
    found = curve.expected(point.workers)
    return None if found is None else _known(getattr(found, name))


def _predicted_from(curve: Curve, point: Point) -> str | None:
    known = curve.expected(point.workers) is not None
    return curve.predicted.run if known and curve.predicted is not None else None


def _law(curve: Curve, value: float) -> float | None:
    return _known(value) if curve.law.fits else None


def _known(value: Any) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.9g}")


def _wire(scaling: Scaling) -> dict[str, Any]:
    return {
        "verdict": scaling.verdict,
        "distribute": scaling.distribute,
        "notes": list(scaling.notes),
        "workers": list(scaling.workers),
        "axis": list(scaling.axis),
        "one_worker": scaling.one_worker,
        "price": scaling.price,
        "rows": [
            {one.key: one.value(curve, point) for one in FIELDS} | {"missing": point.missing}
            for curve, point in lines_of(scaling)
        ],
        "curves": [
            {
                "name": curve.name,
                "color": curve.color,
                "mode": curve.mode,
                "base": {"strategy": curve.base.strategy, "workers": curve.base.workers},
                "law": {
                    "name": curve.law.name,
                    "serial": _law(curve, curve.law.serial),
                    "low": _law(curve, curve.law.low),
                    "high": _law(curve, curve.law.high),
                    "scale": _law(curve, curve.law.scale),
                    "why_not": curve.law.why_not,
                },
                "points": [
                    {one.key: one.value(curve, point) for one in FIELDS}
                    | {"missing": point.missing}
                    for point in curve.points
                ],
                "predicted": _predicted_wire(curve),
            }
            for curve in scaling.curves
        ],
    }


def _predicted_wire(curve: Curve) -> dict[str, Any] | None:
    found = curve.predicted
    if found is None:
        return None
    return {
        "run": found.run,
        "workers": found.workers,
        "why_not": found.why_not,
        "notes": list(found.notes),
        "points": [
            {
                "workers": one.workers,
                "samples_per_s": _known(one.samples_per_s),
                "samples_per_s_low": _known(one.low_per_s),
                "samples_per_s_high": _known(one.high_per_s),
                "speedup": _known(one.speedup),
                "speedup_low": _known(one.low),
                "speedup_high": _known(one.high),
                "far": one.far,
            }
            for one in found.points
        ],
    }
