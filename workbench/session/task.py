"""One cell running on several engines at once: outputs, outcomes, the first error, the end.

Used for SPMD cells and for training runs alike. The first rank to fail ends the cell: the others
get a moment to fail by themselves, then they are interrupted.
"""

from __future__ import annotations

import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..cluster.calls import Call
from ..cluster.engines import Engines
from ..errors import ClusterError, RunError
from ..views.output import OutputBoard, ranges

GRACE_S = 0.5
KILL_S = 8.0
CELL = "workbench.engine.entry:cell"
COLLATERAL = re.compile(
    r"Connection closed by peer|Connection reset|Broken pipe|Socket closed|Timed out"
    r"|KeyboardInterrupt|DistBackendError|DistNetworkError|DistStoreError|gloo",
    re.IGNORECASE,
)
"""What a rank says when another one has gone: never the reason that is shown first."""


class Task:
    """A cell under way.

    Args:
        requests: What each engine is asked to run, by engine id, in the order of the ranks.
        labels: How each engine is called in outputs.
        on_done: Called once, on a background thread, when every engine is done.
        spare: Engines that may die while another one of them lives; `on_loss` hears of it.
    """

    def __init__(
        self,
        engines: Engines,
        requests: Mapping[int, Mapping[str, Any]],
        labels: Mapping[int, str],
        on_done: Callable[[Task], None] = lambda task: None,
        spare: Iterable[int] = (),
        on_loss: Callable[[str], None] = lambda text: None,
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
        self._spare, self._on_loss = set(spare), on_loss
        self._lost: set[int] = set()  # of those
        self._errors: list[tuple[int, Mapping[str, Any]]] = []
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

    def _settled(self, call: Call) -> None:
        outcome = call.result
        if isinstance(outcome, BaseException):
            outcome = {"status": "died", "ename": type(outcome).__name__, "evalue": str(outcome)}
        with self._lock:
            self.outcomes[call.engine] = outcome
            spared = outcome["status"] == "died" and self._can_spare(call.engine)
            bad = outcome["status"] in ("error", "died") and not spared
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
            self.end_soon(GRACE_S)

    def _can_spare(self, engine: int) -> bool:
        """Take note of an engine's death; return whether the others can do without it."""
        living = self._spare - self._lost - {engine}
        if engine not in self._spare or not living or len(self.outcomes) == len(self.ids):
            return False
        self._lost.add(engine)
        return True

    def _end(self) -> None:
        self.seconds = time.perf_counter() - self.began
        for timer in self._timers:
            timer.cancel()
        self._show_errors()
        self._on_done(self)
        self.over.set()
        self.changed.set()

    def _show_errors(self) -> None:
        """Show the reason; what only followed from it would bury it."""
        cause = None if self.first_failed is None else self._root_cause()
        if cause is not None and COLLATERAL.search(_words(self.outcomes[cause])):
            cause = None  # nobody's own mistake: each rank may know a part of the story
        for engine, content in self._errors:
            words = f"{content.get('ename')}: {content.get('evalue')}"
            if cause is None or engine == cause or not COLLATERAL.search(words):
                self.board.message(engine, "error", content)

    @property
    def is_over(self) -> bool:
        """Whether every engine is done."""
        return self.over.is_set()

    def unfinished(self) -> list[int]:
        """Engines that are still at it."""
        with self._lock:
            return [i for i in self.ids if i not in self.outcomes]

    def end_soon(self, grace_s: float) -> None:
        """Interrupt whoever is still at it after `grace_s`, and end who does not answer."""
        self._later(grace_s, self._interrupt_rest)
        self._later(grace_s + KILL_S, self._kill_rest)

    def interrupt(self) -> None:
        """The user pressed interrupt: end the cell on all its engines."""
        self.interrupted = True
        self._interrupt_rest()
        self._later(KILL_S, self._kill_rest)

    def _interrupt_rest(self) -> None:
        self.engines.interrupt(self.unfinished())

    def _kill_rest(self) -> None:
        for engine in self.unfinished():
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
        if self.first_failed is None:
            if self.interrupted or any(
                o["status"] == "interrupted" for o in self.outcomes.values()
            ):
                return RunError("Interrupted: the cell was ended on all its engines.")
            return None
        engine = self._root_cause()
        outcome = self.outcomes[engine]
        bad = [
            i
            for i, o in self.outcomes.items()
            if o["status"] not in ("ok", "stopped") and i not in self._lost
        ]
        same = [i for i in bad if _words(self.outcomes[i]) == _words(outcome)]
        who = f"{self._name(engine)} (engine {engine})"
        if len(same) > 1:
            who = f"Ranks {ranges(self.ids.index(i) for i in same)}"
        what = f"{who} failed: {_words(outcome)}"
        if outcome["status"] == "died":
            name = self._name(engine)
            what = f"{name} {'are' if name.startswith('Replicas') else 'is'} gone: "
            what += str(outcome["evalue"])
        others = len(bad) - len(same)
        if others > 0:
            what += f"\n  with it: {others} other rank{'s were' if others > 1 else ' was'} ended"
        step = f"%cluster restart {engine}" if outcome["status"] == "died" else None
        error = RunError(what, next_step=step)
        error.outcome = outcome  # type: ignore[attr-defined]
        return error

    def _name(self, engine: int) -> str:
        """`Rank 1`, or `Server s0`."""
        label = self._labels.get(engine) or f"rank {self.ids.index(engine)}"
        return label.partition(" · ")[0].capitalize()

    def _root_cause(self) -> int:
        """The engine whose error is not just a consequence of another's."""
        failed = [i for i in self.ids if self.outcomes[i]["status"] in ("died", "error")]
        failed = [i for i in failed if i not in self._lost]
        died = [i for i in failed if self.outcomes[i]["status"] == "died"]
        own = [i for i in failed if not COLLATERAL.search(_words(self.outcomes[i]))]
        assert self.first_failed is not None
        if died:
            # Who died later may have been ended because it waited for the first.
            return self.first_failed if self.first_failed in died else died[0]
        return self.first_failed if self.first_failed in own or not own else own[0]


def _words(outcome: Mapping[str, Any]) -> str:
    return f"{outcome['ename']}: {outcome['evalue']}"
