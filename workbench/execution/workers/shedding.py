"""Gives a worker that is slow for a long time a smaller share of each batch, agreed with all.

    rows ──> `stragglers.Watch` ──> shares that are worth a change
    ask     every worker says which step c it has begun, and begins no further step
    deal    these shares apply from step max(c) + 1: no worker can have begun this step
    watch   again, under these shares: what they gained, and whether other shares are better

The group stays as it is and no worker connects again: the workers only pause while the question
and the answers travel. After a change of workers (`healing.py`) the shares are equal at first, and
the workers are watched again. A message for the earlier workers is recognised by its generation.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...shared.events import SHARES, Dealing, Gained, Replaced, Shed
from ...shared.messages import Happened, Position, Records, Told
from ...shared.protocol import records_from
from .stragglers import Pace, Rule, Watch, better_shares, equal_shares

if TYPE_CHECKING:
    from ...shared.events import Event
    from ...shared.messages import Down
    from ..run import Run
    from .healing import Healer

clock = time.monotonic
RULE = Rule()
LOOK_S = 0.25
"""How often the module looks for slow workers."""


class Watching:
    """Watches how fast one run's workers are; called on the router's thread.

    Args:
        send: Sends an engine a message.
        healer: Decides which workers take part, where this can change.
        tell: Receives what has happened; by default the run.
    """

    def __init__(
        self,
        run: Run,
        send: Callable[[int, Down], object],
        healer: Healer | None = None,
        tell: Callable[[Event], object] | None = None,
    ) -> None:
        self._tell = tell or run.tell
        self._run, self._deliver, self._healer = run, send, healer
        self._generation = 0
        self._members: tuple[int, ...] = tuple(run.members)
        self._done: Shed | Replaced | None = None  # its gain is not known yet
        self._over = False
        self._looked_s = 0.0
        self._lock = threading.RLock()
        self._watch_from(0)

    @property
    def rule(self) -> Rule:
        """When a worker counts as slow for a long time."""
        return RULE

    def _watch_from(self, first: int) -> None:
        """Start to watch again, from a step on."""
        ranks = [self._run.engines.index(engine) for engine in self._members]
        self._watch = Watch(ranks, self.rule, first)

    def hear(self, engine: int, message: Records | Happened | Position) -> None:
        """Process a message from an engine of the run."""
        with self._lock:
            if self._over or not self._is_together():
                return
            if isinstance(message, Happened) and isinstance(message.event, Dealing):
                self._answered(engine, message.event)
            elif isinstance(message, Records):
                self._watch.take(records_from(message.rows))
                self._look()

    def _is_together(self) -> bool:
        """Whether the workers are the watched ones; if not, watch the present workers instead."""
        healer = self._healer
        if healer is None:
            return True
        if healer.generation != self._generation:
            self._call_off()
            if not healer.is_together:
                return False
            self._generation, self._members = healer.generation, tuple(healer.members)
            self._watch_from(0)
            self._come_together()
        return True

    def _look(self) -> None:
        now = clock()
        if now < self._looked_s + LOOK_S:
            return
        self._looked_s = now
        pace = self._watch.pace()
        if pace is not None and self._run.state == "running":
            self._tell_gain(pace)
            self._decide(pace)

    def _tell_gain(self, pace: Pace) -> None:
        done, self._done = self._done, None
        if done is None or done.before_s is None:
            return
        gained = Gained(step=done.step, before_s=done.before_s, after_s=pace.step_s)
        self._tell(gained)
        self._run.note(gained_words(gained))

    def _called(self, pace: Pace) -> str:
        return self._run.called(self._members[pace.slowest])

    def _decide(self, pace: Pace) -> None:
        """Take the action that the speed of the workers requires."""

    def _answered(self, engine: int, answer: Dealing) -> None:
        """Process the answer to a question."""

    def _call_off(self) -> None:
        """Drop the open question to the earlier workers."""
        self._done = None

    def _come_together(self) -> None:
        """Note that the set of workers has changed."""


@dataclass
class Question:
    """A change of shares in progress.

    Attributes:
        silent: Engines that have not said which step they have begun.
        begun: The latest of those steps; -2 if a worker reports that its share cannot change.
    """

    number: int
    pace: Pace
    shares: tuple[int, ...]
    asked_s: float
    silent: set[int]
    begun: list[int] = field(default_factory=list)


class Shedding(Watching):
    """Changes the shares of one run's workers."""

    def __init__(
        self,
        run: Run,
        send: Callable[[int, Down], object],
        healer: Healer | None = None,
        tell: Callable[[Event], object] | None = None,
    ) -> None:
        super().__init__(run, send, healer, tell)
        self._number = 0
        self._question: Question | None = None

    def _call_off(self) -> None:
        super()._call_off()
        self._question = None

    # -- a change of shares ------------------------------------------------------------------------

    def _decide(self, pace: Pace) -> None:
        if self._question is not None:
            return
        shares = better_shares(pace, self.rule)
        if shares is not None:
            self._number += 1
            self._question = Question(self._number, pace, shares, clock(), set(self._members))
            self._send()

    def _send(self, step: int = -1, shares: Sequence[int] = (), *, over: bool = False) -> None:
        value: dict[str, object] = {"generation": self._generation, "number": self._number}
        value |= {"step": step, "portions": list(shares), "over": over}
        told = Told(run=self._run.number, rank=-1, topic=SHARES, value=value)
        for engine in self._members:
            self._deliver(engine, told)

    def _answered(self, engine: int, answer: Dealing) -> None:
        question = self._question
        if question is None or answer.number != question.number:
            return
        question.silent.discard(engine)
        question.begun.append(answer.step)
        if question.silent:
            return
        self._question = None
        if min(question.begun) < -1:
            self._send(over=True)
            self._give_up(question)
        else:
            self._deal(question, max(question.begun) + 1)

    def _deal(self, question: Question, step: int) -> None:
        self._send(step, question.shares)
        self._watch_from(step)
        pace, run, shares = question.pace, self._run, question.shares
        ranks = [run.engines.index(engine) for engine in self._members]
        equal = equal_shares(sum(shares), len(shares))
        less = [rank for rank, share, even in zip(ranks, shares, equal, strict=True)
                if share < even and shares != equal]  # fmt: skip
        event = Shed(
            ranks=less, step=step, seconds=clock() - question.asked_s, workers=len(ranks),
            shares=list(shares), ratio=pace.ratio[pace.slowest], slow_s=pace.seconds,
            before_s=pace.step_s,
        )  # fmt: skip
        self._tell(event)
        self._done = event
        run.note(shed_words(event, self._called(pace), pace.samples[pace.slowest]))

    def _give_up(self, question: Question) -> None:
        """Keep the shares as they are if all workers report that the shares cannot change."""
        if max(question.begun) > -2:
            return  # the workers have begun or ended different steps: ask again
        self._over = True
        pace = question.pace
        self._run.note(
            f"{self._called(pace)} takes {pace.ratio[pace.slowest]:.1f} times as long as the "
            "other workers, but the shares of this training cannot be changed. Shares can change "
            "only if the cell uses wb.fit and the data has a length (`len(data)`)."
        )


def shed_words(event: Shed, who: str, before: int) -> str:
    """Return the note on what was changed, and why.

    Args:
        who: The slowest worker.
        before: How many samples of a batch this worker had before.
    """
    shares = " + ".join(map(str, event.shares))
    batch = f"{shares} = {sum(event.shares)}"
    if not event.ranks:
        again = f"From step {event.step} on, the batch is divided equally again."
        return f"No worker is slow any more. {again}"
    return (
        f"{who} was slow for {event.slow_s:.0f} s: it took {event.ratio:.1f} times as long as the "
        f"other workers to finish a share. Its share was {before} samples. From step {event.step} "
        f"on, the workers' shares of the batch are {batch} samples."
    )


def gained_words(event: Gained) -> str:
    """Return the note on the time that was gained."""
    before, after = (f"{1e3 * one:.3g} ms" for one in (event.before_s, event.after_s))
    return f"From step {event.step} on, each step takes {after} instead of {before}."
