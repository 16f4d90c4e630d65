"""What a replica is made of, saved and loaded: model, optimizer, scheduler, loss scaler.

The same for a `wb.fit` (`trainer.py`) and for a user's own loop (`loop.py`), so that a checkpoint
does not depend on which of them took it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from ...engine.torch_batches import map_batch


class Parts(Protocol):
    """A replica; `scheduler` and `scaler` are None where there is none, or the user keeps them."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: Any
    scaler: Any


def parts_state(parts: Parts) -> dict[str, Any]:
    """Return the state as it lies here: on the device, partitioned if the model is."""
    every = {
        "optimizer": parts.optimizer,
        "scheduler": parts.scheduler,
        "scaler": parts.scaler,
    }
    state = {name: part.state_dict() for name, part in every.items() if part is not None}
    state["model"] = parts.model.state_dict()
    return state


def copied_state(parts: Parts) -> dict[str, Any]:
    """Return copies of the state, on the CPU."""
    return map_batch(lambda t: t.detach().to("cpu", copy=True), parts_state(parts))  # type: ignore[no-any-return]


def load_parts(parts: Parts, state: dict[str, Any]) -> None:
    """Go on from what `parts_state` gave."""
    parts.model.load_state_dict(state["model"])
    parts.optimizer.load_state_dict(state["optimizer"])
    for name, part in (("scheduler", parts.scheduler), ("scaler", parts.scaler)):
        if part is not None and state.get(name) is not None:
            part.load_state_dict(state[name])
