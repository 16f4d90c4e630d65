"""One execution of a plan: its state, its history, its controls, its results."""

from __future__ import annotations

import contextlib
import importlib
import logging
import shutil
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import RunError
from ..history import disk
from ..history.analysis.summary import RunSummary, summarise
from ..history.store import RunHistory
from ..shared import checkpoints, events
from ..shared.events import Topic
from ..shared.faults import lasting, parse_fault
from ..shared.members import Member
from ..shared.messages import Advance, Down, Happened, Inject, Position, Purpose, Records, Told
from ..shared.plan import Plan, cell_of
from ..shared.protocol import records_from
from .logging_to import RunLog, await_all, log_to
from .paused import attend, unattended
from .stop import StopCoordinator
from .workers import scaling

if TYPE_CHECKING:
    from ..cluster.engines import EngineInfo
    from ..history.snapshot import Snapshot
    from ..views.explain.blame import BlameMatrix
    from ..views.explain.diagram import StepDrawing
    from .outcome import Recovery
    from .task import Task

log = logging.getLogger("workbench.session")


def _nowhere(engine: int, message: Down) -> None: ...


class Run:
    """One training run, which is running or has ended.

    Attributes:
        name: Name of the run in `wb.runs`.
        plan: The plan of the run.
        engines: Engine id of each rank; an engine with several replicas is listed several times.
        members: The engines that run the cell, each listed once.
        history: One row per worker and step; see `RunHistory`.
        evals: One mapping per evaluation.
        error: The error of the run; None if it did not fail.
        results: The value of the cell's last expression on each engine.
        recoveries: One entry for each time that the run continued after the death of an engine.
        faults: The faults that are active now, in the form that `inject` takes, without `kill`.
        init_from: Folder of the run from whose weights the model started, or empty.
        resume_from: The checkpoint (`DIR/step-N`) from which the run continued, or empty.
        folder: The folder of the records, the events and the final weights.
        far: The object that writes the data of engines on other machines into `folder`.
        color: Number of the run's colour in all views; None if it has no colour yet.
        logs: The writers of `--log` and `log_to`.
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
        init_from: str = "",
        resume_from: str = "",
        began: float | None = None,
    ) -> None:
        self.plan, self.name = plan, name
        self.number: int = number
        self.engines, self.devices = tuple(engines), tuple(devices)
        self.members = tuple(dict.fromkeys(engines))
        self.folder, entry = folder, plan.entry
        self.history = RunHistory(self.engines, joined=plan.sync, data_parallel=entry.data_parallel)
        self.init_from, self.resume_from = init_from, resume_from
        self.faults = lasting(plan.faults)
        self.logs: list[RunLog] = []
        self.far = disk.FarWriter(folder, self.history.event)
        self._dropped: dict[int, int] = {}
        self.error: RunError | None = None
        self.task: Task | None = None
        self.plot_cpu = float("nan")
        self._files: checkpoints.Sums = {}
        self._clock_bound_s: list[float | None] = [0.0] * len(self.engines)
        self.color: int | None = None
        self.results: list[Any] = [None] * len(self.members)
        self._state: events.State = "pending"
        self._story: tuple[str, ...] = ()
        self.recoveries: list[Recovery] = []
        self.rows_from = 0
        self._halting = self._make_halting()
        self._lock, self.over = threading.RLock(), threading.Event()
        self._paused_ranks: set[int] = set()
        self._everyone: tuple[int, ...] = ()
        self._deliver: Callable[[int, Down], object] = _nowhere
        self.began = time.time() if began is None else began

    def _make_halting(self, ranks: Collection[int] = ()) -> StopCoordinator:
        about = (self.number, self.plan.sync, ranks or len(self.members), self._send)
        return StopCoordinator(*about, self.interrupt, self._pace_s)

    # -- life ---------------------------------------------------------------------------------

    @property
    def state(self) -> events.State:
        """pending, starting, running, paused, recovering, stopping, finished, stopped or failed."""
        return self._state

    def advance(self, event: events.LifeEvent) -> None:
        """Apply an event to the run's life."""
        with self._lock:
            self._state = events.step(self._state, event, self._story)
            self._story = (*self._story, event)

    @property
    def is_over(self) -> bool:
        """Whether the run has ended, with or without an error."""
        return self.over.is_set()

    def wait(self, timeout: float | None = None) -> Run:
        """Wait for the end of the run and return the run; if the run failed, raise its error.

        Raises:
            RunError: A rank failed, died, or the run was interrupted.
            TimeoutError: The run did not end within `timeout` seconds.
        """
        end = None if timeout is None else time.monotonic() + timeout
        # Short waits, so that an interrupt of the notebook is noticed at once.
        while not self.over.wait(0.1):
            attend()
            if end is not None and time.monotonic() > end:
                unattended()
                raise TimeoutError(f"run {self.name} is still {self.state} after {timeout} s")
        unattended()
        await_all(self.logs, self.note)
        if self.error is not None:
            raise self.error
        return self

    def begin(self, task: Task) -> None:
        """Start the run's cell on its engines."""
        self.task = task

    def returned(self, values: Sequence[Any]) -> None:
        """Keep the return values of its function, by member."""
        self.results = list(values)

    def drawn(self, cpu_share: float) -> None:
        """Record the share of a core that showing the run uses."""
        self.plot_cpu = cpu_share

    @property
    def held(self) -> bool:
        """Whether the user has paused it."""
        return self._state in ("paused", "stopping")

    def go_on(self, number: int, members: Sequence[int], resume_from: str, step: int) -> None:
        """Begin again on these engines from `step`; messages of the old engines are ignored.

        Args:
            number: A new number; older messages and rows have another number.
        """
        with self._lock:
            self._halting.close()
            self.number, self.members = number, tuple(members)
            self.resume_from, self.rows_from = resume_from, step
            self._paused_ranks.clear()
            self._halting = self._make_halting()

    def grow(self, devices: Mapping[int, str]) -> None:
        """Add ranks for engines on these devices, once they have joined."""
        with self._lock:
            self.members = (*self.members, *(one for one in devices if one not in self.members))
            engines = [one for one in devices if one not in self.engines]
            self.engines = (*self.engines, *engines)
            self.devices = (*self.devices, *(devices[one] for one in engines))
            self._everyone = (*self._everyone, *engines)
            self._clock_bound_s += [0.0] * len(engines)
            self.results += [None] * len(engines)
            self.history.grow(engines)

    def agree_among(self, ranks: Collection[int]) -> None:
        """From now on agree on steps with these workers; the others have left or join later."""
        with self._lock:
            before, self._halting = self._halting, self._make_halting(ranks)
            before.close()
            if (asking := before.asking) is not None:
                self._halting.halt(asking)

    def halt(self, purpose: Purpose) -> None:
        """Make the workers stop at an agreed step; returns at once."""
        self._halting.halt(purpose)

    def finish(self, error: RunError | None) -> None:
        """Settle the run, even if a part of this fails. Only the first call counts.

        Otherwise a caller would wait for it forever, and its cluster could not start anything else.
        """
        if self.is_over:
            return
        parts = (self._halting.close, lambda: self._conclude(error), self.far.settle,
                 self.history.finish, self._count_files, self.record)  # fmt: skip
        try:
            for part in parts:
                try:
                    part()
                except Exception:  # noqa: PERF203 - the other callbacks must run
                    log.exception("An error occurred at the end of run %r", self.name)
        finally:
            self._deliver = _nowhere  # otherwise the run would keep its cluster's client forever
            self.over.set()

    def _conclude(self, error: RunError | None) -> None:
        self.error = error
        stopped = self.task is not None and any(
            o.status == "stopped" for o in self.task.outcomes.values()
        )
        with contextlib.suppress(events.InvalidTransitionError):
            if error is None and stopped and self._state != "stopping":
                self.advance("stop")
            self.advance("fail" if error is not None else "finish")

    def abandon(self, text: str) -> None:
        """End the run for this notebook only; another notebook has the run and settles it."""
        self._halting.close()
        self.error = RunError(text, code="WB-RUN-068")
        with contextlib.suppress(events.InvalidTransitionError):
            self.advance("fail")
        if self.task is not None:
            self.task.abandon()
        self.history.finish()
        self.over.set()

    def _count_files(self) -> None:
        self._files = disk.sizes(self.folder)

    def record(self) -> None:
        """Write `run.json`; if that fails, a note says so, and the run continues."""
        try:
            disk.write_meta(self.folder, self.meta())
        except Exception as error:  # most likely a full disk; this must not end the run
            self.history.event(disk.unwritten(self.folder, error))

    def restore(self, history: RunHistory, meta: Mapping[str, Any]) -> None:
        """Load the ended run of a folder into this object."""
        self.history = history
        self._files = dict(meta.get(disk.FILES) or {})
        self.began = float(meta.get("began", self.began))
        self._clock_bound_s = list(meta.get("clock_bound_s") or self._clock_bound_s)
        state = meta.get("state", "failed")
        self._state = state if state in events.OVER else "failed"  # its notebook may have died
        if meta.get("error"):
            self.error = RunError(str(meta["error"]), code="WB-RUN-085")
        self.over.set()

    # -- messages from the engines --------------------------------------------------------------

    def receive(self, message: Records | Happened | Position, engine: int = -1) -> None:
        """Process a message of this run; called on the router's thread."""
        if self.task is not None:
            message = self.task.heard(engine, message)
        self.far.take(engine, message)
        match message:
            case Records():
                rows = records_from(message.rows)
                self.history.append(rows)
                if len(rows):
                    self._dropped[int(rows["rank"][0])] = message.dropped
            case Position():
                self._halting.position(message.rank, message.step)
            case Happened():
                self._event(message.event, message.event.to_wire())

    def _event(self, event: events.Event, fields: Mapping[str, Any]) -> None:
        """Apply an event; fields read from disk also contain its time."""
        if isinstance(event, events.Posted):
            self._tell(Told(run=self.number, rank=event.rank, topic=event.topic, value=event.value))
            return
        self.history.hear(event.name, fields)
        match event:
            case events.RunStarted() if self._state in ("starting", "recovering"):
                self.advance("start")
            case events.CellLeft():
                self._halting.arrived(event.rank)
                if event.status == "error" and self.task is not None:
                    self.task.end_soon(but=self.members[event.rank])
            case events.Paused():
                self._paused_ranks.add(event.rank)
                lost = 0 if self.task is None else self.task.lost
                all_stand = len(self._paused_ranks) >= len(self.members) - lost
                if all_stand and self._state == "running":
                    self.advance("pause")
            case events.Resumed():
                self._paused_ranks.discard(event.rank)
                if self._state == "paused":
                    self.advance("resume")

    def open_board(self, deliver: Callable[[int, Down], None], engines: Sequence[int]) -> None:
        """Connect the run's engines, including servers, with each other before they begin."""
        self._deliver, self._everyone = deliver, tuple(engines)

    def _tell(self, message: Down) -> None:
        """Send to all engines of the run, also to those that do not run the cell."""
        for engine in self._everyone:
            self._deliver(engine, message)

    def died(self, engine: EngineInfo) -> None:
        """Report that an engine of the run has ended while the others are still running."""
        if engine.id in self._everyone and not self.is_over:
            who = self._member(engine.id)
            verb = "is" if who is None else who.verb
            text = f"{self.called(engine.id)} {verb} gone: {engine.exit}."
            rank = self.engines.index(engine.id) if engine.id in self.engines else None
            self.history.event(events.EngineDied(text=text, rank=rank, engine=engine.id))

    def called(self, engine: int) -> str:
        """The name of an engine of the run: `Rank 1 (engine 1)`, `Server s0 (engine 4)`."""
        who = self._member(engine)
        return f"Engine {engine}" if who is None else f"{who.title} (engine {engine})"

    def _member(self, engine: int) -> Member | None:
        """Return the member that an engine is in the run; None if unknown."""
        ranks = [rank for rank, one in enumerate(self.engines) if one == engine]
        if ranks:
            return Member.of_ranks(ranks[0], ranks[-1])
        if self.task is None or engine not in self.task.ids:
            return None
        return self.task.names.member(engine)

    def note(self, text: str, deaths: Sequence[int] = ()) -> None:
        """Add a note for the user; it describes the deaths of these engines completely."""
        self.history.event(events.Noted(text=text, deaths=list(deaths)))

    def tell(self, event: events.Event) -> None:
        """Record an event on disk for later readers of the run."""
        self.history.event(event)
        if not self.is_over:  # else its files have been counted
            disk.add_event(self.folder, event)

    @property
    def events(self) -> list[dict[str, Any]]:
        """All changes of workers or of their shares (docs/recovery.md lists the fields)."""
        return self.history.changes

    @property
    def evals(self) -> list[dict[str, Any]]:
        """One mapping per evaluation, with the step, the epoch, the loss and the metrics."""
        return self.history.evals

    # -- controls -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Stop the run after a step on which all workers agree; return immediately."""
        with self._lock:
            if self.is_over or self._state == "stopping":
                return
            self.advance("stop")
            self._halting.halt("stop")

    def pause(self) -> None:
        """Pause the run after a step on which all workers agree; return immediately."""
        with self._lock:
            if self.is_over or self._state in ("paused", "stopping"):
                return
            self._halting.halt("pause")

    def resume(self) -> None:
        """Continue the run after a pause."""
        self._halting.resume()

    def step(self, steps: int = 1) -> None:
        """Take this many steps in a paused run, then pause again."""
        self._send(Advance(run=self.number, steps=int(steps)))

    def scale(self, workers: int, *, wait: bool = True) -> None:
        """Change the number of workers; with `wait`, return after all have joined or left.

        Raises PlanError or RunError if this number is impossible; the error says what is possible.
        """
        scaling.scale(self, workers, wait=wait)

    def inject(self, *faults: str) -> None:
        """Replace the run's faults: `run.inject("slow=1:50ms")`; without arguments, remove them.

        Raises:
            PlanError: A fault is not valid, or names a worker that the run does not have.
        """
        parsed = [parse_fault(text) for text in faults]
        for fault in parsed:
            fault.check(len(self.engines), links=self.plan.entry.links)
        if not self.is_over:
            self.faults = lasting(parsed)
            texts = tuple(fault.text for fault in parsed)
            self._tell(Inject(run=self.number, faults=texts))
            self.history.event(events.Injected(faults=list(texts)))

    def _send(self, message: Down) -> None:
        if self.task is not None and not self.is_over:
            for engine in self.members:
                self.task.engines.router.send(engine, message)

    def _pace_s(self) -> float:
        """Mean seconds per step; NaN before the first step."""
        snapshot = self.history.snapshot()
        return snapshot.elapsed_s / snapshot.step if snapshot.step else float("nan")

    def interrupt(self) -> None:
        """Interrupt the cell on all engines; after the end of the run, do nothing."""
        if self.task is not None and not self.is_over:
            self.task.interrupt()

    def __repr__(self) -> str:
        workers = f"{len(self.engines)} worker" + ("s" if len(self.engines) != 1 else "")
        return f"<Run {self.name}: {self.plan.strategy} on {workers}, {self.state}>"

    def _ipython_display_(self) -> None:
        from ..views.blocks import show

        show(self.summary())

    # -- figures and pictures ----------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The run at this moment, for views."""
        snapshot = self.history.snapshot(
            name=self.name, strategy=self.plan.strategy, framework=self.plan.framework,
            state=self.state, dropped=sum(self._dropped.values()), plot_cpu=self.plot_cpu,
        )  # fmt: skip
        banner = "" if self.task is None or self.is_over else self.task.banner
        staffing = scaling.staffing(self)
        return replace(snapshot, banner=banner, color=self.color or 0, staffing=staffing)

    def meta(self) -> dict[str, Any]:
        """Return the content of `run.json` about the run."""
        plan = self.plan
        return {
            "name": self.name, "number": self.number,
            "strategy": plan.strategy, "framework": plan.framework,
            "options": {**plan.options, **plan.values},
            "faults": [fault.text for fault in plan.faults],
            **{name: plan.overrides.get(name) for name in ("seed", "batch_size")},
            "recipe": plan.recipe.digest, "plan": plan.to_wire(),
            "ranks": list(self.engines), "devices": list(self.devices),
            "joined": plan.sync, "data_parallel": plan.entry.data_parallel,
            "phases": self.history.phases, "state": self.state,
            "trained_before": self.trained_before, "began": self.began,
            "error": None if self.error is None else str(self.error),
            "clock_bound_s": self.clock_bound_s, disk.FILES: self._files,
        }  # fmt: skip

    @property
    def clock_bound_s(self) -> list[float | None]:
        """The largest error of each rank's clock in seconds; 0 for the notebook's clock.

        None: unknown. A difference of two workers' times (`start_s`) is wrong by at most the sum.
        """
        if self.task is not None and not self.is_over:
            self._clock_bound_s = self.task.engines.router.clock_bounds(self.engines)
        return self._clock_bound_s

    @property
    def trained_before(self) -> bool:
        """Whether an earlier run had already trained the model; a comparison is then unfair."""
        return Topic.TRAINED_BEFORE in self.history.story.facts

    def summary(self) -> Any:
        """A table of the run's key figures: throughput, shares, waits and final loss."""
        from ..views.tables import summary_table

        return summary_table(self.summarise())

    def summarise(self) -> RunSummary:
        """Return the run's key figures as data; tables and comparisons use them."""
        return replace(summarise(self.history, self.meta()), color=self.color)

    def plot(self) -> Any:
        """Return the run's figure, which is also shown below the cell at the end of the run."""
        from ..views.live.figure import RunPicture

        return RunPicture(self.snapshot())

    def step_picture(self, step: int | None = None) -> StepDrawing:
        """Return a picture of a step: the measured messages between workers, and their work.

        Args:
            step: By default the latest step (in a pause, the step of `run.step()`).

        Raises:
            RunError: The history does not have this step.
        """
        from ..views.explain import diagram

        return diagram.step_picture(self, step)

    def blame(self, first: int | None = None, last: int | None = None) -> BlameMatrix:
        """Return for how many seconds each worker waited for each of the other workers.

        Args:
            first, last: The first and the last step to count; by default all steps.
        """
        from ..views.explain import diagram

        return diagram.blame(self, first, last)

    def what_if(
        self, without: int | None = None, first: int | None = None, last: int | None = None,
        *, variants: Sequence[Mapping[str, Any]] | None = None, **changes: Any,
    ) -> Any:  # fmt: skip
        """Return the run as it would be if one worker were as fast as the median of the others.

        Args:
            without: Its rank; by default the rank for which the others waited longest.
            first, last: The first and the last step to compute again; by default all stored steps.
            variants: Sets of changes, which are ranked: `[{"link": "1GB/s"}, {"bucket_mb": 5}]`.
            changes: Changes instead of a faster worker: `link=`, `batch_size=`, or any option
                (docs/predicting.md). `beside=` gives more runs as measurements.
        """
        from ..views.explain import diagram, prediction

        if variants is not None or changes:
            return prediction.what_if(self, variants, changes)
        return diagram.what_if(self, without, first, last)

    def predict(self, workers: int | Sequence[int], *beside: Run, **given: Any) -> Any:
        """Predict the run with other numbers of workers; `wb.predict` lists the arguments."""
        from ..views.explain.prediction import predict

        return predict([self, *beside], workers, **given)

    def weights(self, rank: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """Return the final weights as a mapping from parameter names to NumPy arrays.

        Args:
            rank: Whose weights are returned; by default rank 0, or all ranks of a divided model.

        Raises:
            RunError: The run has not ended or left no weights, or the weights are damaged.
        """
        why = self.history.story.facts.get(Topic.NOT_ON_DISK)
        return disk.final_weights(
            self.folder, self._files, rank, name=self.name, state=self.state, why=why
        )

    def load_into(self, model: Any) -> Any:
        """Copy the final weights into a torch or Keras model of the notebook and return it.

        Raises:
            PlanError: The model has different parameters.
        """
        from ..shared.checkpoints import load_into

        return load_into(model, self.weights(), self.plan.framework)

    @property
    def profiles(self) -> list[Path]:
        """The paths of the Chrome traces that `--profile` has written, by rank."""
        return disk.profiles(self.folder)

    def to_cell(self) -> str:
        """Return a cell that repeats this run; raise PlanError if no cell can repeat it."""
        from .allocator import notebook_framework

        return cell_of(self.plan, framework=notebook_framework())

    def to_job(self, folder: str | Path, **about: Any) -> Path:
        """Write a job folder that repeats this training; the arguments are those of `wb.job`."""
        path: Path = importlib.import_module("workbench.notebook.jobs").job(self, folder, **about)
        return path

    def trace(self, path: str | Path | None = None) -> Path:
        """Write the steps as a Chrome trace for https://ui.perfetto.dev, and return its path."""
        from ..history.analysis.series import write

        return write(self, path)

    def save(self, path: str | Path) -> Path:
        """Copy the run to a folder: its records, events, `weights.pt` (tensors) and `run.json`.

        If the disk was full, rows and events are written from memory; the weights are missing.

        Raises:
            RunError: The run cannot be written to this folder.
        """
        history = self.history
        unwritten = Topic.NOT_ON_DISK in history.story.facts
        memory = None if not unwritten or history.on_disk(self.folder) else history
        with contextlib.suppress(OSError):  # the copy contains it in any case
            disk.write_meta(self.folder, self.meta())
        return disk.save(self.folder, Path(path), self.meta(), memory)

    def rest(self) -> None:
        """Release the memory of a run that is over; its data is read from disk when needed."""
        if self.is_over and self.history.rest(self.folder):
            self.task = None

    def discard(self) -> None:
        """Remove the files of the run; its history in memory stays."""
        with contextlib.suppress(RunError):  # they are gone already
            self.history.wake()
        shutil.rmtree(self.folder, ignore_errors=True)

    def begin_logs(self) -> None:
        """Begin to write the run to the targets of its plan; they were checked before."""
        if self.plan.log:
            self.logs.append(RunLog(self, self.plan.log))

    def log_to(self, *targets: str) -> RunLog:
        """Also write the run to tensorboard:DIR, mlflow:URI, wandb:PROJECT or trackio:PROJECT.

        Returns:
            The writer. `.places` names the targets; `.wait()` waits until everything is written.

        Raises:
            PlanError: A target is not valid, or cannot be written to.
        """
        return log_to(self, self.logs, targets)
