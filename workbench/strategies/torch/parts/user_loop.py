"""Records the steps of a user's own training loop; the loop does not change.

    for x, y in loader:            the batch is timed here; Stop and Pause are obeyed here
        optimizer.zero_grad()
        loss_fn(model(x), y)       (without a loader a step begins with the first forward)
            .backward()            the loss is kept, and weighted by the share's samples
        optimizer.step()           the step ends here: one record

Several backward calls before one `optimizer.step()` are one step: their losses add up. A step ends
with any optimizer that trains the model, so a loop can continue with a new optimizer. If several
models are prepared in one cell, the first one's optimizer ends the steps.

A loop that does its own communication is recorded unchanged (`wb.watch`).
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ....engine.contract import NAN, Share
from ....engine.torch.data import batch_length, tensors_of
from ....errors import RunStopped
from .loader import SharedLoader, Standing, become, give_no_sync, subclass
from .loop_healing import LoopHealing
from .replica import held_bytes, to_numpy
from .timing import make_timer

if TYPE_CHECKING:
    from ....engine.checkpoints.checkpoints import Checkpoints
    from ....engine.context import RunContext
    from ....engine.contract import Strategy
    from ....engine.telemetry.recorder import StepResult
    from ....engine.torch.horovod.gradients import Gradients
    from ....engine.training.shares import Source
    from .guard import Guard
    from .reduction import Reductions

clock = time.perf_counter


class OwnLoop:
    """One user's loop.

    Attributes:
        batches: The number of batches in the current step; 0: there is no current step.
        standing: The loop's position in its loader.
        healing: Lets the loop continue with other workers, if this was requested.

    Args:
        source: The loader's data in shares; None if the loop makes its own batches.
        watched: A loader that is timed but not changed.
        sent_bytes: The bytes a worker sends per step, or a function that returns them after each
            step; NaN if unknown.
        communicates: Whether backward ends in communication.
        reductions: Averages gradients, if backward should end with an average.
        guard: Compares the replicas after backward, if the loop averages by itself.
        weighted: Whether gradients will be averaged over workers, so that a share's loss counts by
            its samples.
        adds_up: Whether gradients are added up instead of averaged.
        epoch_end: Called on all workers when the loader is exhausted.
        backward_ended: Called after each backward.
        stepped: Called after each step of an optimizer that trains the model.
        exchanged: Called before a step of such an optimizer, if it is not the prepared one.
        scaled: Called when a loss is scaled.
        complete: Called with a step's measurements before they are recorded, to add to them.
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
        reductions: Reductions | None = None,
        guard: Guard | None = None,
        weighted: bool = False,
        adds_up: bool = False,
        epoch_end: Callable[[], object] = lambda: None,
        backward_ended: Callable[[], object] = lambda: None,
        stepped: Callable[[], object] = lambda: None,
        exchanged: Callable[[], object] = lambda: None,
        scaled: Callable[[], object] = lambda: None,
        complete: Callable[[StepResult], object] = lambda result: None,
    ) -> None:
        self.context, self.model, self.optimizer = context, model, optimizer
        self.scheduler = self.scaler = None  # the user's, if any
        self.device = torch.device(context.spec.device)
        self.timer = make_timer(context, self.device)
        self.standing = Standing()
        self.loader = None if source is None else SharedLoader(self, source)
        self._source = source
        self.healing: LoopHealing | None = None
        self._epoch_end = epoch_end
        self._backward_ended, self._complete = backward_ended, complete
        self._stepped, self._exchanged, self._scales = stepped, exchanged, scaled
        self._stepping = 0  # steps that optimizers began
        self._reductions, self._guard = reductions, guard
        overlapped = reductions is not None and reductions.overlapped
        self._sent_bytes, self._weighted = sent_bytes, weighted
        self._communicates = communicates or overlapped
        self.others: list[torch.nn.Module] = []
        self.other_optimizers: list[torch.optim.Optimizer] = []
        self._in_backward = False
        self.optimizers_under_way: list[torch.optim.Optimizer] = []
        self._trains: weakref.WeakKeyDictionary[torch.optim.Optimizer, bool] = (
            weakref.WeakKeyDictionary()
        )
        self._counts = source is not None or watched is not None
        self._workers = 1 if adds_up else context.spec.world_size
        self._weight = 1 / context.spec.world_size if adds_up else 1.0
        self._start = self._paused_s = NAN
        self._scaled: tuple[torch.Tensor, torch.Tensor] | None = None
        self._clear()
        self._undo: list[Callable[[], None]] = [
            register_optimizer_step_pre_hook(self._before_step).remove,
            register_optimizer_step_post_hook(self._after_step).remove,
        ]
        if watched is None:
            self._undo.append(give_no_sync(model, self._together))
        self._shape: tuple[int, ...] = ()
        if not self._counts:
            self._count_in(model)
        self.checkpoints: Checkpoints | None = None  # the state from which the loop can continue
        self._patch_backward()
        self._patch_scaler()
        if watched is not None:
            self._time_loader(watched)

    def _together(self) -> contextlib.AbstractContextManager[None]:
        """Return the context in which gradients add up only on this worker."""
        reductions = self._reductions
        return contextlib.nullcontext() if reductions is None else reductions.no_sync()

    def average_by(self, reductions: Reductions, sent_bytes: Callable[[], float]) -> None:
        """Let backward end in the average among the present workers."""
        self._reductions, self._sent_bytes = reductions, sent_bytes
        self._communicates = self._communicates or reductions.overlapped
        self._workers = self.context.spec.world_size

    def _clear(self) -> None:
        self._under_way = self._fed = False
        self.batches = 0
        self._samples = 0
        self._first_wait_s = self._late_wait_s = 0.0
        self._loss: torch.Tensor | None = None

    def epoch_begins(self) -> None:
        """Start the clock of the next step, because time between epochs belongs to no step."""
        now = clock()
        if not self._under_way:
            if self._start == self._start:
                self.context.eval_s += now - self._start
            self._start = now

    def pass_begins(self) -> None:
        """Begin another pass, unless the loop resumes later."""
        if self.healing is not None:
            self.healing.enter()

    def next_batch(self) -> None:
        """Continue with other workers, if the set has changed."""
        if self.healing is not None:
            self.healing.next_batch()

    def is_elsewhere(self) -> None:
        """Note that the loop resumes after this pass."""
        if self.healing is not None and self.healing.is_coming:
            self.healing.skip()

    def restore(self) -> None:
        """Set the state to the state at the place where the loop resumes."""
        if self.healing is not None and self.healing.is_coming:
            self.healing.arrive()
        elif self.checkpoints is not None:
            self.checkpoints.restore()

    def epoch_end(self) -> None:
        """Do the common actions of all workers at the end of the loader."""
        if self.healing is None:
            self._epoch_end()
        else:
            self.healing.end_epoch(self._epoch_end)

    def so_far(self) -> tuple[int, float, float]:
        """Return samples and loss of the current step, and when it began."""
        loss = NAN if self._loss is None else float(self._loss)
        return self._samples, loss, self._start

    def abandon(self) -> None:
        """Drop the current step; its time belongs to no step."""
        self._clear()
        self._start = clock()

    def epoch_ends(self) -> None:
        """Wait for the device's remaining work, which is still part of training."""
        if self._under_way:
            return
        began = clock()
        self.context.settle()
        spent_s = clock() - began
        self.context.train_s += spent_s
        self._start += spent_s

    def fetch(self, batches: Iterator[Any]) -> Any:
        """Return the next batch, timed; StopIteration when there is none.

        Raises:
            RunStopped: Stop was pressed.
        """
        self._begin()
        before = clock()
        batch = next(batches)
        self.batches += 1
        if self.batches == 2 and self.healing is not None:
            self.healing.several_batches()
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
        """Begin a step, unless a step is already running."""
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
        if self.healing is not None:
            self.healing.step_begins()

    def _checkpoint(self, checkpoints: Checkpoints) -> None:
        """Save before a step begins: now the loop's actions after the last step are done."""
        began = clock()
        if checkpoints.step_done():
            spent_s = clock() - began
            self.context.eval_s += spent_s
            self._start += spent_s

    def position(self) -> dict[str, Any]:
        """Return the loop's position in the loader."""
        return {} if self.loader is None else self.loader.position(self.batches)

    def go_on(self, about: Mapping[str, Any]) -> None:
        """Let the loader skip the batches before the checkpoint."""
        self.context.trained = int(about["step"])
        self.context.step = self.context.trained - 1
        if self.loader is not None:
            reads = [int(times) for times in about.get("reads", ())]
            self.loader.go_on(int(about["epoch"]), int(about["batch"]), reads)

    def _feed(self) -> None:
        self._fed = True
        self.context.fetch_s = self._first_wait_s
        self.timer.begin()
        self.timer.spend("forward")

    def _count_in(self, model: torch.nn.Module) -> None:
        """Count samples at the model's input, if the loop's batches are not seen."""
        self._undo.append(model.register_forward_pre_hook(_Hook(self.before_forward)).remove)
        for module in model.modules():
            if getattr(module, "batch_first", None) is False and module is not model:
                hook = _Hook(self.before_sequence)
                self._undo.append(module.register_forward_pre_hook(hook).remove)
                return

    def before_forward(self, args: tuple[Any, ...]) -> None:
        """Begin a step: count the samples in the model's input."""
        self._begin()
        if not self._fed:
            self._feed()
        self._samples += batch_length(args)
        self._shape = next((tuple(t.shape) for t in tensors_of(args) if t.dim()), ())

    def before_sequence(self, args: tuple[Any, ...]) -> None:
        """Correct the count if samples are the second dimension, as in a recurrent layer."""
        shape, self._shape = self._shape, ()
        seen = next((t.shape for t in tensors_of(args)), ())
        if len(shape) > 1 and len(seen) == 3 and shape[:2] == seen[:2]:
            self._samples += shape[1] - shape[0]

    def hear_of_waits(self, gradients: Gradients) -> None:
        """Accept that the optimizer waits for other ranks, because it averages itself."""
        gradients.timer, self._sent_bytes = self.timer, gradients.sent
        self._undo.append(gradients.let_go)

    def wrap_another_loop(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Add another model to the loop; its optimizer does not end steps."""
        self.others.append(model)
        self.other_optimizers.append(optimizer)
        self._undo.append(give_no_sync(model, self._together))

    def _before_backward(self, tensors: list[Any]) -> tuple[list[Any], list[Any]]:
        """Note the loss; return the tensors for backward, and the hooks to remove afterwards."""
        hooks: list[Any] = []
        reductions, begins = self._reductions, tensors
        if reductions is not None:
            begins = reductions.before_backward(tensors)
        if self._fed:
            self._note_loss(tensors)
            first = next((t for t in tensors if _needs_gradient(t)), None)
            if not self._communicates or first is None:
                self.timer.spend("backward")
            elif reductions is None or not reductions.tells_begin(self.timer):
                hooks.append(self.timer.watch_backward(first))
        return begins, hooks

    def _note_loss(self, tensors: list[Any]) -> None:
        for tensor in tensors:
            loss = tensor
            if self._scaled is not None and self._scaled[0] is tensor:
                loss, self._scaled = self._scaled[1], None
            if isinstance(loss, torch.Tensor) and loss.numel() == 1:
                value = loss.detach()
                if self._loss is None:
                    self._loss = value
                else:
                    self._loss = self._loss.reshape(()) + value.reshape(())

    def _weighted_gradients(self, tensors: list[Any], gradients: list[Any]) -> list[Any]:
        """Return the tensors from which backward begins, so that a share counts by its samples."""
        if self._weight == 1.0:
            return gradients
        weighted = []
        for tensor, gradient in zip(tensors, gradients, strict=True):
            if gradient is not None:
                gradient = gradient * self._weight
            elif isinstance(tensor, torch.Tensor) and tensor.numel() == 1:
                gradient = torch.full_like(tensor, self._weight)
            weighted.append(gradient)
        return weighted

    def _ends_steps(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether an optimizer trains the loop's first model."""
        known = self._trains.get(optimizer)
        if known is None:
            ours = {id(p) for p in self.model.parameters()}
            held = (p for group in optimizer.param_groups for p in group["params"])
            known = optimizer is self.optimizer or any(id(p) in ours for p in held)
            self._trains[optimizer] = known
        return known

    def _before_step(self, optimizer: Any, *unused: Any) -> None:
        self._stepping += 1
        under_way = self.optimizers_under_way
        if optimizer in under_way:  # its last step has failed
            del under_way[under_way.index(optimizer) :]
        under_way.append(optimizer)
        if optimizer is not self.optimizer and self._ends_steps(optimizer):
            self._exchanged()
        if self.healing is not None and self.healing.pass_over(optimizer):
            return
        if self._reductions is None:
            return
        try:
            self._reductions.before_step(optimizer, self._weight, self.timer)
        except Exception as error:
            if self.healing is None or not self.healing.broke_off(error):
                raise

    def _after_step(self, optimizer: Any, *unused: Any) -> None:
        under_way = self.optimizers_under_way
        if optimizer in under_way:
            del under_way[under_way.index(optimizer) :]
        if under_way:  # a step inside another optimizer's step
            return
        if optimizer is not self.optimizer and not self._ends_steps(optimizer):  # of another model
            return
        self._stepped()
        if not self._fed:
            return
        if self._loss is not None:
            self._record(self._loss, seen=True)
        elif any(p.grad is not None for group in optimizer.param_groups for p in group["params"]):
            self._record(torch.tensor(NAN), seen=False)  # gradients came without a backward

    def _record(self, loss: torch.Tensor, *, seen: bool) -> None:
        context = self.context
        sent = self._sent_bytes
        sent_bytes = sent() if callable(sent) else sent
        result = self.timer.finish(self._samples, loss, sent_bytes, self._late_wait_s)
        self._complete(result)
        end = clock()
        context.recorder.add_step(
            context.trained,
            result if seen else replace(result, has_loss=False),
            self._start + result.aside_s,
            end,
            data_wait_s=self._first_wait_s + self._late_wait_s if self._counts else NAN,
        )
        context.trained += 1
        context.train_s += end - self._start - result.aside_s
        self._start = end
        self._clear()
        if context.trained == 2:  # when optimizers have their state
            strategy = context.strategy  # none if the loop does its own communication
            held = strategy.memory_bytes() if strategy else held_bytes(self.model, self.optimizer)
            context.log_memory(held)

    def _patch_backward(self) -> None:
        original = torch.autograd.backward  # that of tensors calls it
        loop = self

        @functools.wraps(original)
        def backward(
            tensors: Any,
            grad_tensors: Any = None,
            retain_graph: Any = None,
            create_graph: bool = False,
            grad_variables: Any = None,
            inputs: Any = None,
        ) -> None:
            options = retain_graph, create_graph
            if loop._in_backward:  # a backward inside another (checkpointed activations)
                if loop._reductions is not None:
                    loop._reductions.nested = True
                original(tensors, grad_tensors, *options, grad_variables, inputs)
                return
            healing = loop.healing
            if healing is not None and healing.emptied:
                healing.empty()
                return
            begun = _listed(tensors)
            gradients = _listed(grad_tensors if grad_variables is None else grad_variables)
            gradients = gradients or [None] * len(begun)
            hooks: list[Any] = []
            loop._in_backward = True
            try:
                if len(gradients) == len(begun):  # else the original says so
                    gradients = loop._weighted_gradients(begun, gradients)
                begun, hooks = loop._before_backward(begun)
                original(begun, gradients, *options, None, inputs)
                if loop._reductions is not None:
                    loop._reductions.after_backward(loop.timer)
                if loop._guard is not None:
                    with loop.timer.aside():
                        loop._guard.tick()
            except Exception as error:
                if healing is None or not healing.broke_off(error):
                    raise
                return
            finally:
                loop._in_backward = False
                for hook in hooks:
                    hook.remove()
            loop.context.backwards += 1
            loop._backward_ended()

        torch.autograd.backward = backward
        self._undo.append(lambda: setattr(torch.autograd, "backward", original))

    def _patch_scaler(self) -> None:
        """Keep the loss as it was before a GradScaler multiplied it.

        Notice the steps that it skips.

        A skipped step ends like any other and has its own row. So if workers meet after their
        steps, a worker that skips a step still takes part.
        """
        kind: Any = torch.amp.GradScaler
        original, original_step = kind.scale, kind.step
        loop = self

        @functools.wraps(original)
        def scale(scaler: Any, outputs: Any) -> Any:
            if scaler.is_enabled():
                loop._scales()
            scaled = original(scaler, outputs)
            if isinstance(outputs, torch.Tensor):
                loop._scaled = (scaled, outputs.detach())
            return scaled

        @functools.wraps(original_step)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            before = loop._stepping
            result = original_step(scaler, optimizer, *args, **kwargs)
            if loop._stepping == before:
                loop._after_step(optimizer)
            return result

        kind.scale, kind.step = scale, step
        self._undo.append(lambda: setattr(kind, "scale", original))
        self._undo.append(lambda: setattr(kind, "step", original_step))

    def _time_loader(self, loader: Any) -> None:
        cls, loop = type(loader), self

        def iterate(loader: Any) -> Iterator[Any]:
            loop.epoch_begins()
            batches = iter(cls.__iter__(loader))
            while True:
                try:
                    batch = loop.fetch(batches)
                except StopIteration:
                    loop.epoch_ends()
                    return
                yield batch

        become(loader, subclass(cls, __iter__=iterate))
        self._undo.append(lambda: become(loader, cls))

    def heal(
        self, strategy: Strategy, kept: tuple[Any, ...], regrouping: Callable[[Any], Any]
    ) -> None:
        """Let the loop continue with other workers when some die or join.

        Args:
            kept: The objects in `keep=`.
            regrouping: Makes the `Regrouping` of a training.
        """
        assert self.checkpoints is not None, "internal error: heal came before go_on"
        self.healing = LoopHealing(self, strategy, self._source, self.checkpoints, kept, regrouping)
        self._undo.append(self.healing.close)

    def weights(self) -> dict[str, NDArray[np.generic]]:
        """Return the model's parameters and buffers by name."""
        module = getattr(self.model, "module", self.model)
        return to_numpy(module.state_dict())

    def close(self) -> None:
        """Remove every hook, and release the strategy, because the user's loader exists longer."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._epoch_end = self._backward_ended = lambda: None
        self._stepped = self._exchanged = self._scales = lambda: None
        self._complete, self._sent_bytes = lambda result: None, NAN
        self._reductions = self._guard = self.healing = None
        self.others.clear()
        self.other_optimizers.clear()
        self.optimizers_under_way.clear()


def _listed(value: Any) -> list[Any]:
    """Return one tensor or several as a list; backward takes both."""
    if value is None:
        return []
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


class _Hook:
    """Reports each training forward to the loop; copies and pickles of the model do not have it."""

    def __init__(self, tell: Callable[[tuple[Any, ...]], None]) -> None:
        self._tell = tell

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if torch.is_grad_enabled():
            self._tell(args)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Callable[..., None]:
    return _nothing


def _nothing(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
    """Do nothing; replaces the hook in a copy."""
