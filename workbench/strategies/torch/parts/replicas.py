"""What strategies that begin from equal copies do before the first step, and with buffers after."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ....engine.torch.group import verify
from ....errors import FitError

BUNDLE_BYTES = 32 << 20


def begin_equal(model: torch.nn.Module, device: torch.device) -> None:
    """Give all workers rank 0's parameters and buffers.

    Args:
        device: Where the process group's messages live; the model may still be elsewhere.

    Raises:
        FitError: The workers hold different models; raised on every worker.
    """
    check_alike(model, device)
    broadcast([*model.parameters(), *model.buffers()], device)


def check_alike(model: torch.nn.Module, device: torch.device | None = None) -> None:
    """Check that names, shapes and dtypes agree, since unequal messages would end the process.

    Args:
        device: As in `begin_equal`; the model's own where not given.

    Raises:
        FitError: They do not; raised on every worker.
    """
    if dist.get_world_size() == 1:
        return
    device = device or next(model.parameters()).device
    tensors = model.state_dict(keep_vars=True)
    words = repr([(k, tuple(t.shape), str(t.dtype), t.requires_grad) for k, t in tensors.items()])
    numbers = sum(parameter.numel() for parameter in model.parameters())
    own = torch.tensor([numbers, zlib.crc32(words.encode())], device=device)
    every = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(every, own)
    if any(not torch.equal(other, own) for other in every):
        raise FitError(
            "The workers hold different models, so they cannot train one together.",
            seen=", ".join(f"rank {r}: {int(e[0])} parameters" for r, e in enumerate(every)),
            next_step="build the same model on every worker, whatever its rank",
            code="WB-FIT-127",
        )


def broadcast_model(model: torch.nn.Module) -> None:
    """Give all workers rank 0's parameters and buffers, of a model that is on its device."""
    broadcast([*model.parameters(), *model.buffers()])


def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give all workers rank 0's buffers, of a model that is on its device."""
    broadcast(model.buffers())


def broadcast(
    tensors: Iterable[torch.Tensor],
    device: torch.device | None = None,
    group: Any = None,
    source: int = 0,
) -> None:
    """Give all workers rank 0's tensors, several in one message: small collectives are slow.

    Args:
        device: As in `begin_equal`; the tensors' own where not given.
        group: Where only some workers hold them.
        source: Rank in the run of the worker whose tensors count.
    """
    with torch.no_grad():
        for bundle in _bundles(tensors):
            flat = torch.cat([tensor.detach().reshape(-1) for tensor in bundle])
            flat = flat if device is None else flat.to(device)
            dist.broadcast(flat, source, group=group)
            parts = torch.split(flat, [tensor.numel() for tensor in bundle])
            for tensor, values in zip(bundle, parts, strict=True):
                tensor.copy_(values.view_as(tensor))


def _bundles(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Yield tensors of one dtype together, about BUNDLE_BYTES at a time."""
    kinds: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        bundle = kinds.setdefault(tensor.dtype, [])
        bundle.append(tensor)
        if sum(t.numel() * t.element_size() for t in bundle) >= BUNDLE_BYTES:
            yield kinds.pop(tensor.dtype)
    yield from kinds.values()


class Message:
    """A replica's parameters and floating-point buffers as flat tensors, one per dtype.

    Attributes:
        flats: The flat tensors, shape (numbers of that dtype,).
    """

    def __init__(self, model: torch.nn.Module, device: torch.device) -> None:
        kinds: dict[torch.dtype, list[torch.Tensor]] = {}
        for tensor in [*model.parameters(), *model.buffers()]:
            if tensor.is_floating_point():
                kinds.setdefault(tensor.dtype, []).append(tensor.detach())
        self._tensors = list(kinds.values())
        self.flats = [
            torch.zeros(sum(t.numel() for t in tensors), dtype=dtype, device=device)
            for dtype, tensors in kinds.items()
        ]
        self._views = [
            [part.view(t.shape) for part, t in zip(_split(flat, tensors), tensors, strict=True)]
            for flat, tensors in zip(self.flats, self._tensors, strict=True)
        ]
        self.size_bytes = sum(flat.numel() * flat.element_size() for flat in self.flats)

    def fill(self) -> None:
        """Copy the replica into the message."""
        for views, tensors in zip(self._views, self._tensors, strict=True):
            torch._foreach_copy_(views, tensors)

    def spread(self) -> None:
        """Copy the message into the replica, once what the others added to it is whole."""
        verify()
        for views, tensors in zip(self._views, self._tensors, strict=True):
            torch._foreach_copy_(tensors, views)

    def copy(self) -> list[torch.Tensor]:
        """Return copies of the flat tensors."""
        return [flat.clone() for flat in self.flats]

    def restore(self, flats: list[torch.Tensor]) -> None:
        """Put copies back, into the message and the replica."""
        for flat, kept in zip(self.flats, flats, strict=True):
            flat.copy_(kept)
        self.spread()


def _split(flat: torch.Tensor, tensors: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    return torch.split(flat, [t.numel() for t in tensors])
