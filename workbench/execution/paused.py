"""Ranks that wait for the user at a breakpoint or in `input()`, and their prompt.

A rank's question arrives on the router's thread and is stored at once. If the main thread is
blocked in a cell, it opens the prompt (`attend`). If the front end cannot ask, the rank continues.
If no cell blocks the main thread, the rank stays paused until `%cluster debug` opens the prompt.
"""

from __future__ import annotations

import contextlib
import getpass
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ..errors import RunError
from ..shared.members import ranges
from ..shared.messages import (
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
"""Time for a rank to stop again after a command; then the prompt returns."""
ATTENDED_S = 2.0
SETTLE_S = 0.15
"""Ranks reach the same breakpoint at slightly different times; the prompt waits for them."""
GO_ON = ("c", "cont", "continue", "q", "quit", "exit")
NO_PROMPT = "this notebook's front end cannot ask for input"


@dataclass(frozen=True)
class Reply:
    """The result of a command: pdb's output, and whether the rank is still paused."""

    text: str
    paused: bool


class Paused:
    """The ranks of one cluster that wait for the user.

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
        """Process an engine's debugger message; called on the router's thread."""
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
        """Note that a cell blocks the main thread, which then handles paused ranks."""
        self._can_prompt, self._attended_s = can_prompt, time.monotonic()

    def promise(self, *, can_prompt: bool) -> None:
        """Note that a cell that will block is about to be sent; it then handles paused ranks."""
        self._can_prompt, self._promised = can_prompt, True

    def promise_over(self) -> None:
        """Note that this cell has ended."""
        self._promised = False

    def unattended(self) -> None:
        """Note that no cell blocks any more."""
        self._attended_s = -ATTENDED_S

    @property
    def _attended(self) -> bool:
        """Whether a cell blocks or will block soon, and so handles paused ranks."""
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
        """The paused ranks, by engine id."""
        with self._changed:
            return dict(sorted(self._stops.items()))

    def tell(self, engine: int, line: str, timeout_s: float = ANSWER_S) -> Reply:
        """Let a paused rank run one command.

        Raises:
            RunError: The rank is not paused, or does not answer in time.
        """
        with self._changed:
            stop = self._stops.get(engine)
            if stop is None:
                raise RunError(
                    f"Rank {engine} is not paused.",
                    seen=f"paused: {self.names()}" if self._stops else "no rank is paused",
                    code="WB-RUN-073",
                )
            self._answers.pop(engine, None)
            self._left.pop(engine, None)
            self._send(engine, Typed(number=stop.number, text=line))
            if not self._until(lambda: engine in self._answers or engine in self._left, timeout_s):
                raise RunError(
                    f"Rank {engine} did not answer {line!r} within {timeout_s:g} s.",
                    next_step="%cluster stacks shows which line of code this rank is running",
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
        """Let a rank continue, also past further breakpoints of its cell."""
        with self._changed:
            stop = self._stops.pop(engine, None)
        if stop is not None:
            self._send(engine, GoOn(number=stop.number, reason=reason))

    def inquire(self, engine: int, timeout_s: float = 1.0) -> Stopped | None:
        """Return an engine's question, even if the question went to another notebook."""
        self._send(engine, Repeat())
        with self._changed:
            self._until(lambda: engine in self._stops, timeout_s)
            return self._stops.get(engine)

    def serve(self, engine: int, port: int, timeout_s: float = 30.0) -> Served:
        """Let an engine start debugpy, even while its cell runs (`stdin_bridge.py`).

        Raises:
            RunError: The engine does not answer.
        """
        with self._changed:
            self._served.pop(engine, None)
            self._send(engine, Serve(port=port))
            if not self._until(lambda: engine in self._served, timeout_s):
                raise RunError(
                    f"Rank {engine} does not answer.",
                    next_step="%cluster stacks shows which line of code this rank is running",
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
        """Return the paused ranks after their number was stable for a moment."""
        end = time.monotonic() + STEP_S
        before: dict[int, Stopped] | None = None
        while (now := self.stops) != before and time.monotonic() < end:
            before = now
            with self._changed:
                self._changed.wait(SETTLE_S)
        return now

    def names(self) -> str:
        """Return the names of the paused ranks, as `ranks 0-2`."""
        many = "s" if len(self._stops) > 1 else ""
        return f"rank{many} {ranges(sorted(self._stops))}" if self._stops else ""


_all: weakref.WeakSet[Paused] = weakref.WeakSet()


def everyone() -> list[Paused]:
    """Return the paused ranks of every cluster of this process."""
    return list(_all)


HELP = (
    "pdb commands: w, u, d, l, p, pp, a, locals, n, s, c, q, or any expression. "
    "Other commands: `rank 2` shows another paused rank; `all c` sends `c` to all paused ranks; "
    "`leave` closes this prompt"
)


def attend(draw: Callable[[], object] = lambda: None) -> None:
    """Open the prompt for paused ranks; called by a main thread that waits for a cell.

    Args:
        draw: Shows the output of the cell so far.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for paused in everyone():
        able = can_prompt()
        paused.attended(can_prompt=able)
        stops = paused.stops
        if not stops or paused.prompting:
            continue
        reason = NO_PROMPT
        if able:
            reason = "the prompt was closed"
            draw()
            try:
                Prompt(paused, draw).converse(min(stops))
            except Exception as error:  # the front end cannot ask, although it seemed able to
                reason = f"the prompt failed ({type(error).__name__}: {error})"
        for engine in paused.stops:  # after `leave` too: the cell blocks a new prompt
            paused.go_on(engine, reason)
        paused.attended(can_prompt=able)


@contextlib.contextmanager
def attending(blocks: bool) -> Iterator[None]:
    """Send a cell and wait for it in the block, because a rank can pause before the wait begins.

    Such a rank gets the same answer as a rank that pauses later.

    Args:
        blocks: Whether this thread will wait for the cell; otherwise the block does nothing.
    """
    blocks = blocks and threading.current_thread() is threading.main_thread()
    promised = everyone() if blocks else []
    for paused in promised:
        paused.promise(can_prompt=can_prompt())
    try:
        yield
    finally:
        for paused in promised:
            paused.promise_over()


def unattended() -> None:
    """Note that no cell blocks: ranks that pause now wait for `%cluster debug`."""
    if threading.current_thread() is threading.main_thread():
        for paused in everyone():
            paused.unattended()


class Prompt:
    """Reads commands for paused ranks.

    Args:
        draw: Called after each command, to show what the cells print.
    """

    def __init__(self, paused: Paused, draw: Callable[[], object] = lambda: None) -> None:
        self._paused, self._draw = paused, draw
        self._lock = threading.Lock()
        self._reading: int | None = None
        self._poked = False

    def converse(self, engine: int) -> None:
        """Read and carry out commands until no rank is paused, or until `leave`."""
        paused = self._paused
        paused.prompting, paused.on_drop = True, self._dropped
        shown: int | None = None
        try:
            while stops := paused.settled():
                stop = stops.get(engine) or stops[min(stops)]
                engine = stop.engine
                if stop.asks == "debugger" and shown != engine:
                    self._introduce(stop, stops)
                shown = engine
                line = self._read(stop)
                if line is None:
                    continue
                if line.strip() == "leave":
                    return
                engine = self._obey(stop, line)
                self._draw()
        except EOFError:
            return
        finally:
            paused.prompting, paused.on_drop = False, lambda engine: None

    @staticmethod
    def _introduce(stop: Stopped, stops: dict[int, Stopped]) -> None:
        others = [engine for engine in stops if engine != stop.engine]
        also = f"; also paused: {ranges(others)}" if others else ""
        write_out(f"rank {stop.engine} is paused at {stop.where}{also}\n{stop.text}({HELP})\n")
        if not others:
            patience = _spell(stop.patience_s)
            write_out(
                f"(if another rank waits in a collective for rank {stop.engine}, the waiting rank "
                f"fails after {patience})\n"
            )

    def _dropped(self, engine: int) -> None:
        """Close the prompt of a rank that continues; called on the router's thread."""
        with self._lock:
            if self._reading == engine and not self._poked:
                self._poked = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def _read(self, stop: Stopped) -> str | None:
        """Return the user's line; None if the rank continued meanwhile."""
        text = f"rank {stop.engine}: {stop.text}"
        prompt = f"rank {stop.engine}> " if stop.asks == "debugger" else text
        self._poked = False
        try:
            with self._lock:
                self._reading = stop.engine
            try:
                if stop.engine not in self._paused.stops:
                    return None
                return getpass.getpass(prompt) if stop.asks == "password" else input(prompt)
            finally:
                with self._lock:
                    self._reading = None
        except KeyboardInterrupt:
            self._reading = None
            if not self._poked:
                raise
            write_out(f"rank {stop.engine} is no longer paused\n")
            return None

    def _obey(self, stop: Stopped, line: str) -> int:
        """Carry out a line; return the rank that the prompt shows next."""
        paused, engine, words = self._paused, stop.engine, line.split()
        if stop.asks != "debugger":
            self._tell(engine, line)
        elif words[:1] == ["ranks"]:
            for one in paused.stops.values():
                write_out(f"rank {one.engine}: {one.where}\n")
        elif words[:1] == ["rank"] and len(words) == 2:
            if words[1].isdecimal() and int(words[1]) in paused.stops:
                return int(words[1])
            write_out(f"rank {words[1]} is not paused; paused: {paused.names()}\n")
        elif words[:1] == ["all"] and len(words) > 1:
            self._obey_all(line.split(None, 1)[1])
        else:
            self._obey_one(engine, line)
        return engine

    def _obey_all(self, line: str) -> None:
        engines = list(self._paused.stops)
        replies: dict[int, Reply] = {}

        def tell(engine: int) -> None:
            replies[engine] = self._tell(engine, line)

        # At once: a step over a collective ends only when all ranks take it.
        threads = [threading.Thread(target=tell, args=(e,), daemon=True) for e in engines]
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
        for engine in engines:
            if text := replies[engine].text:
                write_out(f"rank {engine}: {text}")

    def _obey_one(self, engine: int, line: str) -> None:
        reply = self._tell(engine, line)
        write_out(reply.text)
        words, others = line.split(), [e for e in self._paused.stops if e != engine]
        if not reply.paused and others and words and words[0] not in GO_ON:
            write_out(
                f"(rank {engine} runs again and has not paused yet. Perhaps rank {engine} waits in "
                f"a collective for the paused rank{'s' if len(others) > 1 else ''} "
                f"{ranges(others)}. In this case, type `all {line}` to send `{line}` to all paused "
                "ranks)\n"
            )

    def _tell(self, engine: int, line: str) -> Reply:
        try:
            return self._paused.tell(engine, line)
        except RunError as error:
            return Reply(f"{error.what}\n", paused=False)


def can_prompt() -> bool:
    """Whether `input()` would reach a user; nbconvert, papermill and tests cannot answer."""
    interactive = sys.modules.get("IPython")
    shell = interactive.get_ipython() if interactive is not None else None
    kernel = getattr(shell, "kernel", None)
    if kernel is not None:
        return bool(getattr(kernel, "_allow_stdin", False))
    return sys.stdin is not None and sys.stdin.isatty()


def _spell(seconds: float) -> str:
    return f"{seconds / 60:g} min" if seconds >= 60 else f"{seconds:g} s"


def write_out(text: str) -> None:
    """Write below the notebook's cell."""
    sys.stdout.write(text)
    sys.stdout.flush()
