"""Ten small models in the forms in which public code writes them, each with data and a loss.

Nothing is downloaded: configurations are tiny, weights random. Dropout is off and numbers are
float64, so that the results of strategies can be compared.

    case = model_zoo.CASES["hf_gpt2"]()
    wb.fit(case.model, case.data, **case.objective, optimizer=case.optimizer, ...)
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

SAMPLES, TOKENS, WORDS, CLASSES = 24, 8, 32, 3


@dataclass
class Case:
    """A model, and how it is trained.

    Attributes:
        objective: `loss` or `step_fn` of `wb.fit`.
    """

    model: nn.Module
    data: Any
    objective: dict[str, Any]
    optimizer: Callable[[Any], torch.optim.Optimizer]


def _sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 0.1)


def _small_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, 1e-3)


def _adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-3)


def _words() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    words = torch.randint(0, WORDS, (SAMPLES, TOKENS + 1))
    return words[:, :-1].contiguous(), words[:, 1:].contiguous()


def _images() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    images = torch.randn(SAMPLES, 3, 16, 16, dtype=torch.float64)
    return images, torch.randint(0, CLASSES, (SAMPLES,))


def each_word(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over all words."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# -- GPT as in nanoGPT: all layers in one ModuleDict -----------------------------------------------


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.n_head = heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.size()
        parts = self.c_attn(x).split(size[2], dim=2)
        q, k, v = (p.view(*size[:2], self.n_head, -1).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(size))


class GPTBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(width), Attention(width, heads)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Returns logits and, if targets are given, the loss, as nanoGPT does."""

    def __init__(self, *, tied: bool, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        layers = {
            "wte": nn.Embedding(WORDS, width),
            "wpe": nn.Embedding(TOKENS, width),
            "drop": nn.Dropout(0.0),
            "h": nn.ModuleList([GPTBlock(width, 2) for _ in range(blocks)]),
            "ln_f": nn.LayerNorm(width),
        }
        self.transformer: Any = nn.ModuleDict(layers)
        self.lm_head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.transformer.wte.weight = self.lm_head.weight
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * blocks))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> Any:
        pos = torch.arange(idx.size(1), dtype=torch.long, device=idx.device)
        x = self.transformer.drop(self.transformer.wte(idx) + self.transformer.wpe(pos))
        for block in self.transformer.h:
            x = block(x)
        logits = self.lm_head(self.transformer.ln_f(x))
        return logits if targets is None else (logits, each_word(logits, targets))


def nanogpt() -> Case:
    step = {"step_fn": lambda model, batch: model(*batch)[1]}
    return Case(GPT(tied=True).double(), _words(), step, _sgd)


def nanogpt_adamw() -> Case:
    return Case(GPT(tied=False).double(), _words(), {"loss": each_word}, _adamw)


# -- ResNet and VGG, activations in place ----------------------------------------------------------


class Block(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int, norm: Callable[[int], nn.Module]):
        super().__init__()
        self.conv1 = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
        self.bn1, self.relu = norm(outer), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.bn2 = norm(outer)
        self.downsample: nn.Module | None = None
        if stride > 1 or inner != outer:
            self.downsample = nn.Sequential(
                nn.Conv2d(inner, outer, 1, stride, bias=False), norm(outer)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    """ResNet-18 as in torchvision, of any width."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 64, classes: int = CLASSES):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1, self.relu = norm(width), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1)
        widths = [width, width, 2 * width, 4 * width, 8 * width]
        for number in range(1, 5):
            inner, outer = widths[number - 1], widths[number]
            blocks = Block(inner, outer, 1 + (number > 1), norm), Block(outer, outer, 1, norm)
            setattr(self, f"layer{number}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        for number in range(1, 5):
            x = getattr(self, f"layer{number}")(x)
        return self.fc(torch.flatten(self.avgpool(x), 1))


class VGG(nn.Module):
    """VGG-11 as in torchvision, of any width."""

    def __init__(self, width: int = 64, classes: int = CLASSES) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inner = 3
        for times in (1, 0, 2, 0, 4, 4, 0, 8, 8, 0, 8, 8, 0):
            if not times:
                layers.append(nn.MaxPool2d(2, 2, ceil_mode=True))
                continue
            layers += [nn.Conv2d(inner, times * width, 3, padding=1), nn.ReLU(inplace=True)]
            inner = times * width
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(
            nn.Linear(4 * inner, 8 * width), nn.ReLU(inplace=True), nn.Dropout(0.0),
            nn.Linear(8 * width, 8 * width), nn.ReLU(inplace=True), nn.Dropout(0.0),
            nn.Linear(8 * width, classes),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def resnet_groupnorm() -> Case:
    model = ResNet(lambda width: nn.GroupNorm(2, width), 4).double()
    return Case(model, _images(), {"loss": nn.CrossEntropyLoss()}, _sgd)


def resnet_batchnorm() -> Case:
    model = ResNet(nn.BatchNorm2d, 4).double()
    # Few numbers are left to normalise over: larger steps would run away.
    return Case(model, _images(), {"loss": nn.CrossEntropyLoss()}, _small_sgd)


def vgg() -> Case:
    return Case(VGG(4).double(), _images(), {"loss": nn.CrossEntropyLoss()}, _sgd)


# -- sequences -------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.first, self.second = kind(16, 12, batch_first=True), kind(12, 12, batch_first=True)
        self.decode = nn.Linear(12, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        out, state = self.first(self.embed(words))
        out, _ = self.second(out, state)
        return self.decode(out)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.decode = nn.Linear(16, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encoder(self.embed(words)))


def lstm() -> Case:
    return Case(Recurrent().double(), _words(), {"loss": each_word}, _sgd)


def encoder() -> Case:
    return Case(Encoder().double(), _words(), {"loss": each_word}, _sgd)


# -- Hugging Face ----------------------------------------------------------------------------------


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Batches as a tokenizer gives them: dictionaries."""

    def __init__(self) -> None:
        self.words, self.labels = _words()[0], _words()[0]

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.words[index], "labels": self.labels[index]}


def hf_gpt2() -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_layer=3, n_head=2, n_embd=16, vocab_size=WORDS, n_positions=TOKENS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    step = {"step_fn": lambda model, batch: model(**batch).loss}
    return Case(GPT2LMHeadModel(config).double(), Texts(), step, _sgd)


def hf_bert() -> Case:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        num_hidden_layers=3, num_attention_heads=2, hidden_size=16, intermediate_size=32,
        vocab_size=WORDS, max_position_embeddings=TOKENS, num_labels=CLASSES,
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    loss = {"loss": lambda out, y: F.cross_entropy(out.logits, y)}
    data = _words()[0], _images()[1]
    return Case(BertForSequenceClassification(config).double(), data, loss, _sgd)


def hf_llama() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, hidden_size=16,
        intermediate_size=32, vocab_size=WORDS, max_position_embeddings=TOKENS,
        bos_token_id=0, eos_token_id=0, attn_implementation="sdpa",
    )  # fmt: skip
    step = {"step_fn": lambda model, batch: model(input_ids=batch[0], labels=batch[0]).loss}
    return Case(LlamaForCausalLM(config).double(), _words(), step, _sgd)


# -- vision transformer ----------------------------------------------------------------------------


class ViTAttention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.q_norm, self.k_norm = (
            nn.Linear(width, 3 * width),
            nn.Identity(),
            nn.Identity(),
        )
        self.proj, self.proj_drop = nn.Linear(width, width), nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.shape
        q, k, v = self.qkv(x).reshape(*size[:2], 3, 2, -1).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v)
        return self.proj_drop(self.proj(y.transpose(1, 2).reshape(size)))


class ViTBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.attn, self.ls1 = nn.LayerNorm(width), ViTAttention(width), nn.Identity()
        self.drop_path1, self.norm2 = nn.Identity(), nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )
        self.ls2, self.drop_path2 = nn.Identity(), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer with the layers of timm's, most of which do nothing here."""

    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.patch_embed = nn.Conv2d(3, width, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.pos_drop, self.patch_drop = nn.Dropout(0.0), nn.Identity()
        self.norm_pre = nn.Identity()
        self.blocks = nn.Sequential(*(ViTBlock(width) for _ in range(blocks)))
        self.norm, self.fc_norm = nn.LayerNorm(width), nn.Identity()
        self.head_drop, self.head = nn.Dropout(0.0), nn.Linear(width, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1)
        x = self.norm_pre(self.patch_drop(self.pos_drop(x + self.pos_embed)))
        x = self.norm(self.blocks(x))[:, 0]
        return self.head(self.head_drop(self.fc_norm(x)))


def vit() -> Case:
    return Case(ViT().double(), _images(), {"loss": nn.CrossEntropyLoss()}, _sgd)


# -- timm and torchvision --------------------------------------------------------------------------


VISION = Path(sys.prefix) / "vision"
"""Where `run-tests` has put timm and torchvision: apart from what others import."""


@contextlib.contextmanager
def _vision() -> Iterator[None]:
    """Make timm and torchvision importable, also with a torch that they were not built for.

    Then the compiled ops do not load, and the import fails at the two ops that torchvision still
    describes. The models use none of them, so a declaration is enough.
    """
    sys.path.append(str(VISION))
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        for op in ("nms", "qnms"):
            schema = "(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{op}", schema)
    try:
        yield
    finally:
        sys.path.remove(str(VISION))


def timm_vit() -> Case:
    """Return timm's vision transformer: most of its children do nothing here."""
    with _vision():
        from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(
        img_size=16, patch_size=4, embed_dim=16, depth=3, num_heads=2, num_classes=CLASSES
    )
    return Case(model.double(), _images(), {"loss": nn.CrossEntropyLoss()}, _sgd)


def torchvision_resnet18() -> Case:
    """Return torchvision's ResNet-18; BatchNorm, which would differ over shares, evaluates."""
    with _vision():
        from torchvision.models import resnet18

    model = resnet18(num_classes=CLASSES).double()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.eval()
    return Case(model, _images(), {"loss": nn.CrossEntropyLoss()}, _small_sgd)


def torchvision_vgg11() -> Case:
    """Return torchvision's VGG-11, without dropout."""
    with _vision():
        from torchvision.models import vgg11

    model = vgg11(num_classes=CLASSES, dropout=0.0).double()
    images = torch.nn.functional.interpolate(_images()[0], size=32), _images()[1]
    return Case(model, images, {"loss": nn.CrossEntropyLoss()}, _small_sgd)


CASES: dict[str, Callable[[], Case]] = {
    make.__name__: make
    for make in (
        nanogpt, nanogpt_adamw, resnet_groupnorm, resnet_batchnorm, lstm,
        hf_gpt2, hf_bert, hf_llama, vit, encoder,
    )
}  # fmt: skip
"""What the matrix trains."""
