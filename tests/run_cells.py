"""Cells that train with PyTorch until a test ends them, and the progress of their run."""

from __future__ import annotations

from notebook_shell import soon

FIT = """
import torch
from torch import nn
model = nn.Linear(64, 10)
wb.fit(model, wb.data.synthetic(256, shape=(64,), classes=10), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.01), batch_size=32, steps=STEPS)
"""
SHORT = FIT.replace("STEPS", "6")
ENDLESS = FIT.replace("STEPS", "1_000_000")
LOOP = """
import torch
from torch import nn
model = nn.Linear(64, 10); optimizer = torch.optim.SGD(model.parameters(), 0.1)
data = wb.data.synthetic(128, shape=(64,), classes=10)
loader = torch.utils.data.DataLoader(data, batch_size=64, shuffle=True)
model, optimizer, loader = wb.prepare(model, optimizer, loader)
for epoch in range(EPOCHS):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
"""


def going(run, steps=3):
    """Wait until a run has done some steps."""
    assert soon(lambda: run.is_over or run.history.totals.steps >= steps), run
    assert not run.is_over, run.error
    return run


def steps_by_rank(run):
    return [int((run.history["rank"] == r).sum()) for r in range(len(run.engines))]
