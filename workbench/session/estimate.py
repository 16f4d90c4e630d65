"""How long a row of runs will take yet, from how fast the present one is and what others took.

A run takes its beginning (engines, data, the model) and then so much for each step. The one that
runs is extrapolated by its own steps. One that waits is expected to take what runs of its kind
took, by the mean, its steps scaled to its own number of steps or epochs. Where no run of its kind
was seen, the mean of all stands in, and the estimate is rough: strategies differ in speed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from ..plan import Plan

Units: TypeAlias = tuple[str, int] | None


@dataclass
class Pace:
    """How far a run is, and how fast.

    Attributes:
        steps, total: Steps done, of how many; total is None while unknown.
        stepping_s: Seconds that these steps took.
        elapsed_s: Seconds since it was started, without pauses.
        reached: The largest share seen: a run that goes on from a checkpoint does steps again.
    """

    steps: int = 0
    total: int | None = None
    stepping_s: float = 0.0
    elapsed_s: float = 0.0
    reached: float = 0.0

    def update(self, steps: int, total: int | None, stepping_s: float, elapsed_s: float) -> None:
        """Take note of where it is."""
        self.steps, self.total, self.stepping_s, self.elapsed_s = (
            steps,
            total,
            stepping_s,
            elapsed_s,
        )
        if total:
            self.reached = max(self.reached, min(1.0, steps / total))

    @property
    def fraction(self) -> float:
        """Share that is done, 0..1; 0 while its length is unknown."""
        return self.reached


@dataclass(frozen=True)
class Estimate:
    """Seconds that are left.

    Attributes:
        seconds: None where nothing is known to tell them from.
        rough: Whether something had to be taken from runs of another kind.
    """

    seconds: float | None
    rough: bool


@dataclass(frozen=True)
class _Sample:
    kind: Hashable
    units: Units
    setup_s: float
    work_s: float


Ran: TypeAlias = tuple[Any, Units, Pace]
Waits: TypeAlias = tuple[Any, Units]


def units(plan: Plan) -> Units:
    """Return a plan's length as it was asked for; None where its cell decides."""
    for name in ("steps", "epochs"):  # steps win over epochs
        if name in plan.overrides:
            return name, int(plan.overrides[name])
    return None


def estimate(finished: Sequence[Ran], current: Ran | None, waiting: Sequence[Waits]) -> Estimate:
    """Return how long the present run and those that wait will take yet.

    Args:
        finished: Runs that ended by themselves: kind, length, and how long they took.
        current: The one that runs.
        waiting: Kind and length of those that wait.
    """
    samples = [
        _Sample(kind, length, max(0.0, pace.elapsed_s - pace.stepping_s), pace.stepping_s)
        for kind, length, pace in finished
    ]
    seconds, rough = 0.0, False
    if current is not None:
        kind, length, pace = current
        own = _extrapolated(kind, length, pace)
        whole = Estimate(own.setup_s + own.work_s, False) if own else _expect(samples, kind, length)
        if whole.seconds is None:
            return Estimate(None, rough=True)
        seconds, rough = max(0.0, whole.seconds - pace.elapsed_s), whole.rough
        samples += [own] if own else []
    for kind, length in waiting:
        whole = _expect(samples, kind, length)
        if whole.seconds is None:
            return Estimate(None, rough=True)
        seconds, rough = seconds + whole.seconds, rough or whole.rough
    return Estimate(seconds, rough)


def _extrapolated(kind: Hashable, length: Units, pace: Pace) -> _Sample | None:
    if not pace.total or not pace.steps or pace.stepping_s <= 0:
        return None
    setup_s = max(0.0, pace.elapsed_s - pace.stepping_s)
    return _Sample(kind, length, setup_s, pace.stepping_s / pace.steps * pace.total)


def _expect(samples: Sequence[_Sample], kind: Hashable, length: Units) -> Estimate:
    alike = [one for one in samples if one.kind == kind and _scale(one.units, length) is not None]
    chosen = alike or list(samples)
    if not chosen:
        return Estimate(None, rough=True)
    whole = [one.setup_s + one.work_s * (_scale(one.units, length) or 1.0) for one in chosen]
    return Estimate(sum(whole) / len(whole), rough=not alike)


def _scale(seen: Units, wanted: Units) -> float | None:
    """Return by how much longer a run is than one that was seen; None where that is unknown."""
    if seen == wanted:
        return 1.0
    if seen is None or wanted is None or seen[0] != wanted[0]:
        return None
    return wanted[1] / seen[1]
