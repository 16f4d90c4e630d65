"""`%%distributed auto`: short runs on real engines, a choice, and a run under it."""

from __future__ import annotations

import pytest
from needs import need
from notebook_shell import notebook

import workbench as wb
from workbench.errors import PlanError, RunError

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

SLEEPS = """
import time
import torch
from torch import nn

def step(model, batch):
    x, y = batch
    time.sleep(0.001 * len(x))
    return nn.functional.cross_entropy(model(x), y)

wb.fit(nn.Sequential(nn.Linear(8, {wide}), nn.Linear({wide}, 2)),
       wb.data.synthetic(512, shape=(8,), classes=2), step_fn=step,
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32, steps=6)
"""


def test_work_that_divides_is_given_to_workers_and_trained_under_the_winner() -> None:
    with notebook(2) as book:
        shown = book.ok("%%distributed auto --plot text\n" + SLEEPS.format(wide=4)).text
        run = wb.runs.latest
    assert "Chosen: mirrored on 2 workers" in shown
    assert run.plan.strategy == "mirrored"
    assert not run.plan.overrides
    assert (run.state, run.history.totals.steps) == ("finished", 6)
    assert {"auto-mirrored", "auto-one_device"} <= {*wb.runs}
    # 32 ms of sleep for one device, 16 ms for each of two workers.
    alone, both = (wb.runs[f"auto-{name}"].summarise() for name in ("one_device", "mirrored"))
    assert 1.5 < both.samples_per_s / alone.samples_per_s < 2.1


def test_a_dear_link_leaves_it_to_one_device() -> None:
    """60 kB of gradients at 200 kB/s cost ten times what the work does."""
    with wb.Cluster(2, devices="cpu") as cluster:
        found = wb.choose(SLEEPS.format(wide=1500), inject=("bandwidth=200KB/s",), cluster=cluster,
                          most_s=20)  # fmt: skip
    assert found.winner.candidate.name == "one_device"
    central = next(r for r in found.rows if r.candidate.name == "central_storage")
    assert central.known in ("predicted", "measured")  # the replicas' short run was long enough
    assert central.samples_per_s[0] < found.winner.samples_per_s[0]
    assert found.seconds < 60


def test_a_strategy_that_refuses_the_cell_is_left_out_and_a_fault_of_the_cell_is_told() -> None:
    cell = SLEEPS.format(wide=4).replace("step_fn=step", "step_fn=missing")
    with wb.Cluster(2, devices="cpu") as cluster:
        with pytest.raises(RunError, match="missing"):
            wb.choose(cell, cluster=cluster)
        with pytest.raises(PlanError, match="WB-PLAN-316") as refused:
            wb.choose(SLEEPS.format(wide=4), memory_per_worker="10B", cluster=cluster, most_s=20)
        assert "--memory-per-worker" in str(refused.value)
        assert cluster.run(SLEEPS.format(wide=4), strategy="mirrored").wait().state == "finished"
