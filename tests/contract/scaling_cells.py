"""Cells that scale losses, as fp16 needs it; in float64, so that they compare to the last bit."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def fitted(overflow=3, clip=None):
    """Train by `wb.fit` with a scaled loss, which overflows on the last worker in one step."""
    from unittest.mock import patch

    import torch

    from workbench.engine.training.fit import fit
    from workbench.strategies.torch.parts import replica

    torch.manual_seed(3)
    x, y = torch.randn(48, 8, dtype=torch.float64), torch.randint(0, 3, (48,))
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Tanh(), torch.nn.Linear(16, 8),
        torch.nn.Tanh(), torch.nn.Linear(8, 3),
    ).double()  # fmt: skip
    original, scales = replica.Trainer.update, []

    def update(trainer):
        if context.step == overflow and rank == world_size - 1:
            gradient = next(trainer.model.parameters()).grad
            getattr(gradient, "_local_tensor", gradient).view(-1)[0] = float("inf")
        original(trainer)
        scales.append(float(trainer.scaler.get_scale()))

    with (
        patch.object(replica, "needs_scaling", lambda device: True),
        patch.object(replica.Trainer, "update", update),
    ):
        fit(
            model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=24, steps=8,
            optimizer=lambda p: torch.optim.AdamW(p, 1e-2), precision="fp16", clip_norm=clip,
        )  # fmt: skip
    return scales


def looped(overflow=2, enabled=True, epochs=2):
    """Train in a loop with a GradScaler of its own; a loss of the last worker overflows."""
    import torch

    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x, y = torch.randn(48, 8, dtype=torch.float64), torch.randint(0, 3, (48,))
    data = torch.utils.data.TensorDataset(x, y)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    model = model.double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(data, batch_size=12)
    model, optimizer, loader = prepare(model, optimizer, loader)
    scaler = torch.amp.GradScaler("cpu", enabled=enabled)
    taken = 0
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.cross_entropy(model(x), y)
            if taken == overflow and rank == world_size - 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            taken += 1
    return taken, context.trained, scaler.get_scale()
