"""Cells whose servers die; their source travels, so each imports what it uses."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def train(victims=(), at=0, killer=0, moment="between", steps=20, clip=None, dying=None):
    """Train a small network; a worker ends servers at a moment of a step.

    Args:
        victims: Pids.
        at: Which push, counted from 1.
        killer: The rank that does it.
        moment: `between` two steps, `before` its push, when it was `sent`, `random`ly soon after.
        dying: (where, at, tensors): the optimizer ends its server instead.
    """
    import os
    import random
    import signal
    import threading
    import time

    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    model = torch.nn.Sequential(*layers).double()
    timers = []

    def strike():
        for victim in victims:
            os.kill(victim, signal.SIGKILL)

    def make(parameters):
        if dying is None:
            return torch.optim.SGD(parameters, 0.1, momentum=0.9)
        from dying_optimizer import Dying

        return Dying(parameters, 0.1, *dying)

    pushes = 0

    def wrapped(link):
        push = link.push

        def pushed(kind, meta, parts):
            nonlocal pushes
            pushes += kind == "push"
            now = kind == "push" and pushes == at
            if now and moment == "before":
                strike()
            push(kind, meta, parts)
            if now and moment == "sent":
                strike()
            if now and moment == "random":
                timers.append(threading.Timer(random.Random(at).uniform(0, 2e-3), strike))
                timers[-1].start()

        link.push = pushed

    ends = []

    def stepped(step, logs):
        ends.append(time.perf_counter())
        if moment == "between" and step + 1 == at and rank == killer:
            strike()

    if rank == killer and moment != "between" and victims:
        wrapped(context.links[0])
    fit(model, (x, y), loss=torch.nn.CrossEntropyLoss(), optimizer=make, batch_size=24,
        steps=steps, clip_norm=clip, callbacks=[stepped])  # fmt: skip
    for timer in timers:
        timer.join()
    gaps = [b - a for a, b in zip(ends, ends[1:])]  # noqa: B905, RUF007
    return {"pause_s": max(gaps, default=0.0), "servers": [link.server for link in context.links]}


def count_up(steps, victims, at, numbers=500):
    """Every push adds 1 to every parameter; rank 0 ends servers in mid-run."""
    import os
    import signal

    import torch

    from workbench.engine.training.user_loops import prepare

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.zeros(numbers) for _ in range(4))

        def forward(self, ones):
            return sum(-(part * ones).sum() for part in self.parts)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    prepare(model, optimizer)
    torn, back, seen = 0, 0, 0.0
    for step in range(steps):
        ends = [(part.min().item(), part.max().item()) for part in model.parts]
        torn += any(low != high for low, high in ends)
        back += ends[0][0] < seen
        seen = ends[0][0]
        optimizer.zero_grad()
        model(torch.ones(1)).backward()
        if rank == 0 and step == at:
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
        optimizer.step()
    return {"torn": torn, "back": back}


def twice(victims, at):
    """Train twice in a cell; servers die between the two, or in the first."""
    import os
    import signal

    import torch

    from workbench.engine.training.fit import fit

    x, y = torch.randn(64, 4), torch.randn(64, 1)
    results = []
    for turn in range(2):

        def strike(step, logs, turn=turn):
            if rank == 0 and turn == 0 and step == at:
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)

        if rank == 0 and turn == 1 and at < 0:
            for victim in victims:
                os.kill(victim, signal.SIGKILL)
        results.append(
            fit(torch.nn.Linear(4, 1), (x, y), loss=torch.nn.MSELoss(), batch_size=8, steps=10,
                optimizer=lambda p: torch.optim.SGD(p, 0.01), callbacks=[strike],
                eval_data=(x, y)).steps
        )  # fmt: skip
    return results


def tables(victims, at, steps=12):
    """Train a table of which a step uses a few rows; rank 0 ends servers in mid-run."""
    import os
    import signal

    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    rows = torch.nn.Embedding(200, 3, sparse=True)
    model = torch.nn.Sequential(rows, torch.nn.Flatten(), torch.nn.Linear(6, 2)).double()
    x = torch.randint(0, 199, (12 * steps, 2))
    y = torch.randn(12 * steps, 2, dtype=torch.float64)

    def strike(step, logs):
        if rank == 0 and step == at:
            for victim in victims:
                os.kill(victim, signal.SIGKILL)

    fit(model, (x, y), loss=torch.nn.MSELoss(), batch_size=12, steps=steps, callbacks=[strike],
        optimizer=lambda p: torch.optim.Adagrad(p, lr=0.2, initial_accumulator_value=1e-3),
        )  # fmt: skip
