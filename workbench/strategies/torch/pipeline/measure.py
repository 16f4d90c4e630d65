"""A model as a chain of layers with measured costs; a pipeline can be cut between layers.

A cost is the seconds of forward and backward, and the size of the layer's outputs.

One worker measures the costs, with a microbatch of real shape, one layer at a time. Only one layer
must be in memory, so models larger than a worker can be measured too.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch

from ....engine.torch import accelerator as accelerators
from ....engine.torch.support import Stages
from ....errors import FitError, nearest


@dataclass
class Layer:
    """One link of the chain.

    Attributes:
        name: Its path in the model: `0`, `features.3`, `fc1`.
        training: The module that takes the previous layer's values.
        evaluating: The same for evaluation; it is another module only if tracing fixed the mode.
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
    # A subclass with its own forward, or with hooks, does more than its children.
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
    """Raise FitError if there are more stages than layers."""
    if len(layers) < stages:
        per_worker = stages // workers
        fits = len(layers) // workers  # stages per worker
        least = max(1, len(layers) // per_worker)
        fewer = (
            f"-o stages_per_worker={fits}"
            if per_worker > 1 and fits
            else f"fewer workers: -n {least} (under hybrid: -o stages={least})"
        )
        raise FitError(
            "The model has fewer layers than the pipeline has stages.",
            seen=f"{_layers(len(layers))} for {stages} stages"
            + (f" ({per_worker} per worker)" if per_worker > 1 else ""),
            allowed=f"at most {len(layers)} stage{'s' * (len(layers) != 1)}",
            next_step=f"use {fewer}, or "
            + (
                (
                    "divide the code in forward into more modules: Workbench can cut the model "
                    "only at modules that forward calls exactly once"
                )
                if traced
                else "give the model more layers"
            ),
            code="WB-FIT-137",
        )


def given_bounds(layers: Sequence[Layer], split_at: str, stages: int) -> list[int]:
    """Return the bounds that `split_at=2,5` or `split_at=conv2,fc2` asks for.

    Each entry is the layer that begins the next stage: its name, or its number in the chain.

    Raises:
        FitError: A layer does not exist, or the order or the number of stages is wrong.
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
                "`split_at` names a layer that the model does not have.",
                seen=text,
                allowed=", ".join(names),
                next_step=f"did you mean {guess!r}?"
                if guess
                else "name the layers that begin a stage, or remove split_at. Without split_at, "
                "Workbench measures the time of each layer and divides the layers among the stages",
                code="WB-FIT-138",
            )
    bounds = [0, *cuts, len(layers)]
    if any(a >= b for a, b in pairwise(bounds)):
        raise FitError(
            "`split_at` must name layers in the model's order, each layer once, and not the "
            "first layer.",
            seen=split_at,
            allowed=", ".join(names[1:]),
            code="WB-FIT-139",
        )
    if len(bounds) - 1 != stages:
        raise FitError(
            "`split_at` gives the wrong number of stages.",
            seen=f"split_at={split_at} gives {len(bounds) - 1} stages",
            allowed=f"{stages} stages, so {_layers(stages - 1)} in split_at",
            next_step=f"name {_layers(stages - 1)} in split_at, or change the number of stages "
            "with -n (under hybrid: with -o stages)",
            code="WB-FIT-140",
        )
    return bounds


def _layers(count: int) -> str:
    return f"{count} layer" + "s" * (count != 1)


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
    """Return the parameters that several stages hold, by their first name, with these stages."""
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
    """Return how BatchNorm differs in a pipeline; None if the model trains none."""
    norms = torch.nn.modules.batchnorm._BatchNorm
    found = [name for name, one in model.named_modules() if isinstance(one, norms) and one.training]
    if not found:
        return None
    return (
        f"BatchNorm normalises over each microbatch ({microbatch} of {batch} samples) instead of "
        f"the whole batch. BatchNorm also updates its statistics {microbatches} times per step. So "
        "the result differs from the result on one device. To avoid this, use GroupNorm or "
        "LayerNorm, which do not depend on the batch. The model's BatchNorm layers: "
        f"{', '.join(found)}."
    )


REPEATS = 3
clock = time.perf_counter


@dataclass(frozen=True)
class Form:
    """Shape and type of a value that is sent to the next stage."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of one such value."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def example(self) -> torch.Tensor:
        """Return an example on the meta device, without memory; floats require gradients."""
        grad = self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=grad)


@dataclass(frozen=True)
class Cost:
    """A layer's measured cost for one microbatch.

    Attributes:
        outputs: Its outputs in training.
        evaluated: The same in evaluation.
    """

    forward_s: float
    backward_s: float
    parameters: int
    outputs: tuple[Form, ...]
    evaluated: tuple[Form, ...]


def form_of(value: Any, layer: str) -> Form:
    """Return the form of a value.

    Raises:
        FitError: It is not a tensor, so it cannot be sent.
    """
    if not isinstance(value, torch.Tensor):
        raise FitError(
            "A layer can pass only tensors to the next stage.",
            seen=f"a {type(value).__name__} in the output of layer {layer}",
            next_step="make the layer return a tensor, or a tuple that contains only tensors",
            code="WB-FIT-141",
        )
    return Form(tuple(value.shape), value.dtype)


def measure(
    layers: Sequence[Layer],
    inputs: tuple[torch.Tensor, ...],
    device: torch.device,
    around: Any,
    *,
    scored: bool = False,
) -> list[Cost]:
    """Return the cost of each layer for a microbatch; no random state or weight is changed.

    Args:
        around: Context of the forward pass (autocast).
        scored: Whether the last layer returns the loss.

    Raises:
        FitError: A layer cannot be computed; the error names the layer and its input.
    """
    costs: list[Cost] = []
    with accelerators.own_random(device):
        trained = evaluated = tuple(value.to(device) for value in inputs)
        for layer in layers:
            module = _working_copy(layer.training, device)
            trained, forward_s, backward_s = _time(layer.name, module, trained, around)
            parameters = sum(p.numel() for p in module.parameters())
            forms = given = tuple(form_of(value, layer.name) for value in trained)
            del module
            if layer.evaluating is not layer.training:
                evaluated = _evaluate(_working_copy(layer.evaluating, device), evaluated, around)
                given = tuple(form_of(value, layer.name) for value in evaluated)
            costs.append(Cost(forward_s, backward_s, parameters, forms, given))
    if not scored:
        _check_samples(layers, costs, len(inputs[0]))
    return costs


def _evaluate(
    module: torch.nn.Module, values: tuple[torch.Tensor, ...], around: Any
) -> tuple[torch.Tensor, ...]:
    with torch.no_grad(), around():
        result = module(*values)
    return result if isinstance(result, tuple) else (result,)


def _check_samples(layers: Sequence[Layer], costs: Sequence[Cost], samples: int) -> None:
    """Raise FitError if the output does not have one row per sample; name the first such layer.

    Layers in between can arrange values in any way.
    """

    def folded(forms: tuple[Form, ...]) -> bool:
        return bool(forms[0].shape) and forms[0].shape[0] != samples

    if not folded(costs[-1].outputs):
        return
    layer, form = next(
        (layer.name, cost.outputs[0])
        for layer, cost in zip(layers, costs, strict=True)
        if folded(cost.outputs)
    )
    raise FitError(
        "A layer changes the number of samples, so its outputs would not match the targets.",
        seen=f"Layer {layer}: for {samples} samples, the output has the shape {tuple(form.shape)}",
        next_step="keep the samples in the first dimension. x.view(-1, n) changes the number of "
        "samples if n is not the size of one sample. Use nn.Flatten() or x.flatten(1) instead, and "
        "adapt the input size of the next layer",
        code="WB-FIT-142",
    )


def _working_copy(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy for the computation; a tensor without memory is filled with small numbers."""
    copied = copy.deepcopy(module)
    if not any(t.is_meta for t in (*copied.parameters(), *copied.buffers())):
        return copied.to(device)
    copied = copied.to_empty(device=device)
    with torch.no_grad():
        for parameter in copied.parameters():
            if parameter.is_floating_point():
                parameter.uniform_(-0.05, 0.05)
        for buffer in copied.buffers():
            buffer.fill_(1 if buffer.is_floating_point() else 0)
    return copied


def _time(
    name: str, module: torch.nn.Module, values: tuple[torch.Tensor, ...], around: Any
) -> tuple[tuple[torch.Tensor, ...], float, float]:
    """Return the layer's values, detached, and the best of a few forward and backward times."""
    seconds: list[tuple[float, float]] = []
    outputs: tuple[torch.Tensor, ...] = ()
    for _ in range(REPEATS):
        # No leaves of the graph, because a layer can change its input in place.
        given = tuple(v.detach().requires_grad_(v.is_floating_point()).clone() for v in values)
        began = _now(given[0].device)
        try:
            with around():
                result = module(*given)
        except Exception as error:
            shapes = " and ".join(str(tuple(v.shape)) for v in values)
            raise FitError(
                f"An error occurred when layer {name} of the model was computed.",
                seen=f"input {shapes}: {type(error).__name__}: {str(error).splitlines()[0]}",
                next_step="correct the cause of this error, for example shapes of neighbouring "
                "layers that do not match",
                code="WB-FIT-143",
            ) from error
        outputs = result if isinstance(result, tuple) else (result,)
        forward = _now(given[0].device)
        ends = [o for o in outputs if isinstance(o, torch.Tensor) and o.requires_grad]
        if ends:
            torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        seconds.append((forward - began, _now(given[0].device) - forward))
        for parameter in module.parameters():
            parameter.grad = None
    forward_s, backward_s = min(seconds, key=sum)
    return (
        tuple(o.detach() if isinstance(o, torch.Tensor) else o for o in outputs),
        (forward_s),
        backward_s,
    )


def _now(device: torch.device) -> float:
    accelerators.of(device).synchronize()
    return clock()
