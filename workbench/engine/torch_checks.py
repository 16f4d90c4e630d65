"""What of a model and its optimizer only some strategies can train with."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from ..errors import FitError
from .torch_batches import map_batch


@contextlib.contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Have a model evaluate meanwhile; layers that evaluated before (frozen BatchNorm) go on so."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_closure(optimizer: Any) -> None:
    """Raise FitError when an optimizer's step cannot do without a closure.

    Args:
        optimizer: An optimizer or its class; what a function will return is not known yet.
    """
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if not issubclass(kind, torch.optim.Optimizer):
        return
    closure = inspect.signature(kind.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise FitError(
            "This optimizer asks for a closure, with which it computes the loss several times in "
            "one step; wb.fit computes it once.",
            seen=kind.__name__,
            allowed="an optimizer whose step needs no closure (SGD, Adam, AdamW, ...)",
            next_step="optimizer=lambda p: torch.optim.AdamW(p, 1e-3), or your own loop with "
            "wb.prepare under %%distributed one_device",
            code="WB-FIT-046",
        )


def sparse_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the layers that were made with sparse=True."""
    return [
        f"{name or type(module).__name__} (sparse=True)"
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True
    ]


def make_real(
    model: torch.nn.Module, peek: Callable[[], Any], step_fn: Callable[..., Any] | None = None
) -> None:
    """Give lazy layers their shapes, by a batch of one sample; other models stay untouched.

    The weights are drawn here, before the strategy begins, from the seed that all ranks share.

    Args:
        peek: Returns such a batch; None where the data cannot be read without using it up.
        step_fn: How the model is called on a batch; without one, on the first of its parts.

    Raises:
        FitError: The batch does not tell the shapes.
    """
    if not _lazy_layers(model):
        return
    batch = peek()
    if batch is not None:
        here = next(iter([*model.parameters(), *model.buffers()])).device
        batch = map_batch(lambda t: t.to(here), batch)
        try:
            # No dropout, no batch statistics of a single sample.
            with evaluating(model), torch.no_grad():
                if step_fn is not None:
                    step_fn(model, batch)
                else:
                    model(batch[0] if isinstance(batch, (tuple, list)) else batch)
        except Exception as error:
            raise _unreal(model, f"{type(error).__name__}: {error}") from error
    if _lazy_layers(model):
        raise _unreal(model, ", ".join(_lazy_layers(model)))


def _lazy_layers(model: torch.nn.Module) -> list[str]:
    return [
        f"{name or 'the model'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if any(is_lazy(p) for p in module.parameters(recurse=False))
        or any(is_lazy(b) for b in module.buffers(recurse=False))
    ]


def _unreal(model: torch.nn.Module, seen: str) -> FitError:
    return FitError(
        "The model has lazy layers whose shapes could not be found from the data.",
        seen=seen,
        allowed="a model that takes the first part of a batch: model(x)",
        next_step="call it once before: model(x[:1]), then train it",
        code="WB-FIT-047",
    )
