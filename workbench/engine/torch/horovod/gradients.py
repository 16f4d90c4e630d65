"""The gradients of an optimizer, averaged in buckets while backward runs.

    backward    last layer .......... first layer
                     | bucket 0 -> all-reduce
                                | bucket 1 -> all-reduce
    step        a missing gradient is sent as 0 | wait | the optimizer's own step

Ranks may leave out different parameters (branches in forward). So buckets are sent in one fixed
order. After its gradients each bucket holds, for every parameter, whether this rank has a gradient:
one that no rank has stays None, as on one device.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.weak import WeakIdKeyDictionary

from ....errors import FitError
from ...context import current
from .messages import Average, Op, check_alike, pending

BUCKET_BYTES = 8 << 20


class Bucket:
    """Gradients that are sent together, followed by whether each parameter has one.

    Attributes:
        missing: Parameters whose gradient has not come yet in this step.
        sent_bytes: The bytes of one message.
    """

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        self.parameters = parameters
        self.missing = len(parameters)
        self.sent_bytes = 0
        self._flat: torch.Tensor | None = None
        self._work: Any = None
        self._packed: tuple[torch.Tensor, Any] | None = None
        self._came: dict[int, tuple[Any, int]] = {}  # of parameters by id: gradient and version
        self._seen: list[tuple[Any, int]] = []  # the same of all parameters, when they were sent

    def take(self, parameter: torch.Tensor) -> None:
        """Note a gradient that backward has brought."""
        self._came[id(parameter)] = _state(parameter)

    def launch(self, compression: Any, before: float, sparse_as_dense: bool) -> None:
        """Send the gradients that are there.

        Raises:
            FitError: They were changed after backward, or are sparse.
        """
        first, count = self.parameters[0], len(self.parameters)
        if self._flat is None or (self._flat.dtype, self._flat.device) != (
            first.dtype,
            first.device,
        ):
            numbers = sum(p.numel() for p in self.parameters)
            self._flat = torch.empty(numbers + count, dtype=first.dtype, device=first.device)
        views = self._views()
        self._seen = []
        for view, p in zip(views, self.parameters, strict=True):
            gradient, version = _state(p)
            _check_unchanged(p, self._came.get(id(p), (gradient, version)))
            self._seen.append((gradient, version))
            if gradient is None:
                view.zero_()
                continue
            if gradient.is_sparse:
                if not sparse_as_dense:
                    raise FitError(
                        "A gradient is sparse. Sparse gradients need sparse_as_dense=True.",
                        seen=f"a sparse gradient of shape {tuple(p.shape)}",
                        next_step="use hvd.DistributedOptimizer(..., sparse_as_dense=True)",
                        code="WB-FIT-172",
                    )
                gradient = gradient.to_dense()
            view.copy_(gradient)
        if before != 1.0:
            self._flat.mul_(before)
        there = [0.0 if gradient is None else 1.0 for gradient, _ in self._seen]
        self._flat[-count:] = torch.tensor(there, dtype=first.dtype)
        self._packed = compression.compress(self._flat)
        packed = self._packed[0]
        self.sent_bytes = packed.numel() * packed.element_size()
        self._work = dist.all_reduce(packed, async_op=True)

    def finish(self, compression: Any, after: float) -> None:
        """Wait, and put the reduced gradients into place.

        Raises:
            FitError: The gradients were changed after they were sent.
        """
        assert self._flat is not None
        assert self._packed is not None
        self._work.wait()
        arrived = compression.decompress(*self._packed)
        if arrived is not self._flat:
            self._flat.copy_(arrived)
        count = len(self.parameters)
        somewhere = [True] * count
        if any(gradient is None for gradient, _ in self._seen):  # reading waits for a device
            somewhere = [abs(there) > 0 for there in self._flat[-count:].tolist()]
        if after != 1.0:
            self._flat[:-count].mul_(after)
        states = zip(self._views(), self.parameters, self._seen, somewhere, strict=True)
        self._work = None
        for view, p, seen, has_one in states:
            _check_unchanged(p, seen)
            gradient = seen[0]
            if gradient is None:
                p.grad = view.clone() if has_one else None
            elif gradient.is_sparse:
                p.grad = view.to_sparse(gradient.sparse_dim())
            else:
                gradient.copy_(view)

    def clear(self) -> None:
        """Prepare for the next step."""
        if self._work is not None:  # it was given up: its memory is still written to
            self._flat = None
        self.missing = len(self.parameters)
        self._work = self._packed = None
        self._came.clear()
        self._seen = []

    def _views(self) -> list[torch.Tensor]:
        assert self._flat is not None
        numbers = [p.numel() for p in self.parameters]
        parts = torch.split(self._flat[: -len(self.parameters)], numbers)
        return [part.view(p.shape) for part, p in zip(parts, self.parameters, strict=True)]


def _state(parameter: torch.Tensor) -> tuple[Any, int]:
    """Return a parameter's gradient, and a number that changes with it."""
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


def _check_unchanged(parameter: torch.Tensor, seen: tuple[Any, int]) -> None:
    now = _state(parameter)
    if now[0] is seen[0] and now[1] == seen[1]:
        return
    raise FitError(
        "Gradients were changed before they were averaged over the ranks.",
        seen=f"a changed gradient of shape {tuple(parameter.shape)}, between backward() and step()",
        allowed="changes (clipping, unscaling) after optimizer.synchronize()",
        next_step="call optimizer.synchronize(), then change the gradients, then "
        "`with optimizer.skip_synchronize(): optimizer.step()`",
        code="WB-FIT-173",
    )


def divide(parameters: Iterable[torch.Tensor]) -> list[Bucket]:
    """Divide parameters into buckets; the same for the same parameters."""
    buckets: list[list[torch.Tensor]] = []
    filled: dict[Any, tuple[list[torch.Tensor], int]] = {}
    for p in parameters:
        kind = p.dtype, p.device
        held, size_bytes = filled.get(kind, ([], BUCKET_BYTES))
        own_bytes = p.numel() * p.element_size()
        if size_bytes + own_bytes > BUCKET_BYTES:
            held, size_bytes = [], 0
            buckets.append(held)
        held.append(p)
        filled[kind] = held, size_bytes + own_bytes
    return [Bucket(held) for held in buckets]


def trained(groups: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Return an optimizer's trained parameters, in the usual order of backward."""
    held = [p for group in groups for p in group["params"] if p.requires_grad]
    return held[::-1]


_owners: Any = WeakIdKeyDictionary()  # of parameters: weak references to what averages them


def averaging(model: torch.nn.Module) -> Gradients | None:
    """Return Horovod's optimizer that averages a model's gradients, if there is one."""
    for parameter in model.parameters():
        owner = _owners.get(parameter)
        gradients: Gradients | None = owner() if owner is not None else None
        if gradients is not None and gradients.looks:
            return gradients
    return None


def _present_group() -> weakref.ref[Any]:
    """Return which group there is, without holding on to it."""
    return weakref.ref(dist.group.WORLD)


class Gradients:
    """The gradients of one optimizer, until they are averaged over all ranks.

    Attributes:
        passes: Backward passes before a step.
        together: Whether `step` averages.
        is_done: Whether `synchronize` was called since the last step.
        run: The run in whose cell it was made.
        timer: Records the wait for other ranks, if a loop is recorded.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        compression: Any,
        passes: int,
        op: Op,
        predivide: float,
        sparse_as_dense: bool,
    ) -> None:
        self._compression, self.passes = compression, passes
        self._op, self._predivide, self._sparse_as_dense = op, predivide, sparse_as_dense
        self.together, self.is_done = True, False
        run = current()
        self.run = None if run is None else weakref.ref(run)
        self.timer: Any = None
        self._sent_bytes = 0.0
        self._hooks: list[Any] = []
        self._left: dict[int, int] = {}  # of parameters by id: passes that are to come
        self._places: dict[int, Bucket] = {}
        self._buckets: list[Bucket] = []
        self._launched = 0
        self._group: Any = None  # in which they came
        self._plan(groups)
        check_alike([p for bucket in self._buckets for p in bucket.parameters])
        pending.add(self)

    def _plan(self, groups: list[dict[str, Any]]) -> None:
        self.retire()
        self._buckets = divide(trained(groups))
        self._places = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        mine = weakref.ref(self)

        def arrived(parameter: torch.Tensor) -> None:
            gradients = mine()
            if gradients is not None:
                gradients.arrived(parameter)

        for bucket in self._buckets:
            for p in bucket.parameters:
                before = _owners.get(p)
                if before is not None and (other := before()) is not None and other is not self:
                    other.retire()  # an optimizer of before, which nobody steps any more
                    self.timer = self.timer or other.timer
                _owners[p] = mine
                parameter: Any = p
                self._hooks.append(parameter.register_post_accumulate_grad_hook(arrived))
        self._clear()

    def retire(self) -> None:
        """Stop watching backward; a step would still average what is there."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def __del__(self) -> None:
        self.retire()

    @property
    def looks(self) -> bool:
        """Whether it still watches backward."""
        return bool(self._hooks)

    def arrived(self, parameter: torch.Tensor) -> None:
        """Note a gradient; send all complete buckets, in their order.

        Raises:
            FitError: There were more gradients than backward passes allowed.
        """
        if dist.get_world_size() == 1:
            return
        self.forget_failed()
        self._group = _present_group()
        left = self._left.get(id(parameter), self.passes)
        if left <= 0:
            self._clear()
            raise FitError(
                "Before step(), there were more backward passes than backward_passes_per_step "
                "allows.",
                seen=f"backward pass {self.passes + 1} for a parameter of shape "
                f"{tuple(parameter.shape)}",
                allowed=f"backward passes before optimizer.step(): {self.passes}",
                next_step="set backward_passes_per_step=N if each step has N backward passes",
                code="WB-FIT-174",
            )
        self._left[id(parameter)] = left - 1
        self._places[id(parameter)].take(parameter)
        if left > 1:
            return
        self._places[id(parameter)].missing -= 1
        while self._launched < len(self._buckets) and not self._buckets[self._launched].missing:
            self._launch(self._buckets[self._launched])

    def forget_failed(self) -> None:
        """Forget a step that failed half-way: the set of workers has changed since."""
        if self._left and self._group != _present_group():
            self._clear()

    def _launch(self, bucket: Bucket) -> None:
        before = 1 / self._predivide if self._op is Average else 1.0
        bucket.launch(self._compression, before, self._sparse_as_dense)
        self._launched += 1

    def launch_rest(self) -> None:
        """Send what is left of a step's gradients, if some of them may be sent already."""
        if dist.get_world_size() > 1 and any(left <= 0 for left in self._left.values()):
            self._launch_all()

    def _launch_all(self) -> None:
        for bucket in self._buckets[self._launched :]:
            self._launch(bucket)

    def let_go(self) -> None:
        """Report no more waits."""
        self.timer = None

    def sent(self) -> float:
        """Return the bytes that this worker sent for the last step."""
        return self._sent_bytes

    @property
    def is_under_way(self) -> bool:
        """Whether backward has brought gradients that no step has used yet."""
        return bool(self._left) and dist.get_world_size() > 1

    def synchronize(self, groups: list[dict[str, Any]]) -> None:
        """Wait until all gradients are averaged over all ranks."""
        self.is_done = True
        self.forget_failed()
        if dist.get_world_size() == 1:
            self._clear()
            return
        with self._waiting():
            try:
                self._average(groups)
            finally:
                self._clear()
        if {id(p) for p in trained(groups)} != self._places.keys():  # layers frozen, or freed
            self._plan(groups)

    def _average(self, groups: list[dict[str, Any]]) -> None:
        after = self._predivide / dist.get_world_size() if self._op is Average else 1.0
        known = self._places
        added = divide(p for p in trained(groups) if id(p) not in known)
        self._launch_all()
        for bucket in added:
            self._launch(bucket)
        self._sent_bytes = 0.0
        for bucket in [*self._buckets, *added]:
            bucket.finish(self._compression, after)
            world_size = dist.get_world_size()
            self._sent_bytes += 2 * (world_size - 1) / world_size * bucket.sent_bytes

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        if self.timer is None:
            yield
            return
        self.timer.ready()
        with self.timer.blocked():
            yield

    def _clear(self) -> None:
        self._left.clear()
        self._launched = 0
        for bucket in self._buckets:
            bucket.clear()


def refuse_averaged(model: torch.nn.Module) -> None:
    """Raise FitError if `DistributedOptimizer` averages a model's gradients in this run.

    One of an earlier cell releases the model.
    """
    gradients = averaging(model)
    while gradients is not None:
        if gradients.run is not None and gradients.run() is current():
            raise FitError(
                "hvd.DistributedOptimizer already averages this model's gradients, so Workbench "
                "cannot average them too.",
                seen="wb.prepare or wb.fit after hvd.DistributedOptimizer",
                allowed="hvd.DistributedOptimizer, or wb.prepare, or wb.fit: only one of them",
                next_step="remove hvd.DistributedOptimizer, or use wb.watch(model, optimizer, "
                "loader) instead of wb.prepare or wb.fit",
                code="WB-FIT-182",
            )
        gradients.retire()
        gradients = averaging(model)
