"""The update of a model that no worker holds whole: its optimizer, its gradient's norm.

Each worker's optimizer knows the parameters of its own stages. What needs all of them, the norm
that clipping compares, is added up over the stages:

    norm = sqrt(sum over stages of the squares of their gradients)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..trainer import build_optimizer


def own_optimizer(
    given: Any, own: Sequence[torch.Tensor], model: torch.nn.Module
) -> torch.optim.Optimizer | None:
    """Return the optimizer of the own parameters; a built one is narrowed to them.

    Returns:
        None where the own stages learn nothing.
    """
    if isinstance(given, torch.optim.Optimizer):
        kept = {id(p) for p in own}
        for group in given.param_groups:
            group["params"] = [p for p in group["params"] if id(p) in kept]
        return given
    return build_optimizer(lambda p: given(list(own)), model) if own else None


def norm_over_stages(
    grads: Sequence[torch.Tensor], came_s: float, workers: int, wire: torch.device, group: Any
) -> tuple[float, float]:
    """Return the norm of the whole model's gradient, and when the last worker came. Collective.

    Args:
        grads: Gradients of the own stages.
        came_s: When this worker was ready.
        wire: Where messages lie when they are sent.
    """
    square = sum(float(g.double().square().sum()) for g in grads)
    mine = torch.tensor([square, came_s], dtype=torch.float64, device=wire)
    every = [torch.empty_like(mine) for _ in range(workers)]
    dist.all_gather(every, mine, group=group)
    norm = math.sqrt(sum(float(their[0]) for their in every))
    return norm, max(float(their[1]) for their in every)


def scale(grads: Sequence[torch.Tensor], norm: float, clip_norm: float) -> None:
    """Scale gradients as `clip_grad_norm_` does on one device."""
    factor = min(1.0, clip_norm / (norm + 1e-6))
    for grad in grads:
        grad.mul_(factor)
