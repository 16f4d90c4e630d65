"""Cells for strategies that lay a model out over the workers, and for replicas that drift."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def attention(style="named", steps=10, clip=None):
    """Train a small network with attention and an MLP under usual names."""
    import torch
    from torch import nn

    from workbench.engine.training.fit import fit

    class Attention(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.heads = heads
            self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
            self.v_proj, self.o_proj = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            n, t, width = x.shape

            def heads(y):
                return y.view(n, t, self.heads, width // self.heads).transpose(1, 2)

            q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
            weights = (q @ k.transpose(-2, -1) / (width // self.heads) ** 0.5).softmax(-1)
            return self.o_proj((weights @ v).transpose(1, 2).reshape(n, t, width))

    class Block(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm, self.attention = nn.LayerNorm(width), Attention(width, 4)
            self.fc1, self.fc2 = nn.Linear(width, 16), nn.Linear(16, width)

        def forward(self, x):
            x = x + self.attention(self.norm(x))
            hidden = torch.tanh(self.fc1(x))
            if style == "normed":  # no pair: what lies between looks at the whole row
                hidden = hidden - hidden.mean(-1, keepdim=True)
            return x + self.fc2(hidden)

    torch.manual_seed(3)
    x, y = torch.randn(48, 3, 8, dtype=torch.float64), torch.randint(0, 3, (48,))
    model = nn.Sequential(Block(8), Block(8), nn.Flatten(), nn.Linear(24, 3)).double()
    fit(
        model, (x, y), loss=nn.CrossEntropyLoss(), batch_size=24, steps=steps, clip_norm=clip,
        optimizer=lambda p: torch.optim.AdamW(p, 1e-2),
    )  # fmt: skip


def built_optimizer(steps=8):
    """Train twice in one cell with a built optimizer and scheduler; return what they are after."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(64, 8, dtype=torch.float64), torch.randint(0, 3, (64,))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)
    ).double()
    before = list(model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    for _ in range(2):
        fit(
            model, (x, y), loss=torch.nn.CrossEntropyLoss(), optimizer=optimizer, batch_size=16,
            scheduler=scheduler, steps=steps,
        )  # fmt: skip
    held = [p for group in optimizer.param_groups for p in group["params"]]
    same = all(a is b for a, b in zip(before, model.parameters(), strict=True))
    return {
        "same parameters": same,
        "in the optimizer": all(a is b for a, b in zip(before, held, strict=True)),
        "state": sorted(tuple(optimizer.state[p]["exp_avg"].shape) for p in before),
        "lr": optimizer.param_groups[0]["lr"],
    }


def held_while_training(dim=64):
    """Return how many numbers of parameters and optimizer this worker holds during training."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(dim, dim), torch.nn.Tanh(), torch.nn.Linear(dim, 4))
    whole = sum(p.numel() for p in model.parameters())
    x, y = torch.randn(24, dim), torch.randint(0, 4, (24,))
    seen = {}

    def look(step, logs):
        optimizer = context.strategy.trainer.optimizer
        own = [getattr(p.data, "_local_tensor", p.data) for p in model.parameters()]
        moments = [
            getattr(value, "_local_tensor", value)
            for state in optimizer.state.values()
            for value in state.values()
            if value.dim()
        ]
        seen["parameters"] = sum(t.numel() for t in own)
        seen["moments"] = sum(t.numel() for t in moments)

    fit(
        model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=12, steps=2, callbacks=[look],
        optimizer=lambda p: torch.optim.Adam(p, 1e-3),
    )  # fmt: skip
    return {
        "whole": whole,
        **seen,
        "after": [p.device.type for p in model.parameters()],
    }


def drifting(steps=24, lr=0.05, classes=4, apart=False):
    """Train replicas on data by class; return the labels this worker was given.

    With `apart` the replicas begin as their ranks: with lr 0 only the mixing is left to see.
    """
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    y = torch.arange(96) % classes
    x = torch.nn.functional.one_hot(y, 8).double() + 0.1 * torch.randn(96, 8, dtype=torch.float64)
    given = []

    def step_fn(model, batch):
        if torch.is_grad_enabled():
            given.extend(batch[1].tolist())
            if apart and context.step == 0:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.fill_(float(context.spec.rank))
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    fit(
        torch.nn.Linear(8, classes).double(), (x, y), step_fn=step_fn, batch_size=24, steps=steps,
        optimizer=lambda p: torch.optim.SGD(p, lr), eval_data=(x, y), eval_every=steps,
    )  # fmt: skip
    return given


def parametrized():
    """Train layers whose weights are computed from other parameters, beside a plain one."""
    import torch
    from torch import nn
    from torch.nn.utils import parametrizations

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 8)), nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(8, 8)), nn.Tanh(), nn.Linear(8, 2),
    ).double()  # fmt: skip
    x, y = torch.randn(24, 6, dtype=torch.float64), torch.randn(24, 2, dtype=torch.float64)
    fit(
        model, (x, y), loss=nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        batch_size=12, steps=6,
    )  # fmt: skip


def warned():
    """Train a module; return the warnings that it would show."""
    import warnings

    import torch
    from torch import nn

    from workbench.engine.training.fit import fit

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

        def forward(self, inputs):
            return torch.tanh(self.second(torch.tanh(self.first(inputs))))

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        fit(
            Two(), (torch.randn(24, 4), torch.randn(24, 1)), loss=nn.MSELoss(),
            optimizer=lambda p: torch.optim.SGD(p, 0.1), batch_size=12, steps=2,
        )  # fmt: skip
    return [str(warning.message) for warning in seen]


def refused(kind):
    """Call wb.fit with something that the strategy cannot train; return the whole error."""
    import torch

    from workbench.engine.training.fit import fit
    from workbench.errors import FitError

    x, y = torch.randn(24, 4), torch.randn(24, 1)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
    optimizer: object = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    if kind == "attribute":

        class Keeps(torch.optim.SGD):
            def __init__(self, parameters):
                super().__init__(parameters, 0.1)
                self.kept = self.param_groups[0]["params"]

        optimizer = Keeps(model.parameters())
    if kind == "no layer":
        model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LayerNorm(4))
        y = torch.randn(24, 4)
    if kind == "complex":

        class Turned(torch.nn.Linear):
            def __init__(self):
                super().__init__(4, 1)
                self.angle = torch.nn.Parameter(torch.ones(1, dtype=torch.complex64))

            def forward(self, inputs):
                return (super().forward(inputs) * self.angle).real

        model = Turned()
    if kind == "different":
        model = torch.nn.Linear(4, 1 + context.spec.rank)
    try:
        fit(model, (x, y), loss=torch.nn.MSELoss(), batch_size=12, steps=2, optimizer=optimizer)
    except FitError as error:
        return str(error)
    return "no error"


def checkpointed(at=5, steps=9):
    """Take the state at a step and go back to it at the end; return the state's model."""
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(64, 8, dtype=torch.float64), torch.randint(0, 3, (64,))
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    kept = {}

    def keep(step, logs):
        if step == at:
            kept["state"] = context.strategy.state()
        if step == steps - 1:
            context.strategy.load_state(kept["state"])

    fit(
        torch.nn.Sequential(*layers).double(), (x, y), loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), batch_size=16, steps=steps,
        callbacks=[keep],
    )  # fmt: skip
    state = kept["state"]
    moments = state["optimizer"]["state"]
    return {
        "model": {name: value.numpy() for name, value in state["model"].items()},
        "moments": {key: moments[key]["momentum_buffer"].numpy() for key in sorted(moments)},
    }
