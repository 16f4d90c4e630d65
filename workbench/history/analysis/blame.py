"""Which worker waited for which: seconds that each worker waited for each other worker.

A wait is for the worker whose gradient was ready last (`sync_wait`), or for the worker that the
strategy names. In a pipeline only the part of the bubble that a busier stage causes counts
(`bubble_blame`). Blocked time is assigned to its cause as in Ousterhout et al., Making
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
    """A matrix of waits; rows are the workers that waited, columns the workers they waited for.

    Attributes:
        total_s: (ranks, ranks) seconds over the counted steps; a row is NaN where this worker's
            waits were not measured; the diagonal is 0 because no worker waits for itself.
        steps: (ranks,) steps counted of each worker.
        first, last: The requested steps; None: from the first step, to the last step.
        worst: The worker that repeatedly delays the others in these steps; None if no worker
            differs from chance (`culprit`).
        stride: Only every `stride`-th step was stored and counted; 1: all steps.
    """

    total_s: Floats
    steps: NDArray[np.int64]
    first: int | None = None
    last: int | None = None
    stride: int = 1
    worst: int | None = None

    @property
    def ranks(self) -> int:
        """The number of workers."""
        return len(self.steps)

    @property
    def mean_s(self) -> Floats:
        """(ranks, ranks) seconds in a step, as the mean over all counted steps."""
        counted = np.where(self.steps > 0, self.steps, np.nan)
        return np.asarray(self.total_s / counted[:, None])

    @property
    def most(self) -> int | None:
        """The worker with the longest waits of all others together, perhaps by chance."""
        caused = np.nansum(self.total_s, axis=0)
        return int(caused.argmax()) if caused.max(initial=0.0) > 0 else None

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; values that were not measured are None."""
        return {
            "ranks": self.ranks,
            "total_s": _wire(self.total_s),
            "mean_s": _wire(self.mean_s),
            "steps": self.steps.tolist(),
            "first": self.first, "last": self.last, "stride": self.stride, "worst": self.worst,
        }  # fmt: skip


class Stored(Protocol):
    """The part of a history that is read here; `store.RunHistory` is one."""

    engines: tuple[int, ...]

    @property
    def stride(self) -> int:
        """Only every `stride`-th step is stored."""

    @property
    def totals(self) -> Totals:
        """Exact sums over all rows."""

    def together(self, *names: str) -> dict[str, NDArray[Any]]:
        """Return columns by name, all read at the same moment."""


def blame(history: Stored, first: int | None = None, last: int | None = None) -> Blame:
    """Return which worker waited for which.

    Args:
        first, last: Steps to count, both included; by default all steps, which is exact for any
            length of run. For a part of a long run, only the stored steps count (`stride`).

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
            "`last` must not be smaller than `first`.", seen=f"first={first}, last={last}",
            allowed="`last` at least as large as `first`; both steps are included",
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
        known: Whether the worker's wait was measured.
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
        """Read the waits from the history's columns."""
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
    """Return each row's value of the blamed rank in the same step; NaN if there is no value."""
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
