"""Ranks that wait for their user: at a breakpoint, in `input()`.

A rank's question arrives on the router's thread and is held at once. A main thread that blocks in
a cell sees to it (`prompt.attend`): there the prompt opens, or the rank goes on where the front end
cannot ask. Where no cell blocks, the rank stays paused until `%cluster debug` opens it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import RunError
from ..members import ranges
from ..messages import (
    Answered,
    Down,
    GoOn,
    Hold,
    Left,
    Repeat,
    Serve,
    Served,
    Stopped,
    Typed,
)

ANSWER_S = 600.0
STEP_S = 3.0
"""How long a command that lets a rank go on is given to stop again, before the prompt is back."""
ATTENDED_S = 2.0
SETTLE_S = 0.15
"""Ranks reach the same breakpoint at slightly different times; the prompt waits for them."""
GO_ON = ("c", "cont", "continue", "q", "quit", "exit")
NO_PROMPT = "this notebook's front end has no prompt"


@dataclass(frozen=True)
class Reply:
    """What came of a command: pdb's words, and whether the rank is still paused."""

    text: str
    paused: bool


class Paused:
    """The ranks of one cluster that wait for their user.

    Args:
        send: Sends a message to an engine.
    """

    def __init__(self, send: Callable[[int, Down], None]) -> None:
        self._send = send
        self._stops: dict[int, Stopped] = {}
        self._answers: dict[int, str] = {}
        self._left: dict[int, str] = {}
        self._served: dict[int, Served] = {}
        self._changed = threading.Condition()
        self._attended_s = -ATTENDED_S
        self._promised = False
        self._can_prompt = False
        self.prompting = False  # whether a prompt is open
        self.on_drop: Callable[[int], object] = lambda engine: None
        _all.add(self)

    # -- from the engines --------------------------------------------------------------------------

    def hear(self, message: Stopped | Answered | Left | Served) -> None:
        """Take an engine's word of its debugger; called on the router's thread."""
        engine = message.engine
        with self._changed:
            match message:
                case Stopped():
                    self._hold(message)
                case Answered():
                    self._answers[engine] = message.text
                case Left():
                    self._left[engine] = message.text
                    self._drop(engine)
                case Served():
                    self._served[engine] = message
            self._changed.notify_all()

    def _hold(self, stop: Stopped) -> None:
        if self._attended and not self._can_prompt:
            self._send(stop.engine, GoOn(number=stop.number, reason=NO_PROMPT))
            return
        self._stops[stop.engine] = stop
        announce = not (self.prompting or self._attended)
        self._send(stop.engine, Hold(number=stop.number, announce=announce))

    def attended(self, *, can_prompt: bool) -> None:
        """Take note that a cell blocks whose main thread looks after those that pause."""
        self._can_prompt, self._attended_s = can_prompt, time.monotonic()

    def promise(self, *, can_prompt: bool) -> None:
        """Take note that a cell is about to be sent that will block, and look after them then."""
        self._can_prompt, self._promised = can_prompt, True

    def promise_over(self) -> None:
        """Take note that this cell has ended."""
        self._promised = False

    def unattended(self) -> None:
        """Take note that no cell blocks any more."""
        self._attended_s = -ATTENDED_S

    @property
    def _attended(self) -> bool:
        """Whether a cell blocks, or is about to, and looks after those that pause."""
        return self._promised or time.monotonic() - self._attended_s < ATTENDED_S

    def forget(self, engine: int) -> None:
        """Drop an engine that has died."""
        with self._changed:
            self._left[engine] = f"rank {engine} died\n"
            self._drop(engine)
            self._changed.notify_all()

    def _drop(self, engine: int) -> None:
        self._stops.pop(engine, None)
        self.on_drop(engine)

    # -- to the engines ----------------------------------------------------------------------------

    @property
    def stops(self) -> dict[int, Stopped]:
        """Who is paused, by engine id."""
        with self._changed:
            return dict(sorted(self._stops.items()))

    def tell(self, engine: int, line: str, timeout_s: float = ANSWER_S) -> Reply:
        """Have a paused rank obey one command.

        Raises:
            RunError: It is not paused, or does not answer in time.
        """
        with self._changed:
            stop = self._stops.get(engine)
            if stop is None:
                raise RunError(
                    f"Rank {engine} is not paused.",
                    allowed=self.names() or "nobody is",
                    code="WB-RUN-073",
                )
            self._answers.pop(engine, None)
            self._left.pop(engine, None)
            self._send(engine, Typed(number=stop.number, text=line))
            if not self._until(lambda: engine in self._answers or engine in self._left, timeout_s):
                raise RunError(
                    f"Rank {engine} did not answer {line!r} within {timeout_s:g} s.",
                    code="WB-RUN-074",
                )
            if engine in self._answers:
                return Reply(self._answers.pop(engine), paused=True)
            text = self._left.pop(engine)
            words = line.split()
            if stop.asks == "debugger" and (not words or words[0] not in GO_ON):
                self._until(lambda: engine in self._stops or engine in self._left, STEP_S)
            again = self._stops.get(engine)
            return Reply(text + (again.text if again else ""), paused=again is not None)

    def go_on(self, engine: int, reason: str) -> None:
        """Let a rank go on, past further breakpoints of its cell as well."""
        with self._changed:
            stop = self._stops.pop(engine, None)
        if stop is not None:
            self._send(engine, GoOn(number=stop.number, reason=reason))

    def inquire(self, engine: int, timeout_s: float = 1.0) -> Stopped | None:
        """Return an engine's question, also one that was asked of another notebook."""
        self._send(engine, Repeat())
        with self._changed:
            self._until(lambda: engine in self._stops, timeout_s)
            return self._stops.get(engine)

    def serve(self, engine: int, port: int, timeout_s: float = 30.0) -> Served:
        """Have an engine serve debugpy, whatever its cell does (`engine/debugpy_server.py`).

        Raises:
            RunError: It does not answer.
        """
        with self._changed:
            self._served.pop(engine, None)
            self._send(engine, Serve(port=port))
            if not self._until(lambda: engine in self._served, timeout_s):
                raise RunError(
                    f"Rank {engine} does not answer.",
                    next_step="%cluster stacks",
                    code="WB-RUN-075",
                )
            return self._served.pop(engine)

    def _until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Wait in short pieces, so that an interrupt of the notebook is noticed at once."""
        end = time.monotonic() + timeout_s
        while not condition():
            left = end - time.monotonic()
            if left <= 0:
                return False
            self._changed.wait(min(0.1, left))
        return True

    def settled(self) -> dict[int, Stopped]:
        """Return who is paused, once nobody has joined or left for a moment."""
        end = time.monotonic() + STEP_S
        before: dict[int, Stopped] | None = None
        while (now := self.stops) != before and time.monotonic() < end:
            before = now
            with self._changed:
                self._changed.wait(SETTLE_S)
        return now

    def names(self) -> str:
        """Return `ranks 0-2`, those that are paused."""
        return f"ranks {ranges(sorted(self._stops))}" if self._stops else ""


_all: weakref.WeakSet[Paused] = weakref.WeakSet()


def everyone() -> list[Paused]:
    """Return the paused ranks of every cluster of this process."""
    return list(_all)
