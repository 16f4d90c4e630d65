"""Cells that are written for Horovod, as public code is; `hvd` is Workbench's stand-in."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def trained(kind="plain", steps=6):
    """Train a small model on this rank's rows of each batch; return its parameters."""
    import horovod.torch as hvd
    import torch
    from torch import nn

    hvd.init()
    torch.manual_seed(hvd.rank())  # each rank begins elsewhere: broadcast_parameters cures it

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(6, 8, sparse=kind == "sparse")
            self.inside = nn.Linear(5, 8)
            self.left, self.right, self.idle = (nn.Linear(8, 3) for _ in range(3))

        def forward(self, x, row, step):
            hidden = torch.tanh(self.inside(x) + self.table(row % 6))
            chosen = (row % 6 == step % 6).double().unsqueeze(1)
            if not chosen.any():  # these ranks have no gradient for `right`
                return self.left(hidden)
            return self.left(hidden) + chosen * self.right(hidden)

    model = Branches().double()
    optimizer = torch.optim.SGD(
        model.parameters(), 0.1, momentum=0.9, weight_decay=0.0 if kind == "sparse" else 0.1
    )
    if kind == "adam":
        optimizer = torch.optim.Adam(model.parameters(), 0.05 * (1 + hvd.rank()))
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    passes = 3 if kind == "passes" else 1
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if kind == "fp16" else hvd.Compression.none,
        backward_passes_per_step=passes,
        op=hvd.Sum if kind == "sum" else hvd.Average,
        gradient_predivide_factor=2.0 if kind == "predivide" else 1.0,
        sparse_as_dense=kind == "sparse",
    )
    data = torch.Generator().manual_seed(1)
    rows = torch.arange(36)
    for step in range(steps):
        xs = torch.randn(36, 5, generator=data, dtype=torch.float64)
        ys = torch.randn(36, 3, generator=data, dtype=torch.float64)
        if kind == "thawed":
            model.inside.requires_grad_(step % 3 > 0)

        def loss_of(part, x=xs, y=ys, step=step):
            loss = ((model(x[part], part, step) - y[part]) ** 2).mean() / passes
            return loss / hvd.size() if kind == "sum" else loss

        def closure(step=step):
            optimizer.zero_grad()
            loss = loss_of(rows[hvd.rank() :: hvd.size()])
            loss.backward()
            return loss

        if kind == "closure":
            optimizer.step(closure)
            continue
        optimizer.zero_grad()
        for at in range(passes):
            part = rows[at * 36 // passes : (at + 1) * 36 // passes]
            loss = loss_of(part[hvd.rank() :: hvd.size()])
            loss.backward()
        if kind == "asked between":
            assert hvd.allreduce(torch.tensor(1.0), op=hvd.Sum) == hvd.size()
        if kind == "clipped":
            optimizer.synchronize()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    assert model.idle.weight.grad is None  # as on one device: no decay of what took no part
    return {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
