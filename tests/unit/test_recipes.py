"""What can be trained by its name: functions, cells, built-in recipes."""

from __future__ import annotations

import ast
import linecache
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import workbench as wb
from workbench import catalog
from workbench.cookbook import builtin, transformer
from workbench.cookbook.recipe import (
    Recipe,
    framework_of,
    is_plain,
    recipe_of,
    undecorated,
)
from workbench.data import corpus_arrays
from workbench.errors import DataError, PlanError
from workbench.execution import registry
from workbench.execution.requests import ARGS
from workbench.magics import _complete
from workbench.notebook.recipes import Recipes, recipes
from workbench.notebook.session import session
from workbench.notebook.values import to_a_cell
from workbench.shared.plan import Plan, cell_of, make_plan, plan_of
from workbench.shared.run_request import from_arguments, parse_cell_line


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    """No function is registered, no cell was run."""
    monkeypatch.setattr(recipes, "_functions", {})
    monkeypatch.setattr(session, "recipes", {})
    monkeypatch.setattr(registry, "runs", registry.Runs())


def ran(name: str, source: str, framework: str = "torch") -> None:
    """Have a run of that name."""
    plan = make_plan(Recipe(source, 2, "In[7]"), "mirrored", workers=1, framework=framework)
    run: Any = SimpleNamespace(name=name, plan=plan, color=1)
    registry.runs.add(run)
    session.recipes[name] = replace(plan.recipe, framework=framework)


# -- functions ------------------------------------------------------------------------------------


def test_a_function_is_registered_and_stays_a_function() -> None:
    @wb.recipe
    def tiny(lr=0.1, *, width=8):
        """Learn a little.

        More about it.
        """
        import torch

        return lr, width, torch

    found = wb.recipes["tiny"]
    assert (found.name, found.origin, found.framework) == ("tiny", "function", "torch")
    assert found.summary == "Learn a little."
    assert found.parameters == {"lr": 0.1, "width": 8}
    assert found.source.startswith("def tiny(lr=0.1, *, width=8):\n")
    assert tiny.__name__ == "tiny"
    assert found.call(f"*{ARGS}") == "tiny(*_wb_args, lr=0.1, width=8)"


def test_a_recipe_may_have_a_name_and_a_summary_of_its_own() -> None:
    @wb.recipe(
        name="a longer name",
        summary="what it is",
    )
    def short():
        pass

    assert wb.recipes["a longer name"].summary == "what it is"
    assert wb.recipes["a longer name"].source == "def short():\n    pass\n"
    assert "short" not in wb.recipes


def test_other_decorators_stay() -> None:
    source = "@jit\n@wb.recipe(\n    name='x',\n)\n@other.thing\ndef f():\n    pass\n"
    assert undecorated(source) == "@jit\n@other.thing\ndef f():\n    pass\n"
    assert undecorated("not python (") == "not python ("


def test_defined_again_a_function_takes_its_place() -> None:
    def make(value: int) -> Any:
        source = f"def again(x={value}):\n    return x\n"
        namespace: dict[str, Any] = {"__name__": "notebook"}
        file = f"<cell {value}>"
        linecache.cache[file] = (len(source), None, source.splitlines(True), file)
        exec(compile(source, file, "exec"), namespace)
        return namespace["again"]

    wb.recipe(make(1))
    wb.recipe(make(2))
    assert wb.recipes["again"].parameters == {"x": 2}


def test_a_name_has_one_function() -> None:
    @wb.recipe
    def one():
        pass

    with pytest.raises(PlanError, match=r"WB-PLAN-111[\s\S]*one"):

        @wb.recipe(name="one")
        def two():
            pass

    wb.recipes.forget("one")
    assert "one" not in wb.recipes
    with pytest.raises(PlanError, match=r"recipe.*WB-PLAN-037"):
        wb.recipes.forget("one")


def closure() -> Any:
    captured = 5

    def inner():
        return captured

    return inner


async def waits():
    pass


def yields():
    yield 1


def needs(data, lr=0.1):
    pass


@pytest.mark.parametrize(
    ("function", "says"),
    [
        (5, r"WB-PLAN-028[\s\S]*'int'"),
        (print, "WB-PLAN-028"),
        (Recipe, "WB-PLAN-028"),
        (lambda: 1, "WB-PLAN-035"),
        (closure(), r"WB-PLAN-036[\s\S]*captured"),
        (waits, "WB-PLAN-029"),
        (yields, "WB-PLAN-029"),
        (needs, r"WB-PLAN-031[\s\S]*data[\s\S]*needs\(data"),
        (eval("lambda: 1"), "WB-PLAN-034"),
    ],
)
def test_what_is_no_recipe_is_refused_with_the_cure(function: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        wb.recipe(function)
    assert list(wb.recipes) == builtin.names()


@pytest.mark.parametrize("name", ["-x", " a", "a\nb", "#1", "%x"])
def test_a_name_can_stand_on_a_line(name: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-030"):
        wb.recipe(name=name)(yields_nothing)


def yields_nothing(lr=0.1, shape=(1, 2), odd=object()):  # noqa: B008
    return lr, shape, odd


def test_parameters_are_set_by_name_and_travel() -> None:
    found = recipe_of(yields_nothing)
    assert found.parameters == {"lr": 0.1, "shape": (1, 2)}  # an object has no source
    other = found.with_parameters(lr=0.5)
    assert (found.parameters["lr"], other.parameters["lr"]) == (0.1, 0.5)
    assert found.digest != other.digest
    plan = make_plan(other, "mirrored", workers=1)
    assert Plan.from_wire(plan.to_wire()) == plan
    with pytest.raises(PlanError, match=r"WB-PLAN-037[\s\S]*'lr'"):
        found.with_parameters(rl=1)
    with pytest.raises(PlanError, match="WB-PLAN-033"):
        found.with_parameters(lr=object())


def test_plain_values_are_those_whose_source_gives_them_back() -> None:
    assert all(map(is_plain, [1, -2.5, "a'b", None, True, [1, (2,)], {"a": {3}}]))
    assert not any(map(is_plain, [float("nan"), float("inf"), object(), print, [object()]]))


@pytest.mark.parametrize(
    ("source", "framework"),
    [
        ("import torch", "torch"),
        ("def f():\n    from torch import nn", "torch"),
        ("import keras", "tensorflow"),
        ("from tensorflow import keras\nimport keras", "tensorflow"),
        ("import torch\nimport keras", ""),
        ("import torchless\nx = 'import torch'", ""),
    ],
)
def test_the_framework_is_what_a_source_imports(source: str, framework: str) -> None:
    assert framework_of(source) == framework


# -- parameters of built-in recipes ---------------------------------------------------------------

LINE = "mirrored --recipe char_transformer -p layers=4 -p width=128 --parameter heads=8"


def plan_of_line(line: str) -> Plan:
    asked = parse_cell_line(line)
    recipe = wb.recipes.find(asked.recipe or "", asked.framework or "")
    return plan_of(asked, recipe, framework="torch", workers=2)


def test_a_line_python_and_the_mapping_set_the_same_parameters() -> None:
    plan = plan_of_line(LINE)
    sizes = {"layers": 4, "width": 128, "heads": 8, "context": 64, "lr": 3e-3}
    assert plan.recipe.parameters == sizes
    assert "char_transformer(layers=4, width=128, heads=8, context=64, lr=0.003)" in cell_of(plan)
    given = {"layers": 4, "width": 128, "heads": 8}
    asked = from_arguments("mirrored", {"parameters": given})
    python = plan_of(asked, wb.recipes["char_transformer"], framework="torch", workers=2)
    made = wb.recipes["char_transformer"].with_parameters(**given)
    assert python == plan
    assert make_plan(made, "mirrored", workers=2) == plan
    assert Plan.from_wire(plan.to_wire()) == plan
    assert plan.recipe.digest != wb.recipes["char_transformer"].digest


def test_parameters_reach_a_job(tmp_path: Path) -> None:
    recipe = wb.recipes["recommender"]
    folder = wb.job(
        recipe, tmp_path / "job", strategy="parameter_server", workers=2,
        parameters={"rows": 5000, "sparse": "true"},
    )  # fmt: skip
    text = (folder / "train.py").read_text()
    assert text.endswith("recommender(rows=5000, dim=8, sparse=True, lr=0.3, samples=200000)\n")


def test_the_parameters_of_both_frameworks_are_the_same_but_for_sparse_gradients() -> None:
    """Keras' embeddings have sparse gradients anyway."""
    for name in ("char_transformer", "recommender", "tissue_cnn", "fraud_mlp"):
        torch, keras = (builtin.lookup(name, one).parameters for one in catalog.FRAMEWORKS)
        torch.pop("sparse", None)
        assert torch == keras
    assert "layers=2, width=64" in repr(wb.recipes)


@pytest.mark.parametrize("framework", catalog.FRAMEWORKS)
@pytest.mark.parametrize(
    ("recipe", "given", "says"),
    [
        (
            "char_transformer",
            "-p width=60 -p heads=8",
            r"WB-PLAN-267[\s\S]*heads=6, or -p width=64",
        ),
        ("char_transformer", "-p layers=0", r"layers[\s\S]*WB-PLAN-264"),
        ("char_transformer", "-p heads=-1", r"heads[\s\S]*WB-PLAN-264"),
        ("char_transformer", "-p lr=0", "WB-PLAN-265"),
        ("char_transformer", "-p lr=1e999", r"lr[\s\S]*WB-PLAN-033"),
        ("char_transformer", "-p context=104858", "WB-PLAN-268"),
        ("char_transformer", "-p context=64.5", r"context[\s\S]*WB-PLAN-069"),
        ("char_transformer", "-p width=wide", r"width[\s\S]*WB-PLAN-068"),
        ("char_transformer", "-p depth=3", r"WB-PLAN-037[\s\S]*layers"),
        ("char_transformer", "-p width", "WB-PLAN-094"),
        ("recommender", "-p rows=0", r"rows[\s\S]*WB-PLAN-264"),
        ("recommender", "-p dim=0", r"dim[\s\S]*WB-PLAN-264"),
        ("tissue_cnn", "-p samples=0", r"samples[\s\S]*WB-PLAN-264"),
        ("tissue_cnn", "-p width=-4", r"width[\s\S]*WB-PLAN-264"),
        ("tissue_cnn", "-p lr=-1.0", r"lr[\s\S]*WB-PLAN-265"),
        ("fraud_mlp", "-p branches=0", r"branches[\s\S]*WB-PLAN-264"),
        ("fraud_mlp", "-p samples=1e5", r"samples[\s\S]*WB-PLAN-069"),
        ("fraud_mlp", "-p lr=0", r"lr[\s\S]*WB-PLAN-265"),
        ("digits_mlp", "-p width=3", r"digits_mlp[\s\S]*WB-PLAN-269"),
    ],
)
def test_sizes_that_cannot_be_are_refused_before_an_engine_is_touched(
    recipe: str, given: str, says: str, framework: str
) -> None:
    with pytest.raises(PlanError, match=says):
        plan_of_line(f"mirrored --framework {framework} --recipe {recipe} {given}")


def test_python_cannot_give_what_is_no_size_either() -> None:
    recipe = wb.recipes["recommender"]
    for name, value, code in (("rows", True, 264), ("rows", 2.0, 264), ("sparse", 1, 266)):
        with pytest.raises(PlanError, match=f"{name}[\\s\\S]*WB-PLAN-{code}"):
            make_plan(recipe.with_parameters(**{name: value}), "mirrored", workers=1)


def test_the_longest_context_is_the_longest_that_the_text_has() -> None:
    longest = transformer.TEST_CHARACTERS - 1
    assert len(corpus_arrays("test", longest)[0]) == 1
    with pytest.raises(DataError):
        corpus_arrays("test", longest + 1)


def test_the_magic_completes_parameters_of_the_recipe_on_the_line() -> None:
    line = "%distributed mirrored --recipe recommender -p "
    assert _complete(None, SimpleNamespace(line=line))[:2] == ["rows=", "dim="]
    line = "%distributed mirrored -p "
    assert _complete(None, SimpleNamespace(line=line)) == []


# -- the mapping ----------------------------------------------------------------------------------


def test_built_in_recipes_are_there_for_both_frameworks() -> None:
    assert list(wb.recipes) == [
        "digits_mlp", "digits_cnn", "char_transformer", "recommender", "tissue_cnn", "fraud_mlp",
    ]  # fmt: skip
    for name in builtin.names():
        for framework in catalog.FRAMEWORKS:
            found = wb.recipes.find(name, framework)
            assert (found.name, found.framework, found.origin) == (name, framework, "built-in")
            assert framework_of(found.source) == framework
            assert ast.parse(found.source).body
            assert max(map(len, found.source.splitlines())) <= 100
            assert found.summary.endswith(".")


def test_cells_are_listed_by_their_runs() -> None:
    ran("base", "import torch")
    found = wb.recipes["base"]
    assert (found.source, found.origin, found.framework) == ("import torch", "cell In[7]", "torch")
    assert list(wb.recipes)[-1] == "base"
    assert "base" in wb.recipes
    assert "cell In[7]" in repr(wb.recipes)
    assert "digits_mlp" in wb.recipes._repr_html_()


def test_a_run_wins_over_a_built_in_recipe_and_a_function_over_both() -> None:
    ran("digits_mlp", "mine = 1")
    assert wb.recipes["digits_mlp"].source == "mine = 1"

    @wb.recipe
    def digits_mlp():
        pass

    assert wb.recipes["digits_mlp"].origin == "function"
    assert len([name for name in wb.recipes if name == "digits_mlp"]) == 1


def test_the_framework_asked_for_decides_between_recipes_of_one_name() -> None:
    ran("digits_mlp", "mine = 1", "tensorflow")
    assert wb.recipes.find("digits_mlp", "torch").origin == "built-in"
    assert wb.recipes.find("digits_mlp", "tensorflow").source == "mine = 1"
    assert wb.recipes.find("digits_mlp").source == "mine = 1"


def test_recipes_of_a_framework() -> None:
    ran("base", "x = 1", "tensorflow")
    assert "base" not in wb.recipes.of("torch")
    assert {one.framework for one in wb.recipes.of("tensorflow").values()} == {"tensorflow"}


def test_runs_of_a_named_recipe_are_not_listed_again() -> None:
    session.recipes["mirrored"] = builtin.lookup("digits_mlp")
    assert "mirrored" not in wb.recipes


def test_an_older_run_is_found_and_an_unknown_name_is_answered() -> None:
    ran("base", "old = 1")
    ran("base", "new = 1")
    assert wb.recipes["base@1"].source == "old = 1"
    with pytest.raises(
        PlanError, match=r"recipe.*WB-PLAN-037[\s\S]*base@1, char_[\s\S]*'digits_mlp'"
    ):
        wb.recipes["digits_mpl"]
    with pytest.raises(KeyError):
        Recipes()["nothing at all"]
    assert wb.recipes.get("nothing at all") is None


# -- into a cell ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "told"),
    [
        (None, True),
        ({"header": {"msg_type": "execute_request"}}, True),
        ({"header": {"msg_type": "comm_msg"}}, False),
        ({}, False),
    ],
)
def test_text_goes_into_a_new_cell_only_from_a_cell(
    monkeypatch: pytest.MonkeyPatch, kernel: Any, told: bool
) -> None:
    put: list[tuple[str, bool]] = []
    shell = SimpleNamespace(set_next_input=lambda text, replace: put.append((text, replace)))
    if kernel is not None:
        shell.kernel = SimpleNamespace(get_parent=lambda: kernel)
    monkeypatch.setattr("IPython.get_ipython", lambda: shell)
    assert to_a_cell("%%distributed mirrored") is told
    assert put == ([("%%distributed mirrored", False)] if told else [])


def test_without_a_notebook_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("IPython.get_ipython", lambda: None)
    assert to_a_cell("x") is False
