"""A queue of plans as a pure state machine: waiting plans, current plan, remaining time.

    waiting ── begin ──> running ── settle ──> finished | stopped | failed
       └───────── give_up, remove, clear ────> stopped

One plan runs at a time, in the order of the list. A batch is all plans added since the list was
last finished. A new batch removes the previous one from the list (its runs are in `wb.runs`).

The remaining time is estimated from the speed of the current run and the times of earlier runs.
A run takes a start-up time (engines, data, the model) and then a time for each step. The current
run is extrapolated from its own steps. A waiting run is expected to take the mean time of runs of
its kind, scaled to its own number of steps or epochs. If no run of its kind was seen, the mean of
all runs is used. This estimate is rough because strategies differ in speed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from ..errors import PlanError

if TYPE_CHECKING:
    from ..shared.plan import Plan

Units: TypeAlias = tuple[str, int] | None


@dataclass
class Pace:
    """The progress and speed of a run.

    Attributes:
        steps, total: Finished steps and their total number; total is None while unknown.
        stepping_s: Duration of these steps in seconds.
        elapsed_s: Seconds since the run started, without pauses.
        reached: The largest share seen; a run that continues from a checkpoint repeats steps.
    """

    steps: int = 0
    total: int | None = None
    stepping_s: float = 0.0
    elapsed_s: float = 0.0
    reached: float = 0.0

    def update(self, steps: int, total: int | None, stepping_s: float, elapsed_s: float) -> None:
        """Record the progress of the run."""
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
        """The finished share, 0..1; 0 while its length is unknown."""
        return self.reached


@dataclass(frozen=True)
class Estimate:
    """The remaining time of a queue.

    Attributes:
        seconds: The remaining seconds; None if no data is known to estimate them.
        rough: Whether the estimate uses runs of another kind.
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
    """Return the requested length of a plan; None if its cell decides."""
    for name in ("steps", "epochs"):  # steps win over epochs
        if name in plan.overrides:
            return name, int(plan.overrides[name])
    return None


def estimate(finished: Sequence[Ran], current: Ran | None, waiting: Sequence[Waits]) -> Estimate:
    """Return the remaining time of the current run and the waiting runs.

    Args:
        finished: Runs that ended by themselves: kind, length and duration.
        current: The current run.
        waiting: Kind and length of the waiting runs.
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
    """Return how many times longer a run is than an earlier run; None if unknown."""
    if seen == wanted:
        return 1.0
    if seen is None or wanted is None or seen[0] != wanted[0]:
        return None
    return wanted[1] / seen[1]


State: TypeAlias = Literal["waiting", "running", "finished", "stopped", "failed"]
Outcome: TypeAlias = Literal["finished", "stopped", "failed"]
TAKEN_OUT = "the plan was removed from the queue"


@dataclass
class Item:
    """One plan in the queue.

    Attributes:
        number: Permanent; `remove` and `move` take it.
        run: Its run after it has begun.
        error: The error of the run.
        why: Why it never began, if another plan or the user caused that: `mirrored failed`.
        pace: Its progress and speed.
    """

    number: int
    plan: Plan
    state: State = "waiting"
    run: Any = None
    error: BaseException | None = None
    why: str = ""
    pace: Pace = field(default_factory=Pace)

    @property
    def name(self) -> str:
        """Its name: the run's name, otherwise the plan's name."""
        name = self.run.name if self.run is not None else self.plan.name or self.plan.strategy
        return str(name)

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.state not in ("waiting", "running")

    def to_wire(self) -> dict[str, Any]:
        """Return it as JSON-ready data."""
        return {
            "number": self.number,
            "name": self.name,
            "strategy": self.plan.strategy,
            "framework": self.plan.framework,
            "workers": self.plan.workers,
            "seed": self.plan.overrides.get("seed"),
            "state": self.state,
            "run": None if self.run is None else self.run.name,
            "error": None if self.error is None else str(self.error),
            "why": self.why,
            "fraction": 1.0 if self.over else self.pace.fraction,
        }


class QueueState:
    """The list of plans; not thread-safe without a lock."""

    def __init__(self) -> None:
        self.items: list[Item] = []
        self._next = 1

    # -- what is asked for -------------------------------------------------------------------------

    def add(self, plans: Iterable[Plan]) -> list[Item]:
        """Add plans at the end; a finished batch is dropped."""
        new = [Item(self._next + k, plan) for k, plan in enumerate(plans)]
        if new and self.done:
            self.items.clear()
        self._next += len(new)
        self.items += new
        return new

    def remove(self, number: int) -> Item:
        """Remove a waiting plan.

        Raises:
            PlanError: There is none of that number, or it does not wait.
        """
        item = self._waiting(number)
        self.items.remove(item)
        item.state, item.why = "stopped", TAKEN_OUT
        return item

    def move(self, number: int, to: int) -> None:
        """Move a waiting plan to place `to` among the waiting plans, counted from 0.

        Raises:
            PlanError: There is none of that number, or it does not wait.
        """
        item = self._waiting(number)
        others = [one for one in self.waiting if one is not item]
        others.insert(max(0, to), item)
        self.items = [one for one in self.items if one.state != "waiting"] + others

    def clear(self) -> None:
        """Remove all waiting plans."""
        for item in self.give_up(TAKEN_OUT):
            self.items.remove(item)

    def _waiting(self, number: int) -> Item:
        item = self.item(number)
        if item.state != "waiting":
            raise PlanError(
                f"Plan {item.name} is no longer waiting.",
                seen=item.state,
                allowed="a plan that waits",
                next_step="call queue.stop() to end the current run"
                if item.state == "running"
                else None,
                code="WB-PLAN-109",
            )
        return item

    def item(self, number: int) -> Item:
        """Return the plan with this number.

        Raises:
            PlanError: There is no plan with this number.
        """
        for item in self.items:
            if item.number == number:
                return item
        known = ", ".join(str(item.number) for item in self.items) or "the queue is empty"
        raise PlanError(
            "The queue has no plan with this number.",
            seen=number,
            allowed=known,
            code="WB-PLAN-110",
        )

    # -- what happens ------------------------------------------------------------------------------

    def begin(self) -> Item | None:
        """Start the next plan and return it; None if none waits or one is running."""
        waiting = self.waiting
        if not waiting or self.current is not None:
            return None
        waiting[0].state = "running"
        return waiting[0]

    def settle(self, item: Item, outcome: Outcome, error: BaseException | None = None) -> None:
        """Record how the current plan ended."""
        item.state, item.error = outcome, error

    def give_up(self, why: str, only: Iterable[Item] | None = None) -> list[Item]:
        """Drop all waiting plans, or only the given ones; return them."""
        chosen = None if only is None else {item.number for item in only}
        dropped = [one for one in self.waiting if chosen is None or one.number in chosen]
        for item in dropped:
            item.state, item.why = "stopped", why
        return dropped

    # -- what is known -----------------------------------------------------------------------------

    @property
    def waiting(self) -> list[Item]:
        """The waiting plans, the next plan first."""
        return [item for item in self.items if item.state == "waiting"]

    @property
    def current(self) -> Item | None:
        """The current run."""
        return next((item for item in self.items if item.state == "running"), None)

    @property
    def done(self) -> bool:
        """Whether no plan waits or runs."""
        return all(item.over for item in self.items)

    @property
    def progress(self) -> float:
        """The finished share of the plans, 0..1; each plan counts the same. 1 for an empty list."""
        if not self.items:
            return 1.0
        parts = [1.0 if item.over else item.pace.fraction for item in self.items]
        return sum(parts) / len(parts)

    @property
    def remaining(self) -> Estimate:
        """The remaining time."""
        if self.done:
            return Estimate(0.0, rough=False)
        finished = [_pace(item) for item in self.items if item.state == "finished"]
        current = None if self.current is None else _pace(self.current)
        waiting = [(_kind(item), units(item.plan)) for item in self.waiting]
        return estimate(finished, current, waiting)


def _pace(item: Item) -> Ran:
    return _kind(item), units(item.plan), item.pace


def _kind(item: Item) -> Hashable:
    """Return the settings that plans of equal duration share: all except seed, name and length."""
    plan = item.plan
    options = tuple(sorted((key, repr(value)) for key, value in plan.options.items()))
    batch = plan.overrides.get("batch_size")
    return (plan.recipe.digest, plan.framework, plan.strategy, plan.workers, options, batch)
