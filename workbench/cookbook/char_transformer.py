"""A character language model: a small transformer that reads Python's own sources.

The blocks are those of GPT-2, with the normalisation first: Vaswani et al., Attention Is All You
Need, NIPS 2017; Radford et al., Language Models are Unsupervised Multitask Learners, 2019.
"""

SUMMARY = "The next character of Python's own sources, by a small transformer; under a minute."

TORCH = '''\
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

TENSORFLOW = '''\
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

SOURCES = {"torch": TORCH, "tensorflow": TENSORFLOW}
