"""The update of a model that no worker holds whole: its optimizer, its gradient's norm.

Each worker's optimizer knows the parameters of its own stages. What needs all of them, the norm
that clipping compares, is added up over the stages:

    norm = sqrt(sum over stages of the squares of their gradients)

A parameter that several stages use (an embedding tied to the output layer) is held by each of them.
Before the update their gradients are added up, so that all make the same step:

    first holder  g_0 --------- (+) -- g --> update        g = g_0 + g_1
    other holder  g_1 --> sends     receives g --> update
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
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


class SharedGradients:
    """Adds up the gradients of parameters that several workers of a pipeline hold.

    Args:
        holders: Names of the parameters, and the places of those that hold them.
        held: This worker's own, by name.
        place: This worker's place in the group.

    Attributes:
        counted_elsewhere: Own parameters whose gradient another worker counts.
        sent_bytes: What a call sends.
    """

    def __init__(
        self,
        holders: Mapping[str, Sequence[int]],
        held: Mapping[str, torch.Tensor],
        place: int,
        wire: torch.device,
        group: Any,
    ) -> None:
        self._place, self._wire, self._group = place, wire, group
        self._shared = [
            (held[name], sorted(set(places)))
            for name, places in holders.items()
            if len(set(places)) > 1 and place in places and held[name].requires_grad
        ]
        self.counted_elsewhere = {id(p) for p, places in self._shared if places[0] != place}
        self.sent_bytes = sum(
            p.nbytes * (len(places) - 1 if places[0] == place else 1) for p, places in self._shared
        )

    def begin_equal(self) -> None:
        """Give all holders the first one's values. Collective among them."""
        for parameter, (first, *others) in self._shared:
            value = parameter.detach().to(self._wire).contiguous()
            if self._place == first:
                for other in others:
                    dist.send(value, self._rank(other), group=self._group)
            else:
                dist.recv(value, self._rank(first), group=self._group)
                parameter.data.copy_(value)

    def add_up(self) -> None:
        """Give all holders the same sum. Collective among them."""
        for parameter, (first, *others) in self._shared:
            own = parameter.grad if parameter.grad is not None else torch.zeros_like(parameter)
            own = own.detach().to_dense() if own.is_sparse else own.detach()
            own = own.to(self._wire).contiguous()
            if self._place == first:
                for other in others:
                    theirs = torch.empty_like(own)
                    dist.recv(theirs, self._rank(other), group=self._group)
                    own = own + theirs
                for other in others:
                    dist.send(own, self._rank(other), group=self._group)
            else:
                dist.send(own, self._rank(first), group=self._group)
                own = torch.empty_like(own)
                dist.recv(own, self._rank(first), group=self._group)
            parameter.grad = own.to(parameter.device)

    def _rank(self, place: int) -> int:
        return place if self._group is None else dist.get_global_rank(self._group, place)


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
