"""A user's own loop continues with other workers when one dies or joins.

The workers do what `engine/training/regrouping.py` describes. `wb.fit` can repeat a step, but a
loop is the user's, and its lines cannot run twice. So an interrupted step is emptied: its
`optimizer.step()` and the steps of the objects in `keep=` change nothing. The loader then gives the
same global batch once more, in the present shares (or the next batch, if another worker has
completed the step).

    x, y = batch 7     backward fails, the workers regroup     optimizer.step() changes nothing
    x, y = batch 7     backward                                  optimizer.step()

A new engine runs the cell from its beginning. It joins when it first requests a batch from the
loader. Then it takes over another worker's state and position. Past epochs are empty for it. The
loop's lines between them run without a process group, so that the user's collectives do not mix
with the others' all-reduce. When it reaches this position, its state is set again, because that
state already contains the actions between epochs (a step of a scheduler). After that it reports
that it has joined. If it fails before that, the others continue without it.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist

from ....engine.checkpoints.checkpoints import format_of
from ....engine.telemetry.recorder import StepResult
from .guard import KeptBuffers
from .loader import become, subclass

if TYPE_CHECKING:
    from ....engine.checkpoints.checkpoints import Checkpoints
    from ....engine.context import RunContext
    from ....engine.contract import Strategy
    from ....engine.training.regrouping import Regrouping
    from ....engine.training.shares import Source
    from .loader import Standing

clock = time.perf_counter


class Loop(Protocol):
    """The loop (`user_loop.OwnLoop`).

    Attributes:
        standing: Its position in its loader.
        optimizers_under_way: Optimizers whose step is running now.
    """

    context: RunContext
    standing: Standing
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    others: list[torch.nn.Module]
    other_optimizers: list[torch.optim.Optimizer]
    optimizers_under_way: list[torch.optim.Optimizer]

    @property
    def batches(self) -> int:
        """Batches of the current step; 0: there is no step."""

    def so_far(self) -> tuple[int, float, float]:
        """Return samples and loss of the current step, and when it began."""

    def abandon(self) -> None:
        """Discard the current step."""


class LoopHealing:
    """The training of a user's own loop, as `regrouping` uses it.

    Args:
        source: The loader's data; None if the loop makes its own batches, which no other worker can
            continue.
        kept: The objects in the loop's `keep=`.

    Attributes:
        evaluated: Passes over the loader that all workers have ended.
        emptied: Whether the interrupted step has not yet ended in the user's lines.
    """

    base = 0
    arrives_later = True

    def __init__(
        self,
        loop: Loop,
        strategy: Strategy,
        source: Source | None,
        checkpoints: Checkpoints,
        kept: tuple[Any, ...],
        regrouping: Callable[[LoopHealing], Regrouping],
    ) -> None:
        self.context, self.checkpoints, self.source = loop.context, checkpoints, source
        self.evaluated = 0
        self.emptied = False
        self._loop, self._strategy, self._kept = loop, strategy, kept
        self._standing = loop.standing
        self._regrouping = regrouping(self)
        self._buffers = KeptBuffers(())
        self._begun = False
        self._place: Mapping[str, Any] = {}  # the position that a new worker must reach
        self._arrival: tuple[dict[str, Any], Any] | None = None
        self._outside = contextlib.ExitStack()  # the hidden process group, until it is reached
        self._undo = contextlib.ExitStack()
        if source is None:
            self._begin()

    def why_not(self) -> str:
        """Return why the loop cannot continue with others; empty if it can."""
        loop = self._loop
        if self.source is None:
            return "wb.prepare was called without a loader, so the loop makes its own batches"
        kept = {id(thing) for thing in self._kept}
        pairs = (("model", loop.others), ("optimizer", loop.other_optimizers))
        for kind, things in pairs:
            if missing := [thing for thing in things if id(thing) not in kept]:
                return (
                    f"the loop uses a second {kind} ({type(missing[0]).__name__}) that is not in "
                    "wb.prepare(..., keep=[...])"
                )
        scheduled = hasattr(loop.optimizer.step, "_wrapped_by_lr_sched")
        if scheduled and not any(
            getattr(kept, "optimizer", None) is loop.optimizer for kept in self._kept
        ):
            return "the loop uses a scheduler that is not in wb.prepare(..., keep=[...])"
        return ""

    # -- where the loop asks -----------------------------------------------------------------------

    def enter(self) -> None:
        """Accept other workers from the first pass on; called as a pass begins."""
        if not self._begun:
            self._begin()
        self._outside.close()
        self.next_batch()

    def _begin(self) -> None:
        self._begun = True
        self._regrouping.begin(self._strategy)
        membership = self.context.membership
        if not membership.trains:
            return
        models = (self._loop.model, *self._loop.others)
        self._buffers = KeptBuffers(b for model in models for b in model.buffers())
        for thing in self._kept:
            self._guard(thing)

    def _guard(self, thing: Any) -> None:
        """Let the steps of what is kept change nothing while a step is emptied."""
        cls = type(thing)
        plain = {name: getattr(cls, name, None) for name in ("step", "update")}
        if isinstance(thing, torch.optim.Optimizer):  # emptied by their gradients
            return

        def guarded(step: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(step)
            def unless_emptied(thing: Any, *args: Any, **given: Any) -> Any:
                return None if self.emptied else step(thing, *args, **given)

            return unless_emptied

        steps = {name: guarded(step) for name, step in plain.items() if callable(step)}
        if steps:
            # an attribute on the object would become part of its state
            become(thing, subclass(cls, **steps))
            self._undo.callback(become, thing, cls)

    def next_batch(self) -> None:
        """Wait at a place where a step can begin; regroup here if the set of workers changes."""
        self.emptied = False
        membership = self.context.membership
        if membership.trains and (membership.stale or self._waits):
            self._go_on()

    @property
    def _waits(self) -> bool:
        return self.context.membership.waits and self._arrival is None

    def step_begins(self) -> None:
        """Keep the other state that the step's forward changes."""
        if self.context.membership.trains:
            self._buffers.keep()

    def several_batches(self) -> None:
        """Keep the set of workers fixed: a step's earlier batches cannot be given out again."""
        self._regrouping.withdraw(
            "one step uses several batches. After a failed step, the loader can give only the last "
            "of these batches again, so the step cannot be repeated"
        )

    def broke_off(self, error: Exception) -> bool:
        """Whether a step failed because another worker ended; if so it is emptied here."""
        loop = self._loop
        if not self._regrouping.can_follow(error):
            return False
        step, (samples, loss, start_s) = self.context.trained, loop.so_far()

        def completed() -> None:
            result = StepResult(samples, loss, compute_s=float("nan"), has_loss=loss == loss)
            self.context.recorder.add_step(
                step, result, start_s, clock(), data_wait_s=float("nan")
            )  # fmt: skip

        self.emptied = True
        self._go_on(completed)
        self.empty()
        return True

    def empty(self) -> None:
        """Replace the gradients by ones that the user's code can read, but that change nothing."""
        for model in (self._loop.model, *self._loop.others):
            for p in model.parameters():
                if p.requires_grad:
                    p.grad = None if self._loop.optimizers_under_way else torch.zeros_like(p)

    def pass_over(self, optimizer: torch.optim.Optimizer) -> bool:
        """Let an optimizer's step change nothing if its gradients belong to an emptied step."""
        if self.emptied:
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad = None
        return self.emptied

    def end_epoch(self, plain: Callable[[], object]) -> None:
        """Do the actions at the end of a pass together with the others."""
        self.next_batch()
        ended = self._standing.begun
        while self.evaluated < ended:
            try:
                plain()
                self.evaluated = ended
            except Exception as error:  # noqa: PERF203 - it ends with the first that succeeds
                if not self._regrouping.can_follow(error):
                    raise
                self._go_on()
                # The others' progress since then was taken over, including steps of the kept
                # objects.
                self.emptied = self.evaluated >= ended

    # -- with others (`regrouping.Training`) -------------------------------------------------------

    def _go_on(self, completed: Callable[[], object] = lambda: None) -> None:
        if self._loop.batches:
            self._buffers.restore()
        self._regrouping.go_on(completed)
        if self.context.membership.waits:
            context = self.context
            random = format_of(context).random_state(context.spec.device)
            self._arrival = (self._strategy.state(), random)

    def place(self) -> dict[str, Any]:
        """Return the loop's position, for a worker that takes over the loop's state."""
        epoch, batch = self._standing.begun - 1, self._standing.served
        if self._loop.batches and self._loop_stands:
            batch -= 1
        if self.evaluated > epoch:
            epoch, batch = epoch + 1, 0
        return {
            "trained": self.context.trained, "evaluated": self.evaluated,
            "epoch": epoch, "batch": batch,
            "kept": [format_of(self.context).copied(k.state_dict()) for k in self._kept],
        }  # fmt: skip

    @property
    def _loop_stands(self) -> bool:
        """Whether the current step has not been completed, here or on another worker."""
        return self.context.trained == self.context.step

    def take_place(self, place: Mapping[str, Any]) -> None:
        """Set the progress to that of another worker."""
        context = self.context
        context.trained, self.evaluated = place["trained"], place["evaluated"]
        self._load_kept(place)
        if context.membership.waits:
            context.step = context.trained - 1
            self._place = place
            self._standing.resumes_at = place["epoch"], place["batch"]

    def _load_kept(self, place: Mapping[str, Any]) -> None:
        for thing, state in zip(self._kept, place["kept"], strict=True):
            thing.load_state_dict(state)

    def deal(self) -> None:
        """Continue in the data at the current step, with the present shares."""
        again = self._loop.batches and self._loop_stands
        self._loop.abandon()
        self._standing.served -= 1 if again else 0
        self._standing.dealt += 1

    def part(self, shard: tuple[int, int]) -> tuple[int, Any]:
        """Return this worker's share: a loop's shares are equal."""
        return shard

    def catch_up(self) -> None:
        """Do nothing: the loop evaluates by itself."""

    def tell_evaluation(self) -> None:
        """Report nothing: the user evaluates in the loop."""

    # -- who comes ---------------------------------------------------------------------------------

    @property
    def is_coming(self) -> bool:
        """Whether this worker has joined, but has not yet reached the others' place."""
        return self._arrival is not None

    def skip(self) -> None:
        """Leave the process group for the loop's lines between two past epochs."""
        self._outside.enter_context(_without_group())

    def arrive(self) -> None:
        """Take over the state, and report that this worker has joined."""
        assert self._arrival is not None, "internal error: the worker has already joined"
        (state, random), self._arrival = self._arrival, None
        self._strategy.load_state(state)
        self._load_kept(self._place)
        format_of(self.context).set_random_state(random, self.context.spec.device)
        self._regrouping.arrived()

    def close(self) -> None:
        """Restore the guarded objects."""
        self._outside.close()
        self._undo.close()


@contextlib.contextmanager
def _without_group() -> Iterator[None]:
    """Hide the process group from the user: collectives report that there is no group."""
    world: Any = dist.distributed_c10d._world
    hidden, world.default_pg = world.default_pg, None
    try:
        yield
    finally:
        world.default_pg = hidden
