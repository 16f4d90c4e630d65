"""The latest steps of every worker as they were, and the ghost of them as they would have been."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..metrics import PARTS
from .gaps import closed

Floats = NDArray[np.float64]
SHOWN_STEPS = 8
_DATA, _COMPUTE, _WAIT, _TRANSFER, _OTHER = range(len(PARTS))


@dataclass(frozen=True, eq=False)
class Lanes:
    """Some steps of every worker, without the time between them in which all stood (a pause).

    Attributes:
        step: (steps,) their numbers.
        start_s: (steps, ranks) NaN where a rank has no row; the first one begins at 0.
        parts_s: (steps, ranks, 5) seconds in each of `metrics.PARTS`; NaN where not measured.
    """

    step: NDArray[np.int64]
    start_s: Floats
    parts_s: Floats

    @staticmethod
    def of(step: NDArray[np.int64], start_s: Floats, parts_s: Floats) -> Lanes:
        """Return the latest of some steps."""
        parts = parts_s[-SHOWN_STEPS:]
        start, _ = closed(start_s[-SHOWN_STEPS:], np.nansum(parts, axis=2))
        begin = float(np.nanmin(start)) if np.isfinite(start).any() else 0.0
        return Lanes(step[-SHOWN_STEPS:], start - begin, parts)

    def tail(self, values: Floats) -> Floats:
        """Return what belongs to these steps of an array over all of them."""
        return np.asarray(values[len(values) - len(self.step) :])

    @property
    def length_s(self) -> float:
        """Seconds from the first step's start to the last one's end."""
        ends = self.start_s + np.nansum(self.parts_s, axis=2)
        return float(np.nanmax(ends)) if np.isfinite(ends).any() else float("nan")

    def to_wire(self) -> dict[str, Any]:
        """Return JSON-ready data; None for NaN."""
        return {
            "step": self.step.tolist(),
            "start_s": [[_known(v) for v in row] for row in self.start_s.tolist()],
            "parts_s": [
                [[_known(v) for v in parts] for parts in row] for row in self.parts_s.tolist()
            ],
        }


def ghost_of(real: Lanes, saved_s: Floats, k: int, *, alone: bool = False) -> Lanes:
    """Return the steps as they would have been.

    Args:
        saved_s: Seconds saved, (steps,) where workers step together, (steps, ranks) where each
            goes `alone` and waits less.
        k: The worker who is as fast as the median of the others.
    """
    parts = real.parts_s.copy()
    own = parts[:, :, [_DATA, _COMPUTE, _OTHER]]
    median = np.nanmedian(np.delete(np.nansum(own, axis=2), k, axis=1), axis=1)
    cut = np.maximum(np.nansum(own[:, k], axis=1) - median, 0.0)
    _shorten(parts[:, k], cut)
    waits = np.nan_to_num(parts[:, :, _WAIT])
    met = waits.max(axis=1) > 0
    if alone:
        parts[:, :, _WAIT] -= saved_s
    else:
        kept = waits - saved_s[:, None]
        kept[:, k] = _own_wait(waits[:, k], cut, saved_s, met)
        parts[:, :, _WAIT] = np.maximum(kept, 0.0)
    return Lanes(real.step, _starts(real, parts), parts)


def _own_wait(wait: Floats, cut: Floats, saved_s: Floats, met: NDArray[np.bool_]) -> Floats:
    """Return how long the worker who is fast now waits: what it gains until the next meeting."""
    found, ahead = np.zeros(len(wait)), 0.0
    for at in range(len(wait)):
        ahead += float(cut[at])
        if met[at]:
            found[at], ahead = wait[at] + ahead - saved_s[at], 0.0
    return found


def _shorten(parts: Floats, cut: Floats) -> None:
    """Take seconds off a worker's own work: off compute first, then what is left off the rest."""
    left = cut.copy()
    for part in (_COMPUTE, _DATA, _OTHER):
        taken = np.minimum(left, np.maximum(np.nan_to_num(parts[:, part]), 0.0))
        parts[:, part] -= taken
        left -= taken


def _starts(real: Lanes, parts: Floats) -> Floats:
    """Return when steps begin: what lay between two of them stays."""
    before, after = np.nansum(real.parts_s, axis=2), np.nansum(parts, axis=2)
    earlier = np.zeros_like(before)
    earlier[1:] = np.cumsum(before - after, axis=0)[:-1]
    return np.asarray(real.start_s - earlier)


def _known(value: float) -> float | None:
    return None if value != value else value
