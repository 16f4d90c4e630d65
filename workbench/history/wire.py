"""A comparison as plain JSON, small enough to be sent to a browser in one message."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np

from . import fields
from .thinning import thinned

if TYPE_CHECKING:
    from .comparison import Comparison, NamedCurve
    from .rows import ComparisonRow, Spread

MOST_POINTS = 300
"""Most points of a curve."""

ALL_POINTS = 3600
"""Most points of all curves together: about 45 bytes each."""

_LEAST_POINTS = 16
_MOST_WORKERS = 64


def pack(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison as JSON-ready data; what was not measured is null.

    The keys: `verdict`, `outlook`, `notes`, `rates`, `baseline` (an index into `rows`),
    `has_one_device`, `metrics`; `rows`: every figure of `fields.fields` by its key, and `names`,
    `color` (its number), `spread` (name -> the values by seed), `memory_bytes` (by worker),
    `staleness` (counts of pushes by staleness in updates), `breaks_even` (see `payoff.Payoff`);
    `curves`: `run`, `row` (index), and arrays `step`, `t_s`, `samples`, `loss`, and where a point
    stands for several steps `low` and `high`. One set of points serves all three axes: they grow
    together.
    """
    curves = comparison.curves
    points = min(MOST_POINTS, max(ALL_POINTS // max(len(curves), 1), _LEAST_POINTS))
    plain = fields.records(comparison.rows, comparison.metrics)
    names = [row.name for row in comparison.rows]
    return {
        "verdict": comparison.verdict,
        "outlook": comparison.outlook,
        "notes": list(comparison.notes),
        "rates": comparison.rates,
        "baseline": names.index(comparison.baseline),
        "has_one_device": comparison.has_one_device,
        "metrics": list(comparison.metrics),
        "rows": [
            {**{key: _value(value) for key, value in one.items()}, **_more(row)}
            for one, row in zip(plain, comparison.rows, strict=True)
        ],
        "curves": [_curve(named, points) for named in curves],
    }


def _more(row: ComparisonRow) -> dict[str, Any]:
    late, breaks_even = row.staleness, row.payoff
    spread: dict[str, Spread] = {
        "samples_per_s": row.samples_per_s,
        "final_loss": row.final_loss,
        **{f"eval_{name}": value for name, value in row.evals.items()},
    }
    return {
        "names": list(row.names),
        "color": row.color,
        "spread": {name: _numbers(one.values) for name, one in spread.items()},
        "memory_bytes": _numbers(row.memory_bytes[:_MOST_WORKERS]),
        "staleness": None if late is None else list(late.counts),
        "breaks_even": None
        if breaks_even is None
        else {key: _value(value) for key, value in asdict(breaks_even).items()},
    }


def _curve(named: NamedCurve, points: int) -> dict[str, Any]:
    curve = thinned(named.curve, points)
    arrays = {name: _numbers(getattr(curve, name)) for name in ("step", "t_s", "samples", "loss")}
    if not (np.array_equal(curve.low, curve.loss) and np.array_equal(curve.high, curve.loss)):
        arrays |= {"low": _numbers(curve.low, 4), "high": _numbers(curve.high, 4)}
    return {"run": named.name, "row": named.row, **arrays}


def _numbers(values: Sequence[float] | Any, digits: int = 6) -> list[float | int | None]:
    return [_number(float(value), digits) for value in values]


def _value(value: Any) -> Any:
    return _number(value, 9) if isinstance(value, float) else value


def _number(value: float, digits: int) -> float | int | None:
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
