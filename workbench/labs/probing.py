"""Runs and messages on the cluster that a blind case describes: its delays are injected."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..session.interrupts import ending
from ..session.run import Run
from ..session.state import session
from .cases import Case

STEPS, PROBE_STEPS, WARM_UP = 9, 6, 2
MESSAGES = 6

_OPTIONS: dict[str, dict[str, Any]] = {"mirrored": {"allreduce": "ring"}}
_RECIPE = """
import torch
from torch import nn
model = nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.Tanh(), nn.Linear({width}, 10))
wb.fit(model, wb.data.digits("train"), loss=nn.CrossEntropyLoss(),
       optimizer=lambda p: torch.optim.SGD(p, 0.05), batch_size={batch})
"""
_MESSAGE = """
import time as _time
import torch
from workbench.engine.injector import FaultInjector as _FaultInjector
_faults = _FaultInjector(rank, {faults})
_message, _message_s = torch.zeros({size_bytes}, dtype=torch.uint8), []
for _ in range({messages}):
    _began = _time.perf_counter()
    for _sender in (0, 1):
        if rank == _sender:
            _faults.travel({size_bytes})
            dist.send(_message, 1 - rank)
        else:
            dist.recv(_message, 1 - rank)
    _message_s.append((_time.perf_counter() - _began) / 2)
del _time, _FaultInjector, _faults, _message, _began, _sender
"""


def train(case: Case, strategy: str, name: str, steps: int) -> Run:
    """Train the case's model under a strategy, on workers and links as the case has them."""
    cluster = session.need_cluster()
    with ending(cluster):
        run = cluster.run(
            _RECIPE.format(width=case.width, batch=case.batch),
            strategy=strategy,
            workers=1 if strategy == "one_device" else case.workers,
            framework="torch",
            options=_OPTIONS.get(strategy),
            name=name,
            inject=case.faults(strategy),
            steps=steps,
        )
        return run.wait()


def rate_of(run: Run) -> float:
    """Return samples per second: the sum over workers of their samples over their typical step.

    The typical step is the median after warm-up, so a hiccup of this machine does not count, and
    neither does the tail in which the slowest of asynchronous workers trains alone.
    """
    history = run.history
    ranks, late = history["rank"], history["step"] >= WARM_UP
    rates = [
        np.mean(history["samples"][mine]) / np.median(history["step_s"][mine])
        for mine in (late & (ranks == rank) for rank in np.unique(ranks))
    ]
    return float(sum(rates))


def message_s(case: Case, size_bytes: int) -> float:
    """Return the seconds of a message between two workers: the shortest of some there and back."""
    source = _MESSAGE.format(faults=case.link, size_bytes=size_bytes, messages=MESSAGES)
    cluster = session.need_cluster()
    with ending(cluster):
        task = cluster.execute(source, framework="torch", workers=2)
        task.over.wait()
    if (error := task.failure()) is not None:
        raise error
    found = cluster.pull(["_message_s"], task.ids[:1])
    return float(min(found[task.ids[0]]["_message_s"]))
