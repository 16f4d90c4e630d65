"""Averages gradients after backward, all of them in one message.

DistributedDataParallel reduces buckets while backward still runs, through the backend's all-reduce.
What wants the gradients as a whole (an all-reduce of our own, compression) comes here instead:

    forward | backward . . . . . | own work done | mean of all gradients | optimizer
                                 ready_s                                 reduced

The gradients are copied into one flat tensor per dtype, the tensor is averaged over the workers,
and each parameter's `.grad` becomes a view of it. No Python runs per bucket, and none in backward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ...engine.marks import ALL_REDUCE, waits_in
from ...errors import FitError

Mean = Callable[[torch.Tensor], None]
"""Replaces a flat tensor by its mean over the workers."""


class FlatGradients:
    """The gradients of some parameters, one tensor per dtype.

    Args:
        parameters: By name; the same on all workers.
        make_mean: Called with the shapes in each flat tensor; gives what averages it.
        any_used: Sums flags over the workers, in place; given where parameters may take no part
            in the loss of some worker.
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
    """Return the error for a parameter that no gradient reached, where one is needed."""
    return FitError(
        "A parameter took no part in the loss, so there is no gradient to average.",
        seen=name,
        next_step="use it, freeze it (requires_grad=False), or set -o find_unused_parameters=true",
        code="WB-FIT-110",
    )


def _sparse(name: str) -> FitError:
    return FitError(
        "A sparse gradient cannot be averaged as part of one flat tensor.",
        seen=name,
        allowed="dense gradients (Embedding with sparse=False)",
        next_step="use -o allreduce=backend without compression",
        code="WB-FIT-111",
    )
