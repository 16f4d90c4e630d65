"""Records the steps of a user's own training loop, without a change to it.

    for x, y in loader:            the batch is timed here; Stop and Pause are obeyed here
        optimizer.zero_grad()
        loss_fn(model(x), y)       (without a loader a step begins with the first forward)
            .backward()            the loss is kept, and weighted by the share's samples
        optimizer.step()           the step ends here: one record

Several backward calls before one `optimizer.step()` are one step: their losses add up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...engine.checkpoints import Checkpoints
from ...engine.context import RunContext
from ...engine.source import Source
from ...engine.torch_batches import batch_length
from ...errors import RunStopped
from ..base import NAN, Share, StepResult
from .inplace import become, subclass
from .memory import held_bytes
from .shared_loader import SharedLoader
from .timing import make_timer
from .trainer import to_numpy

clock = time.perf_counter


class OwnLoop:
    """One user's loop under way.

    Args:
        source: The loader's data in shares; None where the loop brings its own batches.
        watched: A loader to time as it is, in place.
        sent_bytes: What a worker sends per step, or a function that says it after each step; NaN
            where unknown.
        communicates: Whether backward ends in communication.
        weighted: Whether gradients will be averaged over workers, so that a share's loss counts by
            its samples.
        adds_up: Whether gradients are added up rather than averaged.
        epoch_end: Called on all workers when the loader is exhausted.
        backward_ended: Called after each backward.
        complete: Given what a step measured before it is recorded, to add to it.
    """

    def __init__(
        self,
        context: RunContext,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        source: Source | None,
        *,
        watched: Any = None,
        sent_bytes: float | Callable[[], float] = NAN,
        communicates: bool = False,
        weighted: bool = False,
        adds_up: bool = False,
        epoch_end: Callable[[], object] = lambda: None,
        backward_ended: Callable[[], object] = lambda: None,
        complete: Callable[[StepResult], object] = lambda result: None,
    ) -> None:
        self.context, self.model, self.optimizer = context, model, optimizer
        self.scheduler = self.scaler = None  # the user's, if any
        self.device = torch.device(context.spec.device)
        self.timer = make_timer(context, self.device)
        self.loader = None if source is None else SharedLoader(self, source)
        self.epoch_end = epoch_end
        self._backward_ended, self._complete = backward_ended, complete
        self._sent_bytes, self._communicates, self._weighted = sent_bytes, communicates, weighted
        self._counts = source is not None or watched is not None
        self._workers = 1 if adds_up else context.spec.world_size
        self._weight = 1 / context.spec.world_size if adds_up else 1.0
        self._start = self._paused_s = NAN
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None
        self._clear()
        self._undo: list[Callable[[], None]] = [
            optimizer.register_step_post_hook(self._after_step).remove,
        ]
        if not self._counts:
            hook = _ForwardHook(self)
            self._undo.append(model.register_forward_pre_hook(hook).remove)
        self.checkpoints: Checkpoints | None = None  # where the loop may be gone on with
        self._patch_backward()
        self._patch_scaler()
        if watched is not None:
            self._time_loader(watched)

    def _clear(self) -> None:
        self._under_way = self._fed = False
        self._samples = 0
        self._first_wait_s = self._late_wait_s = 0.0
        self._loss: torch.Tensor | None = None

    def epoch_begins(self) -> None:
        """Begin to count time: what lies between epochs belongs to no step."""
        now = clock()
        if not self._under_way:
            if self._start == self._start:
                self.context.eval_s += now - self._start
            self._start = now

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, timed; StopIteration when there is none.

        Raises:
            RunStopped: Stop was pressed.
        """
        self._begin()
        before = clock()
        batch = next(batches)
        self.timer.spend("data")
        waited_s = clock() - before
        if self._fed:
            self._late_wait_s += waited_s
        else:
            self._first_wait_s += waited_s
            self._feed()
        if isinstance(batch, Share):
            self._samples += batch.samples
            if self._weighted:
                self._weight = batch.samples * self._workers / batch.global_samples
        else:
            self._samples += batch_length(batch)
        return batch

    def _begin(self) -> None:
        """Begin a step, unless one is under way."""
        if self._under_way:
            return
        context, step = self.context, self.context.trained
        if self.checkpoints is not None and self.checkpoints.every:
            self._checkpoint(self.checkpoints)
        if not context.gate.enter(step):
            raise RunStopped
        if context.gate.paused_s != self._paused_s:
            waited = self._paused_s == self._paused_s
            self._paused_s = context.gate.paused_s
            if waited or self._start != self._start:
                self._start = clock()
        context.faults.before_step(step)
        context.step = step
        self._under_way = True

    def _checkpoint(self, checkpoints: Checkpoints) -> None:
        """Save before a step begins: by now what the loop does after a step is done."""
        began = clock()
        if checkpoints.step_done():
            spent_s = clock() - began
            self.context.eval_s += spent_s
            self._start += spent_s

    def position(self) -> dict[str, Any]:
        """Return where in the loader the loop stands."""
        return {} if self.loader is None else self.loader.position()

    def go_on(self, about: Mapping[str, Any]) -> None:
        """Let the loader pass over what was done before the checkpoint."""
        self.context.trained = int(about["step"])
        self.context.step = self.context.trained - 1
        if self.loader is not None:
            self.loader.go_on(int(about["epoch"]), int(about["batch"]))

    def _feed(self) -> None:
        self._fed = True
        self.context.fetch_s = self._first_wait_s
        self.timer.begin()
        self.timer.spend("forward")

    def before_forward(self, args: tuple[Any, ...]) -> None:
        """Begin a step, in a loop whose batches are not seen: count what the model is given."""
        self._begin()
        if not self._fed:
            self._feed()
        self._samples += batch_length(args)

    def _before_backward(self, tensor: torch.Tensor) -> None:
        loss = tensor
        if self._scaled is not None and self._scaled[0] is tensor:
            loss, self._scaled = self._scaled[1], None
        if loss.numel() == 1:
            value = loss.detach().reshape(())
            self._loss = value if self._loss is None else self._loss + value
        if self._communicates and tensor.requires_grad:
            self.timer.watch_backward(tensor)
        else:
            self.timer.spend("backward")

    def _after_step(self, *args: Any) -> None:
        if not self._fed or self._loss is None:
            return
        context = self.context
        sent = self._sent_bytes
        sent_bytes = sent() if callable(sent) else sent
        result = self.timer.finish(self._samples, self._loss, sent_bytes, self._late_wait_s)
        self._complete(result)
        end = clock()
        context.recorder.add(
            context.trained,
            result.samples,
            self._start,
            end,
            data_wait_s=self._first_wait_s + self._late_wait_s if self._counts else NAN,
            compute_s=result.compute_s,
            loss=result.loss,
            ready_s=result.ready_s,
            exposed_s=result.exposed_s,
            wait_s=result.wait_s,
            staleness=result.staleness,
            waited_for=result.waited_for,
            sent_bytes=result.sent_bytes,
            deferred=result.deferred,
        )
        context.trained += 1
        context.train_s += end - self._start
        self._start = end
        self._clear()
        if context.trained == 2:  # when optimizers have their state
            strategy = context.strategy  # none where the loop distributes itself
            held = strategy.memory_bytes() if strategy else held_bytes(self.model, self.optimizer)
            context.log_memory(held)

    def _patch_backward(self) -> None:
        original = torch.Tensor.backward
        loop = self

        def backward(
            tensor: torch.Tensor,
            gradient: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            inputs: Any = None,
        ) -> None:
            if loop._fed:
                loop._before_backward(tensor)
                if loop._weight != 1.0 and gradient is None and tensor.numel() == 1:
                    gradient = torch.full_like(tensor, loop._weight)
            original(tensor, gradient, retain_graph, create_graph, inputs)  # type: ignore[no-untyped-call]
            loop._backward_ended()

        torch.Tensor.backward = backward  # type: ignore[method-assign]
        self._undo.append(lambda: setattr(torch.Tensor, "backward", original))

    def _patch_scaler(self) -> None:
        """Keep the loss from before a GradScaler multiplied it."""
        original = torch.amp.GradScaler.scale
        loop = self

        def scale(scaler: Any, outputs: Any) -> Any:
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                loop._scaled = (scaled, outputs.detach())
            return scaled

        torch.amp.GradScaler.scale = scale  # type: ignore[method-assign,assignment]
        self._undo.append(lambda: setattr(torch.amp.GradScaler, "scale", original))

    def _time_loader(self, loader: Any) -> None:
        cls, loop = type(loader), self

        def iterate(loader: Any) -> Iterator[Any]:
            loop.epoch_begins()
            batches = iter(cls.__iter__(loader))
            while True:
                try:
                    batch = loop.fetch(batches)
                except StopIteration:
                    return
                yield batch

        become(loader, subclass(cls, __iter__=iterate))
        self._undo.append(lambda: become(loader, cls))

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the model's parameters and buffers by name."""
        module = getattr(self.model, "module", self.model)
        return to_numpy(module.state_dict())

    def close(self) -> None:
        """Take every hook out again, and let the strategy go: the user's loader outlives it."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self.epoch_end = self._backward_ended = lambda: None
        self._complete, self._sent_bytes = lambda result: None, NAN


class _ForwardHook:
    """Tells the loop of each training forward; copies and pickles of the model leave it behind."""

    def __init__(self, loop: OwnLoop) -> None:
        self._loop = loop

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._loop.before_forward(args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing: what stands for the hook in a copy."""
