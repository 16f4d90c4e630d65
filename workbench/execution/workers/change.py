"""One change of a run's workers: what it is to bring, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ...shared.events import Regrouped
    from ..outcome import Recovery


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


def healed_words(done: Recovery, dies_with: str = "") -> str:
    """Tell the user what happened and what it cost.

    Args:
        dies_with: What is lost with a worker, at most.
    """
    one = done.workers == 1
    lost = f"lost at most: {dies_with}" if dies_with else "no step is lost"
    return (
        f"{done.how}. {done.workers} worker{' goes' if one else 's go'} on from step {done.step}, "
        f"after {1e3 * done.seconds:.0f} ms; {lost}."
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
