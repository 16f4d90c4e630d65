"""Cells with odd models, optimizers and arguments; their source travels, as in `cells.py`."""

from __future__ import annotations

rank = 0  # the running worker's


def batchnorm(own_loop):
    """Train with BatchNorm; return its running mean."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    if own_loop:
        data = torch.utils.data.TensorDataset(x, y)
        loader = torch.utils.data.DataLoader(data, batch_size=16)
        model, optimizer, loader = prepare(model, optimizer, loader)
        for inputs, targets in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    else:
        fit(model, (x, y), loss=torch.nn.MSELoss(), optimizer=optimizer, batch_size=16)
    return model[0].running_mean.tolist()


def copies():
    """What can be done with a prepared model besides training it."""
    import copy
    import io

    import torch

    from workbench.engine.training.user_loops import prepare

    global keep
    model = torch.nn.Sequential(torch.nn.Linear(4, 1))
    keep = {"model": model}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    same, _ = prepare(model, optimizer)
    copied = copy.deepcopy(same)
    saved = io.BytesIO()
    torch.save(same, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    with same.no_sync() if hasattr(same, "no_sync") else torch.enable_grad():
        pass
    x = torch.ones(2, 4, device=device)  # noqa: F821
    for _ in range(2):
        optimizer.zero_grad()
        same(x).sum().backward()
        optimizer.step()
    same_output = bool((copied(x) == loaded(x)).all())
    return [
        same is model,
        type(copied) is torch.nn.Sequential,
        same_output,
        list(same.state_dict()),
    ]


def outputs(kind):
    """Train a model whose forward returns something else than one tensor."""
    import dataclasses

    import torch

    from workbench.engine.training.fit import fit

    @dataclasses.dataclass
    class Wrapped:
        out: torch.Tensor

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 4, dtype=torch.float64)
            self.scale = torch.nn.Parameter(torch.ones(4, dtype=torch.float64))

        def forward(self, x, y=None):
            out = torch.tanh(self.inner(x)) * self.scale
            if kind == "dict":
                return {"out": out, "count": len(x)}
            if kind == "dataclass":
                return Wrapped(out)
            if kind == "tuple":
                return [(out, None), out.detach()]
            if kind == "parameter":
                return out, self.scale
            if kind == "loss":
                return ((out - y) ** 2).mean()
            return out

    def step(model, batch):
        x, y = batch
        if kind == "loss":
            return model(x, y)
        out = model(x)
        if kind == "dict":
            out = out["out"]
        elif kind == "dataclass":
            out = out.out
        elif kind == "tuple":
            out = out[0][0]
        elif kind == "parameter":
            out, scale = out
            return ((out - y) ** 2).mean() + 0.1 * (scale**2).mean()
        elif kind == "twice":
            out = out + 0.5 * model(x + 1)
        return ((out - y) ** 2).mean()

    torch.manual_seed(3)
    x, y = torch.randn(40, 8, dtype=torch.float64), torch.randn(40, 4, dtype=torch.float64)
    fit(
        Model(), (x, y), step_fn=step, batch_size=10, steps=12, compile=kind == "compiled",
        optimizer=lambda p: torch.optim.SGD(p, 0.2, momentum=0.9),
    )  # fmt: skip


def different_models():
    """Every worker builds a model of another width; return the error's first line."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.errors import FitError

    x, y = torch.randn(20, 4), torch.randn(20, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 3 + rank), torch.nn.Linear(3 + rank, 1))
    try:
        fit(
            model, (x, y), loss=torch.nn.MSELoss(), batch_size=10, steps=2,
            optimizer=lambda p: torch.optim.SGD(p, 0.1),
        )  # fmt: skip
    except FitError as error:
        return str(error).splitlines()[0]


def sparse_embedding(steps=10):
    """Train with sparse gradients; return the error's first line, if it is refused."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.errors import FitError

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Embedding(12, 4, sparse=True), torch.nn.Flatten(),
                                torch.nn.Linear(8, 3)).double()  # fmt: skip
    x, y = torch.randint(0, 12, (60, 2)), torch.randint(0, 3, (60,))
    try:
        fit(model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=12, steps=steps,
            optimizer=lambda p: torch.optim.SGD(p, 0.2))  # fmt: skip
    except FitError as error:
        return str(error).splitlines()[0]
    return "trained"


def own_closure(steps=4):
    """An own loop whose optimizer calls a closure; return whether the loss went down."""
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x = torch.randn(40, 4, dtype=torch.float64)
    model, loss_fn = torch.nn.Linear(4, 1).double(), torch.nn.MSELoss()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=10)
    before = loss_fn(model(x), x.sum(1, keepdim=True)).item()
    model, optimizer, loader = prepare(model, optimizer, loader)
    for inputs, targets in loader:

        def closure(inputs=inputs, targets=targets):
            optimizer.zero_grad()
            value = loss_fn(model(inputs), targets)
            value.backward()
            return value

        optimizer.step(closure)
    x = x.to(device)  # noqa: F821
    return loss_fn(model(x), x.sum(1, keepdim=True)).item() < 0.1 * before


def fails(kind):
    """Call wb.fit with something that cannot be trained; return the error's first line."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.errors import FitError

    x, y = torch.randn(20, 4), torch.randn(20, 1)
    model = torch.nn.Linear(4, 1)
    good = {
        "model": model, "data": (x, y), "loss": torch.nn.MSELoss(), "batch_size": 10,
        "optimizer": lambda p: torch.optim.SGD(p, 0.1),
    }  # fmt: skip
    foreign = torch.optim.SGD(torch.nn.Linear(4, 1).parameters(), 0.1)
    bad = {
        "no data": {"data": None},
        "no model": {"model": None},
        "no module": {"model": 3},
        "a class": {"model": torch.nn.Linear},
        "frozen": {"model": torch.nn.Linear(4, 1).requires_grad_(False)},
        "no loss": {"loss": None},
        "two losses": {"step_fn": lambda m, b: 0},
        "loss class": {"loss": torch.nn.MSELoss},
        "small batch": {"batch_size": 1},
        "no batch": {"batch_size": None},
        "zero epochs": {"epochs": 0},
        "negative seed": {"seed": -1},
        "empty": {"data": (x[:0], y[:0])},
        "ragged": {"data": (x, y[:3])},
        "odd data": {"data": "digits"},
        "no pairs": {"data": (x, y, y)},
        "foreign optimizer": {"optimizer": foreign},
        "odd optimizer": {"optimizer": 0.1},
        "closure": {"optimizer": torch.optim.LBFGS},
        "built closure": {"optimizer": torch.optim.LBFGS(model.parameters())},
        "precision": {"precision": "int8"},
        "clip": {"clip_norm": 0},
        "names of metrics": {"metrics": ["accuracy"]},
        "metrics": {"loss": None, "step_fn": lambda m, b: 0, "metrics": {"a": len}},
        "eval": {"eval_every": 3},
        "callback": {"callbacks": [3]},
    }[kind]
    try:
        fit(**{**good, **bad})
    except FitError as error:
        return str(error).splitlines()[0]
    return "no error"


def lazy(own_loop=False, broken=False):
    """A model whose layers learn their shapes from the data."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare

    global keep
    x, y = torch.randn(64, 8, dtype=torch.float64), torch.randint(0, 3, (64,))
    torch.manual_seed(3)
    model = torch.nn.Sequential(
        torch.nn.LazyLinear(16), torch.nn.Tanh(), torch.nn.Dropout(0.0), torch.nn.LazyLinear(3)
    ).double()  # fmt: skip
    keep = {"model": model}
    if broken:
        model.forward = lambda x, mask: None
    loss = torch.nn.CrossEntropyLoss()
    data = torch.utils.data.TensorDataset(x, y)
    if not own_loop:
        fit(model, data, loss=loss, optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=64)
        return [list(p.shape) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=64)
    model, optimizer, loader = prepare(model, optimizer, loader)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    return [list(p.shape) for p in model.parameters()]
