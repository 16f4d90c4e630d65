"""The run on show: its live dashboard, with the buttons of the dashboard below a cell."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import RunError
from ..session.load import load
from ..session.registry import runs
from ..session.run import Run
from .part import Part, Wire, action

if TYPE_CHECKING:
    from .model import Panel


MOST_CHARACTERS = 20_000
"""Of what a failed run printed, the end is shown."""


class LivePart(Part):
    """What goes on, or went on last, or the run that somebody picked from the list."""

    name = "live"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._picked = ""
        self._failed: tuple[Path | None, str] = (None, "")

    def run(self) -> Run | None:
        """The run on show: what goes on; else the one picked, else the latest."""
        cluster = self.panel.session.cluster
        busy = None if cluster is None else cluster.busy
        if isinstance(busy, Run) and not busy.is_over:
            return busy
        if self._picked in runs:
            return runs[self._picked]
        return busy if isinstance(busy, Run) else runs.latest

    def wire(self) -> Wire:
        """Which run it is; its numbers come as frames."""
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
        """Return the tracebacks and outputs of a run that failed, each line with its ranks."""
        if run.error is None or run.task is None or not run.is_over:
            return ""
        if self._failed[0] != run.folder:
            self._failed = (run.folder, run.task.board.text()[-MOST_CHARACTERS:])
        return self._failed[1]

    @action()
    def pick(self, run: str) -> None:
        """Show an earlier run; one that goes on comes first."""
        self._picked = run if run in runs else ""

    @action()
    def forget(self, run: str) -> None:
        """Take a run that is over off the lists; what it wrote stays on the disk."""
        runs.remove(run)

    @action(slow=True)
    def load(self, path: str) -> None:
        """Bring a saved run back and show it."""
        if not path.strip():
            raise RunError(
                "Which run?",
                next_step="type the folder that run.save(path) wrote",
                code="WB-RUN-055",
            )
        found = load(Path(path.strip()).expanduser())
        runs.add(found)
        self._picked = found.name

    @action()
    def stop(self) -> None:
        """End the run at a step all workers agree on."""
        self._going_on().stop()

    @action()
    def pause(self) -> None:
        """Hold the run after a step all workers agree on."""
        self._going_on().pause()

    @action()
    def resume(self) -> None:
        """Go on after a pause."""
        self._going_on().resume()

    @action()
    def step(self, steps: int = 1) -> None:
        """While paused: do so many steps."""
        self._going_on().step(int(steps))

    def _going_on(self) -> Run:
        run = self.run()
        if run is None or run.is_over:
            raise RunError("No run is going on.", next_step="start one: Run", code="WB-RUN-056")
        return run
