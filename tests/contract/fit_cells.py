"""Cells for `test_fit_arguments`; their source travels, so each imports what it uses."""

from __future__ import annotations

rank = 0


def precise(precision=None, backend="", steps=12):
    """Train under a precision or compiled; return losses seen and the dtypes met on the way.

    Args:
        backend: What the model is compiled by, as `torch.compile` calls it; empty: it is not.
    """
    from functools import partial
    from unittest.mock import patch

    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    x, y = torch.randn(64, 8), torch.randint(0, 3, (64,))
    met = []

    class Probe(torch.nn.Module):
        def forward(self, x):
            if not torch.compiler.is_compiling():
                met.append(str(x.dtype))
            return x

    layers = [torch.nn.Linear(8, 16), Probe(), torch.nn.Tanh(), torch.nn.Linear(16, 3)]
    model = torch.nn.Sequential(*layers)
    losses = []
    with patch.object(torch, "compile", partial(torch.compile, backend=backend)):
        fit(
            model,
            (x, y),
            loss=torch.nn.CrossEntropyLoss(),
            optimizer=lambda p: torch.optim.SGD(p, 0.2),
            batch_size=32,
            steps=steps,
            precision=precision,
            compile=bool(backend),
            callbacks=[lambda step, logs: losses.append(logs["loss"])],
        )
    kinds = sorted({str(p.dtype) for p in model.parameters()})
    return {"losses": losses, "met": sorted(set(met)), "parameters": kinds}


def called_back():
    """Train with every kind of callback and an evaluation every second step."""
    import torch

    from workbench.engine.training.fit import fit

    heard = []

    class Listener:
        def on_step_end(self, step, logs):
            heard.append(("step", step))

        def on_epoch_end(self, epoch, logs):
            heard.append(("epoch", epoch))

        def on_train_end(self, logs):
            heard.append(("end", None))

    x, y = torch.randn(40, 8), torch.randint(0, 3, (40,))
    result = fit(
        torch.nn.Linear(8, 3),
        (x, y),
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.2),
        batch_size=10,
        epochs=2,
        eval_data=(x, y),
        eval_every=3,
        metrics={"right": lambda out, y: (out.argmax(1) == y).double().mean()},
        callbacks=[Listener()],
    )
    return {"heard": heard, "evals": result.evals}


def returns_a_dictionary():
    """Train with a `step_fn` that returns a dictionary, as Lightning's `training_step` may."""
    import torch
    from torch.nn import functional

    from workbench.engine.training.fit import fit

    def step_fn(model, batch):
        logits = model(batch[0])
        return {"loss": functional.cross_entropy(logits, batch[1]), "logits": logits}

    x, y = torch.randn(40, 8), torch.randint(0, 3, (40,))
    fit(torch.nn.Linear(8, 3), (x, y), step_fn=step_fn, batch_size=10, steps=2,
        optimizer=lambda p: torch.optim.SGD(p, 0.2))  # fmt: skip


def frozen_statistics(evaluate=True):
    """Train with a BatchNorm that evaluates; return what it holds, and which layers train.

    What it holds is None where another worker of a pipeline has it.
    """
    import torch

    from workbench.engine.training.fit import fit

    torch.manual_seed(3)
    data = torch.randn(40, 8) + 5.0, torch.randint(0, 3, (40,))
    model = torch.nn.Sequential(
        torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)
    )
    model[0].eval()
    fit(
        model,
        data,
        loss=torch.nn.CrossEntropyLoss(),
        optimizer=lambda p: torch.optim.SGD(p, 0.2),
        batch_size=20,
        epochs=3,
        eval_data=data if evaluate else None,
    )
    mean = model[0].running_mean
    return None if mean.is_meta else mean.tolist(), [layer.training for layer in model]
