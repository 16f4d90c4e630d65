"""The displayed run: its live dashboard, with the same buttons as below a cell.

Two more parts are about this run. The teaching part shows single steps, waits between workers,
what-if results and a calibration. The fault lab has sliders for the faults of `--inject` and
`run.inject`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, RunError, WorkbenchError
from ..execution.registry import load, runs
from ..execution.run import Run
from ..notebook.compare import calibrate
from ..shared.faults import Fault, parse_fault
from .cluster import ClusterPart
from .model import Part, Wire, action

if TYPE_CHECKING:
    from .model import Panel

MOST_CHARACTERS = 20_000
"""Length of a failed run's output that is shown, from its end."""


class LivePart(Part):
    """The current or last run, or the run that the user selected from the list."""

    name = "live"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._picked = ""
        self._failed: tuple[Path | None, str] = (None, "")

    def run(self) -> Run | None:
        """The run to show: the active run, otherwise the selected run, otherwise the latest."""
        cluster = self.panel.session.cluster
        busy = None if cluster is None else cluster.busy
        if isinstance(busy, Run) and not busy.is_over:
            return busy
        if self._picked in runs:
            return runs[self._picked]
        return busy if isinstance(busy, Run) else runs.latest

    def wire(self) -> Wire:
        """The description of the run; its numbers arrive as frames."""
        run = self.run()
        return {
            "run": None if run is None else run.name,
            "state": None if run is None else run.state,
            "error": None if run is None or run.error is None else str(run.error),
            "printed": "" if run is None else self._failure(run),
            "runs": [
                {"name": one.name, "strategy": one.plan.strategy, "state": one.state}
                for one in list(runs.values())
            ],
        }

    def _failure(self, run: Run) -> str:
        """Return the tracebacks and outputs of a failed run, each line with its ranks."""
        if run.error is None or run.task is None or not run.is_over:
            return ""
        if self._failed[0] != run.folder:
            self._failed = (run.folder, run.task.board.text()[-MOST_CHARACTERS:])
        return self._failed[1]

    @action()
    def pick(self, run: str) -> None:
        """Show an earlier run; an active run has priority."""
        self._picked = run if run in runs else ""

    @action()
    def forget(self, run: str) -> None:
        """Remove an ended run from the lists; its files stay on disk."""
        runs.remove(run)

    @action(slow=True)
    def load(self, path: str) -> None:
        """Load a saved run and show it."""
        if not path.strip():
            raise RunError(
                "No folder is given.",
                next_step="type the path of a folder that run.save(path) wrote",
                code="WB-RUN-055",
            )
        found = load(Path(path.strip()).expanduser())
        runs.add(found)
        self._picked = found.name

    @action()
    def stop(self) -> None:
        """End the run at a step that all workers agree on."""
        self._going_on().stop()

    @action()
    def pause(self) -> None:
        """Pause the run after a step that all workers agree on."""
        self._going_on().pause()

    @action()
    def resume(self) -> None:
        """Continue after a pause."""
        self._going_on().resume()

    @action()
    def step(self, steps: int = 1) -> None:
        """While paused: take this many steps."""
        self._going_on().step(int(steps))

    @action(slow=True)
    def scale(self, workers: int) -> None:
        """Continue with more or fewer workers."""
        self._going_on().scale(workers, wait=False)

    def _going_on(self) -> Run:
        run = self.run()
        if run is None or run.is_over:
            raise RunError(
                "No run is active.", next_step="press Run to start a run", code="WB-RUN-056"
            )
        return run


class TeachingPart(Part):
    """Pictures of the displayed run, made when the user opens them."""

    name = "teaching"

    def wire(self) -> Wire:
        """The run and its progress, from which the browser knows when to request a new picture."""
        run = self._live().run()
        if run is None:
            return {"run": None, "workers": 0, "steps": 0, "state": None, "number": 0}
        return {
            "run": run.name,
            "number": run.number,
            "state": run.state,
            "workers": len(run.engines),
            "steps": int(run.history.totals.steps),
            "over": run.is_over,
        }

    @action(slow=True)
    def step(self, step: int | None = None) -> dict[str, Any]:
        """The measured messages between workers in a step; by default the latest step."""
        number = None if step is None else int(step)
        return _drawn(lambda: self._run().step_picture(number), wire=True)

    @action(slow=True)
    def blame(self) -> dict[str, Any]:
        """The waits between workers; during the run for the steps that its headline covers."""
        return _drawn(lambda: self._run().blame(self._first()))

    @action(slow=True)
    def what_if(self, without: int | None = None) -> dict[str, Any]:
        """The same steps recomputed without the straggler."""
        rank = None if without is None else int(without)
        return _drawn(lambda: self._run().what_if(rank, self._first()))

    def _first(self) -> int | None:
        """Return the first step that the run's headline covers; None: all steps."""
        run = self._run()
        shot = run.snapshot()
        return None if run.is_over else max(shot.step - shot.slow_steps, 0)

    @action(slow=True)
    def calibrate(self) -> dict[str, Any]:
        """Inject a known delay and report the measured delay."""
        if self.panel.session.cluster is None:
            cluster = self.panel.parts["cluster"]
            assert isinstance(cluster, ClusterPart)
            cluster.bring(max(2, self.panel.choice.engines))
        found = calibrate(self.panel.session.need_cluster())
        return {**found.to_wire(), "html": found.table().html()}

    def _live(self) -> LivePart:
        part = self.panel.parts["live"]
        assert isinstance(part, LivePart)
        return part

    def _run(self) -> Run:
        run = self._live().run()
        if run is None:
            raise RunError(
                "There is no run to show yet.",
                next_step="press Run to start a run",
                code="WB-RUN-057",
            )
        return run


def _drawn(make: Callable[[], Any], *, wire: bool = False) -> dict[str, Any]:
    """Return a picture for the browser; if there is none, the reason.

    The browser asks without a click, so a missing picture does not cause a message.
    """
    try:
        picture = make()
    except WorkbenchError as error:
        return {"svg": "", "text": str(error)}
    found = {"svg": picture.canvas().svg(), "text": picture.text()}
    return {**picture.to_wire(), **found} if wire else found


SLOWEST_MS, SLOWEST_FACTOR, JITTER_MS, LATENCY_MS = 500.0, 10.0, 200.0, 200.0
SLOWEST_LINK, FASTEST_LINK = 1e5, 1e10


class FaultsPart(Part):
    """Sliders per worker and for the links; each change replaces the previous faults."""

    name = "faults"

    def wire(self) -> Wire:
        """The current faults, and the workers that can get faults."""
        run = self._live().run()
        if run is None or run.is_over:
            return {"live": False, "faults": [], "inject": ""}
        faults = [parse_fault(text) for text in run.faults]
        return {
            "live": True,
            "run": run.name,
            "links": run.plan.entry.links,
            "workers": [
                {"rank": rank, "engine": engine, **_slowness(faults, rank)}
                for rank, engine in enumerate(run.engines)
            ],
            "jitter_ms": _of(faults, "jitter", "delay_s", 1e3),
            "latency_ms": _of(faults, "latency", "delay_s", 1e3),
            "bytes_per_s": _of(faults, "bandwidth", "bytes_per_s", 1.0) or None,
            "inject": " ".join(f"--inject {text}" for text in run.faults),
            "faults": list(run.faults),
        }

    @action()
    def slow(self, rank: int, ms: float | None = None, factor: float | None = None) -> None:
        """Slow one worker by milliseconds, or by a factor of its compute time; 0 or 1: no delay."""
        run, worker = self._going_on(), int(rank)
        kept = [one for one in _now(run) if not (one.kind == "slow" and one.rank == worker)]
        if factor is not None:
            by = _number("factor", factor, 1.0, SLOWEST_FACTOR)
            new = [Fault("slow", worker, factor=by)] if by > 1 else []
        else:
            delay = _number("ms", ms, 0.0, SLOWEST_MS)
            new = [Fault("slow", worker, delay_s=delay / 1e3)] if delay else []
        run.inject(*(one.text for one in (*kept, *new)))

    @action()
    def everyone(
        self,
        jitter_ms: float | None = None,
        latency_ms: float | None = None,
        bytes_per_s: float | None = None,
        clear: str = "",
    ) -> None:
        """Set a fault of all workers; `clear` names one of jitter, latency, bandwidth."""
        run, asked = self._going_on(), [Fault("clear")]
        if jitter_ms is not None:
            delay = _number("jitter_ms", jitter_ms, 0.0, JITTER_MS)
            asked.append(Fault("jitter", delay_s=delay / 1e3))
        if latency_ms is not None:
            delay = _number("latency_ms", latency_ms, 0.0, LATENCY_MS)
            asked.append(Fault("latency", delay_s=delay / 1e3))
        if bytes_per_s is not None:
            rate = _number("bytes_per_s", bytes_per_s, SLOWEST_LINK, FASTEST_LINK)
            asked.append(Fault("bandwidth", bytes_per_s=rate))
        replaced = {clear, *(one.kind for one in asked)}
        kept = [one for one in _now(run) if one.kind not in replaced]
        new = [one for one in asked if one.delay_s or one.bytes_per_s]
        run.inject(*(one.text for one in (*kept, *new)))

    @action()
    def kill(self, rank: int) -> None:
        """Kill a worker's process before its next step (SIGKILL)."""
        run = self._going_on()
        run.inject(*run.faults, f"kill={int(rank)}@0")

    @action()
    def clear(self) -> None:
        """Remove all faults."""
        self._going_on().inject()

    def _live(self) -> LivePart:
        part = self.panel.parts["live"]
        assert isinstance(part, LivePart)
        return part

    def _going_on(self) -> Run:
        run = self._live().run()
        if run is None or run.is_over:
            raise RunError(
                "There is no active run, so no fault can be injected.",
                next_step="press Run to start a run",
                code="WB-RUN-054",
            )
        return run


def _now(run: Run) -> list[Fault]:
    return [parse_fault(text) for text in run.faults]


def _slowness(faults: list[Fault], rank: int) -> dict[str, float]:
    for fault in faults:
        if fault.kind == "slow" and fault.rank == rank:
            return {"ms": fault.delay_s * 1e3, "factor": fault.factor}
    return {"ms": 0.0, "factor": 1.0}


def _of(faults: list[Fault], kind: str, name: str, scale: float) -> float:
    return next((float(getattr(f, name)) * scale for f in faults if f.kind == kind), 0.0)


def _number(name: str, value: object, low: float, high: float) -> float:
    try:
        number = float(str(value))
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        raise PlanError(
            f"{name} is out of range.",
            seen=value,
            allowed=f"a number from {low:g} to {high:g}",
            code="WB-PLAN-072",
        )
    return number
