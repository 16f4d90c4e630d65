"""Cells that train models as large ones are trained: built without memory, cast, adapted."""

from __future__ import annotations

from typing import Any

context: Any = None  # these three are the running worker's
rank = 0
world_size = 1


def language_model(
    built="function", precision=None, adapted=False, recomputed=False, compiled="", wide=32,
    steps=4, tied=True,
):  # fmt: skip
    """Train a small Llama; return its losses and what became of it.

    Args:
        built: `function`: of a function; `real`: on every rank; `rank 0`: real there, without
            memory elsewhere; `meta`: without memory everywhere.
        adapted: Whether everything is frozen but small adapters (LoRA).
        recomputed: Whether activations are computed again in backward.
        compiled: The compiler's backend; empty: it is not compiled.
    """
    from functools import partial
    from unittest.mock import patch

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from workbench.engine.training.fit import fit

    class Adapted(torch.nn.Module):
        """A frozen layer and what is learnt beside it: y = W x + B A x."""

        def __init__(self, layer, inner=2):
            super().__init__()
            self.layer = layer.requires_grad_(False)
            self.down = torch.nn.Linear(layer.in_features, inner, bias=False)
            self.up = torch.nn.Linear(inner, layer.out_features, bias=False)
            torch.nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.layer(x) + self.up(self.down(x))

    config = LlamaConfig(
        vocab_size=64, hidden_size=wide, intermediate_size=2 * wide, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=tied, use_cache=False,
    )  # fmt: skip

    def make():
        model = LlamaForCausalLM(config)
        if adapted:
            model.requires_grad_(False)
            for block in model.model.layers:
                for name in ("q_proj", "v_proj"):
                    setattr(block.self_attn, name, Adapted(getattr(block.self_attn, name)))
        if recomputed:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        return model.double() if precision is None else model

    torch.manual_seed(3)
    if built in ("function", "real"):
        model = make if built == "function" else make()
    elif built == "rank 0" and rank == 0:
        model = make()
    else:
        with torch.device("meta"):
            model = make()
    tokens = torch.randint(0, 64, (24, 8), generator=torch.Generator().manual_seed(5))
    losses = []
    with patch.object(torch, "compile", partial(torch.compile, backend=compiled or "eager")):
        result = fit(
            model, (tokens, tokens), batch_size=8, steps=steps, precision=precision,
            step_fn=lambda model, batch: model(input_ids=batch[0], labels=batch[1]).loss,
            optimizer=lambda p: torch.optim.AdamW(p, 1e-2), compile=bool(compiled),
            callbacks=[lambda step, logs: losses.append(logs["loss"])],
        )  # fmt: skip
    done = result.model
    return {
        "losses": losses,
        "devices": sorted({t.device.type for t in (*done.parameters(), *done.buffers())}),
        "tied": done.lm_head.weight is done.model.embed_tokens.weight,
        "trained": sorted(name for name, p in done.named_parameters() if p.requires_grad),
    }


def without_memory(kind="plain"):
    """Train a model that has no memory anywhere, by layers of several kinds."""
    import torch

    from workbench.engine.training.fit import fit

    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(8))
            self.table = torch.arange(8.0)  # neither a parameter nor a buffer

        def forward(self, x):
            return x * self.scale + self.table

    class Normed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("shift", torch.full((8,), 2.0), persistent=False)
            self.count = torch.tensor(3.0)

        def forward(self, x):
            return x + self.shift * self.count

    def make():
        inner = {"plain": torch.nn.Tanh, "own": Own, "normed": Normed}[kind.partition(" ")[0]]
        layers = [torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), inner(), torch.nn.Linear(8, 3)]
        if kind == "own broken" and rank == 0 and torch.empty(0).device.type == "cpu":
            raise RuntimeError("no such file")
        return torch.nn.Sequential(*layers)

    torch.manual_seed(3)
    x, y = torch.randn(32, 8), torch.randint(0, 3, (32,))
    if "function" in kind or "broken" in kind:
        model = make
    else:
        with torch.device("meta"):
            model = make()
    result = fit(
        model, (x, y), loss=torch.nn.CrossEntropyLoss(), batch_size=16, steps=3,
        optimizer=lambda p: torch.optim.SGD(p, 0.1),
    )  # fmt: skip
    return {"loss": result.loss, "values": [float(t.sum()) for t in result.model.buffers()]}
