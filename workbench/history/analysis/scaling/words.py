"""Runs with several numbers of workers in plain words: should it be distributed, and why not.

All statements are measured: whether the intervals of two rates overlap, how a step's time is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from ..rows import SHARES, ComparisonRow, milliseconds, share_cores

if TYPE_CHECKING:
    from .curves import Curve, Point
    from .laws import Mode

_NAN = float("nan")
_COUNTS = 0.05
"""What takes less of a step than this is not named as a reason."""
_UNDIVIDED = 0.8
"""Workers that compute more than this share of what one computes have gained nothing there."""
_LEAST_SERIAL = 0.005


def verdict_of(curves: Sequence[Curve]) -> tuple[str, bool | None]:
    """Return whether to distribute, in words, and whether; None where that is not known.

    Args:
        curves: Those of which anything was measured.
    """
    tried = [
        (curve, point)
        for curve in curves
        for point in curve.known
        if point.workers > curve.base.workers
    ]
    if not tried:
        return "No verdict, because only the smallest number of workers was measured.", None
    curve, best = max(tried, key=lambda one: one[1].speedup)
    base = curve.base
    what = f"{curve.name} with {best.workers} workers"
    rate = f"has {best.speedup:.2f} times the throughput of {_whose(curve)}"
    gives = f"{what}, {rate}{_interval(best)}"
    if best.low > 1:
        efficiency = best.speedup * base.workers / best.workers
        head = f"The fastest run, {gives}. Its efficiency is {efficiency * 100:.0f} %."
        return f"{head} {_more(curve, best)}".rstrip(), True
    if not math.isfinite(best.low):
        return (
            f"No certain verdict: {what} {rate}, but there are too few steps for a 95 % interval.",
            None,
        )
    reason = reason_of(best.row, base)
    slower = best.high < 1
    head = "You should not" if slower else "These runs show no clear reason to"
    if base.workers > 1:
        head += f" use more than {base.workers} workers: the fastest run with more workers"
    else:
        head += " distribute this training: the fastest run with several workers"
    if slower:
        return f"{head}, {gives}. {reason}".rstrip(), False
    doubt = (
        "The interval includes 1, so a gain is not certain. More steps or seeds may show a gain."
    )
    return f"{head}, {gives}. {doubt} {reason}".rstrip(), False


def _whose(curve: Curve) -> str:
    base = curve.base
    if base.workers > 1:
        return f"{base.workers} workers"
    other = base.strategy != curve.points[-1].row.strategy
    return f"one worker ({base.strategy})" if other else "one worker"


def _interval(point: Point) -> str:
    if not (math.isfinite(point.low) and math.isfinite(point.high)):
        return ""
    return f" (95 % interval: {point.low:.2f} to {point.high:.2f})"


def _more(curve: Curve, best: Point) -> str:
    """Say where more workers stop paying, or what the law allows at most."""
    last = curve.known[-1]
    if last.workers > best.workers:
        slower = "slower" if last.high < best.low else "not faster"
        head = (
            f"With {last.workers} workers ({last.speedup:.2f}x), the run is {slower} than with "
            f"{best.workers} workers."
        )
        return f"{head} {reason_of(last.row, best.row)}".rstrip()
    law = curve.law
    if not (law.fits and law.name == "Amdahl" and law.serial > _LEAST_SERIAL and law.low > 0):
        return ""
    least, most = law.scale / law.high, law.scale / law.low
    return (
        "Amdahl's law assumes that a part of the work is not divided among the workers. "
        "Communication and overhead belong to this part. By the law's estimate, the time of this "
        f"part is {law.serial * 100:.0f} % of the time of a step with one worker. So even with "
        f"very many workers, the speed-up stays below about {law.limit:.1f}x. The 95 % interval of "
        f"this limit is {least:.1f}x to {most:.1f}x."
    )


_COSTS = {
    "data_wait_s": "{} waiting for data",
    "sync_wait_s": "{} waiting for the slowest worker",
    "bubble_s": "{} idle in the pipeline's bubble",
    "transfer_s": "{} communicating",
    "other_s": "{} on other things",
}


def reason_of(plan: ComparisonRow, fewer: ComparisonRow) -> str:
    """Return what a step of more workers spends its time on, beside one of fewer, in words.

    All of it is measured: what computing gained, and what else a step takes.
    """
    ours, theirs = _parts_s(plan), _parts_s(fewer)
    compute_s, before_s = ours.pop("compute_s", _NAN), theirs.get("compute_s", _NAN)
    more_s = {name: spent_s - theirs.get(name, 0.0) for name, spent_s in ours.items()}
    worst = sorted(more_s, key=lambda name: more_s[name], reverse=True)[:2]
    costs = [
        _COSTS[name].format(milliseconds(ours[name]))
        for name in worst
        if more_s[name] > _COUNTS * plan.step_s
    ]
    known = math.isfinite(compute_s) and math.isfinite(before_s)
    if known:
        costs.append(f"{milliseconds(compute_s)} computing")
    if not costs:
        return ""
    spent = " and ".join(filter(None, (", ".join(costs[:-1]), costs[-1])))
    said = f"In a step of {milliseconds(plan.step_s)}, each worker spends {spent}."
    if not known:
        return said
    few = "one worker" if fewer.workers == 1 else f"{fewer.workers} workers"
    said += f" With {few}, computing takes {milliseconds(before_s)}."
    if compute_s > _UNDIVIDED * before_s and share_cores(fewer, plan) and _divided(plan, fewer):
        said += (
            " So a smaller share of the batch saves little or no compute time. There are two "
            "possible reasons: the workers share CPU cores, or a worker needs almost the same "
            "compute time for a small batch as for a large batch. Try a larger batch."
        )
    return said


def _divided(plan: ComparisonRow, fewer: ComparisonRow) -> bool:
    """Whether a worker's share is smaller than before; in weak scaling it is as large."""
    if plan.steady is None or fewer.steady is None:
        return True
    return plan.steady.samples / plan.workers < _UNDIVIDED * fewer.steady.samples / fewer.workers


def _parts_s(row: ComparisonRow) -> dict[str, float]:
    return {
        name: row.shares[name] * row.step_s
        for name in SHARES
        if math.isfinite(row.shares.get(name, _NAN))
    }


def notes_of(curves: Sequence[Curve], mode: Mode, price: float | None) -> Iterable[str]:
    """Yield what is missing or relative, the laws, and what the figures leave out."""
    kept = (
        "the global batch stays the same"
        if mode == "strong"
        else "the batch grows with the number of workers"
    )
    yield (
        f"{mode.title()} scaling: {kept}. The speed-up is computed from samples per second, "
        "without the warm-up steps."
    )
    for curve in curves:
        if curve.base.workers != 1:
            yield (
                f"No run of {curve.name} has one worker, so speed-up is relative to "
                f"{curve.base.workers} workers."
            )
        for point in curve.points:
            if point.missing:
                yield (
                    f"There is no measurement of {curve.name} with {point.workers} workers "
                    f"(state of the run: {point.missing})."
                )
            elif point.row.state not in ("finished", ""):
                yield (
                    f"The run of {curve.name} with {point.workers} workers has the state "
                    f"{point.row.state!r}."
                )
        yield _law(curve, several=len(curves) > 1)
    crowded = [
        point.workers
        for curve in curves
        for point in curve.known
        if point.workers > 1 and share_cores(curve.base, point.row)
    ]
    if crowded:
        yield (
            f"With {min(crowded)} or more workers, the workers share the CPU cores; one worker "
            "alone has all of them. If each worker has its own machine or GPU, the run scales "
            "differently."
        )
    if price is not None:
        costs = [point.cost for curve in curves for point in curve.points if point.cost is not None]
        epoch = all(cost.is_epoch for cost in costs)
        what = "an epoch" if epoch else "a million samples (the size of an epoch is not known)"
        yield (
            f"Costs are for {what}, at a price of {price:g} per worker-hour; servers and the start "
            "of a run are not counted."
        )


def words_of_predictions(curves: Sequence[Curve]) -> Iterable[str]:
    """Yield what is to be known of the curves' predictions, each thing once."""
    made = {curve.name: curve.predicted for curve in curves if curve.predicted and curve.ahead}
    if made:
        runs = ", ".join(dict.fromkeys(one.run for one in made.values()))
        yield (
            f"The predictions come from {runs}. Runs with one worker are used only for one "
            "purpose: they show how the compute time of a worker depends on the number of its "
            "samples. The throughput of a new run lies in the predicted interval with a "
            "probability of 90 %."
        )
    said: dict[str, list[str]] = {}
    for name, one in made.items():
        for note in one.notes:
            said.setdefault(note, []).append(name)
    for note, names in said.items():
        yield note if len(names) == len(made) else f"{', '.join(names)}: {note}"
    yield from not_predicted(curves)


def not_predicted(curves: Sequence[Curve]) -> list[str]:
    """Return why curves are not predicted, a line for each reason."""
    reasons: dict[str, list[str]] = {}
    for curve in curves:
        if curve.predicted is not None and curve.predicted.why_not:
            reasons.setdefault(curve.predicted.why_not, []).append(curve.name)
    found = []
    for why, names in reasons.items():
        which = "" if len(names) == len(curves) else f" ({', '.join(names)})"
        found.append(f"Not predicted{which}: {why[0].lower()}{why[1:]}")
    return found


def _law(curve: Curve, *, several: bool) -> str:
    law, head = curve.law, f"{curve.name}: " if several else ""
    if not law.fits:
        return f"{head}{law.why_not}."
    interval = f"95 % interval: {law.low * 100:.1f} % to {law.high * 100:.1f} %"
    return (
        f"{head}By {law.name}'s law, {law.serial * 100:.1f} % of a step with one worker cannot be "
        f"divided among workers ({interval}). This part is called the serial share."
    )
