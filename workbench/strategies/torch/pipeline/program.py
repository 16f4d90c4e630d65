"""The computation of a pipeline's stages, and how the loss follows from it.

The loss can be computed from the model's output, by `loss` or by a step function that calls the
model once. Then the stages compute the output, and the last worker computes the loss:

    loss(model(x), y)                       stages: x -> output          then: loss(output, y)
    step_fn: m(**batch).logits, F.mse(..)   stages: **batch -> output    then: step_fn(stand-in)

The stand-in gives the step function the output that the stages have computed. All other step
functions are traced together with the model. Examples: the model computes the loss itself, is
called twice, or its methods are called. Then the targets pass through the stages, and the last
stage ends with the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ....engine.torch.data import map_batch, tensors_of
from ....engine.torch.support import evaluating
from ....errors import FitError

if TYPE_CHECKING:
    from ....engine.contract import Job


@dataclass(frozen=True)
class Program:
    """The computation of all stages together.

    Attributes:
        call: `call(model, data)` returns the model's output, or the loss if the model computes it.
        data: A microbatch of its arguments; the structure stays, the tensors change.
        places: The places of these tensors in a batch.
        loss: `loss(output, target)`; None if the stages compute the loss.
        target: The part of a batch that the loss needs in addition to the output.
    """

    call: Callable[[torch.nn.Module, Any], Any]
    data: Any
    places: Sequence[int]
    loss: Callable[[Any, Any], torch.Tensor] | None
    target: Callable[[Any], Any]

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The input of the first stage."""
        return tuple(tensors_of(self.data))

    @property
    def scored(self) -> bool:
        """Whether the stages compute the loss."""
        return self.loss is None

    def compared(self, batch: Any) -> list[torch.Tensor]:
        """Return the tensors that only the loss needs; all that it needs if the model gets them."""
        given = {id(tensor) for tensor in self._given(batch)}
        needed = list(tensors_of(self.target(batch)))
        return [tensor for tensor in needed if id(tensor) not in given] or needed

    def given(self, batch: Any, samples: int) -> list[torch.Tensor]:
        """Return the first stage's input for a batch.

        Raises:
            FitError: The input cannot be divided into microbatches.
        """
        chosen = self._given(batch)
        for tensor in chosen:
            if not tensor.dim() or len(tensor) != samples:
                raise FitError(
                    "Workbench divides each input tensor of the model into microbatches. So the "
                    "first dimension of each input tensor must be the number of samples.",
                    seen=f"shape {tuple(tensor.shape)} in a batch of {samples} samples",
                    next_step="if a tensor is the same for all samples, store it in the model "
                    "as a buffer",
                    code="WB-FIT-145",
                )
        return chosen

    def _given(self, batch: Any) -> list[torch.Tensor]:
        tensors = list(tensors_of(batch))
        return [tensors[place] for place in self.places]


@dataclass(frozen=True)
class Output:
    """The form of a model's output: the last stage returns its tensors, the rest is constant."""

    form: Any = None
    places: tuple[int, ...] = (0,)

    def restore(self, value: Any) -> Any:
        """Return the model's output, from the tensors of the last stage."""
        if self.form is None:
            return value
        parts = value if isinstance(value, tuple) else (value,)
        left = iter(self.places)
        return map_batch(lambda _: parts[next(left)], self.form)


def program_of(job: Job, batch: Any) -> Program:
    """Return the computation of the stages.

    Args:
        batch: A microbatch, on the CPU.

    Raises:
        FitError: The batch contains no tensor.
    """
    data = batch if job.step_fn is not None else batch[0]
    if next(tensors_of(data), None) is None:
        raise FitError(
            "The input of a pipeline must contain a tensor, because Workbench divides tensors into "
            "microbatches.",
            seen=type(data).__name__,
            next_step="make the data set return tensors, or use another strategy",
            code="WB-FIT-146",
        )
    every = range(len(list(tensors_of(data))))
    if job.step_fn is None:
        return Program(lambda model, x: model(x), data, every, job.loss, lambda b: b[1])
    called = _called_once(job.model, job.step_fn, batch)
    if called is None:
        return Program(job.step_fn, batch, every, None, lambda b: None)
    (args, keywords), places = called

    def loss(output: Any, batch: Any) -> torch.Tensor:
        return job.step_fn(StandIn(output), batch)  # type: ignore[no-any-return]

    if len(args) == 1 and not keywords:
        return Program(lambda model, x: model(x), args[0], places, loss, lambda b: b)
    return Program(
        lambda model, given: model(*given[0], **given[1]), (args, keywords), places, loss,
        lambda b: b,
    )  # fmt: skip


class StandIn:
    """Replaces the model in a step function: returns the output that the stages have computed."""

    def __init__(self, output: Any) -> None:
        self._output = output

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Return the output."""
        return self._output


class _OtherUseError(Exception):
    """Raised if a step function does more with the model than calling it once."""


class _Watched:
    """The model in a step function whose loss must be computed from the output."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.output: Any = None

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        self.calls.append((args, keywords))
        self.output = self._model(*args, **keywords)
        return self.output

    def __getattr__(self, name: str) -> Any:
        raise _OtherUseError(name)


def _called_once(
    model: torch.nn.Module, step_fn: Callable[..., Any], batch: Any
) -> tuple[tuple[tuple[Any, ...], dict[str, Any]], list[int]] | None:
    """Return the model's arguments, and their places in the batch.

    Returns:
        None unless the step function calls the model once, with unchanged tensors of the batch, and
        computes the loss from an output with one row per sample.
    """
    device = next(model.parameters()).device
    own = list(tensors_of(batch))
    batch = map_batch(lambda t: t.to(device), batch)
    watched = _Watched(model)
    try:
        with torch.random.fork_rng(devices=[]), evaluating(model), torch.no_grad():
            step_fn(watched, batch)
    except Exception:
        return None  # tracing will report an error, if there is one
    if len(watched.calls) != 1:
        return None
    known = {id(tensor): place for place, tensor in enumerate(tensors_of(batch))}
    given, output = list(tensors_of(watched.calls[0])), list(tensors_of(watched.output))
    samples = next(len(tensor) for tensor in tensors_of(batch) if tensor.dim())
    rows = all(tensor.dim() and len(tensor) == samples for tensor in output)
    if not given or not output or not rows or any(id(tensor) not in known for tensor in given):
        return None
    places = [known[id(tensor)] for tensor in given]
    left = iter(places)
    args, keywords = map_batch(lambda _: own[next(left)], watched.calls[0])
    return (args, keywords), places
