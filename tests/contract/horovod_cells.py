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


def messages():
    """Send each kind of message; return what came, as plain values."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    me, count = hvd.rank(), hvd.size()
    own = torch.arange(4.0) + me
    came = {
        "who": (me, count, hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size())
    }
    came["mean"] = hvd.allreduce(own, name="own").tolist()
    came["named"] = {
        op.name: hvd.allreduce(own, op=op).tolist()
        for op in (hvd.Sum, hvd.Min, hvd.Max, hvd.Product)
    }
    came["by average"] = hvd.allreduce(own, average=False).tolist()
    came["scaled"] = hvd.allreduce(
        own, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0
    ).tolist()
    came["small"] = hvd.allreduce(own, compression=hvd.Compression.fp16).dtype == torch.float32
    came["whole"] = hvd.allreduce(torch.tensor([3 + me, 4])).tolist()
    came["untouched"] = own.tolist()
    handle = hvd.allreduce_async_(own, op=hvd.Sum)
    result = hvd.synchronize(handle)
    came["in place"] = (result is own, own.tolist(), hvd.poll(handle))
    came["grouped"] = [
        t.tolist() for t in hvd.grouped_allreduce([torch.ones(1) * me, torch.ones(1)])
    ]
    came["gathered"] = hvd.allgather(torch.full((me + 1, 2), me)).tolist()
    came["one each"] = hvd.allgather(torch.tensor(me)).tolist()
    came["flags"] = hvd.broadcast(torch.tensor([me == 1, True]), root_rank=1).tolist()
    came["sent"] = hvd.broadcast_(torch.full((), 7 + me, dtype=torch.bfloat16), 1).item()
    came["object"] = hvd.broadcast_object({"rank": me}, root_rank=1)
    came["objects"] = hvd.allgather_object("x" * me)
    came["leaves"] = []
    for send in (
        lambda t: hvd.allreduce(t, op=hvd.Sum),
        lambda t: hvd.broadcast(t, 0),
        lambda t: hvd.allgather(t)[: me + 1],
    ):
        leaf = torch.ones(1, requires_grad=True)
        (send(leaf).sum() * (me + 1)).backward()
        came["leaves"].append(leaf.grad.item())
    hvd.barrier()
    came["built"] = (hvd.mpi_built(), hvd.gloo_built(), hvd.is_homogeneous(), hvd.is_initialized())
    hvd.shutdown()
    came["built"] += (hvd.is_initialized(),)
    return came


def mistaken():
    """Make each mistake in turn; return the codes of the errors."""
    import horovod.torch as hvd
    import torch
    from torch import nn

    from workbench.errors import WorkbenchError

    codes = {}

    def wrong(name, mistake):
        try:
            mistake()
        except WorkbenchError as error:
            codes[name] = error.code
        else:
            codes[name] = "none"

    wrong("no init", hvd.rank)
    wrong("comm", lambda: hvd.init(comm=[0]))
    hvd.init()
    wrong("join", hvd.join)
    one = torch.ones(1)
    wrong("both", lambda: hvd.allreduce(one, average=True, op=hvd.Sum))
    wrong("adasum", lambda: hvd.allreduce(one, op=hvd.Adasum))
    wrong("set", lambda: hvd.allreduce(one, process_set=hvd.ProcessSet))
    wrong("alltoall", lambda: hvd.alltoall(one))
    wrong("elastic", lambda: hvd.elastic.run)
    wrong("shapes", lambda: hvd.allgather(torch.ones(2, 1 + hvd.rank())))
    other = nn.Linear(2, 1 + hvd.rank())
    wrong("other model", lambda: hvd.broadcast_parameters(other.state_dict(), 0))
    steps = torch.optim.SGD(other.parameters(), 0.1)
    wrong("other optimizer", lambda: hvd.DistributedOptimizer(steps))

    model = nn.Sequential(nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    steps = torch.optim.SGD(model.parameters(), 0.1)
    make = hvd.DistributedOptimizer
    wrong("max", lambda: make(steps, op=hvd.Max))
    wrong("unnamed", lambda: make(steps, named_parameters=model[0].named_parameters()))
    wrong("twice", lambda: make(steps, named_parameters=[("a", p) for p in model.parameters()]))
    wrong("no names", lambda: make(steps, named_parameters=model.parameters()))
    optimizer = make(steps, named_parameters=model.named_parameters())
    wrong("wrapped", lambda: make(optimizer))

    def backward(module, x):
        module(x).sum().backward()

    x = torch.ones(1, 2)
    backward(model[0], x)
    wrong("zeroed", optimizer.zero_grad)
    wrong("more passes", lambda: backward(model[0], x))
    optimizer.zero_grad()
    backward(model[0], x)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    wrong("clipped early", optimizer.step)
    optimizer.zero_grad()
    backward(model[1], torch.tensor([1]))
    wrong("sparse", optimizer.step)
    optimizer.zero_grad()
    backward(model[0], x)  # nothing of the mistakes is left
    optimizer.step()
    return codes


def both(first):
    """Hand the same model to Horovod's optimizer and to Workbench; return the error's code."""
    import horovod.torch as hvd
    import torch

    from workbench.engine.training.fit import fit
    from workbench.engine.training.user_loops import prepare
    from workbench.errors import WorkbenchError

    hvd.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    try:
        if first == "prepare":
            model, optimizer = prepare(model, optimizer)
        averaging = hvd.DistributedOptimizer(optimizer)
        if first == "horovod":
            prepare(model, optimizer)
        if first == "fit":
            fit(model, (torch.ones(4, 2), torch.ones(4, 1)), loss=torch.nn.MSELoss(),
                batch_size=2, optimizer=lambda p: torch.optim.SGD(p, 0.1))  # fmt: skip
    except WorkbenchError as error:
        return error.code, averaging is None if first == "none" else True
    return "none", False


def recorded(watched, steps=30, pause_s=0.0):
    """Train as public code does, from a loader; say what averages, and who records it."""
    import time

    import horovod.torch as hvd
    import torch
    from torch import nn

    from workbench.engine.training.user_loops import watch

    hvd.init()
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = torch.utils.data.TensorDataset(torch.randn(8 * steps * hvd.size(), 16))
    sampler = torch.utils.data.distributed.DistributedSampler(
        data, num_replicas=hvd.size(), rank=hvd.rank()
    )
    loader = torch.utils.data.DataLoader(data, batch_size=8, sampler=sampler)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    if watched:
        watch(model, optimizer, loader)
    for (x,) in loader:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        if pause_s and hvd.rank() == 1:
            time.sleep(pause_s)
        loss.backward()
        optimizer.step()


def without_loader(steps=4):
    """Train on batches that the loop cuts by itself."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(hvd.rank())
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    for x_BD in torch.randn(6 * steps, 3).split(6):
        optimizer.zero_grad()
        model(x_BD).pow(2).mean().backward()
        optimizer.step()


def again(model_of_before=None):
    """Wrap the same model a second time, as a cell that is run again does."""
    import horovod.torch as hvd
    import torch

    hvd.init()
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    kept = []
    for _turn in range(3):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), 0.1))
        kept.append(optimizer)  # the former ones live on, as in a notebook's names
        for _step in range(2):
            optimizer.zero_grad()
            model(torch.ones(1, 2) * (hvd.rank() + 1)).sum().backward()
            optimizer.step()
    return model.weight.tolist(), model.weight.grad.tolist()
