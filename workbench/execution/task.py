"""One cell running on several engines at once: outputs, outcomes, the first error, the end.

Used for SPMD cells and for training runs alike. The first rank to fail ends the cell: the others
get a moment to fail by themselves, then they are interrupted.
"""

from __future__ import annotations

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

from ..cluster.calls import Call
from ..errors import ClusterError, RunError
from ..shared.events import (
    AGAIN_S,
    GRACE_S,
    HEARD_S,
    KILL_ON_DEVICE_S,
    KILL_S,
    Regrouped,
    RunFinished,
    RunStarted,
    Standing,
    ToldToEnd,
)
from ..shared.messages import BadMessageError, CellOutcome, Happened, Position, Records
from ..views.output import OutputBoard
from . import outcome as gone
from .outcome import CellEnd, Names

if TYPE_CHECKING:
    from ..cluster.engines import Engines
    from ..shared.members import Member

log = logging.getLogger("workbench.session")
CELL = "workbench.engine.entry:cell"
ROWS_S = 2.0
"""How long the end of a cell waits for the last rows of its run."""


OnLoss = Callable[[str, Sequence[int]], None]
"""`on_loss(text, engines)`: reports the death of engines that the cell can do without."""


class Mender(Protocol):
    """Lets a cell continue without some of its engines, or with others.

    Attributes:
        members: Engines that take part.
        failed: Why requested engines did not join.
    """

    def spares(self, engine: int, outcome: CellOutcome) -> CellOutcome | None:
        """Process an engine's end.

        None: it counts for the cell; otherwise the outcome for the engine.
        """

    def expects(self, engine: int) -> bool:
        """Whether an engine has not joined yet: the others continue without it."""

    def hear(self, engine: int, event: Standing | Regrouped) -> None:
        """Process an engine's message about a change of workers."""

    members: list[int]
    failed: list[str]

    @property
    def target(self) -> int | None:
        """The number of workers after the current scaling; None if none is running."""

    def scale(self, workers: int) -> None:
        """Continue with this many workers; returns when the change has begun."""

    def check_scales(self) -> None:
        """Raise RunError if the number of the run's workers cannot change."""


class Task:
    """A running cell.

    Args:
        requests: What each engine is asked to run, by engine id, in the order of the ranks.
        members: The member of each engine.
        on_done: Called once, on a background thread, when every engine is done.
        spare: Engines that can die if at least `least` others of them live; `on_loss` is called.
        mender: Decides the same from more conditions; `on_loss` is not called.
        listens: Receives every message of an engine about its run.
        chains: Groups of engines that can also die if one of each group lives and `going` is true.
        on_leaving: Receives the engines that were told to end.

    Attributes:
        when_long: The waiting thread calls it after the cell has run for a while.
        mender: The mender argument.
    """

    def __init__(
        self,
        engines: Engines,
        requests: Mapping[int, Mapping[str, Any]],
        members: Mapping[int, Member],
        on_done: Callable[[Task], None] = lambda task: None,
        spare: Iterable[int] = (),
        on_loss: OnLoss = lambda text, engines: None,
        least: int = 1,
        mender: Mender | None = None,
        chains: Iterable[Iterable[int]] = (),
        going: Callable[[], bool] = lambda: True,
        listens: Callable[[int, Records | Happened | Position], object] = lambda who, what: None,
        on_leaving: Callable[[int, ToldToEnd], object] = lambda engine, event: None,
    ) -> None:
        self.engines = engines
        self.ids = list(requests)
        self.names = Names(self.ids, members)
        self.board = OutputBoard(members)
        self.outcomes: dict[int, CellOutcome] = {}
        self.first_failed: int | None = None
        self.over = threading.Event()
        self.on_late: Callable[[], object] = lambda: None  # called for output after the cell's end
        self.changed = threading.Event()
        self.when_long: Callable[[], None] = lambda: None
        self.interrupted = False
        self.began = time.perf_counter()
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._on_done = on_done
        self._spare, self._least, self._on_loss = set(spare), least, on_loss
        self._chains, self._going = [frozenset(chain) for chain in chains], going
        self._lost: set[int] = set()  # of those
        self.mender, self._listens = mender, listens
        self._on_leaving = on_leaving
        self._condemned: set[int] = set()
        self._errors: list[tuple[int, Mapping[str, Any]]] = []
        self._ended: set[int] = set()  # killed: they did not react to an interrupt
        self._leaving: set[int] = set()  # failed, now cleaning up
        self._reported: set[int] = set()  # have sent all rows of their run
        self._report = threading.Event()
        self.moved_at = self.began
        self._timers: list[threading.Timer] = []
        on_device = any(member.is_on_device for member in members.values())
        self._kill_s = KILL_ON_DEVICE_S if on_device else KILL_S
        with self.engines.together():
            calls = [self._submit(i, requests[i]) for i in self.ids]
        for call in calls:
            call.when_done(self._settled)

    def _submit(self, engine: int, request: Mapping[str, Any]) -> Call:
        try:
            return self.engines.submit(engine, CELL, (request,), self.output)
        except ClusterError as error:  # it died a moment ago; the others are already running
            call = Call(engine)
            call.finish(error)
            return call

    def output(self, engine: int, kind: str, content: Mapping[str, Any]) -> None:
        """Process the output of an engine of the cell."""
        if kind == "error":
            # Shown at the end, when the cause is known.
            if content.get("ename") != "RunStopped":
                self._errors.append((engine, content))
            return
        self.board.message(engine, kind, content)
        self.changed.set()
        self.moved()
        if self.over.is_set():
            self.on_late()

    def heard(
        self, engine: int, message: Records | Happened | Position
    ) -> Records | Happened | Position:
        """Process an engine's message about a run; return it with the name of its host.

        Positions are sent only on request, so they do not count as progress.
        """
        self._listens(engine, message)
        if isinstance(message, Position):
            return message
        self.moved()
        if not isinstance(message, Happened):
            return message
        if isinstance(message.event, (Standing, Regrouped)) and self.mender is not None:
            self.mender.hear(engine, message.event)
        if isinstance(message.event, ToldToEnd):
            _guarded(self._on_leaving, engine, message.event)
        if isinstance(message.event, RunFinished):
            self._reported.add(engine)
            self._report.set()
        if not isinstance(message.event, RunStarted):
            return message
        host = self.member(engine).host if engine in self.ids else ""
        return replace(message, event=replace(message.event, host=host)) if host else message

    def moved(self) -> None:
        """Note that an engine sent something, so the cell does not hang."""
        self.moved_at = time.perf_counter()
        if self.banner:
            self.banner = ""

    @property
    def banner(self) -> str:
        """The current reason for a delay of the cell, in words; empty if there is none."""
        return self.board.banner

    @banner.setter
    def banner(self, text: str) -> None:
        if text != self.board.banner:
            self.board.banner = text
            self.changed.set()

    def _settled(self, call: Call) -> None:
        outcome = _outcome_of(call.result)
        if isinstance(call.result, BaseException) and call.engine in self._ended:
            outcome = replace(
                outcome,
                failed_of=self._shown_by(call.engine),
                ended=f"killed, because it did not react to an interrupt within {self._kill_s:g} s",
            )
        if outcome.ename == "ModuleNotFoundError":
            host = self.engines.host_of(call.engine)
            advice = gone.left_behind(outcome, host) or outcome.advice
            outcome = replace(outcome, advice=advice)
        self.moved()
        counts = None if self.mender is None else self.mender.spares(call.engine, outcome)
        with self._lock:
            counts = None if call.engine in self._condemned else counts
            self.outcomes[call.engine] = outcome = counts or outcome
            if counts is not None:
                self._lost.add(call.engine)
            spared = outcome.status == "died" and self._can_spare(call.engine)
            bad = outcome.status in ("error", "died") and not spared
            bad = bad and not outcome.ended and counts is None
            first = bad and self.first_failed is None
            if first:
                self.first_failed = call.engine
            complete = len(self.outcomes) == len(self.ids)
        self.changed.set()
        if spared:
            name = self.names.of(call.engine)
            text = f"{name} is gone: {outcome.evalue.rstrip('.')}. The other workers continue."
            _guarded(self._on_loss, text, [call.engine])
        if complete:
            self._end()
        elif first or (outcome.status == "interrupted" and counts is None):
            self.end_soon()

    def recruit(self, members: Mapping[int, Member]) -> None:
        """Add further engines; they wait until `rejoin`."""
        self.names.add(members)
        self.board.expect(members)
        with self._lock:
            for engine in members:
                if engine not in self.ids:
                    self.ids.append(engine)
                self.outcomes[engine] = CellOutcome(status="ok")
                self._lost.add(engine)

    def rejoin(self, engine: int, request: Mapping[str, Any]) -> bool:
        """Let a new engine run the cell in place of a lost engine.

        Returns:
            Whether the new engine runs the cell; False if the cell is over.
        """
        with self._lock:
            if len(self.outcomes) == len(self.ids):
                return False
            del self.outcomes[engine]
            self._lost.discard(engine)
        self._submit(engine, request).when_done(self._settled)
        return True

    def condemn(self, engine: int) -> None:
        """End the cell because an engine died whose death was ignored until now."""
        with self._lock:
            self._lost.discard(engine)
            self._condemned.add(engine)
            if self.first_failed is None:
                self.first_failed = engine
        self.end_soon(grace_s=0.0)

    @property
    def spared(self) -> frozenset[int]:
        """Dead engines that the others do not need."""
        return frozenset(self._lost)

    def _shown_by(self, engine: int) -> str:
        """Return the error that an engine has shown; empty if it has shown none."""
        for one, content in self._errors:
            if one == engine and content.get("ename") != "KeyboardInterrupt":
                return f"{content.get('ename')}: {content.get('evalue')}"
        return ""

    def _can_spare(self, engine: int) -> bool:
        """Process an engine's death; return whether the others can continue without it."""
        chains = [chain for chain in self._chains if engine in chain]
        if chains:
            gone = self._lost | {engine}
            if not self._going() or any(chain <= gone for chain in chains):
                return False
            self._lost.add(engine)
            return True
        living = self._spare - self._lost - {engine}
        last = len(living) < self._least or (self._least and len(self.outcomes) == len(self.ids))
        if engine not in self._spare or last:
            return False
        self._lost.add(engine)
        return True

    @property
    def lost(self) -> int:
        """The number of workers that died or left while the others continued."""
        with self._lock:
            return len(self._lost.union(self.outcomes).difference(*self._chains))

    def _end(self) -> None:
        self.seconds = time.perf_counter() - self.began
        for timer in self._timers:
            timer.cancel()
        try:
            _guarded(self._await_rows)
            _guarded(self._show_errors)
            _guarded(self._on_done, self)
        finally:
            self.over.set()
            self.changed.set()

    def _await_rows(self) -> None:
        """Wait for the last rows: they take another way than the results, and can be later."""
        ends = time.monotonic() + ROWS_S
        while (left_s := ends - time.monotonic()) > 0:
            self._report.clear()
            trained = {
                engine for engine, outcome in self.outcomes.items()
                if outcome.trained and outcome.status in ("ok", "stopped")
            }  # fmt: skip
            if trained <= self._reported:
                return
            self._report.wait(left_s)

    def _show_errors(self) -> None:
        """Show the cause first; errors that followed from it are folded, because they would hide
        it.
        """
        self.board.banner = ""
        end = self.end
        cause, followed = end.cause, end.followed
        self._errors.sort(key=lambda error: error[0] != cause)
        # A spared engine's cell is interrupted by us: the run no longer needs the engine.
        sent_home = frozenset() if self.interrupted else frozenset(self._lost)
        for engine, content in self._errors:
            if engine in sent_home and content.get("ename") == "KeyboardInterrupt":
                continue
            if engine in followed:
                self.board.fold(engine, content)
            else:
                self.board.message(engine, "error", content)
        if followed:
            said = end.say(followed)
            self.board.say_with_it(said if cause is None else f"Also failed: {said}")

    @property
    def end(self) -> CellEnd:
        """The outcomes of its engines so far, in words."""
        return CellEnd(
            self.names,
            {i: self.outcomes[i] for i in self.ids if i in self.outcomes},
            first_failed=self.first_failed,
            lost=frozenset(self._lost),
            interrupted=self.interrupted,
            pid=lambda engine: self.engines.engines[engine].pid,
        )

    @property
    def cause(self) -> int | None:
        """The engine that made the cell fail; None if none did, or if all were interrupted."""
        return self.end.cause

    @property
    def is_over(self) -> bool:
        """Whether every engine is done."""
        return self.over.is_set()

    def unfinished(self) -> list[int]:
        """Engines that are still running."""
        with self._lock:
            return [i for i in self.ids if i not in self.outcomes]

    def end_soon(self, grace_s: float = GRACE_S, but: int | None = None) -> None:
        """Interrupt engines that still run after `grace_s`, and end those that do not answer.

        Args:
            but: The engine that failed. It is cleaning up, and an interrupt would hide its error.
        """
        if but is not None:
            if self.mender is not None and self.mender.expects(but):
                return
            self._leaving.add(but)
        self._later(grace_s, self._interrupt_rest)
        self._later(grace_s + self._kill_s, self._kill_rest)

    def interrupt(self) -> None:
        """The user pressed interrupt: end the cell on all its engines."""
        self.interrupted = True
        self._interrupt_rest()
        self._later(self._kill_s, self._kill_rest)

    def stop(self) -> None:
        """Interrupt the cell; a cell has no steps at which it could stop."""
        self.interrupt()

    def abandon(self) -> None:
        """Hand the cell to another notebook, which settles it."""
        self._on_done = lambda task: None

    def _interrupt_rest(self) -> None:
        if unfinished := [i for i in self.unfinished() if i not in self._leaving]:
            self.engines.interrupt(unfinished)
            self._later(AGAIN_S, self._interrupt_rest)

    def _kill_rest(self) -> None:
        for engine in self.unfinished():
            self._ended.add(engine)
            self.engines.signal(engine, signal.SIGKILL)
        self._later(HEARD_S, self._give_up_rest)

    def _give_up_rest(self) -> None:
        """Make sure that the cell is over, even if no message reports an engine's end."""
        for engine in self.unfinished():
            self.engines.give_up(engine)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    @property
    def group_broken(self) -> bool:
        """Whether the process group of these engines must be created again."""
        return any(o.group_broken or o.status == "died" for o in self.outcomes.values())

    @property
    def explained(self) -> bool:
        """Whether the rank that made the cell fail has shown its error."""
        cause = self.cause
        return cause is not None and any(engine == cause for engine, _ in self._errors)

    def failure(self) -> RunError | None:
        """The error of the cell; None if all went well."""
        return self.end.failure()

    def member(self, engine: int) -> Member:
        """The member that an engine is."""
        return self.names.member(engine)

    @property
    def ended(self) -> dict[int, str]:
        """The message about engines that were killed because they did not react to an interrupt."""
        return self.end.ended


def _guarded(callback: Callable[..., object], *args: object) -> None:
    """Call a callback; its error must not prevent the cell's end."""
    try:
        callback(*args)
    except Exception:
        log.exception("A callback at the end of a cell failed")


def _outcome_of(result: object) -> CellOutcome:
    """Return the outcome that a call has ended in."""
    match result:
        case CellOutcome():  # read from an engine's diary
            return result
        case BaseException():
            if getattr(result, "ename", "") != "KeyboardInterrupt":
                return gone.outcome_of_death(result)
            # The engine was interrupted before its cell began.
            return CellOutcome(status="interrupted", ename="KeyboardInterrupt", group_broken=True)
    try:
        return CellOutcome.from_wire(result)
    except BadMessageError as error:
        return unreadable(error)


def unreadable(error: BadMessageError) -> CellOutcome:
    """Return an outcome for a cell whose engine sent an outcome that this version does not know."""
    why = f"the result of the cell on this engine cannot be read: {error}"
    return CellOutcome(status="error", ename="RunError", evalue=why, group_broken=True)
