"""A plan written as a cell is, read again, the same plan."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fuzz_profile import tries
from hypothesis import assume, given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from workbench import catalog
from workbench.cookbook.recipe import Recipe, recipe_of
from workbench.errors import PlanError
from workbench.notebook.session import Session
from workbench.shared.faults import parse_fault
from workbench.shared.plan import Plan, cell_of, line_of, make_plan
from workbench.shared.run_request import parse_cell_line

CELL = Recipe("wb.fit(...)\n", 2, "In[1]")
SOURCES = [
    "wb.fit(...)\n",
    "\n\nwb.fit()\n",
    "# a comment\nx = '''\n%%magic\n'''\n",
    "%%time\nf()\n",
]
ENTRIES = {f"{e.framework}-{e.name}": e for e in catalog.strategies() if e.anywhere}
WORDS = st.text(min_size=1, max_size=12).filter(
    lambda text: text.splitlines() == [text] and text != "--"
)
ODD = st.one_of(
    WORDS,
    st.sampled_from(
        [
            "-x",
            "--steps",
            "---",
            "it's",
            '"',
            "'\"",
            "a # b",
            "#",
            "\\",
            "a b",
            "{x}",
            "$x",
            "é",
            "=",
        ]
    ),
)
FAULTS = ["slow=0:50ms", "slow=0:2.5x/backward", "jitter=0.1ms", "kill=0@7", "latency=3us",
          "bandwidth=1.5MB/s"]  # fmt: skip
LOGS = ["tensorboard:/tmp/it's a log", "mlflow:sqlite:////tmp/runs.db", "mlflow:"]


def read(text: str, framework: str = "torch", engines: int = 3) -> Plan:
    """Return the plan of a cell in a notebook with a cluster of so many engines."""
    line, _, body = text.partition("\n")
    name, _, rest = line.partition(" ")
    assert name == "%%distributed"
    cluster: Any = SimpleNamespace(framework=framework, worker_ids=list(range(engines)))
    plans = Session(cluster=cluster).plans(parse_cell_line(rest), Recipe(body, 2, "In[1]"))
    assert len(plans) == 1
    return plans[0]


def values(option: catalog.Option) -> st.SearchStrategy[Any]:
    """What an option may be."""
    low, high = option.minimum, option.maximum
    found: st.SearchStrategy[Any]
    if option.kind == "int":
        found = st.integers(int(low or 0), int(high or 9999))
    elif option.kind == "float":
        found = st.floats(low, high, allow_nan=False, allow_infinity=False)
    elif option.kind == "bool":
        found = st.booleans()
    elif option.kind == "choice":
        found = st.sampled_from(option.choices)
    else:
        found = st.from_regex(option.pattern, fullmatch=True) if option.pattern else ODD
    return st.one_of(st.just(option.default), found)


@st.composite
def plans(draw: st.DrawFn, entry: catalog.Strategy, folder: Path) -> Plan:
    workers = draw(st.integers(1, 12))
    counts = st.integers(1, 10**6)
    overrides = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "epochs": counts, "steps": counts, "batch_size": st.integers(workers, 10**6),
                "seed": st.integers(0, 10**18 - 1),
            },
        )
    )  # fmt: skip
    saved = draw(st.booleans())
    letters = st.characters(exclude_characters="/\0", exclude_categories=["Cc", "Cs", "Zl", "Zp"])
    names = st.text(letters, max_size=9)
    try:
        return make_plan(
            Recipe(draw(st.sampled_from(SOURCES)), 2, "In[1]"),
            entry.name,
            framework=entry.framework,
            workers=workers,
            options={o.name: draw(values(o)) for o in entry.options if draw(st.booleans())},
            overrides=overrides,
            faults=tuple(map(parse_fault, draw(st.lists(st.sampled_from(FAULTS), max_size=2)))),
            name=draw(st.just("") | ODD),
            init_from=draw(st.just("") | ODD),
            checkpoint=str(folder / f"d{draw(names)}") if saved else "",
            checkpoint_every=draw(st.none() | st.integers(1, 999)) if saved else None,
            on_failure=draw(st.sampled_from(["", "stop", "continue"] + ["replace"] * saved)),
            on_straggler=draw(st.sampled_from(["wait", "wait", "shed", "replace"])),
            profile=draw(st.none() | st.just((2, 5))),
            log=draw(st.lists(st.sampled_from(LOGS), max_size=2)),
        )
    except PlanError:
        assume(False)
        raise


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_a_plans_cell_asks_for_that_plan(entry: catalog.Strategy, tmp_path: Path) -> None:
    @tries(40)
    @given(plans(entry, tmp_path), st.sampled_from(catalog.FRAMEWORKS), st.integers(1, 12))
    def check(plan: Plan, framework: str, engines: int) -> None:
        text = cell_of(plan, framework=framework)
        again = read(text, framework, engines)
        assert again == replace(plan, recipe=again.recipe)
        assert again.recipe.source == plan.recipe.source
        assert cell_of(again, framework=framework) == text

    check()


@tries(60)
@given(plans(ENTRIES["torch-parameter_server"], Path("/tmp")))
def test_the_notebook_hands_the_magic_line_and_body_unchanged(plan: Plan) -> None:
    text = cell_of(plan)
    call: Any = ast.parse(TransformerManager().transform_cell(text)).body[0]
    _, line, body = (ast.literal_eval(argument) for argument in call.value.args)
    assert text == f"%%distributed {line}\n{body}"


def test_every_field_of_a_plan_is_written() -> None:
    """A new field needs a flag, and a place in the line."""
    plan = make_plan(
        CELL, "parameter_server", workers=3, framework="torch",
        options={"servers": 2, "sync": True}, on_straggler="shed",
        overrides={"epochs": 2, "seed": 1}, faults=(parse_fault("slow=1:50ms"),), name="a b",
        init_from="base", checkpoint="/tmp/c", checkpoint_every=7, on_failure="stop",
        profile=(1, 3), log=["tensorboard:/tmp/t"], traceback="full", values={"lr": 0.1},
    )  # fmt: skip
    default = make_plan(CELL, "mirrored", workers=2)
    same = [name for name in vars(plan) if getattr(plan, name) == getattr(default, name)]
    assert set(same) <= {"recipe", "framework", "on_failure", "spares"}  # spares heal
    assert cell_of(plan) == (
        "%%distributed parameter_server -n 3 -o servers=2 -o sync=true --epochs 2 --seed 1"
        " --inject slow=1:50ms"
        " --init-from base --checkpoint /tmp/c --checkpoint-every 7 --on-failure stop"
        " --on-straggler shed --profile 1:3 --traceback full --set lr=0.1 --log tensorboard:/tmp/t"
        " --name 'a b'"
        "\nwb.fit(...)\n"
    )


def test_what_is_the_default_is_not_written() -> None:
    assert line_of(make_plan(CELL, "one_device", workers=4)) == "one_device"
    plan = make_plan(CELL, "mirrored", workers=4, options={"bucket_mb": 25})
    assert line_of(plan) == "mirrored -n 4"
    assert line_of(plan, framework="tensorflow") == "mirrored -n 4 --framework torch"


@pytest.mark.parametrize("name", ["a\nb", "a\u2028b", "a\x0bb", "a\n"])
def test_a_line_break_cannot_be_said(name: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-010"):
        cell_of(make_plan(CELL, "mirrored", workers=2, name=name))


def test_what_no_line_says_is_named() -> None:
    """Anything a line would read differently is an error, not another plan."""
    plan = make_plan(CELL, "mirrored", workers=2, overrides={"seed": 10**30})
    with pytest.raises(PlanError, match=r"--seed.*WB-PLAN-158"):
        cell_of(plan)
    with pytest.raises(PlanError, match=r"name.*WB-PLAN-011"):
        cell_of(make_plan(CELL, "mirrored", workers=2, name="--"))  # argparse drops it
    worse = replace(make_plan(CELL, "mirrored", workers=2), checkpoint_every=5)
    with pytest.raises(PlanError, match=r"checkpoint_every.*WB-PLAN-011"):
        cell_of(worse)


def tiny(lr=0.1, *, width=8, name="it's"):
    return [lr, width, name]


def test_a_functions_cell_defines_and_calls_it() -> None:
    recipe = recipe_of(tiny).with_parameters(lr=0.5)
    plan = make_plan(recipe, "mirrored", workers=2)
    text = cell_of(plan)
    again = read(text)
    assert again == replace(plan, recipe=again.recipe)
    namespace: dict[str, Any] = {}
    tree = ast.parse(again.recipe.source)
    exec(compile(ast.Module(tree.body[:-1], []), "cell", "exec"), namespace)
    call: Any = tree.body[-1]
    assert eval(compile(ast.Expression(call.value), "cell", "eval"), namespace) == [0.5, 8, "it's"]


def test_arguments_that_have_no_source_are_refused() -> None:
    plan = make_plan(Recipe.from_function(tiny, (object(),)), "mirrored", workers=2)
    with pytest.raises(PlanError, match=r"WB-PLAN-032[\s\S]*0: object"):
        cell_of(plan)
    plain = make_plan(Recipe.from_function(tiny, (0.5,)), "mirrored", workers=2)
    assert cell_of(plain).endswith("\n\n\ntiny(0.5)\n")
