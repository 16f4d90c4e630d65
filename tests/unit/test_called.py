"""How the engines of a run are called, in notes and outputs; also after some of them died."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.engines import EngineInfo
from workbench.cluster.processes import Ending
from workbench.cookbook.recipe import Recipe
from workbench.execution.outcome import Names
from workbench.execution.requests import members_of, with_original_ranks
from workbench.execution.run import Run
from workbench.shared.events import CellLeft, Topic
from workbench.shared.members import Member
from workbench.shared.messages import Happened
from workbench.shared.plan import make_plan
from workbench.shared.protocol import RunSpec


def run_on(folder: Path, engines: list[int]) -> Run:
    plan = make_plan(Recipe("wb.fit()"), "mirrored", workers=len(engines))
    return Run(
        plan, number=1, name="r", engines=engines, devices=["cpu"] * len(engines), folder=folder
    )


def task_of(names: dict[int, Member], **more: Any) -> Any:
    return SimpleNamespace(ids=list(names), names=Names(list(names), names), **more)


def test_workers_have_ranks_replicas_are_several_and_servers_have_names(tmp_path):
    assert run_on(tmp_path, [3, 5]).called(5) == "Rank 1 (engine 5)"
    assert run_on(tmp_path, [3, 3, 3]).called(3) == "Replicas 0-2 (engine 3)"
    run = run_on(tmp_path, [3, 5])
    assert run.called(7) == "Engine 7"
    run.task = task_of(
        {3: Member.of_ranks(0), 5: Member.of_ranks(1), 7: Member.helper("server s0")}
    )
    assert run.called(7) == "Server s0 (engine 7)"


@pytest.mark.parametrize(
    ("engines", "who"),
    [([3, 5], "Rank 0 (engine 3)"), ([3, 3], "Replicas 0-1 (engine 3)")],
)
def test_a_death_is_told_in_a_sentence(tmp_path, engines, who):
    run = run_on(tmp_path, engines)
    run.open_board(lambda engine, message: None, run.members)
    run.died(EngineInfo(3, "u", exit=Ending("SIGKILL")))
    (note,) = run.history.story.notes
    assert all(told in note for told in (who, "SIGKILL"))
    run.note("It was killed, the others go on.", [3])
    assert run.history.story.notes == ["It was killed, the others go on."]


def test_that_a_model_was_trained_before_is_no_matter_of_words(tmp_path):
    run = run_on(tmp_path, [3, 5])
    run.note("The model was trained by an earlier run.")
    assert not run.trained_before
    assert not run.meta()["trained_before"]
    run.history.hear("warning", {"rank": 0, "text": "Hm.", "topic": Topic.TRAINED_BEFORE})
    assert run.trained_before
    assert run.meta()["trained_before"]


def test_fewer_workers_are_numbered_anew_and_called_as_before():
    specs = {
        5: RunSpec("run", 0, 2, (5, 9), "cpu"),
        9: RunSpec("run", 1, 2, (5, 9), "cpu"),
        4: RunSpec("run", 2, 2, (5, 9), "cpu", role="server", part="server s0"),
    }
    ranked = with_original_ranks(specs, [3, 5, 9])
    assert [one.rank for one in ranked.values()] == [0, 1, 2]
    headings = {engine: one.heading for engine, one in members_of(ranked).items()}
    assert headings == {5: "rank 1 · cpu", 9: "rank 2 · cpu", 4: "server s0"}
    assert members_of(specs)[5].heading == "rank 0 · cpu"


def test_who_failed_among_fewer_workers_is_left_to_clear_away(tmp_path):
    run, left = run_on(tmp_path, [3, 5]), []
    run.go_on(2, [5], "", 0)
    run.task = task_of(
        {5: "rank 1"}, end_soon=lambda but: left.append(but), heard=lambda _, one: one
    )
    run.receive(Happened(run=2, event=CellLeft(rank=0, status="error")))
    assert left == [5]
