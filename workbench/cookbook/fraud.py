"""The recipe `fraud_mlp`: which card payments are fraud, where 2 % are.

The data come with the true chance of each payment, so the best possible loss and recall are known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sizes import check_counts, check_rate

TORCH = '''\
import torch
from torch import nn

def fraud_mlp(samples=100_000, branches=5, width=32, lr=3e-3):
    def payments(split, **how):
        return wb.data.payments(split, samples=samples, branches=branches, **how)

    share = float(payments("test", arrays=True)[1].mean())  # of the test payments is fraud

    def recall(out, y):
        """The share of the frauds that the model finds; the mean over all batches is exact."""
        found = (out.argmax(-1) == 1) & (y == 1)
        return found.float().mean() / share

    model = nn.Sequential(
        nn.Linear(6 + branches, width), nn.ReLU(),
        nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, 2),
    )
    wb.fit(
        model, payments("train"),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        batch_size=256, epochs=3,
        eval_data=payments("test"), metrics={"recall": recall},
    )
'''

TENSORFLOW = '''\
import keras
from keras import layers

def fraud_mlp(samples=100_000, branches=5, width=32, lr=3e-3):
    def payments(split, **how):
        return wb.data.payments(split, samples=samples, branches=branches, **how)

    share = float(payments("test", arrays=True)[1].mean())  # of the test payments is fraud

    def recall(out, y):
        """The share of the frauds that the model finds; the mean over all batches is exact."""
        found = (out[:, 1] > out[:, 0]) & (y == 1)
        return keras.ops.cast(found, "float32") / share

    model = keras.Sequential([
        keras.Input((6 + branches,)),
        layers.Dense(width, activation="relu"),
        layers.Dense(width, activation="relu"),
        layers.Dense(2),
    ])
    wb.fit(
        model, payments("train"),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(lr),
        batch_size=256, epochs=3,
        eval_data=payments("test"), metrics={"recall": recall},
    )
'''


def check(parameters: Mapping[str, Any]) -> None:
    """Raise PlanError where the network or its data cannot have these sizes."""
    check_counts("fraud_mlp", parameters, ("samples", "branches", "width"))
    check_rate("fraud_mlp", parameters["lr"])
