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


def leaves_a_collective():
    """Leave a collective that nothing ends, and meet the others in a group made anew."""
    import threading
    import time
    from dataclasses import replace

    import torch
    import torch.distributed as dist

    from workbench.engine.torch import group, waits

    waits.SLICE, waits.PATIENCE_S = waits.SLICE / 10, 0.2
    waits.group_was_made(leavable=True)
    store = dist.distributed_c10d._get_default_store()
    total, said = torch.ones(1), ""
    if rank == 0:
        time.sleep(0.3)  # the other waits for several slices
    dist.all_reduce(total)
    dist.barrier()
    passed = waits.passed_on(dist.all_reduce(total, async_op=True)).wait().item()
    took_s = 0.0
    if rank == 0:
        # As gloo's threads wait for a message that is lost: nothing that is shut here ends it.
        future = waits.passed_on(dist.all_reduce(torch.ones(1), async_op=True))
        threading.Timer(0.3, waits.connections_were_shut).start()
        for wait in (lambda: dist.all_reduce(torch.ones(1)), future.wait):
            try:
                wait()
            except RuntimeError as error:  # noqa: PERF203 - one and then the other
                said += str(error)
        began = time.monotonic()
        group.destroy_group()
        took_s = time.monotonic() - began
        store.set("left", "1")
    else:
        store.wait(["left"])
    spec = replace(context.spec, prefix=f"{context.spec.prefix}anew-", group="")
    group.ensure_group(spec)
    dist.all_reduce(total)
    waits.group_was_made(leavable=False)
    return (passed, total.item()), said, took_s, dist.Work.wait is waits._plain_wait
