"""Sends a module's forward through a wrapper while the user goes on holding the plain module.

`model = DDP(model)` changes what the user's name stands for: state_dict keys get a prefix, own
attributes are out of reach, and calling the inner module bypasses the all-reduce without a word.
Here the module keeps its identity; only its class is exchanged for a subclass whose `forward` goes
through the wrapper. Undoing that is exchanging the class back. Copies and pickles of the module
(an averaged copy, a checkpoint) are of the original class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch


class Original(torch.nn.Module):
    """What the wrapper wraps: the same parameters, and the module's own forward."""

    def __init__(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.module = module
        self._own_forward = forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's own forward."""
        return self._own_forward(*args, **kwargs)


class InPlace:
    """A module whose training forward goes through what `wrap` returns.

    Without gradients (`torch.no_grad`) the wrapper is passed by: nothing is communicated, so a
    worker may evaluate on its own.
    """

    def __init__(self, model: torch.nn.Module, wrap: Callable[[torch.nn.Module], Any]) -> None:
        self._model, self._class = model, type(model)
        self._own = model.__dict__.get("forward")  # compiled and patched modules have one
        own = self._own or self._class.forward.__get__(model)
        self.ddp = wrap(Original(model, own))
        ddp = self.ddp

        def forward(*args: Any, **kwargs: Any) -> Any:
            if torch.is_grad_enabled():
                return ddp(*args, **kwargs)
            return own(*args, **kwargs)

        if self._own is not None:
            model.__dict__["forward"] = forward
        else:
            model.__class__ = subclass(self._class, forward=lambda self, *a, **k: forward(*a, **k))

    def undo(self) -> None:
        """Give the module its class and forward back."""
        if self._own is not None:
            self._model.__dict__["forward"] = self._own
        else:
            self._model.__class__ = self._class
        self.ddp = None


def subclass(cls: type, **methods: Any) -> type:
    """Return a subclass that looks like `cls` and whose copies and pickles are of `cls`."""

    def reduce(self: Any, protocol: Any) -> Any:
        parts = list(super(made, self).__reduce_ex__(protocol))
        if parts[0] is copyreg.__newobj__:  # type: ignore[attr-defined]
            # __newobj__ insists on the object's present class; the older function does not.
            parts[:2] = copyreg._reconstructor, (cls, object, None)  # type: ignore[attr-defined]
        return tuple(parts)

    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    made: Any = type(cls)(cls.__name__, (cls,), {**names, **methods, "__reduce_ex__": reduce})
    return made  # type: ignore[no-any-return]


def become(thing: Any, cls: type) -> None:
    """Exchange an object's class, also where that has a `__class__` of its own (accelerate)."""
    vars(object)["__class__"].__set__(thing, cls)
