"""Cells that make their process group themselves, as scripts for torchrun do."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def joins(**asked):
    """Make the group, use it, leave it, and all that again."""
    import os

    import torch
    import torch.distributed as dist
    from torch.distributed import destroy_process_group, init_process_group

    seen = []
    for _ in range(3):
        init_process_group(**asked)
        total = torch.ones(1)
        dist.all_reduce(total)
        seen.append((dist.get_rank(), dist.get_world_size(), total.item()))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
        model(torch.ones(1, 2) * (rank + 1)).sum().backward()
        seen.append(model.module.weight.grad.tolist())
        destroy_process_group()
        seen.append(dist.is_initialized())
    return seen, [os.environ["RANK"], os.environ["WORLD_SIZE"]]


def refused(asked):
    """Ask for groups that cannot be; the cell's own goes on."""
    import torch
    import torch.distributed as dist

    said = []
    for one in asked:
        try:
            dist.init_process_group(**one)
        except Exception as error:  # noqa: PERF203 - the test says which
            said.append(f"{type(error).__name__}: {error}")
    total = torch.ones(1)
    dist.all_reduce(total)
    return said, total.item()
