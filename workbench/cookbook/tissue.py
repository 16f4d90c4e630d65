"""The recipe `tissue_cnn`: healthy or abnormal tissue, by a small residual network.

The blocks are those of He et al., Identity Mappings in Deep Residual Networks, ECCV 2016, without
the batch normalisation. So the result does not depend on how a batch is divided among workers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .sizes import check_counts, check_rate

TORCH = '''\
import torch
from torch import nn
from torch.nn import functional as F

class Centre(nn.Module):
    """Light tissue becomes 0, dark nuclei become negative."""

    def forward(self, x):
        return (x - 0.8) / 0.15

class Block(nn.Module):
    """Two convolutions; their result is added to the input."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))

def accuracy(out, y):
    return (out.argmax(-1) == y).float().mean()

def tissue_cnn(samples=1500, width=16, lr=2e-3):
    model = nn.Sequential(
        Centre(),
        nn.Conv2d(3, width, 4, stride=4),  # 96 x 96 pixels become 24 x 24 places
        Block(width), Block(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 2, stride=2),  # 12 x 12 places
        Block(2 * width), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, 2),
    )
    wb.fit(
        model, wb.data.tissue("train", samples=samples),
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: torch.optim.Adam(parameters, lr=lr),
        batch_size=32, epochs=5,
        eval_data=wb.data.tissue("test", samples=samples), metrics={"accuracy": accuracy},
    )
'''

TENSORFLOW = '''\
import keras
from keras import layers

class Block(layers.Layer):
    """Two convolutions; their result is added to the input."""

    def __init__(self, width):
        super().__init__()
        self.conv1 = layers.Conv2D(width, 3, padding="same")
        self.conv2 = layers.Conv2D(width, 3, padding="same")

    def call(self, x):
        return x + self.conv2(keras.ops.relu(self.conv1(keras.ops.relu(x))))

def tissue_cnn(samples=1500, width=16, lr=2e-3):
    model = keras.Sequential([
        keras.Input((3, 96, 96)),
        layers.Rescaling(1 / 0.15, -0.8 / 0.15),  # light tissue becomes 0
        layers.Permute((2, 3, 1)),  # Keras has the channels last
        layers.Conv2D(width, 4, strides=4),  # 96 x 96 pixels become 24 x 24 places
        Block(width), Block(width), layers.ReLU(),
        layers.Conv2D(2 * width, 2, strides=2),  # 12 x 12 places
        Block(2 * width), layers.ReLU(),
        layers.GlobalAveragePooling2D(), layers.Dense(2),
    ])
    wb.fit(
        model, wb.data.tissue("train", samples=samples),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        optimizer=keras.optimizers.Adam(lr),
        batch_size=32, epochs=5,
        eval_data=wb.data.tissue("test", samples=samples),
        metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
    )
'''


def check(parameters: Mapping[str, Any]) -> None:
    """Raise PlanError where the network or its data cannot have these sizes."""
    check_counts("tissue_cnn", parameters, ("samples", "width"))
    check_rate("tissue_cnn", parameters["lr"])
