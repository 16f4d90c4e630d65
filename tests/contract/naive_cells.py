"""The same small training twice: by a strategy of the product, and by its naive function."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1

STEPS, BATCH, BATCHES = 12, 24, 4
H = 3
"""Steps of a round of local SGD."""
MICROBATCHES = 3


def fast(replicas=False):
    """Train by wb.fit; return what this worker's replica is after the last step, if asked for."""
    import naive_cells

    from workbench.engine.training.fit import fit

    model, loss, make_optimizer, data = naive_cells.task()
    latest = {}

    def look(step, logs):
        latest.update({name: p.detach().numpy().copy() for name, p in model.named_parameters()})

    fit(
        model, data, loss=loss, optimizer=make_optimizer, batch_size=naive_cells.BATCH,
        steps=naive_cells.STEPS, shuffle=False, callbacks=[look] if replicas else (),
    )  # fmt: skip
    return latest


def naive(name):
    """Train by a strategy's naive function; return the losses and the parameters by name."""
    import naive_cells

    return getattr(naive_cells, name)(rank, world_size)


def sums(names):
    """Add up a tensor of each worker by every algorithm; return how far each is from the naive."""
    import torch
    import torch.distributed as dist

    from workbench.strategies.torch.allreduce import algorithms
    from workbench.strategies.torch.allreduce.links import Links

    torch.manual_seed(rank)
    own = torch.randn(101, dtype=torch.float64)
    naive = own.clone()
    algorithms.naive_all_reduce(naive)
    links = Links(dist.group.WORLD)
    far = {"none": float((own - naive).abs().max())}
    for name in names:
        flat = own.clone()
        getattr(algorithms, name)(flat, links)
        far[name] = float((flat - naive).abs().max())
    return far


def disagrees():
    """Average a tensor whose type is another one on rank 1; return the error."""
    import torch
    import torch.distributed as dist

    from workbench.errors import FitError
    from workbench.strategies.torch.allreduce.links import Links

    try:
        Links(dist.group.WORLD).agree(torch.zeros(5, dtype=torch.bfloat16 if rank else torch.float))
    except FitError as error:
        return [error.code, error.seen]
    return None


# -- what the naive functions are given ------------------------------------------------------------


def task():
    """Return the network, its loss, what makes its optimizer, and the data."""
    import torch

    torch.manual_seed(3)
    x = torch.randn(BATCH * BATCHES, 8, dtype=torch.float64)
    y = torch.randint(0, 4, (BATCH * BATCHES,))
    layers = [torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)]
    model = torch.nn.Sequential(*layers).double()
    return model, torch.nn.CrossEntropyLoss(), _momentum, (x, y)


def _momentum(parameters):
    import torch

    return torch.optim.SGD(parameters, 0.2, momentum=0.9)


def batches(data, worker=0, workers=1):
    """Return a worker's share of each step's batch."""
    x, y = data
    size = BATCH // workers
    starts = [step % BATCHES * BATCH + worker * size for step in range(STEPS)]
    return [(x[start : start + size], y[start : start + size]) for start in starts]


def microbatches(batch):
    x, y = batch
    size = len(x) // MICROBATCHES
    return list(zip(x.split(size), y.split(size), strict=True))


def answer(losses, named):
    return {"losses": losses, "weights": {name: p.detach().numpy() for name, p in named}}


def one_device(rank, world_size):
    from workbench.strategies.torch.one_device import naive_step

    model, loss, make_optimizer, data = task()
    optimizer = make_optimizer(model.parameters())
    losses = [naive_step(model, loss, optimizer, x, y) for x, y in batches(data)]
    return answer(losses, model.named_parameters())


def mirrored(rank, world_size):
    from workbench.strategies.torch.mirrored import naive_step

    return _with_shares(naive_step, rank, world_size)


def central_storage(rank, world_size):
    from workbench.strategies.torch.central_storage import naive_step

    return _with_shares(naive_step, rank, world_size)


def gossip(rank, world_size):
    from workbench.strategies.torch.gossip import naive_step

    return _with_shares(naive_step, rank, world_size)


def parameter_server(rank, world_size):
    from workbench.strategies.torch.parameter_server import naive_step

    def own(parameters):
        return list(parameters)[rank::world_size]

    return _with_shares(naive_step, rank, world_size, own)


def _with_shares(naive_step, rank, world_size, own=list):
    model, loss, make_optimizer, data = task()
    optimizer = make_optimizer(own(model.parameters()))
    shares = batches(data, rank, world_size)
    losses = [naive_step(model, loss, optimizer, x, y) for x, y in shares]
    return answer(losses, model.named_parameters())


def local_sgd(rank, world_size):
    from workbench.strategies.torch.local_sgd import naive_round

    model, loss, make_optimizer, data = task()
    optimizer = make_optimizer(model.parameters())
    shares = batches(data, rank, world_size)
    losses = []
    for first in range(0, STEPS, H):
        losses += naive_round(model, loss, optimizer, shares[first : first + H])
    return answer(losses, model.named_parameters())


def diloco(rank, world_size):
    import torch

    from workbench.strategies.torch.local_sgd import naive_diloco_round

    model, loss, make_optimizer, data = task()
    optimizer = make_optimizer(model.parameters())
    outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
    shares = batches(data, rank, world_size)
    losses = []
    for first in range(0, STEPS, H):
        losses += naive_diloco_round(model, loss, optimizer, outer, shares[first : first + H])
    return answer(losses, model.named_parameters())


def sharded(rank, world_size):
    import torch
    import torch.distributed as dist
    from torch.nn.utils import parameters_to_vector, vector_to_parameters

    from workbench.strategies.torch.sharded import naive_step

    model, loss, make_optimizer, data = task()
    whole = parameters_to_vector(model.parameters()).detach()
    shard = torch.nn.Parameter(whole.chunk(world_size)[rank].clone())
    optimizer = make_optimizer([shard])
    shares = batches(data, rank, world_size)
    losses = [naive_step(model, shard, loss, optimizer, x, y) for x, y in shares]
    shards = [torch.empty_like(shard) for _ in range(world_size)]
    dist.all_gather(shards, shard.data)
    vector_to_parameters(torch.cat(shards), model.parameters())
    return answer(losses, model.named_parameters())


def tensor_parallel(rank, world_size):
    import torch

    from workbench.strategies.torch.tensor_parallel import naive_step

    model, loss, make_optimizer, data = task()
    size = 16 // world_size
    own = slice(rank * size, (rank + 1) * size)
    column, row = torch.nn.Linear(8, size).double(), torch.nn.Linear(size, 4, bias=False).double()
    column.weight.data, column.bias.data = model[0].weight[own].data, model[0].bias[own].data
    row.weight.data, bias = model[2].weight[:, own].data, model[2].bias
    optimizer = make_optimizer([*column.parameters(), *row.parameters(), bias])
    losses = [naive_step(column, row, bias, loss, optimizer, x, y) for x, y in batches(data)]
    parts = {"0.weight": _joined(column.weight, 0), "0.bias": _joined(column.bias, 0)}
    return answer(losses, {**parts, "2.weight": _joined(row.weight, 1), "2.bias": bias}.items())


def _joined(part, dim):
    """Return all workers' parts of a matrix as one."""
    import torch
    import torch.distributed as dist

    parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.detach().contiguous())
    return torch.cat(parts, dim)


def model_split(rank, world_size):
    from workbench.strategies.torch.model_split import naive_step

    model, loss, make_optimizer, data = task()
    stage, width, named = _stage(model, rank)
    optimizer = make_optimizer(stage.parameters())
    steps = [microbatches(batch) for batch in batches(data)]
    losses = [naive_step(stage, loss, optimizer, step, width) for step in steps]
    return answer(losses, named)


def hybrid(rank, world_size):
    import torch.distributed as dist

    from workbench.strategies.torch.hybrid import naive_step

    stages = 2
    pipelines = world_size // stages
    columns = [dist.new_group(list(range(s, world_size, stages))) for s in range(stages)]
    model, loss, make_optimizer, data = task()
    stage, width, named = _stage(model, rank % stages)
    optimizer, column = make_optimizer(stage.parameters()), columns[rank % stages]
    steps = [microbatches(share) for share in batches(data, rank // stages, pipelines)]
    losses = [naive_step(stage, loss, optimizer, step, width, stages, column) for step in steps]
    return answer(losses, named)


def _stage(model, place):
    """Return one of two stages, the width of what it is given, and its parameters by name."""
    stage = [model[:2], model[2:]][place]
    held = {id(p) for p in stage.parameters()}
    return stage, [8, 16][place], [pair for pair in model.named_parameters() if id(pair[1]) in held]
