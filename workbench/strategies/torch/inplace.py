"""Gives an object of the user's further methods while the user goes on holding it as it is.

`model = DDP(model)` changes what the user's name stands for: state_dict keys get a prefix, own
attributes are out of reach, and calling the inner module bypasses the all-reduce without a word.
Here the object keeps its identity; only its class is exchanged for a subclass. Undoing that is
exchanging the class back. Copies and pickles (an averaged copy, a checkpoint) are of the original
class.
"""

from __future__ import annotations

import copyreg
from collections.abc import Callable
from typing import Any

import torch


def give_no_sync(model: torch.nn.Module, no_sync: Callable[[], Any]) -> Callable[[], None]:
    """Give a model DistributedDataParallel's `no_sync`, unless it has one; return what undoes it.

    A compiled or patched module, which has a `forward` of its own, is left as it is.
    """
    cls = type(model)
    scripted = isinstance(model, torch.jit.ScriptModule)
    if scripted or hasattr(model, "no_sync") or "forward" in model.__dict__:
        return lambda: None
    model.__class__ = subclass(cls, no_sync=lambda self: no_sync())
    return lambda: setattr(model, "__class__", cls)


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
