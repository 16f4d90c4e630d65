"""A run keeps its colour, in every view."""

from types import SimpleNamespace

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.execution.registry import Runs
from workbench.history.analysis.comparison import _colored
from workbench.history.analysis.rows import RUN_COLORS
from workbench.shared.plan import make_plan
from workbench.views.theme import run_color


def plan(strategy="mirrored", **settings):
    workers = 1 if strategy == "one_device" else 2
    return make_plan(Recipe("wb.fit()"), strategy, workers=workers, **settings)


def test_runs_have_colours_of_their_own_and_seeds_of_a_plan_share_one() -> None:
    runs = Runs()
    assert runs.color(plan("one_device")) == 0
    first = [runs.color(plan().with_seed(seed)) for seed in range(3)]
    assert first == [1, 1, 1]
    assert runs.color(plan("gossip")) == 2
    assert runs.color(plan().with_seed(0)) == 3, "the same once more is another row"
    assert len({run_color(number) for number in range(RUN_COLORS)}) == RUN_COLORS


def test_a_row_gives_way_only_to_an_earlier_one_of_its_colour() -> None:
    from dataclasses import make_dataclass

    row = make_dataclass("Row", ["color"])
    assert [r.color for r in _colored([row(3), row(0), row(3), row(5)], 1)] == [3, 0, 1, 5]
    assert [r.color for r in _colored([row(None), row(None), row(None)], 1)] == [1, 0, 2]


def test_a_run_that_is_over_can_be_taken_off_the_list() -> None:
    runs = Runs()
    going = SimpleNamespace(name="a", color=1, is_over=False, state="running")
    over = SimpleNamespace(name="b", color=2, is_over=True, state="finished")
    runs.add(going)
    runs.add(over)
    runs.remove("b")
    assert list(runs) == ["a"]
    with pytest.raises(PlanError, match="WB-PLAN-113"):
        runs.remove("a")
