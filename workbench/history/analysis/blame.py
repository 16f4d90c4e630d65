"""Who waited for whom: seconds that each worker waited for each other one.

A wait is for the worker whose gradient was ready last (`sync_wait`), or for whom the
strategy names; of a pipeline's bubble only what a busier stage causes counts
(`bubble_blame`). Blocked time is set against its cause as in Ousterhout et al., Making
Sense of Performance in Data Analytics Frameworks, NSDI 2015.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from ...shared.record import PARTS
from ..recent import culprit_of

if TYPE_CHECKING:
    from ..totals import Totals

Floats = NDArray[np.float64]
_WAIT = PARTS.index("sync_wait_s")


@dataclass(frozen=True, eq=False)
class Blame:
    """A matrix of waits; its rows are the workers who waited, its columns those waited for.

    Attributes:
        total_s: (ranks, ranks) seconds over the counted steps; a row is NaN where this worker's
            waits were not measured; the diagonal is 0 because no worker waits for itself.
        steps: (ranks,) steps counted of each worker.
        first, last: The steps that were asked for; None: from the first, to the last.
        worst: The worker that holds the others up in these steps again and again; None where nobody
            stands out from chance (`culprit`).
        stride: Every how many-th step was stored and counted; 1 for all.
    """

    total_s: Floats
    steps: NDArray[np.int64]
    first: int | None = None
    last: int | None = None
    stride: int = 1
    worst: int | None = None

    @property
    def ranks(self) -> int:
        """How many workers there are."""
        return len(self.steps)

    @property
    def mean_s(self) -> Floats:
        """(ranks, ranks) seconds of a step, on the mean over all counted steps."""
        counted = np.where(self.steps > 0, self.steps, np.nan)
        return np.asarray(self.total_s / counted[:, None])

    @property
    def most(self) -> int | None:
        """The worker that all others together waited longest for, be it by chance."""
        caused = np.nansum(self.total_s, axis=0)
        return int(caused.argmax()) if caused.max(initial=0.0) > 0 else None

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; what was not measured is None."""
        return {
            "ranks": self.ranks,
            "total_s": _wire(self.total_s),
            "mean_s": _wire(self.mean_s),
            "steps": self.steps.tolist(),
            "first": self.first, "last": self.last, "stride": self.stride, "worst": self.worst,
        }  # fmt: skip


class Stored(Protocol):
    """What is read of a history; `store.RunHistory` is one."""

    engines: tuple[int, ...]

    @property
    def stride(self) -> int:
        """Of how many steps one is stored."""

    @property
    def totals(self) -> Totals:
        """Exact sums over all rows."""

    def together(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return columns of one moment, by name."""


def blame(history: Stored, first: int | None = None, last: int | None = None) -> Blame:
    """Return who waited for whom.

    Args:
        first, last: Steps to count, both included; all of them by default, which is exact however
            long the run was. Parts of a long run count the steps that are stored (`stride`).

    Raises:
        PlanError: `last` is before `first`.
    """
    n = len(history.engines)
    if first is None and last is None:
        totals = history.totals
        known = (totals.measured[:, _WAIT] > 0) | np.isfinite(totals.bubble_s)
        worst = Waits.of(history).culprit(n)
        return Blame(_masked(totals.blame_s, known), totals.rows.copy(), worst=worst)
    if first is not None and last is not None and last < first:
        raise PlanError(
            "last must not be before first.", seen=f"first={first}, last={last}",
            allowed="last at least as large as first, both included",
            code="WB-PLAN-041",
        )  # fmt: skip
    rows = Waits.of(history)
    low = rows.step >= (first if first is not None else 0)
    rows = rows.only(low & (rows.step <= (last if last is not None else np.inf)))
    rank, blamed, waited = rows.rank, rows.blamed, rows.waited_s
    total = np.zeros((n, n))
    at = (blamed >= 0) & np.isfinite(waited)
    np.add.at(total, (rank[at], blamed[at]), waited[at])
    known = np.bincount(rank[rows.known], minlength=n) > 0
    steps = np.bincount(rank, minlength=n).astype(np.int64)
    return Blame(_masked(total, known), steps, first, last, history.stride, rows.culprit(n))


@dataclass(frozen=True)
class Waits:
    """Stored waits, one per row of the history; all arrays are (rows,).

    Attributes:
        waited_s: Seconds for which `blamed` is to blame.
        known: Whether it was measured whether the worker waited.
        step_s: Length of the worker's step.
    """

    step: NDArray[np.int64]
    rank: NDArray[np.int64]
    blamed: NDArray[np.int64]
    waited_s: Floats
    known: NDArray[np.bool_]
    step_s: Floats

    @staticmethod
    def of(history: Stored) -> Waits:
        """Read them off the history's columns."""
        names = ("step", "rank", "blamed_rank", "sync_wait_s", "bubble_s", "step_s")
        step, rank, blamed, wait, bubble, step_s = history.together(*names).values()
        piped = np.isfinite(bubble)
        if piped.any():
            busy = step_s - bubble
            theirs = _of_blamed(step, rank, blamed, busy)
            wait = np.where(piped, np.minimum(theirs - busy, bubble), wait)
        return Waits(step, rank, blamed, wait, np.isfinite(wait) | piped, step_s)

    def only(self, picked: NDArray[np.bool_]) -> Waits:
        """Return some of the rows."""
        return Waits(*(values[picked] for values in vars(self).values()))

    def culprit(self, ranks: int) -> int | None:
        """Return the worker that repeatedly holds up the others; None if no worker stands out."""
        numbers, index = np.unique(self.step, return_inverse=True)
        shape = (len(numbers), ranks)
        blamed, waited, lasted = np.full(shape, -1), np.full(shape, np.nan), np.full(shape, np.nan)
        blamed[index, self.rank] = self.blamed
        waited[index, self.rank], lasted[index, self.rank] = self.waited_s, self.step_s
        return culprit_of(blamed, waited, lasted)


def _of_blamed(
    step: NDArray[np.int64], rank: NDArray[np.int64], blamed: NDArray[np.int64], value: Floats
) -> Floats:
    """Return each row's value of the blamed rank in the same step; NaN where there is none."""
    _, index = np.unique(step, return_inverse=True)
    table = np.full((index.max(initial=0) + 1, max(rank.max(initial=0), 0) + 1), np.nan)
    table[index, rank] = value
    named = (blamed >= 0) & (blamed < table.shape[1])
    return np.where(named, table[index, np.where(named, blamed, 0)], np.nan)


def _masked(total: Floats, known: NDArray[np.bool_]) -> Floats:
    masked = np.where(known[:, None], total, np.nan)
    np.fill_diagonal(masked, 0.0)
    return masked


def _wire(values: Floats) -> list[list[float | None]]:
    return [[None if v != v else float(v) for v in row] for row in values]
