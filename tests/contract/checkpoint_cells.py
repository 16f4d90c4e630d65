"""Cells for `test_checkpoints`; their source travels, so each imports what it uses."""

from __future__ import annotations

rank = 0


def trained(steps, dropout=0.0, adam=False, seed=3):
    """Train in float64, with momentum, a scheduler and, if asked for, dropout."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(seed)
    x, y = torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 3, (60,))
    torch.manual_seed(seed + rank)  # dropout differs from rank to rank
    build = torch.optim.Adam if adam else lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9)
    torch.manual_seed(seed)
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    if dropout:
        layers.insert(2, torch.nn.Dropout(dropout))
        torch.manual_seed(seed + rank)
    result = fit(
        torch.nn.Sequential(*layers).double(), (x, y), loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: build(p, 0.1), batch_size=12, steps=steps,
        scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.7),
    )  # fmt: skip
    return result.steps


def looped(epochs, keep=True, limit=None):
    """The same in an own loop, with a scheduler stepped after each epoch."""
    import torch

    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x, y = torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 3, (60,))
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    model = torch.nn.Sequential(*layers).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=12, shuffle=True)
    model, optimizer, loader = prepare(model, optimizer, loader, keep=[scheduler] if keep else [])
    loss_fn, seen = torch.nn.CrossEntropyLoss(), 0
    for _ in range(epochs):
        for xs, ys in loader:
            optimizer.zero_grad()
            loss_fn(model(xs), ys).backward()
            optimizer.step()
            seen += 1
            if seen == limit:
                return seen
        scheduler.step()
    return seen


def twice(last=12):
    """Train two models after each other; what is saved and gone on with is the second."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 3, (60,))
    model = torch.nn.Linear(8, 3).double()
    for steps in (6, last):
        fit(
            model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=12, steps=steps,
            optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        )  # fmt: skip


def watched():
    """A loop that distributes itself."""
    import torch

    from workbench.engine.training.user_loops import watch

    model = torch.nn.Linear(4, 2)
    watch(model, torch.optim.SGD(model.parameters(), 0.1))


def sampled(kind, steps):
    """Train from a stream, from a loader with processes, or with a transform that draws numbers."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 3, (60,))

    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, place):
            return x[place] + 0.1 * torch.randn(8, dtype=torch.float64), y[place]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(zip(x, y, strict=True))

    Loader = torch.utils.data.DataLoader
    data = {
        "noisy": Noisy(),
        "stream": Loader(Stream(), batch_size=12),
        "processes": Loader(torch.utils.data.TensorDataset(x, y), 12, shuffle=True, num_workers=1),
    }[kind]
    fit(
        torch.nn.Linear(8, 3).double(), data, loss=torch.nn.CrossEntropyLoss(), batch_size=12,
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), steps=steps,
    )  # fmt: skip


def in_order(kind, steps=None, epochs=5, limit=None, leaves=None):
    """Train on data whose order depends on earlier epochs, by `fit` (`steps`) or in an own loop.

    The loop leaves every second epoch after `leaves` batches.
    """
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x, y = torch.randn(60, 8, dtype=torch.float64), torch.randint(0, 3, (60,))
    own = torch.Generator().manual_seed(4)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            for place in torch.randperm(60, generator=own).tolist():
                yield x[place] + 0.1 * torch.randn(8, generator=own, dtype=x.dtype), y[place]

    class Sized(Stream):
        def __len__(self):
            return 60

    Loader = torch.utils.data.DataLoader
    if kind == "sampler":
        sampler = torch.utils.data.SubsetRandomSampler(range(60), generator=own)
        loader = Loader(torch.utils.data.TensorDataset(x, y), batch_size=12, sampler=sampler)
    else:
        loader = Loader({"stream": Stream, "sized stream": Sized}[kind](), batch_size=12)
    model, loss_fn = torch.nn.Linear(8, 3).double(), torch.nn.CrossEntropyLoss()
    if steps:
        fit(model, loader, loss=loss_fn, optimizer=lambda p: torch.optim.SGD(p, 0.1), steps=steps)
        return steps
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model, optimizer, loader = prepare(model, optimizer, loader)
    seen = 0
    for epoch in range(epochs):
        for at, (xs, ys) in enumerate(loader, 1):
            optimizer.zero_grad()
            loss_fn(model(xs), ys).backward()
            optimizer.step()
            seen += 1
            if seen == limit:
                return seen
            if epoch % 2 and at == leaves:
                break
    return seen
