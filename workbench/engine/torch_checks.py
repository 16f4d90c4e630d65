"""What of a model and its optimizer only some strategies can train with."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..errors import FitError


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
        )


def sparse_layers(model: torch.nn.Module) -> list[str]:
    """Return the names of the layers that were made with sparse=True."""
    return [
        f"{name or type(module).__name__} (sparse=True)"
        for name, module in model.named_modules()
        if getattr(module, "sparse", False) is True
    ]
