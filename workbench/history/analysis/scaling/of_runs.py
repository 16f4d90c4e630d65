"""Groups runs into curves over the number of workers, and finds their baseline.

The batch sizes decide whether runs count as strong scaling (the global batch stays) or as weak
(each worker's part of it stays). If both are possible, the kind with fewer curves is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ..comparison import BASELINE, by_plan
from ..rows import ComparisonRow, Spread, ratio_of, row_of
from .curves import Cost, Curve, Point, Scaling
from .laws import Law, Mode, fitted
from .words import notes_of, verdict_of

if TYPE_CHECKING:
    from ..summary import RunSummary

_NAN = float("nan")
Price = tuple[float | None, int | None]
"""Of a worker-hour, and the samples of an epoch; None where not known."""
Held: TypeAlias = "tuple[list[RunSummary], ComparisonRow]"
"""The runs of a plan, and what a comparison says of them."""


def why_not(runs: Sequence[RunSummary]) -> str:
    """Return why runs show no scaling, in a sentence; empty where they do."""
    if not runs:
        return "There are no runs."
    counts = {run.workers for run in runs}
    if len(counts) < 2:
        count = next(iter(counts))
        return (
            f"All runs have {count} worker{'s' * (count != 1)}: scaling needs runs "
            "with at least two different numbers of workers."
        )
    return ""


def worth_showing(runs: Sequence[RunSummary]) -> bool:
    """Whether a plan has several numbers of workers among these runs, so that it has a curve."""
    if why_not(runs):
        return False
    found: dict[Any, set[int]] = {}
    for run in runs:
        found.setdefault(_plan_key(run), set()).add(run.workers)
    return any(len(counts) > 1 for counts in found.values())


def scaling(runs: Sequence[RunSummary], *, price: float | None = None) -> Scaling | None:
    """Return what runs with several numbers of workers gained; None where they have but one.

    Args:
        price: Of a worker-hour, in any currency; servers are not counted.
    """
    if why_not(runs):
        return None
    mode = mode_of(runs)
    groups = [_whole(group) for group in by_plan(runs)]
    rows = [row_of(group, groups[0], has_one_device=False) for group in groups]
    held = list(zip(groups, rows, strict=True))
    yardsticks = [one for one in held if one[0][0].strategy == BASELINE]
    families: dict[Any, list[Held]] = {}
    for group, row in held:
        families.setdefault((*_plan_key(group[0]), _size(group[0], mode)), []).append((group, row))
    families = _joined(families)
    several = [one for one in families.values() if one[0][0][0].strategy != BASELINE]
    chosen = several or list(families.values())
    curves = []
    epoch = _epoch_of(runs)
    for number, family in enumerate(chosen):
        base = _base_of(family, yardsticks, mode)
        curves.append(_curve(family, base, mode, (price, epoch), number))
    curves = _named(curves)
    measured = [curve for curve in curves if curve.known]
    verdict, distribute = verdict_of(measured)
    return Scaling(
        tuple(curves),
        verdict=verdict,
        distribute=distribute,
        notes=tuple(notes_of(curves, mode, price)),
        price=price,
        one_worker=all(curve.base.workers == 1 for curve in curves),
    )


def _epoch_of(runs: Sequence[RunSummary]) -> int | None:
    """Return the samples of an epoch; None where a run that trained does not know them.

    With larger batches an epoch is rounded more, so it is that of the smallest batch.
    """
    trained = [run for run in runs if run.steps]
    if not trained or not all(run.epoch_samples for run in trained):
        return None
    return min(trained, key=batch_of).epoch_samples


def _whole(group: list[RunSummary]) -> list[RunSummary]:
    """Leave out the runs that failed, where others of the plan did not."""
    return [run for run in group if run.state != "failed"] or group


# -- which runs belong together ---------------------------------------------------------------


def batch_of(run: RunSummary) -> float:
    """Return a run's global batch: as asked for, else what its steps had; NaN where not known."""
    if run.batch_size:
        return float(run.batch_size)
    return float(round(run.samples / run.steps)) if run.steps else _NAN


def mode_of(runs: Sequence[RunSummary]) -> Mode:
    """Return which kind of scaling runs show: that by which they are fewer curves."""
    known = [run for run in runs if math.isfinite(batch_of(run))]
    curves = {
        mode: len({(*_plan_key(run), _size(run, mode)) for run in known if run.workers > 1})
        for mode in ("strong", "weak")
    }
    batches = {(run.workers, batch_of(run)) for run in known}
    strong = len({batch for _, batch in batches}) == 1
    return "weak" if not strong and _fits_weak(batches, curves) else "strong"


def _fits_weak(batches: set[tuple[int, float]], curves: dict[str, int]) -> bool:
    each = {round(batch / workers, 3) for workers, batch in batches}
    return len(each) == 1 or curves["weak"] < curves["strong"]


def _joined(families: dict[Any, list[Held]]) -> dict[Any, list[Held]]:
    """Put runs whose batch nobody knows (they failed before) to the one curve of their plan."""
    found = {key: list(family) for key, family in families.items()}
    for key in [key for key in families if key[-1] is None]:
        others = [other for other in families if other[:-1] == key[:-1] and other != key]
        if len(others) == 1:
            found[others[0]] += found.pop(key)
    return found


def _size(run: RunSummary, mode: Mode) -> float | None:
    """Return what stays the same along a curve; None where it is not known."""
    batch = batch_of(run)
    if not math.isfinite(batch):
        return None
    return batch if mode == "strong" else round(batch / run.workers, 3)


def _plan_key(run: RunSummary) -> tuple[Any, ...]:
    options = tuple(sorted((name, repr(value)) for name, value in run.options.items()))
    return run.recipe, run.framework, run.strategy, options, run.faults


def _base_of(
    family: Sequence[Held],
    yardsticks: Sequence[Held],
    mode: Mode,
) -> Held:
    """Return what a curve is held against: one device, else its own fewest workers."""
    first = family[0][0][0]
    fitting = [
        (group, row)
        for group, row in yardsticks
        if _measured(row)
        and (group[0].recipe, group[0].framework) == (first.recipe, first.framework)
        and _size(group[0], mode) == _size(first, mode)
        and _cell_values(group[0], first)
    ]
    own = sorted((one for one in family if _measured(one[1])), key=lambda one: one[1].workers)
    candidates = [*fitting[-1:], *own]
    return candidates[0] if candidates else family[0]


def _cell_values(one: RunSummary, other: RunSummary) -> bool:
    """Whether one device was given what the other run was, as far as it takes it (`--set`)."""
    return all(other.options.get(name) == value for name, value in one.options.items())


def _measured(row: ComparisonRow) -> bool:
    return row.samples_per_s.mean > 0 and set(row.states) != {"failed"}


# -- a curve --------------------------------------------------------------------------------------


def _curve(
    family: Sequence[Held],
    held: Held,
    mode: Mode,
    price: Price,
    number: int,
) -> Curve:
    base = held[1]
    points: dict[int, Point] = {}
    # A plan that was run again with the same seed makes a row of its own: of those that were
    # measured the newest one counts.
    for group, row in family:
        if not _measured(row) and row.workers in points:
            continue
        points[row.workers] = _point(group, row, base, price)
    baseline = _point(*held, base, price)
    points.setdefault(base.workers, baseline)
    found = tuple(points[count] for count in sorted(points))
    first = family[0][1]
    return Curve(
        name=first.strategy,
        mode=mode,
        points=found,
        baseline=baseline,
        law=_law(found, base, mode),
        color=number + 1,
    )


def _law(points: Sequence[Point], base: ComparisonRow, mode: Mode) -> Law:
    known = [point for point in points if point.measured]
    return fitted(
        mode,
        [point.workers for point in known],
        [point.row.samples_per_s for point in known],
        base.samples_per_s,
        base.workers,
    )


def _point(
    group: Sequence[RunSummary],
    row: ComparisonRow,
    base: ComparisonRow,
    price: Price,
) -> Point:
    ratio = (
        Spread(1.0, low=1.0, high=1.0)
        if row is base
        else ratio_of(row.samples_per_s, base.samples_per_s)
    )
    known = _measured(row) and _measured(base)
    return Point(
        workers=row.workers,
        row=row,
        batch=batch_of(group[0]),
        speedup=ratio.mean if known else _NAN,
        low=ratio.low if known else _NAN,
        high=ratio.high if known else _NAN,
        missing="" if _measured(row) else (row.state or "not measured"),
        cost=_cost(row, *price) if _measured(row) else None,
    )


def _cost(row: ComparisonRow, price: float | None, epoch: int | None) -> Cost | None:
    if price is None:
        return None
    samples = float(epoch or 1e6)
    rate = row.samples_per_s

    def costs(per_s: float) -> float:
        return price * row.workers * samples / per_s / 3600 if per_s > 0 else _NAN

    return Cost(costs(rate.mean), costs(rate.high), costs(rate.low), samples, epoch is not None)


def _named(curves: Sequence[Curve]) -> list[Curve]:
    """Name curves of one strategy apart by the options, values and batches that differ."""
    rows = {id(curve): curve.points[-1].row for curve in curves}
    found = []
    for curve in curves:
        rivals = [one for one in curves if rows[id(one)].strategy == rows[id(curve)].strategy]
        parts = [curve.name]
        if len(rivals) > 1:
            own = dict(_about(curve))
            others = [dict(_about(one)) for one in rivals]
            parts += [
                f"{name}={value}" if name not in ("batch", "each") else f"{name} {value}"
                for name, value in own.items()
                if any(one.get(name) != value for one in others)
            ]
        found.append(replace(curve, name=" ".join(parts)))
    names = [curve.name for curve in found]
    for at, curve in enumerate(found):
        if names.count(curve.name) > 1:  # other recipes, or parameters of one: runs are named so
            row = curve.points[-1].row
            found[at] = replace(curve, name=row.name.replace(f"-n{row.workers}", ""))
    used: dict[str, int] = {}
    for at, curve in enumerate(found):
        used[curve.name] = count = used.get(curve.name, 0) + 1
        if count > 1:
            found[at] = replace(curve, name=f"{curve.name} ({count})")
    return found


def _about(curve: Curve) -> Iterable[tuple[str, Any]]:
    last = next((p for p in reversed(curve.points) if math.isfinite(p.batch)), curve.points[-1])
    yield from last.row.options.items()
    if math.isfinite(last.batch):
        each = curve.mode == "weak"
        yield ("each" if each else "batch"), f"{last.batch / (last.workers if each else 1):.0f}"
    if last.row.faults:
        yield "faults", ", ".join(last.row.faults)
