"""Many plans at once: every recipe under every strategy with every seed."""

from __future__ import annotations

from typing import Any

import pytest
from fake_cluster import Cluster, finish, queue_on

from workbench.errors import PlanError
from workbench.session.queue import sweep


def test_a_sweep_is_every_recipe_under_every_strategy_with_every_seed() -> None:
    plans = sweep(
        Cluster(), ["wb.fit(a)", "wb.fit(b)"], ["one_device", "mirrored"], seeds=2, name="n",
        epochs=3, options={},
    )  # fmt: skip
    assert [plan.name for plan in plans] == [
        f"n-{r}-{s}-seed{k}" for r in (1, 2) for s in ("one_device", "mirrored") for k in (0, 1)
    ]
    assert {plan.overrides["epochs"] for plan in plans} == {3}
    assert plans[0].recipe != plans[-1].recipe


def test_a_sweep_of_one_is_the_plain_plan() -> None:
    (plan,) = sweep(Cluster(), "wb.fit(a)", "mirrored")  # type: ignore[arg-type]
    assert (plan.name, plan.workers, plan.overrides) == ("", 2, {})


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"strategies": []}, r"strategy.*WB-PLAN-133"),
        ({"recipes": []}, r"recipe.*WB-PLAN-133"),
        ({"seeds": 0}, "WB-PLAN-091"),
        ({"seeds": [-1]}, "WB-PLAN-092"),
        ({"strategies": ["mirrored", "nonsense"]}, "nonsense"),
    ],
)
def test_a_sweep_that_cannot_be_run_is_refused_whole(more: dict[str, Any], words: str) -> None:
    queue = queue_on(Cluster(finish))
    asked = {"recipes": "wb.fit(a)", "strategies": "mirrored", **more}
    with pytest.raises(PlanError, match=words):
        queue.sweep(asked.pop("recipes"), asked.pop("strategies"), **asked)
    assert queue.items == []
