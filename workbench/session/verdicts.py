"""What the engines' outcomes say about a run or a cell as a whole; pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..errors import RunError

if TYPE_CHECKING:
    from .run import Run

HONOURED_ANYWAY = frozenset({"seed"})
"""Overrides that are set before the cell, so that no loop needs to read them."""

_TRAINS = {
    "torch": (
        "a call of wb.fit, wb.prepare or model.fit in the cell",
        "call one of them, or leave the strategy away to run the cell everywhere",
    ),
    "tensorflow": (
        "model.fit, wb.fit, or strategy.run of a step that takes gradients and applies them",
        "train in the cell; one that only evaluates or predicts needs no strategy: %%rank 0",
    ),
}
"""What counts as training in a cell, and what to do with one that does not train."""

Outcomes = Mapping[int, Mapping[str, Any]]


def outcome_error(run: Run, outcomes: Outcomes) -> RunError | None:
    """The error of a cell that went through and yet was no training run as asked for.

    Returns:
        An error when the cell trained nothing, or ignored what the line overrides; None when all
        is well, and for runs that ended in another error or were stopped.
    """
    if run.state == "stopping" or any(o["status"] != "ok" for o in outcomes.values()):
        return None
    if not any(o.get("trained") for o in outcomes.values()):
        allowed, next_step = _TRAINS.get(run.plan.framework, _TRAINS["torch"])
        return RunError(
            "Nothing was distributed: the cell trained nothing.",
            seen=f"strategy {run.plan.strategy}, 0 steps",
            allowed=allowed,
            next_step=next_step,
        )
    ignored = sorted(set(run.plan.overrides) - HONOURED_ANYWAY)
    if ignored and not any(o.get("options_read") for o in outcomes.values()):
        name = ignored[0]
        return RunError(
            "The line overrides what the cell's own loop does not read, so it was ignored.",
            seen=", ".join(f"--{one.replace('_', '-')}" for one in ignored),
            allowed="wb.fit, or a loop that reads wb.options",
            next_step=f"use wb.options.get({name!r}, default) in the loop, or leave the flag away",
        )
    if run.plan.init_from and not any(o.get("initial_read") for o in outcomes.values()):
        return RunError(
            "The cell's own loop took no initial weights, so it started from its own.",
            seen=f"--init-from {run.plan.init_from}",
            allowed="wb.fit, wb.prepare, wb.watch or model.fit",
            next_step="use one of them, or leave the flag away",
        )
    return None


def outcome_notes(outcomes: Outcomes) -> list[str]:
    """What the user should know although nothing failed."""
    names = sorted({name for o in outcomes.values() for name in o.get("reassigned", ())})
    if not names:
        return []
    return [
        f"The cell gave {', '.join(names)} another value; before the next cell "
        f"{'they are' if len(names) > 1 else 'it is'} set again."
    ]
