from __future__ import annotations

import json
from typing import Any

import pytest

from workbench import catalog
from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.shared.faults import parse_fault
from workbench.shared.plan import Plan, make_plan

CELL = Recipe("wb.fit(...)", first_line=2, origin="In[3]")


def plan(**given: object) -> Plan:
    return make_plan(CELL, **{"strategy": "mirrored", "workers": 4, **given})  # type: ignore[arg-type]


def test_a_plan_holds_every_option_and_the_strategys_own_name() -> None:
    made = plan(strategy="ddp", options={"bucket_mb": "2"}, overrides={"steps": 9, "seed": None})
    assert made.strategy == "mirrored"
    assert made.options["bucket_mb"] == 2.0
    assert made.options["sync_batchnorm"] is False
    assert made.overrides == {"steps": 9}
    assert made.entry.name == "mirrored"
    assert made.servers == 0


def test_a_strategy_takes_no_more_workers_than_it_can_use() -> None:
    assert plan(strategy="one_device").workers == 1


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"strategy": "mirorred"}, r"WB-PLAN-037[\s\S]*'mirrored'"),
        ({"framework": "jax"}, r"framework.*WB-PLAN-037"),
        ({"options": {"bucket": 1}}, r"WB-PLAN-037[\s\S]*'bucket_mb'"),
        ({"options": {"bucket_mb": "big"}}, r"bucket_mb.*WB-PLAN-002"),
        ({"workers": 0}, r"workers.*WB-PLAN-091"),
        ({"workers": True}, r"workers.*WB-PLAN-091"),
        ({"overrides": {"steps": 0}}, r"steps.*WB-PLAN-091"),
        ({"overrides": {"epochs": 1.5}}, r"epochs.*WB-PLAN-091"),
        ({"overrides": {"seed": -1}}, "WB-PLAN-092"),
        ({"overrides": {"lr": 1}}, "WB-PLAN-086"),
        ({"overrides": {"batch_size": 3}}, r"WB-PLAN-087[\s\S]*4"),
        ({"faults": (parse_fault("kill=4@9"),)}, r"WB-PLAN-039[\s\S]*3"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_cure(given: dict[str, object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        plan(**given)


def test_an_empty_cell_is_refused() -> None:
    with pytest.raises(PlanError, match="WB-PLAN-085"):
        make_plan(Recipe("  \n"), "mirrored", workers=1)


def test_seed_zero_is_a_seed() -> None:
    assert plan(overrides={"seed": 0}).overrides == {"seed": 0}


def test_other_seeds_make_plans_that_are_named_apart() -> None:
    named, unnamed = plan(name="base").with_seed(2), plan().with_seed(0)
    assert (named.name, named.overrides["seed"]) == ("base-seed2", 2)
    assert unnamed.name == "mirrored-seed0"


def test_a_plan_travels_as_json() -> None:
    made = plan(faults=(parse_fault("slow=1:50ms"),), overrides={"seed": 3}, name="base")
    assert Plan.from_wire(json.loads(json.dumps(made.to_wire()))) == made


SHARED = ["cuda:0", "cuda:1", "cuda:0"]


@pytest.mark.parametrize("entry", catalog.strategies(), ids=lambda e: f"{e.framework}-{e.name}")
def test_only_strategies_that_can_share_a_gpu_are_given_one_to_share(
    entry: catalog.Strategy,
) -> None:
    able = {
        "torch": {"one_device", "mirrored", "local_sgd", "central_storage", "parameter_server"},
        "tensorflow": {"one_device", "parameter_server"},
    }
    assert entry.shares_gpu == (entry.name in able[entry.framework])
    made = Plan(CELL, entry.name, framework=entry.framework, workers=3)
    made.check_devices(["cuda:0", "cuda:1", "cuda:2"])
    made.check_devices(["cpu"] * 3)
    if entry.shares_gpu:
        made.check_devices(SHARED)
        return
    with pytest.raises(PlanError, match=r"WB-PLAN-162") as caught:
        made.check_devices(SHARED)
    for words in ("2 GPUs", "-n 2", "--devices cpu"):
        assert words in str(caught.value)


def test_equal_cells_are_one_recipe() -> None:
    assert Recipe("a = 1").digest == Recipe("a = 1", first_line=5, origin="In[9]").digest
    assert Recipe("a = 1").digest != Recipe("a = 2").digest
    assert len(CELL.digest) == 12


def train(steps: int) -> int:
    return steps + 1


def test_a_function_becomes_a_recipe_with_its_source() -> None:
    recipe = Recipe.from_function(train, (3,))
    assert recipe.source.startswith("def train(steps: int)")
    assert (recipe.function, recipe.origin, recipe.args) == ("train", "train", (3,))


def test_functions_that_cannot_travel_are_refused() -> None:
    captured = 5

    def closure() -> int:
        return captured

    for function, says in (
        (closure, r"WB-PLAN-036[\s\S]*captured"),
        (lambda: 1, "WB-PLAN-035"),
        (len, "WB-PLAN-034"),
    ):
        with pytest.raises(PlanError, match=says):
            Recipe.from_function(function)


# -- a worker that is slow for long ----------------------------------------------------------------


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage", "sharded"])
def test_a_slow_worker_can_be_given_less_where_shares_are_weighted(strategy: str) -> None:
    plan = make_plan(CELL, strategy, workers=3, on_straggler="shed")
    assert plan.on_straggler == "shed"


@pytest.mark.parametrize(
    ("strategy", "how", "why"),
    [
        ("local_sgd", {}, "shares"),
        ("parameter_server", {}, "step together"),
        ("mirrored", {"framework": "tensorflow"}, "shares"),
        ("one_device", {}, "one worker"),
        ("model_split", {}, "all samples"),
    ],
)
def test_where_a_slow_worker_cannot_have_less_it_is_said_before_an_engine_is_touched(
    strategy: str, how: dict[str, str], why: str
) -> None:
    with pytest.raises(PlanError, match=rf"{why}[\s\S]*WB-PLAN-325[\s\S]*mirrored, central_stor"):
        make_plan(CELL, strategy, workers=3, on_straggler="shed", **how)
    assert make_plan(CELL, strategy, workers=3, **how).on_straggler == "wait"


def test_servers_that_wait_for_all_can() -> None:
    options = {"sync": True}
    plan = make_plan(CELL, "parameter_server", workers=3, options=options, on_straggler="shed")
    assert plan.on_straggler == "shed"


def test_what_to_do_with_a_straggler_is_one_of_a_few_words() -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-324[\s\S]*wait, shed"):
        make_plan(CELL, "mirrored", workers=3, on_straggler="scold")


def test_who_replaces_slow_workers_heals_deaths_too() -> None:
    plan = make_plan(CELL, "mirrored", workers=3, on_straggler="replace")
    assert plan.on_failure == "heal"
    again = make_plan(CELL, "mirrored", workers=3, on_straggler="replace", on_failure="heal")
    assert again == plan
    with pytest.raises(PlanError, match="WB-PLAN-327"):
        make_plan(CELL, "mirrored", workers=3, on_straggler="replace", on_failure="stop")


@pytest.mark.parametrize("strategy", ["gossip", "sharded", "one_device"])
def test_where_no_fresh_worker_can_be_let_in_it_is_said(strategy: str) -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-326[\s\S]*replace[\s\S]*mirrored"):
        make_plan(CELL, strategy, workers=3, on_straggler="replace")


@pytest.mark.parametrize("strategy", ["one_device", "sharded", "model_split", "tensor_parallel"])
def test_what_cannot_heal_says_why_and_what_can(strategy: str) -> None:
    with pytest.raises(PlanError, match="WB-PLAN-320") as raised:
        plan(strategy=strategy, on_failure="heal")
    why = catalog.lookup(strategy).unhealed
    assert why
    assert why in raised.value.what
    able = [entry.name for entry in catalog.strategies("torch") if entry.heals]
    assert "mirrored" in able
    assert ", ".join(able) in str(raised.value.allowed)


def test_pipelines_heal_where_there_are_two_of_them() -> None:
    def healed(workers: int, **options: Any) -> Plan:
        return plan(strategy="hybrid", on_failure="heal", workers=workers, options=options)

    assert healed(4).on_failure == healed(3, stages=1).on_failure == "heal"
    with pytest.raises(PlanError, match="WB-PLAN-332") as raised:
        healed(2)
    assert "-n 4 -o stages=2" in str(raised.value)
    with pytest.raises(PlanError, match="WB-PLAN-332"):
        healed(4, stages=4)


@pytest.mark.parametrize("strategy", ["mirrored", "central_storage", "parameter_server"])
def test_replicas_and_workers_of_servers_heal(strategy: str) -> None:
    assert plan(strategy=strategy, on_failure="heal").on_failure == "heal"


def test_one_order_of_pushes_on_all_servers_does_not_outlive_a_worker() -> None:
    options = {"consistency": "snapshot", "servers": 2}
    with pytest.raises(PlanError, match=r"WB-PLAN-330"):
        plan(strategy="parameter_server", on_failure="heal", options=options)
