"""A line with several numbers of workers, from the notebook to the figure."""

from __future__ import annotations

import pytest
from needs import need
from notebook_shell import notebook

import workbench as wb

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
    assert found.verdict.startswith("You should not distribute this: ")
    assert "communicating" in found.verdict
    assert [point.workers for point in found.scaling.curves[0].points] == [1, 2]
