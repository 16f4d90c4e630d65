"""The outcome of a cell or a run, derived from its engines' answers and deaths; pure functions.

It decides which rank's error is the cause and which errors only followed from it, how the death of
an engine is described, which error is raised, and how the run as a whole ended.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..cluster.processes import RESTARTED, EngineDiedError
from ..errors import FitError, RunError, WorkbenchError, without_numbers
from ..shared.members import Member, called
from ..shared.messages import CellOutcome, Outcomes, OwnLoop

if TYPE_CHECKING:
    from ..cluster.engines import EngineInfo
    from ..cluster.hosts.agents import Host
    from ..history.run_data import RunData

_TELLING = (
    r"Connection closed by peer|Connection reset(?: by peer)?|Broken pipe|Socket closed|Timed out"
    r"|Collective ops is aborted"
)
COLLATERAL = re.compile(
    rf"{_TELLING}|KeyboardInterrupt|DistBackendError|DistNetworkError|DistStoreError|gloo"
    r"|DeadlineExceededError|UnavailableError",
    re.IGNORECASE,
)
"""Texts of library errors after another rank has ended; such an error is never shown as the cause.
"""
MAX_WORDS = 100


def is_collateral(outcome: CellOutcome) -> bool:
    """Whether the rank's error is only an effect of another rank's end.

    This is certain if Workbench cut the rank's connections to end its wait, or if a link of
    Workbench reported it (`felt`). For errors of a library, the text decides.
    """
    certain = outcome.cut_off or bool(outcome.felt)
    return certain or COLLATERAL.search(outcome.words) is not None


def root_cause(outcomes: Outcomes, first_failed: int, lost: Iterable[int] = ()) -> int:
    """Return the engine whose error is the cause of the other errors.

    Args:
        outcomes: In the order of the ranks.
        first_failed: The engine that failed first.
        lost: Engines whose death the others survived.
    """
    failed = [i for i, o in outcomes.items() if o.status in ("died", "error")]
    failed = [i for i in failed if i not in set(lost) and not outcomes[i].ended]
    died = [i for i in failed if outcomes[i].status == "died"]
    own = [i for i in failed if not is_collateral(outcomes[i])]
    silent = [i for i, o in outcomes.items() if o.ended]
    if silent and not (own or died):
        return silent[0]  # the others had waited for it
    if died:
        # An engine that died later can have been ended because it waited for the first.
        return first_failed if first_failed in died else died[0]
    return first_failed if first_failed in own or not own else own[0]


def with_it(outcomes: Outcomes, engines: Iterable[int], called: Callable[[list[int]], str]) -> str:
    """Return one line about the other engines.

    Args:
        engines: The engines that ended because of another engine.
        called: Returns `ranks 0, 2`.
    """
    groups: dict[str, list[int]] = {}
    for engine in engines:
        groups.setdefault(_shortly(outcomes[engine]), []).append(engine)
    return "; ".join(f"{called(members)}: {what}" for what, members in groups.items())


def _shortly(outcome: CellOutcome) -> str:
    if outcome.ended:
        return outcome.ended
    if outcome.status == "interrupted":
        return "interrupted"
    if outcome.status == "died":
        return outcome.evalue
    if outcome.felt:
        return outcome.felt
    if told := re.search(_TELLING, outcome.evalue, re.IGNORECASE):
        return told[0]
    line = outcome.words.splitlines()[0]
    return line if len(line) <= MAX_WORDS else line[: MAX_WORDS - 1] + "…"


NAMED = 4
"""Largest number of dead engines that are named one by one."""


def outcome_of_death(error: BaseException) -> CellOutcome:
    """Return the outcome of a call whose engine has ended or was never reached."""
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


def left_behind(outcome: CellOutcome, host: Host | None) -> str | None:
    """Return the advice for a module that exists only in the notebook's folder, not on the host."""
    found = re.search(r"No module named '(\w+)", outcome.evalue)
    if host is None or host.has_cwd or found is None:
        return None
    name, cwd = found[1], Path.cwd()
    if not (cwd / name).is_dir() and not (cwd / f"{name}.py").is_file():
        return None
    return (
        f"The module {name} is in the notebook's folder {cwd}, which is not on "
        f"{host.name}. Move the notebook to a shared disk, or copy {name} to each host, or define "
        f"the functions and classes of {name} in a %%distributed cell"
    )


def dead_engines(outcomes: Outcomes) -> list[int]:
    """Return the engines that died."""
    return [engine for engine, one in outcomes.items() if one.status == "died"]


def death_words(first: int, outcomes: Outcomes, member: Callable[[int], Member]) -> str:
    """Return text on the dead engines: `first` with the end of its log, then the others."""
    one, who = outcomes[first], member(first)
    text = f"{who.title} {who.verb} gone: {one.evalue}"
    if one.log:
        text += "\n  end of the engine's log:" + "".join(
            f"\n    {line}" for line in one.log.splitlines()
        )
    others = [engine for engine in dead_engines(outcomes) if engine != first]
    for engine in others[:NAMED]:
        how = "" if outcomes[engine].how == one.how else f": {outcomes[engine].how}"
        text += f"\n  also gone: {member(engine).title} (engine {engine}){how}"
    if len(others) > NAMED:
        text += f"\n  also gone: {len(others) - NAMED} more engines"
    return text


def next_step(outcomes: Outcomes) -> str | None:
    """Return the command that restarts the dead engines; None if all live.

    Engines that were restarted are alive again; only their cell is lost.
    """
    gone = sorted(dead_engines(outcomes))
    dead = [engine for engine in gone if not outcomes[engine].restarted]
    if not dead:
        return "run the cell again" if gone else None
    whole = len(dead) == len(outcomes) > 1 or any(outcomes[i].with_all for i in dead)
    return "%cluster restart" + ("" if whole else " " + " ".join(map(str, dead)))


class Names:
    """The names of a cell's engines in messages.

    Args:
        ids: Engines in the order of the ranks.
        members: The member of each engine; by default the rank is its position.
    """

    def __init__(self, ids: Sequence[int], members: Mapping[int, Member]) -> None:
        self._members = {i: members.get(i) or Member.of_ranks(at) for at, i in enumerate(ids)}

    def add(self, members: Mapping[int, Member]) -> None:
        """Add further engines."""
        self._members.update(members)

    def member(self, engine: int) -> Member:
        """The member that an engine is."""
        return self._members[engine]

    def of(self, engine: int) -> str:
        """`Rank 1`, or `Server s0`."""
        return self._members[engine].title

    def several(self, engines: Iterable[int]) -> str:
        """`ranks 0-2`, or `rank 0, server s0`."""
        return called(self._members[engine] for engine in engines)


@dataclass(frozen=True)
class CellEnd:
    """The outcomes of a cell's engines, and the message about them.

    Attributes:
        outcomes: The outcomes of the engines that are done, in the order of the ranks.
        first_failed: The engine that failed first.
        lost: Engines whose death the others survived.
        interrupted: Whether the user interrupted the cell.
        pid: Returns the process id of an engine.
    """

    names: Names
    outcomes: Outcomes
    first_failed: int | None
    lost: frozenset[int]
    interrupted: bool
    pid: Callable[[int], int]

    @property
    def cause(self) -> int | None:
        """The engine that made the cell fail; None if none did, or if all were interrupted."""
        if self.first_failed is None:
            return None
        cause = root_cause(self.outcomes, self.first_failed, self.lost)
        outcome = self.outcomes[cause]
        mine = not (is_collateral(outcome) or outcome.ended)
        return cause if mine or not self.interrupted else None

    @property
    def followed(self) -> list[int]:
        """Engines whose end is only an effect of an interrupt or of the cause.

        If no rank made an error, each rank can have part of the explanation; then the result is
        empty.
        """
        cause = self.cause
        if cause is not None and is_collateral(self.outcomes[cause]):
            return []
        return [
            i
            for i in self._bad
            if i != cause and (self.outcomes[i].ended or is_collateral(self.outcomes[i]))
        ]

    @property
    def _bad(self) -> list[int]:
        return [
            i for i, outcome in self.outcomes.items() if not outcome.is_well and i not in self.lost
        ]

    def say(self, engines: Iterable[int]) -> str:
        """Return one line about the engines that failed as an effect."""
        return with_it(self.outcomes, engines, self.names.several)

    def failure(self) -> RunError | None:
        """The error of the cell; None if all went well."""
        cause = self.cause
        if cause is None:
            return self._interruption()
        outcome = self.outcomes[cause]
        what, told = self._reason(cause)
        if others := [i for i in self._bad if i not in told]:
            what += f"\n  Also failed: {self.say(others)}"
        step = next_step(self.outcomes) or outcome.advice or self._elsewhere(outcome)
        error = RunError(what, next_step=step, code="WB-RUN-066")
        if outcome.status == "error" and not outcome.ended:
            who = self._who(told)
            error.brief = f"{who} failed with the {outcome.ename} above."
            error.brief += f"\n  next:    {step}" if step else ""
        error.outcome = outcome  # type: ignore[attr-defined]
        return error

    def _elsewhere(self, outcome: CellOutcome) -> str | None:
        """Return the advice for a name that is missing on one rank but not on another."""
        missed = outcome.ename == "NameError"
        there = next((i for i, one in self.outcomes.items() if one.status == "ok"), None)
        if not missed or there is None:
            return None
        return (
            "define the name in a %%distributed cell without a strategy. A cell without a strategy "
            "runs on all engines; under some strategies, a cell runs on one engine only. Or run "
            "this cell only on an engine on which the name is defined: begin the cell with "
            f"%%rank {there}"
        )

    def _reason(self, cause: int) -> tuple[str, list[int]]:
        """Return the text about the cause, and the engines that this text covers completely."""
        outcome, outcomes = self.outcomes[cause], self.outcomes
        if outcome.ended and outcome.failed_of:
            who = f"{self.names.of(cause)} (engine {cause})"
            ended = "The engine did not clean up after the error, so Workbench killed the engine"
            return f"{who} failed: {outcome.failed_of}\n  {ended}", [cause]
        if outcome.ended:
            stalled = f"{self.names.of(cause)} hung: it made no progress, ignored the interrupt "
            return f"{stalled}and was killed", [cause]
        if outcome.status == "died":
            died = [i for i in dead_engines(outcomes) if i == cause or not outcomes[i].ended]
            return death_words(cause, outcomes, self.names.member), died
        words = outcome.words
        kind = without_numbers(words)
        same = [i for i in self._bad if without_numbers(outcomes[i].words) == kind]
        same = [i for i in same if i == cause or not outcomes[i].ended]
        return f"{self._who(same)} failed: {words}", same

    def _who(self, engines: Sequence[int]) -> str:
        """Return `Rank 1 (engine 1)`, or `Ranks 0-2`, for the start of a sentence."""
        if len(engines) == 1:
            return f"{self.names.of(engines[0])} (engine {engines[0]})"
        several = self.names.several(engines)
        return several[:1].upper() + several[1:]

    def _interruption(self) -> RunError | None:
        """The error of an interrupted cell; None if all went well."""
        ended = self.ended
        if not (self.interrupted or ended) and all(
            outcome.status != "interrupted" for outcome in self.outcomes.values()
        ):
            return None
        what = "".join(f"\n  {text}" for text in ended.values())
        return RunError(
            f"Interrupted: Workbench ended the cell on all engines.{what}",
            next_step=next_step(self.outcomes),
            code="WB-RUN-067",
        )

    @property
    def ended(self) -> dict[int, str]:
        """The message about engines that were killed because they did not react to an interrupt."""
        return {
            i: f"{self.names.of(i)} (engine {i}, pid {self.pid(i)}) was {outcome.ended}. "
            f"To restart it: %cluster restart {i}"
            for i, outcome in self.outcomes.items()
            if outcome.ended
        }


HONOURED_ANYWAY = frozenset({"seed"})
"""Overrides that take effect before the cell, so loops do not have to read them."""

_TRAINS = {
    "torch": (
        "a call of wb.fit, wb.prepare or wb.watch in the cell",
        "train with wb.fit, or in a loop with wb.prepare or wb.watch. If the cell needs no "
        "training, remove the strategy from its first line. Then all engines run the cell",
    ),
    "tensorflow": (
        "model.fit, wb.fit, or strategy.run with a step that computes and applies gradients",
        "train in the cell; if the cell only evaluates or predicts, begin the cell with %%rank 0, "
        "without a strategy",
    ),
}
"""Which calls count as training, and the advice for a cell that does not train."""


@dataclass(frozen=True)
class Recovery:
    """One recovery of a run after a death, or after a warning that stopped all workers.

    Attributes:
        engines: The engines that died.
        how: How they ended, in words.
        step: The step from which the run continued.
        lost_steps: The number of steps that were repeated.
        workers: The number of workers that continue.
        seconds: Time from the detection of the death until the cell ran again. If the cell did not
            run again (`again`), the time that the other workers waited.
    """

    engines: tuple[int, ...]
    how: str
    step: int
    lost_steps: int
    workers: int
    seconds: float
    again: bool = True


def outcome_error(run: RunData, outcomes: Outcomes) -> RunError | None:
    """The error of a cell that ended well but did not train as requested.

    Returns:
        An error if the cell trained nothing, or ignored a setting of the magic's line. None if all
        is well, if the run ended in another error, or if it was stopped.
    """
    if run.state == "stopping" or any(o.status != "ok" for o in outcomes.values()):
        return None
    if not any(o.trained for o in outcomes.values()):
        loops = [o.loop for o in outcomes.values() if o.loop is not None]
        if any(loop.by for loop in loops):
            return _no_step(loops)
        if any(loop.updates for loop in loops):
            return RunError(
                "The cell trained, but not under the strategy: the cell did not give its optimizer "
                "to the strategy.",
                seen=f"optimizer steps: {max(loop.updates for loop in loops)} (taken by the "
                "worker with the most steps); steps that Workbench recorded: 0",
                allowed="wb.fit, a loop with wb.prepare, or wb.watch in a loop that itself "
                "uses torch.distributed",
                next_step="put this line before the loop: `model, optimizer, loader = "
                "wb.prepare(model, optimizer, loader)`. Use wb.watch only if the loop itself uses "
                "DistributedDataParallel, FSDP or torch.distributed. If the code uses "
                "Lightning or Accelerate, you can write %%distributed without a strategy. Then "
                "Workbench records no steps",
                code="WB-RUN-091",
            )
        allowed, next_step = _TRAINS.get(run.plan.framework, _TRAINS["torch"])
        return RunError(
            "Nothing was distributed, because the cell trained no model.",
            seen=f"strategy {run.plan.strategy}, 0 steps",
            allowed=allowed,
            next_step=next_step,
            code="WB-RUN-092",
        )
    ignored = sorted(set(run.plan.overrides) - HONOURED_ANYWAY)
    if ignored and not any(o.options_read for o in outcomes.values()):
        name = ignored[0]
        return RunError(
            "The cell's first line has a flag that the cell's own loop does not read, so the "
            "flag had no effect.",
            seen=", ".join(f"--{one.replace('_', '-')}" for one in ignored),
            allowed="wb.fit, or a loop that reads wb.options",
            next_step=f"use wb.options.get({name!r}, default) in the loop, or remove the flag",
            code="WB-RUN-093",
        )
    unread = set(run.plan.values).intersection(*(o.unread for o in outcomes.values() if o.trained))
    if unread:
        name = sorted(unread)[0]
        return RunError(
            "The cell's first line sets a value that the cell did not read, so the value had no "
            "effect.",
            seen=", ".join(f"--set {one}" for one in sorted(unread)),
            allowed="values that the cell reads from wb.options",
            next_step=f"use wb.options.get({name!r}, default) where the cell needs the value, or "
            "remove the flag",
            code="WB-RUN-128",
        )
    if run.plan.init_from and not any(o.initial_read for o in outcomes.values()):
        return RunError(
            "The cell's own loop did not load the initial weights, so the training started from "
            "new weights.",
            seen=f"--init-from {run.plan.init_from}",
            allowed="wb.fit or model.fit"
            if run.plan.framework == "tensorflow"
            else "wb.fit, wb.prepare or wb.watch",
            next_step="train with one of these calls, or remove --init-from",
            code="WB-RUN-094",
        )
    return None


def _no_step(loops: list[OwnLoop]) -> RunError:
    """Return the error for a prepared loop in which no step ended."""
    by = max(loop.by for loop in loops)
    backwards, updates = max(one.backwards for one in loops), max(one.updates for one in loops)
    seen = f"{by}, {backwards} backward passes, {updates} optimizer steps"
    if updates:
        missing = "the loop called optimizer.step(), but not loss.backward()"
        fix = "call loss.backward() before optimizer.step()"
        if backwards and by == "wb.watch":
            missing = "the loop uses another model, optimizer or loader than wb.watch received"
            fix = "call wb.watch(model, optimizer, loader) with the objects that the loop uses"
        elif backwards:
            missing = "the loop uses another model, optimizer or loader than wb.prepare returned"
            fix = (
                "write `model, optimizer, loader = wb.prepare(model, optimizer, loader)`. In the "
                "loop, use this model and this optimizer, and iterate over this loader"
            )
        return RunError(
            f"No step of the loop was recorded: {missing}.",
            seen=seen,
            allowed=f"in each step: a batch from the loader of {by}, then loss.backward(), then "
            "optimizer.step()",
            next_step=fix,
            code="WB-RUN-095",
        )
    return RunError(
        "No step of the loop was recorded. A step ends with optimizer.step(), and the loop never "
        "called optimizer.step().",
        seen=seen,
        allowed="optimizer.step() after each backward(); changing parameters by hand is not a step",
        next_step="call optimizer.step() in each step; if the loop changes parameters by hand "
        "(p.data.add_(...)), use torch.optim.SGD(model.parameters(), lr) instead",
        code="WB-RUN-096",
    )


def outcome_behind(error: BaseException | None) -> CellOutcome | None:
    """Return the outcome that made a cell fail; None if the error does not come from a cell."""
    outcome = getattr(error, "outcome", None)
    return outcome if isinstance(outcome, CellOutcome) else None


def is_refusal(error: RunError) -> bool:
    """Whether a strategy refused the recipe before anything was trained."""
    outcome = outcome_behind(error)
    return outcome is not None and outcome.ename == FitError.__name__


def refusals(runs: Sequence[RunData]) -> RunError | None:
    """The error for several runs of which some were refused or failed."""
    refused = [run for run in runs if run.error is not None]
    if not refused:
        return None
    rest = "; no other run failed" if len(refused) < len(runs) else ""
    if not all(run.error is not None and is_refusal(run.error) for run in refused):
        return RunError(
            f"{len(refused)} of {len(runs)} runs failed.",
            seen="; ".join(
                f"{run.name}: {str(run.error).partition(chr(10))[0]}" for run in refused
            ),
            next_step=f"wb.runs[{refused[0].name!r}].error shows the first error in full",
            code="WB-RUN-129",
        )
    reasons = {run.plan.strategy: _reason(run.error) for run in refused}
    return RunError(
        f"In {len(refused)} of {len(runs)} runs, the strategy cannot train this cell's model"
        f"{rest}.",
        seen="; ".join(f"{name}: {reason}" for name, reason in reasons.items()),
        next_step=f"remove {'this strategy' if len(reasons) == 1 else 'these strategies'} "
        "from the cell's first line, or change the cell",
        code="WB-RUN-097",
    )


def _reason(error: RunError | None) -> str:
    outcome = outcome_behind(error)
    return "" if outcome is None else outcome.evalue.partition("\n")[0]


def short_handed(dead: Sequence[int], living: int) -> str:
    """The note before a cell or run on a cluster that has lost workers; empty if none is lost.

    Args:
        dead: Ids of the dead engines among the workers.
        living: The number of living workers.
    """
    if not dead:
        return ""
    ids = ", ".join(map(str, dead))
    one = len(dead) == 1
    return (
        f"Engine{'' if one else 's'} {ids} {'is' if one else 'are'} dead, so "
        f"{living} of {living + len(dead)} workers {'remains' if living == 1 else 'remain'}; "
        f"%cluster restart {' '.join(map(str, dead))} starts {'it' if one else 'them'} again."
    )


def how_ended(dead: Sequence[EngineInfo]) -> str:
    """Return the different ways in which the engines ended."""
    ways: dict[str, list[int]] = {}
    for engine in dead:
        ways.setdefault(str(engine.exit or "the reason is unknown"), []).append(engine.id)
    if len(ways) == 1:
        return next(iter(ways))
    return "; ".join(f"{_engines(ids)}: {how}" for how, ids in ways.items())


def _engines(ids: Sequence[int]) -> str:
    return f"engine{'s' if len(ids) > 1 else ''} {', '.join(map(str, ids))}"


def outcome_notes(outcomes: Outcomes) -> list[str]:
    """Notes for the user on a run without an error."""
    return [*_unlike_copies(outcomes), *_reassigned(outcomes)]


def _unlike_copies(outcomes: Outcomes) -> list[str]:
    """Name the ranks whose model differs from the others' after the cell's own loop."""
    ends = [o.copies for o in outcomes.values() if o.copies is not None]
    digests = [end.digest for end in ends]
    if len(set(digests)) < 2 or len({end.like for end in ends}) > 1:
        return []
    usual = max(digests, key=digests.count)
    odd = sorted(end.rank for end in ends if end.digest != usual)
    who = f"rank {odd[0]}" if len(odd) == 1 else f"ranks {', '.join(map(str, odd))}"
    return [
        f"At the end of the cell, the model on {who} differs from the other copies, because the "
        "cell did not change all copies in the same way. Workbench keeps rank 0's copy. A change "
        "of the model, such as loading its best weights, must be the same on every rank. Or make "
        "this change after the run, on rank 0."
    ]


def _reassigned(outcomes: Outcomes) -> list[str]:
    names = sorted({name for o in outcomes.values() for name in o.reassigned})
    if not names:
        return []
    return [
        f"The cell overwrote {', '.join(f'`{name}`' for name in names)}. Before the next cell, "
        f"Workbench resets {'them' if len(names) > 1 else 'it'}."
    ]


def recovery_words(done: Recovery, on_failure: str, saved: bool) -> str:
    """Return the note about the recovery and its cost."""
    text = f"{done.how}. {done.seconds:.1f} s later, the run was started again with "
    if on_failure == "continue":
        text += f"{done.workers} worker{'s' if done.workers > 1 else ''}"
    elif len(done.engines) > 1:
        text += "new engines instead of the lost ones"
    else:
        text += "a new engine instead of the lost one"
    if not saved:
        text += ", from the first step"
    elif done.lost_steps == 0 and on_failure == "continue":
        text += (
            f", from step {done.step}. The run continues with the state of the worker that had "
            "done the most steps"
        )
    else:
        text += f", from the checkpoint of step {done.step}"
    text += "; "
    if done.lost_steps == 0:
        return text + "no step is lost."
    return text + f"{done.lost_steps} step{'s are' if done.lost_steps > 1 else ' is'} repeated."
