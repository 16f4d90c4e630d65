"""What ranks send to each other: tensors, objects, models and optimizers' states.

Horovod matches messages by name; here each rank must send the same ones in the same order.
"""

from __future__ import annotations

import enum
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from ....errors import FitError
from .. import accelerator
from ..group import backend_of
from .ranks import rank, require_init, size


class Op(enum.IntEnum):
    """How tensors of all ranks become one."""

    Average = 0
    Sum = 1
    Adasum = 2
    Min = 3
    Max = 4
    Product = 5


Average, Sum, Adasum, Min, Max, Product = Op
HorovodInternalError = RuntimeError
_OF_TORCH = {
    Sum: dist.ReduceOp.SUM, Average: dist.ReduceOp.SUM, Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX, Product: dist.ReduceOp.PRODUCT,
}  # fmt: skip


class _AllRanks:
    """All processes: the one process set that there is."""

    process_set_id = 0
    rank = staticmethod(rank)
    size = staticmethod(size)

    @staticmethod
    def included() -> bool:
        """Return True: every process is in it."""
        return True


global_process_set = _AllRanks()


class NoneCompressor:
    """Sends gradients unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the message, and what `decompress` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the original tensor."""
        return tensor


class FP16Compressor(NoneCompressor):
    """Sends floating-point numbers in 16 bits."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the message, and what `decompress` needs."""
        kind = tensor.dtype
        return (tensor.half() if kind.is_floating_point else tensor), kind

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the original tensor."""
        return tensor.to(ctx)


class Compression:
    """The ways of making gradients smaller."""

    none = NoneCompressor
    fp16 = FP16Compressor


class Handle:
    """A message that has been started.

    Args:
        finish: Makes the result when the message has arrived.
    """

    def __init__(self, works: Sequence[Any], finish: Callable[[], Any]) -> None:
        self._works, self._finish = [work for work in works if work is not None], finish
        self._result: Any = None
        self._is_open = True

    def poll(self) -> bool:
        """Return whether `wait` would return at once."""
        return all(work.is_completed() for work in self._works)

    def wait(self) -> Any:
        """Return the result once it is there."""
        if self._is_open:
            for work in self._works:
                work.wait()
            self._result, self._is_open = self._finish(), False
            self._works.clear()
        return self._result


def poll(handle: Handle) -> bool:
    """Return whether a message has arrived."""
    return handle.poll()


def synchronize(handle: Handle) -> Any:
    """Wait for a message; return its result."""
    return handle.wait()


def op_of(op: Any, average: bool | None = None) -> Op:
    if op is not None and average is not None:
        raise FitError(
            "The arguments `op` and `average` cannot be used together.",
            next_step="remove `average`, which is the older form of `op`",
            code="WB-FIT-166",
        )
    found = Op(op) if op is not None else Sum if average is False else Average
    if found is Adasum:
        raise FitError(
            "Adasum is not supported.",
            allowed="hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product; for an optimizer, only "
            "hvd.Average and hvd.Sum",
            next_step="use op=hvd.Average",
            code="WB-FIT-167",
        )
    return found


class Pending(Protocol):
    """Sends gradients at its own moments."""

    def launch_rest(self) -> None:
        """Send what is left of a step's gradients, if some of them may be sent already."""


pending: weakref.WeakSet[Pending] = weakref.WeakSet()


def begin(process_set: Any) -> None:
    """Make sure that a message of all ranks may be sent now."""
    require_init()
    if process_set not in (None, global_process_set):
        raise FitError(
            "Process sets are not supported.",
            allowed="hvd.global_process_set, which has all ranks",
            next_step="for a group with only some ranks, use torch.distributed.new_group(ranks)",
            code="WB-FIT-168",
        )
    for gradients in list(pending):
        gradients.launch_rest()  # some ranks may have sent more of them already than others


def _on_wire(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor where the group can send it from, without gradient."""
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    return copy if backend_of(None, copy.device) else copy.to(accelerator.own().device)


def _scaled(tensor: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place; whole numbers are cut off."""
    if factor == 1.0:
        return tensor
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.mul_(factor)
    return tensor.copy_((tensor * factor).to(tensor.dtype))


def _allreduce(
    tensor: torch.Tensor, op: Op, before: float, after: float, into: torch.Tensor | None
) -> Handle:
    sent = _scaled(_on_wire(tensor), before)
    work = dist.all_reduce(sent, _OF_TORCH[op], async_op=True)

    def finish() -> torch.Tensor:
        result = _scaled(sent, after / size() if op is Average else after).to(tensor.device)
        if into is None:
            return result.reshape(tensor.shape)
        with torch.no_grad():
            return into.copy_(result)

    return Handle([work], finish)


def allreduce_async(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Begin to reduce a tensor over all ranks."""
    begin(process_set)
    return _allreduce(tensor, op_of(op, average), prescale_factor, postscale_factor, None)


def allreduce_async_(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None, op: Any = None,
    prescale_factor: float = 1.0, postscale_factor: float = 1.0, process_set: Any = None,
) -> Handle:  # fmt: skip
    """Begin to reduce a tensor over all ranks, in place."""
    begin(process_set)
    return _allreduce(tensor, op_of(op, average), prescale_factor, postscale_factor, tensor)


class _AllReduce(torch.autograd.Function):
    """Lets gradients pass: each rank's is reduced as its tensor was."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: Op, before: float, after: float) -> Any:
        ctx.how = op, before, after
        return _allreduce(tensor, op, before, after, None).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        op, before, after = ctx.how
        return _allreduce(gradients[0], op, before, after, None).wait(), None, None, None


def allreduce(
    tensor: torch.Tensor, average: bool | None = None, name: str | None = None,
    compression: Any = Compression.none, op: Any = None, prescale_factor: float = 1.0,
    postscale_factor: float = 1.0, process_set: Any = None,
) -> torch.Tensor:  # fmt: skip
    """Return a tensor reduced over all ranks; gradients pass through it."""
    begin(process_set)
    sent, ctx = compression.compress(tensor)
    how = op_of(op, average), prescale_factor, postscale_factor
    result: torch.Tensor = compression.decompress(_AllReduce.apply(sent, *how), ctx)  # type: ignore[no-untyped-call]
    return result


def allreduce_(tensor: torch.Tensor, *args: Any, **keywords: Any) -> torch.Tensor:
    """Reduce a tensor over all ranks in place; arguments as of `allreduce_async_`."""
    result: torch.Tensor = allreduce_async_(tensor, *args, **keywords).wait()
    return result


def grouped_allreduce(tensors: Iterable[torch.Tensor], *args: Any, **keywords: Any) -> list[Any]:
    """Return each tensor reduced over all ranks; arguments as of `allreduce`."""
    return [allreduce(tensor, *args, **keywords) for tensor in tensors]


def grouped_allreduce_(tensors: Iterable[torch.Tensor], *args: Any, **keywords: Any) -> list[Any]:
    """Reduce each tensor over all ranks in place; arguments as of `allreduce_async_`."""
    handles = [allreduce_async_(tensor, *args, **keywords) for tensor in tensors]
    return [handle.wait() for handle in handles]


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to concatenate the tensors of all ranks.

    Raises:
        FitError: They differ in more than their first dimension.
    """
    begin(process_set)
    rows = _on_wire(tensor if tensor.dim() else tensor.reshape(1))
    about = tuple(rows.shape), str(rows.dtype)
    shapes: list[Any] = [about] * size()
    dist.all_gather_object(shapes, about)
    if len({(shape[1:], kind) for shape, kind in shapes}) > 1:
        raise FitError(
            "These tensors cannot be gathered, because their shapes or dtypes differ between the "
            "ranks.",
            seen=", ".join(f"rank {at}: {shape} {kind}" for at, (shape, kind) in enumerate(shapes)),
            allowed="the same dtype, and shapes that differ only in the first dimension",
            code="WB-FIT-169",
        )
    counts = [shape[0] for shape, _ in shapes]
    padded = rows.new_zeros((max(counts), *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    work = dist.all_gather(parts, padded, async_op=True)

    def finish() -> torch.Tensor:
        pairs = zip(parts, counts, strict=True)
        return torch.cat([part[:count] for part, count in pairs]).to(tensor.device)

    return Handle([work], finish)


class _AllGather(torch.autograd.Function):
    """Lets gradients pass: each rank is given the mean of its rows' gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> Any:
        ctx.shape = tensor.shape
        return allgather_async(tensor).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mean = _allreduce(gradients[0], Average, 1.0, 1.0, None).wait()
        mine = ctx.shape[0] if ctx.shape else 1
        counts: list[Any] = [mine] * size()
        dist.all_gather_object(counts, mine)
        return mean.narrow(0, sum(counts[: rank()]), mine).reshape(ctx.shape)


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Return the concatenated tensors of all ranks; gradients pass through it."""
    begin(process_set)
    result: torch.Tensor = _AllGather.apply(tensor)  # type: ignore[no-untyped-call]
    return result


def _broadcast(tensor: torch.Tensor, root_rank: int, into: torch.Tensor | None) -> Handle:
    sent = _on_wire(tensor)  # as bytes: not every type of numbers can be sent
    work = dist.broadcast(sent.reshape(-1).view(torch.uint8), root_rank, async_op=True)

    def finish() -> torch.Tensor:
        if into is None:
            return sent.to(tensor.device)
        with torch.no_grad():
            return into.copy_(sent)

    return Handle([work], finish)


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to send a rank's tensor to all."""
    begin(process_set)
    return _broadcast(tensor, root_rank, None)


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> Handle:
    """Begin to send a rank's tensor to all, in place."""
    begin(process_set)
    return _broadcast(tensor, root_rank, tensor)


class _Broadcast(torch.autograd.Function):
    """Lets gradients pass: the root is given the mean of all ranks', as Horovod does."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, root_rank: int) -> Any:
        ctx.root_rank = root_rank
        return _broadcast(tensor, root_rank, None).wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        mean = _allreduce(gradients[0], Average, 1.0, 1.0, None).wait()
        return (mean if rank() == ctx.root_rank else torch.zeros_like(mean)), None


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Return a rank's tensor on all ranks; gradients pass through it."""
    begin(process_set)
    result: torch.Tensor = _Broadcast.apply(tensor, root_rank)  # type: ignore[no-untyped-call]
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: Any = None
) -> torch.Tensor:
    """Send a rank's tensor to all, in place."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


def broadcast_object(
    obj: Any, root_rank: int = 0, name: str | None = None, process_set: Any = None
) -> Any:
    """Return a rank's object on all ranks."""
    begin(process_set)
    held = [obj]
    dist.broadcast_object_list(held, root_rank)
    return held[0]


def allgather_object(obj: Any, name: str | None = None, process_set: Any = None) -> list[Any]:
    """Return the objects of all ranks."""
    begin(process_set)
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, obj)
    return found


def broadcast_parameters(params: Any, root_rank: int) -> None:
    """Give all ranks a rank's tensors: a `state_dict()`, or parameters with or without names.

    Raises:
        FitError: The ranks' tensors differ in number or shape.
    """
    pairs = sorted(params.items()) if isinstance(params, dict) else list(params)
    tensors = [pair[1] if isinstance(pair, tuple) else pair for pair in pairs]
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    begin(None)
    check_alike(tensors)
    for handle in [_broadcast(tensor, root_rank, tensor) for tensor in tensors]:
        handle.wait()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: Any = None
) -> None:
    """Give all ranks a rank's optimizer state and settings."""
    state = None
    if rank() == root_rank:
        state = tree_map_only(torch.Tensor, lambda t: t.detach().cpu(), optimizer.state_dict())
    state = broadcast_object(state, root_rank)
    if rank() != root_rank:
        optimizer.load_state_dict(state)


def barrier(process_set: Any = None) -> None:
    """Wait for all ranks."""
    begin(process_set)
    dist.barrier()


def join(device: int = -1) -> int:
    """Return 0 if there is one rank.

    Raises:
        FitError: There are several: the others would wait for messages of this one.
    """
    if size() == 1:
        return 0
    raise FitError(
        "hvd.join is not supported: all ranks must take the same number of steps.",
        next_step="remove hvd.join(), and use DistributedSampler, which gives all ranks the same "
        "number of samples",
        code="WB-FIT-170",
    )


def check_alike(tensors: Sequence[torch.Tensor]) -> None:
    """Compare the ranks' tensors; a message longer than its receiver expects ends the process."""
    if dist.get_world_size() == 1:
        return
    text = repr([(tuple(tensor.shape), str(tensor.dtype)) for tensor in tensors])
    about = len(tensors), hashlib.sha256(text.encode()).hexdigest()
    found: list[Any] = [about] * dist.get_world_size()
    dist.all_gather_object(found, about)
    if len(set(found)) > 1:
        counts = [count for count, _ in found]
        raise FitError(
            "The ranks' models or optimizers differ.",
            seen=", ".join(f"rank {at}: {count} tensors" for at, count in enumerate(counts))
            if len(set(counts)) > 1
            else f"{counts[0]} tensors on each rank, but the shapes or dtypes are not the same on "
            "all ranks",
            next_step="build the same model and the same optimizer on every rank",
            code="WB-FIT-171",
        )
