"""The latest steps in full, for the timeline, the straggler and the present throughput."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import PARTS
from .culprit import FEW, LEAST_STEPS, culprit_of
from .gaps import closed
from .snapshot import Timeline
from .totals import Blame

Floats = NDArray[np.float64]
KEPT_STEPS = 128
TIMELINE_STEPS = 60
WINDOW_S = 2.0
SLOW_WINDOW_S = 1.5
"""Of the steps that are looked at for who is slow: three steps of half a second fit in."""

_TICKS = 4096
_FEW = 16
_WAIT = PARTS.index("sync_wait_s")


class Recent:
    """Rings over the latest `KEPT_STEPS` rows of each rank.

    Each rank has its own write position, so asynchronous workers, which are at different steps,
    are aligned at their latest rows. Rings grow until they are full, so short runs take little.
    """

    def __init__(self, ranks: int) -> None:
        shape = (_FEW, ranks)
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

    def add(self, rank: int, rows: NDArray[Any], parts_s: Floats, blame: Blame) -> None:
        """Add one rank's rows: RECORD (rows,), their parts (rows, 5), who is to blame (rows,)."""
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
        """Count samples that were done from `start_s` to `end_s`, each of shape (ticks,)."""
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

    def timeline(self, origin_s: Floats, steps: int = TIMELINE_STEPS) -> Timeline:
        """Return the latest steps of every worker.

        Args:
            origin_s: (ranks,) time that counts as 0, on each rank's clock.
        """
        rows = self._latest(steps)
        step = rows(self._step).max(axis=1, initial=0)
        parts_s = np.nan_to_num(rows(self._parts_s))
        start_s, cut = closed(rows(self._start_s) - origin_s, parts_s.sum(axis=2))
        return Timeline(step, start_s, parts_s, tuple(int(one) for one in step[cut]))

    def median_wait_s(self) -> Floats:
        """Return (ranks,) the median sync wait over the latest steps; NaN where not measured."""
        waits = self._latest(KEPT_STEPS)(self._parts_s)[:, :, _WAIT]
        return np.array([_median(waits[:, rank]) for rank in range(waits.shape[1])])

    def straggler(self) -> tuple[int | None, float, int]:
        """Return the worker that the others wait for now, for how long, and in how many steps.

        Looked at are the steps of the latest `SLOW_WINDOW_S`, at most `TIMELINE_STEPS`: a worker
        that has just become slow is not outvoted by all the fast steps before. Where they are too
        few to name anybody, the latest `FEW` are.

        Returns:
            Its rank (None: nobody stands out), the median wait it causes in seconds, and how many
            steps were looked at.
        """
        some = self._within(SLOW_WINDOW_S)
        for steps in (some,) if some >= FEW else (some, FEW):
            rows = self._latest(steps)
            blamed, blamed_s = rows(self._blamed), rows(self._blamed_s)
            rank = culprit_of(blamed, blamed_s, np.nansum(rows(self._parts_s), axis=2))
            if rank is not None:
                return rank, float(np.median(blamed_s[blamed == rank])), len(blamed)
        return None, 0.0, len(blamed)

    def _within(self, seconds: float) -> int:
        """Return how many of the latest steps began within so many seconds, 3 to 60."""
        start_s = self._latest(TIMELINE_STEPS)(self._start_s)
        if not len(start_s):
            return LEAST_STEPS
        # Each rank's own clock: hosts may differ.
        inside = start_s > np.nanmax(start_s, axis=0, initial=-np.inf) - seconds
        return max(int(inside.sum(axis=0).max(initial=0)), LEAST_STEPS)

    def _latest(self, steps: int) -> _Window:
        """Return a reader of the latest rows: arrays (KEPT_STEPS, ranks, ...) in time order."""
        have = int(min(self._at.max(initial=0), steps, KEPT_STEPS))
        slots = (self._at[None, :] - have + np.arange(have)[:, None]) % len(self._step)
        return _Window(slots)

    def _make_room(self, rows: int) -> None:
        self._step = _grown(self._step, rows, KEPT_STEPS)
        self._start_s = _grown(self._start_s, rows, KEPT_STEPS, np.nan)
        self._parts_s = _grown(self._parts_s, rows, KEPT_STEPS, np.nan)
        self._blamed = _grown(self._blamed, rows, KEPT_STEPS, -1)
        self._blamed_s = _grown(self._blamed_s, rows, KEPT_STEPS)


class _Window:
    def __init__(self, slots: NDArray[np.int64]) -> None:
        self._slots = slots

    def __call__(self, ring: NDArray[Any]) -> NDArray[Any]:
        return np.asarray(ring[self._slots, np.arange(self._slots.shape[1])[None, :]])


def _grown(ring: NDArray[Any], need: int, most: int, fill: float = 0.0) -> NDArray[Any]:
    """Return a ring of room for `need` entries, but never for more than `most`.

    It has not begun anew where it still grows, so all entries keep their places.
    """
    if min(need, most) <= len(ring):
        return ring
    fresh = np.full((min(most, max(2 * len(ring), need)), *ring.shape[1:]), fill, ring.dtype)
    fresh[: len(ring)] = ring
    return fresh


def _median(values: Floats) -> float:
    known = values[np.isfinite(values)]
    return float(np.median(known)) if len(known) else float("nan")
