"""Messages for embedding tables: only rows with a gradient, or rows that have changed.

Source: Li et al., Scaling Distributed Machine Learning with the Parameter Server, OSDI 2014,
section 3.1 (a worker pushes and pulls only the parameters that occur in its data).

    push   | whole tensors ........ | table 3: which rows, their gradients | table 5: ... |
    answer | whole tensors ........ | table 3: which rows, their values    | table 5: ... |

With each answer, a worker receives all rows that have changed since the previous answer to this
worker. So all rows in the worker's copy of a table belong to the same version, as if the server had
sent the whole table. But the size of a message does not depend on the size of the table. This
method needs an optimizer that changes only the rows that have a gradient. With another optimizer
the run ends with an error (`check_row_wise`).

The number of rows in a message differs from step to step. So the size of these messages is not
fixed; it only has an upper limit. Workbench uses shared memory only for messages of a fixed size.
So these messages always use a socket. Messages that contain only whole tensors can use shared
memory.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import FitError
from .shards import Piece, Shard, as_bytes

Bytes = NDArray[np.uint8]
Rows = tuple[torch.Tensor, torch.Tensor]
"""The indices of rows, (n,) int64, and their values, (n, ...)."""

_WIDEST = 8
"""Tensors begin at multiples of this, because the widest elements need it."""

ROW_WISE = (torch.optim.SGD, torch.optim.Adagrad, torch.optim.SparseAdam)


def tables_of(model: torch.nn.Module) -> set[torch.nn.Parameter]:
    """Return the parameters of layers that were made with sparse=True."""
    return {
        parameter
        for module in model.modules()
        if getattr(module, "sparse", False) is True
        for parameter in module.parameters(recurse=False)
        if parameter.requires_grad and parameter.dim()
    }


def check_row_wise(optimizer: torch.optim.Optimizer, tables: Collection[torch.Tensor]) -> None:
    """Raise FitError if a step would change rows of a table that its gradient does not have."""
    for group in optimizer.param_groups:
        if not any(parameter in tables for parameter in group["params"]):
            continue
        kept = {name: group[name] for name in ("momentum", "weight_decay") if group.get(name)}
        if type(optimizer) in ROW_WISE and not kept:
            continue
        settings = ", ".join(f"{name}={value}" for name, value in kept.items())
        raise FitError(
            "With sparse=True, the workers send only those rows of an embedding that have a "
            "gradient. But this optimizer changes the other rows too.",
            seen=f"{type(optimizer).__name__}({settings})",
            allowed="SGD, Adagrad and SparseAdam, without momentum and weight_decay",
            next_step="use one of these optimizers, or make the embedding with sparse=False",
            code="WB-FIT-185",
        )


def rows_of(gradient: torch.Tensor | None, table: torch.Tensor) -> Rows:
    """Return the rows of a gradient, each once, in the CPU's memory.

    A dense gradient has all rows.
    """
    if gradient is None:
        return torch.empty(0, dtype=torch.int64), table.detach()[:0].cpu()
    if not gradient.is_sparse:
        return torch.arange(len(gradient)), gradient.detach().cpu().contiguous()
    gradient = gradient.detach().coalesce().cpu()
    return gradient.indices()[0].contiguous(), gradient.values().contiguous()


def summed(parts: Sequence[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Return the sum of sparse gradients, each row once, added up in their order."""
    indices = torch.cat([part._indices() for part in parts], dim=1)
    values = torch.cat([part._values() for part in parts])
    return sparse_of((indices[0], values), like)


def sparse_of(rows: Rows, like: torch.Tensor) -> torch.Tensor:
    """Return rows as a sparse gradient of a table, each row once."""
    indices, values = rows
    made = torch.sparse_coo_tensor(indices[None], values, like.shape, check_invariants=True)
    return made.coalesce()


class Parted:
    """A server's tensors by how they are sent: whole, or as rows.

    Args:
        tables: Indices of the trained parameters that are sent as rows.

    Attributes:
        tables: The tables that this server holds.
        whole: Its other tensors, in sequence.
    """

    def __init__(self, shard: Shard, tables: Collection[int]) -> None:
        self.tables = tuple(piece for piece in shard.pieces if piece.index in tables)
        pieces, offset = [], 0
        for piece in shard.pieces:
            if piece.index not in tables:
                pieces.append(replace(piece, offset=offset))
                offset += piece.size_bytes
        self.whole = Shard(tuple(pieces))

    @property
    def most_bytes(self) -> int:
        """Bytes of a message with every row of every table."""
        return self._size([piece.shape[0] for piece in self.tables])

    def _size(self, counts: Sequence[int]) -> int:
        return _up(self.whole.size_bytes) + sum(
            _WIDEST * count + _up(count * _row_bytes(piece))
            for piece, count in zip(self.tables, counts, strict=True)
        )

    def parts(self, whole: Sequence[Bytes], rows: Sequence[Rows]) -> list[Bytes]:
        """Return the buffers of a message in its order, for sending or receiving.

        Args:
            whole: The tensors that are sent whole.
            rows: The rows of each table.
        """
        parts = [*whole, _gap(self.whole.size_bytes)]
        for indices, values in rows:
            content = as_bytes(values)
            parts += [as_bytes(indices), content, _gap(content.size)]
        return parts

    def room(self, counts: Sequence[int]) -> list[Rows]:
        """Return memory for this many rows of each table."""
        return [
            (
                torch.empty(count, dtype=torch.int64),
                torch.empty((count, *piece.shape[1:]), dtype=piece.torch_dtype),
            )
            for piece, count in zip(self.tables, counts, strict=True)
        ]

    def read(self, memory: Bytes, counts: Sequence[int]) -> list[Rows]:
        """Return the rows in a message, as views on it.

        Raises:
            ValueError: There is no room for so many rows.
        """
        known = len(counts) == len(self.tables) and min(counts, default=0) >= 0
        if not known or self._size(counts) > memory.size:
            raise ValueError(f"{counts} rows do not fit into {memory.size} bytes")
        found, at, flat = [], _up(self.whole.size_bytes), torch.from_numpy(memory)
        for piece, count in zip(self.tables, counts, strict=True):
            size, shape = count * _row_bytes(piece), (count, *piece.shape[1:])
            indices = flat[at : at + _WIDEST * count].view(torch.int64)
            at += _WIDEST * count
            values = flat[at : at + size].view(piece.torch_dtype).view(shape)
            at += _up(size)
            found.append((indices, values))
        return found


class Changes:
    """Which rows of a server's tables have changed since each worker last received them."""

    def __init__(self, parted: Parted, ranks: Collection[int]) -> None:
        self._tables = parted.tables
        self._of: dict[int, list[list[torch.Tensor]]] = {rank: [] for rank in ranks}
        self.everything()

    def everything(self) -> None:
        """Mark all rows as new."""
        every = [torch.arange(piece.shape[0]) for piece in self._tables]
        for rank in self._of:
            self._of[rank] = [[indices] for indices in every]

    def note(self, gradients: Mapping[int, torch.Tensor | None]) -> None:
        """Note what a step along these gradients has changed.

        Args:
            gradients: By the parameters' indices; None: unchanged.
        """
        for place, piece in enumerate(self._tables):
            gradient = gradients[piece.index]
            if gradient is not None:
                indices = gradient._indices()[0].clone()  # the next push overwrites this memory
                for pending in self._of.values():
                    pending[place].append(indices)
                    if sum(map(len, pending[place])) > 2 * piece.shape[0]:
                        pending[place] = [torch.unique(torch.cat(pending[place]))]

    def take(self, rank: int, values: Sequence[torch.Tensor]) -> list[Rows]:
        """Return the rows that a worker does not have yet, and mark them as sent.

        Args:
            values: Each table in its present state.
        """
        found = []
        for pending, table in zip(self._of[rank], values, strict=True):
            indices = (
                torch.unique(torch.cat(pending)) if pending else torch.empty(0, dtype=torch.int64)
            )
            found.append((indices, table.detach()[indices]))
            pending.clear()
        return found


def counts_of(rows: Sequence[Rows]) -> list[int]:
    """Return how many rows there are of each table."""
    return [len(indices) for indices, _ in rows]


def put(table: torch.Tensor, rows: Rows) -> None:
    """Write rows into a worker's copy."""
    indices, values = (part.to(table.device) for part in rows)
    table.detach().index_copy_(0, indices, values)


def norm_of(gradients: Sequence[torch.Tensor]) -> float:
    """Return the norm of gradients; some of them are sparse."""
    dense: list[Any] = [g.coalesce().values() if g.is_sparse else g for g in gradients]
    return float(torch.nn.utils.get_total_norm(dense))


def _row_bytes(piece: Piece) -> int:
    return math.prod(piece.shape[1:]) * piece.torch_dtype.itemsize


def _up(size_bytes: int) -> int:
    return -(-size_bytes // _WIDEST) * _WIDEST


def _gap(size_bytes: int) -> Bytes:
    return np.zeros(_up(size_bytes) - size_bytes, np.uint8)
