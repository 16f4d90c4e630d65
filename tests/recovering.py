"""Helpers of the recovery tests: the training, the killed engines, and the checks at the end."""

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


HEALING_STEPS = 240


def healing_cell(folder, before="", more="", steps=HEALING_STEPS, model=MODEL):
    """Return a cell with steps that are long enough to disturb, until the file `hurry` exists.

    So all faults happen during the run, also on a slow machine.
    """
    source = (
        "import os, pathlib, signal, time\n"
        f"folder = pathlib.Path({str(folder)!r})\n"
        "def once(what):\n"
        "    flag = folder / f'{what}-{rank}'\n"
        "    there = flag.exists()\n"
        "    flag.touch()\n"
        "    return not there\n"
        "def die():\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "def pace(step, logs):\n"
        "    if step >= 20 and not (folder / 'hurry').exists():\n"
        "        time.sleep(0.05)\n"
    )
    return source + before + cell(steps, f", callbacks=[pace] {more}", model)


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


def counts_once(run, steps=HEALING_STEPS):
    """Check that every step has each row once; the dead worker's last row may be missing."""
    run.history.finish()
    rank, step, samples = (run.history[name] for name in ("rank", "step", "samples"))
    assert len(set(zip(rank.tolist(), step.tolist(), strict=True))) == len(step)
    assert run.history.totals.steps == steps
    each = np.bincount(step, samples, minlength=steps)
    fallen = [one["step"] for one in run.events if one["event"] == "healed"]
    whole = [at for at in range(steps) if not any(end - 50 <= at < end for end in fallen)]
    assert (each[whole] == 24).all()
    assert (each <= 24).all()
    assert run.history.totals.samples == samples.sum()
    assert run.history.totals.rows.sum() == len(step)
