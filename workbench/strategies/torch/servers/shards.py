"""Decides which server holds which parameters, and where each is in the server's memory.

Whole tensors are assigned, the largest first, each to the server with the fewest bytes so far
(longest processing time first: at most 4/3 of the best division). Tensors are not cut, because some
optimizers read a whole tensor in a step. So a step is the same on a server as on one device.

    server 0   | float64 ... | float32 ........ | bfloat16 .. |      one flat buffer each way
    server 1   | float64 . | float32 ............ |

Within a server the types with the widest elements come first, so every tensor is aligned.

An optimizer's class and hyper-parameters are sent to a server too.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import FitError


@dataclass(frozen=True)
class Piece:
    """One tensor in a server's memory.

    Attributes:
        index: Its index among the trained parameters.
        shape, dtype: As in the model; dtype as `float32`.
        offset: Byte at which it begins.
    """

    index: int
    shape: tuple[int, ...]
    dtype: str
    offset: int

    @property
    def elements(self) -> int:
        """Numbers in the tensor."""
        count = 1
        for length in self.shape:
            count *= length
        return count

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor."""
        return self.elements * self.torch_dtype.itemsize

    @property
    def torch_dtype(self) -> torch.dtype:
        """The type of its elements."""
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


@dataclass(frozen=True)
class Shard:
    """What one server holds."""

    pieces: tuple[Piece, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(piece.size_bytes for piece in self.pieces)

    def to_wire(self) -> list[list[Any]]:
        """Return JSON-ready data."""
        return [[p.index, list(p.shape), p.dtype, p.offset] for p in self.pieces]

    @staticmethod
    def from_wire(data: Sequence[Sequence[Any]]) -> Shard:
        """Rebuild what `to_wire` returned."""
        return Shard(tuple(Piece(i, tuple(s), str(d), at) for i, s, d, at in data))

    @property
    def digest(self) -> str:
        """A short text that differs if the layout differs."""
        return hashlib.sha256(json.dumps(self.to_wire()).encode()).hexdigest()[:16]

    def views(self, memory: NDArray[np.uint8]) -> list[torch.Tensor]:
        """Return each tensor as a view on a flat buffer of `size_bytes`."""
        flat = torch.from_numpy(memory)
        return [
            _typed(flat[p.offset : p.offset + p.size_bytes], p.torch_dtype).view(p.shape)
            for p in self.pieces
        ]

    def flats(self, memory: NDArray[np.uint8]) -> list[torch.Tensor]:
        """Return the buffer as one flat tensor per dtype; they cover all pieces."""
        flat = torch.from_numpy(memory)
        return [_typed(flat[start:stop], dtype) for dtype, start, stop in self._runs()]

    def _runs(self) -> Iterator[tuple[torch.dtype, int, int]]:
        start = 0
        for at, piece in enumerate(self.pieces):
            end = piece.offset + piece.size_bytes
            last = at + 1 == len(self.pieces)
            if last or self.pieces[at + 1].dtype != piece.dtype:
                yield piece.torch_dtype, start, end
                start = end


def _typed(flat: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return flat.view(dtype) if flat.numel() else torch.empty(0, dtype=dtype)


def divide(parameters: Sequence[torch.Tensor], servers: int) -> list[Shard]:
    """Divide the parameters over servers by bytes.

    Raises:
        FitError: There are fewer parameters than servers.
    """
    if servers > (most := len(parameters)):
        s = "s" * (most != 1)
        raise FitError(
            "There are more servers than parameter tensors, but each server needs at least one "
            "tensor.",
            seen=f"{servers} servers, {most} parameter tensor{s}",
            allowed=f"1 to {most} servers for this model" if s else "1 server for this model",
            next_step=f"use -o servers={most}" + " or fewer" * (most > 1),
            code="WB-FIT-132",
        )
    sizes = [p.numel() * p.element_size() for p in parameters]
    held: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Among servers with equal bytes, the one with the fewest tensors: empty tensors count too.
        server = min(range(servers), key=lambda s: (loads[s], len(held[s])))
        held[server].append(index)
        loads[server] += sizes[index]
    return [_lay_out(parameters, sorted(indices)) for indices in held]


def _lay_out(parameters: Sequence[torch.Tensor], indices: list[int]) -> Shard:
    pieces, offset = [], 0
    kinds = [(-parameters[i].element_size(), str(parameters[i].dtype), i) for i in indices]
    for _, dtype, index in sorted(kinds):
        tensor = parameters[index]
        piece = Piece(index, tuple(tensor.shape), dtype.removeprefix("torch."), offset)
        pieces.append(piece)
        offset += piece.size_bytes
    return Shard(tuple(pieces))


def as_bytes(tensor: torch.Tensor) -> NDArray[np.uint8]:
    """Return a contiguous CPU tensor's own memory as (bytes,) uint8."""
    flat = tensor.detach().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def importable(cls: type) -> str:
    """Return `module:Class`, by which the server finds the class.

    Raises:
        FitError: The class is defined in the cell, which servers do not run.
    """
    module: Any = sys.modules.get(cls.__module__)
    found = module
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls or cls.__module__ == "__main__":
        raise FitError(
            "The optimizer's class is defined in the cell, but the servers do not run the cell.",
            seen=cls.__qualname__,
            next_step="put the class into a .py file next to the notebook, and import it in the "
            "cell",
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
        FitError: One of them is not a number, text or tuple of these.
    """
    return {name: _plain_value(name, value) for name, value in values.items()}


def _plain_value(name: str, value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.tolist() if not value.dim() else value.reshape(()).tolist()
    if isinstance(value, (tuple, list)):
        return [_plain_value(name, part) for part in value]
    raise FitError(
        f"The optimizer's setting {name!r} cannot be sent to a server.",
        seen=type(value).__name__,
        allowed="numbers, text, booleans, None, and tuples of them",
        next_step="give this setting an allowed value, or use the strategy `mirrored`",
        code="WB-FIT-116",
    )


def restored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as optimizers hold them, because JSON turned tuples into lists."""
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if found.get("capturable"):
        found["capturable"] = False  # only the worker needs CUDA graphs
    return found


def build_optimizer(
    about: Mapping[str, Any], shard: Shard, parameters: Sequence[torch.nn.Parameter]
) -> torch.optim.Optimizer:
    """Make an optimizer of the user's class over this server's parameters.

    It is made as in unpickling, from its class, defaults and groups. Constructors differ, and would
    need arguments that are not known here.
    """
    module, _, name = str(about["optimizer"]).partition(":")
    cls: Any = importlib.import_module(module)
    for part in name.split("."):
        cls = getattr(cls, part)
    mine = {piece.index: p for piece, p in zip(shard.pieces, parameters, strict=True)}
    groups = [
        {**restored(values), "params": [mine[i] for i in indices if i in mine]}
        for values, indices in zip(about["hyper"], about["groups"], strict=True)
    ]
    optimizer: torch.optim.Optimizer = cls.__new__(cls)
    torch.optim.Optimizer.__init__(optimizer, groups, restored(about["defaults"]))
    optimizer.__setstate__({})
    return optimizer
