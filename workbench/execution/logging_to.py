"""`--log`: writes runs to TensorBoard, MLflow and other targets during the training.

One thread per run looks once a second for new data in the history. An error there only adds a
note; it does not end the run.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, WorkbenchError
from ..history.analysis.series import Feed
from ..shared.events import OVER
from ..shared.log_targets import ALLOWED, parse_target, parse_targets
from .sinks import About, Ending, Sink, kind_of

if TYPE_CHECKING:
    from ..history.run_data import RunData

PAUSE_S = 1.0
LINGER_S = 30.0
"""How long the end of a run waits for a slow target."""
LEAVE_S = 5.0


def check_targets(targets: Sequence[str]) -> None:
    """Raise PlanError if one of the targets (`Target.text`) cannot be written to."""
    for text in targets:
        target = parse_target(text)
        kind_of(target).check(target.where)


def await_all(logs: Sequence[RunLog], note: Callable[[str], None]) -> None:
    """Wait until logs are complete, for a limited time; an interrupt is noticed at once."""
    end = time.monotonic() + LINGER_S
    for log in logs:
        while not log.wait(0.1):
            if time.monotonic() > end:
                note(
                    f"The run ended {LINGER_S:g} s ago, but the log (--log) is not complete yet. "
                    "Workbench continues to write the log as long as the kernel runs."
                )
                return


class RunLog:
    """Writes one run to its targets.

    Args:
        targets: As `Target.text`, checked.

    Attributes:
        places: The place of the run in words, by target.
        complete: Whether everything is written.
    """

    def __init__(self, run: RunData, targets: Sequence[str]) -> None:
        self._run, self._targets = run, tuple(targets)
        self.places: dict[str, str] = {}
        self._feed = Feed(run.history)
        self._sinks: dict[str, Sink] = {}
        self._settled = False  # the settings are written
        self._epoch_s = run.began if run.is_over else math.nan
        self._leave = threading.Event()
        self._done = threading.Event()
        _open.add(self)
        self._thread = threading.Thread(target=self._main, name="workbench-log", daemon=True)
        self._thread.start()

    @property
    def complete(self) -> bool:
        """Whether the run is over and completely written."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait until everything is written; return whether it is."""
        return self._done.wait(timeout_s)

    def close(self, timeout_s: float) -> None:
        """Write all data so far and end, even if the run still trains."""
        self._leave.set()
        self._done.wait(timeout_s)

    def __repr__(self) -> str:
        lines = [f"  {kind}: {place}" for kind, place in self.places.items()]
        return "\n".join([f"log of run {self._run.name}:", *lines])

    def _main(self) -> None:
        try:
            self._write()
        except Exception as error:  # the run continues, and a note tells its user
            self._run.note(
                f"--log failed before the end of the run: {type(error).__name__}: {error}"
            )
        finally:
            _open.discard(self)
            self._done.set()

    def _write(self) -> None:
        about = _about(self._run)
        for text in self._targets:
            target = parse_target(text)
            with self._guarded(text):
                self._sinks[text] = sink = kind_of(target).open(target.where, about)
                self.places[text] = sink.place
                remark = getattr(sink, "remark", "")  # of W&B, where it stays offline
                if remark and isinstance(remark, str):
                    self._run.note(f"--log {text}: {remark}")
        while self._sinks and not self._is_time_to_end():
            self._turn(over=False)
        self._turn(over=True)
        self._end()

    def _is_time_to_end(self) -> bool:
        # One wait for two events: the end of the notebook is rare, so it is checked between the
        # waits.
        end = time.monotonic() + PAUSE_S
        while time.monotonic() < end and not self._leave.is_set():
            if self._run.over.wait(PAUSE_S / 5):
                return True
        return self._leave.is_set()

    def _turn(self, *, over: bool) -> None:
        batch = self._feed.fresh(over=over)
        if math.isnan(self._epoch_s) and batch.scalars:
            self._epoch_s = time.time() - max(one.t_s for one in batch.scalars)
        settings = self._settings(over)
        for text, sink in list(self._sinks.items()):
            with self._guarded(text):
                if settings:
                    sink.settings(settings)
                if batch.rewound is not None:
                    sink.rewind(batch.rewound)
                if batch.scalars:
                    sink.write(batch.scalars, self._epoch_s)

    def _settings(self, over: bool) -> dict[str, Any]:
        """Return the run's settings once, after its engines have reported their own settings."""
        if self._settled or not (over or self._run.history.story.started):
            return {}
        self._settled = True
        return settings(self._run)

    def _end(self) -> None:
        if not self._sinks:
            return
        ending = _ending(self._run)
        for text, sink in list(self._sinks.items()):
            with self._guarded(text):
                sink.end(ending)

    @contextlib.contextmanager
    def _guarded(self, text: str) -> Any:
        """Drop a target that fails, and add a note."""
        try:
            yield
        except Exception as error:  # whatever a target's library raises, the run continues
            self._sinks.pop(text, None)
            words = str(error).strip().splitlines() or [""]
            said = error.what if isinstance(error, WorkbenchError) else words[0]
            self._run.note(
                f"--log {text} failed and receives no more data from this run: "
                f"{type(error).__name__}: {said[:200]}"
            )


_open: weakref.WeakSet[RunLog] = weakref.WeakSet()


@atexit.register
def _leave_all() -> None:
    logs = list(_open)
    for log in logs:
        log._leave.set()
    end = time.monotonic() + LEAVE_S
    for log in logs:
        log.close(max(0.0, end - time.monotonic()))


def settings(run: RunData) -> dict[str, str | int | float | bool]:
    """Return a run's settings by name: first the plan's, then those its engines reported."""
    plan, started = run.plan, run.history.story.started
    found: dict[str, Any] = {
        "strategy": plan.strategy,
        "framework": plan.framework,
        "workers": plan.workers,
        "devices": ", ".join(dict.fromkeys(run.devices)),
        "recipe": plan.recipe.digest,
        "faults": ", ".join(fault.text for fault in plan.faults),
        "init_from": plan.init_from,
        "on_failure": plan.on_failure,
    }
    asked = ("batch_size", "local_batch", "epochs", "total_steps", "parameters", "threads")
    found |= {name: started.get(name) for name in asked}
    found |= plan.overrides
    found |= {f"option.{name}": value for name, value in plan.options.items()}
    plain = {k: v if isinstance(v, (bool, int, float)) else str(v) for k, v in found.items()
             if v is not None and v != ""}  # fmt: skip
    return {k: v for k, v in plain.items() if not (isinstance(v, float) and math.isnan(v))}


def _about(run: RunData) -> About:
    plan = run.plan
    tags = {
        "run_id": run.folder.name,
        "strategy": plan.strategy,
        "framework": plan.framework,
        "recipe": plan.recipe.digest,
        "devices": ", ".join(run.devices),
        "folder": str(run.folder),
    }
    return About(run.name, run.folder.name, run.began, tags)


def _ending(run: RunData) -> Ending:
    from ..views import text as views_text
    from ..views.live.figure import run_png

    snapshot, totals, notes = run.snapshot(), run.history.totals, []
    if run.error is not None:
        notes.append(str(run.error))
    picture = b""
    try:
        picture = run_png(snapshot)
    except Exception as error:  # an error in the picture must not lose the other data
        notes.append(f"The run's figure could not be drawn: {type(error).__name__}: {error}")
    figures = {
        "loss": snapshot.loss,
        "samples_per_s": totals.samples_per_s,
        "compute_share": snapshot.compute_share,
        "wall_s": totals.active_s,
        "steps": float(totals.steps),
        "samples": float(totals.samples),
    }
    state = run.state if run.state in OVER else f"{run.state} when the notebook ended"
    return Ending(
        state,
        time.time(),
        views_text.report(snapshot),
        [*notes, *snapshot.notes],
        picture,
        {name: float(value) for name, value in figures.items() if math.isfinite(value)},
        run.meta(),
    )


def log_to(run: RunData, logs: list[RunLog], targets: Sequence[str]) -> RunLog:
    """Write a run to more targets; return the writers, which are also added to `logs`.

    Raises:
        PlanError: A target is not valid, or cannot be written to.
    """
    texts = parse_targets(targets)
    if not texts:
        raise PlanError("--log needs a target.", allowed=ALLOWED, code="WB-PLAN-118")
    check_targets(texts)
    log = RunLog(run, texts)
    logs.append(log)
    if run.is_over:
        await_all(logs, run.note)
    return log
