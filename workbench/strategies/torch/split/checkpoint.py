"""The state of a pipeline as one: gathered from all stages in the form of one device's.

Optimizer state is kept by the position of its parameter in the whole model, as
`optimizer.state_dict()` does where the optimizer holds all of them, so it can be continued under
another strategy or another number of workers.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ....engine.torch_batches import map_batch


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
