"""Cells for devices whose collectives nothing but an abort ends. They travel as text."""


def fails_in_step(failing, how, steps=6):
    """Train by an own loop; in step `failing` rank 1 fails. Return what rank 0 is left with."""
    import os
    import time

    import torch

    from workbench.engine.training.user_loops import prepare

    torch.manual_seed(3)
    x, y = torch.randn(48, 4, dtype=torch.float64), torch.randn(48, 1, dtype=torch.float64)
    model = torch.nn.Linear(4, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=8)
    model, optimizer, loader = prepare(model, optimizer, loader)
    after, pid, caught = [], os.getpid(), ""
    try:
        for step, (inputs, targets) in enumerate(loader):
            if step == failing and rank == 1:  # noqa: F821
                if how == "raises":
                    raise ValueError("rank 1 has had enough")
                if how == "sleeps":
                    time.sleep(60)
                if how == "runs out of memory":
                    torch.empty(1 << 40, device=inputs.device)
                if how == "dies":
                    os._exit(9)
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
            after.append([p.detach().cpu().flatten().tolist() for p in model.parameters()])
    except BaseException as error:
        if rank == 1:  # noqa: F821
            raise
        caught = type(error).__name__
    left = [p.detach().cpu().flatten().tolist() for p in model.parameters()]
    return {"pid": pid, "caught": caught, "after": after, "left": left}


def sums(values):
    """Add up over the ranks: tensors of the CPU, of the device, of both at once, and objects."""
    import torch
    import torch.distributed as dist

    found = []
    for place in ("cpu", device):  # noqa: F821
        mine = torch.tensor([float(rank + value) for value in values], device=place)  # noqa: F821
        dist.all_reduce(mine)
        found.append(mine.tolist())
        gathered = [torch.empty_like(mine) for _ in range(world_size)]  # noqa: F821
        dist.all_gather(gathered, mine)
        found.append(torch.stack(gathered).sum().item())
    objects = [None] * world_size  # noqa: F821
    dist.all_gather_object(objects, {"rank": rank})  # noqa: F821
    return [*found, objects]


def breaks_the_device():
    """Have the device fail for good, in a cell that does not catch it."""
    import torch

    torch.fakegpu.fail(710)
    torch.ones(2, device=device).sum().item()  # noqa: F821
