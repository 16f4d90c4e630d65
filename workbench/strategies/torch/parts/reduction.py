"""Averages the gradients of copies, for any kind of loss.

    loss = model(x) | model.training_step(batch) | head(encode(x)) | ...
    loss.backward() --> gradients --> mean over the workers --> optimizer

Backward is wrapped, not the model: `model.forward` may never be called, and the user keeps the
plain module. Before a backward, DistributedDataParallel is prepared in one of two ways. Either the
loss is passed through it, and the module inside returns the loss unchanged. Or, after the first
backward, its C++ reducer is prepared directly. DistributedDataParallel then averages buckets while
backward runs. Other ways of averaging run right after backward (`parts/averaging.py`).

The set of trained parameters can change during the loop (unfreezing, freezing). Then the wrapper is
made again, after the workers have agreed through the store that they train the same parameters.

Before an optimizer steps, each of its gradients must have been averaged. Gradients that came in
another way (`torch.autograd.grad`, a backward under `no_sync`) are averaged at this point. The
message contains all gradients of these models, so that all workers send the same message.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parallel import DistributedDataParallel

from ....engine.torch import waits
from ....shared import events
from .averaging import Averaging, FlatGradients, size_bytes, unused
from .guard import Guard, TrainedSets, broadcast_model, check_alike

if TYPE_CHECKING:
    from ....engine.context import RunContext

_parameters = inspect.signature(DistributedDataParallel.__init__).parameters
_NO_FORWARD_SYNC: dict[str, Any] = (  # the argument was renamed in PyTorch 2.13
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in _parameters
    else {"broadcast_buffers": False}
)


class Reductions:
    """Averages the gradients of all models that a cell trains.

    Args:
        averaging: The way of averaging, as decided for the first model.
        guard: Compares the models at growing intervals.

    Attributes:
        overlapped: Whether averaging runs during backward.
        nested: Whether a backward was begun within another one (checkpointed activations).
    """

    def __init__(self, context: RunContext, averaging: Averaging, guard: Guard) -> None:
        self._context, self._averaging, self.guard = context, averaging, guard
        self.overlapped = averaging.overlapped
        self._each: list[Reduction] = []
        self._together = True
        self.nested = False
        self._tell: Callable[[], object] | None = None  # called once when backward has begun
        self._alone = False  # whether a backward's gradients must still be averaged
        # parameters that an optimizer trains but no model has
        self._strangers: set[torch.Tensor] = set()
        self._others: dict[tuple[int, ...], FlatGradients] = {}
        self._grown = False  # whether some module was called since the last backward
        self._hooks = [
            registers(self._note_growth)
            for registers in (
                register_module_module_registration_hook,
                register_module_parameter_registration_hook,
            )
        ]

    def _note_growth(self, *unused: Any) -> None:
        self._grown = True

    def add(self, model: torch.nn.Module, *, equal: bool = False) -> Reduction:
        """Average this model's gradients from now on; all workers begin with rank 0's.

        Args:
            equal: Whether they are equal already.
        """
        if self._each:  # the first model was compared when the all-reduce was chosen
            check_alike(model)
        if not equal:
            broadcast_model(model)
        reduction = Reduction(self._averaging, model, self._context.spec.hosts, self._reached)
        self._each.append(reduction)
        self.guard.add(model)
        return reduction

    def _reached(self) -> None:
        tell, self._tell = self._tell, None
        if tell is not None:
            tell()

    def tells_begin(self, timer: Any) -> bool:
        """Let the timer know when the next backward is running; return whether that is possible.

        A permanent hook on a parameter costs a fifth of a hook that is added for each loss. A
        permanent hook is not possible if a parameter can stay without a gradient. It is also not
        possible if a backward begins another one, because the parameter may belong to the inner
        backward.
        """
        active = [each for each in self._each if each.active]
        if not (active and self._together and all(each.tells for each in active)) or self.nested:
            return False
        self._tell = timer.backward_begins
        return True

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Let gradients add up on this worker only."""
        before, self._together = self._together, False
        try:
            yield
        finally:
            self._together = before

    def before_backward(self, tensors: Sequence[Any]) -> list[Any]:
        """Prepare a backward from these tensors; return the tensors from which it must begin."""
        tensors = list(tensors)
        if not self._together:
            return tensors
        if self._grown:
            self._look_again()
        for reduction in self._each:
            tensors = reduction.before_backward(tensors)
        return tensors

    def _look_again(self) -> None:
        for reduction in self._each:
            reduction.look_again()
        self._grown = False

    def after_backward(self, timer: Any) -> None:
        """Average the gradients after backward, unless this is done; then compare if it is time.

        The workers have just communicated, so comparing adds no wait.

        Raises:
            FitError: A parameter took no part in the loss, or the models differ.
        """
        self._alone = not self._together
        self._tell = None
        if self._alone:
            for reduction in self._each:
                reduction.averaged.clear()
            return
        if self.overlapped:
            for reduction in self._each:
                reduction.after_backward()
        else:
            timer.ready()
            with timer.blocked():
                for reduction in self._each:
                    reduction.after_backward()
        if self.guard.due():
            with timer.aside():
                self.guard.check()

    def before_step(self, optimizer: torch.optim.Optimizer, weight: float, timer: Any) -> None:
        """Average the gradients of an optimizer's next step that were not averaged yet.

        Args:
            weight: The factor that this worker's loss would have in a backward.
        """
        averaged = self._each[0].averaged if self._each else {}
        lacking = [p for group in optimizer.param_groups for p in group["params"]
                   if (gradient := p.grad) is not None and averaged.get(p) is not gradient
                   and not self._was_averaged(p)]  # fmt: skip
        if not lacking:
            return
        concerned = self._holders(lacking)
        if concerned:
            timer.ready()
            with timer.blocked():
                self._average(concerned, 1.0 if self._alone else weight)
            self._alone = False

    def _was_averaged(self, parameter: torch.Tensor) -> bool:
        return any(each.averaged.get(parameter) is parameter.grad for each in self._each)

    def _holders(self, parameters: list[Any]) -> list[int]:
        """Return the models that hold some of these parameters.

        Warn about parameters in no model.
        """
        left = set(parameters) - self._strangers
        if self._grown:
            self._look_again()
        concerned = [place for place, each in enumerate(self._each) if left & each.known]
        left = left.difference(*(each.known for each in self._each))
        rank = self._context.spec.rank
        if left and not self._strangers and rank == 0 and dist.get_world_size() > 1:
            shapes = ", ".join(str(tuple(p.shape)) for p in parameters if p in left)
            self._context.emit(
                events.Warned(
                    rank=rank,
                    text="An optimizer updates parameters of a model that was not passed to "
                    "Workbench. So Workbench does not average the gradients of these parameters, "
                    f"and each worker trains them alone. Their shapes: {shapes[:100]}. Pass the "
                    "model of these parameters too: other, other_optimizer = "
                    "wb.prepare(other, other_optimizer).",
                )
            )
        self._strangers |= left
        return concerned

    def _average(self, concerned: list[int], weight: float) -> None:
        parameters = {
            f"{place}.{name}": p
            for place in concerned
            for name, p in self._each[place].parameters.items()
            if p.requires_grad
        }
        key = tuple(id(p) for p in parameters.values())
        if key not in self._others:
            self._others.clear()
            self._others[key] = self._averaging.plain(parameters)
        if weight != 1.0:
            for parameter in parameters.values():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad * weight
        self._others[key].average()
        for place in concerned:
            self._each[place].note_averaged()

    def close(self) -> None:
        """Release the models; wrappers must be removed before the process group."""
        for hook in self._hooks:
            hook.remove()
        for reduction in self._each:
            reduction.close()
        self._each.clear()
        self._others.clear()
        self._strangers.clear()


class Reduction:
    """Averages the gradients of one model.

    Args:
        reached: Called in each backward that reaches the model, before it is averaged.

    Attributes:
        parameters: Those of the model, by name.
        active: Whether the current backward can reach the model; not while the whole model is
            frozen.
        averaged: The gradient of each parameter that was averaged last.
        ddp: The DistributedDataParallel that averages, if one does.
        rewrapped: Called after the wrapper was made again.
    """

    def __init__(
        self,
        averaging: Averaging,
        model: torch.nn.Module,
        hosts: Sequence[str],
        reached: Callable[[], None],
    ) -> None:
        self._averaging, self.model, self._reached = averaging, model, reached
        self._overlapped = averaging.overlapped
        self._find_unused = averaging.find_unused
        self.ddp: DistributedDataParallel | None = None
        self._hook: Any = None
        self._hit = False
        self._flat: FlatGradients | None = None
        self._tables = SparseTables()
        self.averaged: dict[torch.Tensor, torch.Tensor] = {}
        self.rewrapped: Any = lambda: None
        self._before: list[tuple[torch.Tensor, torch.Tensor | None, int]] = []
        self.active = self._begun = False
        self.parameters: dict[str, torch.nn.Parameter] = {}
        self.known: set[torch.Tensor] = set()
        self.look_again()
        self._trained = self._flags()
        self._sets = TrainedSets(hosts, list(self.parameters), self._trained)
        self._wrap()

    def _first_reached(self, gradient: torch.Tensor) -> None:
        self._hit = True
        self._reached()

    @property
    def tells(self) -> bool:
        """Whether `reached` will be called in a backward that reaches the model."""
        return self._hook is not None

    def look_again(self) -> None:
        """Read which parameters the model has now."""
        self.parameters = dict(self.model.named_parameters())
        self._every = list(self.parameters.values())
        self.known = set(self._every)

    def _flags(self) -> tuple[bool, ...]:
        return tuple([p.requires_grad for p in self._every])

    def _wrap(self) -> None:
        wrapped = {n: p for n, p in self.parameters.items() if p.requires_grad}
        if not wrapped:
            return
        self._watched = list(wrapped.values())
        if not self._overlapped:
            self._flat = self._averaging.flat(wrapped)
            return
        self._tables = SparseTables(self.model)
        self._bytes = size_bytes(p for p in self._watched if p not in self._tables)
        if not self._find_unused:
            first: Any = self._watched[0]  # the reducer checks that all other gradients came too
            self._hook = first.register_hook(self._first_reached)
            self._watched = []
        self.ddp = DistributedDataParallel(
            _Passing(self.model),
            bucket_cap_mb=self._averaging.bucket_mb,
            find_unused_parameters=self._find_unused,
            **_NO_FORWARD_SYNC,
            gradient_as_bucket_view=True,
            init_sync=False,  # all workers begin with rank 0's parameters, and stay equal
        )
        if waits.is_leavable() and not self._tables:
            # A lambda: torch would compare annotations, which are strings here.
            self.ddp.register_comm_hook(None, lambda _, bucket: _leavable_mean(bucket))
        self._begun = False

    def before_backward(self, tensors: list[Any]) -> list[Any]:
        """Prepare a backward; return the tensors from which it must begin."""
        flags = self._flags()
        self.active = any(flags)
        if not self.active:  # the whole model is frozen now, so another model trains
            return tensors
        if flags != self._trained:
            self._change(flags)
        else:
            self._sets.begin()
        self._hit = False
        self._before = [
            (p, p.grad, -1 if p.grad is None else p.grad._version) for p in self._watched
        ]
        if self.ddp is None or not any(_needs_gradient(t) for t in tensors):
            return tensors
        if self._begun and not self._find_unused:
            # The same actions as in forward, in a fifth of the time (11 µs, not 59 µs).
            reducer = self.ddp.reducer
            reducer.prepare_for_forward()
            self.ddp._has_rebuilt_buckets |= reducer._rebuild_buckets()
            reducer.prepare_for_backward([])
            return tensors
        self._begun = True
        passing: Any = self.ddp.module
        with passing.on(), torch.enable_grad():
            out = self.ddp(*tensors)
        return list(out)

    def after_backward(self) -> None:
        """Note that gradients were averaged, or average them.

        Raises:
            FitError: A parameter took no part in the loss.
        """
        if not self.active:
            return
        reached = self._hit or any(
            p.grad is not g or (g is not None and g._version != version)
            for p, g, version in self._before
        )
        self._before = []
        if self.ddp is not None:
            self._check_complete()
            if not reached:
                return
            self._averaging.reduced_by_ddp(self._bytes)
            if self._tables:
                self._averaging.gathered_by_ddp(self._tables.taken_bytes())
        elif reached or self._find_unused:  # on another worker, backward may have reached the model
            assert self._flat is not None
            self._flat.average()
        else:
            return
        self.note_averaged()

    def note_averaged(self) -> None:
        """Note which gradients are averages."""
        self.averaged = {p: p.grad for p in self._every if p.grad is not None}

    def _check_complete(self) -> None:
        """Raise FitError if the reducer still waits for some parameter's gradient."""
        assert self.ddp is not None
        try:
            self.ddp.reducer._check_reducer_finalized()
        except RuntimeError as error:
            named = [n for n, p in self.parameters.items() if p.requires_grad and p.grad is None]
            raise unused(
                named[0]
                if named
                else "a parameter that got no gradient in this backward pass; its gradient is "
                "from an earlier backward pass"
            ) from error

    def _change(self, flags: tuple[bool, ...]) -> None:
        """Continue with a changed set of parameters; raises if the workers' sets differ."""
        self._sets.change(list(self.parameters), flags)
        self._trained = flags
        self._unwrap()
        self._averaging.forget()
        self._wrap()
        self.rewrapped()

    def _unwrap(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        if self.ddp is not None:
            # A traceback can still hold the wrapper. It is emptied, so that its reducer is freed
            # now.
            self.ddp.__dict__.clear()
        self.ddp = self._flat = None
        self._tables.close()
        self.averaged.clear()
        self._before = []

    def close(self) -> None:
        """Release the model."""
        self._unwrap()
        self._sets.close()
        self.rewrapped = lambda: None
        self.parameters, self._every, self.known = {}, [], set()


def _leavable_mean(bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Average a bucket of gradients as the reducer does, but in a way that can be interrupted."""
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    return waits.passed_on(dist.all_reduce(buffer, async_op=True))


class SparseTables:
    """Counts the rows of sparse tables in this worker's gradients: the rows that its samples used.

    Args:
        model: The model with the layers made with sparse=True; None: there are none.
    """

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        self._rows: dict[torch.Tensor, list[torch.Tensor]] = {
            parameter: []
            for module in ([] if model is None else model.modules())
            if getattr(module, "sparse", False) is True
            for parameter in module.parameters(recurse=False)
            if parameter.requires_grad
        }
        self._hooks: list[Any] = []
        for parameter, rows in self._rows.items():
            watched: Any = parameter
            self._hooks.append(watched.register_hook(self._noting(rows)))

    def __bool__(self) -> bool:
        return bool(self._rows)

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._rows

    def _noting(self, rows: list[torch.Tensor]) -> Callable[[torch.Tensor], None]:
        def note(gradient: torch.Tensor) -> None:
            if gradient.is_sparse:
                rows.append(gradient._indices()[0])
            else:  # the table is also used in another way
                rows.append(torch.arange(len(gradient)))

        return note

    def taken_bytes(self) -> int:
        """Return the bytes of the rows that were used since the last call, with their indices."""
        total = 0
        for table, rows in self._rows.items():
            if rows:  # several, if gradients of micro-batches were added up
                used = torch.unique(torch.cat(rows)).numel()
                total += used * (8 + table[0].numel() * table.element_size())
                rows.clear()
        return total

    def close(self) -> None:
        """Note nothing more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._rows.clear()


class _Passing(torch.nn.Module):
    """The model inside DistributedDataParallel.

    To prepare a backward, the loss passes through unchanged.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self._passes = False

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Return the input unchanged."""
        self._passes = True
        try:
            yield
        finally:
            self._passes = False

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model, or return the input unchanged."""
        return args if self._passes else self.module(*args, **kwargs)


def _needs_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad
