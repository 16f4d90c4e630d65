"""A strategy computes what the naive function at the top of its file computes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import naive_cells
import numpy as np
import pytest
from worker_reports import Report, clean, joined
from workers import Workers

from workbench import catalog
from workbench.shared import record

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-10
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one_device": (1, {}),
    "mirrored": (2, {}),
    "central_storage": (2, {}),
    "parameter_server": (2, {"sync": True, "servers": 2}),
    "sharded": (2, {}),
    "model_split": (2, {"schedule": "gpipe", "microbatches": str(naive_cells.MICROBATCHES)}),
    "hybrid": (4, {"stages": "2", "microbatches": str(naive_cells.MICROBATCHES)}),
    "tensor_parallel": (2, {}),
    "local_sgd": (2, {"every": str(naive_cells.H)}),
    "gossip": (4, {"graph": "ring"}),  # of three, all would be neighbours
}
"""Workers and options of each strategy's run."""


def by_hand(workers: Workers, name: str, count: int) -> list[dict[str, Any]]:
    """Return what each worker's naive training ends with; the run only brings the workers."""
    reports = clean(workers.run("mirrored", naive_cells.naive, name, workers=count))
    return [report.value for report in reports]


def assert_equal(mine: Any, theirs: Any) -> None:
    assert mine.keys() == theirs.keys()
    assert mine
    for name, value in theirs.items():
        assert abs(mine[name] - value).max() <= TOLERANCE, name


def assert_same_losses(naive: list[dict[str, Any]], reports: list[Report]) -> None:
    """Check every step's loss, which of a pipeline the last stage alone has."""
    known = [answer["losses"] for answer in naive if answer["losses"][0] is not None]
    losses = record.derive(joined(reports)).loss
    assert len(losses) == naive_cells.STEPS
    assert abs(np.mean(known, axis=0) - losses).max() <= TOLERANCE


def test_an_outer_step_is_what_the_naive_round_takes(workers: Workers) -> None:
    naive = by_hand(workers, "diloco", 2)
    options = {"every": str(naive_cells.H), "outer": "nesterov"}
    reports = clean(workers.run("local_sgd", naive_cells.fast, workers=2, options=options))
    assert_same_losses(naive, reports)
    for answer, report in zip(naive, reports, strict=True):
        assert_equal(answer["weights"], report.weights)


@pytest.mark.parametrize("name", [name for name in CASES if name != "gossip"])
def test_a_strategy_trains_as_its_naive_function_does(workers: Workers, name: str) -> None:
    count, options = CASES[name]
    naive = by_hand(workers, name, count)
    reports = clean(workers.run(name, naive_cells.fast, workers=count, options=options))
    assert_same_losses(naive, reports)
    if catalog.lookup(name).whole:
        for answer, report in zip(naive, reports, strict=True):
            assert_equal(answer["weights"], report.weights)
        return
    theirs = {key: value for report in reports for key, value in report.weights.items()}
    assert {key for answer in naive for key in answer["weights"]} == theirs.keys()
    for answer in naive:  # each has its stage
        own = answer["weights"]
        assert_equal(own, {key: theirs[key] for key in own})


def test_every_replica_of_gossip_is_what_mixing_by_hand_makes_of_it(workers: Workers) -> None:
    count, options = CASES["gossip"]
    naive = by_hand(workers, "gossip", count)
    reports = clean(workers.run("gossip", naive_cells.fast, True, workers=count, options=options))
    assert_same_losses(naive, reports)
    for answer, report in zip(naive, reports, strict=True):
        assert_equal(answer["weights"], report.value)
    one, other = naive[0]["weights"]["0.weight"], naive[2]["weights"]["0.weight"]
    assert abs(one - other).max() > 1e-3  # they are apart, so it matters who mixes with whom


def test_every_naive_function_of_a_strategy_is_run() -> None:
    shown = set()
    for entry in catalog.strategies("torch"):
        file = entry.module.partition(":")[0].replace(".", "/") + ".py"
        if re.search(r"^def naive", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE):
            shown.add(entry.name)
    assert CASES.keys() == shown, "a strategy's naive function is run here: give it a case"


def test_every_all_reduce_adds_up_what_the_naive_one_does(workers: Workers) -> None:
    names = ("ring", "reduce_to_one", "recursive_doubling", "hierarchical")
    for report in clean(workers.run("mirrored", naive_cells.sums, names, workers=3)):
        far = report.value
        assert far.pop("none") > 0.1  # there is something to add up
        assert far.keys() == set(names)
        assert max(far.values()) <= TOLERANCE


def test_gradients_of_different_types_are_refused_on_every_worker(workers: Workers) -> None:
    for report in clean(workers.run("mirrored", naive_cells.disagrees, workers=2)):
        code, seen = report.value
        assert code == "WB-FIT-107"
        assert "rank 0: 5 numbers, torch.float32" in seen
        assert "rank 1: 5 numbers, torch.bfloat16" in seen
