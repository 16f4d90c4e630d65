"""How the end of a cell is told, by what its engines came to."""

import re
from dataclasses import replace
from typing import Any

import pytest

from workbench.execution.outcome import CellEnd, Names
from workbench.shared.members import Member
from workbench.shared.messages import CellOutcome

OK = CellOutcome(status="ok")
CUT = CellOutcome(status="error", ename="RuntimeError", evalue="Connection closed by peer")
GONE = CellOutcome(status="died", ename="ClusterError", evalue="gone", ended="ended")


def mine(text: str = "mine") -> CellOutcome:
    return CellOutcome(status="error", ename="ValueError", evalue=text)


def end_of(
    outcomes: dict[int, CellOutcome],
    members: dict[int, Member] | None = None,
    first: int | None = None,
    **more: Any,
) -> CellEnd:
    names = Names(list(outcomes), members or {})
    about: dict[str, Any] = {"lost": frozenset(), "interrupted": False, "pid": lambda i: 100 + i}
    return CellEnd(names, outcomes, first_failed=first, **about | more)


def test_engines_are_called_by_their_ranks_else_by_their_part():
    names = Names(
        [4, 7, 9], {4: Member.of_ranks(2, device="cuda:0"), 7: Member.helper("server s0")}
    )
    assert [names.of(i) for i in (4, 7, 9)] == ["Rank 2", "Server s0", "Rank 2"]
    assert names.several([4]) == "rank 2"
    assert names.several([4, 7]) == "rank 2, server s0"
    assert Names([1, 2, 3, 5], {}).several([1, 2, 5]) == "ranks 0-1, 3"


def test_ranks_that_failed_alike_are_named_by_their_ranks_also_where_only_some_ran_the_cell():
    members = {1: Member.of_ranks(1), 2: Member.of_ranks(2)}
    error = end_of({1: mine(), 2: mine()}, members, first=2).failure()
    assert error.what == "Ranks 1-2 failed: ValueError: mine"


def test_ranks_whose_errors_differ_in_numbers_alone_failed_alike():
    error = end_of({0: mine("336x8"), 1: mine("344x8"), 2: OK}, first=1).failure()
    assert error.what == "Ranks 0-1 failed: ValueError: 344x8"


def test_where_the_error_is_shown_above_its_message_is_not_repeated():
    advised = replace(mine(), advice="do this")
    error = end_of({0: CUT, 1: advised}, first=0).failure()
    assert re.fullmatch(r"Rank 1 \(engine 1\) .*ValueError .*\n  next:    do this", error.brief)
    died = CellOutcome(status="died", ename="EngineError", evalue="killed")
    assert end_of({0: died, 1: OK}, first=0).failure().brief is None


def test_who_only_felt_it_follows_and_the_lost_are_no_part_of_it():
    end = end_of({0: CUT, 1: mine(), 2: OK, 3: CUT}, first=0, lost=frozenset([3]))
    assert end.cause == 1
    assert end.followed == [0]
    said = (
        "Rank 1 (engine 1) failed: ValueError: mine\n"
        "  Also failed: rank 0: Connection closed by peer"
    )
    assert end.failure().what == said


def test_a_name_that_only_some_ranks_lack_is_said_to_be_on_another_one():
    lacks = CellOutcome(status="error", ename="NameError", evalue="name 'model' is not defined")
    assert "%%rank 0" in str(end_of({0: OK, 1: lacks}, first=1).failure())
    assert end_of({0: lacks, 1: lacks}, first=1).failure().next_step is None
    assert end_of({0: OK, 1: mine()}, first=1).failure().next_step is None


def test_where_nobody_made_a_mistake_nobody_follows():
    end = end_of({0: CUT, 1: CUT}, first=0)
    assert end.followed == []
    assert end_of({0: CUT, 1: CUT}, first=0, interrupted=True).cause is None


@pytest.mark.parametrize("interrupted", [True, False])
def test_an_engine_that_was_killed_for_silence_is_named_with_its_pid(interrupted):
    error = str(end_of({0: OK, 1: GONE}, interrupted=interrupted).failure())
    assert "Interrupted" in error
    assert "Rank 1 (engine 1, pid 101)" in error
    assert "%cluster restart 1" in error


def test_all_went_well():
    assert end_of({0: OK, 1: CellOutcome(status="stopped")}).failure() is None


def test_who_failed_and_then_did_not_clear_away_is_told_by_its_own_error():
    stuck = replace(GONE, failed_of="KeyError: 'accuracy'")
    error = str(end_of({0: CUT, 1: stuck}, first=0).failure())
    assert "Rank 1 (engine 1) failed: KeyError: 'accuracy'" in error
    assert "stalled" not in error
