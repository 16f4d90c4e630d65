"""Cells that the suite runs; their source travels, so each imports what it uses."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def train(
    dtype="float64",
    samples=100,
    batch=23,
    steps=20,
    accumulate=1,
    clip=None,
    scheduled=False,
    pairs=True,
    unused=False,
    network="mlp",
    optimizer="SGD",
    extra=None,
):
    """Train a small network; 100 samples in 23s leave an uneven batch of 8."""
    import torch

    from workbench.engine.training.fit import fit

    global keep
    torch.manual_seed(3)
    kind = getattr(torch, dtype)
    x, y = torch.randn(samples, 8, dtype=kind), torch.randint(0, 3, (samples,))
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    if network == "cnn":
        convolutions = [torch.nn.Conv2d(1, 4, 3), torch.nn.Tanh(), torch.nn.Conv2d(4, 8, 2)]
        layers = [torch.nn.Unflatten(1, (1, 2, 4)), torch.nn.ZeroPad2d(1), *convolutions]
        layers += [torch.nn.Tanh(), torch.nn.Flatten(), torch.nn.Linear(24, 3)]
    model = torch.nn.Sequential(*layers).to(kind)
    if unused:
        model.register_parameter("idle", torch.nn.Parameter(torch.zeros(3, dtype=kind)))
    cross_entropy = torch.nn.CrossEntropyLoss()
    keep = {"model": model}
    result = fit(
        model,
        (x, y),
        loss=cross_entropy if pairs else None,
        step_fn=None if pairs else lambda m, b: cross_entropy(m(b[0]), b[1]),
        optimizer=lambda p: (
            torch.optim.SGD(p, 0.2, momentum=0.9)
            if optimizer == "SGD"
            else torch.optim.AdamW(p, 1e-2)
        ),
        batch_size=batch,
        steps=steps,
        accumulate=accumulate,
        clip_norm=clip,
        scheduler=(lambda o: torch.optim.lr_scheduler.StepLR(o, 5, 0.5)) if scheduled else None,
        eval_data=(x[:31], y[:31]),
        metrics={"right": lambda out, y: (out.argmax(1) == y).double().mean()} if pairs else None,
        **(extra or {}),
    )
    return {"steps": result.steps, "loss": result.loss, "evals": result.evals}


def train_from_loader(own_loop, processes=0, custom_sampler=False, batch=23, epochs=3):
    """Train from a DataLoader, by wb.fit or by an own loop under wb.prepare."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    global keep
    torch.manual_seed(3)
    x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
    model = model.double()
    loss_fn = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    sampler = WeightedRandomSampler([1.0, 2.0] * 50, 90) if custom_sampler else None
    loader = DataLoader(
        TensorDataset(x, y), batch_size=batch, shuffle=sampler is None, sampler=sampler,
        num_workers=processes,
    )  # fmt: skip
    if not own_loop:
        fit(model, loader, loss=loss_fn, optimizer=optimizer, epochs=epochs)
        keep = {"model": model}
        return None
    model, optimizer, loader = prepare(model, optimizer, loader)
    keep = {"model": model}
    for _ in range(epochs):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss_fn(model(inputs), targets).backward()
            optimizer.step()
        with torch.no_grad():
            if rank == 0:  # a worker may evaluate alone
                model(x.to(device))  # noqa: F821
    return list(model.state_dict())


def processes_after_fit(persistent):
    """Train three of eight steps from two processes; return how many of them live after `fit`."""
    import multiprocessing

    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from workbench.engine.training.fit import fit

    before = len(multiprocessing.active_children())
    data = TensorDataset(torch.randn(96, 8), torch.randint(0, 3, (96,)))
    fit(
        torch.nn.Linear(8, 3),
        DataLoader(data, batch_size=12, num_workers=2, persistent_workers=persistent),
        loss=torch.nn.CrossEntropyLoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), steps=3,
    )  # fmt: skip
    return len(multiprocessing.active_children()) - before


def slow_steps(own_loop=False, steps=30, millis=12):
    """Steps of at least `millis` ms, most of it asleep so that cores do not matter."""
    import time

    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    class Sleepy(torch.nn.Linear):
        def forward(self, inputs):
            time.sleep(millis / 3e3)
            return super().forward(inputs)

    x, y = torch.randn(120, 8), torch.randn(120, 1)
    model = torch.nn.Sequential(Sleepy(8, 8), Sleepy(8, 8), Sleepy(8, 1))
    loss = torch.nn.MSELoss()

    if not own_loop:
        fit(
            model, (x, y), loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.01),
            batch_size=12, steps=steps, eval_data=(x[:12], y[:12]),
        )  # fmt: skip
        return
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for _ in range(steps // 10):
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()


def watched_loop(steps=30):
    """A loop with a DDP of its own, under wb.watch."""
    import torch

    from workbench.engine.training.user_loops import watch

    global keep
    torch.manual_seed(3)
    x, y = torch.randn(20 * steps, 8), torch.randn(20 * steps, 1)
    plain = torch.nn.Linear(8, 1)
    keep = {"plain": plain}
    model = torch.nn.parallel.DistributedDataParallel(plain)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(x, y)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, batch_size=20 // world_size, sampler=sampler)
    watch(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
    keep["model"] = model
    return [type(loader).__name__, all(len(name) > 6 for name in model.state_dict())]


def watched_adapter():
    """A loader whose class says it is another one, as accelerate's do."""
    import torch

    from workbench.engine.training.user_loops import watch

    class Adapter(torch.utils.data.DataLoader):
        @property
        def __class__(self):
            return torch.utils.data.DataLoader

        def __iter__(self):
            for batch in super().__iter__():
                yield [part * 2 for part in batch]

    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    loader = Adapter(torch.utils.data.TensorDataset(torch.ones(40, 8)), batch_size=10)
    watch(model, optimizer, loader)
    seen = set()
    for (inputs,) in loader:
        optimizer.zero_grad()
        model(inputs).sum().backward()
        optimizer.step()
        seen.update(inputs.flatten().tolist())
    return type(loader).__name__, seen


def averaged_by_hand(steps=10, averages=True):
    """A loop that averages its gradients with its own collectives, or forgets to, under watch."""
    import torch
    import torch.distributed as dist

    from workbench.engine.training.user_loops import watch

    torch.manual_seed(3)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(10 * steps, 8), torch.randn(10 * steps, 1))
    loader = torch.utils.data.DataLoader(data, batch_size=10)
    watch(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        for parameter in model.parameters() if averages else ():
            dist.all_reduce(parameter.grad)
        optimizer.step()


def without_all_reduce(guarded):
    """The canary: a data-parallel strategy that forgot to average its gradients."""
    import torch

    from workbench.strategies.torch.parts import guard, reduction

    right = reduction.Reduction.before_backward, reduction.Reduction.after_backward
    due = guard.Guard.due
    reduction.Reduction.before_backward = lambda self, tensors: tensors
    reduction.Reduction.after_backward = lambda self: None
    if not guarded:
        guard.Guard.due = lambda self: False
    try:
        from workbench.engine.training.fit import fit

        torch.manual_seed(3)
        x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3))
        fit(
            model.double(), (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=23, steps=20,
            optimizer=lambda p: torch.optim.SGD(p, 0.2, momentum=0.9),
        )  # fmt: skip
    finally:
        reduction.Reduction.before_backward, reduction.Reduction.after_backward = right
        guard.Guard.due = due


def train_on_links_that_become_slow():
    """Set a fault during the run, as `run.inject` does: the strategy began without it."""
    import torch

    from workbench.engine.training.fit import fit

    fit(
        torch.nn.Linear(8, 1), (torch.randn(40, 8), torch.randn(40, 1)),
        loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=10,
        steps=4, callbacks=lambda step, logs: context.faults.set(["bandwidth=100MB/s"]),
    )  # fmt: skip


def stopped(own_loop, at=5):
    """Stop is agreed while step 2 runs; steps up to `at` are still done."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    x, y = torch.randn(64, 4), torch.randn(64, 1)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, n) for n in (4, 4, 1)))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)

    def press(step, logs=None):
        if step == 2:
            context.gate.halt()
            context.gate.halt_at("stop", at)

    if not own_loop:
        return fit(
            model, (x, y), loss=torch.nn.MSELoss(), optimizer=optimizer, batch_size=8, steps=50,
            callbacks=[press],
        ).stopped  # fmt: skip
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for _ in range(7):
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            press(context.step)
    return False


def without_sockets(apart):
    """Train while the worker of rank `apart` has no folder for a socket; were there sockets?"""
    import tempfile

    import torch

    from workbench.engine import context as engine_context
    from workbench.engine.training.fit import fit

    x, y = torch.randn(60, 8), torch.randn(60, 1)
    before = tempfile.gettempdir()
    near = []
    try:
        if rank == apart:
            tempfile.tempdir = "/nowhere"
        fit(
            torch.nn.Sequential(torch.nn.Linear(8, 30), torch.nn.Tanh(), torch.nn.Linear(30, 1)),
            (x, y), loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
            batch_size=12, steps=6,
            callbacks=lambda step, logs: near.append(
                engine_context.current().strategy.averaging.links.peers is not None
            ),
        )  # fmt: skip
    finally:
        tempfile.tempdir = before
    return all(near)


def blocked():
    """Rank 0 waits in an all-reduce that rank 1 never joins, until its sockets are shut."""
    import threading
    import time

    import torch
    import torch.distributed as dist

    from workbench.engine.torch import support

    store = dist.distributed_c10d._get_default_store()
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        store.wait(["given up"])
        return None
    count = []
    timer = threading.Timer(0.2, lambda: count.append(support.shutdown_group_sockets()))
    timer.start()
    began = time.perf_counter()
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError:
        return time.perf_counter() - began
    finally:
        timer.join()
        store.set("given up", "yes")
