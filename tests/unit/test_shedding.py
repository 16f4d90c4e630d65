"""How shares are agreed on with the workers: what the kernel asks, hears, and tells the user."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from history_rows import make_rows

from workbench.engine.telemetry.control_link import ControlLink
from workbench.engine.telemetry.membership import Membership
from workbench.engine.telemetry.step_gate import CANNOT, Gate
from workbench.execution.workers import shedding
from workbench.execution.workers.replacing import listener
from workbench.execution.workers.shedding import Shedding
from workbench.execution.workers.stragglers import Rule
from workbench.history.store import RunHistory
from workbench.shared.events import SHARES, Dealing, Event
from workbench.shared.messages import Happened, Records, Regroup, Told


class Run:
    """As much of a run as is asked for."""

    number, state = 7, "running"

    def __init__(self) -> None:
        self.engines = self.members = (0, 1, 2)
        self.history = RunHistory(range(3))
        self.notes: list[str] = []
        self.plan = SimpleNamespace(on_straggler="shed")

    def called(self, engine: int) -> str:
        return f"Rank {engine}"

    def note(self, text: str) -> None:
        self.notes.append(text)

    def tell(self, event: Event) -> None:
        self.history.event(event)


class Stage:
    """A run, its shedding, and what the engines are told."""

    def __init__(self, healer: object = None) -> None:
        self.run, self.sent = Run(), []
        self.shedding = Shedding(self.run, lambda *one: self.sent.append(one), healer)
        self.step = 0

    def train(self, steps: int, slow_s: float = 0.02, samples: tuple[int, ...] = (8, 8, 8)) -> None:
        rows = make_rows(steps, 3, first=self.step, slow_rank=1, slow_s=slow_s)
        rows["samples"] = samples
        self.step += steps
        for rank in range(3):
            packed = np.ascontiguousarray(rows[:, rank]).tobytes()
            self.shedding.hear(rank, Records(run=7, dropped=0, rows=packed))

    def answer(self, *steps: int, number: int | None = None) -> None:
        for engine, step in enumerate(steps):
            event = Dealing(rank=engine, number=number or self.last["number"], step=step)
            self.shedding.hear(engine, Happened(run=7, event=event))

    @property
    def last(self) -> dict:
        (told,) = {id(told): told for _, told in self.sent[-1:]}.values()
        assert (told.topic, told.run) == (SHARES, 7)
        return told.value


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(shedding, "RULE", Rule(steps=10, seconds=0.1))
    monkeypatch.setattr(shedding, "LOOK_S", 0.0)


def test_all_are_asked_then_told_the_step_after_the_furthest() -> None:
    stage = Stage()
    stage.train(20)
    assert [engine for engine, _ in stage.sent] == [0, 1, 2]
    assert (stage.last["portions"], stage.last["over"]) == ([], False)
    stage.answer(20, 21)
    assert len(stage.sent) == 3  # one has not answered
    stage.answer(20, 21, 20)
    assert [engine for engine, _ in stage.sent[3:]] == [0, 1, 2]
    assert stage.last["step"] == 22
    portions = stage.last["portions"]
    assert sum(portions) == 24
    assert portions[1] < 8
    (change,) = stage.run.history.changes
    assert (change["event"], change["ranks"], change["step"]) == ("shed", [1], 22)
    assert change["shares"] == portions
    assert "after_s" not in change
    (note,) = stage.run.notes
    assert all(told in note for told in ("Rank 1", "2.7", "8 samples"))


def test_what_it_has_brought_is_measured_and_told() -> None:
    stage = Stage()
    stage.train(20)
    stage.answer(20, 20, 20)
    portions = tuple(stage.last["portions"])
    stage.train(1)  # a step of before: it was under way
    asked = len(stage.sent)
    stage.train(20, slow_s=0.0, samples=portions)
    (change,) = stage.run.history.changes
    assert change["before_s"] == pytest.approx(0.036)
    assert change["after_s"] == pytest.approx(0.016)
    assert all(told in stage.run.notes[-1] for told in ("16 ms", "36 ms"))
    assert len(stage.sent) == asked  # all are equally long busy
    stage.train(40, slow_s=-0.007, samples=portions)  # it has recovered
    stage.answer(81, 81, 81)
    assert stage.last["portions"] == [8, 8, 8]
    assert stage.run.history.changes[-1]["ranks"] == []
    assert len(stage.run.notes) == 3  # what is slow, what it brought, that nothing is any more


def test_a_late_answer_is_not_taken_for_another_question() -> None:
    stage = Stage()
    stage.train(20)
    stage.answer(20, 20, 20, number=stage.last["number"] + 1)
    assert len(stage.sent) == 3


def test_where_shares_stay_all_are_let_go_and_nobody_is_asked_again() -> None:
    stage = Stage()
    stage.train(20)
    stage.answer(CANNOT, CANNOT, CANNOT)
    assert stage.last["over"]
    assert len(stage.run.notes) == 1
    stage.train(100)
    assert len(stage.sent) == 6


def test_where_some_have_not_begun_it_is_asked_again() -> None:
    stage = Stage()
    stage.train(20)
    stage.answer(20, CANNOT, 20)
    assert stage.last["over"]
    assert stage.run.notes == []
    stage.train(20)
    assert not stage.last["over"]


def test_a_run_that_is_paused_or_stopped_is_left_alone() -> None:
    stage = Stage()
    stage.run.state = "stopping"
    stage.train(40)
    assert stage.sent == []


def test_other_workers_are_watched_anew() -> None:
    healer = SimpleNamespace(generation=0, is_together=True, members=[0, 1, 2])
    stage = Stage(healer)
    stage.train(20)
    healer.generation, healer.is_together = 1, False
    stage.answer(20, 20, 20)
    assert len(stage.sent) == 3  # the question went with those it was for
    healer.is_together, healer.members = True, [0, 1]
    stage.train(20)
    assert [engine for engine, _ in stage.sent[3:]] == [0, 1]
    assert stage.last["generation"] == 1


def test_who_waits_for_stragglers_listens_to_nothing() -> None:
    run = Run()
    run.plan.on_straggler = "wait"
    assert not hasattr(listener(run, print), "__self__")
    run.plan.on_straggler = "shed"
    assert hasattr(listener(run, print), "__self__")


# -- on an engine ----------------------------------------------------------------------------------


@pytest.fixture
def engine(monkeypatch):
    """Return a function that hands a control link a message, its gate, and what it says."""
    link, said = object.__new__(ControlLink), []
    monkeypatch.setattr(link, "emit", said.append, raising=False)
    run = SimpleNamespace(
        gate=Gate(), membership=Membership(2), spec=SimpleNamespace(run=7),
        departure=SimpleNamespace(answered=lambda: None),
    )  # fmt: skip
    run.gate.deals = True
    run.gate.enter(5)

    def hand(generation=0, number=1, step=-1, portions=(), over=False):
        value = {"generation": generation, "number": number, "step": step}
        value |= {"portions": list(portions), "over": over}
        link._steer(run, Told(run=7, rank=-1, topic=SHARES, value=value))

    return hand, run, said, link


def test_an_engine_answers_with_its_step_and_takes_the_shares(engine) -> None:
    hand, run, said, _ = engine
    hand()
    assert said == [Dealing(rank=2, number=1, step=5)]
    hand(step=6, portions=(3, 1))
    assert run.gate.enter(6)
    assert run.gate.take_portions() == (3, 1)


def test_what_is_meant_for_other_members_is_not_heard(engine) -> None:
    hand, run, said, link = engine
    hand()
    about = {"ranks": (2,), "hosts": ("h",), "past": (), "prefix": "p"}
    link._steer(run, Regroup(run=7, generation=1, places=(2,), **about))
    said.clear()
    hand(step=6, portions=(3, 1))
    hand(number=2)
    assert said == []
    assert run.gate.enter(6)  # and it is not held any more
    assert not run.gate.dealt
    hand(generation=1, number=2)
    assert said == [Dealing(rank=2, number=2, step=6)]
