"""What a run can be asked for: figures, pictures, weights, and copies of it elsewhere."""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import checksums, lifecycle
from ..errors import PlanError, RunError
from ..history import disk
from ..history.store import RunHistory
from ..history.summary import RunSummary, summarise
from ..plan import Plan
from ..protocol import Topic
from ..targets import ALLOWED, parse_targets
from .logging_to import LINGER_S, RunLog, check

if TYPE_CHECKING:
    from ..history.snapshot import Snapshot
    from ..views.blame import BlameMatrix
    from ..views.step_picture import StepDrawing
    from ..views.what_if import WhatIfPicture
    from .task import Task


class Results(ABC):
    """The results of a run, at any time of its life; `run.Run` is the rest of it."""

    name: str
    number: int
    plan: Plan
    engines: tuple[int, ...]
    devices: tuple[str, ...]
    folder: Path
    began: float
    history: RunHistory
    task: Task | None
    error: RunError | None
    plot_cpu: float
    color: int | None
    logs: list[RunLog]
    _dropped: dict[int, int]
    _files: checksums.Sums
    _over: threading.Event

    @property
    @abstractmethod
    def state(self) -> lifecycle.State:
        """Where the run is in its life."""

    @property
    @abstractmethod
    def is_over(self) -> bool:
        """Whether it has ended."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Add something the user should know."""

    # -- figures and pictures ----------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The run at this moment, for views."""
        snapshot = self.history.snapshot(
            name=self.name,
            strategy=self.plan.strategy,
            framework=self.plan.framework,
            state=self.state,
            dropped=sum(self._dropped.values()),
            plot_cpu=self.plot_cpu,
        )
        banner = "" if self.task is None or self.is_over else self.task.banner
        return replace(snapshot, banner=banner, color=self.color or 0)

    def meta(self) -> dict[str, Any]:
        """What `run.json` says about the run."""
        plan = self.plan
        return {
            "name": self.name,
            "number": self.number,
            "strategy": plan.strategy,
            "framework": plan.framework,
            "options": plan.options,
            "faults": [fault.text for fault in plan.faults],
            "seed": plan.overrides.get("seed"),
            "recipe": plan.recipe.digest,
            "plan": plan.to_wire(),
            "ranks": list(self.engines),
            "joined": plan.sync,
            "data_parallel": plan.entry.data_parallel,
            "phases": self.history.phases,
            "devices": list(self.devices),
            "state": self.state,
            "trained_before": self.trained_before,
            "began": self.began,
            "error": None if self.error is None else str(self.error),
            disk.FILES: self._files,
        }

    @property
    def trained_before(self) -> bool:
        """Whether the model had been trained by an earlier run, which makes comparisons unfair."""
        return Topic.TRAINED_BEFORE in self.history.story.facts

    def summary(self) -> Any:
        """A table of the run's figures: throughput, shares, waits, final loss."""
        from ..views.tables import summary_table

        return summary_table(self.summarise())

    def summarise(self) -> RunSummary:
        """The run's key figures as data; what tables and comparisons are made of."""
        return replace(summarise(self.history, self.meta()), color=self.color)

    def plot(self) -> Any:
        """The run's picture, as it stands below the cell at the end."""
        from ..views.figure import RunPicture

        return RunPicture(self.snapshot())

    def step_picture(self, step: int | None = None) -> StepDrawing:
        """Who sent what to whom in a step, and what each worker did, as measured.

        Args:
            step: Its number; the latest by default: what `run.step()` has just done in a pause.

        Raises:
            RunError: No such step is in the history.
        """
        from . import teaching

        return teaching.step_picture(self, step)

    def blame(self, first: int | None = None, last: int | None = None) -> BlameMatrix:
        """Who waited for whom: seconds that each worker waited for each other one.

        Args:
            first, last: Steps to count, both included; all of them by default.
        """
        from . import teaching

        return teaching.blame(self, first, last)

    def what_if(
        self, without: int | None = None, first: int | None = None, last: int | None = None
    ) -> WhatIfPicture:
        """The run as it would have been had one worker been as fast as the others' median.

        Args:
            without: Its rank; by default whom the others waited for longest.
            first, last: Steps to recompute, both included; all that are stored by default.

        Raises:
            PlanError: There is no such worker, or nobody else to compare it with.
            RunError: No step is complete, or waits were not measured.
        """
        from . import teaching

        return teaching.what_if(self, without, first, last)

    def weights(self, rank: int | None = None) -> dict[str, np.ndarray[Any, Any]]:
        """The final weights as NumPy by parameter name.

        Args:
            rank: Whose; by default those of rank 0 (where the model is split: of all ranks).

        Raises:
            RunError: The run has not ended, left no weights, or they are damaged.
        """
        names = {name for name in self._files if name.endswith(".npz")}
        names |= {path.name for path in self.folder.glob("weights*.npz")}
        files = [self.folder / name for name in sorted(names)]
        if rank is not None:
            files = [file for file in files if file.stem == disk.weights_stem(rank)]
        if not files:
            why = self.history.story.facts.get(Topic.NOT_ON_DISK)
            if why is not None:
                raise RunError(
                    f"Run {self.name} has no weights: they could not be written to disk.",
                    seen=why,
                    next_step="make room there, and train again",
                )
            raise RunError(
                f"Run {self.name} has no weights"
                + ("" if rank is None else f" of rank {rank}")
                + ".",
                seen=self.state,
                allowed="a run that finished or was stopped, trained by wb.fit or wb.prepare",
            )
        found: dict[str, np.ndarray[Any, Any]] = {}
        for file in files:
            found.update(disk.read_weights(file, self._files.get(file.name, ())))
        return found

    def load_into(self, model: Any) -> Any:
        """Copy the final weights into a torch or Keras model of the notebook and return it.

        Raises:
            PlanError: The model has other parameters.
        """
        from .into import load_into

        return load_into(model, self.weights(), self.plan.framework)

    @property
    def profiles(self) -> list[Path]:
        """The Chrome traces that `--profile` has left, by rank."""
        return disk.profiles(self.folder)

    def to_cell(self) -> str:
        """The cell that asks for this run again: its `%%distributed` line and its code.

        Raises:
            PlanError: It cannot be said in a cell: a function was given arguments that have no
                source, or a name has a line break.
        """
        from .cells import cell_text

        return cell_text(self.plan)

    def trace(self, path: str | Path | None = None) -> Path:
        """Write the run's steps as a Chrome trace for https://ui.perfetto.dev; return the path.

        Args:
            path: By default `NAME-trace.json` in the present folder; `.gz` is compressed.

        Raises:
            RunError: The run has no step yet, or the file cannot be written.
        """
        from .tracing import write

        return write(self, path)

    def save(self, path: str | Path) -> Path:
        """Copy the run to a folder: records, events, `weights.pt` (plain tensors), `run.json`.

        Where the disk was full, rows and events are written from memory; weights that could not
        be written then are not in the copy either.

        Raises:
            RunError: It cannot be written there.
        """
        unwritten = Topic.NOT_ON_DISK in self.history.story.facts
        memory = None if not unwritten or self.history.on_disk(self.folder) else self.history
        with contextlib.suppress(OSError):  # the copy says it in any case
            disk.write_meta(self.folder, self.meta())
        return disk.save(self.folder, Path(path), self.meta(), memory)

    def rest(self) -> None:
        """Leave what a run that is over holds on the disk; it is read again when asked for."""
        if self.is_over and self.history.rest(self.folder):
            self.task = None

    def discard(self) -> None:
        """Remove the run's files; its history stays."""
        with contextlib.suppress(RunError):  # they are gone already
            self.history.wake()
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- elsewhere ---------------------------------------------------------------------------------

    def begin_logs(self) -> None:
        """Begin to write the run to the places that its plan names; they were checked."""
        if self.plan.log:
            self.logs.append(RunLog(self, self.plan.log))

    def log_to(self, *targets: str) -> RunLog:
        """Write the run also to `tensorboard:DIR` or `mlflow:URI`: what there is, and what comes.

        Returns:
            What writes it: `.places` says where, `.wait()` waits for the end. Of a run that is
            over, everything is written when this returns.

        Raises:
            PlanError: A target was not understood, or cannot be written to.
        """
        texts = parse_targets(targets)
        if not texts:
            raise PlanError("Log to where?", allowed=ALLOWED)
        check(texts)
        log = RunLog(self, texts)
        self.logs.append(log)
        if self.is_over:
            self._await_logs()
        return log

    def _await_logs(self) -> None:
        """Wait until the logs are whole, but not for ever; an interrupt is noticed at once."""
        end = time.monotonic() + LINGER_S
        for log in self.logs:
            while not log.wait(0.1):
                if time.monotonic() > end:
                    self.note(f"--log is still being written, {LINGER_S:g} s after the end.")
                    return
