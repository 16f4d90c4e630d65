"""Loss curves with fewer points, which keep their extremes."""

from __future__ import annotations

import numpy as np

from .summary import LossCurve


def thinned(curve: LossCurve, points: int) -> LossCurve:
    """Return at most so many points: means over neighbours, and their extremes.

    A point stands where its first step does, but the last one where the last step does, so that a
    curve ends where the run did on all axes.
    """
    count = len(curve.loss)
    if count <= points:
        return curve
    starts = np.unique(np.linspace(0, count, points, endpoint=False, dtype=int))
    at = np.append(starts[:-1], count - 1)
    return LossCurve(
        step=curve.step[at],
        t_s=curve.t_s[at],
        samples=curve.samples[at],
        loss=np.add.reduceat(curve.loss, starts) / np.diff(np.append(starts, count)),
        low=np.minimum.reduceat(curve.low, starts),
        high=np.maximum.reduceat(curve.high, starts),
    )
