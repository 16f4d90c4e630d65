"""The recipe `char_transformer`: the next character of a text, by a transformer of any size.

The blocks are those of GPT-2, with the normalisation first: Vaswani et al., Attention Is All You
Need, NIPS 2017; Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import PlanError
from .sizes import check_counts, check_rate

TEST_CHARACTERS = 104_858
"""Upper limit of the characters in `wb.data.corpus("test")`; a test checks it."""

TORCH = '''\
import math
import torch
from torch import nn
from torch.nn import functional as F

VOCABULARY = len(wb.data.VOCABULARY)

class Embed(nn.Module):
    """The embedding of each character plus the embedding of its position."""

    def __init__(self, width, context):
        super().__init__()
        self.character = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(context, width)

    def forward(self, x):
        return self.character(x) + self.position(torch.arange(x.shape[1], device=x.device))

class Attention(nn.Module):
    """Each character attends to itself and to the characters before it."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.v_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        n, length, width = x.shape

        def heads(y):
            return y.view(n, length, self.heads, width // self.heads).transpose(1, 2)

        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(width // self.heads)
        weights = (scores + later.float() * -1e9).softmax(-1)
        return self.out_proj((weights @ v).transpose(1, 2).reshape(n, length, width))

class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))

def loss(out, y):
    return F.cross_entropy(out.flatten(0, 1), y.flatten())

def bits_per_character(out, y):
    return loss(out, y) / math.log(2)

def char_transformer(layers=2, width=64, heads=4, context=64, lr=3e-3):
    model = nn.Sequential(
        Embed(width, context), *(Block(width, heads) for _ in range(layers)),
        nn.LayerNorm(width), nn.Linear(width, VOCABULARY),
    )
    wb.fit(
        model, wb.data.corpus("train", block=context),
        loss=loss,
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=lr),
        batch_size=32, steps=200,
        eval_data=wb.data.corpus("test", block=context), eval_every=100,
        metrics={"bits_per_character": bits_per_character},
    )
'''

TENSORFLOW = '''\
import math
import keras
from keras import layers as kl

VOCABULARY = len(wb.data.VOCABULARY)

class Embed(kl.Layer):
    """The embedding of each character plus the embedding of its position."""

    def __init__(self, width, context):
        super().__init__()
        self.character = kl.Embedding(VOCABULARY, width)
        self.position = self.add_weight(
            name="position", shape=(context, width), initializer="uniform"
        )

    def call(self, x):
        return self.character(x) + self.position

class Block(kl.Layer):
    """Each character attends to itself and to earlier ones; two dense layers follow."""

    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = kl.LayerNormalization(epsilon=1e-5)
        self.attention = kl.MultiHeadAttention(heads, width // heads)
        self.norm2 = kl.LayerNormalization(epsilon=1e-5)
        self.fc1 = kl.Dense(4 * width, activation="gelu")
        self.fc2 = kl.Dense(width)

    def call(self, x):
        seen = self.norm1(x)
        x = x + self.attention(seen, seen, use_causal_mask=True)
        return x + self.fc2(self.fc1(self.norm2(x)))

loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

def bits_per_character(out, y):
    return loss.call(y, out) / math.log(2)

def char_transformer(layers=2, width=64, heads=4, context=64, lr=3e-3):
    model = keras.Sequential([
        keras.Input((context,), dtype="int32"),
        Embed(width, context), *(Block(width, heads) for _ in range(layers)),
        kl.LayerNormalization(epsilon=1e-5), kl.Dense(VOCABULARY),
    ])
    wb.fit(
        model, wb.data.corpus("train", block=context),
        loss=loss,
        optimizer=keras.optimizers.AdamW(lr, weight_decay=1e-2),
        batch_size=32, steps=200,
        eval_data=wb.data.corpus("test", block=context), eval_every=100,
        metrics={"bits_per_character": bits_per_character},
    )
'''


def check(parameters: Mapping[str, Any]) -> None:
    """Raise PlanError if a transformer cannot have these sizes."""
    check_counts("char_transformer", parameters, ("layers", "width", "heads", "context"))
    check_rate("char_transformer", parameters["lr"])
    width, heads, context = (parameters[name] for name in ("width", "heads", "context"))
    if width % heads:
        fitting = [n for n in range(1, min(width, 64) + 1) if width % n == 0]
        raise PlanError(
            "`width` must be divisible by `heads`, because all attention heads have the same "
            "width.",
            seen=f"width={width}, heads={heads}",
            allowed=f"with this width: heads={', '.join(map(str, fitting))}",
            next_step=f"use -p heads={max(n for n in fitting if n <= heads)}, or -p "
            f"width={-(-width // heads) * heads}",
            code="WB-PLAN-267",
        )
    if context >= TEST_CHARACTERS:
        raise PlanError(
            "`context` must be shorter than the recipe's test text.",
            seen=f"context={context}",
            allowed=f"1 to {TEST_CHARACTERS - 1} characters",
            next_step="for example -p context=256; the time for attention grows with the "
            "square of context",
            code="WB-PLAN-268",
        )
