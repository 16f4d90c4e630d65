"""What the kernel makes of engines that are told to end."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from notebook_shell import soon

from workbench.errors import RunError
from workbench.execution.workers.departures import Departures, reason_of, told_words, way_of
from workbench.shared.events import Event, ToldToEnd
from workbench.shared.messages import CellOutcome, HaltAt

SIGTERM = ToldToEnd(rank=1, reason="SIGTERM")
HOST = ToldToEnd(rank=1, reason="notice: /run/notice is there", seconds=120.0, host=True)


class FakeRun:
    def __init__(self) -> None:
        self.number, self.members, self.engines = 7, (0, 1, 2), (0, 1, 2)
        self.state, self.is_over, self.over = "running", False, threading.Event()
        self.notes: list[str] = []
        self.done: list[Any] = []
        self.events: list[dict[str, Any]] = []
        self.history = SimpleNamespace(snapshot=lambda: SimpleNamespace(step=40))
        self.task: Any = None

    def called(self, engine: int) -> str:
        return f"Rank {engine}"

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tell(self, event: Event) -> None:
        self.events.append({"event": event.name, **event.to_wire()})

    def advance(self, event: str) -> None:
        self.done.append(event)

    def halt(self, purpose: str) -> None:
        self.done.append(purpose)


class FakeHealer:
    def __init__(self, run: FakeRun) -> None:
        self.can_regroup, self.run = True, run
        self.coming: set[int] = set()
        self.left: list[int] = []
        self.admitted: list[int] = []

    def expects(self, engine: int) -> bool:
        return engine in self.coming

    def dismiss(self, engines: list[int], why: str) -> None:
        if len(self.left) + len(engines) == len(self.run.members):
            raise RunError("nobody is left", code="WB-RUN-141")
        self.left += engines
        self.run.events.append({"event": "left", "ranks": engines, "reason": why})

    def admit(self, engines: list[int]) -> None:
        self.admitted += engines


class FakeLaunch:
    def __init__(self, on_failure: str = "stop", *, heals: bool = False, spare: Any = ()) -> None:
        self.run, self.spare = FakeRun(), spare
        self.plan = SimpleNamespace(on_failure=on_failure, checkpoint="kept")
        self.healer = FakeHealer(self.run) if heals else None
        self.sent: list[tuple[int, HaltAt]] = []
        self.known = {i: SimpleNamespace(state="busy") for i in range(4)}
        router = SimpleNamespace(send=lambda engine, message: self.sent.append((engine, message)))
        self.pool = SimpleNamespace(engines=SimpleNamespace(router=router, engines=self.known))

    def spares(self, engine: int) -> bool:
        return engine in self.spare

    def task(self, **statuses: Any) -> Any:
        failed = any(status == "error" for status in statuses.values())
        return SimpleNamespace(
            outcomes={int(k[1:]): CellOutcome(status=v) for k, v in statuses.items()},
            failure=lambda: RunError("it failed", code="WB-RUN-066") if failed else None,
        )


def made(*args: Any, **about: Any) -> tuple[Departures, FakeLaunch]:
    launch: Any = FakeLaunch(*args, **about)
    return Departures(launch), launch


@pytest.mark.parametrize(
    ("regroups", "works", "spared", "way"),
    [
        (True, True, False, "regroup"),
        (False, True, False, "together"),
        (False, False, False, "together"),
        (False, True, True, "alone"),
        (False, False, True, "at once"),
    ],
)
def test_how_an_engine_leaves(*, regroups: bool, works: bool, spared: bool, way: str) -> None:
    assert way_of(regroups=regroups, works=works, spared=spared) == way


@pytest.mark.parametrize(
    ("on_failure", "state"), [("stop", "stop"), ("replace", "recover"), ("continue", "recover")]
)
def test_all_stop_at_a_step_once_whoever_is_told(on_failure: str, state: str) -> None:
    departures, launch = made(on_failure)
    departures.hear(1, SIGTERM)
    departures.hear(1, SIGTERM)  # said again
    departures.hear(2, HOST)
    assert launch.run.done == [state, "leave"]
    assert launch.run.notes == [told_words("Rank 1", SIGTERM), told_words("Rank 2", HOST)]
    left = departures.left(launch.task(_0="ok", _1="ok", _2="ok"))
    assert left == {1: "SIGTERM", 2: "notice: /run/notice is there, 120 s left"}


def test_a_run_that_does_not_go_on_ends_in_what_was_told() -> None:
    departures, launch = made("stop")
    departures.hear(1, SIGTERM)
    launch.run.state = "stopping"
    left = departures.left(launch.task(_0="ok", _1="ok", _2="ok"))
    error = departures.settle(left)
    assert error is not None
    assert error.code == "WB-RUN-149"
    assert all(told in error.what for told in ("Rank 1", "SIGTERM", "40"))
    assert "wb.resume('kept')" in error.next_step
    (event,) = launch.run.events
    assert (event["ranks"], event["step"], event["workers"]) == ([1], 40, 2)
    assert event["reason"] == "SIGTERM"


def test_a_run_that_was_to_go_on_never_looks_as_if_it_had_ended_well() -> None:
    """Where nothing can go on after all, what was told is the error; a Stop of its user is none."""
    departures, launch = made("replace")
    departures.hear(1, SIGTERM)
    launch.run.state = "recovering"
    left = departures.left(launch.task(_0="ok", _1="died", _2="ok"))  # others had done without it
    assert left == {1: "SIGTERM"}
    assert departures.settle(left) is not None
    launch.run.state = "stopping"
    assert departures.settle(left) is None


def test_what_failed_meanwhile_is_the_error() -> None:
    departures, launch = made("stop")
    departures.hear(1, SIGTERM)
    assert departures.left(launch.task(_0="error", _1="ok", _2="ok")) == {}
    assert departures.settle({}) is None


@pytest.mark.parametrize(("engine", "purpose"), [(1, "leave_alone"), (3, "leave_now")])
def test_who_is_not_needed_leaves_without_the_others(engine: int, purpose: str) -> None:
    departures, launch = made(spare={1, 3})
    departures.hear(engine, SIGTERM)
    assert launch.sent == [(engine, HaltAt(run=7, purpose=purpose, step=-1))]  # type: ignore[arg-type]
    assert launch.run.done == []
    assert [one["ranks"] for one in launch.run.events] == [[1] if engine == 1 else []]


def test_where_workers_regroup_a_fresh_engine_comes_once_the_process_has_ended() -> None:
    departures, launch = made("heal", heals=True)
    launch.run.task = object()
    assert launch.healer is not None
    departures.hear(1, SIGTERM)
    assert (launch.healer.left, launch.healer.admitted, launch.run.done) == ([1], [], [])
    launch.known[1].state = "dead"
    assert soon(lambda: launch.healer.admitted == [1])


def test_none_comes_where_the_host_goes() -> None:
    departures, launch = made("heal", heals=True)
    before = threading.active_count()
    departures.hear(1, HOST)
    assert threading.active_count() == before
    assert "host" in launch.run.notes[-1]


def test_the_last_one_stops_at_a_step() -> None:
    departures, launch = made("heal", heals=True)
    for engine in (0, 1, 2):
        departures.hear(engine, HOST)
    assert launch.healer is not None
    assert launch.healer.left == [0, 1]
    assert launch.run.done == ["recover", "leave"]


def test_where_not_all_train_yet_they_stop_at_a_step() -> None:
    departures, launch = made("heal", heals=True)
    assert launch.healer is not None
    launch.healer.can_regroup = False
    departures.hear(1, SIGTERM)
    assert launch.run.done == ["recover", "leave"]


def test_who_has_yet_to_come_ends_at_once() -> None:
    departures, launch = made("heal", heals=True)
    assert launch.healer is not None
    launch.healer.coming.add(1)
    departures.hear(1, SIGTERM)
    assert launch.sent == [(1, HaltAt(run=7, purpose="leave_now", step=-1))]
    assert launch.run.events == []  # it had taken no part


def test_a_run_that_stops_or_is_over_is_left_alone() -> None:
    departures, launch = made()
    launch.run.state = "stopping"
    departures.hear(1, SIGTERM)
    launch.run.is_over = True
    departures.hear(2, SIGTERM)
    assert launch.run.done == []
    assert len(launch.run.notes) == 1
    assert departures.left(launch.task(_0="ok", _1="ok", _2="ok")) == {}


def test_what_was_told_says_how_much_time_is_left() -> None:
    assert reason_of(HOST) == "notice: /run/notice is there, 120 s left"
    assert reason_of(SIGTERM) == "SIGTERM"
