"""The figures of a comparison's row by name: what tables sort by, and what is exported."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import unknown
from .rows import SHARES, ComparisonRow, Spread

Value = str | int | float | None
"""None stands for what was not measured or does not apply."""


@dataclass(frozen=True)
class Field:
    """One figure.

    Attributes:
        key: Its name, with the unit: `step_s`, `sent_bytes`, `samples_per_s`. Shares are 0..1.
        value: A row's figure as a plain number or text.
    """

    key: str
    value: Callable[[ComparisonRow], Value]


def fields(metrics: Sequence[str] = ()) -> list[Field]:
    """Return all figures in the order of export; `eval_<name>` for each metric."""
    return [
        Field("run", lambda row: row.name),
        Field("strategy", lambda row: row.strategy),
        Field("framework", lambda row: row.framework),
        Field("state", lambda row: row.state),
        Field("workers", lambda row: row.workers),
        Field("seeds", lambda row: " ".join(map(str, row.seeds))),
        Field("steps", lambda row: row.steps),
        *_spread("samples_per_s", lambda row: row.samples_per_s),
        Field("samples_per_s_low", lambda row: _known(row.samples_per_s.low)),
        Field("samples_per_s_high", lambda row: _known(row.samples_per_s.high)),
        Field("all_samples_per_s", lambda row: _known(row.all_per_s)),
        Field("warm_up_steps", lambda row: row.warm_up),
        Field("relative", lambda row: _known(row.relative)),
        Field("relative_low", lambda row: _known(row.relative_low)),
        Field("relative_high", lambda row: _known(row.relative_high)),
        Field("speedup", lambda row: _known(row.speedup)),
        Field("efficiency", lambda row: _known(row.efficiency)),
        Field("step_s", lambda row: _known(row.step_s)),
        *(Field(f"{part.removesuffix('_s')}_share", _share(part)) for part in SHARES),
        Field("sent_bytes_per_step", lambda row: _known(row.sent_step_bytes)),
        Field("sent_bytes", lambda row: _known(row.sent_bytes)),
        Field("memory_bytes_per_worker", largest_memory),
        Field("staleness_mean", lambda row: None if row.staleness is None else row.staleness.mean),
        Field("staleness_max", lambda row: None if row.staleness is None else row.staleness.worst),
        *_spread("final_loss", lambda row: row.final_loss),
        *(field for name in metrics for field in _spread(f"eval_{name}", _metric(name))),
        *_spread("wall_s", lambda row: row.wall_s),
        Field("breaks_even_batch_factor", lambda row: _known(row.payoff and row.payoff.factor)),
        Field("breaks_even_step_s", lambda row: _known(row.payoff and row.payoff.step_s)),
    ]  # fmt: skip


def records(rows: Sequence[ComparisonRow], metrics: Sequence[str]) -> list[dict[str, Value]]:
    """Return the figures of each row by key."""
    every = fields(metrics)
    return [{field.key: field.value(row) for field in every} for row in rows]


def ordered(
    rows: Sequence[ComparisonRow], metrics: Sequence[str], sort: str, *, descending: bool
) -> list[ComparisonRow]:
    """Return the rows in the order of a figure; those that lack it last, equals as they stood.

    Raises:
        PlanError: There is no figure of that name.
    """
    every = {field.key: field for field in fields(metrics)}
    chosen = every.get(sort) or every.get(f"eval_{sort}")
    if chosen is None:
        raise unknown("column to sort by", sort, list(every))
    held = [(chosen.value(row), row) for row in rows]
    known = [pair for pair in held if pair[0] is not None]
    known.sort(key=lambda pair: pair[0], reverse=descending)  # type: ignore[arg-type,return-value]
    return [row for _, row in known] + [row for value, row in held if value is None]


def largest_memory(row: ComparisonRow) -> float | None:
    """Return what the worker that holds most holds, bytes; None where not measured."""
    return max(row.memory_bytes, default=None)


def _spread(key: str, spread: Callable[[ComparisonRow], Spread]) -> list[Field]:
    return [
        Field(key, lambda row: _known(spread(row).mean)),
        Field(f"{key}_std", lambda row: _known(spread(row).std)),
    ]


def _share(part: str) -> Callable[[ComparisonRow], Value]:
    return lambda row: _known(row.shares.get(part))


def _metric(name: str) -> Callable[[ComparisonRow], Spread]:
    missing = Spread.of([])
    return lambda row: row.evals.get(name, missing)


def _known(value: Any) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
