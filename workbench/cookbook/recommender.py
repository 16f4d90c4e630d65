"""The recipe `recommender`: ratings from two embedding tables; each step uses a few of their rows.

The model is the factorisation with biases of Koren, Bell and Volinsky, Matrix Factorization
Techniques for Recommender Systems, Computer 42(8), 2009, equation 4. Its optimizer is the one of
Downpour SGD (Dean et al., Large Scale Distributed Deep Networks, NIPS 2012, section 4.1): Adagrad.
It gives every element its own learning rate, so that rarely used rows learn too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from .sizes import check_counts, check_rate

TORCH = '''\
import torch
from torch import nn

NOISE = 0.5

class Lookup(nn.Module):
    """The rows of a user and of an item. The first value of a row is its bias."""

    def __init__(self, rows, dim, sparse):
        super().__init__()
        self.users = nn.Embedding(rows, 1 + dim, sparse=sparse)
        self.items = nn.Embedding(rows, 1 + dim, sparse=sparse)
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs):
        return torch.stack([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1)

class Match(nn.Module):
    """The rating: the mean, both biases, and the dot product of the other values."""

    def __init__(self):
        super().__init__()
        self.mean = nn.Parameter(torch.zeros(1))

    def forward(self, found):
        user, item = found[:, 0], found[:, 1]
        agreement = (user[:, 1:] * item[:, 1:]).sum(-1)
        return self.mean + user[:, 0] + item[:, 0] + agreement

def excess(out, y):
    """The squared error minus the error of the noise alone; 0 is the best value."""
    return ((out - y) ** 2).mean() - NOISE**2

def recommender(rows=1000, dim=8, sparse=False, lr=0.3, samples=200_000):
    def ratings(split):
        return wb.data.ratings(split, rows=rows, samples=samples, noise=NOISE)

    wb.fit(
        nn.Sequential(Lookup(rows, dim, sparse), Match()), ratings("train"),
        loss=nn.MSELoss(),
        optimizer=lambda parameters: torch.optim.Adagrad(
            parameters, lr=lr, initial_accumulator_value=1e-6
        ),
        batch_size=512, epochs=2,
        eval_data=ratings("test"), metrics={"excess": excess},
    )
'''

TENSORFLOW = '''\
import keras
from keras import layers

NOISE = 0.5

class Lookup(layers.Layer):
    """The rows of a user and of an item. The first value of a row is its bias."""

    def __init__(self, rows, dim):
        super().__init__()

        def table():
            small = keras.initializers.RandomNormal(stddev=0.1)
            return layers.Embedding(rows, 1 + dim, embeddings_initializer=small)

        self.users, self.items = table(), table()

    def call(self, pairs):
        return keras.ops.stack([self.users(pairs[:, 0]), self.items(pairs[:, 1])], 1)

class Match(layers.Layer):
    """The rating: the mean, both biases, and the dot product of the other values."""

    def __init__(self):
        super().__init__()
        self.mean = self.add_weight(name="mean", shape=(1,), initializer="zeros")

    def call(self, found):
        user, item = found[:, 0], found[:, 1]
        agreement = keras.ops.sum(user[:, 1:] * item[:, 1:], -1, keepdims=True)
        return self.mean + user[:, :1] + item[:, :1] + agreement

def excess(out, y):
    """The squared error minus the error of the noise alone; 0 is the best value."""
    return (out[:, 0] - y) ** 2 - NOISE**2

def recommender(rows=1000, dim=8, lr=0.3, samples=200_000):
    def ratings(split):
        return wb.data.ratings(split, rows=rows, samples=samples, noise=NOISE)

    model = keras.Sequential([keras.Input((2,), dtype="int32"), Lookup(rows, dim), Match()])
    wb.fit(
        model, ratings("train"),
        loss=keras.losses.MeanSquaredError(),
        optimizer=keras.optimizers.Adagrad(lr, initial_accumulator_value=1e-6),
        batch_size=512, epochs=2,
        eval_data=ratings("test"), metrics={"excess": excess},
    )
'''


def check(parameters: Mapping[str, Any]) -> None:
    """Raise PlanError if the two tables cannot have these sizes."""
    check_counts("recommender", parameters, ("rows", "dim", "samples"))
    check_rate("recommender", parameters["lr"])
    sparse = parameters.get("sparse", False)
    if not isinstance(sparse, bool):
        raise PlanError(
            "`sparse` of recipe recommender must be true or false.",
            seen=sparse,
            allowed="true: gradients contain only the table rows that the batch used; false: "
            "gradients contain all table rows",
            next_step="use -p sparse=true or -p sparse=false",
            code="WB-PLAN-266",
        )
