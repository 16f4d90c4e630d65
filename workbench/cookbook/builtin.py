"""The recipes that come with the package, each for both frameworks.

The blocks of `char_transformer` are those of GPT-2, with the normalisation first: Vaswani et al.,
Attention Is All You Need, NIPS 2017; Radford et al., Language Models are Unsupervised Multitask
Learners, 2019.
"""

from __future__ import annotations

from typing import NamedTuple

from ..errors import unknown
from .recipe import Recipe


class _Written(NamedTuple):
    """A recipe in a sentence, and its source by framework."""

    summary: str
    sources: dict[str, str]


DIGITS_MLP_TORCH = """\
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

DIGITS_MLP_TENSORFLOW = """\
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

DIGITS_CNN_TORCH = """\
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

DIGITS_CNN_TENSORFLOW = """\
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

CHAR_TRANSFORMER_TORCH = '''\
import math
import torch
from torch import nn
from torch.nn import functional as F

BLOCK, WIDTH, HEADS, DEPTH = 64, 64, 4, 2
VOCABULARY = len(wb.data.VOCABULARY)

class Embed(nn.Module):
    """What a character is, plus where it stands."""

    def __init__(self):
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, WIDTH)
        self.position = nn.Embedding(BLOCK, WIDTH)

    def forward(self, x):
        return self.character(x) + self.position(torch.arange(x.shape[1], device=x.device))

class Attention(nn.Module):
    """Each character looks at those before it, and at itself."""

    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v_proj, self.out_proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        n, length, width = x.shape

        def heads(y):
            return y.view(n, length, HEADS, width // HEADS).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // HEADS)
        weights = (scores + later.float() * -1e9).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(n, length, width))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm2 = nn.LayerNorm(WIDTH)
        self.fc1, self.fc2 = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

model = nn.Sequential(
    Embed(), *(Block() for _ in range(DEPTH)), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)
)

def loss(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

def bits_per_character(out, y):
    return loss(out, y) / math.log(2)

wb.fit(
    model, wb.data.corpus("train", block=BLOCK),
    loss=loss,
    optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-3),
    batch_size=32, steps=200,
    eval_data=wb.data.corpus("test", block=BLOCK), eval_every=100,
    metrics={"bits_per_character": bits_per_character},
)
'''

CHAR_TRANSFORMER_TENSORFLOW = '''\
import math
import keras
from keras import layers

BLOCK, WIDTH, HEADS, DEPTH = 64, 64, 4, 2
VOCABULARY = len(wb.data.VOCABULARY)

class Embed(layers.Layer):
    """What a character is, plus where it stands."""

    def __init__(self):
        super().__init__()
        self.character = layers.Embedding(VOCABULARY, WIDTH)
        self.position = self.add_weight(shape=(BLOCK, WIDTH), initializer="uniform")

    def call(self, x):
        return self.character(x) + self.position

class Block(layers.Layer):
    """Each character looks at those before it, then thinks for itself."""

    def __init__(self):
        super().__init__()
        self.norm1 = layers.LayerNormalization(epsilon=1e-5)
        self.attention = layers.MultiHeadAttention(HEADS, WIDTH // HEADS)
        self.norm2 = layers.LayerNormalization(epsilon=1e-5)
        self.fc1 = layers.Dense(4 * WIDTH, activation="gelu")
        self.fc2 = layers.Dense(WIDTH)

    def call(self, x):
        seen = self.norm1(x)
        x = x + self.attention(seen, seen, use_causal_mask=True)
        return x + self.fc2(self.fc1(self.norm2(x)))

model = keras.Sequential([
    keras.Input((BLOCK,), dtype="int32"),
    Embed(), *(Block() for _ in range(DEPTH)),
    layers.LayerNormalization(epsilon=1e-5), layers.Dense(VOCABULARY),
])

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def bits_per_character(out, y):
    return loss.call(y, out) / math.log(2)

wb.fit(
    model, wb.data.corpus("train", block=BLOCK),
    loss=loss,
    optimizer=keras.optimizers.AdamW(3e-3, weight_decay=1e-2),
    batch_size=32, steps=200,
    eval_data=wb.data.corpus("test", block=BLOCK), eval_every=100,
    metrics={"bits_per_character": bits_per_character},
)
'''

_RECIPES = {
    "digits_mlp": _Written(
        "Handwritten digits (8 x 8) by three fully connected layers; a second or two.",
        {"torch": DIGITS_MLP_TORCH, "tensorflow": DIGITS_MLP_TENSORFLOW},
    ),
    "digits_cnn": _Written(
        "Handwritten digits (8 x 8) by two convolutions and two fully connected layers; seconds.",
        {"torch": DIGITS_CNN_TORCH, "tensorflow": DIGITS_CNN_TENSORFLOW},
    ),
    "char_transformer": _Written(
        "The next character of Python's own sources, by a small transformer; under a minute.",
        {"torch": CHAR_TRANSFORMER_TORCH, "tensorflow": CHAR_TRANSFORMER_TENSORFLOW},
    ),
}
ORIGIN = "built-in"


def names() -> list[str]:
    """Return the names of the built-in recipes, simplest first."""
    return list(_RECIPES)


def frameworks(name: str) -> list[str]:
    """Return the frameworks that a built-in recipe is written for."""
    return list(_RECIPES[name].sources)


def lookup(name: str, framework: str = "torch") -> Recipe:
    """Return a built-in recipe as it is written for a framework.

    Raises:
        PlanError: There is none of that name, or not for that framework.
    """
    if name not in _RECIPES:
        raise unknown("built-in recipe", name, _RECIPES)
    written = _RECIPES[name]
    sources = written.sources
    if framework not in sources:
        raise unknown("framework", framework, sources)
    return Recipe(
        source=sources[framework],
        origin=ORIGIN,
        name=name,
        framework=framework,
        summary=written.summary,
    )
