"""How the gradients of a data-parallel run are averaged: which all-reduce, compressed or not.

All workers make the same decision from the options, before the first step. DistributedDataParallel
does the backend's own all-reduce of whole gradients, and overlaps it with backward. Everything else
goes through `FlatGradients`, in one message after backward. `reduction.py` decides when gradients
are averaged, for any kind of loss.

`FlatGradients` averages gradients after backward, all of them in one message.
DistributedDataParallel reduces buckets while backward still runs, through the backend's all-reduce.
Methods that need all gradients at once (Workbench's all-reduce algorithms, compression) run here
instead:

    forward | backward . . . . . | own work done | mean of all gradients | optimizer
                                 ready_s                                 reduced

The gradients are copied into one flat tensor per dtype. This tensor is averaged over the workers,
and each parameter's `.grad` becomes a view of it. No Python runs per bucket, and none in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ....engine.debugging.marks import ALL_REDUCE, waits_in
from ....errors import FitError
from ....shared import events
from ....shared.events import Topic
from ..allreduce import BACKEND, AllReduce, auto
from ..allreduce.auto import Aside
from ..allreduce.compression import Compression, make_compression, message_like
from ..allreduce.links import Links, connect_near
from .guard import check_alike

if TYPE_CHECKING:
    from ....engine.context import RunContext

AUTO = "auto"


class Averaging:
    """The decisions for one run.

    Args:
        model: The module, on its device.
        chosen: The algorithm that these workers, or some of them, chose before.

    Attributes:
        overlapped: Whether DistributedDataParallel averages.
        find_unused: Whether a parameter can be unused in the loss of some worker.
        bucket_mb: How large DistributedDataParallel's buckets are.

    Raises:
        FitError: The options exclude each other, or the workers' models differ.
    """

    @waits_in(ALL_REDUCE)
    def __init__(
        self, context: RunContext, model: torch.nn.Module, chosen: str | None = None
    ) -> None:
        options, spec = context.spec.options, context.spec
        self._compress = str(options.get("compress", "none"))
        self.bucket_mb = float(options.get("bucket_mb", 25.0))
        self.find_unused = bool(options.get("find_unused_parameters", False))
        asked = str(options.get("allreduce", BACKEND))
        self._context, self._warned = context, False
        self._compressions: list[Compression] = []  # one per dtype
        simulated = context.faults.on_links
        self._check_options(asked, simulated)
        self._on_cpu = torch.device(spec.device).type == "cpu"
        ours = asked != BACKEND or self._compress != "none"
        self.links = Links(
            dist.group.WORLD,
            hosts=spec.hosts,
            travel=context.faults.travel,
            peers=connect_near(dist.group.WORLD) if ours and self._on_cpu else None,
        )
        self._aside = Aside()
        try:
            check_alike(model)
            name = chosen or self._decide(model, asked, simulated)
        except BaseException:  # no other code will close this
            self.close()
            raise
        self.all_reduce = AllReduce(name, self.links)
        self.overlapped = self.all_reduce.name == BACKEND and self._compress == "none"
        if self.overlapped:  # `auto` measured other algorithms, and the backend's was faster
            self.close()
        self._counted = self.links.sent_bytes

    def _check_options(self, asked: str, simulated: bool) -> None:
        if self._compress.startswith("topk") and asked != AUTO:
            raise FitError(
                "`allreduce` cannot be used with compress=topk. With topk, the workers send "
                "numbers from different positions of the gradient, and an all-reduce cannot add "
                "up these numbers.",
                seen=f"compress={self._compress}, allreduce={asked}",
                next_step="remove -o allreduce, or use another compression (-o compress=fp16)",
                code="WB-FIT-108",
            )
        if asked == BACKEND and simulated:
            raise FitError(
                "--inject bandwidth and --inject latency work only on Workbench's own links. "
                "allreduce=backend does not use these links.",
                seen=", ".join(fault.text for fault in self._context.spec.faults),
                next_step="use -o allreduce=auto, or an algorithm such as -o allreduce=ring",
                code="WB-FIT-109",
            )

    def _decide(self, model: torch.nn.Module, asked: str, simulated: bool) -> str:
        """Return the algorithm's name; `auto` measures with a message of the usual size."""
        sparse = any(getattr(module, "sparse", False) is True for module in model.modules())
        if asked != AUTO:
            return asked
        if sparse or self._compress.startswith("topk"):
            return BACKEND
        # A model with gradients of several dtypes has a message for each: the largest counts.
        kinds = [
            list(group.values()) for group in by_dtype(dict(model.named_parameters())).values()
        ]
        parameters = max(kinds, key=size_bytes)
        shapes = [parameter.shape for parameter in parameters]
        numel, dtype = message_like(self._compress, shapes, parameters[0].dtype)
        message = auto.Message(numel, dtype, parameters[0].device)
        choice = auto.choose(message, self.links, self._aside, simulated=simulated)
        if self.links.rank == 0 and choice.name != BACKEND and choice.seconds:
            text = choice.explain(message.size_bytes)
            topic = Topic.ALLREDUCE_CHOSEN
            self._context.emit(events.Noted(rank=0, text=text, topic=topic, value=choice.name))
        return choice.name

    def flat(self, parameters: Mapping[str, torch.nn.Parameter]) -> FlatGradients:
        """Return the average of these parameters' gradients in one message, as decided."""
        any_used = self._beside(self.all_reduce) if self.find_unused else None
        return FlatGradients(parameters, self._make_mean, any_used)

    def plain(self, parameters: Mapping[str, torch.nn.Parameter]) -> FlatGradients:
        """Return the average of gradients if some can be missing; not compressed."""
        mean = self._beside(self.all_reduce.mean)
        return FlatGradients(parameters, lambda shapes: mean, self._beside(self.all_reduce))

    def _make_mean(self, shapes: list[torch.Size]) -> Mean:
        compression = make_compression(self._compress, self.all_reduce, shapes)
        if compression is not None:
            self._compressions.append(compression)
        return self._beside(compression or self.all_reduce.mean)

    def break_off(self) -> None:
        """End waits of the training thread on Workbench's own links; called from another thread."""
        if self.links.peers is not None:
            self.links.peers.break_off()

    def forget(self) -> None:
        """Drop the state of compression: the layout of the gradients has changed."""
        self._compressions.clear()

    def _beside(self, task: Mean) -> Mean:
        """Run a task on the thread for messages; CUDA's streams belong to the training thread."""
        if not self._on_cpu:
            return task
        return lambda flat: self._aside.run(lambda: task(flat))

    def own_state(self) -> dict[str, Any]:
        """Return the state that compression keeps on this worker from step to step."""
        kept = [compression.state() for compression in self._compressions]
        return {"compress": self._compress, "kept": kept} if kept else {}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Continue from `own_state` of the same compression; otherwise begin without a state."""
        if state.get("compress") == self._compress:
            for compression, kept in zip(self._compressions, state["kept"], strict=True):
                compression.load_state(kept)

    def close(self) -> None:
        """Close Workbench's own links, which ends every wait for them, and the thread."""
        if self.links.peers is not None:
            self.links.peers.close()
        self._aside.close()

    def reduced_by_ddp(self, size_bytes: float) -> None:
        """Count what DistributedDataParallel has sent: a ring sends 2 (n-1)/n of the gradients."""
        self.links.count(round(2 * (self.links.size - 1) * size_bytes / self.links.size))

    def gathered_by_ddp(self, size_bytes: int) -> None:
        """Count sparse gradients: every worker gathers the rows of all workers, and adds them up.

        In a ring a worker passes on all rows except those of the next worker. Over all workers this
        equals each worker sending its rows to all others, which is counted here.
        """
        self.links.count((self.links.size - 1) * size_bytes)

    def sent_bytes(self) -> float:
        """Return the bytes this worker sent since the last call."""
        if self.all_reduce.name == BACKEND and not self._compress.startswith("topk"):
            self._warn_of_links()
        before, self._counted = self._counted, self.links.sent_bytes
        return self._counted - before

    def _warn_of_links(self) -> None:
        """Report that a fault which was set during the run has no effect."""
        if self.links.rank == 0 and not self._warned and self._context.faults.on_links:
            self._warned = True
            self._context.emit(
                events.Warned(
                    rank=0,
                    text="The bandwidth and latency of --inject have no effect, because the "
                    "backend (such as gloo or NCCL) averages this run's gradients. Workbench "
                    "cannot delay the backend's messages. To simulate links, choose an algorithm, "
                    "for example -o allreduce=ring.",
                )
            )


def size_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def ring_bytes(model: torch.nn.Module, workers: int) -> float:
    """Return the bytes a worker sends per step: a ring all-reduce of all gradients."""
    trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
    return 2 * (workers - 1) / workers * size_bytes(trained)


Mean = Callable[[torch.Tensor], None]
"""Replaces a flat tensor by its mean over the workers."""


class FlatGradients:
    """The gradients of some parameters, one tensor per dtype.

    Args:
        parameters: By name; the same on all workers.
        make_mean: Called with the shapes in each flat tensor; returns the averaging function.
        any_used: Sums flags over the workers, in place; given if a parameter can be unused in the
            loss of some worker.
    """

    def __init__(
        self,
        parameters: Mapping[str, torch.nn.Parameter],
        make_mean: Callable[[list[torch.Size]], Mean],
        any_used: Mean | None = None,
    ) -> None:
        self._any_used = any_used
        self._flats = [
            _Flat(group, make_mean([parameter.shape for parameter in group.values()]))
            for group in by_dtype(parameters).values()
        ]

    @waits_in(ALL_REDUCE)
    def average(self) -> None:
        """Replace every gradient by its mean over the workers.

        Raises:
            FitError: A parameter has no gradient, or a sparse one.
        """
        for flat in self._flats:
            flat.average(self._any_used)


class _Flat:
    """The gradients of one dtype as one tensor."""

    def __init__(self, parameters: dict[str, torch.nn.Parameter], mean: Mean) -> None:
        self._names, self._parameters = list(parameters), list(parameters.values())
        self._mean = mean
        first = self._parameters[0]
        sizes = [parameter.numel() for parameter in self._parameters]
        self._flat = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
        self._views = [
            part.view(parameter.shape)
            for part, parameter in zip(
                torch.split(self._flat, sizes), self._parameters, strict=True
            )
        ]

    def average(self, any_used: Mean | None) -> None:
        """Replace every gradient by its mean over the workers."""
        gradients = [parameter.grad for parameter in self._parameters]
        used = [True] * len(gradients)
        if any_used is not None:
            flags = torch.tensor(
                [float(gradient is not None) for gradient in gradients], device=self._flat.device
            )
            any_used(flags)
            used = (flags > 0).tolist()
        self._fill(gradients, may_lack=any_used is not None)
        self._mean(self._flat)
        for parameter, view, counts in zip(self._parameters, self._views, used, strict=True):
            if counts:
                parameter.grad = view

    def _fill(self, gradients: list[torch.Tensor | None], *, may_lack: bool) -> None:
        new: list[torch.Tensor] = []
        for name, gradient, view in zip(self._names, gradients, self._views, strict=True):
            if gradient is None:
                if not may_lack:
                    raise unused(name)
                view.zero_()
            elif gradient.is_sparse:
                raise _sparse(name)
            elif gradient is not view:
                new.append(gradient)
        if len(new) == len(self._views):
            torch.cat([gradient.reshape(-1) for gradient in new], out=self._flat)
        elif new:
            fresh = {id(gradient) for gradient in new}
            for gradient, view in zip(gradients, self._views, strict=True):
                if id(gradient) in fresh and gradient is not None:
                    view.copy_(gradient)


def by_dtype(
    parameters: Mapping[str, torch.nn.Parameter],
) -> dict[torch.dtype, dict[str, torch.nn.Parameter]]:
    """Return the parameters that are trained, by dtype and name."""
    kinds: dict[torch.dtype, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in parameters.items():
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, {})[name] = parameter
    return kinds


def unused(name: str) -> FitError:
    """Return the error for a parameter without a gradient, if one is needed."""
    return FitError(
        "A parameter was not used for the loss, so it has no gradient to average.",
        seen=name,
        next_step="use the parameter in forward, freeze it (requires_grad=False), or set -o "
        "find_unused_parameters=true",
        code="WB-FIT-110",
    )


def _sparse(name: str) -> FitError:
    return FitError(
        "A sparse gradient cannot be averaged: this run averages all gradients as dense tensors.",
        seen=name,
        allowed="dense gradients: nn.Embedding with sparse=False",
        next_step="use sparse=False, or -o allreduce=backend without -o compress",
        code="WB-FIT-111",
    )
