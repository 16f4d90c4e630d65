"""Who takes part in a training that goes on: what a worker makes of it."""

from __future__ import annotations

import threading

import pytest
from notebook_shell import soon

from workbench.engine.telemetry.membership import Membership
from workbench.errors import RunStopped
from workbench.shared.messages import Regroup


def regroup(generation: int, *places: int) -> Regroup:
    return Regroup(
        run=1, generation=generation, places=places, ranks=places, hosts=("h",) * len(places),
        past=(), prefix=f"g{generation}",
    )  # fmt: skip


def watched(**about: bool) -> tuple[Membership, list[object]]:
    seen: list[object] = []
    membership = Membership(1, **about)
    membership.tell = lambda phase, generation: seen.append((phase, generation))
    membership.break_out = lambda: seen.append("broken out")
    return membership, seen


def test_who_trains_is_broken_out_and_learns_with_whom_to_go_on() -> None:
    membership, seen = watched()
    membership.begin()
    membership.announce(regroup(1, 0, 1))
    assert (seen, membership.stale, membership.generation) == (["broken out"], True, 0)
    membership.remind()  # it may have been about to connect
    assert seen == ["broken out"] * 2
    assert membership.await_next().generation == 1
    assert (membership.stale, membership.generation) == (False, 1)
    membership.remind()
    membership.announce(regroup(1, 0, 1))  # told twice
    assert seen == ["broken out"] * 2


def test_the_newest_word_counts() -> None:
    membership, _ = watched()
    membership.begin()
    for generation in (1, 3, 2):
        membership.announce(regroup(generation, 0, 1))
    assert membership.await_next().generation == 3


def test_who_is_in_no_training_says_so() -> None:
    membership, seen = watched()
    membership.announce(regroup(1, 0, 1))
    assert seen == [("before", 1)]
    membership.begin()
    membership.end()
    assert seen == [("before", 1), ("past", 1)]
    membership.announce(regroup(2, 0, 1))
    assert seen[2:] == [("past", 2)]


def test_who_waits_says_for_what() -> None:
    membership, seen = watched(joins=True)
    membership.begin()
    membership.waiting()
    membership.waits = False
    membership.waiting()
    membership.announce(regroup(1, 0, 1))
    membership.waiting()  # it has been told already
    assert seen == [("ready", 0), ("cut", 0), "broken out"]


def test_who_is_to_leave_waits_until_it_is_let_go() -> None:
    membership, _ = watched()
    membership.begin()
    ended: list[bool] = []

    def wait() -> None:
        with pytest.raises(RunStopped):
            membership.await_next()
        ended.append(True)

    membership.announce(regroup(1, 0))  # the others are to go on without it
    thread = threading.Thread(target=wait)
    thread.start()
    assert soon(lambda: membership._listens)
    assert membership.generation == 1
    assert not ended
    membership.announce(regroup(1))
    thread.join(10)
    assert ended


def test_a_wait_ends_with_the_word() -> None:
    membership, seen = watched()
    membership.begin()
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(membership.await_next().generation))
    thread.start()
    assert soon(lambda: membership._listens)
    membership.announce(regroup(4, 1))
    thread.join(10)
    assert found == [4]
    assert seen == []  # it was in nothing that it had to be broken out of


def test_who_cannot_be_broken_out_of_a_collective_ends(monkeypatch) -> None:
    at, hangs = [0.0], [True]
    monkeypatch.setattr("workbench.engine.telemetry.membership.clock", lambda: at[0])
    membership, seen = watched()
    membership.hangs = lambda: hangs[0]
    membership.note = lambda text: seen.append("noted")
    membership.quit = lambda: seen.append("ended")
    membership.begin()
    membership.announce(regroup(1, 0, 1))

    def later(seconds: int) -> list[object]:
        seen.clear()
        for _ in range(10 * seconds):
            at[0] += 0.1
            membership.remind()
        return [one for one in seen if one != "broken out"]

    assert later(4) == []
    hangs[0] = False  # it computes after all
    assert later(30) == []
    hangs[0] = True
    assert later(4) == []
    assert later(4)[:2] == ["noted", "ended"]
