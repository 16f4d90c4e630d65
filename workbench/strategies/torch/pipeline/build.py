"""A worker's share of a model: the rest of it takes no memory.

A model given as a function is built twice. First without memory (device `meta`), to learn its
layers and how to cut it. Then for real, with the same random numbers as everywhere else, but each
layer that belongs to another worker is let go as soon as the next layer begins: at any time there
is the worker's own share and one more layer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils._python_dispatch import TorchDispatchMode

from ....errors import FitError


def let_go(model: torch.nn.Module, keep: Iterable[str]) -> None:
    """Free every parameter and buffer of `model` but those in `keep`; they stay as forms.

    What several layers share stays shared.
    """
    kept = set(keep)
    freed: dict[int, torch.nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name not in kept and not parameter.is_meta:
            if id(parameter) not in freed:
                form = parameter.detach().to("meta")
                freed[id(parameter)] = torch.nn.Parameter(form, parameter.requires_grad)
            place(model, name, freed[id(parameter)])
    for name, buffer in list(model.named_buffers(remove_duplicate=False)):
        if name not in kept and not buffer.is_meta:
            place(model, name, buffer.to("meta"))


def place(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Put a parameter or buffer where `name` says."""
    path, _, leaf = name.rpartition(".")
    module = model.get_submodule(path)
    slots: dict[str, Any] = module._parameters if leaf in module._parameters else module._buffers
    slots[leaf] = tensor


def tensors_of(model: torch.nn.Module, names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Return parameters and buffers by name."""
    wanted = set(names)
    found: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    found |= dict(model.named_buffers(remove_duplicate=False))
    return {name: tensor for name, tensor in found.items() if name in wanted}


def fill(
    model: torch.nn.Module, make: Callable[[], Any], keep: Iterable[str], unit_of: Mapping[str, int]
) -> None:
    """Give the memoryless `model` its share of real tensors, built by `make`.

    Args:
        model: What `make` gave on the `meta` device.
        keep: Names of the share.
        unit_of: The layer that each parameter and buffer belongs to.

    Raises:
        FitError: The function gives another model each time it is called.
    """
    # Registrations are counted, since a tensor has no name while its module is being built.
    order = _Registrations(None)
    state = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]), order, torch.device("meta"):
        shadow = make()
    random.setstate(state[0])
    np.random.set_state(state[1])
    names = _names(shadow, order.seen)
    kept = set(keep)
    drawn = _DrawnAnyway()  # type: ignore[no-untyped-call]
    with _Registrations(lambda i: _fate(names, i, kept, unit_of)) as building, drawn:
        built = make()
    final = tensors_of(built, kept)
    if len(building.seen) != len(names) or final.keys() != kept:
        raise FitError(
            "The function does not return the same model each time it is called.",
            seen=f"{len(names)} tensors, then {len(building.seen)}",
            next_step="build the model from nothing but constants inside the function",
            code="WB-FIT-133",
        )
    for name, tensor in final.items():
        place(model, name, tensor)


def _names(model: torch.nn.Module, seen: list[torch.Tensor | None]) -> list[str | None]:
    named: dict[int, str] = {}
    for name, tensor in (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ):
        named.setdefault(id(tensor), name)
    return [named.get(id(tensor)) for tensor in seen]


def _fate(
    names: list[str | None], index: int, kept: set[str], unit_of: Mapping[str, int]
) -> tuple[int | None, bool]:
    """Return the layer of the tensor registered as number `index`, and whether it is kept."""
    name = names[index] if index < len(names) else None
    return (None, True) if name is None else (unit_of.get(name), name in kept)


class _DrawnAnyway(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Draws the random numbers of tensors that were let go, so that all others get their own.

    A model that is initialised when all of it is built (`self.apply(init)`) fills freed tensors
    too; without memory they would take no numbers.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            found = [value for value in args if isinstance(value, torch.Tensor)]
            if any(value.is_meta for value in found):
                func(*(_with_memory(value) for value in args), **kwargs)
        return func(*args, **kwargs)


def _with_memory(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.is_meta:
        return torch.zeros_like(value, device="cpu")
    return value


class _Registrations:
    """Sees each parameter and buffer as modules take it in; lets go of what is not kept."""

    def __init__(self, fate: Callable[[int], tuple[int | None, bool]] | None) -> None:
        self.seen: list[torch.Tensor | None] = []
        self._fate = fate
        self._waiting: list[tuple[int | None, dict[str, Any], str]] = []
        self._handles: list[Any] = []

    def __enter__(self) -> _Registrations:
        self._handles = [
            register_module_parameter_registration_hook(
                lambda module, name, value: self._take(module._parameters, name, value)
            ),
            register_module_buffer_registration_hook(
                lambda module, name, value: self._take(module._buffers, name, value)
            ),
        ]
        return self

    def __exit__(self, *exception: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._free(None)

    def _take(self, slots: dict[str, Any], name: str, value: torch.Tensor | None) -> None:
        if value is None:
            return
        index = len(self.seen)
        # Identity matters in the first pass only; holding the tensors would keep their memory.
        self.seen.append(value if self._fate is None else None)
        if self._fate is None:
            return
        unit, kept = self._fate(index)
        if unit is not None:
            self._free(unit)
        if not kept:
            self._waiting.append((unit, slots, name))

    def _free(self, begun: int | None) -> None:
        """Let go of the tensors of all layers but `begun`, which is still being built."""
        still = []
        for unit, slots, name in self._waiting:
            if unit == begun and begun is not None:
                still.append((unit, slots, name))
                continue
            value = slots.get(name)
            if isinstance(value, torch.nn.Parameter):
                slots[name] = torch.nn.Parameter(value.detach().to("meta"), value.requires_grad)
            elif value is not None:
                slots[name] = value.to("meta")
        self._waiting = still


def move(model: torch.nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Bring parameters and buffers to a device; parameters stay the same objects."""
    for name, tensor in tensors_of(model, names).items():
        if isinstance(tensor, torch.nn.Parameter):
            tensor.data = tensor.data.to(device)
        else:
            place(model, name, tensor.to(device))
