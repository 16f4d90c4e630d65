"""Which server holds which parameters, and where in its memory each of them lies.

Whole tensors are dealt out, the largest first, each to the server that holds the fewest bytes yet
(longest processing time first: at most 4/3 of the best division). Tensors are not cut, so that
optimizers whose step looks at a whole tensor do on a server what they do on one device.

    server 0   | float64 ... | float32 ........ | bfloat16 .. |      one flat buffer each way
    server 1   | float64 . | float32 ............ |

Within a server the types with the widest elements come first, so every tensor is aligned.

A worker's links to all servers are used as one: each server holds a shard of the parameters.

    push   every server gets its shard's part of the gradients
    take   every server sends its shard of the parameters, one server after the other

Where several servers must act as one, they are told so here: gradients are clipped by the norm of
the whole, pushes are counted in one order by all servers, parameters are read in one version.

Parameters and gradients travel from and to where they lie, without a copy in between, where they
are contiguous in the CPU's memory; those on a device have a copy on the host, to and from which
they pass through two pinned chunks.

An optimizer's class and hyper-parameters travel to a server too.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....engine.torch import accelerator as accelerators
from ....engine.torch.accelerator import Staged
from ....errors import FitError
from ....shared import events

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.transport import Link, Message


@dataclass(frozen=True)
class Piece:
    """One tensor in a server's memory.

    Attributes:
        index: Which of the trained parameters it is.
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
        """Rebuild what `to_wire` gave."""
        return Shard(tuple(Piece(i, tuple(s), str(d), at) for i, s, d, at in data))

    @property
    def digest(self) -> str:
        """A short text that differs when the layout does."""
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
    """Deal the parameters out to servers by bytes.

    Raises:
        FitError: There are fewer parameters than servers.
    """
    if servers > len(parameters):
        raise FitError(
            "There are more servers than parameter tensors to hold.",
            seen=f"{servers} servers, {len(parameters)} tensors",
            allowed=f"1 to {len(parameters)} servers for this model",
            next_step=f"use -o servers={len(parameters)} or fewer",
            code="WB-FIT-132",
        )
    sizes = [p.numel() * p.element_size() for p in parameters]
    held: list[list[int]] = [[] for _ in range(servers)]
    loads = [0] * servers
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        # Among equally loaded ones the emptiest: tensors of no bytes count too.
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


class ShardLinks:
    """The parameters of one session on the servers.

    Args:
        parameters: What is trained; dealt out to the servers by bytes.
        clips: Whether the servers clip, over the sum of all workers' gradients.
        snapshot: Whether the parameters of all servers are to be of one version.

    Raises:
        FitError: There are fewer parameters than servers.
    """

    def __init__(
        self,
        context: RunContext,
        parameters: Sequence[torch.Tensor],
        *,
        clips: bool,
        snapshot: bool,
    ) -> None:
        self._context, self._parameters = context, parameters
        self._links: list[Link] = context.links
        self._rank0 = context.spec.rank == 0
        self._clipped_together = clips and len(self._links) > 1
        self._sequenced = snapshot and len(self._links) > 1
        self._shards = divide(parameters, len(self._links))
        self._staging = Staging(parameters)

    @property
    def size_bytes(self) -> int:
        """Bytes of all parameters on the servers."""
        return sum(shard.size_bytes for shard in self._shards)

    def open(self, about: Mapping[str, Any]) -> None:
        """Tell every server which tensors it holds and what it does with them."""
        for link, shard in self._each():
            link.begin(shard.size_bytes, {**about, "shard": shard.to_wire()})
        for link in self._links:
            link.opened()

    def begin(self) -> None:
        """Rank 0 sends the values to begin with; all workers get them back."""
        if self._rank0:
            values = self._staging.gather([p.detach() for p in self._parameters])
            for link, shard in self._each():
                link.push("init", {}, _parts(values, shard))
        self._take()

    def _each(self) -> Iterator[tuple[Link, Shard]]:
        return zip(self._links, self._shards, strict=True)

    # -- a step ------------------------------------------------------------------------------------

    def exchange(
        self, gradients: Sequence[torch.Tensor | None], meta: Mapping[str, Any], *, wanted: bool
    ) -> list[Message]:
        """Push the gradients, get the parameters if they are wanted; return the answers."""
        held = self._staging.gather(gradients)
        faults, size_bytes = self._context.faults, self.size_bytes
        faults.travel(size_bytes)
        push = self._push_in_turn if self._sequenced else self._push
        answers = push(held, meta, wanted)
        if wanted:
            faults.travel(size_bytes)
        return answers

    def _push(
        self, gradients: Sequence[Bytes], meta: Mapping[str, Any], wanted: bool
    ) -> list[Message]:
        for link, shard in self._each():
            link.push("push", meta, _parts(gradients, shard))
        if self._clipped_together and self._rank0:
            self._clip_together()
        return self._take() if wanted else [link.receive() for link in self._links]

    def _clip_together(self) -> None:
        """Each server knows its part of the norm; rank 0 adds them up, as clip_grad_norm_ does."""
        told = [link.receive().meta for link in self._links]
        norm = math.sqrt(sum(meta["norm"] ** 2 for meta in told))
        factor = min(1.0, told[0]["clip_norm"] / (norm + 1e-6))
        for link in self._links:
            link.send("scale", {"factor": factor})

    def _push_in_turn(
        self, gradients: Sequence[Bytes], meta: Mapping[str, Any], wanted: bool
    ) -> list[Message]:
        """Push so that all servers count the pushes in one order: that of server 0's tickets."""
        first, others = self._links[0], self._links[1:]
        first.push("push", meta, _parts(gradients, self._shards[0]))
        ticket = {**meta, "ticket": first.receive().meta["ticket"]}
        for link, shard in zip(others, self._shards[1:], strict=True):
            link.push("push", ticket, _parts(gradients, shard))
        for link in others:
            link.receive()
        return [self._take_one_version() if wanted else first.receive()]

    def pull(self) -> None:
        """Get the parameters as they are now."""
        if self._sequenced:
            self._links[0].send("pull")
            self._take_one_version()
            return
        for link in self._links:
            link.send("pull")
        self._take()

    def end(self) -> None:
        """Push no more; wait until nobody does, and get the final parameters."""
        for link in self._links:
            link.send("end")
        self._take()

    def _take(self) -> list[Message]:
        """Read the parameters that every server sends.

        Each board is let go of before the next server is waited for, and all workers go through the
        servers in one order: so no two of them can each hold what the other waits for.
        """
        landing = self._staging.landing()
        answers: list[Message] = []
        for link, shard in self._each():
            answer = link.receive()
            link.read(answer, _parts(landing, shard))
            link.release(answer)
            self._hear(answer, len(answers))
            answers.append(answer)
        self._staging.scatter(self._parameters)
        return answers

    def _take_one_version(self) -> Message:
        """Read the parameters of one version: that in which server 0 stays until released.

        It gives no further tickets meanwhile, so the others reach that version and stop there.
        """
        landing = self._staging.landing()
        first = self._links[0].receive()
        self._links[0].read(first, _parts(landing, self._shards[0]))
        for link in self._links[1:]:
            link.send("pull", {"at": first.meta["version"]})
        for at, shard in enumerate(self._shards[1:], start=1):
            link = self._links[at]
            answer = link.receive()
            link.read(answer, _parts(landing, shard))
            link.release(answer)
            self._hear(answer, at)
        self._links[0].release(first)
        self._hear(first, 0)
        self._staging.scatter(self._parameters)
        return first

    def _hear(self, answer: Message, server: int) -> None:
        """Hand on what a server tells once about its memory; only rank 0 is told."""
        if "holds" in answer.meta:
            self._context.emit(events.ServerHolds(rank=0, server=server, **answer.meta["holds"]))

    # -- saving ------------------------------------------------------------------------------------

    def states(self) -> Iterator[bytes]:
        """Yield what each server's optimizer keeps, as the server wrote it."""
        for link in self._links:
            link.send("state")
            yield link.read_bytes(link.receive())

    def load(self, written: Callable[[Shard], bytes]) -> None:
        """Rank 0 gives each server what its optimizer is to keep."""
        if self._rank0:
            for link, shard in self._each():
                link.send_bytes("load", written(shard))

    def close(self) -> None:
        """End the session; the links stay."""
        for link in self._links:
            link.end_session()


def _parts(tensors: Sequence[Bytes], shard: Shard) -> list[Bytes]:
    return [tensors[piece.index] for piece in shard.pieces]


Bytes = NDArray[np.uint8]


class Staging:
    """The bytes of each parameter: its own memory, or a copy on the host for a device's."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self._parameters = parameters
        device = next((p.device for p in parameters if p.device.type != "cpu"), None)
        self._staged = None if device is None else Staged(accelerators.of(device))
        self._own: list[torch.Tensor | None] = []
        for parameter in parameters:
            direct = parameter.device.type == "cpu" and parameter.is_contiguous()
            self._own.append(None if direct else _host_copy(parameter))
        self._zeros: dict[int, Bytes] = {}

    def landing(self) -> list[Bytes]:
        """Return where each parameter arrives: its own memory, or a copy on the host."""
        return [
            as_bytes(parameter.detach() if own is None else own)
            for parameter, own in zip(self._parameters, self._own, strict=True)
        ]

    def scatter(self, parameters: Sequence[torch.Tensor]) -> None:
        """Bring what arrived in host copies to where the parameters are."""
        away = []
        with torch.no_grad():
            for parameter, own in zip(parameters, self._own, strict=True):
                if own is not None and self._is_staged(parameter):
                    away.append((own, parameter))
                elif own is not None:
                    parameter.copy_(own)
            if self._staged is not None:
                self._staged.to_device(away)

    def gather(self, tensors: Sequence[torch.Tensor | None]) -> list[Bytes]:
        """Return the bytes of tensors that lie like the parameters; zeros for those missing."""
        away = []
        for tensor, own in zip(tensors, self._own, strict=True):
            if own is not None and tensor is not None:
                if self._is_staged(tensor):
                    away.append((tensor, own))
                else:
                    own.copy_(tensor)
        if self._staged is not None:
            self._staged.to_host(away)
        return [self._bytes_of(i, tensor) for i, tensor in enumerate(tensors)]

    def _bytes_of(self, index: int, tensor: torch.Tensor | None) -> Bytes:
        own, parameter = self._own[index], self._parameters[index]
        if tensor is None:
            if index not in self._zeros:
                size = parameter.numel() * parameter.element_size()
                self._zeros[index] = np.zeros(size, np.uint8)
            return self._zeros[index]
        return as_bytes(own if own is not None else tensor.contiguous())

    def _is_staged(self, tensor: torch.Tensor) -> bool:
        return self._staged is not None and tensor.device.type != "cpu" and tensor.is_contiguous()


def _host_copy(parameter: torch.Tensor) -> torch.Tensor:
    return torch.empty(parameter.shape, dtype=parameter.dtype)


def importable(cls: type) -> str:
    """Return `module:Class`, by which the server finds the class.

    Raises:
        FitError: It is defined in the cell, which servers do not run.
    """
    module: Any = sys.modules.get(cls.__module__)
    found = module
    for part in cls.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not cls or cls.__module__ == "__main__":
        raise FitError(
            "The optimizer's class is defined in the cell, which the server does not run.",
            seen=cls.__qualname__,
            next_step="put the class into a module beside the notebook and import it",
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
        FitError: One of them is no number, text or tuple of such.
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
        code="WB-FIT-116",
    )


def restored(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return hyper-parameters as optimizers hold them; JSON turned tuples into lists."""
    found = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    if found.get("capturable"):
        found["capturable"] = False  # CUDA graphs are the worker's matter
    return found
