"""What is said of engines that died while they ran a cell; pure."""

from __future__ import annotations

from collections.abc import Callable

from ..cluster.deaths import RESTARTED, EngineDiedError
from ..errors import WorkbenchError
from ..members import Member
from ..messages import CellOutcome, Outcomes

NAMED = 4
"""Most engines that are named one by one when several died."""


def outcome(error: BaseException) -> CellOutcome:
    """Return the outcome of a call whose engine is no more, or was never reached."""
    how, log, by_itself, with_all = str(error), "", False, False
    if isinstance(error, EngineDiedError):
        how, log, by_itself = str(error.how), error.log, error.how != RESTARTED
        with_all = error.how.with_all
    return CellOutcome(
        status="died",
        ename="ClusterError",
        evalue=error.what if isinstance(error, WorkbenchError) else str(error),
        how=how,
        log=log,
        recoverable=by_itself,
        restarted=isinstance(error, EngineDiedError) and not by_itself,
        with_all=with_all,
    )


def of(outcomes: Outcomes) -> list[int]:
    """Return the engines that died."""
    return [engine for engine, one in outcomes.items() if one.status == "died"]


def words(first: int, outcomes: Outcomes, member: Callable[[int], Member]) -> str:
    """Say who is gone and how: `first` in full, with its log's last lines, then the others."""
    one, who = outcomes[first], member(first)
    text = f"{who.title} {who.verb} gone: {one.evalue}"
    if one.log:
        text += "\n  its log ends:" + "".join(f"\n    {line}" for line in one.log.splitlines())
    others = [engine for engine in of(outcomes) if engine != first]
    for engine in others[:NAMED]:
        text += f"\n  gone too: {member(engine).title} (engine {engine}): {outcomes[engine].how}"
    if len(others) > NAMED:
        text += f"\n  gone too: {len(others) - NAMED} more"
    return text


def next_step(outcomes: Outcomes) -> str | None:
    """Return the command that brings the dead back; None where all live.

    Those that were restarted are there again: only their cell is lost.
    """
    gone = sorted(of(outcomes))
    dead = [engine for engine in gone if not outcomes[engine].restarted]
    if not dead:
        return "run the cell again" if gone else None
    whole = len(dead) == len(outcomes) > 1 or any(outcomes[i].with_all for i in dead)
    return "%cluster restart" + ("" if whole else " " + " ".join(map(str, dead)))
