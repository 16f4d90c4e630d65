"""Checkpoints on disk as both sides see them, and what a line may ask for."""

import json

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError, RunError
from workbench.session.checkpoints import apart, claim
from workbench.shared import checkpoints
from workbench.shared.plan import Plan, make_plan

PLACE = {"training": 0, "base": 0, "world_size": 2, "strategy": "mirrored"}


def plan(**given):
    return make_plan(Recipe("wb.fit()"), "mirrored", workers=2, **given)


def stored(folder, step, version=checkpoints.VERSION):
    path = folder / f"step-{step}"
    path.mkdir(parents=True)
    about = {"version": version, "step": step, **PLACE}
    (path / checkpoints.MANIFEST).write_text(json.dumps(about))
    return path


def test_defaults(tmp_path):
    without = plan()
    assert (without.checkpoint, without.checkpoint_every, without.on_failure) == ("", 0, "stop")
    kept = plan(checkpoint=str(tmp_path / "new" / "deep"))
    assert kept.checkpoint == str(tmp_path / "new" / "deep")
    assert (kept.checkpoint_every, kept.on_failure) == (checkpoints.EVERY, "replace")
    assert not (tmp_path / "new").exists()  # nothing is made by planning
    assert Plan.from_wire(json.loads(json.dumps(kept.to_wire()))) == kept


def test_a_path_is_taken_from_the_notebooks_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plan(checkpoint="kept").checkpoint == str(tmp_path / "kept")


def test_what_cannot_be_is_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    for given, words in (
        ({"checkpoint_every": 5}, "WB-PLAN-013"),
        ({"on_failure": "pray"}, r"WB-PLAN-012[\s\S]*stop, continue, replace"),
        ({"on_failure": "replace"}, "WB-PLAN-014"),
        ({"checkpoint": str(file)}, "WB-PLAN-016"),
        ({"checkpoint": str(file / "below")}, "WB-PLAN-017"),
        ({"checkpoint": str(tmp_path), "checkpoint_every": -1}, "WB-PLAN-015"),
        ({"checkpoint": str(tmp_path), "checkpoint_every": 2.5}, "WB-PLAN-015"),
    ):
        with pytest.raises(PlanError, match=words):
            plan(**given)


@pytest.mark.parametrize("place", ["/proc", "/proc/self"])  # not even root may
def test_a_folder_that_may_not_be_written_is_refused(place):
    with pytest.raises(PlanError, match=rf"(?s)WB-PLAN-017.*{place}"):
        plan(checkpoint=f"{place}/kept")


def test_trying_whether_a_folder_can_be_written_leaves_nothing_there(tmp_path):
    assert plan(checkpoint=str(tmp_path / "new" / "deep")).checkpoint
    assert list(tmp_path.iterdir()) == []


def test_the_last_whole_one_is_found(tmp_path):
    assert checkpoints.latest(tmp_path / "nowhere") is None
    stored(tmp_path, 9)
    stored(tmp_path, 120)
    (tmp_path / "step-300.tmp").mkdir()
    (tmp_path / "step-200").mkdir()  # no manifest: not ours
    last = checkpoints.latest(tmp_path)
    assert (last.step, last.path) == (120, str(tmp_path / "step-120"))
    assert [one.step for one in checkpoints.found(tmp_path)] == [9, 120]
    assert checkpoints.at(tmp_path).step == 120
    assert checkpoints.at(tmp_path / "step-9").step == 9


def test_none_and_another_version_are_errors(tmp_path):
    with pytest.raises(RunError, match="WB-RUN-001"):
        checkpoints.at(tmp_path)
    stored(tmp_path, 5, version=99)
    with pytest.raises(RunError, match=r"WB-RUN-002[\s\S]*99"):
        checkpoints.at(tmp_path)


def test_the_folder_of_several_runs_names_theirs(tmp_path):
    stored(tmp_path / "kept" / "mirrored-seed1", 5)
    stored(tmp_path / "kept" / "mirrored-seed0", 5)
    with pytest.raises(RunError, match="WB-RUN-001") as found:
        checkpoints.at(tmp_path / "kept")
    assert "mirrored-seed0, mirrored-seed1" in found.value.seen
    assert str(tmp_path / "kept" / "mirrored-seed0") in found.value.next_step


def test_each_of_several_runs_has_a_folder_of_its_own(tmp_path):
    one = plan(checkpoint=str(tmp_path))
    assert apart([one]) == [one]
    several = apart([one.with_seed(0), one.with_seed(1), plan()])
    assert [each.checkpoint for each in several] == [
        str(tmp_path / "mirrored-seed0"), str(tmp_path / "mirrored-seed1"), "",
    ]  # fmt: skip


def test_a_folder_belongs_to_one_run(tmp_path):
    one = plan(checkpoint=str(tmp_path), name="base")
    claim(one)
    last, earlier = stored(tmp_path, 9), stored(tmp_path, 3)
    with pytest.raises(PlanError, match=r"(?s)WB-PLAN-097.*9.*--checkpoint"):
        claim(one)
    claim(one, resume_from=str(last))
    with pytest.raises(PlanError, match="WB-PLAN-096"):
        claim(one, resume_from=str(earlier))
