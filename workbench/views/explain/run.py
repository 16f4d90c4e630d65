"""What a run can tell a class: one step as it was, who waited for whom, and what if."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...catalog.diagrams import messages
from ...history.analysis import blame as blames
from ...history.analysis import counterfactual
from ...history.analysis import step_picture as steps
from .blame import BlameMatrix, WhatIfPicture
from .diagram import StepDrawing

if TYPE_CHECKING:
    from ...history.run_data import RunData


def step_picture(run: RunData, step: int | None) -> StepDrawing:
    """Return what happened in a step, or in the latest one; see `Run.step_picture`."""
    plan = run.plan
    options = dict(plan.options)
    if options.get("allreduce") == "auto":
        options["allreduce"] = steps.chosen_algorithm(run.history.story) or "backend"
    diagram = messages(plan.strategy, len(run.engines), options, framework=plan.framework)
    return StepDrawing(steps.step_picture(run.history, diagram, run=run.name, step=step))


def blame(run: RunData, first: int | None, last: int | None) -> BlameMatrix:
    """Return who waited for whom; see `Run.blame`."""
    return BlameMatrix(**vars(blames.blame(run.history, first, last)))


def what_if(
    run: RunData, without: int | None, first: int | None, last: int | None
) -> WhatIfPicture:
    """Return the run as it would have been without its straggler; see `Run.what_if`."""
    return WhatIfPicture(**vars(counterfactual.what_if(run.history, without, first, last)))
