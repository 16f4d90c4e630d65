"""Balancing against brute force; schedules' rules; forms of layers."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

pytest.importorskip("torch")

from workbench.catalog import schedules
from workbench.cookbook.recipe import Recipe
from workbench.engine.training.fit_arguments import check_supported
from workbench.errors import FitError, PlanError
from workbench.shared.plan import make_plan
from workbench.strategies.torch.pipeline.cut import balance, stage_times

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("seed", range(20))
def test_the_balance_is_the_best_there_is(seed: int) -> None:
    draw = random.Random(seed)
    layers, stages = draw.randint(1, 9), draw.randint(1, 4)
    stages = min(stages, layers)
    layer_s = [draw.random() ** 3 for _ in range(layers)]
    cut_s = [draw.random() * 0.3 for _ in range(layers - 1)]
    bounds = balance(layer_s, cut_s, stages)
    every = [[0, *cuts, layers] for cuts in itertools.combinations(range(1, layers), stages - 1)]
    best = min(max(stage_times(layer_s, cut_s, one)) for one in every)
    assert bounds in every
    assert max(stage_times(layer_s, cut_s, bounds)) == pytest.approx(best, rel=1e-12)


def test_cuts_that_move_little_are_preferred() -> None:
    assert balance([1, 0, 0, 1], [0.5, 0.1, 0.5], 2) == [0, 2, 4]


def test_more_stages_than_layers_cannot_be() -> None:
    with pytest.raises(ValueError, match="2 layers cannot make 3 stages"):
        balance([1.0, 1.0], [0.0], 3)


def options(schedule: str, microbatches: int | None = None, stages: int | None = None) -> Any:
    return {"schedule": schedule, "microbatches": microbatches, "stages_per_worker": stages}


def test_the_default_is_two_microbatches_per_worker_within_the_batch() -> None:
    assert schedules.microbatches(options("1f1b"), 4, 64) == 8
    assert schedules.microbatches(options("gpipe"), 4, 5) == 5
    assert schedules.microbatches(options("naive"), 4, 64) == 1
    with pytest.raises(PlanError, match="WB-PLAN-082"):
        schedules.microbatches(options("1f1b"), 4, 3)


@pytest.mark.parametrize("batch_size", range(4, 12))
@pytest.mark.parametrize("name", schedules.SCHEDULES)
def test_the_default_fits_every_schedule(name: str, batch_size: int) -> None:
    assert 1 <= schedules.microbatches(options(name), 4, batch_size) <= batch_size


def test_stages_per_worker_belong_to_looped_schedules() -> None:
    usual = [schedules.stages_per_worker(options(name)) for name in schedules.SCHEDULES]
    assert usual == [1, 1, 1, 2, 1]
    assert schedules.stages_per_worker(options("interleaved", stages=4)) == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"schedule": "1f1b", "microbatches": "3"}, "WB-PLAN-080"),
        ({"schedule": "naive", "microbatches": "3"}, r"WB-PLAN-079[\s\S]*3"),
        ({"schedule": "interleaved", "microbatches": "9"}, r"WB-PLAN-081[\s\S]*8"),
        ({"schedule": "gpipe", "stages_per_worker": "2"}, "WB-PLAN-078"),
        ({"microbatches": "65"}, "WB-PLAN-082"),
        ({"microbatches": "0"}, "WB-PLAN-004"),
    ],
)
def test_options_that_do_not_fit_are_refused_before_an_engine_is_touched(
    given: dict[str, str], words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        make_plan(
            Recipe("pass"), "model_split", workers=4, options=given, overrides={"batch_size": 64}
        )


def test_the_line_knows_the_alias_and_prepare_is_refused_naming_fit() -> None:
    plan = make_plan(Recipe("pass"), "pipeline", workers=4, options={"schedule": "zero_bubble"})
    assert (plan.strategy, plan.workers) == ("model_split", 4)
    with pytest.raises(FitError, match=r"wb\.prepare.*WB-FIT-026[\s\S]*wb\.fit"):
        check_supported(plan.entry, "prepare", ())


def test_pipelines_side_by_side_are_counted_by_their_own_workers() -> None:
    given = {"schedule": "1f1b", "microbatches": "2"}
    assert make_plan(Recipe("pass"), "hybrid", workers=4, options=given).workers == 4
    with pytest.raises(PlanError, match="WB-PLAN-080"):
        make_plan(Recipe("pass"), "hybrid", workers=4, options={**given, "stages": "4"})


def test_the_ideal_bubbles_are_those_of_the_papers() -> None:
    assert schedules.ideal_bubble("gpipe", 4, 8, 1) == pytest.approx(3 / 11)
    assert schedules.ideal_bubble("1f1b", 4, 8, 1) == pytest.approx(3 / 11)
    assert schedules.ideal_bubble("interleaved", 4, 8, 2) == pytest.approx(3 / 19)
    assert schedules.ideal_bubble("naive", 4, 1, 1) == pytest.approx(3 / 4)
    assert schedules.ideal_bubble("zero_bubble", 4, 8, 1) == pytest.approx(1 / 9)
