"""What the engines' outcomes say about a run or a cell as a whole; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import FitError, RunError
from ..messages import CellOutcome, Outcomes, OwnLoop

if TYPE_CHECKING:
    from ..cluster.engines import EngineInfo
    from ..history.run_data import RunData

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


@dataclass(frozen=True)
class Recovery:
    """One time that a run went on after a death.

    Attributes:
        engines: Those that died.
        how: What became of them, in words.
        step: The step that the run went on from.
        lost_steps: Steps that had been done and were done again.
        workers: How many go on.
        seconds: From the death's notice until the cell was begun again.
    """

    engines: tuple[int, ...]
    how: str
    step: int
    lost_steps: int
    workers: int
    seconds: float


def outcome_error(run: RunData, outcomes: Outcomes) -> RunError | None:
    """The error of a cell that went through and yet was no training run as asked for.

    Returns:
        An error when the cell trained nothing, or ignored what the line overrides; None when all
        is well, and for runs that ended in another error or were stopped.
    """
    if run.state == "stopping" or any(o.status != "ok" for o in outcomes.values()):
        return None
    if not any(o.trained for o in outcomes.values()):
        loops = [o.loop for o in outcomes.values() if o.loop is not None]
        if any(loop.by for loop in loops):
            return _no_step(loops)
        if any(loop.updates for loop in loops):
            return RunError(
                "The cell trained, but not under the strategy: its optimizer was not handed over.",
                seen=f"{max(loop.updates for loop in loops)} optimizer steps on a worker, "
                "none of them recorded",
                allowed="wb.fit, a loop with wb.prepare, or wb.watch around a loop that "
                "distributes itself",
                next_step="put wb.watch(model, optimizer, loader) before the loop; a trainer with "
                "a loop of its own (Lightning, Accelerate) runs under %%distributed without a "
                "strategy",
                code="WB-RUN-091",
            )
        allowed, next_step = _TRAINS.get(run.plan.framework, _TRAINS["torch"])
        return RunError(
            "Nothing was distributed: the cell trained nothing.",
            seen=f"strategy {run.plan.strategy}, 0 steps",
            allowed=allowed,
            next_step=next_step,
            code="WB-RUN-092",
        )
    ignored = sorted(set(run.plan.overrides) - HONOURED_ANYWAY)
    if ignored and not any(o.options_read for o in outcomes.values()):
        name = ignored[0]
        return RunError(
            "The line overrides what the cell's own loop does not read, so it was ignored.",
            seen=", ".join(f"--{one.replace('_', '-')}" for one in ignored),
            allowed="wb.fit, or a loop that reads wb.options",
            next_step=f"use wb.options.get({name!r}, default) in the loop, or leave the flag away",
            code="WB-RUN-093",
        )
    if run.plan.init_from and not any(o.initial_read for o in outcomes.values()):
        return RunError(
            "The cell's own loop took no initial weights, so it started from its own.",
            seen=f"--init-from {run.plan.init_from}",
            allowed="wb.fit, wb.prepare, wb.watch or model.fit",
            next_step="use one of them, or leave the flag away",
            code="WB-RUN-094",
        )
    return None


def _no_step(loops: list[OwnLoop]) -> RunError:
    """Return the error for a loop that was handed over and in which no step ended."""
    by = max(loop.by for loop in loops)
    backwards, updates = max(one.backwards for one in loops), max(one.updates for one in loops)
    seen = f"{by}, {backwards} backward passes, {updates} optimizer steps"
    if updates:
        return RunError(
            "No step of the loop was recorded: its optimizer steps without a batch or a loss.",
            seen=seen,
            allowed="batches from the loader that wb.prepare returned, a loss.backward(), then "
            "optimizer.step()",
            next_step="model, optimizer, loader = wb.prepare(model, optimizer, loader), and "
            "iterate over that loader",
            code="WB-RUN-095",
        )
    return RunError(
        "No step of the loop was recorded: a step ends with optimizer.step(), which was never "
        "called.",
        seen=seen,
        allowed="optimizer.step() after each backward; parameters changed by hand are no step",
        next_step="use torch.optim.SGD(model.parameters(), lr) in place of p.data.add_(...)",
        code="WB-RUN-096",
    )


def outcome_behind(error: BaseException | None) -> CellOutcome | None:
    """Return the outcome that a cell failed for; None where the error is no cell's."""
    outcome = getattr(error, "outcome", None)
    return outcome if isinstance(outcome, CellOutcome) else None


def is_refusal(error: RunError) -> bool:
    """Whether a strategy refused what it was to train, before anything was trained."""
    outcome = outcome_behind(error)
    return outcome is not None and outcome.ename == FitError.__name__


def refusals(runs: Sequence[RunData]) -> RunError | None:
    """The error that a row of runs ends in where some of them were refused."""
    refused = [run for run in runs if run.error is not None]
    if not refused:
        return None
    reasons = {run.plan.strategy: _reason(run.error) for run in refused}
    return RunError(
        f"{len(refused)} of {len(runs)} runs were refused by their strategy; the others are done.",
        seen="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        next_step=f"leave {'it' if len(reasons) == 1 else 'them'} out, or change the cell",
        code="WB-RUN-097",
    )


def _reason(error: RunError | None) -> str:
    outcome = outcome_behind(error)
    return "" if outcome is None else outcome.evalue.partition("\n")[0]


def short_handed(dead: Sequence[int], living: int) -> str:
    """What to say before a cell or run of a cluster that has lost workers; empty: it has not.

    Args:
        dead: Ids of the dead engines among the workers.
        living: How many workers are left.
    """
    if not dead:
        return ""
    ids = ", ".join(map(str, dead))
    one = len(dead) == 1
    return (
        f"Engine{'' if one else 's'} {ids} {'is' if one else 'are'} dead, so there "
        f"{'is' if living == 1 else 'are'} {living} of {living + len(dead)} workers; "
        f"%cluster restart {' '.join(map(str, dead))} brings {'it' if one else 'them'} back."
    )


def how_ended(dead: Sequence[EngineInfo]) -> str:
    """Say how engines ended, each way once."""
    ways: dict[str, list[int]] = {}
    for engine in dead:
        ways.setdefault(str(engine.exit or "how is not known"), []).append(engine.id)
    if len(ways) == 1:
        return next(iter(ways))
    return "; ".join(f"{_engines(ids)}: {how}" for how, ids in ways.items())


def _engines(ids: Sequence[int]) -> str:
    return f"engine{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def outcome_notes(outcomes: Outcomes) -> list[str]:
    """What the user should know although nothing failed."""
    return [*_unlike_copies(outcomes), *_reassigned(outcomes)]


def _unlike_copies(outcomes: Outcomes) -> list[str]:
    """Say which ranks ended an own loop with another model than the others."""
    ends = [o.copies for o in outcomes.values() if o.copies is not None]
    digests = [end.digest for end in ends]
    if len(set(digests)) < 2 or len({end.like for end in ends}) > 1:
        return []
    usual = max(digests, key=digests.count)
    odd = sorted(end.rank for end in ends if end.digest != usual)
    who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    return [
        f"The copies of the model differ at the end of the cell ({who}): something changed them on "
        "some ranks alone. Rank 0's is the one that is kept. Do on every rank what changes the "
        "model, also loading its best weights, or leave it to rank 0 after the run."
    ]


def _reassigned(outcomes: Outcomes) -> list[str]:
    names = sorted({name for o in outcomes.values() for name in o.reassigned})
    if not names:
        return []
    return [
        f"The cell gave {', '.join(names)} another value; before the next cell "
        f"{'they are' if len(names) > 1 else 'it is'} set again."
    ]
