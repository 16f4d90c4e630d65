"""Averages gradients after backward, all of them in one message.

DistributedDataParallel reduces buckets while backward still runs, through the backend's all-reduce.
What wants the gradients as a whole (an all-reduce of our own, compression) comes here instead:

    forward | backward . . . . . | own work done | mean of all gradients | optimizer
                                 ready_s                                 reduced

The gradients are copied into one flat tensor per dtype, the tensor is averaged over the workers,
and each parameter's `.grad` becomes a view of it. The average is taken by a final callback of the
autograd engine, which is queued when the gradient reaches the model's output: after the loss's
hook, where the timer queues its own callback, so that what counts as ready is this worker's own
work. No Python runs per parameter or bucket.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from ...engine.marks import ALL_REDUCE, waits_in
from ...errors import FitError

_engine: Any = torch.autograd.Variable._execution_engine

Mean = Callable[[torch.Tensor], None]
"""Replaces a flat tensor by its mean over the workers."""


class FlatGradients(torch.nn.Module):
    """Stands around a module as DistributedDataParallel does.

    Args:
        module: What a batch goes through.
        make_mean: Called with the shapes in each flat tensor; gives what averages it.
        any_used: Sums flags over the workers, in place; given where parameters may take no part
            in the loss of some worker.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        make_mean: Callable[[list[torch.Size]], Mean],
        any_used: Mean | None = None,
    ) -> None:
        super().__init__()
        self.module, self._any_used = module, any_used
        self._together, self._queued = True, False
        self._flats = [
            _Flat(group, make_mean([parameter.shape for parameter in group.values()]))
            for group in by_dtype(module).values()
        ]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Go through the module; backward from the output will end in the mean."""
        output = self.module(*args, **kwargs)
        if self._together and torch.is_grad_enabled():
            output = self._watched(output)
        return output

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _watched(self, output: Any) -> Any:
        self._queued = False  # also after a backward that failed
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:  # nearly always
            output.grad_fn.register_prehook(self._backward_begins)
            return output
        output = tree_map(_with_node, output)
        tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)]
        nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
        for node in nodes:
            node.register_prehook(self._backward_begins)
        if not nodes:  # an output of an unknown kind: the first parameter's gradient will tell
            parameters = [p for p in self.module.parameters() if p.requires_grad]
            torch.autograd.graph.register_multi_grad_hook(
                parameters, self._backward_begins, mode="any"
            )
        return output

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this worker alone."""
        before, self._together = self._together, False
        try:
            yield
        finally:
            self._together = before

    def _backward_begins(self, gradients: Any) -> None:
        if not self._queued:
            self._queued = True
            _engine.queue_callback(self._average)

    @waits_in(ALL_REDUCE)
    def _average(self) -> None:
        self._queued = False
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
                    raise _unused(name)
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


def by_dtype(module: torch.nn.Module) -> dict[torch.dtype, dict[str, torch.nn.Parameter]]:
    """Return the parameters that are trained, by dtype and name."""
    kinds: dict[torch.dtype, dict[str, torch.nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            kinds.setdefault(parameter.dtype, {})[name.removeprefix("module.")] = parameter
    return kinds


def _with_node(value: Any) -> Any:
    """Return a tensor that backward passes through: a model may return a parameter as it is."""
    if isinstance(value, torch.Tensor) and value.requires_grad and value.grad_fn is None:
        return value.view_as(value)
    return value


def _unused(name: str) -> FitError:
    return FitError(
        "A parameter took no part in the loss, so there is no gradient to average.",
        seen=name,
        next_step="use it, freeze it (requires_grad=False), or set -o find_unused_parameters=true",
    )


def _sparse(name: str) -> FitError:
    return FitError(
        "A sparse gradient cannot be averaged as part of one flat tensor.",
        seen=name,
        allowed="dense gradients (Embedding with sparse=False)",
        next_step="use -o allreduce=backend without compression",
    )
