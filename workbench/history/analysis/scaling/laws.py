"""The laws of scaling, fitted to what was measured.

A curve is one plan with several numbers of workers. **Strong** scaling keeps the global batch,
**weak** scaling keeps each worker's part of it.

Strong scaling is held against Amdahl's law (Amdahl, Validity of the Single Processor Approach,
AFIPS 1967): a part s of one worker's step cannot be divided, so a step of n workers takes

    t(n) = t(1) (s + (1 - s) / n)        and the speed-up never exceeds 1 / s.

Weak scaling is held against Gustafson's (Reevaluating Amdahl's Law, CACM 31(5), 1988): of the time
of n workers a part s is serial, so in the same time they do

    r(n) = r(1) (s + (1 - s) n)          times the work of one.

Both are straight lines, in 1/n and in n, and are fitted as such: least squares, weighted by the
intervals of the rates (`steady`). The baseline is a point like the others, so that its doubt is in
that of s. The interval of s is 1.96 standard errors; where the points miss the line by more than
their intervals explain, it is widened by the square root of the reduced chi-square (Birge, Physical
Review 40, 1932). Two unknowns, the scale and s, need three points for a test of the law. Where a
point is missed by more than `MOST_MISS`, the law is not what happens here, and no line is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ..rows import Spread

Floats = NDArray[np.float64]

Mode = Literal["strong", "weak"]
Name = Literal["Amdahl", "Gustafson"]
OF_MODE: dict[Mode, Name] = {"strong": "Amdahl", "weak": "Gustafson"}

MOST_MISS = 0.15
"""A law that misses a measured point by more than this share of it is not drawn."""

LEAST_POINTS = 3
_Z = 1.96
_NAN = float("nan")


@dataclass(frozen=True)
class Law:
    """A law as it was fitted to a curve.

    Attributes:
        serial, low, high: The serial share, 0..1, and its 95 % interval.
        scale: Speed-up that the law gives the baseline's number of workers.
        why_not: Why there is none, in words; empty where there is one.
    """

    name: Name
    serial: float = _NAN
    low: float = _NAN
    high: float = _NAN
    scale: float = _NAN
    why_not: str = ""

    @property
    def fits(self) -> bool:
        """Whether it describes what was measured."""
        return not self.why_not

    @property
    def limit(self) -> float:
        """The speed-up that Amdahl's law allows at most; infinite without a serial share."""
        if self.name == "Gustafson":
            return math.inf
        return self.scale / self.serial if self.serial > 0 else math.inf

    def at(self, workers: float) -> float:
        """Return the speed-up that it gives."""
        if self.name == "Amdahl":
            return self.scale / (self.serial + (1 - self.serial) / workers)
        return self.scale * (self.serial + (1 - self.serial) * workers)


def fitted(
    mode: Mode, workers: Sequence[int], rates: Sequence[Spread], base: Spread, base_workers: int
) -> Law:
    """Return the law of so many numbers of workers, or why there is none.

    Args:
        workers, rates: What was measured, in samples per second.
        base: The rate that speed-ups are over.
    """
    name = OF_MODE[mode]
    if len(workers) < LEAST_POINTS:
        are = "is" if len(workers) == 1 else "are"
        return Law(
            name,
            why_not=f"{name}'s law is not fitted: the fit needs runs with at least {LEAST_POINTS} "
            f"different numbers of workers, but only {len(workers)} {are} measured",
        )
    if base_workers != 1:
        return Law(name, why_not=f"{name}'s law is not fitted: there is no run with one worker")
    if not all(math.isfinite(rate.low) and math.isfinite(rate.high) for rate in rates):
        return Law(
            name,
            why_not=f"{name}'s law is not fitted: the runs have too few steps for a 95 % interval",
        )
    return _line(name, np.array(workers, float), rates, base.mean)


def _line(name: Name, workers: Floats, rates: Sequence[Spread], base_per_s: float) -> Law:
    spread = np.array([(rate.high - rate.low) / (2 * _Z) / rate.mean for rate in rates])
    spread = np.maximum(spread, 1e-6)
    speed = np.array([rate.mean for rate in rates]) / base_per_s
    strong = name == "Amdahl"
    # Time per sample is a line in 1/n, samples per second one in n.
    measured, terms = (1 / speed, 1 / workers) if strong else (speed, workers)
    sigma = measured * spread
    design = np.stack([np.ones_like(terms), terms], axis=1) / sigma[:, None]
    covariance = np.linalg.inv(design.T @ design)
    constant, slope = covariance @ design.T @ (measured / sigma)
    predicted, whole = constant + slope * terms, float(constant + slope)
    if not (whole > 0 and (predicted > 0).all()):
        what = "time" if strong else "throughput"
        return Law(
            name,
            why_not=f"{name}'s law does not describe these runs: the best fit of the law gives an "
            f"impossible {what} (0 or less) for at least one run",
        )
    serial = float(constant / whole)
    chi = float((((measured - predicted) / sigma) ** 2).sum()) / (len(workers) - 2)
    gradient = np.array([slope, -constant]) / whole**2
    error = math.sqrt(float(gradient @ covariance @ gradient) * max(chi, 1.0))
    low, high = serial - _Z * error, serial + _Z * error
    law = Law(
        name,
        min(max(serial, 0.0), 1.0),
        min(max(low, 0.0), 1.0),
        min(max(high, 0.0), 1.0),
        scale=1 / whole if strong else whole,
    )
    head = f"{name}'s law does not describe these runs"
    if low > 1 or (not strong and slope <= 0):
        return replace(law, why_not=f"{head}: the runs become slower with more workers")
    if high < 0:
        return replace(law, why_not=f"{head}: the speed-up is larger than the number of workers")
    drawn = np.array([law.at(count) for count in workers])
    miss = float(np.abs(drawn / speed - 1).max())
    if miss > MOST_MISS:
        return replace(
            law,
            why_not=f"{head}: for one run, the law's speed-up differs by {miss * 100:.0f} % from "
            "the measured speed-up",
        )
    return law
