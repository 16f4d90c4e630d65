"""A line with several numbers of workers, from the notebook to the figure."""

from __future__ import annotations

import pytest
from needs import need
from notebook_shell import notebook

import workbench as wb
from workbench.errors import PlanError, RunError
from workbench.notebook.session import session

pytestmark = [pytest.mark.cluster, pytest.mark.torch]
need("torch")

SLEEPS = """
import time
import torch
from torch import nn

def step(model, batch):
    x, y = batch
    time.sleep({serial} + {divided} * len(x) / {batch})
    return nn.functional.cross_entropy(model(x), y)

wb.fit(nn.Linear(8, 2), wb.data.synthetic(512, shape=(8,), classes=2), step_fn=step,
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size={batch}, steps={steps})
"""


def sleeping(serial: float, divided: float, steps: int = 12, batch: int = 64) -> str:
    """Return a cell of which each step sleeps a serial part and a share of the rest."""
    return SLEEPS.format(serial=serial, divided=divided, steps=steps, batch=batch)


@pytest.mark.timing
def test_workers_that_sleep_have_the_serial_share_that_they_were_given() -> None:
    with notebook(2) as book:
        book.ok("%%distributed one_device,mirrored -n 1,2,4 --plot text --price 2.5\n"
                + sleeping(0.04, 0.16))  # fmt: skip
        names = [name for name in wb.runs if not name.endswith("@1")][-4:]
        found = wb.compare(*names).scaling(price=2.5)
    assert names == ["one_device", "mirrored-n1", "mirrored-n2", "mirrored-n4"]
    (curve,) = found.scaling.curves
    assert [point.workers for point in curve.points] == [1, 2, 4]
    assert curve.base.strategy == "one_device"
    assert curve.law.fits
    assert curve.law.serial == pytest.approx(0.2, abs=0.05)
    assert curve.law.low < curve.law.serial < curve.law.high
    assert found.distribute
    # The measured speed-up is the one that Amdahl's law gives for what was slept, or a bit less.
    assert curve.points[-1].speedup == pytest.approx(1 / (0.2 + 0.8 / 4), rel=0.12)
    assert curve.points[0].cost.is_epoch
    assert curve.base.samples_per_s.mean == pytest.approx(320, rel=0.1)


def test_a_slow_link_makes_the_sentence_that_it_should_not_be_distributed() -> None:
    """A central copy of 1.1 MB behind a link of 20 MB/s costs more than the worker's 10 ms."""
    cell = """
import time, torch
from torch import nn
def step(model, batch):
    x, y = batch
    time.sleep(0.01 * len(x) / 64)
    return nn.functional.cross_entropy(model(x), y)
wb.fit(nn.Sequential(nn.Linear(8, 25000), nn.Linear(25000, 2)),
       wb.data.synthetic(512, shape=(8,), classes=2), step_fn=step,
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=64, steps=12)
"""
    with notebook(2):
        found = wb.sweep(
            cell, ["one_device", "central_storage"], workers=[1, 2], inject=["bandwidth=20MB/s"]
        )
    assert found.distribute is False
    assert "communicating" in found.verdict
    assert [point.workers for point in found.scaling.curves[0].points] == [1, 2]


FAILS_WITH_TWO = """
import torch
from torch import nn
if world_size == 2:
    raise ValueError("two is too many")
wb.fit(nn.Linear(8, 2), wb.data.synthetic(256, shape=(8,), classes=2), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, wb.options.get("lr", 0.1)), batch_size=32, steps=12)
"""


def test_a_run_that_fails_in_the_middle_is_missing_and_the_others_go_on() -> None:
    with notebook(2) as book:
        cell = book.run(f"%%distributed mirrored -n 1,2,3 --plot text\n{FAILS_WITH_TWO}")
        names = list(wb.runs)[-3:]
        states = [wb.runs[name].state for name in names]
        found = wb.compare(*names).scaling()
    assert names == ["mirrored-n1", "mirrored-n2", "mirrored-n3"]
    assert states == ["finished", "failed", "finished"]
    assert "1 of 3" in str(cell.error)
    assert "WB-RUN-129" in str(cell.error)
    assert "two is too many" in str(cell.error)
    (curve,) = found.scaling.curves
    assert [point.missing for point in curve.points] == ["", "failed", ""]
    assert any("mirrored" in note and "failed" in note for note in found.scaling.notes)


def test_values_of_the_line_reach_the_cell_and_one_that_is_not_read_is_an_error() -> None:
    with notebook(2) as book:
        cell = FAILS_WITH_TWO.replace("world_size == 2", "world_size == 9")
        book.ok(f"%%distributed one_device --set lr=0.5,0.0 --plot text\n{cell}")
        fast, still = (wb.runs[f"one_device-lr={lr}"] for lr in ("0.5", "0.0"))
        moved = [float(abs(run.weights()["weight"]).sum()) for run in (fast, still)]
        told = book.run(f"%%distributed one_device --set rate=0.5 --plot text\n{cell}").error
        swept = wb.sweep(cell, "one_device", values={"lr": [0.1, 0.2]})
    assert moved[0] != moved[1]
    assert "WB-RUN-128" in str(told)
    assert "wb.options.get('rate', default)" in str(told)
    assert [row.options["lr"] for row in swept.comparison.rows] == [0.1, 0.2]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("mirrored -n 1,2 --batch-size 64 --batch-per-worker 32", "WB-PLAN-275"),
        ("mirrored -n 1,300", "256"),
        ("mirrored -n 2 --price 3", "WB-PLAN-284"),
        ("-n 1,2", "WB-PLAN-129"),
        ("mirrored -n 1,2 --background", "WB-PLAN-131"),
        ("mirrored -n 1,2 --to-job folder", "WB-PLAN-274"),
    ],
)
def test_what_cannot_be_run_is_refused_before_an_engine_is_touched(line: str, words: str) -> None:
    with notebook(2) as book:
        before = len(wb.runs)
        error = book.run(f"%%distributed {line}\n{FAILS_WITH_TWO}").error
        assert len(wb.runs) == before
        assert session.cluster is not None
        assert len(session.cluster.worker_ids) == 2
    assert isinstance(error, PlanError)
    assert words in str(error)


def test_a_sweep_that_fails_everywhere_raises_why() -> None:
    with notebook(2):
        with pytest.raises(RunError, match="two is too many"):
            wb.sweep(FAILS_WITH_TWO.replace("== 2", "> 0"), "mirrored", workers=[1, 2])
        with pytest.raises(PlanError, match="WB-PLAN-272"):
            wb.sweep(FAILS_WITH_TWO, "mirrored", workers=[1, 2], price="free")
