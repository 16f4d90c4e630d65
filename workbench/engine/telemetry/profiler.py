"""Profiles a window of a run's steps (`--profile 10:15`), in `wb.fit` and in the user's own loops.

    gate.enter(10)    the profiler starts; `step 10` begins
    recorder.add_step `step 10` ends
    ...
    gate.enter(15)    it stops; the Chrome trace is written into the run's folder

The time to start, to stop and to write counts as a pause, not as part of a step. Outside the window
a step costs two comparisons. A run can also end, fail or be stopped inside the window. Then the
profiler writes the part that it has.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ...errors import FitError
from ...history.disk import PROFILES
from ...shared import cluster_env
from ...shared.cluster_env import run_folder
from .step_gate import Gate

if TYPE_CHECKING:
    from ...shared.protocol import RunSpec
    from ..context import RunContext

clock = time.perf_counter


class Profiler(Protocol):
    """A framework's profiler (in `engine/<framework>/support.py`)."""

    def start(self) -> None:
        """Begin to collect."""

    def step(self, name: str) -> contextlib.AbstractContextManager[Any]:
        """Mark what happens within this context as a step."""

    def stop(self, path: Path | None) -> Path | None:
        """End; write a Chrome trace to `path` and return the path of the trace."""


class Window:
    """The profile of one engine, for a part of a run.

    Args:
        start, stop: The first step, and the step before which the window ends.
        make: Makes the framework's profiler.
        path: Where the trace is written.
        note: Shows the user a message.
    """

    def __init__(
        self,
        start: int,
        stop: int,
        make: Callable[[], Profiler],
        path: Path,
        note: Callable[[str], object],
    ) -> None:
        self.start, self.stop, self.path = start, stop, path
        self._make, self._note = make, note
        self._profiler: Profiler | None = None
        self._done = False
        self._first = self._last = -1  # the steps that the window saw
        self._marks: dict[int, contextlib.AbstractContextManager[Any]] = {}  # by thread
        self._lock = threading.Lock()  # closures of TensorFlow call from several threads

    def entered(self, step: int) -> bool:
        """Note that a step begins; return whether the profiler spent time of its own."""
        self.recorded()
        if self._done or step < self.start:
            return False
        changed = False
        with self._lock:
            if self._profiler is None and not self._done:
                changed = self._open(step)
            elif self._profiler is not None and step >= self.stop:
                self._close()
                changed = True
            if self._profiler is not None:
                self._first = step if self._first < 0 else self._first
                self._last = max(self._last, step)
                mark = self._profiler.step(f"step {step}")
                mark.__enter__()
                self._marks[threading.get_ident()] = mark
        return changed

    def recorded(self) -> None:
        """Note that this thread's step has ended."""
        if self._marks and (mark := self._marks.pop(threading.get_ident(), None)) is not None:
            mark.__exit__(None, None, None)

    def end(self) -> None:
        """Write the profile, because the run is over."""
        self.recorded()
        with self._lock:
            if self._profiler is not None:
                self._close()
            elif not self._done:
                self._done = True
                self._note(f"No profile: the run ended before step {self.start}.")

    def _open(self, step: int) -> bool:
        if step >= self.stop:  # several steps at once (steps_per_execution) went past the window
            self._done = True
            self._note(
                f"No profile: the training was already at step {step}, so the steps of --profile "
                f"{self.start}:{self.stop} were over. Give --profile a later or longer range of "
                "steps."
            )
            return False
        try:
            profiler = self._make()
            profiler.start()
        except Exception as error:
            self._done = True
            self._note(f"No profile: the profiler did not start ({error}).")
            return True
        self._profiler = profiler
        return True

    def _close(self) -> None:
        assert self._profiler is not None
        profiler, self._profiler, self._done = self._profiler, None, True
        began = clock()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            where = profiler.stop(self.path)
        except Exception as error:
            self._note(f"The profile of {self.path.stem} was not written: {error}")
            with contextlib.suppress(Exception):  # it may have stopped already
                profiler.stop(None)
            return
        steps = f"step {self._first}"
        if self._last > self._first:
            steps = f"steps {self._first}-{self._last}"
        self._wrote(steps, where, clock() - began)

    def _wrote(self, steps: str, where: Path | None, seconds: float) -> None:
        if self.path.stem.startswith(("rank0", "ranks0-")):  # one message for all ranks
            folder, ours = (where or self.path).parent, cluster_env.folder()
            brought = ours is not None and folder.is_relative_to(ours)  # to the host's path
            self._note(
                f"The profile of {steps} has one file per engine. run.profiles lists the files; "
                "open a file at https://ui.perfetto.dev to see it."
                f"{'' if brought else f' Folder: {folder}'}"
            )


class ProfiledGate(Gate):
    """The gate of a run that is profiled."""

    def __init__(self, window: Window) -> None:
        super().__init__()
        self._window = window

    def enter(self, step: int) -> bool:
        """Do what `Gate.enter` does; time that the profiler needs counts as a pause."""
        if not super().enter(step):
            return False
        began = clock()
        if self._window.entered(step):
            self.paused_s += clock() - began
        return True


def gate(spec: RunSpec, note: Callable[[str], object]) -> Gate:
    """Return the gate of a run, which opens and closes the profiled window if there is one."""
    if not spec.profile:
        return Gate()
    module = importlib.import_module(f"workbench.engine.{spec.framework}.support")
    folder = run_folder(spec.run_dir, spec.run_id)
    if folder is None:
        note(
            "No profile: this engine is on another machine, and Workbench cannot copy files from "
            "there."
        )
        return Gate()
    path = folder / PROFILES / _name(spec)
    start, stop = spec.profile
    window = Window(start, stop, lambda: module.make(spec), path, note)
    return ProfiledGate(window)


def _name(spec: RunSpec) -> str:
    held = spec.held
    return f"rank{held[0]}.json" if len(held) == 1 else f"ranks{held[0]}-{held[-1]}.json"


def install(run: RunContext) -> None:
    """End each profiled step when it is recorded; end the profile at the latest with the run."""
    if not isinstance(run.gate, ProfiledGate):
        return
    window, add = run.gate._window, run.recorder.add_step

    def recorded(*args: Any, **keywords: Any) -> None:
        window.recorded()
        add(*args, **keywords)

    vars(run.recorder)["add_step"] = recorded
    run.closers.append(window.end)


def check_profile(run: RunContext, total_steps: int) -> None:
    """Raise FitError if training ends before the first step to be profiled."""
    if run.spec.profile and run.spec.profile[0] >= run.trained + total_steps:
        (start, stop), end = run.spec.profile, run.trained + total_steps
        raise FitError(
            "This training ends before the first step of --profile.",
            seen=f"--profile {start}:{stop}, but the training's last step is step {end - 1}",
            allowed=f"a first step from {run.trained} to {end - 1}",
            next_step=f"use --profile {max(run.trained, end - 5)}:{end}",
            code="WB-FIT-013",
        )
