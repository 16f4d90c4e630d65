"""Who is slow, where somebody is: one rule for all that name a worker.

Workers are never equally fast in every step, so somebody always waits for somebody. Named is who
costs the others time again and again: the steps are cut into `BLOCKS` stretches, and in each the
worker that the others waited longest for leads the next one by so many seconds a step. Its lead
must be more than 1 ms and 5 % of the step (`metrics.REAL_WAIT_S`, `REAL_WAIT_SHARE`) in half of the
stretches, and it must lead in `MAJORITY` of them: one long pause, however long, is in one stretch
only. Means of stretches, since neighbouring steps are alike (batch means: Law and Kelton,
Simulation Modeling and Analysis, section 9.5.3).

Of fewer steps than that every single one must have cost the others `SHORT_S` and half of the step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import REAL_WAIT_S, REAL_WAIT_SHARE

Floats = NDArray[np.float64]
BLOCKS = 10
MAJORITY = 0.8
LEAST_STEPS = 3
"""Of fewer steps nobody is named."""

SHORT_S, SHORT_SHARE = 10e-3, 0.5
"""What each step must have cost the others where there are fewer than `BLOCKS`."""


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
    if ranks < 2 or steps < LEAST_STEPS:
        return None
    at = (blamed >= 0) & np.isfinite(waited_s)
    if not at.any():
        return None
    caused_s = np.zeros((steps, ranks))
    np.add.at(caused_s, (np.nonzero(at)[0], blamed[at]), waited_s[at])
    caused_s /= ranks - 1
    known = np.isfinite(step_s)
    length_s = np.where(known, step_s, 0.0).sum(axis=1) / np.maximum(known.sum(axis=1), 1)
    begins = np.linspace(0, steps, min(BLOCKS, steps), endpoint=False).astype(int)
    sizes = np.diff([*begins, steps])
    blocks_s = np.add.reduceat(caused_s, begins) / sizes[:, None]
    whole_s = np.add.reduceat(length_s, begins) / sizes
    rank = int(np.median(blocks_s, axis=0).argmax())
    lead_s = blocks_s[:, rank] - np.delete(blocks_s, rank, axis=1).max(axis=1)
    if steps < BLOCKS:
        enough = lead_s > np.maximum(SHORT_S, SHORT_SHARE * whole_s)
        return rank if enough.all() else None
    least_s = max(REAL_WAIT_S, REAL_WAIT_SHARE * float(np.median(whole_s)))
    if np.median(lead_s) <= least_s or (lead_s > 0).mean() < MAJORITY:
        return None
    return rank
