"""Hears the rows of one run's workers, for those who do something about slow ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ...shared.events import Dealing, Gained, Replaced, Shed
from ...shared.messages import Happened, Position, Records
from ...shared.protocol import records_from
from .stragglers import Pace, Rule, Watch

if TYPE_CHECKING:
    from ...shared.events import Event
    from ...shared.messages import Down
    from ..run import Run
    from .healing import Healer

RULE = Rule()
LOOK_S = 0.25
"""How often it is looked for who is slow."""
clock = time.monotonic


class Watching:
    """Watches how fast one run's workers are; called on the router's thread.

    Args:
        send: Sends an engine a message.
        healer: Decides who takes part, where that may change.
        tell: Takes what has happened; by default the run's history.
    """

    def __init__(
        self,
        run: Run,
        send: Callable[[int, Down], object],
        healer: Healer | None = None,
        tell: Callable[[Event], object] | None = None,
    ) -> None:
        self._tell = tell or run.history.event
        self._run, self._deliver, self._healer = run, send, healer
        self._generation = 0
        self._members: tuple[int, ...] = tuple(run.members)
        self._done: Shed | Replaced | None = None  # whose gain is not known yet
        self._over = False
        self._looked_s = 0.0
        self._lock = threading.RLock()
        self._watch_from(0)

    @property
    def rule(self) -> Rule:
        """When a worker counts as slow for long."""
        return RULE

    def _watch_from(self, first: int) -> None:
        """Watch anew, from a step on."""
        ranks = [self._run.engines.index(engine) for engine in self._members]
        self._watch = Watch(ranks, self.rule, first)

    def hear(self, engine: int, message: Records | Happened | Position) -> None:
        """Take in what an engine says of the run."""
        with self._lock:
            if self._over or not self._is_together():
                return
            if isinstance(message, Happened) and isinstance(message.event, Dealing):
                self._answered(engine, message.event)
            elif isinstance(message, Records):
                self._watch.take(records_from(message.rows))
                self._look()

    def _is_together(self) -> bool:
        """Whether the workers are those that are watched; else begin with those there are now."""
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
        """Do what is to be done about how fast the workers are."""

    def _answered(self, engine: int, answer: Dealing) -> None:
        """Take in the answer to a question."""

    def _call_off(self) -> None:
        """Forget what was on its way for the workers of before."""
        self._done = None

    def _come_together(self) -> None:
        """Take note that others take part by now."""


def gained_words(event: Gained) -> str:
    """Tell the user what was gained."""
    before, after = (f"{1e3 * one:.3g} ms" for one in (event.before_s, event.after_s))
    return f"From step {event.step} on a step takes {after} instead of {before}."
