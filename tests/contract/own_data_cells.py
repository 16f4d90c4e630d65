"""A cell whose workers have their own samples, and the same training without Workbench."""

from __future__ import annotations

from itertools import cycle, islice
from typing import Any

context: Any = None  # the running worker's
rank = 0

COUNTS = (6, 10)
BATCH, EPOCHS, LR, SEED = 5, 2, 0.1, 7


def own_samples(of: int) -> Any:
    """Return worker `of`'s samples: x (n, 3) and y (n, 1)."""
    import torch

    generator = torch.Generator().manual_seed(100 + of)
    x = torch.randn(COUNTS[of], 3, generator=generator, dtype=torch.float64) + of
    return x, torch.randn(COUNTS[of], 1, generator=generator, dtype=torch.float64)


def train(kind="indexed"):
    """Train on this worker's own samples; return the indices that were read in training."""
    import torch
    from own_data_cells import BATCH, EPOCHS, LR, SEED, own_samples

    from workbench import data
    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    model = torch.nn.Linear(3, 1).double()
    pair, read = own_samples(rank), []

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return len(pair[0])

        def __getitem__(self, index):
            read.append(index)
            return pair[0][index], pair[1][index]

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return zip(*pair, strict=True)

    given = {"indexed": Samples, "stream": Stream, "tensors": lambda: pair}[kind]()
    fit(
        model, data.own(given), loss=torch.nn.MSELoss(), batch_size=BATCH, epochs=EPOCHS,
        optimizer=lambda p: torch.optim.SGD(p, LR), seed=SEED,
    )  # fmt: skip
    return read


def evaluate_own():
    """Ask for an evaluation on data that each worker has alone."""
    import torch
    from own_data_cells import own_samples

    from workbench import data
    from workbench.engine.training.fit import fit
    from workbench.errors import FitError

    pair = own_samples(rank)
    try:
        fit(
            torch.nn.Linear(3, 1).double(), pair, eval_data=data.own(pair), batch_size=4,
            loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        )  # fmt: skip
    except FitError as error:
        return str(error)
    raise AssertionError("it was accepted")


def refused():
    """Pass own data to a strategy that cannot use them."""
    import torch
    from own_data_cells import own_samples

    from workbench import data
    from workbench.engine.training.fit import fit
    from workbench.errors import FitError

    try:
        fit(
            torch.nn.Linear(3, 1).double(), data.own(own_samples(rank)), batch_size=4,
            loss=torch.nn.MSELoss(), optimizer=lambda p: torch.optim.SGD(p, 0.1),
        )  # fmt: skip
    except FitError as error:
        return str(error)
    raise AssertionError("it was accepted")


def by_hand(every: int) -> Any:
    """Return the weights, (1, 3) and (1,), after the same training in plain PyTorch.

    Args:
        every: Steps between two averages of the parameters; 0: gradients are averaged each step.
    """
    import torch

    from workbench.engine.training.shares import permutation

    torch.manual_seed(3)
    models = [torch.nn.Linear(3, 1).double() for _ in COUNTS]
    for model in models:
        model.load_state_dict(models[0].state_dict())
    step = 0
    for epoch in range(EPOCHS):
        orders = [cycle(permutation(n, SEED, epoch)) for n in COUNTS]
        for first in range(0, sum(COUNTS), BATCH):
            total = min(BATCH, sum(COUNTS) - first)
            sizes = (total // 2, total - total // 2)
            for of, model in enumerate(models):
                taken = torch.as_tensor(list(islice(orders[of], sizes[of])), dtype=torch.int64)
                x, y = (part[taken] for part in own_samples(of))
                model.zero_grad()
                if len(x):
                    torch.nn.functional.mse_loss(model(x), y).backward()
            step += 1
            _step(models, sizes, every)
            if every and step % every == 0:
                _average(models)
    if every:
        _average(models)
    return [p.detach().numpy() for p in models[0].parameters()]


def _step(models: Any, sizes: Any, every: int) -> None:
    import torch

    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
            # A share counts by its samples, so that the mean over workers is one over samples.
            weighted = [g * n / sum(sizes) for g, n in zip(gradients, sizes, strict=True)]
            gradients = (
                [g * len(models) for g in weighted] if every else [sum(weighted)] * len(models)
            )
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= LR * gradient


def _average(models: Any) -> None:
    import torch

    with torch.no_grad():
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            mean = sum(p.clone() for p in parameters) / len(models)
            for parameter in parameters:
                parameter.copy_(mean)
