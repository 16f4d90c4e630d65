"""How the end of a cell is told: whose fault it was, who only followed, the error raised; pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..errors import RunError, without_numbers
from ..members import Member, called
from ..messages import CellOutcome, Outcomes
from . import gone, reasons


class Names:
    """How the engines of a cell are called.

    Args:
        ids: Engines in the order of the ranks.
        members: Which part each takes; the rank of its place where that is not said.
    """

    def __init__(self, ids: Sequence[int], members: Mapping[int, Member]) -> None:
        self._members = {i: members.get(i) or Member.of_ranks(at) for at, i in enumerate(ids)}

    def member(self, engine: int) -> Member:
        """Which part an engine takes."""
        return self._members[engine]

    def of(self, engine: int) -> str:
        """`Rank 1`, or `Server s0`."""
        return self._members[engine].title

    def several(self, engines: Iterable[int]) -> str:
        """`ranks 0-2`, or `rank 0, server s0`."""
        return called(self._members[engine] for engine in engines)


@dataclass(frozen=True)
class CellEnd:
    """What became of a cell's engines, and what is said of it.

    Attributes:
        outcomes: Of the engines that are done, in the order of the ranks.
        first_failed: Who failed first.
        lost: Engines whose death the others survived.
        interrupted: Whether the user wanted it to end.
        pid: Returns an engine's process.
    """

    names: Names
    outcomes: Outcomes
    first_failed: int | None
    lost: frozenset[int]
    interrupted: bool
    pid: Callable[[int], int]

    @property
    def cause(self) -> int | None:
        """The engine that the cell failed for; None where none did, or all were interrupted."""
        if self.first_failed is None:
            return None
        cause = reasons.root_cause(self.outcomes, self.first_failed, self.lost)
        outcome = self.outcomes[cause]
        mine = not (reasons.is_collateral(outcome) or outcome.ended)
        return cause if mine or not self.interrupted else None

    @property
    def followed(self) -> list[int]:
        """Engines whose end is only a consequence: of an interrupt, or of the cause's.

        Where nobody made a mistake, each rank may know a part of the story: then it is none.
        """
        cause = self.cause
        if cause is not None and reasons.is_collateral(self.outcomes[cause]):
            return []
        return [
            i
            for i in self._bad
            if i != cause and (self.outcomes[i].ended or reasons.is_collateral(self.outcomes[i]))
        ]

    @property
    def _bad(self) -> list[int]:
        return [
            i for i, outcome in self.outcomes.items() if not outcome.is_well and i not in self.lost
        ]

    def say(self, engines: Iterable[int]) -> str:
        """Return what became of engines that followed, in one line."""
        return reasons.with_it(self.outcomes, engines, self.names.several)

    def failure(self) -> RunError | None:
        """The error that the cell ends in, None when all went well."""
        cause = self.cause
        if cause is None:
            return self._interruption()
        outcome = self.outcomes[cause]
        what, told = self._reason(cause)
        if others := [i for i in self._bad if i not in told]:
            what += f"\n  with it: {self.say(others)}"
        step = gone.next_step(self.outcomes) or outcome.advice or self._elsewhere(outcome)
        error = RunError(what, next_step=step, code="WB-RUN-066")
        if outcome.status == "error" and not outcome.ended:
            who = self._who(told)
            error.brief = f"{who} failed with the {outcome.ename} above."
            error.brief += f"\n  next:    {step}" if step else ""
        error.outcome = outcome  # type: ignore[attr-defined]
        return error

    def _elsewhere(self, outcome: CellOutcome) -> str | None:
        """Return what to do where a rank lacks a name that another one did not miss."""
        missed = outcome.ename == "NameError"
        if not missed or all(one.status != "ok" for one in self.outcomes.values()):
            return None
        return (
            "the name may be on another rank only, as after a run whose replicas share an engine: "
            "%%rank 0 runs the cell there, or make the name in a %%distributed cell"
        )

    def _reason(self, cause: int) -> tuple[str, list[int]]:
        """Return what happened to the cause, and the engines of which all is said with that."""
        outcome, outcomes = self.outcomes[cause], self.outcomes
        if outcome.ended and outcome.failed_of:
            who = f"{self.names.of(cause)} (engine {cause})"
            ended = f"{who} failed: {outcome.failed_of}\n  It did not clear away, and was ended"
            return ended, [cause]
        if outcome.ended:
            stalled = f"{self.names.of(cause)} stalled: it took no step, heeded no interrupt, "
            return f"{stalled}and was ended", [cause]
        if outcome.status == "died":
            died = [i for i in gone.of(outcomes) if i == cause or not outcomes[i].ended]
            return gone.words(cause, outcomes, self.names.member), died
        words = outcome.words
        kind = without_numbers(words)
        same = [i for i in self._bad if without_numbers(outcomes[i].words) == kind]
        same = [i for i in same if i == cause or not outcomes[i].ended]
        return f"{self._who(same)} failed: {words}", same

    def _who(self, engines: Sequence[int]) -> str:
        """Return `Rank 1 (engine 1)`, or `Ranks 0-2`, as a sentence begins."""
        if len(engines) == 1:
            return f"{self.names.of(engines[0])} (engine {engines[0]})"
        several = self.names.several(engines)
        return several[:1].upper() + several[1:]

    def _interruption(self) -> RunError | None:
        """The error of a cell that ended because it was interrupted; None when all went well."""
        ended = self.ended
        if not (self.interrupted or ended) and all(
            outcome.status != "interrupted" for outcome in self.outcomes.values()
        ):
            return None
        what = "".join(f"\n  {text}" for text in ended.values())
        return RunError(
            f"Interrupted: the cell was ended on all its engines.{what}",
            next_step=gone.next_step(self.outcomes),
            code="WB-RUN-067",
        )

    @property
    def ended(self) -> dict[int, str]:
        """What is to be said of engines that we killed, since no interrupt reached them."""
        return {
            i: f"{self.names.of(i)} (engine {i}, pid {self.pid(i)}) was {outcome.ended}: "
            f"%cluster restart {i}"
            for i, outcome in self.outcomes.items()
            if outcome.ended
        }
