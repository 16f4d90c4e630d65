"""The panel's recipes without a browser: the list, a function's parameters, a framework."""

from __future__ import annotations

import json
import queue

import pytest
from panel_choosing import choosing, do

from workbench.cookbook import builtin
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.notebook.recipes import recipe, recipes


@pytest.fixture
def panel(monkeypatch):
    with choosing(monkeypatch) as panel:
        yield panel


@pytest.fixture
def tiny():
    @recipe
    def tiny(lr=0.1, width=16, nesterov=False, name="a", sizes=(1, 2)):
        "One layer."
        wb.fit(None, None, optimizer=lr)  # noqa: F821

    yield tiny
    recipes.forget("tiny")


def test_the_list_has_cells_newest_first_functions_and_built_ins(panel, tiny, monkeypatch):
    from workbench.notebook.session import session

    old, new = Recipe("# old\n", origin="In[3]"), Recipe("x = 1\n", origin="In[4]")
    monkeypatch.setattr(session, "recipes", {"a": old, "b-seed0": new, "b-seed1": new})
    groups = panel.wire()["recipe"]["groups"]
    names = [[recipe["name"] for recipe in group["recipes"]] for group in groups]
    assert names == [["b-seed1", "a"], ["tiny"], builtin.names()]
    assert [group["title"] for group in groups[1:]] == ["Functions", "Built-in"]
    assert groups[0]["recipes"][1]["summary"] == "old"
    do(panel, "recipe.pick", name="a")
    assert panel.wire()["recipe"]["picked"]["source"] == "# old"
    assert panel.wire()["recipe"]["selected"] == "a"


def test_the_last_cell_is_trained_where_nothing_was_picked(panel):
    assert panel.wire()["recipe"]["selected"] == builtin.names()[0]
    panel.session.recipe = Recipe("wb.fit()", origin="In[9]", framework="tensorflow")
    assert panel.wire()["recipe"]["picked"]["source"] == "wb.fit()"
    assert panel.wire()["strategies"]["framework"] == "tensorflow"


def test_a_functions_parameters_reach_its_plan_and_its_cell(panel, tiny):
    do(panel, "recipe.pick", name="tiny")
    for name, value in (("lr", "1"), ("nesterov", "true"), ("name", "b c"), ("sizes", "(3,)")):
        do(panel, "recipe.parameter", name=name, value=value)
    (plan,) = panel.choice.plans(panel.session)
    assert plan.recipe.parameters == {
        "lr": 1.0, "width": 16, "nesterov": True, "name": "b c", "sizes": (3,),
    }  # fmt: skip
    answer, _ = do(panel, "recipe.cell")
    assert "tiny(lr=1.0, width=16, nesterov=True, name='b c', sizes=(3,))" in answer["cells"][0]
    do(panel, "recipe.parameter", name="width", value="1.5")
    shown = {p["name"]: p for p in panel.wire()["recipe"]["picked"]["parameters"]}
    assert "as 16" in shown["width"]["error"]
    assert (shown["width"]["value"], shown["width"]["default"]) == ("1.5", "16")
    with pytest.raises(PlanError, match=r"width.*WB-PLAN-064"):
        panel.choice.plans(panel.session)
    do(panel, "recipe.pick", name="digits_mlp")
    assert panel.choice.plans(panel.session)
    do(panel, "recipe.pick", name="tiny")
    do(panel, "recipe.parameter", name="lr", value=None)
    shown = {p["name"]: p for p in panel.wire()["recipe"]["picked"]["parameters"]}
    assert (shown["lr"]["value"], shown["lr"]["given"]) == ("0.1", False)


def test_a_recipe_brings_its_framework_and_is_not_run_under_the_other(panel, monkeypatch):
    from workbench.notebook.session import session

    cell = Recipe("import keras\nmodel.fit()", origin="In[2]", framework="tensorflow")
    monkeypatch.setattr(session, "recipes", {"k": cell})
    do(panel, "recipe.pick", name="k")
    assert panel.wire()["strategies"]["framework"] == "tensorflow"
    assert panel.wire()["strategies"]["ready"]
    do(panel, "strategies.framework", name="torch")
    assert "TensorFlow" in panel.wire()["recipe"]["problem"]
    assert not panel.wire()["strategies"]["ready"]
    with pytest.raises(PlanError, match=r"TensorFlow.*WB-PLAN-066"):
        panel.choice.plans(panel.session)


def test_a_recipe_that_is_gone_is_said_and_the_panel_goes_on(panel, tiny):
    do(panel, "recipe.pick", name="tiny")
    recipes.forget("tiny")
    wire = panel.wire()
    assert "no recipe" in wire["recipe"]["problem"].lower()
    assert not wire["strategies"]["ready"]
    do(panel, "recipe.pick", name="digits_cnn")
    assert panel.wire()["strategies"]["ready"]
    recipes.register(tiny)


def test_a_job_is_written_for_each_strategy_and_seed(panel, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    do(panel, "recipe.pick", name="digits_mlp")
    do(panel, "strategies.toggle", strategy="sharded")
    do(panel, "strategies.common", name="seeds", value="2")
    answers = queue.Queue()
    panel.do("recipe.job", {}, lambda value, **_: answers.put(value))
    written = answers.get(timeout=60)["folders"]
    assert sorted(one.name for one in tmp_path.iterdir()) == sorted(written)
    seeds = [json.loads((tmp_path / one / "run.json").read_text())["seed"] for one in written]
    assert seeds == [0, 1, 0, 1]


def test_each_of_several_numbers_of_workers_is_a_job(panel, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    do(panel, "recipe.pick", name="digits_mlp")
    do(panel, "strategies.common", name="workers", value="1,2")
    answers = queue.Queue()
    panel.do("recipe.job", {}, lambda value, **_: answers.put(value))
    written = answers.get(timeout=60)["folders"]
    assert written == ["job-mirrored-n1", "job-mirrored-n2"]
    plans = [json.loads((tmp_path / one / "run.json").read_text()) for one in written]
    assert [one["plan"]["workers"] for one in plans] == [1, 2]


def test_sizes_of_a_built_in_recipe_reach_its_plan_and_bad_ones_are_said_at_once(panel):
    do(panel, "recipe.pick", name="char_transformer")
    shown = panel.wire()["recipe"]["picked"]["parameters"]
    assert [one["name"] for one in shown] == ["layers", "width", "heads", "context", "lr"]
    do(panel, "recipe.parameter", name="heads", value="6")
    assert "WB" not in panel.wire()["recipe"]["problem"]
    assert "width=64, heads=6" in panel.wire()["recipe"]["problem"]
    assert panel.wire()["recipe"]["picked"] is not None
    with pytest.raises(PlanError, match="WB-PLAN-267"):
        panel.choice.plans(panel.session)
    do(panel, "recipe.parameter", name="width", value="96")
    assert panel.wire()["recipe"]["problem"] == ""
    (plan,) = panel.choice.plans(panel.session)
    assert (plan.recipe.parameters["width"], plan.recipe.parameters["heads"]) == (96, 6)
    answer, _ = do(panel, "recipe.cell")
    assert "char_transformer(layers=2, width=96, heads=6," in answer["cells"][0]
