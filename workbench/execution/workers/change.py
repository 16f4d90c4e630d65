"""One change of a run's workers: its goal, and the notes about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from ...shared.events import Healed, Joined, Left
from ...shared.messages import Regroup
from ..outcome import Recovery

if TYPE_CHECKING:
    from ...shared.events import Regrouped
    from ...shared.plan import Plan
    from ..allocator import EngineAllocator
    from ..run import Run


TRAINS = ("starting", "recovering", "running", "paused")
"""States of a run whose members may be training. A death may become known before the message that
the members have begun. A member that has not begun reports this, and then the run fails."""
ENDED = "the run ended earlier"


class Execution(Protocol):
    """The methods that this package needs of a run on its engines (`launch.RunExecution`)."""

    pool: EngineAllocator
    run: Run
    plan: Plan
    servers: Sequence[int]

    def chains(self) -> list[list[int]]:
        """Return groups of servers with equal data: one server of each group may die."""

    def dismiss_servers(self) -> None:
        """Tell the servers that no worker will connect any more."""

    def meets(self, prefix: str) -> None:
        """Note the name under which the run's workers meet from now on."""

    def recruit(self, count: int) -> list[int]:
        """Add more engines to the run; return these engines."""

    def equip(self, engine: int) -> None:
        """Give a new engine the data that the cell needs."""

    def request_to_join(self, engine: int) -> dict[str, Any]:
        """Return the request that is sent to an engine that joins during the run."""


@dataclass
class Change:
    """The goal of the current generation, until all its members have reported.

    Attributes:
        lost, fresh: Engines that the run continues without; engines that join it.
        left: Why engines leave, in words, by engine.
        how: How the lost engines ended, in words, by engine; empty while this is not known.
        heard: The members' reports, by engine.
        short: Whether an engine that joined has ended again, or joined later than the others
            had been told. The steps in between lack its rows.
    """

    lost: list[int] = field(default_factory=list)
    fresh: list[int] = field(default_factory=list)
    left: dict[int, str] = field(default_factory=dict)
    how: dict[int, str] = field(default_factory=dict)
    heard: dict[int, Regrouped] = field(default_factory=dict)
    short: bool = False

    def begin_anew(self) -> None:
        """Note that a further generation is announced."""
        self.short = self.short or bool(self.fresh and self.heard)
        self.heard.clear()

    def tell(self, run: Run, step: int, workers: int, dies_with: str) -> None:
        """Report the change to the user, as events of the run and in words.

        Args:
            step: The first step that the members take together.
            workers: The number of members.
            dies_with: What a dead worker loses, at most.
        """
        there = [one.seconds for i, one in self.heard.items() if i not in self.fresh]
        seconds = max(there, default=0.0)
        if self.lost:
            ranks = [run.engines.index(one) for one in self.lost]
            run.tell(Healed(ranks=ranks, step=step, seconds=seconds, workers=workers))
            how = "; ".join(self.how.values())
            done = Recovery(tuple(self.lost), how, step, 0, workers, seconds, again=False)
            run.recoveries.append(done)
            run.note(healed_words(done, dies_with, joined=run.plan.sync), self.lost)
        if self.left:
            ranks, why = (
                sorted(map(run.engines.index, self.left)),
                dict.fromkeys(self.left.values()),
            )
            reason = "; ".join(why)
            run.tell(Left(ranks=ranks, step=step, seconds=seconds, workers=workers, reason=reason))
            who = [run.called(one) for one in self.left]
            run.note(left_words(who, reason, step, seconds, workers))
        if self.fresh:
            ranks = sorted(map(run.engines.index, self.fresh))
            run.tell(Joined(ranks=ranks, step=step, seconds=seconds, workers=workers))
            run.note(joined_words([run.called(one) for one in self.fresh], step, seconds))


def announcement(
    launch: Execution,
    generation: int,
    engines: Sequence[int],
    past: Sequence[int],
    change: Change,
    prefix: str,
) -> Regroup:
    """Return the message to workers about a generation.

    Args:
        engines: Its members, in the order of their ranks; empty: the receiver may leave.
        past: Engines that have trained to the end.
        prefix: The name under which the members meet.
    """
    members, known = launch.run.members, launch.pool.engines.engines
    return Regroup(
        run=launch.run.number,
        generation=generation,
        places=tuple(map(members.index, engines)),
        ranks=tuple(engines),
        hosts=tuple(known[one].place for one in engines),
        past=tuple(map(members.index, past)),
        prefix=prefix,
        fresh=tuple(map(members.index, change.fresh)),
    )


def healed_words(done: Recovery, dies_with: str = "", *, joined: bool = True) -> str:
    """Return the note on the change and on the time that it took.

    Args:
        dies_with: What a dead worker loses, at most.
        joined: Whether the workers take each step together.
    """
    one = done.workers == 1
    goes = f"{done.how}. {done.workers} worker{' continues' if one else 's continue'}"
    if not joined:
        return f"{goes}. A new engine starts and takes the remaining steps of the dead worker."
    lost = f"lost at most: {dies_with}" if dies_with else "no step is lost"
    pause = f"a pause of {1e3 * done.seconds:.0f} ms"
    return f"{goes} from step {done.step}, after {pause}; {lost}."


def left_words(who: Sequence[str], why: str, step: int, seconds: float, workers: int) -> str:
    """Return the note on workers that left."""
    return (
        f"{' and '.join(who)} left ({why}). {workers} worker"
        f"{' continues' if workers == 1 else 's continue'} from step {step}, after "
        f"a pause of {1e3 * seconds:.0f} ms; no step is lost."
    )


def joined_words(who: Sequence[str], step: int, seconds: float) -> str:
    """Return the note on workers that joined."""
    return (
        f"{' and '.join(who)} {'takes' if len(who) == 1 else 'take'} part in training from step "
        f"{step} on; the other workers paused for {1e3 * seconds:.0f} ms."
    )
