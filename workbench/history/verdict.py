"""A comparison in one plain sentence, made from the measurements alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .rows import ComparisonRow, Spread

EQUAL = 1.05
"""Throughputs that are known to lie within this ratio are called equal."""

LEAST_STEPS = 5
"""Of shorter runs the first step, which costs more, is too much to judge by."""

_SAYS = {
    "data_wait_s": "waits {} for data",
    "sync_wait_s": "waits {} for the slowest worker",
    "bubble_s": "leaves each worker idle for {} (the pipeline's bubble)",
    "transfer_s": "spends {} on communication",
    "other_s": "spends {} on other things",
}


def verdict_of(rows: Sequence[ComparisonRow], baseline: int) -> str:
    """Return which plan was fastest and why, in one sentence; empty for fewer than two plans.

    Args:
        baseline: Index of the row the others are held against.
    """
    rated = [row for row in rows if row.samples_per_s.mean > 0 and row.steps >= LEAST_STEPS]
    if len(rows) < 2:
        return ""
    if len(rated) < 2:
        return "Throughput was not measured in enough runs and steps to compare them."
    fastest = max(rated, key=lambda row: row.samples_per_s.mean)
    base = rows[baseline]
    other = base
    if fastest is base or base not in rated:
        other = max((row for row in rated if row is not fastest),
                    key=lambda row: row.samples_per_s.mean)  # fmt: skip
    ratio = fastest.samples_per_s.mean / other.samples_per_s.mean
    fast, slow = fastest.samples_per_s, other.samples_per_s
    if _within(fast, slow):
        return f"{fastest.name} and {other.name} are equally fast here (within 5 %)."
    if not told_apart(fast, slow):
        return (
            f"No difference can be told between {fastest.name} and {other.name}: "
            f"{_interval(fast)} samples/s, and {_interval(slow)}. "
            "Train longer, or with more seeds."
        )
    if ratio < EQUAL:
        return (
            f"{fastest.name} is faster than {other.name} here, but by less than 5 %: "
            f"{_interval(fast)} samples/s, and {_interval(slow)}."
        )
    head = f"{fastest.name} is {ratio:.1f}x faster than {other.name} here: "
    if fastest.workers > other.workers:
        return head + _gain(fastest, other)
    return head + _cost(other)


def told_apart(fast: Spread, slow: Spread) -> bool:
    """Whether the intervals of two rates do not overlap; one that is not known overlaps all."""
    return fast.low > slow.high


def _within(fast: Spread, slow: Spread) -> bool:
    """Whether both rates lie within `EQUAL`, wherever in their intervals they are."""
    return max(fast.high, slow.high) < EQUAL * min(fast.low, slow.low)


def _interval(rate: Spread) -> str:
    if not (math.isfinite(rate.low) and math.isfinite(rate.high)):
        return f"{_short(rate.mean)} (in too few steps for an interval)"
    return f"{_short(rate.low)} to {_short(rate.high)}"


def _short(rate: float) -> str:
    """Return a rate in three digits, as tables have it: `1.28k`."""
    for scale, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if rate >= scale * 0.9995:
            return f"{rate / scale:#.3g}".rstrip(".") + suffix
    return f"{rate:.3g}"


def _gain(fast: ComparisonRow, slow: ComparisonRow) -> str:
    """Say what the faster plan's step does, and what share of the workers' time it uses."""
    said = f"a step takes {milliseconds(fast.step_s)} instead of {milliseconds(slow.step_s)}"
    share = fast.shares["compute_s"]
    if not math.isfinite(share):
        return f"{said}."
    return f"{said}, and its {fast.workers} workers compute {share * 100:.0f} % of the time."


def _cost(slow: ComparisonRow) -> str:
    """Say what a step of the slower plan computes and what else it spends most time on."""
    costs_s = {
        part: share * slow.step_s for part, share in slow.shares.items() if math.isfinite(share)
    }
    compute_s = costs_s.pop("compute_s", None)
    if compute_s is None:
        return f"each {slow.name} step takes {milliseconds(slow.step_s)}."
    does = f"each {slow.name} step computes {milliseconds(compute_s)}"
    if not costs_s:
        return f"{does}."
    worst = max(costs_s, key=lambda part: costs_s[part])
    return f"{does} and {_SAYS[worst].format(milliseconds(costs_s[worst]))}."


def milliseconds(seconds: float) -> str:
    """Return `1.2 s`, `48 ms`, `2.1 ms` or `0.69 ms`, as all views write them."""
    if seconds >= 1:
        return f"{seconds:.1f} s"
    places = 0 if seconds >= 9.95e-3 or not seconds else 1 if seconds >= 0.995e-3 else 2
    return f"{seconds * 1e3:.{places}f} ms"
