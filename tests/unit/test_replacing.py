"""When a slow worker is replaced, in which order, and what is told of it."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from history_rows import make_rows
from notebook_shell import soon

from workbench.errors import RunError
from workbench.execution.workers import replacing, shedding
from workbench.execution.workers.replacing import MOST, Replacing, listener
from workbench.execution.workers.stragglers import Rule
from workbench.history.store import RunHistory
from workbench.shared.events import Joined
from workbench.shared.messages import Records


class Healer:
    """As much of one as is asked for: workers leave and come at once."""

    def __init__(self, run: SimpleNamespace, did: list[tuple[object, ...]]) -> None:
        self.generation, self.members, self.is_together = 0, [0, 1, 2], True
        self.run, self.did, self.error = run, did, None

    def dismiss(self, engines: list[int], why: str) -> None:
        if self.error is not None:
            raise self.error
        self.did.append(("dismiss", *engines, why))
        self.members = [one for one in self.members if one not in engines]
        self.generation += 1

    def admit(self, engines: list[int]) -> None:
        self.did.append(("admit", *engines))
        self.members = sorted({*self.members, *engines})
        self.generation += 1
        self.run.tell(Joined(ranks=engines, step=70, seconds=0.05, workers=3))


class Stage:
    """A run, and what is done about its slow worker."""

    def __init__(self) -> None:
        self.did: list[tuple[object, ...]] = []
        self.notes: list[str] = []
        self.run = run = SimpleNamespace(
            engines=(0, 1, 2), members=(0, 1, 2), number=7, state="running", is_over=False,
            history=RunHistory(range(3)), plan=SimpleNamespace(on_straggler="replace"),
            task=SimpleNamespace(unfinished=list), called=lambda engine: f"Rank {engine}",
            note=lambda text, deaths=(): self.notes.append(text),
        )  # fmt: skip
        run.tell = run.history.event
        self.healer = Healer(run, self.did)
        restart = lambda engine: self.did.append(("restart", engine))  # noqa: E731
        self.replacing = Replacing(run, lambda *unused: None, self.healer, restart)
        self.step = 0

    def train(self, steps: int, slow: int | None = 1) -> None:
        rows = make_rows(steps, 3, first=self.step, slow_rank=slow, slow_s=0.02)
        self.step += steps
        for rank in range(3):
            packed = rows[:, rank].tobytes()
            self.replacing.hear(rank, Records(run=7, dropped=0, rows=packed))

    def is_done(self, times: int = 1) -> bool:
        return soon(lambda: self.did.count(("admit", 1)) == times)


@pytest.fixture
def stage(monkeypatch) -> Stage:
    monkeypatch.setattr(replacing, "PATIENT", Rule(steps=10, seconds=0.1))
    monkeypatch.setattr(shedding, "LOOK_S", 0.0)
    return Stage()


def test_the_slow_one_leaves_its_engine_is_started_anew_and_comes(stage) -> None:
    stage.train(20)
    assert stage.is_done()
    assert [one[:2] for one in stage.did] == [("dismiss", 1), ("restart", 1), ("admit", 1)]
    assert "2.7" in stage.did[0][2]
    stage.train(20, slow=None)
    (_, change) = stage.run.history.changes
    assert (change["event"], change["ranks"], change["step"]) == ("replaced", [1], 70)
    assert change["ratio"] == pytest.approx(32 / 12)
    assert change["before_s"] == pytest.approx(0.036)
    assert change["after_s"] == pytest.approx(0.016)
    assert all(told in stage.notes[0] for told in ("Rank 1", "2.7"))
    assert all(told in stage.notes[1] for told in ("16 ms", "36 ms"))


def test_who_is_slow_in_a_fresh_engine_too_stays(stage) -> None:
    stage.train(20)
    assert stage.is_done()
    stage.train(20)
    told = len(stage.notes)
    assert "replaced" in stage.notes[-1]
    stage.train(100)
    assert len(stage.notes) == told
    assert len(stage.did) == 3


def test_a_run_is_given_only_so_many(stage) -> None:
    stage.replacing._replaced = [7, 8, 9]
    assert len(stage.replacing._replaced) == MOST
    stage.train(20)
    assert stage.did == []
    assert "replaced" in stage.notes[0]


def test_nobody_is_replaced_where_all_are_slow(stage) -> None:
    stage.train(20, slow=None)
    rows = make_rows(200, 3, first=20, compute_s=0.5)
    for rank in range(3):
        packed = rows[:, rank].tobytes()
        stage.replacing.hear(rank, Records(run=7, dropped=0, rows=packed))
    assert stage.did == []


def test_what_cannot_be_is_told_and_the_others_go_on(stage) -> None:
    stage.healer.error = RunError("It trains no more.", code="WB-RUN-143")
    stage.train(20)
    assert soon(lambda: stage.notes)
    assert all(told in stage.notes[0] for told in ("Rank 1", "It trains no more."))


def test_a_run_that_ends_meanwhile_is_left_alone(stage) -> None:
    stage.run.task.unfinished = lambda: [1]
    stage.train(20)
    assert soon(lambda: stage.did)
    stage.run.is_over = True
    assert soon(lambda: not any(t.name == "workbench-replace" for t in threading.enumerate()))
    assert len(stage.did) == 1


def test_a_job_has_nobody_to_spare_and_says_so(stage) -> None:
    listener(stage.run, print)
    (note,) = stage.notes
    assert "--on-straggler replace" in note
