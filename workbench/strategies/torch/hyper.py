"""An optimizer's class and hyper-parameters, as they travel to a server."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch

from ...errors import FitError


def importable(cls: type) -> str:
    """Return `module:Class`, by which the server finds the class.

    Raises:
        FitError: It is defined in the cell, which servers do not run.
    """
    module: Any = sys.modules.get(cls.__module__)
    found = module
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls or cls.__module__ == "__main__":
        raise FitError(
            "The optimizer's class is defined in the cell, which the server does not run.",
            seen=cls.__qualname__,
            next_step="put the class into a module beside the notebook and import it",
            code="WB-FIT-115",
        )
    return f"{cls.__module__}:{cls.__qualname__}"


def hyper_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the hyper-parameters of each group, JSON-ready."""
    return [
        plain({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups
    ]


def plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings JSON-ready.

    Raises:
        FitError: One of them is no number, text or tuple of such.
    """
    return {name: _plain_value(name, value) for name, value in values.items()}


def _plain_value(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain_value(name, part) for part in value]
    raise FitError(
        f"The optimizer's setting {name!r} cannot be sent to a server.",
        seen=type(value).__name__,
        allowed="numbers, text, booleans, None, and tuples of them",
        code="WB-FIT-116",
    )


def restored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as optimizers hold them; JSON turned tuples into lists."""
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if found.get("capturable"):
        found["capturable"] = False  # CUDA graphs are the worker's matter
    return found
