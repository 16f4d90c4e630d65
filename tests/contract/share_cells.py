"""Cells for `test_unequal_shares`; their source travels, so each imports what it uses."""

from __future__ import annotations

from typing import Any

context: Any = None  # the running worker's


def shared_out(changes, kind="tensors", accumulate=1, batch=23, steps=20):
    """Train, with other shares from some steps on.

    Args:
        changes: After which step which shares are announced, as the kernel does.
        kind: Of the data: `tensors`, `samples` fetched one by one, or `processes` that fetch them.

    Returns:
        Samples that the model has seen in each forward pass of training, and evaluations.
    """
    import torch
    from torch.utils.data import DataLoader, Dataset

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(100, 8, dtype=torch.float64), torch.randint(0, 3, (100,))
    seen = []

    class Samples(Dataset):
        def __len__(self):
            return len(x)

        def __getitem__(self, place):
            return x[place], y[place]

    class Counting(torch.nn.Module):
        def forward(self, inputs):
            if self.training:
                seen.append(len(inputs))
            return inputs

    def announce(step, logs):
        if step in changes:
            context.gate.deal(step + 1, changes[step])

    layers = [Counting(), torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    model = torch.nn.Sequential(*layers).double()
    data = {
        "tensors": lambda: (x, y),
        "samples": Samples,
        "processes": lambda: DataLoader(Samples(), batch_size=batch, num_workers=1),
    }[kind]()
    result = fit(
        model, data, loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.2, momentum=0.9),
        batch_size=batch, steps=steps, accumulate=accumulate, eval_data=(x[:31], y[:31]),
        eval_every=7, callbacks=[announce],
    )  # fmt: skip
    return {"seen": seen, "evals": result.evals}
