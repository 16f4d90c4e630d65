"""One execution of a plan: its state, its history, its controls, its results."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import checksums, lifecycle
from ..cluster.engines import EngineInfo
from ..errors import RunError
from ..faults import Fault, parse_fault
from ..history import disk
from ..history.store import RunHistory
from ..members import Member
from ..plan import Plan
from ..protocol import Message, records_from
from .halting import Halting
from .logging_to import RunLog
from .prompt import attend, unattended
from .results import Results
from .task import Task

if TYPE_CHECKING:
    from .recover import Recovery

log = logging.getLogger("workbench.session")


class Run(Results):
    """A training run, under way or over.

    Attributes:
        name: Its name in `wb.runs`.
        plan: What was asked for.
        engines: Engine id of each rank; one that holds several replicas stands there repeatedly.
        members: The engines that run the cell, each once: who is asked, agreed with and stopped.
        history: One row per worker and step; see `RunHistory`.
        evals: One mapping per evaluation.
        recoveries: Each time that the run went on after the death of an engine.
        faults: Those that are injected at the moment, as `inject` takes them; a `kill` is no state.
        init_from: Folder of the run whose weights the model starts from; empty: none.
        resume_from: The checkpoint (`DIR/step-N`) that the run goes on from; empty: none.
        folder: Where records, events and final weights are on disk.
        color: Number of its colour in all views (`registry.Runs.color`); None: it has none yet.
        logs: What writes it elsewhere, by `--log` and `log_to`.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        number: int,
        name: str,
        engines: Sequence[int],
        devices: Sequence[str],
        folder: Path,
    ) -> None:
        self.plan, self.number, self.name = plan, number, name
        self.engines, self.devices = tuple(engines), tuple(devices)
        self.members = tuple(dict.fromkeys(engines))
        self.folder = folder
        entry = plan.entry
        self.history = RunHistory(self.engines, joined=plan.sync, data_parallel=entry.data_parallel)
        self.init_from = self.resume_from = ""
        self.faults = _lasting(plan.faults)
        self.logs: list[RunLog] = []
        self._dropped: dict[int, int] = {}
        self.error: RunError | None = None
        self.task: Task | None = None
        self.plot_cpu = float("nan")
        self._files: checksums.Sums = {}
        self.color: int | None = None
        self.results: list[Any] = [None] * len(self.members)
        self._state: lifecycle.State = "pending"
        self._story: tuple[str, ...] = ()
        self.recoveries: list[Recovery] = []
        self.rows_from = 0
        self._halting = self._make_halting()
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._paused_ranks: set[int] = set()
        self._everyone: tuple[int, ...] = ()
        self._deliver: Callable[[int, Message], None] = _to_nobody
        self.began = time.time()

    def _make_halting(self) -> Halting:
        return Halting(self.plan.sync, len(self.members), self._send, self._interrupt, self._pace_s)

    # -- life ---------------------------------------------------------------------------------

    @property
    def state(self) -> lifecycle.State:
        """pending, starting, running, paused, recovering, stopping, finished, stopped or failed."""
        return self._state

    def advance(self, event: lifecycle.Event) -> None:
        """Apply an event to the run's life."""
        with self._lock:
            self._state = lifecycle.step(self._state, event, self._story)
            self._story = (*self._story, event)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, in whatever way."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end and return the run; after a failure raise what it failed with.

        Raises:
            RunError: A rank failed, died, or the run was interrupted.
            TimeoutError: It did not end within `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        # Short waits, so that an interrupt of the notebook is noticed at once.
        while not self._over.wait(0.1):
            attend()
            if end is not None and time.monotonic() > end:
                unattended()
                raise TimeoutError(f"run {self.name} is still {self.state} after {timeout} s")
        unattended()
        self._await_logs()
        if self.error is not None:
            raise self.error
        return self

    @property
    def held(self) -> bool:
        """Whether it stands still because its user wants it to."""
        return self._state in ("paused", "stopping")

    def go_on(self, number: int, members: Sequence[int], resume_from: str, step: int) -> None:
        """Be begun again by these engines from `step`; what the old ones still send is not heard.

        Args:
            number: Fresh: messages and rows of before name another.
        """
        with self._lock:
            self._halting.close()
            self.number, self.members = number, tuple(members)
            self.resume_from, self.rows_from = resume_from, step
            self._paused_ranks.clear()
            self._halting = self._make_halting()

    def halt_again(self) -> None:
        """Stop, if that was asked for while no engine could hear it."""
        if self._state == "stopping":
            self._halting.halt("stop")

    def finish(self, error: RunError | None) -> None:
        """Settle the run; whatever fails on the way, it is over then. Only the first call counts.

        Who waits for it waits for ever otherwise, and nothing else could begin on its cluster.
        """
        if self.is_over:
            return
        parts = (self._halting.close, lambda: self._conclude(error), self.history.finish,
                 self._count_files, self.record)  # fmt: skip
        try:
            for part in parts:
                try:
                    part()
                except Exception:  # noqa: PERF203 - one that fails keeps no other back
                    log.exception("The end of run %r went wrong", self.name)
        finally:
            self._deliver = _to_nobody  # else the run would keep its cluster's client for good
            self._over.set()

    def _conclude(self, error: RunError | None) -> None:
        self.error = error
        stopped = self.task is not None and any(
            o["status"] == "stopped" for o in self.task.outcomes.values()
        )
        with contextlib.suppress(lifecycle.InvalidTransitionError):
            if error is None and stopped and self._state != "stopping":
                self.advance("stop")
            self.advance("fail" if error is not None else "finish")

    def _count_files(self) -> None:
        self._files = disk.sizes(self.folder)

    def record(self) -> None:
        """Write `run.json`; where that cannot be done a note says so, and the run goes on."""
        try:
            disk.write_meta(self.folder, self.meta())
        except Exception as error:  # a full disk, most likely; never worth the run
            self.history.event("note", disk.unwritten(self.folder, error))

    def restore(self, history: RunHistory, meta: Mapping[str, Any]) -> None:
        """Become the run that a folder holds; it is over."""
        self.history = history
        self._files = dict(meta.get(disk.FILES) or {})
        self.began = float(meta.get("began", self.began))
        state = meta.get("state", "failed")
        # A run whose notebook died has no end on record.
        self._state = state if state in lifecycle.OVER else "failed"
        if meta.get("error"):
            self.error = RunError(str(meta["error"]))
        self._over.set()

    # -- messages from the engines --------------------------------------------------------------

    def receive(self, message: Message) -> None:
        """Take a message of this run; called on the router's thread."""
        if self.task is not None and message.kind in ("records", "event"):
            self.task.moved()
        if message.kind == "records":
            rows = records_from(message.payload[0])
            self.history.append(rows)
            if len(rows):
                self._dropped[int(rows["rank"][0])] = int(message.body["dropped"])
        elif message.kind == "position":
            self._halting.position(int(message.body["rank"]), int(message.body["step"]))
        elif message.kind == "event":
            fields = {k: v for k, v in message.body.items() if k not in ("run", "name")}
            self._event(str(message.body["name"]), fields)

    def _event(self, name: str, fields: dict[str, Any]) -> None:
        if name == "post":
            self._tell("told", fields)
            return
        self.history.event(name, fields)
        if name == "run_started":
            if self._state in ("starting", "recovering"):
                self.advance("start")
        elif name == "left":
            self._halting.arrived(int(fields["rank"]))
            if fields.get("status") == "error" and self.task is not None:
                self.task.end_soon(but=self.members[int(fields["rank"])])
        elif name == "paused":
            self._paused_ranks.add(int(fields["rank"]))
            lost = 0 if self.task is None else self.task.lost
            if len(self._paused_ranks) >= len(self.members) - lost and self._state == "running":
                self.advance("pause")
        elif name == "resumed":
            self._paused_ranks.discard(int(fields["rank"]))
            if self._state == "paused":
                self.advance("resume")

    def open_board(self, deliver: Callable[[int, Message], None], engines: Sequence[int]) -> None:
        """Let the run's engines, servers too, hear of each other; before any of them begins."""
        self._deliver, self._everyone = deliver, tuple(engines)

    def _tell(self, kind: str, body: Mapping[str, Any]) -> None:
        """Send to all engines of the run, also to those that do not run the cell."""
        for engine in self._everyone:
            self._deliver(engine, Message(kind, {**body, "run": self.number}))

    def died(self, engine: EngineInfo) -> None:
        """Name an engine of the run that has ended, while the others are still at it."""
        if engine.id in self._everyone and not self.is_over:
            who = self._member(engine.id)
            verb = "is" if who is None else who.verb
            text = f"{self.called(engine.id)} {verb} gone: {engine.exit}."
            rank = self.engines.index(engine.id) if engine.id in self.engines else None
            self.history.event("death", {"text": text, "rank": rank, "engine": engine.id})

    def called(self, engine: int) -> str:
        """How an engine of the run is called: `Rank 1 (engine 1)`, `Server s0 (engine 4)`."""
        who = self._member(engine)
        return f"Engine {engine}" if who is None else f"{who.title} (engine {engine})"

    def _member(self, engine: int) -> Member | None:
        """Return which part an engine takes in the run; None where that is not known."""
        ranks = [rank for rank, one in enumerate(self.engines) if one == engine]
        if ranks:
            return Member.of_ranks(ranks[0], ranks[-1])
        if self.task is None or engine not in self.task.ids:
            return None
        return self.task.names.member(engine)

    def note(self, text: str, deaths: Sequence[int] = ()) -> None:
        """Add something the user should know about this run.

        Args:
            deaths: Engines of whose deaths it says all, so that nothing else need be said of them.
        """
        self.history.event("note", {"text": text, "deaths": list(deaths)})

    @property
    def evals(self) -> list[dict[str, Any]]:
        """One mapping per evaluation: step, epoch, loss and metrics."""
        return self.history.evals

    # -- controls -------------------------------------------------------------------------------

    def stop(self) -> None:
        """End the run at a step all workers agree on; returns at once."""
        with self._lock:
            if self.is_over or self._state == "stopping":
                return
            self.advance("stop")
            self._halting.halt("stop")

    def pause(self) -> None:
        """Hold the run after a step all workers agree on; returns at once."""
        with self._lock:
            if self.is_over or self._state in ("paused", "stopping"):
                return
            self._halting.halt("pause")

    def resume(self) -> None:
        """Go on after a pause."""
        self._halting.resume()

    def step(self, steps: int = 1) -> None:
        """While paused: do so many steps, then pause again."""
        self._send("advance", steps=steps)

    def inject(self, *faults: str) -> None:
        """Replace the run's faults while it goes on: `run.inject("slow=1:50ms")`; none clears.

        Raises:
            PlanError: A fault was not understood or names a worker the run does not have.
        """
        parsed = [parse_fault(text) for text in faults]
        for fault in parsed:
            fault.check(len(self.engines), links=self.plan.entry.links)
        if not self.is_over:
            self.faults = _lasting(parsed)
            self._tell("inject", {"faults": [fault.text for fault in parsed]})
            self.history.event("inject", {"faults": [fault.text for fault in parsed]})

    def _send(self, kind: str, **body: Any) -> None:
        if self.task is not None and not self.is_over:
            for engine in self.members:
                self.task.engines.router.send(engine, Message(kind, {"run": self.number, **body}))

    def _pace_s(self) -> float:
        """Seconds a step takes on the whole; NaN before the first."""
        snapshot = self.history.snapshot()
        return snapshot.elapsed_s / snapshot.step if snapshot.step else float("nan")

    def _interrupt(self) -> None:
        if self.task is not None and not self.is_over:
            self.task.interrupt()

    def __repr__(self) -> str:
        workers = f"{len(self.engines)} worker" + ("s" if len(self.engines) != 1 else "")
        return f"<Run {self.name}: {self.plan.strategy} on {workers}, {self.state}>"

    def _ipython_display_(self) -> None:
        from ..views.blocks import show

        show(self.summary())


def _to_nobody(engine: int, message: Message) -> None:
    """Deliver nothing."""


def _lasting(faults: Sequence[Fault]) -> tuple[str, ...]:
    return tuple(fault.text for fault in faults if fault.kind not in ("kill", "clear"))
