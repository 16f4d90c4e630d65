import pytest

from workbench.errors import PlanError
from workbench.execution.registry import MissingRunError, Runs


class FakeRun:
    def __init__(self, name):
        self.name, self.color = name, 1

    def __repr__(self):
        return f"<{self.name}>"


def test_runs_are_found_by_name_newest_last():
    runs = Runs()
    assert runs.latest is None
    assert "no runs" in repr(runs)
    first, second = FakeRun("a"), FakeRun("b")
    runs.add(first)
    runs.add(second)
    assert list(runs) == ["a", "b"]
    assert runs["a"] is first
    assert runs.latest is second
    assert "b: <b>" in repr(runs)


def test_the_newest_keeps_the_name_and_older_ones_count_up():
    runs = Runs()
    made = [FakeRun("base") for _ in range(3)]
    for run in made:
        runs.add(run)
    assert list(runs) == ["base@1", "base@2", "base"]
    assert [runs["base@1"], runs["base@2"], runs["base"]] == made
    assert [run.name for run in made] == ["base@1", "base@2", "base"]


def test_an_older_run_that_is_renamed_keeps_its_position():
    runs = Runs()
    made = [FakeRun(name) for name in ("one_device", "mirrored") * 3]
    for run in made:
        runs.add(run)
    assert list(runs.values()) == [runs[at] for at in range(6)] == made
    assert list(runs)[-4:] == ["one_device@2", "mirrored@2", "one_device", "mirrored"]


def test_an_older_run_takes_no_name_that_somebody_has_chosen():
    runs = Runs()
    for name in ("base@2", "base", "base", "base"):
        runs.add(FakeRun(name))
    assert list(runs) == ["base@2", "base@1", "base@3", "base"]


def test_who_looks_while_runs_are_added_sees_what_there_was():
    runs = Runs()
    for name in ("a", "b"):
        runs.add(FakeRun(name))
    seen = []
    for run in runs.values():  # a view's thread looks while the queue's adds
        seen.append(run.name)
        runs.add(FakeRun("b"))
        runs.add(FakeRun("c"))
    assert len(seen) == 2
    assert set(runs) == {"a", "b@1", "b@2", "b", "c@1", "c"}


def test_runs_that_are_forgotten_give_their_names_free():
    runs = Runs()
    runs.add(FakeRun("a"))
    seen = iter(runs)

    runs.clear()

    assert list(seen) == ["a"]
    assert list(runs) == []
    again = FakeRun("a")
    runs.add(again)
    assert runs["a"] is runs.latest is again
    assert again.name == "a"


def test_a_missing_run_is_a_key_error_that_suggests_the_nearest():
    runs = Runs()
    runs.add(FakeRun("mirrored"))
    with pytest.raises(KeyError) as missing:
        runs["miror"]
    assert isinstance(missing.value, PlanError)
    assert missing.value.code == "WB-PLAN-037"
    assert "'mirrored'" in str(missing.value)
    assert runs.get("miror") is None


def test_runs_are_found_by_place_too():
    runs = Runs()
    for name in ("a", "b"):
        runs.add(FakeRun(name))
    assert (runs[-1].name, runs[0].name) == ("b", "a")
    with pytest.raises(PlanError, match="WB-PLAN-115") as told:
        runs[2]
    assert "-2 to 1" in str(told.value)
    with pytest.raises(PlanError, match="WB-PLAN-115"):
        runs[None]
    assert 0 not in runs
    with pytest.raises(PlanError, match="WB-PLAN-114"):
        Runs()[-1]


def test_before_any_run_the_next_step_is_a_first_one():
    with pytest.raises(MissingRunError) as caught:
        Runs()["mirrored"]
    assert caught.value.code == "WB-PLAN-114"
    assert caught.value.allowed is None
    assert caught.value.next_step is not None
