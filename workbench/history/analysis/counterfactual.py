"""What if one worker were as fast as the others: the same steps with a new critical path.

Workers in one group (`synchronous`): a step ends when the last worker is ready, plus the time after
that. R_r is the time at which worker r was ready, and G the latest of these: r waited `G - R_r`.
Now let worker k be ready at the median time of the others. The latest worker is then the latest of
the others, so the step is shorter by `G - max(R_r, r != k)`: the shortest wait among the others.
This is 0 in steps in which k was not the last. The time after the meeting does not change.

In a pipeline (`pipeline`): the stage with the most work sets the pace. So the step is shorter by
the time that k is busy longer than the busiest of the others. The model keeps the time to fill and
drain the pipeline, so it understates the gain.

Without a common step (`asynchronous`): no worker's step is part of another worker's step, and the
run ends with the slowest worker. Worker k gets the median step of the others; waits of others for k
(bounded staleness) are subtracted. If k has taken fewer steps than the others so far, it takes as
many as they did, as far as its time allows.

Sources: replace the straggler's durations by the others' median and simulate the steps again:
Lin et al., Understanding Stragglers in Large Model Training Using What-if Analysis, OSDI 2025
(arXiv:2505.05713); the longest path: Kelley and Walker, Critical-Path Planning and Scheduling,
1959. Other effects of a real change (a free core, less heat) are not in the model.

`ghost` has the latest steps of every worker as they were, and as they would have been.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError, RunError
from ...shared.record import PARTS
from ..recent import closed
from .blame import blame

if TYPE_CHECKING:
    from ..store import RunHistory

Floats = NDArray[np.float64]
Model = Literal["synchronous", "pipeline", "asynchronous"]
DATA, COMPUTE, WAIT, TRANSFER, OTHER = range(len(PARTS))
CLEARLY = 1.2
"""A worker whose mean step is this much longer than the others' median is clearly slower."""


@dataclass(frozen=True, eq=False)
class WhatIf:
    """A run as it was, and as it would have been.

    Attributes:
        without: The worker that the model makes as fast as the median of the others.
        model: The name of the model of this module that was used.
        step: (steps,) numbers of the steps that were recomputed.
        step_s, without_s: (steps,) seconds of each step as it was and as it would have been.
        samples_per_s, without_per_s: Global throughput over these steps.
        saved_s: Seconds that these steps would have been shorter in total.
        real, ghost: The latest steps of every worker, for pictures.
        stride: Only every `stride`-th step was stored and recomputed.
    """

    without: int
    model: Model
    step: NDArray[np.int64]
    step_s: Floats
    without_s: Floats
    samples_per_s: float
    without_per_s: float
    saved_s: float
    real: Lanes
    ghost: Lanes
    stride: int = 1

    @property
    def speedup(self) -> float:
        """Throughput in the model divided by the real throughput."""
        return self.without_per_s / self.samples_per_s

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data: mean steps, throughputs, both timelines."""
        return {
            "without": self.without, "model": self.model, "steps": len(self.step),
            "step_s": float(self.step_s.mean()), "without_s": float(self.without_s.mean()),
            "samples_per_s": self.samples_per_s, "without_per_s": self.without_per_s,
            "speedup": self.speedup, "saved_s": self.saved_s, "stride": self.stride,
            "parts": list(PARTS), "real": self.real.to_wire(), "ghost": self.ghost.to_wire(),
        }  # fmt: skip


def what_if(
    history: RunHistory, without: int | None = None, first: int | None = None,
    last: int | None = None,
) -> WhatIf:  # fmt: skip
    """Return the run as it would have been had one worker been as fast as the others' median.

    Args:
        without: Its rank; by default the worker that delays the others (`Blame.worst`).
        first, last: Steps to recompute, both included; by default all stored steps.

    Raises:
        PlanError: The worker does not exist, or there is no other worker to compare it with.
        RunError: No step is complete, or waits were not measured.
    """
    k = _rank(history, without, first, last)
    table = Table.of(history, first, last)
    if not history.joined:
        return _alone(history, table, k)
    table = table.only(table.complete)
    if not len(table.step):
        chosen = first is not None or last is not None
        raise RunError(
            "run.what_if needs at least one step that all workers have completed, but "
            f"{'there is none between `first` and `last`' if chosen else 'there is none yet'}.",
            seen=f"first={first}, last={last}" if chosen else None,
            next_step="use other values for `first` and `last`, or leave them out"
            if chosen
            else "if the run still trains, wait for its first steps",
            code="WB-RUN-046",
        )
    piped = np.isfinite(table.bubble_s).all()
    saved = _busier(table, k) if piped else _shortest_wait(table, k)
    step_s = table.step_s.mean(axis=1)  # equal for all, except where workers meet only now and then
    without_s = np.asarray(step_s - saved)
    samples = table.samples.sum(axis=1) if history.data_parallel else table.samples.max(axis=1)
    total = float(samples.sum())
    real = Lanes.of(table.step, table.start_s, table.parts_s)
    return WhatIf(
        k, "pipeline" if piped else "synchronous", table.step, step_s, without_s,
        total / float(step_s.sum()), total / float(without_s.sum()), float(saved.sum()),
        real, ghost_of(real, real.tail(saved), k), history.stride,
    )  # fmt: skip


@dataclass(frozen=True)
class Table:
    """A history's rows as arrays of shape (steps, ranks); NaN where a rank has no row."""

    step: NDArray[np.int64]
    start_s: Floats
    step_s: Floats
    parts_s: Floats
    bubble_s: Floats
    samples: Floats
    blamed: Floats

    @staticmethod
    def of(history: RunHistory, first: int | None, last: int | None) -> Table:
        """Read the stored steps from `first` to `last`."""
        names = ("start_s", "step_s", *PARTS, "bubble_s", "samples", "blamed_rank")
        columns = history.together("step", "rank", *names)
        step = columns["step"]
        low, high = (0 if first is None else first), (np.inf if last is None else last)
        picked = (step >= low) & (step <= high)
        numbers, index = np.unique(step[picked], return_inverse=True)
        rank = columns["rank"][picked]

        def pivot(name: str) -> Floats:
            values = np.full((len(numbers), len(history.engines)), np.nan)
            values[index, rank] = columns[name][picked]
            return values

        parts = np.stack([pivot(name) for name in PARTS], axis=-1)
        rest = (pivot(n) for n in ("bubble_s", "samples", "blamed_rank"))
        return Table(numbers, pivot("start_s"), pivot("step_s"), parts, *rest)

    @property
    def complete(self) -> NDArray[np.bool_]:
        """(steps,) whether every rank has a row."""
        return np.asarray(np.isfinite(self.step_s).all(axis=1))

    def only(self, picked: NDArray[np.bool_]) -> Table:
        """Return some of the steps."""
        return Table(*(values[picked] for values in vars(self).values()))


def _rank(history: RunHistory, without: int | None, first: int | None, last: int | None) -> int:
    ranks = len(history.engines)
    if ranks < 2:
        raise PlanError(
            "run.what_if needs a run with at least two workers.", seen=f"{ranks} worker",
            allowed="runs of 2 or more workers",
            code="WB-PLAN-042",
        )  # fmt: skip
    if without is None:
        worst = straggler_of(history, first, last)
        if worst is None:
            raise PlanError(
                "No worker is clearly slower than the others, so run.what_if cannot choose a "
                "worker itself.",
                next_step=f"choose a worker, 0 to {ranks - 1}: run.what_if({ranks - 1})",
                code="WB-PLAN-043",
            )
        return worst
    if not 0 <= without < ranks:
        raise PlanError(
            "The run does not have this worker.",
            seen=f"without={without}",
            allowed=f"0 to {ranks - 1}",
            code="WB-PLAN-044",
        )
    return without


def straggler_of(
    history: RunHistory, first: int | None = None, last: int | None = None
) -> int | None:
    """Return the rank that delays the others, or in asynchronous training the end of the run."""
    worst = blame(history, first, last).worst
    if worst is not None or history.joined:
        return worst
    mean_s = np.nanmean(Table.of(history, first, last).step_s, axis=0)
    slowest = int(np.nanargmax(mean_s))
    others = float(np.median(np.delete(mean_s, slowest)))
    return slowest if mean_s[slowest] > CLEARLY * others else None


def _shortest_wait(table: Table, k: int) -> Floats:
    waits = np.delete(table.parts_s[:, :, WAIT], k, axis=1)
    if np.isnan(waits).any():
        raise RunError(
            "run.what_if cannot compute anything: the workers' sync wait was not measured.",
            seen=f"not measured in {np.isnan(waits).any(axis=1).sum()} of {len(waits)} steps",
            next_step="run.history.unmeasured gives the reason",
            code="WB-RUN-047",
        )
    return np.asarray(waits.min(axis=1))


def _busier(table: Table, k: int) -> Floats:
    busy = table.step_s - table.bubble_s
    return np.asarray(np.maximum(busy[:, k] - np.delete(busy, k, axis=1).max(axis=1), 0.0))


def _alone(history: RunHistory, table: Table, k: int) -> WhatIf:
    if not np.isfinite(table.step_s).any(axis=0).all():
        raise RunError(
            "At least one worker has not completed a step yet.",
            next_step="if the run still trains, wait until every worker has completed a step",
            code="WB-RUN-048",
        )
    spent = np.nansum(table.step_s, axis=0)
    for_k = np.nan_to_num(np.where(table.blamed == k, table.parts_s[:, :, WAIT], 0.0))
    samples, count = np.nansum(table.samples, axis=0), np.isfinite(table.step_s).sum(axis=0)
    freed = spent - for_k.sum(axis=0)
    pace = min(freed[k] / count[k], float(np.median(np.delete(freed / count, k))))
    steps = max(count[k], min(freed[k] / pace, np.delete(count, k).max()))
    freed[k] = steps * pace
    more = samples[k] * (steps / count[k] - 1)
    before = float(samples.sum() / spent.max())
    after = float((samples.sum() + more) / freed.max())
    without_s = table.step_s - for_k
    without_s[:, k] *= pace * count[k] / without_s[np.isfinite(without_s[:, k]), k].sum()
    real = Lanes.of(table.step, table.start_s, table.parts_s)
    return WhatIf(
        k, "asynchronous", table.step, np.nanmean(table.step_s, axis=1),
        np.nanmean(without_s, axis=1), before, after,
        float(samples.sum()) * (1 / before - 1 / after),
        real, ghost_of(real, real.tail(for_k), k, alone=True), history.stride,
    )  # fmt: skip


SHOWN_STEPS = 8
_DATA, _COMPUTE, _WAIT, _TRANSFER, _OTHER = range(len(PARTS))


@dataclass(frozen=True, eq=False)
class Lanes:
    """Some steps of every worker, without pauses of all workers between the steps.

    Attributes:
        step: (steps,) the numbers of the steps.
        start_s: (steps, ranks) NaN where a rank has no row; the first step begins at 0.
        parts_s: (steps, ranks, 5) seconds in each of `record.PARTS`; NaN where not measured.
    """

    step: NDArray[np.int64]
    start_s: Floats
    parts_s: Floats

    @staticmethod
    def of(step: NDArray[np.int64], start_s: Floats, parts_s: Floats) -> Lanes:
        """Return the latest of some steps."""
        parts = parts_s[-SHOWN_STEPS:]
        start, _ = closed(start_s[-SHOWN_STEPS:], np.nansum(parts, axis=2))
        begin = float(np.nanmin(start)) if np.isfinite(start).any() else 0.0
        return Lanes(step[-SHOWN_STEPS:], start - begin, parts)

    def tail(self, values: Floats) -> Floats:
        """Return the part of an array over all steps that belongs to these steps."""
        return np.asarray(values[len(values) - len(self.step) :])

    @property
    def length_s(self) -> float:
        """Seconds from the start of the first step to the end of the last step."""
        ends = self.start_s + np.nansum(self.parts_s, axis=2)
        return float(np.nanmax(ends)) if np.isfinite(ends).any() else float("nan")

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for NaN."""
        return {
            "step": self.step.tolist(),
            "start_s": [[_known(v) for v in row] for row in self.start_s.tolist()],
            "parts_s": [
                [[_known(v) for v in parts] for parts in row] for row in self.parts_s.tolist()
            ],
        }


def ghost_of(real: Lanes, saved_s: Floats, k: int, *, alone: bool = False) -> Lanes:
    """Return the steps as they would have been.

    Args:
        saved_s: Seconds saved: (steps,) if workers take each step together; (steps, ranks) if
            each worker steps `alone` and waits less.
        k: The worker that is as fast as the median of the others.
    """
    parts = real.parts_s.copy()
    own = parts[:, :, [_DATA, _COMPUTE, _OTHER]]
    median = np.nanmedian(np.delete(np.nansum(own, axis=2), k, axis=1), axis=1)
    cut = np.maximum(np.nansum(own[:, k], axis=1) - median, 0.0)
    _shorten(parts[:, k], cut)
    waits = np.nan_to_num(parts[:, :, _WAIT])
    met = waits.max(axis=1) > 0
    if alone:
        parts[:, :, _WAIT] -= saved_s
    else:
        kept = waits - saved_s[:, None]
        kept[:, k] = _own_wait(waits[:, k], cut, saved_s, met)
        parts[:, :, _WAIT] = np.maximum(kept, 0.0)
    return Lanes(real.step, _starts(real, parts), parts)


def _own_wait(wait: Floats, cut: Floats, saved_s: Floats, met: NDArray[np.bool_]) -> Floats:
    """Return how long the faster worker now waits: the time it gains until the next meeting."""
    found, ahead = np.zeros(len(wait)), 0.0
    for at in range(len(wait)):
        ahead += float(cut[at])
        if met[at]:
            found[at], ahead = wait[at] + ahead - saved_s[at], 0.0
    return found


def _shorten(parts: Floats, cut: Floats) -> None:
    """Subtract seconds from a worker's own work: first from compute, then from the other parts."""
    left = cut.copy()
    for part in (_COMPUTE, _DATA, _OTHER):
        taken = np.minimum(left, np.maximum(np.nan_to_num(parts[:, part]), 0.0))
        parts[:, part] -= taken
        left -= taken


def _starts(real: Lanes, parts: Floats) -> Floats:
    """Return when steps begin: the gap between two steps does not change."""
    before, after = np.nansum(real.parts_s, axis=2), np.nansum(parts, axis=2)
    earlier = np.zeros_like(before)
    earlier[1:] = np.cumsum(before - after, axis=0)[:-1]
    return np.asarray(real.start_s - earlier)


def _known(value: float) -> float | None:
    return None if value != value else value
