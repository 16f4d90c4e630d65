"""Several values on one line: which runs come of it, and what is refused before any begins."""

from __future__ import annotations

import pytest

from workbench.cookbook.recipe import Recipe
from workbench.errors import PlanError
from workbench.notebook.recipes import recipes
from workbench.shared.flags.several import MOST_RUNS, several_in
from workbench.shared.plan import Plan, cell_of, make_plan, plan_of, plans_of
from workbench.shared.run_request import parse_cell_line

CELL = Recipe("wb.fit(a)")


def plans(line: str, workers: int = 2) -> list[Plan]:
    return plans_of(parse_cell_line(line), CELL, framework="torch", workers=workers)


def names(line: str) -> list[str]:
    return [plan.name or plan.strategy for plan in plans(line)]


def test_a_line_with_one_value_of_everything_is_read_as_it_was() -> None:
    line = parse_cell_line("mirrored -n 4 -o bucket_mb=10 --batch-size 64")
    assert line.several == ()
    assert (line.workers, line.options, line.batch_size) == (4, {"bucket_mb": "10"}, 64)
    assert [plan.name for plan in plans("mirrored -n 4")] == [""]


def test_every_strategy_has_every_number_of_workers_and_every_seed() -> None:
    found = plans("mirrored,sharded -n 1,2,4 --seeds 2")
    assert [(p.strategy, p.workers, p.overrides["seed"]) for p in found] == [
        (strategy, workers, seed)
        for strategy in ("mirrored", "sharded")
        for workers in (1, 2, 4)
        for seed in (0, 1)
    ]
    assert found[0].name == "mirrored-n1-seed0"


def test_one_device_is_run_once_whatever_the_workers_and_others_options() -> None:
    assert names("one_device,mirrored -n 1,2 -o bucket_mb=5,25") == [
        "one_device",
        "mirrored-n1-bucket_mb=5", "mirrored-n1-bucket_mb=25",
        "mirrored-n2-bucket_mb=5", "mirrored-n2-bucket_mb=25",
    ]  # fmt: skip


def test_links_are_slow_for_those_that_have_some() -> None:
    one, two = plans("one_device,central_storage -n 2,3 --inject bandwidth=20MB/s")[:2]
    assert (one.strategy, one.faults) == ("one_device", ())
    assert [fault.text for fault in two.faults] == ["bandwidth=20MB/s"]


def test_the_global_batch_stays_or_grows_with_the_workers() -> None:
    strong = plans("one_device,mirrored -n 1,2,4 --batch-size 256")
    weak = plans("one_device,mirrored -n 1,2,4 --batch-per-worker 64")
    assert [plan.overrides["batch_size"] for plan in strong] == [256] * 4
    assert [(plan.workers, plan.overrides["batch_size"]) for plan in weak] == [
        (1, 64), (1, 64), (2, 128), (4, 256)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("model_split -o split_at=2,5", [{"split_at": "2,5"}]),
        ("model_split -o split_at=2,5|3,6", [{"split_at": "2,5"}, {"split_at": "3,6"}]),
        ("tensor_parallel -o plan=a=col,b=row", [{"plan": "a=col,b=row"}]),
        ("mirrored -o compress=none,fp16,topk:0.1",
         [{"compress": "none"}, {"compress": "fp16"}, {"compress": "topk:0.1"}]),
        ("parameter_server -o servers=1,2", [{"servers": 1}, {"servers": 2}]),
        ("mirrored -o sync_batchnorm=true,false",
         [{"sync_batchnorm": True}, {"sync_batchnorm": False}]),
    ],
)  # fmt: skip
def test_commas_part_numbers_and_words_and_a_bar_parts_text(
    line: str, values: list[dict[str, object]]
) -> None:
    found = plans(f"{line} -n 2")
    assert len(found) == len(values)
    for plan, expected in zip(found, values, strict=True):
        assert {key: plan.options[key] for key in expected} == expected


def test_values_of_the_cell_are_what_they_look_like() -> None:
    found = plans("mirrored --set lr=0.1,1e-3 --set depth=4 --set kind=adam --set fast=true")
    assert [plan.values["lr"] for plan in found] == [0.1, 0.001]
    assert found[0].values == {"lr": 0.1, "depth": 4, "kind": "adam", "fast": True}
    assert [plan.name for plan in found] == ["mirrored-lr=0.1", "mirrored-lr=0.001"]
    assert "--set fast=true" in cell_of(found[0])


@pytest.mark.parametrize("value", [True, False, 3, 0.25, "adam", "64,32", "TrueColor", "a b"])
def test_a_value_of_the_cell_is_written_back_as_it_was(value: object) -> None:
    plan = make_plan(CELL, "mirrored", workers=2, values={"it": value})
    (again,) = plans(cell_of(plan).partition("\n")[0].removeprefix("%%distributed "))
    assert again.values == plan.values
    assert Plan.from_wire(plan.to_wire()).values == plan.values


def test_parameters_of_a_recipe_are_swept_for_one_device_too() -> None:
    recipe = recipes.find("char_transformer", "torch")
    line = parse_cell_line("one_device,mirrored -n 1,2 -p lr=0.1,0.01")
    found = plans_of(line, recipe, framework="torch", workers=2)
    assert [plan.name for plan in found] == [
        "one_device-lr=0.1", "one_device-lr=0.01", "mirrored-n1-lr=0.1", "mirrored-n1-lr=0.01",
        "mirrored-n2-lr=0.1", "mirrored-n2-lr=0.01",
    ]  # fmt: skip
    assert len({plan.recipe.digest for plan in found}) == 2


def test_several_seeds_batches_epochs_and_steps_are_runs_each() -> None:
    assert names("mirrored --seed 3,5") == ["mirrored-seed3", "mirrored-seed5"]
    assert names("mirrored --batch-size 128,256") == ["mirrored-batch128", "mirrored-batch256"]
    assert names("mirrored --epochs 1,2 --name a") == ["a-epochs1", "a-epochs2"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mirrored -n 1,1", r"one value twice[\s\S]*WB-PLAN-270|WB-PLAN-270[\s\S]*1,1"),
        ("mirrored -n ,", "WB-PLAN-270"),
        ("mirrored -n 1,x", "WB-PLAN-158"),
        ("mirrored -n 1,0", "WB-PLAN-158"),
        ("mirrored --set 2a=1", "WB-PLAN-271"),
        ("mirrored --set lr", "WB-PLAN-094"),
        ("mirrored --set epochs=3", "WB-PLAN-278"),
        ("mirrored --set bucket_mb=3", "WB-PLAN-278"),
        ("mirrored --price free", "WB-PLAN-272"),
        ("mirrored --price -1", "WB-PLAN-272"),
        ("mirrored --price 0", "WB-PLAN-272"),
        ("mirrored -n 1,2 --seeds 100", "WB-PLAN-273"),
        ("mirrored --batch-size 64 --batch-per-worker 32", "WB-PLAN-275"),
        ("mirrored --seeds 2 --seed 3,5", "WB-PLAN-276"),
        ("mirrored -n 2,4 --batch-size 3", "WB-PLAN-087"),
        ("one_device,mirrored -n 1,2 -o nonsense=1,2", "nonsense"),
        ("mirrored -o bucket_mb=5,many", "bucket_mb"),
    ],
)
def test_what_cannot_be_run_is_refused_whole(line: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        plans(line)


def test_as_many_runs_as_may_be_are_begun_and_no_more() -> None:
    assert len(plans(f"mirrored --seeds {MOST_RUNS}")) == MOST_RUNS
    with pytest.raises(PlanError, match=f"(?s)WB-PLAN-273.*{MOST_RUNS + 1}"):
        plans(f"mirrored --seeds {MOST_RUNS + 1}")


def test_one_run_takes_one_value_of_everything() -> None:
    with pytest.raises(PlanError, match=r"WB-PLAN-274[\s\S]*2 values of --workers"):
        plan_of(parse_cell_line("mirrored -n 1,2"), CELL, framework="torch", workers=2)


def test_python_gives_several_values_in_lists() -> None:
    one, axes = several_in({"workers": [1, 2], "options": {"a": [1, 2], "b": 3}, "epochs": 2})
    assert one == {"options": {"b": 3}, "epochs": 2}
    assert [(axis.field, axis.key, axis.values) for axis in axes] == [
        ("workers", "", (1, 2)), ("options", "a", (1, 2))
    ]  # fmt: skip
    with pytest.raises(PlanError, match="WB-PLAN-277"):
        several_in({"workers": []})


def test_plain_cells_and_jobs_take_one_value() -> None:
    assert parse_cell_line("-n 1,2").training_flags == ["--workers"]
