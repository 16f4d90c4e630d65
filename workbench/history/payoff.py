"""From which size of a step on distributing pays: a model with two measured terms.

A step of a plan takes `work + fixed`. Work is what a worker computes and the wait for its data
(`steady.Steady.work_s`): it is assumed to grow in proportion to the batch. Fixed is the rest:
waiting, communication and overheads, assumed to take as long for any batch, since gradients are as
large as the model whatever the batch. With a batch k times as large, one device and the plan take

    k * work_1 + fixed_1    and    k * work_n + fixed_n

and they break even at

    k = (fixed_n - fixed_1) / (work_1 - work_n).

`work_n` is measured, not `work_1 / n`: CPU engines that share the cores which one device has to
itself compute as long for a part of the batch as it does for all of it, and then there is no such
k. The model is a serial part beside a divided one (Amdahl, 1967), both of them measured.

It is not used where it would not hold: where workers do not take shares of the batch (what
pipelines and tensor parallelism send grows with it), where faults were injected, with other
batches, recipes or frameworks, and where the measured difference of work is less than four times
its standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from .verdict import milliseconds

if TYPE_CHECKING:
    from .rows import ComparisonRow

Kind = Literal["begins", "pays", "far", "undivided"]

FAR, NEAR = 30.0, 0.1
"""Batches beyond these many times the present one are not named: the model is not that good."""

_ERRORS = 4.0
_UNDIVIDED = 0.1
_EQUAL = 0.05
_SAME_BATCH = 0.02
ASSUMED = (
    "When distributing pays is estimated: compute and data grow with the batch, waiting and "
    "communication take as long as here."
)


@dataclass(frozen=True)
class Payoff:
    """Where a plan and one device break even.

    Attributes:
        kind: `begins`: with a larger batch; `pays`: it does already; `far`: only with a batch more
            than `FAR` times as large; `undivided`: workers compute as long for their share of the
            batch as one device for all of it, so no batch follows from these runs.
        factor: The batch at which they break even, in batches of these runs; NaN with the
            latter two kinds.
        step_s: What a step of one device then takes.
        samples: The batch in samples.
        one_work_s, work_s: What one device and a worker compute (and wait for data) a step here.
    """

    kind: Kind
    factor: float
    step_s: float
    samples: float
    one_work_s: float
    work_s: float


def payoff_of(one: ComparisonRow, plan: ComparisonRow) -> Payoff | None:
    """Return where a plan and a one-device run break even; None where the runs do not say."""
    a, b = one.steady, plan.steady
    if a is None or b is None or not _comparable(one, plan):
        return None
    if not abs(a.samples - b.samples) <= _SAME_BATCH * a.samples or a.work_s <= 0:
        return None
    nan = float("nan")
    gained, cost = a.work_s - b.work_s, b.fixed_s - a.fixed_s
    error = math.hypot(a.error_s, b.error_s)
    if gained + 2 * error <= _UNDIVIDED * a.work_s:
        slower = b.step_s > a.step_s
        return Payoff("undivided", nan, nan, nan, a.work_s, b.work_s) if slower else None
    if gained < _ERRORS * error or gained <= _UNDIVIDED * a.work_s or cost <= 0:
        return None
    factor = cost / gained
    if factor > FAR:
        return Payoff("far", nan, nan, nan, a.work_s, b.work_s)
    if factor < NEAR or factor * a.samples < plan.workers:
        return None
    if abs(factor - 1) <= _EQUAL or (factor < 1) is not (_rate(plan) > _rate(one)):
        return None  # equal, or not borne out by the rates: neither is worth a sentence
    return Payoff(
        "begins" if factor > 1 else "pays", factor, factor * a.work_s + a.fixed_s,
        factor * a.samples, a.work_s, b.work_s,
    )  # fmt: skip


def sentence_of(payoff: Payoff, one: ComparisonRow, plan: ComparisonRow) -> str:
    """Return a payoff in plain words."""
    if payoff.kind == "undivided":
        return _undivided(payoff, one, plan)
    if payoff.kind == "far":
        return (
            f"{plan.name} would become faster than {one.name} only with a batch more than "
            f"{FAR:.0f} times as large as this one."
        )
    time, batch = milliseconds(payoff.step_s), _batch(payoff)
    if payoff.kind == "pays":
        return f"It pays as long as a step of {one.name} takes longer than about {time}: {batch}."
    return (
        f"Distributing with {plan.name} begins to pay when a step of {one.name} takes longer than "
        f"about {time}: {batch}."
    )


def _undivided(payoff: Payoff, one: ComparisonRow, plan: ComparisonRow) -> str:
    measured = (
        f"a worker computes {milliseconds(payoff.work_s)} a step for 1/{plan.workers} of the "
        f"batch, {one.name} {milliseconds(payoff.one_work_s)} for all of it"
    )
    if _share_cores(one, plan):
        return (
            f"A larger batch would hardly help {plan.name} here: its {plan.workers} workers share "
            f"the cores that {one.name} has to itself, so {measured}."
        )
    return f"These runs do not show when {plan.name} would begin to pay: {measured}."


def _share_cores(one: ComparisonRow, plan: ComparisonRow) -> bool:
    """Whether all workers of the plan together have no more threads than the one device."""
    if not (one.threads and plan.threads and one.on_cpu and plan.on_cpu):
        return False
    return plan.threads * plan.workers <= max(one.threads, plan.workers)


def _batch(payoff: Payoff) -> str:
    samples = float(f"{payoff.samples:.2g}")
    return f"a batch of about {payoff.factor:.2g}x this one ({samples:.0f} samples)"


def _comparable(one: ComparisonRow, plan: ComparisonRow) -> bool:
    return (
        one.workers == 1
        and plan.workers > 1
        and plan.shares_batch
        and not (one.faults or plan.faults)
        and one.framework == plan.framework
        and one.recipe == plan.recipe
    )


def _rate(row: ComparisonRow) -> float:
    return row.samples_per_s.mean
