"""Time in which no worker is inside a step, cut short: a pause would leave a timeline to a few
pixels of steps.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

LONG, LEAST_S = 4.0, 5e-3
"""A gap is cut that is longer than so many steps (the median of those shown), and than this."""
LEFT = 1.0
"""What is left of a gap, in such steps."""


def closed(start_s: Floats, length_s: Floats) -> tuple[Floats, NDArray[np.bool_]]:
    """Return starts as they are without long gaps, and before which steps one was cut.

    Evaluations and pauses lie between steps, so time is cut only where all workers stand.

    Args:
        start_s: (steps, ranks) when each worker's steps began; NaN where it has none.
        length_s: (steps, ranks) how long they took.

    Returns:
        Starts of the same shape, the first one where it was, and (steps,) whether a gap was cut
        before that step.
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
