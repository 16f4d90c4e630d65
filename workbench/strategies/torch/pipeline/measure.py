"""What each layer costs: seconds of forward and backward, and the size of what it hands on.

Measured on one worker, with a microbatch of real shape, one layer at a time: only one layer needs
to be in memory, so that models larger than a worker can be measured too.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....engine.torch import accelerator
from ....errors import FitError

if TYPE_CHECKING:
    from .layers import Layer

REPEATS = 3
clock = time.perf_counter


@dataclass(frozen=True)
class Form:
    """Shape and type of a value that is handed on."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of one such value."""
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def example(self) -> torch.Tensor:
        """Return an example without memory; floating values carry gradients."""
        grad = self.dtype.is_floating_point
        return torch.empty(self.shape, dtype=self.dtype, device="meta", requires_grad=grad)


@dataclass(frozen=True)
class Cost:
    """What one layer was seen to cost for one microbatch.

    Attributes:
        outputs: What it hands on in training.
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
        FitError: It is no tensor, so it cannot be sent.
    """
    if not isinstance(value, torch.Tensor):
        raise FitError(
            "Only tensors can be handed from stage to stage.",
            seen=f"layer {layer} returns a {type(value).__name__}",
            next_step="let it return a tensor or a tuple of tensors",
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
        scored: Whether the last layer gives the loss.

    Raises:
        FitError: A layer cannot be computed; names it and what it was given.
    """
    costs: list[Cost] = []
    with accelerator.own_random(device):
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
    """Raise FitError when the output no longer has one row per sample; name the first such layer.

    Layers between may lay values out as they like.
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
        "A layer changes the number of samples, so outputs and targets would not match.",
        seen=f"Layer {layer}: {samples} samples became {form.shape[0]} rows of "
        f"{tuple(form.shape[1:])}",
        next_step="a view(-1, n) folds values into the batch where n is not what one "
        "sample has: use nn.Flatten() or x.flatten(1), and fit the next layer to it",
        code="WB-FIT-142",
    )


def _working_copy(module: torch.nn.Module, device: torch.device) -> torch.nn.Module:
    """Return a copy to compute with; one without memory is filled with small numbers."""
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
        # No leaves of the graph: a layer may change in place what it is given.
        given = tuple(v.detach().requires_grad_(v.is_floating_point()).clone() for v in values)
        began = _now(given[0].device)
        try:
            with around():
                result = module(*given)
        except Exception as error:
            shapes = " and ".join(str(tuple(v.shape)) for v in values)
            raise FitError(
                f"Layer {name} of the model cannot be computed.",
                seen=f"input {shapes}: {type(error).__name__}: {str(error).splitlines()[0]}",
                next_step="check that the shapes of neighbouring layers fit",
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
    accelerator.of(device).synchronize()
    return clock()
