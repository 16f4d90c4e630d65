"""Cells whose workers read the same batches, or by mistake other ones."""

from __future__ import annotations

from typing import Any

rank = 0  # the running worker's

SAMPLES, WIDTH = 48, 4


def train(draws, own_seed=False, read="indexed", processes=0):
    """Train on samples of which x, y, both or their order are drawn; return the last loss.

    Args:
        draws: `x`, `both` or `order`: what is drawn from torch's random numbers while reading.
        own_seed: Whether each worker has its own seed from the start of training.
        read: `indexed`, `stream`, `untargeted`: a stream whose batches are x alone, or `divided`:
            a stream that its loader's processes divide among them.
        processes: The processes of the stream's loader.
    """
    import itertools

    import torch
    from same_batch_cells import SAMPLES, WIDTH

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    xs = torch.randn(SAMPLES, WIDTH, dtype=torch.float64)
    rule = torch.randn(WIDTH, 1, dtype=torch.float64)

    def sample(index):
        x = xs[index]
        if draws in ("x", "both"):
            drawn = x + torch.randn(WIDTH, dtype=torch.float64)
            return drawn, (drawn if draws == "both" else x) @ rule
        return x, x @ rule

    class Indexed(torch.utils.data.Dataset):
        def __len__(self):
            return SAMPLES

        def __getitem__(self, index):
            return sample(index)

    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            order = torch.randperm(SAMPLES) if draws == "order" else range(SAMPLES)
            for index in order:
                pair = sample(int(index))
                yield pair[0] if read == "untargeted" else pair

    class Divided(Stream):
        def __iter__(self):
            info = torch.utils.data.get_worker_info()
            yield from itertools.islice(super().__iter__(), info.id, None, info.num_workers)

    Stream.__module__ = Divided.__module__ = "__main__"  # as in a notebook's cell
    data = {"indexed": Indexed, "divided": Divided}.get(read, Stream)()
    if processes:
        data = torch.utils.data.DataLoader(data, batch_size=12, num_workers=processes)
    model = torch.nn.Sequential(
        torch.nn.Linear(WIDTH, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6), torch.nn.Tanh(),
        torch.nn.Linear(6, 1),
    ).double()  # fmt: skip
    if own_seed:
        torch.manual_seed(1000 + rank)
    how: Any = {"loss": torch.nn.MSELoss()}
    if read == "untargeted":
        how = {"step_fn": lambda model, x: model(x).square().mean()}
    done = fit(
        model, data, batch_size=None if processes else 12, steps=6,
        optimizer=lambda p: torch.optim.SGD(p, 0.05), **how,
    )  # fmt: skip
    return done.loss
