"""Exact sums over a whole run; they do not suffer when rows are decimated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import PARTS, Derived

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Blame:
    """Who is to blame for rows: `rank` (-1: nobody) and `wait_s`, arrays of equal shape."""

    rank: NDArray[np.int32]
    wait_s: NDArray[np.floating[Any]]

    @staticmethod
    def of(derived: Derived) -> Blame:
        """Return the blame in derived columns: (steps, ranks)."""
        return Blame(derived.blamed_rank, derived.blamed_s)

    def __getitem__(self, at: Any) -> Blame:
        return Blame(self.rank[at], self.wait_s[at])

    def flat(self) -> Blame:
        """Return the same, row after row."""
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
        parts_s: (ranks, 5) seconds in each of `metrics.PARTS`; unmeasured rows add nothing.
        measured: (ranks, 5) rows in which the part was measured.
        sent_bytes: (ranks,) bytes sent; NaN while none was measured.
        bubble_s: (ranks,) seconds of pipelines' bubbles; NaN while none was measured.
        blame_s: (ranks, ranks) seconds that row waited for column.
        first_s, last_s: (ranks,) start of the first and end of the last step, each rank's clock.
        pauses: When each pause ended, on the clock of steps, and how many seconds it took.
        eval_s: Seconds spent in evaluations, that after the last step included.
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

    @property
    def wall_s(self) -> float:
        """Seconds from the first step's start to the last step's end, pauses included."""
        spans = self.last_s - self.first_s
        if not np.isfinite(spans).any():
            return 0.0
        return float(spans[np.isfinite(spans)].max())

    @property
    def paused_s(self) -> float:
        """Seconds of the pauses that ended before the last step did."""
        last_s = float(self.last_s.max(initial=-np.inf))
        return sum(seconds for end_s, seconds in self.pauses if end_s <= last_s)

    @property
    def active_s(self) -> float:
        """As `wall_s`, without the pauses."""
        return max(self.wall_s - self.paused_s, 0.0)

    def without_pauses(self, t_s: Floats) -> Floats:
        """Return times, on the clock of steps, less the pauses that had ended by then."""
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
            blame: (rows,) whom they waited for.
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
    """Add what was measured to the sums by rank, which are NaN before the first."""
    has = np.isfinite(values)
    if has.any():
        touched = np.bincount(rank[has], minlength=len(sums)) > 0
        sums[touched & np.isnan(sums)] = 0.0
        sums[touched] += np.bincount(rank[has], values[has], len(sums))[touched]


def parts_of(derived: Derived) -> Floats:
    """Return the parts of derived columns as one array of shape (steps, ranks, 5)."""
    return np.stack([getattr(derived, name) for name in PARTS], axis=-1)
