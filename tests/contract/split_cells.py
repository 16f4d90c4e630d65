"""Cells for pipelines; their source travels, so each imports what it uses."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def deep(form="sequential", adamw=False, batch=24, steps=20, extra=None, fault=None, built=False):
    """Train a network of eight layers, given in one of several forms."""
    import torch
    from torch import nn

    from workbench.engine.training.fit import fit

    global keep

    class Residual(nn.Module):
        """No chain: a value skips a layer, a function stands between layers, blocks are nested."""

        def __init__(self):
            super().__init__()
            self.first = nn.Linear(8, 16)
            self.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])
            self.drop = nn.Dropout(0.0)
            self.last = nn.Linear(16, 3)

        def forward(self, inputs):
            h = start = torch.tanh(self.first(inputs))
            for block in self.blocks:
                h = h + torch.tanh(block(h))
            return self.last(self.drop(h) + start)

    def sequential():
        wide = [nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *wide, nn.Linear(16, 3)).double()

    def convolutional():
        return nn.Sequential(
            nn.Unflatten(1, (1, 2, 4)), nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(),
            nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(32, 3),
        ).double()  # fmt: skip

    class Swapped(nn.Module):
        """Hands on values that do not lie in memory in their order."""

        def forward(self, inputs):
            return inputs.transpose(1, 2)

    def in_place():
        wide = [nn.Linear(16, 16), nn.ReLU(inplace=True)]
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(inplace=True), *wide, nn.Linear(16, 3))

    def transposed():
        return nn.Sequential(
            nn.Linear(8, 16), nn.Unflatten(1, (2, 8)), Swapped(), nn.Linear(2, 2), Swapped(),
            nn.Flatten(), nn.Linear(16, 3),
        )  # fmt: skip

    class Initialised(nn.Sequential):
        """Draws its weights anew when all of it is built."""

        def __init__(self, *layers):
            super().__init__(*layers)
            for parameter in self.parameters():
                nn.init.normal_(parameter, std=0.3)

    def tied():
        first, second = nn.Linear(16, 16), nn.Linear(16, 16)
        second.weight = first.weight
        return Initialised(nn.Linear(8, 16), first, nn.Tanh(), second, nn.Linear(16, 3))

    torch.manual_seed(3)
    x, y = torch.randn(101, 8, dtype=torch.float64), torch.randint(0, 3, (101,))
    make = {
        "convolutional": convolutional, "residual": lambda: Residual().double(),
        "in place": lambda: in_place().double(), "transposed": lambda: transposed().double(),
        "tied": lambda: tied().double(),
    }.get(form, sequential)  # fmt: skip
    if form == "tied function":
        make = lambda: tied().double()  # noqa: E731
    model = make() if "function" not in form else make
    if form == "list":
        model = [model[:2], *model[2:]]
        model = [nn.Sequential(*model[:2]), nn.Sequential(*model[2:])]
    if form == "lambda":
        model = lambda: Residual().double()  # noqa: E731 - as a user writes it
    keep = {"model": model}
    optimizer = (
        (lambda p: torch.optim.AdamW(p, 0.01))
        if adamw
        else (lambda p: torch.optim.SGD(p, 0.2, momentum=0.9))
    )
    if built:
        optimizer = optimizer(model.parameters())
    result = fit(
        model, (x, y), loss=nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=batch,
        steps=steps, eval_data=(x[:31], y[:31]),
        metrics={"right": lambda out, y: (out.argmax(1) == y).double().mean()}, **(extra or {}),
    )  # fmt: skip
    held = [n for n, t in result.model.state_dict().items() if not t.is_meta]
    return {"evals": result.evals, "held": held}


def continued(split):
    """Train, take the state, train a fresh model from there; return both ends' state."""
    import torch
    from torch import nn

    from workbench.engine.contract import Job, Share
    from workbench.engine.training import fit_arguments

    def model():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3)).double()

    x, y = torch.randn(24, 8, dtype=torch.float64), torch.randint(0, 3, (24,))

    def begin():
        job = Job(
            model(), nn.CrossEntropyLoss(), None, lambda p: torch.optim.AdamW(p, 0.01), 24, 9, 9,
            scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        )  # fmt: skip
        strategy = fit_arguments.load_strategy(context)
        context.strategy = strategy
        strategy._sample = (x[:1], y[:1])
        strategy.prepare(job)
        return strategy

    first = begin()
    for step in range(split):
        first.step(Share((x, y), 24, 24, step, 0))
    saved = first.state()
    second = begin()
    second.load_state(saved)
    for step in range(split, 9):
        second.step(Share((x, y), 24, 24, step, 0))
    return saved["optimizer"]["param_groups"][0]["params"]


def sleeping(sleep_ms=10, stages=3, microbatches=8, steps=15, backward=True):
    """Stages that sleep, forward and backward, so that cores do not matter."""
    import time

    import torch

    from workbench.engine.training.fit import fit

    class Nap(torch.autograd.Function):
        @staticmethod
        def forward(ctx, inputs):
            return inputs.clone()

        @staticmethod
        def backward(ctx, gradient):
            time.sleep(sleep_ms / 1e3)
            return gradient

    class Sleepy(torch.nn.Linear):
        def forward(self, inputs):
            time.sleep(sleep_ms / 1e3)
            out = super().forward(inputs)
            return Nap.apply(out) if backward else out

    x, y = torch.randn(64, 8), torch.randn(64, 8)
    model = torch.nn.Sequential(*(Sleepy(8, 8) for _ in range(stages)))
    fit(
        model, (x, y), loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.01),
        batch_size=8 * microbatches, steps=steps,
    )  # fmt: skip


def memory(megabytes, layers, limited):
    """Train a model of so many megabytes where this worker may take no more than `limited`."""
    import gc
    import resource

    import torch
    from torch import nn

    from workbench.engine.training.fit import fit

    width = int((megabytes * 1e6 / layers / 4) ** 0.5)

    def model():
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    x, y = torch.randn(16, width), torch.randn(16, width)
    gc.collect()
    with open("/proc/self/statm") as file:  # in pages; the sixth is data and stack
        now = int(file.read().split()[5]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_DATA)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (now + int(limited * 1e6), before[1]))
        fit(
            model, (x, y), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 1e-3),
            batch_size=4, steps=2,
        )  # fmt: skip
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def fails(kind):
    """Call wb.fit with something a pipeline cannot train; return the error."""
    import torch
    from torch import nn

    from workbench.engine.training.fit import fit
    from workbench.errors import WorkbenchError

    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, inputs):
            h = self.a(inputs)
            if h.sum() > 0:
                h = -h
            return self.b(h)

    class View(nn.Module):
        def forward(self, inputs):
            return inputs.view(-1, 2)

    x, y = torch.randn(20, 4), torch.randn(20, 1)
    model = {
        "branching": Branching,
        "view": lambda: nn.Sequential(nn.Linear(4, 4), View(), nn.Linear(2, 1)),
        "shapes": lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 1)),
        "few layers": lambda: nn.Sequential(nn.Linear(4, 1)),
        "list": lambda: [nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1)],
        "odd input": lambda: nn.Sequential(nn.Linear(4, 1), nn.Tanh()),
    }.get(kind, lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1)))()
    extra = {"fp16": {"precision": "fp16"}, "accumulate": {"accumulate": 2}}.get(kind, {})
    objective = {"loss": nn.MSELoss()}
    if kind == "uneven":  # the loss is made by a method, so it is a part of the last stage

        class Scores(nn.Sequential):
            def score(self, batch):
                return ((self(batch[0]) - batch[1]) ** 2).mean()

        model = Scores(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
        objective = {"step_fn": lambda m, batch: m.score(batch)}
    data = (x, y)
    if kind == "odd input":
        data = [({"a": x[i]}, y[i]) for i in range(20)]
    try:
        fit(
            model, data, optimizer=lambda p: torch.optim.SGD(p, 0.1),
            batch_size=10 if kind != "uneven" else 7, steps=2, **objective, **extra,
        )  # fmt: skip
    except WorkbenchError as error:
        return str(error)
    return "no error"


def methods(samples=24):
    """Train with a step function that uses the model's methods, and with one that draws noise."""
    import torch
    from torch import nn

    from workbench.engine.training.fit import fit

    class Autoencoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
            self.decoder = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 6))

        def encode(self, x):
            return self.encoder(x)

        def training_step(self, batch):
            return ((self.decoder(self.encode(batch["x"])) - batch["x"]) ** 2).mean()

    torch.manual_seed(3)
    x = torch.randn(samples, 6, dtype=torch.float64)
    model = Autoencoder().double()
    return fit(
        model, [{"x": row} for row in x], step_fn=lambda m, batch: m.training_step(batch),
        optimizer=lambda p: torch.optim.AdamW(p, 0.01), batch_size=12, steps=6, clip_norm=0.5,
        eval_data=[{"x": row} for row in x[:12]],
    ).evals  # fmt: skip


def batchnorm():
    """Train with BatchNorm and a stream that shows its samples only while it is read."""
    import torch
    from torch import nn

    from workbench.engine.training.fit import fit

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for i in range(64):
                yield torch.full((4,), float(i)), torch.zeros(1)

    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    return fit(
        model, Stream(), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 1e-4),
        batch_size=16, steps=3,
    ).steps  # fmt: skip
