"""The update of a model that no worker holds whole: its optimizer, its gradient's norm.

Each worker's optimizer knows the parameters of its own stages. What needs all of them, the norm
that clipping compares, is added up over the stages:

    norm = sqrt(sum over stages of the squares of their gradients)

A parameter that several stages use (an embedding tied to the output layer) is held by each of them.
Before the update their gradients are added up, so that all make the same step:

    first holder  g_0 --------- (+) -- g --> update        g = g_0 + g_1
    other holder  g_1 --> sends     receives g --> update

The state of a pipeline is gathered from all stages in the form of one device's. Optimizer state is
kept by the position of its parameter in the whole model, as `optimizer.state_dict()` does where the
optimizer holds all of them, so it can be continued under another strategy or another number of
workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ....engine.torch.data import map_batch
from ..parts.replica import build_optimizer


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
    square = float(sum(g.double().square().sum() for g in grads))
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


def _positions(model: torch.nn.Module) -> dict[int, int]:
    learnt = [p for p in model.parameters() if p.requires_grad]
    return {id(parameter): index for index, parameter in enumerate(learnt)}


def gather(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, scheduler: Any
) -> dict[str, Any]:
    """Return model, optimizer and scheduler of all stages, on the CPU. Collective."""
    position = _positions(model)
    own: dict[str, Any] = {
        "model": {n: t for n, t in model.state_dict().items() if not t.is_meta},
        "scheduler": None if scheduler is None else scheduler.state_dict(),
        "state": {},
        "groups": [],
    }
    if optimizer is not None:
        own["state"] = {position[id(p)]: kept for p, kept in optimizer.state.items()}
        own["groups"] = [
            {**group, "params": [position[id(p)] for p in group["params"]]}
            for group in optimizer.param_groups
        ]
    own = map_batch(lambda t: t.detach().cpu().clone(), own)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    merged: dict[str, Any] = {"model": {}, "optimizer": {"state": {}, "param_groups": []}}
    groups: list[dict[str, Any]] = merged["optimizer"]["param_groups"]
    for part in every:
        merged["model"].update({n: t for n, t in part["model"].items() if n not in merged["model"]})
        merged["optimizer"]["state"].update(part["state"])
        for at, group in enumerate(part["groups"]):
            if at == len(groups):
                groups.append({**group, "params": []})
            groups[at]["params"] = sorted({*groups[at]["params"], *group["params"]})
        if part["scheduler"] is not None:
            merged["scheduler"] = part["scheduler"]
    return merged


def take(
    state: dict[str, Any],
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scheduler: Any,
) -> None:
    """Load this worker's part of what `gather`, or one device, gave."""
    held = {n for n, t in model.state_dict().items() if not t.is_meta}
    model.load_state_dict({n: t for n, t in state["model"].items() if n in held}, strict=False)
    if optimizer is None:
        return
    position, saved = _positions(model), state["optimizer"]
    group_of = {i: group for group in saved["param_groups"] for i in group["params"]}
    states: dict[int, Any] = {}
    groups: list[dict[str, Any]] = []
    index = 0
    for group in optimizer.param_groups:
        places = [position[id(p)] for p in group["params"]]
        source = group_of.get(places[0], group) if places else group
        hyper = {key: value for key, value in source.items() if key != "params"}
        for place in places:
            if place in saved["state"]:
                states[index + places.index(place)] = saved["state"][place]
        groups.append({**hyper, "params": list(range(index, index + len(places)))})
        index += len(places)
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    if scheduler is not None and state.get("scheduler") is not None:
        scheduler.load_state_dict(state["scheduler"])
