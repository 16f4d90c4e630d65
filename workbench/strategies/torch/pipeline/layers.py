"""A model as a chain of layers: what a pipeline can be cut between.

Three forms are understood, and all end as the same chain:

- `nn.Sequential`: its children, nested ones taken apart;
- a list of stages (`wb.fit([first, second], ...)`): its items, cut where the user cut;
- any other module that `torch.export` can trace: pieces that begin where modules are called
  (`trace.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from ....engine.torch.support import Stages
from ....errors import FitError, nearest


@dataclass
class Layer:
    """One link of the chain.

    Attributes:
        name: Its path in the model: `0`, `features.3`, `fc1`.
        training: What the values of the previous layer go through.
        evaluating: The same in evaluation; another module only where tracing fixed the mode.
        names: Full names of its parameters and buffers.
    """

    name: str
    training: torch.nn.Module
    evaluating: torch.nn.Module
    names: tuple[str, ...] = field(default=())


def chain_of(model: torch.nn.Module) -> list[Layer] | None:
    """Return the layers of a Sequential or of a list of stages; None for any other module."""
    if isinstance(model, Stages):
        return [_layer(model, name) for name, _ in model.named_children()]
    return [_layer(model, name) for name in _flat(model)] if is_chain(model) else None


def is_chain(module: torch.nn.Module) -> bool:
    # A subclass with a forward of its own, or hooks on the whole, is more than its children.
    plain = type(module).forward is torch.nn.Sequential.forward
    return plain and not module._forward_hooks and not module._forward_pre_hooks


def _flat(module: torch.nn.Module, prefix: str = "") -> Iterator[str]:
    for name, child in module.named_children():
        if is_chain(child) and len(list(child.children())):
            yield from _flat(child, f"{prefix}{name}.")
        else:
            yield prefix + name


def _layer(model: torch.nn.Module, name: str) -> Layer:
    module = model.get_submodule(name)
    names = with_aliases(model, (f"{name}.{inner}" for inner in tensor_names(module)))
    return Layer(name, module, module, tuple(names))


def tensor_names(module: torch.nn.Module) -> list[str]:
    """Return the names of all parameters and buffers."""
    parameters = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    return parameters + [name for name, _ in module.named_buffers(remove_duplicate=False)]


def check_enough(
    layers: Sequence[Layer], stages: int, workers: int, *, traced: bool = False
) -> None:
    """Raise FitError when there are more stages than layers."""
    if len(layers) < stages:
        per_worker = stages // workers
        fits = len(layers) // workers  # stages per worker
        fewer = (
            f"-o stages_per_worker={fits}"
            if per_worker > 1 and fits
            else (f"fewer workers with -n {max(1, len(layers) // per_worker)}")
        )
        raise FitError(
            "The model has fewer layers than the pipeline has stages.",
            seen=f"{len(layers)} layers for {stages} stages"
            + (f" ({per_worker} per worker)" if per_worker > 1 else ""),
            allowed=f"at most {len(layers)} stages",
            next_step=f"use {fewer}, or "
            + (
                "let forward call more modules: it is cut where a module is called that is called "
                "once"
                if traced
                else "give the model more layers"
            ),
            code="WB-FIT-137",
        )


def given_bounds(layers: Sequence[Layer], split_at: str, stages: int) -> list[int]:
    """Return the bounds that `split_at=2,5` or `split_at=conv2,fc2` asks for.

    Each entry is the layer that begins the next stage: its name, or its number in the chain.

    Raises:
        FitError: A layer does not exist, the order is wrong, or the number of stages.
    """
    names = [layer.name for layer in layers]
    cuts = []
    for text in (part.strip() for part in split_at.split(",")):
        if text in names:
            cuts.append(names.index(text))
        elif text.isdigit() and int(text) < len(names):
            cuts.append(int(text))
        else:
            guess = nearest(text, names)
            raise FitError(
                "split_at names a layer that the model does not have.",
                seen=text,
                allowed=", ".join(names),
                next_step=f"did you mean {guess!r}?"
                if guess
                else "name the layers that begin a "
                "stage, or leave split_at out: the stages are then balanced from measured times",
                code="WB-FIT-138",
            )
    bounds = [0, *cuts, len(layers)]
    if any(a >= b for a, b in pairwise(bounds)):
        raise FitError(
            "split_at must name layers in the model's order, each once, and not the first.",
            seen=split_at,
            allowed=", ".join(names[1:]),
            code="WB-FIT-139",
        )
    if len(bounds) - 1 != stages:
        raise FitError(
            "split_at does not make as many stages as there are places for them.",
            seen=f"{split_at}: {len(bounds) - 1} stages",
            allowed=f"{stages} stages, so {stages - 1} cuts",
            next_step=f"use -n {len(bounds) - 1}, or change split_at",
            code="WB-FIT-140",
        )
    return bounds


def with_aliases(model: torch.nn.Module, names: Iterable[str]) -> list[str]:
    """Return the names of parameters and buffers, and all other names of the same tensors."""
    alike: dict[int, list[str]] = {}
    known: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    known |= dict(model.named_buffers(remove_duplicate=False))
    for name, tensor in known.items():
        alike.setdefault(id(tensor), []).append(name)
    found = (other for name in names if name in known for other in alike[id(known[name])])
    return list(dict.fromkeys(found))


def shared(
    model: torch.nn.Module, layers: Sequence[Layer], bounds: Sequence[int]
) -> dict[str, list[int]]:
    """Return the parameters that several stages hold, by their first name, and which stages."""
    first_names = {id(p): name for name, p in reversed(list(model.named_parameters()))}
    learnt = dict(model.named_parameters(remove_duplicate=False))
    holders: dict[str, list[int]] = {}
    for stage, (first, end) in enumerate(pairwise(bounds)):
        names = {name for layer in layers[first:end] for name in layer.names}
        for name in {first_names[id(learnt[n])] for n in names if n in learnt}:
            holders.setdefault(name, []).append(stage)
    order = {name: place for place, name in enumerate(first_names.values())}
    several = [name for name, stages in holders.items() if len(stages) > 1]
    return {name: holders[name] for name in sorted(several, key=order.__getitem__)}


def batchnorm_warning(
    model: torch.nn.Module, microbatch: int, batch: int, microbatches: int
) -> str | None:
    """Return what BatchNorm does otherwise in a pipeline; None where none of the model trains."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    found = [name for name, one in model.named_modules() if isinstance(one, norms) and one.training]
    if not found:
        return None
    return (
        f"BatchNorm ({', '.join(found)}) normalises over a microbatch of {microbatch} samples "
        f"instead of the batch of {batch}, and updates its running statistics {microbatches} "
        "times a step: the result differs from one device's. GroupNorm or LayerNorm do not depend "
        "on it."
    )
