"""The panel's scaling part: the speed-up of the compared runs with several numbers of workers."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from ..errors import PlanError, RunError, WorkbenchError
from ..history.analysis.scaling.of_runs import why_not
from ..notebook.scaling import scaled
from ..shared.flags.several import price_of
from ..views.scaling.exports import as_bytes
from ..views.scaling.published import curves
from .comparison import KINDS, ComparisonPart
from .model import Part, Wire, action

if TYPE_CHECKING:
    from ..notebook.scaling import Scaled
    from .model import Panel


class ScalingPart(Part):
    """The runs of the comparison, if they differ in their number of workers."""

    name = "scaling"

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self._price: float | None = None
        self._typed, self._wrong = "", ""
        self._published, self._predicted = False, True
        self._owed = False  # predictions wait until no run is active
        self._key: tuple[Any, ...] = ()
        self._scaled: Scaled | None = None
        self._wire: Wire | None = None
        self._why = ""

    @action()
    def price(self, value: object = None) -> None:
        """Set the price of a worker-hour; empty: no price."""
        self._typed, self._wrong = str(value or "").strip()[:40], ""
        try:
            self._price = price_of(self._typed) if self._typed else None
        except PlanError as error:
            self._wrong = error.what

    @action()
    def published(self, on: bool = True) -> None:
        """Turn published curves next to the user's curve on or off."""
        self._published = bool(on)

    @action()
    def predicted(self, on: bool = True) -> None:
        """Turn the prediction from fewer workers next to the measured curve on or off."""
        self._predicted = bool(on)

    def _busy(self) -> bool:
        """Whether a run is active or about to start: its workers need the cores."""
        cluster = self.panel.session.cluster
        return cluster is not None and (cluster.is_busy or cluster.queue().busy)

    def wire(self) -> Wire:
        """The data to draw, when it is ready."""
        part = self.panel.parts["comparison"]
        assert isinstance(part, ComparisonPart)
        chosen = part.runs()
        runs = tuple((run.name, run.number, run.state) for run in chosen)
        key = (runs, self._price, self._predicted)
        if key != self._key or (self._owed and not self._busy()):
            self._key, self._owed = key, self._predicted and self._busy()
            self.panel.later("scaling", self._make)
        return {
            "scaling": self._wire,
            "why": self._why,
            "price": self._typed,
            "wrong": self._wrong,
            "beside": self._published,
            "predicted": self._predicted,
            "owed": self._owed,
            "published": [
                {"name": one.name, "year": one.year, "points": [list(p) for p in one.points],
                 "from": one.made_from, "hardware": one.hardware, "source": one.source,
                 "url": one.url, "over": one.relative_to}
                for one in (curves() if self._published else ())
            ],
        }  # fmt: skip

    def _make(self) -> None:
        part = self.panel.parts["comparison"]
        assert isinstance(part, ComparisonPart)
        runs = part.runs()
        summaries = [run.summarise() for run in runs]
        made, why = None, why_not(summaries) if summaries else ""
        if summaries and not why:
            known = runs if self._predicted and not self._owed else ()
            try:
                made = scaled(summaries, price=self._price, runs=known)
            except WorkbenchError as error:
                why = str(error)
        self._wire = None if made is None else made.to_wire()
        self._scaled, self._why = made, why

    @action(slow=True)
    def export(self, kind: str) -> dict[str, str]:
        """Return scaling as a file: its name, type and bytes in base64."""
        if kind not in KINDS:
            raise PlanError(
                "This export format does not exist.",
                seen=kind,
                allowed=", ".join(KINDS),
                code="WB-PLAN-283",
            )
        if self._scaled is None:
            raise RunError(
                "There are no scaling results to save yet.",
                next_step='on the tab "Choose", type several numbers in the field "Workers" (for '
                "example 1,2,4), then press Run",
                code="WB-RUN-130",
            )
        shown = curves() if self._published else ()
        data = as_bytes(self._scaled.scaling, f".{kind}", shown)
        return {
            "name": f"scaling.{kind}",
            "type": KINDS[kind],
            "data": base64.b64encode(data).decode(),
        }
