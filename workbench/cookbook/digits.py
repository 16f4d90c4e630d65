"""The recipes of handwritten digits: three layers, two convolutions."""

from __future__ import annotations

MLP_TORCH = """\
import torch
from torch import nn

model = nn.Sequential(
    nn.Flatten(),
    nn.Linear(64, 128), nn.Tanh(),
    nn.Linear(128, 64), nn.Tanh(),
    nn.Linear(64, 10),
)

def accuracy(out, y):
    return (out.argmax(-1) == y).float().mean()

wb.fit(
    model, wb.data.digits("train"),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    batch_size=64, epochs=5,
    eval_data=wb.data.digits("test"), metrics={"accuracy": accuracy},
)
"""

MLP_TENSORFLOW = """\
import keras
from keras import layers

model = keras.Sequential([
    keras.Input((1, 8, 8)),
    layers.Flatten(),
    layers.Dense(128, activation="tanh"),
    layers.Dense(64, activation="tanh"),
    layers.Dense(10),
])

wb.fit(
    model, wb.data.digits("train"),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(2e-3),
    batch_size=64, epochs=5,
    eval_data=wb.data.digits("test"),
    metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
)
"""

CNN_TORCH = """\
import torch
from torch import nn

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
    nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(),
    nn.MaxPool2d(2),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 64), nn.ReLU(),
    nn.Linear(64, 10),
)

def accuracy(out, y):
    return (out.argmax(-1) == y).float().mean()

wb.fit(
    model, wb.data.digits("train"),
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: torch.optim.Adam(parameters, lr=2e-3),
    batch_size=64, epochs=4,
    eval_data=wb.data.digits("test"), metrics={"accuracy": accuracy},
)
"""

CNN_TENSORFLOW = """\
import keras
from keras import layers

model = keras.Sequential([
    keras.Input((1, 8, 8)),
    layers.Reshape((8, 8, 1)),  # Keras has the channels last
    layers.Conv2D(16, 3, padding="same", activation="relu"),
    layers.Conv2D(32, 3, padding="same", activation="relu"),
    layers.MaxPooling2D(2),
    layers.Flatten(),
    layers.Dense(64, activation="relu"),
    layers.Dense(10),
])

wb.fit(
    model, wb.data.digits("train"),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    optimizer=keras.optimizers.Adam(2e-3),
    batch_size=64, epochs=4,
    eval_data=wb.data.digits("test"),
    metrics={"accuracy": keras.metrics.SparseCategoricalAccuracy()},
)
"""
