"""Who is slow, where somebody is: one rule for all that name a worker.

Workers are never equally fast in every step, so somebody always waits for somebody. Named is who
costs the others time again and again: the steps are cut into `BLOCKS` stretches, and in each the
worker that the others waited longest for leads the next one by so many seconds a step. It must

- lead by more than 2 ms and a tenth of the step in half of the stretches (of fewer than `FEW` steps
  by more than 5 ms and a quarter),
- lead at all in nine of ten,
- cause four fifths of all waits in three of four.

One long pause, however long, is in one stretch only. Means of stretches, since neighbouring steps
are alike (batch means: Law and Kelton, Simulation Modeling and Analysis, section 9.5.3). The
numbers are such that on recorded runs without a fault at most one in a hundred accuses anybody
(`tests/unit/test_culprit.py`): what a processor is taken away for is milliseconds, whatever the
step is.

A worker that was slow for a part of the run is looked at in that part: where one has caused four
fifths of all waits, the steps that hold the middle four fifths of what it caused are judged alone.

Of fewer than `BLOCKS` steps every single one must have cost the others 10 ms and half of the step.
Where workers meet in some steps only (`local_sgd`), those are what is counted.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
BLOCKS, FEW = 10, 60
LEAST_STEPS = 3
"""Of fewer steps nobody is named."""

SURE_S, SURE_SHARE = 2e-3, 0.10
FEW_S, FEW_SHARE = 5e-3, 0.25
SHORT_S, SHORT_SHARE = 10e-3, 0.5
MAJORITY = 0.9
OF_WAITS = 0.8
"""Of all waits in a stretch: what one worker must have caused."""


def culprit_of(
    blamed: NDArray[np.integer[Any]], waited_s: NDArray[np.floating[Any]], step_s: Floats
) -> int | None:
    """Return the worker that holds the others up; None where nobody stands out from chance.

    Args:
        blamed: (steps, ranks) for whom each worker waited in each step; -1: for nobody.
        waited_s: (steps, ranks) for how long; NaN where that was not measured.
        step_s: (steps, ranks) length of the steps; NaN where a worker has none.
    """
    steps, ranks = blamed.shape
    at = (blamed >= 0) & np.isfinite(waited_s)
    if ranks < 2 or not at.any():
        return None
    caused_s = np.zeros((steps, ranks))
    np.add.at(caused_s, (np.nonzero(at)[0], blamed[at]), waited_s[at])
    caused_s /= ranks - 1
    if (caused_s > 0).any(axis=1).sum() < LEAST_STEPS:
        return None
    known = np.isfinite(step_s)
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
    """Return who is named in steps of such lengths.

    Args:
        caused_s: (steps, ranks) how long the others waited for each worker, on the mean.
        length_s: (steps,) how long the steps were.
    """
    # Stretches of equally many steps in which somebody waited: some workers meet now and then only.
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
