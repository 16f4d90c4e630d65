"""Which layers are divided over the workers, and how: found in the model, or given."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from ....errors import FitError

Plan = dict[str, str]
"""Style by the layer's name: `col`, `row`, `gathered`, `split_row`, `heads`."""

STYLES = {
    "col": "divided by columns; its output stays divided",
    "row": "divided by rows; takes a divided input, the outputs are added up",
    "gathered": "divided by columns; its output is put together at once",
    "split_row": "divided by rows; takes a whole input",
    "heads": "as col, for code that reshapes the output into heads",
}
ALONE = ("gathered", "split_row")


# What may lie between the two layers of a pair: it treats each number on its own.
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh,
    nn.Sigmoid, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
    nn.Identity,
)  # fmt: skip

# Usual names of layers that work in pairs: (divided by columns), divided by rows, attention.
USUAL: tuple[tuple[tuple[str, ...], str, bool], ...] = (
    (("q_proj", "k_proj", "v_proj"), "o_proj", True),
    (("q_proj", "k_proj", "v_proj"), "out_proj", True),
    (("query", "key", "value"), "out", True),
    (("query", "key", "value"), "proj", True),
    (("to_q", "to_k", "to_v"), "to_out", True),
    (("wq", "wk", "wv"), "wo", True),
    (("gate_proj", "up_proj"), "down_proj", False),
    (("up_proj",), "down_proj", False),
    (("w1", "w3"), "w2", False),
    (("fc1",), "fc2", False),
    (("c_fc",), "c_proj", False),
    (("lin1",), "lin2", False),
    (("linear1",), "linear2", False),
    (("dense_h_to_4h",), "dense_4h_to_h", False),
)


def find_plan(model: nn.Module, workers: int) -> tuple[Plan, Plan]:
    """Return the plan with guesses from usual names, and the one without.

    Raises:
        FitError: No layer can be divided.
    """
    safe = {name: style for name, module in _layers(model) if (style := _alone(module, workers))}
    if not safe:
        raise FitError(
            "No layer of the model can be divided over the workers.",
            seen=", ".join(sorted({type(module).__name__ for module in model.modules()})),
            allowed=f"Linear or Embedding layers with at least {workers} inputs or outputs",
            next_step="use mirrored or sharded",
            code="WB-FIT-151",
        )
    for prefix, module in model.named_modules():
        if isinstance(module, nn.Sequential):
            for first, second in _neighbours(module):
                names = [_join(prefix, first)], _join(prefix, second)
                _pair(model, safe, *names, "col", workers)
    found = dict(safe)
    for prefix, module in model.named_modules():
        own = dict(module.named_children())
        for columns, row, attention in USUAL:
            if all(isinstance(own.get(name), nn.Linear) for name in (*columns, row)):
                names = [_join(prefix, name) for name in columns], _join(prefix, row)
                _pair(model, found, *names, "heads" if attention else "col", workers)
    return found, safe


def given_plan(model: nn.Module, text: str, workers: int) -> Plan:
    """Read `NAME=STYLE,..`; names may hold `*`.

    Raises:
        FitError: A name or style is unknown, or a layer cannot be divided that way.
    """
    layers = dict(_layers(model))
    plan: Plan = {}
    for part in text.split(","):
        pattern, _, style = part.strip().partition("=")
        if style not in STYLES:
            raise FitError(
                "A part of the plan was not understood.",
                seen=part,
                allowed="NAME=STYLE with STYLE one of "
                + "; ".join(f"{name} ({what})" for name, what in STYLES.items()),
                code="WB-FIT-152",
            )
        names = [name for name in layers if fnmatchcase(name, pattern)]
        if not names:
            raise FitError(
                "The plan names a layer that the model lacks.",
                seen=pattern,
                allowed=", ".join(layers) or "the model has no Linear or Embedding layer",
                next_step="name layers as above (* matches any), or use -o plan=auto",
                code="WB-FIT-153",
            )
        plan.update(dict.fromkeys(names, style))
    return plan


def apply_plan(model: nn.Module, plan: Plan, mesh: Any) -> None:
    """Divide the layers, in place."""
    if "" in plan:  # the model is itself the layer
        parallelize_module(model, mesh, _style(plan[""], model))
        return
    layers = {name: model.get_submodule(name) for name in plan}
    parallelize_module(model, mesh, {name: _style(plan[name], m) for name, m in layers.items()})


def describe(model: nn.Module, plan: Plan) -> str:
    """Return the plan in words, for the user."""
    divided = sum(p.numel() for name in plan for p in model.get_submodule(name).parameters())
    share = divided / max(sum(p.numel() for p in model.parameters()), 1)
    layers = ", ".join(f"{name or 'the model'}={style}" for name, style in plan.items())
    return f"divided over the workers: {layers} ({share:.0%} of the parameters)"


def _style(style: str, module: nn.Module) -> ParallelStyle:
    if style == "col":
        return ColwiseParallel()
    if style == "heads":
        return ColwiseParallel(use_local_output=False)
    if style == "gathered":
        return ColwiseParallel(output_layouts=Replicate())
    if style == "split_row":
        return RowwiseParallel(input_layouts=Replicate())
    return RowwiseParallel(input_layouts=Shard(-1))


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the layers that can be divided.

    Left whole are a weight that two modules share, and one that is computed from other parameters.
    """
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    attention = {
        id(inner)
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention)  # reads its layers' weights itself
        for inner in module.modules()
    }
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, nn.Embedding)) or id(module) in attention:
            continue
        if isinstance(module, nn.Embedding) and (module.sparse or module.max_norm is not None):
            continue
        if (
            not set(module._parameters) <= {"weight", "bias"}
            or module._parameters.get("weight") is None
        ):
            continue  # its weight is computed from others (weight_norm, orthogonal)
        if all(holders[id(p)] == 1 for p in module.parameters(recurse=False)):
            yield name, module


def _alone(module: nn.Module, workers: int) -> str | None:
    """Return how a layer is divided that has no partner."""
    if isinstance(module, nn.Embedding):
        return "gathered" if module.embedding_dim >= workers else None
    assert isinstance(module, nn.Linear)
    if module.out_features >= max(workers, 2):  # DTensor cannot divide a dimension of 1
        return "gathered"
    return "split_row" if module.in_features >= workers else None


def _neighbours(sequence: nn.Sequential) -> Iterator[tuple[str, str]]:
    """Yield names of Linear layers with nothing but elementwise functions between them."""
    waiting: str | None = None
    for name, module in sequence.named_children():
        if isinstance(module, nn.Linear):
            if waiting is None:
                waiting = name
                continue
            yield waiting, name
            waiting = None
        elif type(module) not in ELEMENTWISE:
            waiting = None


def _pair(
    model: nn.Module, plan: Plan, columns: list[str], row: str, style: str, workers: int
) -> None:
    """Make a pair, where the plan has its layers, unpaired yet, and they divide evenly."""
    if not all(plan.get(name) in ALONE for name in (*columns, row)):
        return
    widths: list[Any] = [model.get_submodule(name).out_features for name in columns]
    if any(width % workers for width in widths):
        return
    plan.update(dict.fromkeys(columns, style))
    plan[row] = "row"


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
