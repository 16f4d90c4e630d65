"""What engines do, in words."""

from __future__ import annotations

import pytest

from workbench.session.status import Scene, doing
from workbench.shared.members import Member
from workbench.shared.messages import Whereabouts

WAITS = Whereabouts(state="waits", waits_in="in all_reduce")
HELD = Whereabouts(state="held", waits_in="in a pause")
PAUSED = Whereabouts(state="paused")
MEMBERS = {0: Member.of_ranks(0), 1: Member.of_ranks(1), 2: Member.helper("server s0")}


@pytest.mark.parametrize(
    ("run_state", "places", "words"),
    [
        ("", {}, ["in a cell", "in a cell", "in a cell", "idle"]),
        (
            "running",
            {},
            ["training as rank 0", "training as rank 1", "working as server s0", "idle"],
        ),
        ("running", {0: WAITS}, ["waiting in all_reduce", "training as rank 1", None, "idle"]),
        ("running", {1: PAUSED}, ["training as rank 0", "paused at a debugger", None, "idle"]),
        ("paused", {0: WAITS}, ["paused", "paused", None, "idle"]),
        ("running", {0: HELD}, ["paused", "training as rank 1", None, "idle"]),
        ("starting", {}, ["about to train as rank 0", "about to train as rank 1", None, "idle"]),
    ],
)
def test_engines_say_what_they_do(
    run_state: str, places: dict[int, dict[str, str]], words: list[str | None]
) -> None:
    scene = Scene(MEMBERS, run_state, places)
    for engine, expected in enumerate(words):
        state = "busy" if engine in MEMBERS else "idle"
        if expected is not None:
            assert doing(engine, state, "", scene, starting=False)[1] == expected


def test_dead_and_starting_engines_say_so() -> None:
    nothing = Scene({}, "", {})
    assert doing(0, "dead", "SIGKILL", nothing, starting=False) == ("dead", "dead (SIGKILL)")
    assert doing(0, "dead", "SIGKILL", nothing, starting=True) == ("starting", "starting")
    assert doing(0, "busy", "", nothing, starting=False) == ("busy", "busy")


def test_who_serves_is_told_by_the_part_it_takes_and_not_by_its_name() -> None:
    members = {0: Member.helper("rank and file"), 1: Member.of_ranks(0, 3)}
    scene = Scene(members, "running", {})
    assert doing(0, "busy", "", scene, starting=False) == ("serving", "working as rank and file")
    assert doing(1, "busy", "", scene, starting=False) == ("training", "training as replicas 0-3")
