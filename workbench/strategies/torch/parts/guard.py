"""Makes copies equal at the beginning, and checks during a run that they stay equal (the guard).

Synchronous strategies depend on one invariant: after every step all replicas hold the same numbers.
Several mistakes can break it: a gradient that was not averaged, noise from another seed, a manual
update on one rank. The loss curve then looks fine, but no common model was trained. So the workers
compare:

    worker r:  parameters that are trained -> their bits added up -> digest d_r
    all:       max(d_r), max(-d_r) in one all-reduce of 80 bytes;  equal <=> max = min

The parameters themselves are compared only if digests differ, so that the error can name one of
them.

When: at the first steps, then at growing intervals, so that comparing takes at most `BUDGET` of the
time plus `ALLOWANCE_S`. Costs and times are sent with the digest, so all workers compute the same
next step. They compare once more at the end of `wb.fit`, and of an epoch of a user's own loop. At
the end of such a loop's cell no message is sent, because a rank can leave its loop early: each
worker reports its digest to the notebook's process, which reports differences.

How equal: to the last bit in two cases. In the first, every worker computes the update from the
same average, on the same kind of device, with the same number of threads. All algorithms of
`allreduce/` and all compressions give every worker the same bits. In the second, parameters are
copies of one worker's or one server's parameters. Between different devices or hosts one update may
be rounded differently. Such differences only add up, because all replicas follow the same gradient.
The limit is `eps (16 + 4 sqrt(steps))` of a parameter's largest number, which is far below one step
of training. Under tensor parallelism each worker computes the gradients of undivided layers itself,
so rounding errors can grow: half of the digits must agree.

A change of the trained parameters is checked before it reaches a collective. If only one worker
freezes a layer, it cannot tell the others in a collective: they expect no change, and wait for this
worker in the reduction. So each worker writes to memory that the others on its host can read:

    worker r, before each backward:   how many it has begun when its set changes:    a digest of its
                                       requires_grad, since which backward it is so, and the digest
                                       before

A worker that has changed something reads there until all others have begun the same backward (or
have reached the next change). Writing costs less than 1 µs; no worker reads while nothing changes.
Workers on several hosts use the store instead. There a worker with a change waits for a worker
without a change until the run is ended.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard

from ....engine.debugging.marks import ALL_REDUCE, MESSAGE, waits_in
from ....engine.torch import accelerator as accelerators
from ....engine.torch.group import control_wire, verify
from ....errors import FitError
from ....shared import cluster_env
from ....shared.cluster_env import host_token

if TYPE_CHECKING:
    from ....engine.context import RunContext

BUNDLE_BYTES = 32 << 20


@waits_in(MESSAGE)
def begin_equal(model: torch.nn.Module, device: torch.device) -> None:
    """Give all workers rank 0's parameters and buffers.

    Args:
        device: The device of the process group's messages; the model can still be on another
            device.

    Raises:
        FitError: The workers hold different models; raised on every worker.
    """
    check_alike(model, device)
    broadcast([*model.parameters(), *model.buffers()], device)


@waits_in(MESSAGE)
def check_alike(model: torch.nn.Module, device: torch.device | None = None) -> None:
    """Check that names, shapes and dtypes agree, because unequal messages would end the process.

    Args:
        device: As in `begin_equal`; by default the model's own.

    Raises:
        FitError: They differ; raised on every worker.
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
            "The workers cannot train together, because their models differ. On every worker, the "
            "model's tensors must have the same names, shapes, types and requires_grad.",
            seen=", ".join(f"rank {r}: {int(e[0])} parameters" for r, e in enumerate(every)),
            next_step="build the same model on every worker, independent of the rank",
            code="WB-FIT-127",
        )


@waits_in(MESSAGE)
def broadcast_model(model: torch.nn.Module) -> None:
    """Give all workers rank 0's parameters and buffers; the model is already on its device."""
    broadcast([*model.parameters(), *model.buffers()])


class KeptBuffers:
    """Saves the models' buffers in a step that can fail, because forward can change them."""

    def __init__(self, buffers: Iterable[torch.Tensor]) -> None:
        self._buffers = [buffer for buffer in buffers if buffer.numel()]
        self._before: list[torch.Tensor] = []

    def keep(self) -> None:
        """Take a copy of them before the step."""
        if self._buffers:
            with torch.no_grad():
                if not self._before:
                    self._before = [buffer.clone() for buffer in self._buffers]
                torch._foreach_copy_(self._before, self._buffers)

    def restore(self) -> None:
        """Put them back as they were before the step."""
        if self._before:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._before)


@waits_in(MESSAGE)
def broadcast_buffers(model: torch.nn.Module) -> None:
    """Give all workers rank 0's buffers; the model is already on its device."""
    broadcast(model.buffers())


@waits_in(MESSAGE)
def broadcast(
    tensors: Iterable[torch.Tensor],
    device: torch.device | None = None,
    group: Any = None,
    source: int = 0,
) -> None:
    """Give all workers rank 0's tensors, several in one message: small collectives are slow.

    Args:
        device: As in `begin_equal`; by default the tensors' own.
        group: The workers that hold them, if not all do.
        source: Rank in the run of the worker whose tensors are sent.
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
        """Copy the message into the replica, when it contains the parts of all others."""
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


BUDGET = 0.002
"""The maximum share of the time for comparisons."""
ALLOWANCE_S = 0.005
"""Additional seconds for comparisons, so that short runs are compared more than twice."""
AT_ONCE = 2
"""Number of comparisons at the beginning, independent of their cost."""
FARTHEST = 500
"""The highest number of steps between two comparisons, if they cost little."""
CHUNK = 1 << 20
_MASK = (1 << 62) - 1

Equal = Literal["copies", "updates", "rounding"]
"""How equal replicas must be: copies of one replica; made by the same update; or made by the same
computation.
"""

clock = time.perf_counter


class Guard:
    """Compares the replicas of one group of workers.

    Args:
        equal: How equal they must be.
        first: The first tick at which something may differ.
        at_end: Whether the replicas of a user's own loop must be equal when its cell ends, too.
        group: The workers that hold replicas; all by default.

    Attributes:
        checks: Comparisons so far.
        cost_s: Seconds that they took, without waits for late workers; the same on all workers.
    """

    def __init__(
        self,
        context: RunContext,
        equal: Equal = "updates",
        *,
        first: int = 1,
        group: Any = None,
        at_end: bool = False,
    ) -> None:
        self._context, self._equal, self._group = context, equal, group
        self._device = torch.device(context.spec.device)
        self._wire = control_wire(group, self._device)
        self._workers = dist.get_world_size(group)
        self._models: list[torch.nn.Module] = []
        self._ticks, self._next = 0, first
        self._checked = 0  # tick of the latest comparison
        self._soonest = first
        self._began = self._since = clock()
        self._reduced_s = 0.0  # the duration of the latest all-reduce here
        self.cost_s = 0.0  # the total time of comparisons so far, the same on all workers
        self.checks = 0
        if at_end and context.taken_over and self._workers > 1:
            context.copies = self.copy

    def copy(self) -> dict[str, int]:
        """Return this worker's `rank`, its replica's `digest`, and a key `like` for its rounding.

        Digests can be compared only if `like` is equal.
        """
        like = 0 if self._equal == "copies" else _number(self._kind())
        digest = _digest(tensor for _, tensor in self._parameters())
        return {"rank": self._context.spec.row_rank, "digest": digest, "like": like}

    def add(self, model: torch.nn.Module) -> None:
        """Compare this model's parameters too."""
        self._models.append(model)

    def due(self) -> bool:
        """Count a tick, as all workers do; return whether it is time to compare."""
        if self._workers == 1:
            return False
        self._ticks += 1
        return self._ticks >= self._next

    def tick(self) -> float:
        """Count a tick and compare if it is time; return the seconds of the comparison.

        Raises:
            FitError: The replicas differ; raised on every worker.
        """
        began = clock()
        if self.due():
            self.check()
        return clock() - began

    def settle(self, *, last: bool = True) -> None:
        """Compare at the end of the run, or (not `last`) of an epoch if the budget allows it.

        Raises:
            FitError: The replicas differ; raised on every worker.
        """
        if self._workers > 1 and (self._ticks > self._checked if last else self._epoch_due()):
            self.check()

    def _epoch_due(self) -> bool:
        return self._ticks > self._checked and self._ticks >= self._soonest

    @waits_in(ALL_REDUCE)
    def check(self) -> None:
        """Compare now; on all workers of the group.

        Raises:
            FitError: The replicas differ; raised on every worker.
        """
        began = clock()
        named = dict(self._parameters())
        layout = _number([(name, tuple(t.shape), str(t.dtype)) for name, t in named.items()])
        digest, kind = _digest(named.values()), _number(self._kind())
        ticks = max(1, self._ticks - self._checked)
        sent = clock()
        # The last worker has not waited, so the shortest time is the time of the reduction.
        times = sent - began, self._reduced_s, began - self._began, (began - self._since) / ticks
        numbers = [digest, layout, kind]
        digest_ns, *others_ns = (round(seconds * 1e9) for seconds in times)
        own = [*numbers, *(-n for n in numbers), digest_ns, *(-n for n in others_ns)]
        message = torch.tensor(own, dtype=torch.int64, device=self._wire)
        dist.all_reduce(message, dist.ReduceOp.MAX, group=self._group)
        most = message.tolist()
        self._reduced_s = clock() - sent
        same, laid_out_alike, alike = (most[i] == -most[i + 3] for i in range(3))
        if not laid_out_alike:
            raise FitError(
                "The workers no longer train the same parameters.",
                seen=f"{len(named)} parameters with requires_grad on rank "
                f"{self._context.spec.rank} at step {self._context.step}",
                allowed="the same parameters on every worker",
                next_step="if your code freezes, unfreezes or adds layers, make this change at the "
                "same step on every rank",
                code="WB-FIT-112",
            )
        if not same:
            self._measure(
                named, exact=self._equal == "copies" or (self._equal != "rounding" and alike)
            )
        self.checks += 1
        self._plan(most[6] * 1e-9, *(-number * 1e-9 for number in most[7:]))
        self._since = clock()

    def _plan(self, digest_s: float, reduce_s: float, elapsed_s: float, tick_s: float) -> None:
        """Choose the next comparison from numbers that are the same on all workers."""
        cost_s = digest_s + reduce_s
        self.cost_s += cost_s
        owed_s = self.cost_s + cost_s - ALLOWANCE_S - BUDGET * elapsed_s
        affordable = math.ceil(max(0.0, owed_s) / max(BUDGET * tick_s, 1e-9))
        self._checked = self._ticks
        self._soonest = self._ticks + affordable
        gap = min(max(1, self._ticks - 1), FARTHEST)
        self._next = self._ticks + (gap if self.checks < AT_ONCE else max(gap, affordable))

    def _parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors that must be equal: trained parameters, without shards."""
        for place, model in enumerate(self._models):
            prefix = f"model {place + 1}: " if len(self._models) > 1 else ""
            for name, parameter in model.named_parameters():
                if parameter.requires_grad and parameter.numel() and not parameter.is_meta:
                    tensor: Any = parameter.detach()
                    if isinstance(tensor, DTensor):
                        if any(isinstance(p, Shard) for p in tensor.placements):
                            continue
                        tensor = tensor.to_local()
                    yield prefix + name.removeprefix("module."), tensor

    def _kind(self) -> tuple[Any, ...]:
        """Return the properties that decide how an update is rounded."""
        name = accelerators.of(self._device).name
        return host_token(), name, torch.get_num_threads(), torch.__version__

    # -- where digests differ ----------------------------------------------------------------------

    def _measure(self, named: dict[str, torch.Tensor], *, exact: bool) -> None:
        """Compare the parameters themselves; raise if they differ by more than rounding."""
        worst = 0.0, "", 0.0
        for name, tensor in named.items():
            spread, scale = self._spread(tensor)
            allowed = 0.0 if exact else self._rounding(tensor.dtype) * scale
            if spread > allowed:
                excess = math.inf if spread == math.inf else spread / max(scale, 1e-300)
                worst = max(worst, (excess, name, spread))
        if worst[1]:
            raise self._unequal(*worst[1:], named[worst[1]])

    def _rounding(self, dtype: torch.dtype) -> float:
        eps = torch.finfo(dtype).eps
        if self._equal == "rounding":
            return math.sqrt(eps)
        return eps * (16 + 4 * math.sqrt(self._context.trained))

    @waits_in(ALL_REDUCE)
    def _spread(self, tensor: torch.Tensor) -> tuple[float, float]:
        """Return the largest difference between replicas, and the largest magnitude."""
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        spread = scale = 0.0
        for part in torch.split(numbers.reshape(-1), CHUNK):
            values = part.to(self._wire, torch.float64)
            lost = values.isnan()
            values = values.masked_fill(lost, 0.0)
            both = torch.stack([values, -values, lost.double(), -lost.double()])
            dist.all_reduce(both, dist.ReduceOp.MAX, group=self._group)
            high, low = both[0], -both[1]
            apart = torch.where(high == low, 0.0, high - low)
            apart = torch.where(both[2] == -both[3], apart, math.inf)
            spread = max(spread, float(apart.max()))
            scale = max(scale, float(torch.maximum(high.abs(), low.abs()).max()))
        return spread, scale

    def _unequal(self, name: str, spread: float, tensor: torch.Tensor) -> FitError:
        own = torch.tensor([_digest([tensor])], dtype=torch.int64, device=self._wire)
        every = [torch.empty_like(own) for _ in range(self._workers)]
        dist.all_gather(every, own, group=self._group)
        values = [int(value) for value in every]
        usual = max(values, key=values.count)
        members = dist.get_process_group_ranks(self._group or dist.group.WORLD)
        odd = [members[place] for place, value in enumerate(values) if value != usual]
        amount = f"by up to {spread:.3g}" if spread < math.inf else "in values that are NaN or inf"
        who = "rank " if len(odd) == 1 else "ranks "
        return FitError(
            "The workers no longer train the same model: their copies of the parameters are no "
            "longer equal.",
            seen=f"step {self._context.step}: parameter {name} differs {amount} between "
            f"{who}{', '.join(map(str, odd))} and rank {members[values.index(usual)]}",
            allowed="equal parameters on all workers after each step",
            next_step="compute gradients only from the loss of the run, and change parameters only "
            "with the optimizer of the run. Do both in the same way on every rank. Use the same "
            "random seed on all ranks",
            code="WB-FIT-113",
        )


def _digest(tensors: Any) -> int:
    """Return a number that depends on every bit of some tensors."""
    sums = [_bits(part) for tensor in tensors for part in torch.split(tensor.reshape(-1), CHUNK)]
    if not sums:
        return 0
    every = torch.stack(sums)
    odd = (
        torch.arange(1, len(sums) + 1, device=every.device) * 0x9E3779B97F4A7C15 % (1 << 61) * 2 + 1
    )
    return int((every * odd).sum()) & _MASK


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def _bits(part: torch.Tensor) -> torch.Tensor:
    return part.contiguous().view(_WORDS[part.element_size()]).sum(dtype=torch.int64)


def _number(value: Any) -> int:
    return zlib.crc32(repr(value).encode())


_BEGUN, _SET = struct.Struct("=q"), struct.Struct("=qqq")
_SLOT_BYTES = _BEGUN.size + _SET.size
_LOOK_S = 0.0005


class TrainedSets:
    """The parameters of one model that each worker trains. All workers create it together.

    Args:
        hosts: Of each rank.
        names: Of the model's parameters.
        flags: Which of them require gradients.
    """

    def __init__(self, hosts: Sequence[str], names: Sequence[str], flags: Sequence[bool]) -> None:
        self._rank, self._workers = dist.get_rank(), dist.get_world_size()
        self._names, self._flags = list(names), list(flags)
        self._begun, self._digest = 0, _set_digest(names, flags)
        self._board: mmap.mmap | None = None
        self._changes = 0
        if self._workers > 1 and len(set(hosts)) <= 1:
            self._board = _shared(self._workers * _SLOT_BYTES, self._rank)
            self._tell(self._digest)

    def begin(self) -> None:
        """Note that a backward begins."""
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
        digest_before, self._digest = self._digest, _set_digest(names, flags)
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
                    if digest != self._digest:  # a late worker may be waiting for this worker
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
        done = [f"{did} {_few(names)}" for did, names in (("froze", frozen), ("unfroze", unfrozen))
                if names]  # fmt: skip
        who = f"rank{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        return FitError(
            "The workers no longer train the same parameters.",
            seen=f"rank {self._rank} {' and '.join(done) or 'changed its model'}; "
            f"{who} did not do the same",
            allowed="the same requires_grad on every worker",
            next_step="if your code freezes or unfreezes parameters, make this change at the same "
            "step on every rank",
            code="WB-FIT-154",
        )

    def close(self) -> None:
        """Release the board; its memory is freed with the last worker."""
        if self._board is not None:
            self._board.close()
            self._board = None


def _set_digest(names: Sequence[str], flags: Sequence[bool]) -> int:
    return zlib.crc32(repr((list(names), list(map(bool, flags)))).encode())


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _shared(size_bytes: int, rank: int) -> mmap.mmap | None:
    """Return zeroed memory that all workers share; None if one worker cannot map it. Collective."""
    board: mmap.mmap | None = None
    with contextlib.ExitStack() as stack:
        path: list[Any] = [None]
        if rank == 0:
            with contextlib.suppress(OSError):
                made = stack.enter_context(
                    tempfile.NamedTemporaryFile(prefix="wb-sets-", dir=cluster_env.folder())
                )
                # On a full disk, writing into a hole of the file would end the process with SIGBUS.
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
        dist.all_gather_object(every, board is not None)  # after that the name is not needed
    if all(every):
        return board
    if board is not None:
        board.close()
    return None
