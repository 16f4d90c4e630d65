"""Whether all workers train the same parameters, asked before what one changed meets the others.

A worker that alone freezes a layer cannot meet the others in a collective: they know of no change,
and wait for it in the reduction. So each worker writes where the others of its host can read it
without asking:

    worker r, before each backward:   how many it has begun
              where its set changes:   a digest of its requires_grad, since which backward it is so,
                                       and the digest before

Who has changed something looks there until all others have begun the same backward (one may be at
the next change by then, no further). Writing costs less than a microsecond; nobody looks while
nothing changes. Workers on several hosts meet at the
store instead: who waits there for a worker that changed nothing waits until the run is ended.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from ... import scratch
from ...engine.marks import MESSAGE, waits_in
from ...errors import FitError

_BEGUN, _SET = struct.Struct("=q"), struct.Struct("=qqq")
_SLOT_BYTES = _BEGUN.size + _SET.size
_LOOK_S = 0.0005


class TrainedSets:
    """Of one model, which parameters each worker trains. Made by all workers together.

    Args:
        hosts: Of each rank.
        names: Of the model's parameters.
        flags: Which of them require gradients.
    """

    def __init__(self, hosts: Sequence[str], names: Sequence[str], flags: Sequence[bool]) -> None:
        self._rank, self._workers = dist.get_rank(), dist.get_world_size()
        self._names, self._flags = list(names), list(flags)
        self._begun, self._digest = 0, _digest(names, flags)
        self._board: mmap.mmap | None = None
        self._changes = 0
        if self._workers > 1 and len(set(hosts)) <= 1:
            self._board = _shared(self._workers * _SLOT_BYTES, self._rank)
            self._tell(self._digest)

    def begin(self) -> None:
        """Say that a backward begins."""
        self._begun += 1
        if self._board is not None:
            _BEGUN.pack_into(self._board, self._rank * _SLOT_BYTES, self._begun)

    def _tell(self, before: int) -> None:
        if self._board is not None:
            at = self._rank * _SLOT_BYTES + _BEGUN.size
            _SET.pack_into(self._board, at, self._digest, self._begun + 1, before)

    def change(self, names: Sequence[str], flags: Sequence[bool]) -> None:
        """Begin a backward with another set; waits until all others have begun theirs.

        Raises:
            FitError: Some of them train another set.
        """
        if self._workers == 1:
            return
        before = {n for n, f in zip(self._names, self._flags, strict=True) if f}
        now = {n for n, f in zip(names, flags, strict=True) if f}
        self._names, self._flags = list(names), list(flags)
        digest_before, self._digest = self._digest, _digest(names, flags)
        self._tell(digest_before)
        self.begin()
        every = self._at_the_store() if self._board is None else self._on_the_board(self._board)
        others = [rank for rank, digest in enumerate(every) if digest != self._digest]
        if others:
            raise self._unequal(sorted(before - now), sorted(now - before), others)

    @waits_in(MESSAGE)
    def _on_the_board(self, board: mmap.mmap) -> list[int]:
        found: dict[int, int] = {}
        while len(found) < self._workers:
            for rank in range(self._workers):
                at = rank * _SLOT_BYTES
                if _BEGUN.unpack_from(board, at)[0] >= self._begun:
                    digest, since, earlier = _SET.unpack_from(board, at + _BEGUN.size)
                    found[rank] = digest = digest if since <= self._begun else earlier
                    if digest != self._digest:  # who is late may wait for this worker
                        return [found.get(r, self._digest) for r in range(self._workers)]
            if len(found) < self._workers:
                time.sleep(_LOOK_S)
        return [found[rank] for rank in range(self._workers)]

    @waits_in(MESSAGE)
    def _at_the_store(self) -> list[int]:
        store, ranks = dist.distributed_c10d._get_default_store(), range(self._workers)
        self._changes += 1
        what = f"trained/{zlib.crc32(repr(self._names).encode())}/{self._changes}"
        store.set(f"{what}/{self._rank}", str(self._digest))
        store.wait([f"{what}/{rank}" for rank in ranks])
        return [int(store.get(f"{what}/{rank}")) for rank in ranks]

    def _unequal(self, frozen: list[str], unfrozen: list[str], others: list[int]) -> FitError:
        done = [f"{did} {_few(names)}" for did, names in (("froze", frozen), ("took in", unfrozen))
                if names]  # fmt: skip
        who = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        return FitError(
            "The workers no longer train the same parameters.",
            seen=f"rank {self._rank} {' and '.join(done) or 'changed its model'}; "
            f"{who} did not do the same",
            allowed="the same requires_grad on every worker",
            next_step="freeze and unfreeze at the same step on every rank",
            code="WB-FIT-154",
        )

    def close(self) -> None:
        """Let go of the board; its memory goes with the last worker."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _digest(names: Sequence[str], flags: Sequence[bool]) -> int:
    return zlib.crc32(repr((list(names), list(map(bool, flags)))).encode())


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shared(size_bytes: int, rank: int) -> mmap.mmap | None:
    """Return memory that all workers map, zeros; None where one of them cannot. Collective."""
    board: mmap.mmap | None = None
    with contextlib.ExitStack() as stack:
        path: list[Any] = [None]
        if rank == 0:
            with contextlib.suppress(OSError):
                made = stack.enter_context(
                    tempfile.NamedTemporaryFile(prefix="wb-sets-", dir=scratch.folder())
                )
                # A hole in a file on a full disk would end whoever writes to it by SIGBUS.
                if os.write(made.fileno(), bytes(size_bytes)) == size_bytes:
                    path[0] = made.name
        dist.broadcast_object_list(path, src=0)
        if path[0] is not None:
            with contextlib.suppress(OSError):
                fd = os.open(path[0], os.O_RDWR)
                try:
                    board = mmap.mmap(fd, size_bytes)
                finally:
                    os.close(fd)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, board is not None)  # then the name is needed no more
    if all(every):
        return board
    if board is not None:
        board.close()
    return None
