"""Handwritten digits, by a network of fully connected layers."""

SUMMARY = "Handwritten digits (8 x 8) by three fully connected layers; a second or two."

TORCH = """\
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

TENSORFLOW = """\
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

SOURCES = {"torch": TORCH, "tensorflow": TENSORFLOW}
