"""Cells for strategies with servers; their source travels, so each imports what it uses."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def digits(epochs, lr=0.1):
    """Train on digits; return the loss over the training set with the final weights."""
    import torch

    from workbench import data as workbench_data
    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Tanh(),
                                torch.nn.Linear(32, 10))  # fmt: skip
    loss = torch.nn.CrossEntropyLoss()
    train = workbench_data.digits("train")
    fit(model, train, loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr), batch_size=64,
        epochs=epochs)  # fmt: skip
    x, y = zip(*(train[i] for i in range(len(train))), strict=True)
    with torch.no_grad():
        return loss(model(torch.stack([torch.as_tensor(v) for v in x])), torch.tensor(y)).item()


def count_up(steps, numbers):
    """Every push adds 1 to every parameter; what a worker then sees must be of one version.

    Returns how often one tensor, and all tensors together, held unequal numbers.
    """
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
    torn = mixed = 0
    seen = []
    for _ in range(steps):
        ends = [(part.min().item(), part.max().item()) for part in model.parts]
        torn += any(low != high for low, high in ends)
        mixed += len(set(ends)) > 1
        seen.append(ends[0][0])
        optimizer.zero_grad()
        model(torch.ones(1)).backward()
        optimizer.step()
    return {"torn": torn, "mixed": mixed, "seen": seen}


def steps_on_one_copy():
    """One worker: the pushes' staleness is 0, 1, ... until it pulls again."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)
    model = torch.nn.Linear(4, 1).double()
    start = {k: v.clone().numpy() for k, v in model.state_dict().items()}
    fit(model, (x, y), loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        batch_size=10, steps=8, shuffle=False)  # fmt: skip
    return {"start": start, "x": x.numpy(), "y": y.numpy()}


def save_and_go_on(before, after, option=None, table=False):
    """Train, save, train on; then load what was saved into a fresh strategy and train on again.

    Both ways must end in the same weights.
    """
    import torch

    from workbench.engine.contract import Job
    from workbench.engine.torch.data import make_source

    torch.manual_seed(3)
    x, y = torch.randn(60, 4, dtype=torch.float64), torch.randn(60, 1, dtype=torch.float64)
    if table:
        x = torch.randint(0, 40, (60, 2))
    source = make_source((x, y), 12, seed=0, shuffle=False)

    def begin():
        torch.manual_seed(5)
        model = torch.nn.Linear(4, 1).double()
        make = lambda p: torch.optim.AdamW(p, 0.05)  # noqa: E731
        if table:
            rows = torch.nn.Embedding(50, 2, sparse=True).double()
            model = torch.nn.Sequential(rows, torch.nn.Flatten(), model)
            make = lambda p: torch.optim.Adagrad(p, 0.05)  # noqa: E731
        job = Job(model, torch.nn.MSELoss(), None, make, 12, 20, 5,
                  scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 3, 0.5))  # fmt: skip
        module, _, name = context.entry.module.partition(":")
        strategy = getattr(__import__(module, fromlist=[name]), name)(context)
        strategy.prepare(job)
        return strategy

    def train(strategy, steps):
        shares = source.shares(*strategy.shard)
        for _, share in zip(range(steps), shares):  # noqa: B905
            strategy.step(share)

    first = begin()
    train(first, before)
    saved = first.state()
    train(first, after)
    first.finish()
    whole = first.weights()
    first.close()
    second = begin()
    second.load_state(saved)
    train(second, after)
    second.finish()
    resumed = second.weights()
    second.close()
    return [abs(whole[k] - resumed[k]).max() for k in whole], sorted(saved)


def tables(rows=400, sparse=True, kind="adagrad", own_loop=False, clip=None, steps=6,
           accumulate=1):  # fmt: skip
    """Train two tables of which a step uses a few rows; the last row is never used."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.users = torch.nn.Embedding(rows, 3, sparse=sparse)
            self.items = torch.nn.Embedding(rows, 3, sparse=sparse)
            self.head = torch.nn.Linear(6, 2)

        def forward(self, pairs):
            found = torch.cat([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1)
            return torch.tanh(found) if kind == "sparse_adam" else self.head(found)

    model = Model().double()
    x = torch.randint(0, rows - 1, (12 * steps, 2))
    y = torch.randn(12 * steps, 6 if kind == "sparse_adam" else 2, dtype=torch.float64)
    if kind == "sparse_adam":
        model.head.requires_grad_(False)

    def make(parameters):
        if kind == "sparse_adam":
            return torch.optim.SparseAdam(list(parameters), lr=0.05)
        if kind == "sgd":
            return torch.optim.SGD(parameters, 0.3)
        return torch.optim.Adagrad(parameters, lr=0.2, initial_accumulator_value=1e-3)

    loss = torch.nn.MSELoss()
    if not own_loop:
        fit(model, (x, y), loss=loss, optimizer=make, batch_size=12, steps=steps,
            clip_norm=clip, accumulate=accumulate)  # fmt: skip
        return
    optimizer = make(p for p in model.parameters() if p.requires_grad)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()


def refused(kind):
    """Train with what servers cannot do; return the error's first line."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare
    from workbench.errors import WorkbenchError

    class Mine(torch.optim.SGD):
        pass

    x, y = torch.randn(20, 4), torch.randn(20, 1)
    model = torch.nn.Linear(4, 1)
    loss = torch.nn.MSELoss()
    make = {
        "own class": lambda p: Mine(p, 0.1),
        "closure": lambda p: torch.optim.LBFGS(p),
        "setting": lambda p: torch.optim.SGD([{"params": p, "note": object()}], 0.1),
    }.get(kind, lambda p: torch.optim.SGD(p, 0.1))
    try:
        if kind in ("own class", "setting", "servers"):
            fit(model, (x, y), loss=loss, optimizer=make, batch_size=10)
        elif kind == "sparse function":

            class Looked(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.table, self.head = torch.nn.Embedding(10, 4), torch.nn.Linear(4, 1)

                def forward(self, at):
                    weight = self.table.weight
                    rows = torch.nn.functional.embedding(at[:, 0], weight, sparse=True)
                    return self.head(rows)

            fit(Looked(), (torch.randint(0, 10, (20, 1)), y), loss=loss, optimizer=make,
                batch_size=10)  # fmt: skip
        elif kind == "sparse momentum":
            make = lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)  # noqa: E731
            model = torch.nn.Sequential(torch.nn.Embedding(10, 4, sparse=True), torch.nn.Flatten(),
                                        torch.nn.Linear(4, 1))  # fmt: skip
            fit(model, (torch.randint(0, 10, (20, 1)), y), loss=loss, optimizer=make, batch_size=10)
        else:
            optimizer = make(model.parameters())
            data = torch.utils.data.TensorDataset(x, y)
            loader = torch.utils.data.DataLoader(data, batch_size=10)
            model, optimizer, loader = prepare(model, optimizer, loader)
            for inputs, targets in loader:

                def closure(inputs=inputs, targets=targets):
                    optimizer.zero_grad()
                    value = loss(model(inputs), targets)
                    value.backward()
                    return value

                closure()
                if kind == "clip":
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
                optimizer.step(*([closure] if kind == "closure" else []))
    except WorkbenchError as error:
        return str(error).splitlines()[0]
    return "no error"


def unused_now_and_then(steps):
    """A parameter takes part in the loss in some steps only; elsewhere it must be left alone."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randn(40, 1, dtype=torch.float64)

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)
            self.calls = 0

        def forward(self, inputs):
            self.calls += 1
            return self.a(inputs) + (self.b(inputs) if self.calls % 3 == 0 else 0)

    fit(Model().double(), (x, y), loss=torch.nn.MSELoss(), batch_size=10, steps=steps,
        optimizer=lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1))  # fmt: skip


def kill_in_mid_run(victim, at):
    """Rank 0 ends another process while all train."""
    import os
    import signal

    import torch

    from workbench.engine.training.fit import fit

    def strike(step, logs):
        if step == at and rank == 0 and victim:
            os.kill(victim, signal.SIGKILL)

    x, y = torch.randn(64, 4), torch.randn(64, 1)
    fit(torch.nn.Linear(4, 1), (x, y), loss=torch.nn.MSELoss(), batch_size=8, steps=2000,
        optimizer=lambda p: torch.optim.SGD(p, 0.01), callbacks=[strike])  # fmt: skip


def stopped_alone(at):
    """Asynchronous workers stop at a step of their own."""
    import torch

    from workbench.engine.training.fit import fit

    def press(step, logs):
        if step == at[rank]:
            context.gate.halt_at("stop", -1)

    x, y = torch.randn(64, 4), torch.randn(64, 1)
    return fit(torch.nn.Linear(4, 1), (x, y), loss=torch.nn.MSELoss(), batch_size=8, steps=500,
               optimizer=lambda p: torch.optim.SGD(p, 0.01), callbacks=[press]).stopped  # fmt: skip


def two_trainings(fails_first):
    """Two calls of wb.fit in one cell go through the same links."""
    import torch

    from workbench.engine.training.fit import fit

    x, y = torch.randn(64, 4), torch.randn(64, 1)
    results = []
    for epoch in range(2):

        def trip(step, logs, epoch=epoch):
            if fails_first and epoch == 0 and step == 3:
                raise ZeroDivisionError

        try:
            results.append(
                fit(torch.nn.Linear(4, 1), (x, y), loss=torch.nn.MSELoss(), batch_size=8, steps=10,
                    optimizer=lambda p: torch.optim.SGD(p, 0.01), callbacks=[trip]).steps
            )  # fmt: skip
        except ZeroDivisionError:
            results.append(0)
    return results


def wide_steps(features):
    """Steps of little work with 4 (features + 1) bytes of parameters."""
    import torch

    from workbench.engine.training.fit import fit

    x, y = torch.randn(24, features), torch.randn(24, 1)
    fit(torch.nn.Linear(features, 1), (x, y), loss=torch.nn.MSELoss(), batch_size=12, steps=30,
        optimizer=lambda p: torch.optim.SGD(p, 0.0))  # fmt: skip
