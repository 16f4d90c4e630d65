"""What a run tells a class: step by step, who waited for whom, what if, and can it be believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import RunError, WorkbenchError
from ..session.calibrate import calibrate
from ..session.run import Run
from .cluster import ClusterPart
from .live import LivePart
from .part import Part, Wire, action


class TeachingPart(Part):
    """Pictures of the run on show, made when somebody looks at them."""

    name = "teaching"

    def wire(self) -> Wire:
        """Which run it is, and how far: what tells the browser when to ask for a picture anew."""
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
        """Who sent what to whom in a step, as measured; the latest one by default."""
        number = None if step is None else int(step)
        return _drawn(lambda: self._run().step_picture(number), wire=True)

    @action(slow=True)
    def blame(self) -> dict[str, Any]:
        """Who waited for whom: while the run goes on in the steps that its headline speaks of."""
        return _drawn(lambda: self._run().blame(self._first()))

    @action(slow=True)
    def what_if(self, without: int | None = None) -> dict[str, Any]:
        """The same steps as they would have been without the straggler."""
        rank = None if without is None else int(without)
        return _drawn(lambda: self._run().what_if(rank, self._first()))

    def _first(self) -> int | None:
        """Return the first step of those that the run's headline speaks of; None: of all."""
        run = self._run()
        shot = run.snapshot()
        return None if run.is_over else max(shot.step - shot.slow_steps, 0)

    @action(slow=True)
    def calibrate(self) -> dict[str, Any]:
        """Inject a known delay and say what the instrument read."""
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
                "There is no run to look at yet.", next_step="start one: Run", code="WB-RUN-057"
            )
        return run


def _drawn(make: Callable[[], Any], *, wire: bool = False) -> dict[str, Any]:
    """Return a picture for the browser; where there is none, why, in its place.

    The browser asks by itself, so what is missing is no message of the panel.
    """
    try:
        picture = make()
    except WorkbenchError as error:
        return {"svg": "", "text": str(error)}
    found = {"svg": picture.canvas().svg(), "text": picture.text()}
    return {**picture.to_wire(), **found} if wire else found
