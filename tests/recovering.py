"""What tests of recovery share: what is trained, who is killed, and what must hold at the end."""

import contextlib
import os
import signal

import numpy as np
from notebook_shell import soon

STEPS = 120
EXACT = 1e-12
"""Which all-reduce is fastest is measured anew, and each adds up in another order."""
MODEL = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
"""
FIT = """
import torch
from torch import nn
generator = torch.Generator().manual_seed(1)
x = torch.randn(96, 8, generator=generator).double(); y = torch.randint(0, 4, (96,), generator=generator)
wb.fit(model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=24, steps=STEPS,
       optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9) MORE)
"""  # noqa: E501


def cell(steps=STEPS, more="", model=MODEL):
    return model + FIT.replace("STEPS", str(steps)).replace("MORE", more)


def pids(cluster):
    return {engine.id: engine.pid for engine in cluster.engines}


def kill(cluster, *engines):
    for engine in engines:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids(cluster)[engine], signal.SIGKILL)


def going(run, steps):
    assert soon(lambda: run.is_over or run.history.totals.steps >= steps), run
    return run


def difference(weights, others):
    return max(float(np.abs(weights[name] - others[name]).max()) for name in others)


def every_step_counts_once(run, steps=STEPS):
    run.history.finish()
    seen = list(zip(run.history["rank"].tolist(), run.history["step"].tolist(), strict=True))
    assert len(seen) == len(set(seen))
    assert run.history.totals.steps == steps
    assert run.history.totals.samples == 24 * steps
