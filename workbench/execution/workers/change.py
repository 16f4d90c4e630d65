"""One change of a run's workers: what it is to bring, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...shared.events import Regrouped
    from ...shared.plan import Plan
    from ..allocator import EngineAllocator
    from ..outcome import Recovery
    from ..run import Run


class Execution(Protocol):
    """What is needed of a run on its engines (`launch.RunExecution`)."""

    pool: EngineAllocator
    run: Run
    plan: Plan

    def meets(self, prefix: str) -> None:
        """Take note under which name its workers meet from now on."""

    def recruit(self, count: int) -> list[int]:
        """Have more engines be of the run; return which."""

    def request_to_join(self, engine: int) -> dict[str, Any]:
        """Return what an engine is asked that comes while the run goes on."""


@dataclass
class Change:
    """What the generation under way is to bring, until all its members have told.

    Attributes:
        lost, fresh: Engines that are done without, and that are let in.
        left: Why engines leave, in words, by engine.
        how: What became of the lost, in words, by engine; empty as long as it is not known.
        heard: What members have said, by engine.
    """

    lost: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    how: dict[int, str] = field(default_factory=dict)
    heard: dict[int, Regrouped] = field(default_factory=dict)


def healed_words(done: Recovery) -> str:
    """Tell the user what happened and what it cost."""
    one = done.workers == 1
    return (
        f"{done.how}. {done.workers} worker{' goes' if one else 's go'} on from step {done.step}, "
        f"after {1e3 * done.seconds:.0f} ms; no step is lost."
    )


def left_words(
    who: Sequence[str], why: Sequence[str], step: int, seconds: float, workers: int
) -> str:
    """Tell the user who takes part no more."""
    return (
        f"{' and '.join(who)} left ({'; '.join(why)}). {workers} worker"
        f"{' goes' if workers == 1 else 's go'} on from step {step}, after "
        f"{1e3 * seconds:.0f} ms; no step is lost."
    )


def joined_words(who: Sequence[str], step: int, seconds: float) -> str:
    """Tell the user who has come to take part."""
    return (
        f"{' and '.join(who)} {'takes' if len(who) == 1 else 'take'} part from step {step} on; "
        f"the others stood still for {1e3 * seconds:.0f} ms."
    )
