"""Runs side by side in the panel: the data of `wb.compare`, its exports, and the saved picture."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, RunError
from ..execution.registry import runs
from ..history import disk
from ..notebook.compare import Compared, compare
from ..views.comparison.exports import as_bytes
from .model import Part, Wire, action

if TYPE_CHECKING:
    from ..execution.run import Run
    from .model import Panel

KINDS = {
    "csv": "text/csv",
    "md": "text/markdown",
    "html": "text/html",
    "json": "application/json",
    "png": "image/png",
    "svg": "image/svg+xml",
}
MOST = 24
"""Number of runs that are compared by default: the newest runs of one recipe."""


class ComparisonPart(Part):
    """The selected finished runs, compared again when the selection changes."""

    name = "comparison"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._picked: list[str] | None = None
        self._key: tuple[Any, ...] = ()
        self._compared: Compared | None = None
        self._wire: Wire | None = None
        self._why = ""
        self._trained: dict[Path, bool] = {}

    # -- which runs --------------------------------------------------------------------------------

    def runs(self) -> list[Run]:
        """The compared runs: the selected runs, otherwise those of the latest recipe."""
        over = [run for run in list(runs.values()) if run.is_over]
        if self._picked is not None:
            return [run for run in over if run.name in self._picked]
        trained = [run for run in over if self._has_steps(run)]
        if not trained:
            return []
        recipe = trained[-1].plan.recipe.digest
        return [run for run in trained if run.plan.recipe.digest == recipe][-MOST:]

    def _has_steps(self, run: Run) -> bool:
        """Whether an ended run took a step, without reading it from disk."""
        known = self._trained.get(run.folder)
        if known is None:
            resting = run.history.rests and disk.holds(run.folder, len(run.engines), 1)
            known = resting or bool(run.history.totals.steps)
            self._trained[run.folder] = known
        return known

    @action()
    def pick(self, run: str, on: bool = True) -> None:
        """Include a run, or leave it out."""
        names = [one.name for one in self.runs()]
        if run not in runs:
            raise PlanError(
                "This run does not exist.", seen=run, allowed=", ".join(runs), code="WB-PLAN-070"
            )
        self._picked = [*names, run] if on else [name for name in names if name != run]

    @action()
    def latest(self) -> None:
        """Compare all runs of the latest recipe again."""
        self._picked = None

    # -- what is shown -----------------------------------------------------------------------------

    def wire(self) -> Wire:
        """All runs, and the comparison when it is ready."""
        chosen = self.runs()
        key = tuple((run.name, run.number, run.state) for run in chosen)
        if key != self._key:
            self._key = key
            self.panel.later("comparison", self._compare)
        picked = {run.name for run in chosen}
        return {
            "runs": [
                {"name": run.name, "strategy": run.plan.strategy, "state": run.state,
                 "picked": run.name in picked}
                for run in list(runs.values()) if run.is_over
            ],
            "compared": self._wire,
            "why": self._why,
        }  # fmt: skip

    def _compare(self) -> None:
        self._compared = self._wire = None
        self._why = ""
        chosen = self.runs()
        if not chosen:
            return
        try:
            self._compared = compare(*chosen)
            self._wire = self._compared.to_wire()
        except (RunError, PlanError) as error:
            self._why = str(error)
            return
        self.panel.keep("comparison", self._compared)

    @action(slow=True)
    def export(self, kind: str) -> dict[str, str]:
        """Return the comparison as a file: its name, type and bytes in base64."""
        if kind not in KINDS:
            raise PlanError(
                "This export format does not exist.",
                seen=kind,
                allowed=", ".join(KINDS),
                code="WB-PLAN-071",
            )
        if self._compared is None:
            raise RunError(
                "Nothing is compared yet.", next_step="select finished runs", code="WB-RUN-053"
            )
        data = as_bytes(self._compared.comparison, f".{kind}")
        return {
            "name": f"comparison.{kind}",
            "type": KINDS[kind],
            "data": base64.b64encode(data).decode(),
        }
