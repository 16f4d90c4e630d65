"""Data of a whole run, independent of the decimation of its rows: sums, curves, its health.

Sums are exact. A curve has a bounded size and never loses its extremes: buckets whose width
doubles. This module also checks whether the loss stays a number, and measures the age of the
parameters of asynchronous pushes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..shared.record import PARTS, Derived
from .snapshot import Curve

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Blame:
    """The blamed ranks of rows: `rank` (-1: none) and `wait_s`, arrays of equal shape."""

    rank: NDArray[np.int32]
    wait_s: NDArray[np.floating[Any]]

    @staticmethod
    def of(derived: Derived) -> Blame:
        """Return the blame in derived columns: (steps, ranks)."""
        return Blame(derived.blamed_rank, derived.blamed_s)

    def __getitem__(self, at: Any) -> Blame:
        return Blame(self.rank[at], self.wait_s[at])

    def flat(self) -> Blame:
        """Return the blame as flat arrays, row after row."""
        return Blame(self.rank.reshape(-1), self.wait_s.reshape(-1))


@dataclass
class Totals:
    """Sums over all rows of a run, by rank.

    Attributes:
        steps: Steps that are complete on every rank (asynchronous: rows of the busiest rank).
        samples: Samples over all data-parallel groups.
        rows: (ranks,) rows received.
        rank_samples: (ranks,) samples of each worker.
        step_s: (ranks,) seconds inside steps.
        parts_s: (ranks, 5) seconds in each of `record.PARTS`; unmeasured rows add nothing.
        measured: (ranks, 5) rows in which the part was measured.
        sent_bytes: (ranks,) bytes sent; NaN while none was measured.
        bubble_s: (ranks,) seconds of pipelines' bubbles; NaN while none was measured.
        blame_s: (ranks, ranks) seconds that row waited for column.
        first_s, last_s: (ranks,) start of the first and end of the last step, each rank's clock.
        pauses: The end of each pause on the clock of steps, and its duration in seconds.
        eval_s: Seconds spent in evaluations, including the one after the last step.
    """

    ranks: int

    def __post_init__(self) -> None:
        n = self.ranks
        self.steps = 0
        self.samples = 0
        self.rows: NDArray[np.int64] = np.zeros(n, np.int64)
        self.rank_samples: NDArray[np.int64] = np.zeros(n, np.int64)
        self.step_s: Floats = np.zeros(n)
        self.parts_s: Floats = np.zeros((n, len(PARTS)))
        self.measured: NDArray[np.int64] = np.zeros((n, len(PARTS)), np.int64)
        self.sent_bytes: Floats = np.full(n, np.nan)
        self.bubble_s: Floats = np.full(n, np.nan)
        self.blame_s: Floats = np.zeros((n, n))
        self.first_s: Floats = np.full(n, np.inf)
        self.last_s: Floats = np.full(n, -np.inf)
        self.pauses: tuple[tuple[float, float], ...] = ()
        self.eval_s = 0.0

    def grow(self, ranks: int) -> None:
        """Have room for more ranks, of which nothing has come yet."""
        fresh = Totals(ranks)
        for name, held in vars(self).items():
            if isinstance(held, np.ndarray):
                wide = getattr(fresh, name)
                wide[tuple(slice(size) for size in held.shape)] = held
                setattr(self, name, wide)
        self.ranks = ranks

    @property
    def wall_s(self) -> float:
        """Seconds from the first step's start to the last step's end, pauses included."""
        spans = self.last_s - self.first_s
        if not np.isfinite(spans).any():
            return 0.0
        return float(spans[np.isfinite(spans)].max())

    @property
    def paused_s(self) -> float:
        """Seconds of the pauses that ended before the last step ended."""
        last_s = float(self.last_s.max(initial=-np.inf))
        return sum(seconds for end_s, seconds in self.pauses if end_s <= last_s)

    @property
    def active_s(self) -> float:
        """As `wall_s`, without the pauses."""
        return max(self.wall_s - self.paused_s, 0.0)

    def without_pauses(self, t_s: Floats) -> Floats:
        """Return times on the clock of steps, minus the pauses before them."""
        ends_s = np.array([end_s for end_s, _ in self.pauses])
        taken_s = np.cumsum([0.0, *(seconds for _, seconds in self.pauses)])
        return np.asarray(t_s - taken_s[np.searchsorted(ends_s, t_s, side="right")])

    @property
    def train_s(self) -> float:
        """Seconds inside steps of the busiest rank: pauses and evaluations lie between steps."""
        return float(self.step_s.max(initial=0.0))

    @property
    def samples_per_s(self) -> float:
        """Global throughput over the run; NaN before the first step."""
        return self.samples / self.train_s if self.train_s > 0 else float("nan")

    @property
    def share(self) -> Floats:
        """(ranks, 5) fractions of each worker's step time; a part never measured counts 0."""
        whole = self.parts_s.sum(axis=1, keepdims=True)
        share: Floats = np.zeros_like(self.parts_s)
        np.divide(self.parts_s, whole, out=share, where=whole > 0)
        return share

    def add_rows(self, rows: NDArray[Any], parts_s: Floats, blame: Blame) -> None:
        """Add rows of any ranks.

        Args:
            rows: (rows,) RECORD rows.
            parts_s: (rows, 5) seconds in each part.
            blame: (rows,) the ranks that they waited for.
        """
        n, rank = self.ranks, rows["rank"].astype(np.int64)
        known = np.isfinite(parts_s)
        filled = np.where(known, parts_s, 0.0)
        self.rows += np.bincount(rank, minlength=n)
        self.rank_samples += np.bincount(rank, rows["samples"], n).astype(np.int64)
        self.step_s += np.bincount(rank, rows["end_s"] - rows["start_s"], n)
        for part in range(len(PARTS)):
            self.parts_s[:, part] += np.bincount(rank, filled[:, part], n)
            self.measured[:, part] += np.bincount(rank, known[:, part], n).astype(np.int64)
        np.minimum.at(self.first_s, rank, rows["start_s"])
        np.maximum.at(self.last_s, rank, rows["end_s"])
        _add_known(self.sent_bytes, rank, rows["sent_bytes"])
        _add_known(self.bubble_s, rank, rows["bubble_s"])
        at = (blame.rank >= 0) & np.isfinite(blame.wait_s)
        if at.any():
            where = (rank[at], blame.rank[at].astype(np.int64))
            np.add.at(self.blame_s, where, blame.wait_s[at])


def _add_known(sums: Floats, rank: NDArray[np.int64], values: NDArray[Any]) -> None:
    """Add measured values to the sums by rank, which are NaN before the first value."""
    has = np.isfinite(values)
    if has.any():
        touched = np.bincount(rank[has], minlength=len(sums)) > 0
        sums[touched & np.isnan(sums)] = 0.0
        sums[touched] += np.bincount(rank[has], values[has], len(sums))[touched]


def parts_of(derived: Derived) -> Floats:
    """Return the parts of derived columns as one array of shape (steps, ranks, 5)."""
    return np.stack([getattr(derived, name) for name in PARTS], axis=-1)


POINTS = 512
_FEW = 16
_SENT_WITHIN_S = 0.5  # rows reach the kernel about ten times a second


class Envelope:
    """Mean, least and greatest value over buckets of steps, in at most `POINTS` buckets.

    A value of step s goes to bucket `s // width`. When a step lies beyond the last bucket,
    neighbours are merged and `width` doubles, so any number of values in any order needs bounded
    memory, and a spike of one step stays visible forever. Short curves need little memory.
    """

    def __init__(self) -> None:
        self.width = 1
        self._first = np.full(_FEW, np.inf)
        self._t_s = np.full(_FEW, np.inf)
        self._low = np.full(_FEW, np.inf)
        self._high = np.full(_FEW, -np.inf)
        self._sum = np.zeros(_FEW)
        self._weight = np.zeros(_FEW)

    def add(
        self,
        step: NDArray[Any],
        t_s: NDArray[Any],
        value: NDArray[Any],
        weight: NDArray[Any] | None = None,
    ) -> None:
        """Add values; values that are not finite were not measured and are left out.

        Args:
            step, t_s, value: (values,) step number, time and value.
            weight: (values,) weights of the mean, for means of rates; 1 where not given.
        """
        weights = np.ones(len(value)) if weight is None else np.asarray(weight, float)
        known = np.isfinite(value) & (weights > 0)
        if not known.all():
            step, t_s, value, weights = step[known], t_s[known], value[known], weights[known]
        if not len(value):
            return
        top = int(step.max())
        while top // self.width >= POINTS:
            self._double()
        while top // self.width >= len(self._sum):
            self._grow()
        bucket = step.astype(np.int64) // self.width
        self._sum += np.bincount(bucket, value * weights, len(self._sum))
        self._weight += np.bincount(bucket, weights, len(self._sum))
        np.minimum.at(self._first, bucket, step.astype(float))
        np.minimum.at(self._t_s, bucket, t_s)
        np.minimum.at(self._low, bucket, value)
        np.maximum.at(self._high, bucket, value)

    def curve(self, origin_s: float = 0.0) -> Curve:
        """Return a copy of the curve, its times counted from `origin_s`."""
        used = self._weight > 0
        return Curve(
            step=self._first[used],
            t_s=self._t_s[used] - origin_s,
            mean=self._sum[used] / self._weight[used],
            low=self._low[used],
            high=self._high[used],
        )

    @property
    def empty(self) -> bool:
        """Whether no value was measured so far."""
        return not self._weight.any()

    @property
    def nbytes(self) -> int:
        """Memory that the buckets take, in bytes."""
        return 6 * self._sum.nbytes

    def _grow(self) -> None:
        for name in ("_first", "_t_s", "_low"):
            setattr(self, name, _filled_up(getattr(self, name), np.inf))
        self._high = _filled_up(self._high, -np.inf)
        self._sum, self._weight = _filled_up(self._sum, 0.0), _filled_up(self._weight, 0.0)

    def _double(self) -> None:
        self.width *= 2
        for name in ("_first", "_t_s", "_low"):
            setattr(self, name, _merge(getattr(self, name).reshape(-1, 2).min(axis=1), np.inf))
        self._high = _merge(self._high.reshape(-1, 2).max(axis=1), -np.inf)
        self._sum = _merge(self._sum.reshape(-1, 2).sum(axis=1), 0.0)
        self._weight = _merge(self._weight.reshape(-1, 2).sum(axis=1), 0.0)


class Throughput:
    """Throughput of workers that do not take each step together, in at most `POINTS` points.

    Such workers are at different steps at the same time, so a mean over the rows of one step is the
    rate of no moment. Here the buckets are time. A row's samples are spread evenly over its step. A
    bucket's rate is its samples divided by the time of its busiest worker, so time between steps
    (a pause, an evaluation) does not count. A bucket's step is the mean step of all workers at its
    start. When a row ends after the last bucket, neighbours are merged and `width_s` doubles.
    """

    def __init__(self, ranks: int) -> None:
        self.width_s = 1e-3
        self._begin_s = float("nan")
        self._first = np.inf
        self._end_s = np.full(ranks, -np.inf)
        self._latest_s = np.zeros(ranks)
        self._samples = np.zeros(_FEW)
        self._steps = np.zeros(_FEW)
        self._busy_s = np.zeros((_FEW, ranks))

    def grow(self, ranks: int) -> None:
        """Make room for more ranks."""
        more = ranks - len(self._end_s)
        self._end_s = np.append(self._end_s, np.full(more, -np.inf))
        self._latest_s = np.append(self._latest_s, np.zeros(more))
        self._busy_s = np.pad(self._busy_s, ((0, 0), (0, more)))

    def add(self, rows: NDArray[Any]) -> None:
        """Add RECORD rows (rows,) of any ranks."""
        rank, start_s, end_s = rows["rank"].astype(np.int64), rows["start_s"], rows["end_s"]
        if np.isnan(self._begin_s):
            self._begin_s = float(start_s.min())
        self._first = min(self._first, float(rows["step"].min()))
        for one in np.unique(rank):
            last = int(np.where(rank == one, end_s, -np.inf).argmax())
            if end_s[last] > self._end_s[one]:
                self._end_s[one], self._latest_s[one] = end_s[last], end_s[last] - start_s[last]
        start_s = np.maximum(start_s - self._begin_s, 0.0)
        end_s = np.maximum(end_s - self._begin_s, start_s)
        while end_s.max() >= POINTS * self.width_s:
            self._double()
        while end_s.max() >= len(self._samples) * self.width_s:
            for name in ("_samples", "_steps", "_busy_s"):
                values = getattr(self, name)
                setattr(self, name, np.concatenate([values, np.zeros_like(values)]))
        even = np.full(len(rows), 1.0 / len(self._end_s))
        self._samples += self._spread(start_s, end_s, rows["samples"].astype(float))
        self._steps += self._spread(start_s, end_s, even)
        for one in np.unique(rank):
            own = rank == one
            spent_s = end_s[own] - start_s[own]
            self._busy_s[:, one] += self._spread(start_s[own], end_s[own], spent_s)

    def curve(self, origin_s: float = 0.0) -> Curve:
        """Return the curve, up to the time from which the rows of a worker may still be missing."""
        busy_s = self._busy_s.max(axis=1, initial=0.0)
        used = busy_s > 0
        edge_s = np.arange(len(busy_s)) * self.width_s
        if used.any():
            last_s = self._end_s.max()
            # Others have taken all their steps, or are in a step that is longer than before.
            there = last_s - self._end_s <= 2 * self._latest_s + _SENT_WITHIN_S
            known_s = self._end_s[there].min() - self._begin_s
            whole = used & (edge_s + self.width_s <= known_s)
            used = whole if whole.any() else used
        rate = self._samples[used] / busy_s[used]
        before = np.concatenate([[0.0], self._steps.cumsum()[:-1]])[used]
        since_s = edge_s[used] + self._begin_s - origin_s
        return Curve(step=self._first + before, t_s=since_s, mean=rate, low=rate, high=rate)

    @property
    def nbytes(self) -> int:
        """Memory that the buckets take, in bytes."""
        return self._samples.nbytes + self._steps.nbytes + self._busy_s.nbytes

    def _spread(self, start_s: Floats, end_s: Floats, amount: Floats) -> Floats:
        """Return (buckets,) the amounts (rows,), each spread evenly from its start to its end."""
        size, count = self.width_s, len(self._samples)
        first, last = (start_s / size).astype(np.int64), (end_s / size).astype(np.int64)
        rate = amount / np.maximum(end_s - start_s, 1e-12)
        inside = first == last
        head = np.where(inside, amount, rate * ((first + 1) * size - start_s))
        tail = np.where(inside, 0.0, rate * (end_s - last * size))
        through = np.where(inside, 0.0, rate * size)
        into = np.bincount(first, head, count + 1) + np.bincount(last, tail, count + 1)
        steps = np.bincount(np.minimum(first + 1, last), through, count + 1)
        steps -= np.bincount(last, through, count + 1)
        return np.asarray(into + steps.cumsum())[:count]

    def _double(self) -> None:
        self.width_s *= 2
        for name in ("_samples", "_steps", "_busy_s"):
            values = getattr(self, name)
            half = values.reshape(-1, 2, *values.shape[1:]).sum(axis=1)
            setattr(self, name, np.concatenate([half, np.zeros_like(half)]))


def _merge(half: NDArray[np.float64], fill: float) -> NDArray[np.float64]:
    return np.concatenate([half, np.full(len(half), fill)])


def _filled_up(values: NDArray[np.float64], fill: float) -> NDArray[np.float64]:
    """Return twice as many buckets; the new ones are empty."""
    return np.concatenate([values, np.full(len(values), fill)])


class LossWatch:
    """Finds the first step whose loss is infinite, or is NaN although the model returned it.

    A loss that the model never returned was not measured and is not reported.

    Attributes:
        step: This step; None if there is none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._was_finite = False
        self._at_first = True
        self._never = False

    def look(
        self,
        steps: NDArray[np.integer[Any]],
        loss: NDArray[np.floating[Any]],
        seen: NDArray[np.bool_] | None = None,
    ) -> None:
        """Check losses of shape (steps,), in the order of steps.

        Args:
            seen: Whether the model returned each loss (`record.FLAG_LOSS_SEEN`). Then a NaN is
                reported from the first step on.
        """
        if self.step is not None or not len(loss):
            return
        finite = np.isfinite(loss)
        bad = np.isinf(loss)
        if self._was_finite or finite.any():
            first = 0 if self._was_finite else int(np.argmax(finite))
            bad = bad | (np.isnan(loss) & (np.arange(len(loss)) >= first))
        if seen is not None:
            bad = bad | (np.isnan(loss) & seen)
        if bad.any():
            at = int(np.argmax(bad))
            self.step = int(steps[at])
            self._never = self._at_first and at == 0 and bool(np.isnan(loss[0]))
        self._was_finite |= bool(finite.any())
        self._at_first = False

    @property
    def note(self) -> str:
        """The warning for the user; empty if there is none."""
        if self.step is None:
            return ""
        if self._never:
            return (
                f"The loss has been NaN (not a number) since the first step (step {self.step}), so "
                "the model learns nothing. Look for NaN in the data, and check that the loss "
                "function fits the model's output. Training continues."
            )
        return (
            f"The loss has been NaN or infinite since step {self.step}, so the model no longer "
            "learns. Look for NaN in the data. If there is no NaN, lower the learning rate, or use "
            "wb.fit(..., clip_norm=1.0). Training continues."
        )


MOST = 64
"""Pushes that are this many updates late or more are counted together."""


@dataclass(frozen=True)
class Staleness:
    """The distribution over pushes.

    Attributes:
        counts: Pushes by staleness in updates: 0, 1, 2, ...; the entry `MOST` is open upwards.
        mean, worst: In updates, over all pushes.
    """

    counts: tuple[int, ...]
    mean: float
    worst: float

    @staticmethod
    def of(values: NDArray[np.float64]) -> Staleness | None:
        """Count a history's column, where NaN means a row without a push.

        None if no row has a push.
        """
        known = values[np.isfinite(values)]
        if not len(known):
            return None
        whole = np.clip(np.rint(known), 0, MOST).astype(int)
        counts = tuple(int(count) for count in np.bincount(whole))
        return Staleness(counts, float(known.mean()), float(known.max()))

    @staticmethod
    def merged(parts: Sequence[Staleness | None]) -> Staleness | None:
        """Return the distribution over several runs' pushes; None if no run has pushes."""
        known = [part for part in parts if part is not None]
        if not known:
            return None
        longest = max(len(part.counts) for part in known)
        counts = [0] * longest
        for part in known:
            for late, count in enumerate(part.counts):
                counts[late] += count
        pushes = [sum(part.counts) for part in known]
        mean = sum(p.mean * n for p, n in zip(known, pushes, strict=True)) / sum(pushes)
        return Staleness(tuple(counts), mean, max(part.worst for part in known))

    @property
    def shares(self) -> tuple[float, ...]:
        """Fractions of the pushes by staleness, 0, 1, 2, ...; they add up to 1."""
        pushes = sum(self.counts)
        return tuple(count / pushes for count in self.counts)
