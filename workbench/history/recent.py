"""The complete latest steps, for the timeline, the straggler and the current throughput.

Time in which no worker is inside a step is shortened. Otherwise a pause would fill the timeline,
and the steps would be a few pixels wide.

One rule decides whether a worker is slow, in all views. Workers are never equally fast, so there
are waits even if no worker is slow. The rule names a worker only if it costs the others time
repeatedly. The steps are divided into `BLOCKS` stretches. In each stretch the two workers that
caused the longest waits are compared. The lead of the first one is the difference of these waits in
seconds per step. To be named, a worker must

- lead by more than 2 ms and a tenth of the step in half of the stretches (of fewer than `FEW` steps
  by more than 5 ms and a quarter),
- lead at all in nine of ten,
- cause four fifths of all waits in about three of four.

A long pause affects one stretch only. The rule uses means of stretches because neighbouring steps
are similar (batch means: Law and Kelton, Simulation Modeling and Analysis, section 9.5.3). The
numbers are such that at most one in a hundred recorded runs without a fault names a worker
(`tests/unit/test_culprit.py`). The system takes a processor away for milliseconds, independent of
the step's length.

A worker that was slow in a part of the run is judged in this part. If one worker has caused four
fifths of all waits, only the steps with the middle four fifths of these waits are judged. With
fewer than `BLOCKS` steps, each step must have cost the others 10 ms and half of the step. If
workers meet in some steps only (`local_sgd`), only these steps are counted.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..shared.record import PARTS
from .snapshot import Timeline

if TYPE_CHECKING:
    from .totals import Blame

Floats = NDArray[np.float64]
KEPT_STEPS = 128
TIMELINE_STEPS = 60
WINDOW_S = 2.0
SLOW_WINDOW_S = 1.5
"""Time window of the search for a slow worker; three steps of half a second fit."""

_TICKS = 4096
_FEW = 16
_WAIT = PARTS.index("sync_wait_s")


class Recent:
    """Rings over the latest `KEPT_STEPS` rows of each rank.

    Each rank has its own write position, so asynchronous workers, which are at different steps, are
    aligned at their latest rows. If workers take each step together, rows are aligned by their
    steps. A worker that was away has no rows in the steps that the others took meanwhile. Rings
    grow until they are full, so short runs take little.

    Args:
        joined: Whether workers take each step together.
    """

    def __init__(self, ranks: int, *, joined: bool = False) -> None:
        self._joined, shape = joined, (_FEW, ranks)
        self._step = np.zeros(shape)
        self._start_s = np.full(shape, np.nan)
        self._parts_s = np.full((*shape, len(PARTS)), np.nan)
        self._blamed = np.full(shape, -1, np.int64)
        self._blamed_s = np.zeros(shape)
        self._at = np.zeros(ranks, np.int64)
        self._tick_s = np.zeros(_FEW)
        self._tick_start_s = np.zeros(_FEW)
        self._tick_samples = np.zeros(_FEW)
        self._ticks = 0

    def grow(self, ranks: int) -> None:
        """Make room for more ranks, which have no rows yet."""
        more = ranks - len(self._at)
        for name, fill in (
            ("_step", 0), ("_start_s", np.nan), ("_parts_s", np.nan), ("_blamed", -1),
            ("_blamed_s", 0),
        ):  # fmt: skip
            ring = getattr(self, name)
            room = np.full((len(ring), more, *ring.shape[2:]), fill, ring.dtype)
            setattr(self, name, np.concatenate([ring, room], axis=1))
        self._at = np.append(self._at, np.zeros(more, np.int64))

    def add(self, rank: int, rows: NDArray[Any], parts_s: Floats, blame: Blame) -> None:
        """Add one rank's rows: RECORD (rows,), their parts (rows, 5), the blamed ranks (rows,)."""
        rows, parts_s = rows[-KEPT_STEPS:], parts_s[-KEPT_STEPS:]
        self._make_room(int(self._at[rank]) + len(rows))
        slots = (self._at[rank] + np.arange(len(rows))) % len(self._step)
        self._step[slots, rank] = rows["step"]
        self._start_s[slots, rank] = rows["start_s"]
        self._parts_s[slots, rank] = parts_s
        self._blamed[slots, rank] = blame.rank[-KEPT_STEPS:]
        self._blamed_s[slots, rank] = blame.wait_s[-KEPT_STEPS:]
        self._at[rank] += len(rows)

    def tick(self, start_s: Floats, end_s: Floats, samples: NDArray[Any]) -> None:
        """Count samples processed from `start_s` to `end_s`, each of shape (ticks,)."""
        start_s, end_s, samples = start_s[-_TICKS:], end_s[-_TICKS:], samples[-_TICKS:]
        for name in ("_tick_s", "_tick_start_s", "_tick_samples"):
            setattr(self, name, _grown(getattr(self, name), self._ticks + len(end_s), _TICKS))
        slots = (self._ticks + np.arange(len(end_s))) % len(self._tick_s)
        self._tick_start_s[slots] = start_s
        self._tick_s[slots], self._tick_samples[slots] = end_s, samples
        self._ticks += len(end_s)

    @property
    def nbytes(self) -> int:
        """Memory that the rings take, in bytes."""
        return sum(a.nbytes for a in vars(self).values() if isinstance(a, np.ndarray))

    def samples_per_s(self) -> float:
        """Return the throughput over the latest `WINDOW_S` (or the latest step if longer)."""
        used = min(self._ticks, _TICKS)
        if not used:
            return float("nan")
        end, start = self._tick_s[:used], self._tick_start_s[:used]
        inside = end > end.max() - WINDOW_S
        span = float(end.max() - start[inside].min())
        return float(self._tick_samples[:used][inside].sum()) / span if span > 0 else float("nan")

    def timeline(
        self, origin_s: Floats, steps: int = TIMELINE_STEPS, away: Collection[int] = ()
    ) -> Timeline:
        """Return the latest steps of every worker.

        Args:
            origin_s: (ranks,) time that counts as 0, on each rank's clock.
            away: Ranks that take no part now; their earlier steps do not count as the latest.
        """
        rows = self._latest(steps)
        step = np.nan_to_num(rows(self._step)).max(axis=1, initial=0)
        parts_s, begun_s = np.nan_to_num(rows(self._parts_s)), rows(self._start_s) - origin_s
        if away and not self._joined:
            begun_s[:, list(away)], parts_s[:, list(away)] = np.nan, 0.0
        start_s, cut = closed(begun_s, parts_s.sum(axis=2))
        return Timeline(step, start_s, parts_s, tuple(int(one) for one in step[cut]))

    def median_wait_s(self) -> Floats:
        """Return (ranks,) the median sync wait over the latest steps; NaN if not measured."""
        waits = self._latest(KEPT_STEPS)(self._parts_s)[:, :, _WAIT]
        return np.array([_median(waits[:, rank]) for rank in range(waits.shape[1])])

    def straggler(self) -> tuple[int | None, float, int]:
        """Return the worker that the others currently wait for, the wait, and the number of steps.

        The search uses the steps of the latest `SLOW_WINDOW_S`, at most `TIMELINE_STEPS`. So
        earlier fast steps do not hide a worker that has just become slow. If these steps are too
        few to name a worker, the latest `FEW` steps are used.

        Returns:
            Its rank (None: no worker is slow), the median wait that it causes in seconds, and the
            number of searched steps.
        """
        some = self._within(SLOW_WINDOW_S)
        for steps in (some,) if some >= FEW else (some, FEW):
            rows = self._latest(steps)
            blamed, blamed_s = rows(self._blamed), rows(self._blamed_s)
            parts_s = rows(self._parts_s)
            there = np.isfinite(parts_s).any(axis=2)
            length_s = np.where(there, np.nansum(parts_s, axis=2), np.nan)
            rank = culprit_of(blamed, blamed_s, length_s)
            if rank is not None:
                return rank, float(np.median(blamed_s[blamed == rank])), len(blamed)
        return None, 0.0, len(blamed)

    def _within(self, seconds: float) -> int:
        """Return the number of latest steps that began within so many seconds, 3 to 60."""
        start_s = self._latest(TIMELINE_STEPS)(self._start_s)
        if not len(start_s):
            return LEAST_STEPS
        # Each rank's own clock: hosts may differ.
        known_s = np.where(np.isfinite(start_s), start_s, -np.inf)
        inside = start_s > known_s.max(axis=0) - seconds
        return max(int(inside.sum(axis=0).max(initial=0)), LEAST_STEPS)

    def _latest(self, steps: int) -> _Window:
        """Return a reader of the latest rows: arrays (KEPT_STEPS, ranks, ...) in time order."""
        have = int(min(self._at.max(initial=0), steps, KEPT_STEPS))
        slots = (self._at[None, :] - have + np.arange(have)[:, None]) % len(self._step)
        window = _Window(slots)
        step = window(self._step)
        if self._joined and (step != step[:, :1]).any():
            return self._by_step(have)
        return window

    def _by_step(self, steps: int) -> _Window:
        """Return a reader of the latest steps that any rank has taken, as `_latest`."""
        used = np.minimum(self._at, len(self._step))
        own = [self._step[:many, rank] for rank, many in enumerate(used)]
        wanted = np.unique(np.concatenate(own))[-steps:]
        slots = np.zeros((len(wanted), len(own)), np.int64)
        there = np.zeros(slots.shape, bool)
        for rank, step in enumerate(own):
            if not len(step):
                continue
            order = np.argsort(step, kind="stable")
            at = np.searchsorted(step[order], wanted, side="right") - 1
            slots[:, rank] = order[np.maximum(at, 0)]
            there[:, rank] = (at >= 0) & (step[slots[:, rank]] == wanted)
        return _Window(slots, there)

    def _make_room(self, rows: int) -> None:
        self._step = _grown(self._step, rows, KEPT_STEPS)
        self._start_s = _grown(self._start_s, rows, KEPT_STEPS, np.nan)
        self._parts_s = _grown(self._parts_s, rows, KEPT_STEPS, np.nan)
        self._blamed = _grown(self._blamed, rows, KEPT_STEPS, -1)
        self._blamed_s = _grown(self._blamed_s, rows, KEPT_STEPS)


class _Window:
    """Reads rings at some slots; empty slots (not `there`) give NaN, or -1 for integers."""

    def __init__(self, slots: NDArray[np.int64], there: NDArray[np.bool_] | None = None) -> None:
        self._slots, self._there = slots, there

    def __call__(self, ring: NDArray[Any]) -> NDArray[Any]:
        found = np.asarray(ring[self._slots, np.arange(self._slots.shape[1])[None, :]])
        if self._there is not None:
            found[~self._there] = -1 if ring.dtype.kind == "i" else np.nan
        return found


def _grown(ring: NDArray[Any], need: int, most: int, fill: float = 0.0) -> NDArray[Any]:
    """Return a ring of room for `need` entries, but never for more than `most`.

    A ring that still grows has not wrapped around, so all entries keep their places.
    """
    if min(need, most) <= len(ring):
        return ring
    fresh = np.full((min(most, max(2 * len(ring), need)), *ring.shape[1:]), fill, ring.dtype)
    fresh[: len(ring)] = ring
    return fresh


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")


LONG, LEAST_S = 4.0, 5e-3
"""A gap is cut if it is longer than so many median steps, and longer than this time."""
LEFT = 1.0
"""The remaining length of a cut gap, in median steps."""


def closed(start_s: Floats, length_s: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Return start times without long gaps, and the steps before which a gap was cut.

    Evaluations and pauses lie between steps, so time is cut only if all workers are outside steps.

    Args:
        start_s: (steps, ranks) start of each worker's steps; NaN for missing steps.
        length_s: (steps, ranks) duration of the steps.

    Returns:
        Starts of the same shape, with an unchanged first start, and (steps,) whether a gap was cut
        before the step.
    """
    cut = np.zeros(len(start_s), bool)
    known = np.isfinite(start_s)
    if known.sum() < 2:
        return start_s, cut
    begin, took_s = start_s[known], np.nan_to_num(length_s[known])
    order = np.argsort(begin, kind="stable")
    reached = np.maximum.accumulate((begin + took_s)[order])
    gap_s = np.concatenate([[0.0], begin[order][1:] - reached[:-1]])
    typical_s = float(np.median(took_s))
    long = gap_s > max(LONG * typical_s, LEAST_S)
    if not long.any():
        return start_s, cut
    moved = np.empty(len(begin))
    moved[order] = begin[order] - np.cumsum(np.where(long, gap_s - LEFT * typical_s, 0.0))
    found = start_s.copy()
    found[known] = moved
    cut[np.nonzero(known)[0][order[long]]] = True
    return found, cut


BLOCKS, FEW = 10, 60
LEAST_STEPS = 3
"""With fewer steps, no worker is named."""

SURE_S, SURE_SHARE = 2e-3, 0.10
FEW_S, FEW_SHARE = 5e-3, 0.25
SHORT_S, SHORT_SHARE = 10e-3, 0.5
MAJORITY = 0.9
OF_WAITS = 0.8
"""Share of all waits in a stretch that one worker must have caused."""


def culprit_of(
    blamed: NDArray[np.integer[Any]], waited_s: NDArray[np.floating[Any]], step_s: Floats
) -> int | None:
    """Return the worker that delays the others; None if the waits can be chance.

    Args:
        blamed: (steps, ranks) the rank that each worker waited for in each step; -1: none.
        waited_s: (steps, ranks) duration of these waits; NaN if not measured.
        step_s: (steps, ranks) length of the steps; NaN for missing steps.
    """
    steps, ranks = blamed.shape
    at = (blamed >= 0) & np.isfinite(waited_s)
    if ranks < 2 or not at.any():
        return None
    caused_s = np.zeros((steps, ranks))
    np.add.at(caused_s, (np.nonzero(at)[0], blamed[at]), waited_s[at])
    known = np.isfinite(step_s)
    caused_s /= np.maximum(known.sum(axis=1, keepdims=True) - 1, 1)  # of those who were there
    if (caused_s > 0).any(axis=1).sum() < LEAST_STEPS:
        return None
    length_s = np.where(known, step_s, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    rank = _named(caused_s, length_s)
    if rank is not None:
        return rank
    total_s = caused_s.sum(axis=0)
    rank = int(total_s.argmax())
    if total_s[rank] < OF_WAITS * total_s.sum():
        return None
    reached = caused_s[:, rank].cumsum() / total_s[rank]
    edge = (1 - OF_WAITS) / 2
    part = slice(int(np.searchsorted(reached, edge)), int(np.searchsorted(reached, 1 - edge)) + 1)
    if (caused_s[part].sum(axis=1) > 0).sum() < BLOCKS:
        return None
    return rank if _named(caused_s[part], length_s[part]) == rank else None


def _named(caused_s: Floats, length_s: Floats) -> int | None:
    """Return the worker that the rule names for steps of such lengths.

    Args:
        caused_s: (steps, ranks) mean time that the others waited for each worker.
        length_s: (steps,) length of the steps.
    """
    # Stretches with equal numbers of steps with waits, because some workers meet in some steps
    # only.
    meetings = np.flatnonzero(caused_s.any(axis=1))
    count = len(meetings)
    blocks = min(BLOCKS, count)
    begins = np.array([0, *(meetings[i * count // blocks - 1] + 1 for i in range(1, blocks))])
    sizes = np.diff([*begins, len(caused_s)])
    blocks_s = np.add.reduceat(caused_s, begins) / sizes[:, None]
    whole_s = np.add.reduceat(length_s, begins) / sizes
    rank = int(np.median(blocks_s, axis=0).argmax())
    lead_s = blocks_s[:, rank] - np.delete(blocks_s, rank, axis=1).max(axis=1)
    if count < BLOCKS:
        enough = lead_s > np.maximum(SHORT_S, SHORT_SHARE * whole_s)
        return rank if enough.all() else None
    least_s, share = (FEW_S, FEW_SHARE) if count < FEW else (SURE_S, SURE_SHARE)
    if np.median(lead_s) <= max(least_s, share * float(np.median(whole_s))):
        return None
    waits_s = blocks_s.sum(axis=1)
    caused = np.divide(blocks_s[:, rank], waits_s, out=np.zeros_like(waits_s), where=waits_s > 0)
    sure = (lead_s > 0).mean() >= MAJORITY and np.quantile(caused, 0.25) >= OF_WAITS
    return rank if sure else None
