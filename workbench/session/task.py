"""One cell running on several engines at once: outputs, outcomes, the first error, the end.

Used for SPMD cells and for training runs alike. The first rank to fail ends the cell: the others
get a moment to fail by themselves, then they are interrupted.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..cluster.calls import Call
from ..cluster.engines import Engines
from ..errors import ClusterError, RunError
from ..views.output import OutputBoard, ranges
from . import gone, reasons

GRACE_S = 0.5
KILL_S = 8.0
CELL = "workbench.engine.entry:cell"
AGAIN_S = 1.5
"""A cell may catch an interrupt and go on; so it is sent again until the engine is ended."""


class Task:
    """A cell under way.

    Args:
        requests: What each engine is asked to run, by engine id, in the order of the ranks.
        labels: How each engine is called in outputs.
        on_done: Called once, on a background thread, when every engine is done.
        spare: Engines that may die while `least` others of them live; `on_loss` hears of it.
    """

    def __init__(
        self,
        engines: Engines,
        requests: Mapping[int, Mapping[str, Any]],
        labels: Mapping[int, str],
        on_done: Callable[[Task], None] = lambda task: None,
        spare: Iterable[int] = (),
        on_loss: Callable[[str], None] = lambda text: None,
        least: int = 1,
    ) -> None:
        self.engines = engines
        self.ids = list(requests)
        self._labels = dict(labels)
        self.board = OutputBoard(labels)
        self.outcomes: dict[int, dict[str, Any]] = {}
        self.first_failed: int | None = None
        self.over = threading.Event()
        self.changed = threading.Event()
        self.interrupted = False
        self.began = time.perf_counter()
        self.seconds = 0.0
        self._lock = threading.Lock()
        self._on_done = on_done
        self._spare, self._least, self._on_loss = set(spare), least, on_loss
        self._lost: set[int] = set()  # of those
        self._stalled: set[int] = set()  # answered nothing, so they were killed
        self._errors: list[tuple[int, Mapping[str, Any]]] = []
        self._ended: set[int] = set()  # killed by us: they did not answer an interrupt
        self._leaving: set[int] = set()  # failed, and clearing away
        self.moved_at = self.began
        self._timers: list[threading.Timer] = []
        for call in [self._submit(i, requests[i]) for i in self.ids]:
            call.when_done(self._settled)

    def _submit(self, engine: int, request: Mapping[str, Any]) -> Call:
        try:
            return self.engines.submit(engine, CELL, (request,), self._output)
        except ClusterError as error:  # it died a moment ago; the others are under way already
            call = Call(engine)
            call.finish(error)
            return call

    def _output(self, engine: int, kind: str, content: Mapping[str, Any]) -> None:
        if kind == "error":
            # Shown at the end, when it is known which one is the reason.
            if content.get("ename") != "RunStopped":
                self._errors.append((engine, content))
            return
        self.board.message(engine, kind, content)
        self.changed.set()
        self.moved()

    def moved(self) -> None:
        """Take note that something came from an engine: nothing hangs."""
        self.moved_at = time.perf_counter()
        if self.banner:
            self.banner = ""

    @property
    def banner(self) -> str:
        """What holds the cell up at the moment, in words; empty when nothing does."""
        return self.board.banner

    @banner.setter
    def banner(self, text: str) -> None:
        if text != self.board.banner:
            self.board.banner = text
            self.changed.set()

    def _settled(self, call: Call) -> None:
        outcome = call.result
        if isinstance(outcome, BaseException):
            outcome = _early_interrupt(outcome) or gone.outcome(outcome)
            if call.engine in self._ended:
                outcome["ended"] = f"ended, since it did not answer an interrupt for {KILL_S:g} s"
        self.moved()
        with self._lock:
            self.outcomes[call.engine] = outcome
            spared = outcome["status"] == "died" and self._can_spare(call.engine)
            bad = outcome["status"] in ("error", "died") and not spared
            bad = bad and "ended" not in outcome
            first = bad and self.first_failed is None
            if first:
                self.first_failed = call.engine
            complete = len(self.outcomes) == len(self.ids)
        self.changed.set()
        if spared:
            name = self._name(call.engine)
            self._on_loss(f"{name} is gone, the others go on: {outcome['evalue']}")
        if complete:
            self._end()
        elif first or outcome["status"] == "interrupted":
            self.end_soon()

    def _can_spare(self, engine: int) -> bool:
        """Take note of an engine's death; return whether the others can do without it."""
        living = self._spare - self._lost - {engine}
        last = len(living) < self._least or (self._least and len(self.outcomes) == len(self.ids))
        if engine not in self._spare or last:
            return False
        self._lost.add(engine)
        return True

    @property
    def lost(self) -> int:
        """How many engines have died that the others could do without."""
        return len(self._lost)

    def _end(self) -> None:
        self.seconds = time.perf_counter() - self.began
        for timer in self._timers:
            timer.cancel()
        self._show_errors()
        self._on_done(self)
        self.over.set()
        self.changed.set()

    def _show_errors(self) -> None:
        """Show the reason first; what only followed from it would bury it and is folded."""
        self.board.banner = ""
        cause = self.cause
        known = cause is None or not reasons.is_collateral(self.outcomes[cause])
        # Where nobody made a mistake, each rank may know a part of the story.
        followed = self._followed(cause) if known else []
        self._errors.sort(key=lambda error: error[0] != cause)
        for engine, content in self._errors:
            if engine in followed:
                self.board.fold(engine, content)
            else:
                self.board.message(engine, "error", content)
        if followed:
            said = self._say(followed)
            self.board.say_with_it(said if cause is None else f"with it: {said}")

    def _followed(self, cause: int | None) -> list[int]:
        """Engines whose end is only a consequence: of an interrupt, or of the cause's."""
        return [
            i
            for i in self.ids
            if i != cause
            and self.outcomes[i]["status"] not in ("ok", "stopped")
            and i not in self._lost
            and (self.outcomes[i].get("ended") or reasons.is_collateral(self.outcomes[i]))
        ]

    def _say(self, engines: list[int]) -> str:
        return reasons.with_it(self.outcomes, engines, self._call)

    def _call(self, engines: Iterable[int]) -> str:
        names = [self._name(i).lower() for i in engines]
        if not all(name.startswith("rank ") for name in names):
            return ", ".join(names)
        numbers = [int(name.removeprefix("rank ")) for name in names]
        return f"rank{'s' if len(numbers) > 1 else ''} {ranges(numbers)}"

    @property
    def cause(self) -> int | None:
        """The engine that the cell failed for; None where none did, or all were interrupted."""
        if self.first_failed is None:
            return None
        cause = reasons.root_cause(self._by_rank(), self.first_failed, self._lost)
        outcome = self.outcomes[cause]
        mine = not (reasons.is_collateral(outcome) or outcome.get("ended"))
        return cause if mine or not self.interrupted else None

    def _by_rank(self) -> dict[int, dict[str, Any]]:
        return {i: self.outcomes[i] for i in self.ids if i in self.outcomes}

    @property
    def is_over(self) -> bool:
        """Whether every engine is done."""
        return self.over.is_set()

    def unfinished(self) -> list[int]:
        """Engines that are still at it."""
        with self._lock:
            return [i for i in self.ids if i not in self.outcomes]

    def end_soon(self, grace_s: float = GRACE_S, but: int | None = None) -> None:
        """Interrupt whoever is still at it after `grace_s`, and end who does not answer.

        Args:
            but: The engine that failed: it clears away, an interrupt would hide its error.
        """
        if but is not None:
            self._leaving.add(but)
        self._later(grace_s, self._interrupt_rest)
        self._later(grace_s + KILL_S, self._kill_rest)

    def interrupt(self) -> None:
        """The user pressed interrupt: end the cell on all its engines."""
        self.interrupted = True
        self._interrupt_rest()
        self._later(KILL_S, self._kill_rest)

    def _interrupt_rest(self) -> None:
        if unfinished := [i for i in self.unfinished() if i not in self._leaving]:
            self.engines.interrupt(unfinished)
            self._later(AGAIN_S, self._interrupt_rest)

    def _kill_rest(self) -> None:
        for engine in self.unfinished():
            self._ended.add(engine)
            self.engines.signal(engine, signal.SIGKILL)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(delay_s, action)
        timer.daemon = True
        self._timers.append(timer)
        timer.start()

    @property
    def group_broken(self) -> bool:
        """Whether the process group of these engines must be made anew."""
        return any(o.get("group_broken") or o["status"] == "died" for o in self.outcomes.values())

    def failure(self) -> RunError | None:
        """The error that the cell ends in, None when all went well."""
        engine = self.cause
        if engine is None:
            return self._interruption()
        outcome = self.outcomes[engine]
        bad = [
            i
            for i, o in self._by_rank().items()
            if o["status"] not in ("ok", "stopped") and i not in self._lost
        ]
        same = [i for i in bad if reasons.words(self.outcomes[i]) == reasons.words(outcome)]
        who = f"{self._name(engine)} (engine {engine})"
        if len(same) > 1:
            who = f"Ranks {ranges(self.ids.index(i) for i in same)}"
        what = f"{who} failed: {reasons.words(outcome)}"
        if outcome["status"] == "died":
            same = gone.of(self.outcomes)
            what = gone.words(engine, self.outcomes, self._name)
        if outcome.get("ended"):
            what = f"{self._name(engine)} stalled: it took no step, heeded no interrupt, "
            what += "and was ended"
            same = [engine]
        if others := [
            i for i in bad if i not in same or (self.outcomes[i].get("ended") and i != engine)
        ]:
            what += f"\n  with it: {self._say(others)}"
        step = gone.next_step(self.outcomes) or outcome.get("advice")
        error = RunError(what, next_step=step)
        error.outcome = outcome  # type: ignore[attr-defined]
        return error

    def _name(self, engine: int) -> str:
        """`Rank 1`, or `Server s0`."""
        label = self._labels.get(engine) or f"rank {self.ids.index(engine)}"
        return label.partition(" · ")[0].capitalize()

    def label(self, engine: int) -> str:
        """`rank 1`, or `server s0`."""
        return self._name(engine).lower()

    def _interruption(self) -> RunError | None:
        """The error of a cell that ended because it was interrupted; None when all went well."""
        ended = self.ended
        if not (self.interrupted or ended) and all(
            outcome["status"] != "interrupted" for outcome in self.outcomes.values()
        ):
            return None
        what = "".join(f"\n  {text}" for text in ended)
        return RunError(
            f"Interrupted: the cell was ended on all its engines.{what}",
            next_step=gone.next_step(self.outcomes),
        )

    @property
    def ended(self) -> list[str]:
        """What is to be said of engines that we killed, since no interrupt reached them."""
        found = [i for i in self.ids if self.outcomes[i].get("ended")]
        pids = {i: self.engines.engines[i].pid for i in found}
        return [
            f"{self._name(i)} (engine {i}, pid {pids[i]}) was {self.outcomes[i]['ended']}: "
            f"%cluster restart {i}"
            for i in found
        ]


def _early_interrupt(error: BaseException) -> dict[str, Any] | None:
    """Return the outcome of a call that was interrupted before its cell began; None of others."""
    if getattr(error, "ename", "") != "KeyboardInterrupt":
        return None
    return {
        "status": "interrupted",
        "ename": "KeyboardInterrupt",
        "evalue": "",
        "group_broken": True,
    }
