"""Turns the marks' measurements into rows, for `model.fit`, `wb.fit` and users' own loops.

One `Steps` serves a whole cell. The loop's owner (`model.fit`, the user) only has to call `begin`
before a call that trains, and `end` after it. Any number of steps may have happened in between
(`steps_per_execution`).

The steps of a user's own loop are recorded, and the loop does not change:

    @tf.function
    def train_step(batch):                         traced with marks in it (`markers.py`)
        return strategy.run(step, args=(batch,))

    for batch in distributed:
        train_step(batch)                          the call is seen; its steps are recorded

Workbench recognises a call that trained by the marks that it passed. From then on, Pause and Stop
act before the next call of the same function: Pause waits and Stop raises. Time in other functions
(an evaluation between epochs) belongs to no step. Without a `tf.function`, the observed call is
`strategy.run`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from ....engine.contract import NAN
from ....engine.telemetry.recorder import StepResult
from ....engine.training.initial import initialise
from ....engine.training.notes import announce
from ....errors import FitError, RunStopped
from ....shared import events
from .markers import Markers, Measured
from .models import holder

if TYPE_CHECKING:
    from ....engine.context import RunContext


class Patches:
    """The replaced attributes; `undo` restores them, the latest first."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def replace(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Replace the attribute with the result of `make`; an inherited attribute is shadowed."""
        before, own = getattr(owner, name), name in vars(owner)
        setattr(owner, name, make(before))
        self._undo.append(
            (lambda: setattr(owner, name, before)) if own else lambda: delattr(owner, name)
        )

    def undo(self) -> None:
        """Restore everything."""
        while self._undo:
            self._undo.pop()()


KINDS = {
    "OneDeviceStrategy": "one_device",
    "MirroredStrategy": "mirrored",
    "MultiWorkerMirroredStrategy": "multi_worker_mirrored",
    "CentralStorageStrategy": "central_storage",
    "ParameterServerStrategy": "parameter_server",
    "TPUStrategy": "tpu",
}
"""TensorFlow's classes, and their names on the magic's line."""


@contextlib.contextmanager
def stand_ins(context: RunContext, distribution: Any) -> Iterator[None]:
    """Let the cell's own `tf.distribute.XStrategy(...)` return the run's strategy."""
    patches = Patches()
    try:
        for place in (tf.distribute, tf.distribute.experimental):
            for name in KINDS:
                if isinstance(getattr(place, name, None), type):
                    patches.replace(place, name, _maker(context, distribution, name))
        yield
    finally:
        patches.undo()


def _maker(context: RunContext, distribution: Any, name: str) -> Any:
    def make(original: Any) -> Any:
        class StandIn(type(original)):  # type: ignore[misc]
            def __call__(cls, *args: Any, **keywords: Any) -> Any:
                if cls is not stand_in:  # the user's own subclass
                    return super().__call__(*args, **keywords)
                _check_kind(context, distribution, original, name)
                _say(context, name, given=bool(args or keywords))
                return distribution

            def __instancecheck__(cls, thing: Any) -> bool:
                if cls is stand_in:
                    return isinstance(thing, original)
                return type.__instancecheck__(cls, thing)

            def __subclasscheck__(cls, other: type) -> bool:
                if cls is stand_in:
                    return issubclass(other, original)
                return type.__subclasscheck__(cls, other)

        stand_in = StandIn(name, (original,), {"__module__": original.__module__})
        return stand_in

    return make


def _check_kind(context: RunContext, distribution: Any, original: type, name: str) -> None:
    """Raise FitError unless the run's strategy is of this kind."""
    if isinstance(distribution, original):
        return
    chosen, word = context.entry.name, KINDS[name]
    raise FitError(
        "The cell creates a strategy that differs from the strategy in the cell's first line.",
        seen=f"tf.distribute.{name}(...) under {chosen}",
        allowed="the variable `strategy`, which the cell already has",
        next_step=f"remove the line that creates the strategy, or write {word} instead of "
        f"{chosen} in the first line",
        code="WB-FIT-097",
    )


def _say(context: RunContext, name: str, *, given: bool) -> None:
    replicas = context.spec.world_size
    text = (
        f"tf.distribute.{name} returned this run's strategy, which has {replicas} "
        f"{'replica' if replicas == 1 else 'replicas'}. The variable `strategy` is the same "
        "object."
    )
    if given:
        text += (
            " The arguments of this call have no effect: -n and -o in the cell's first line "
            "define the strategy."
        )
    if context.spec.rank == 0:
        context.emit(events.Noted(rank=0, text=text))


clock = time.perf_counter

UNSEEN = ("data_wait_s", "compute_s", "sync_wait_s", "transfer_s")

WORTH_SAYING_S = 0.1

EXACT = 16
"""How many calls at the beginning of a series are followed by a wait for the devices."""


class Steps:
    """The steps of one cell.

    Attributes:
        start_s: When the current step began. This is the end of the step before, unless an
            evaluation or a pause came between.
        batch: Samples of the latest step, on all replicas of this engine.
        synchronise: Waits for the devices; None if every call has ended when it returns.
        announced: Whether the notebook's process was told that training has begun.
    """

    def __init__(
        self, context: RunContext, markers: Markers, synchronise: Callable[[], object] | None
    ) -> None:
        self.context, self.markers, self.synchronise = context, markers, synchronise
        self.start_s = NAN
        self._called_s = NAN
        self._traced_s, self._traces = 0.0, 0
        self.announced = False
        self.batch: int | None = None
        self._unseen = False
        self._exact = 0  # calls of this series after which the devices were waited for
        self._keeps_pace = False  # whether the latest call's marks came after its gradients
        self._behind = False  # whether the devices can still be computing an update

    def announce(self, parameters: int, **counts: Any) -> None:
        """Tell the notebook's process that training begins, or continues with another `fit`."""
        self.announced = True
        announce(self.context, parameters, **counts)

    def begin(self) -> None:
        """Ask whether the next step can start; during a pause this call waits.

        Raises:
            RunStopped: Stop was pressed.
        """
        if not self.enter():
            raise RunStopped

    def enter(self) -> bool:
        """Like `begin`, but return False if the run should stop."""
        context, step = self.context, self.context.trained
        paused_s = context.gate.paused_s
        if not context.gate.enter(step):
            return False
        if context.gate.paused_s != paused_s or self.start_s != self.start_s:
            self.start_s = clock()
        context.faults.before_step(step)
        context.step = step
        return True

    def wait(self) -> None:
        """Wait for the devices after a call, if its end could not be seen otherwise."""
        if self.synchronise is None:
            return
        self._behind = self._keeps_pace and self._exact >= EXACT
        if not self._behind:
            self._exact += 1
            self.synchronise()

    def settle(self) -> None:
        """End a series of steps.

        The devices' remaining computation for the last step counts as training.
        """
        self._exact = 0
        if self._behind and self.synchronise is not None:
            self._behind, began = False, clock()
            self.synchronise()
            spent_s = clock() - began
            self.context.train_s += spent_s
            self.start_s += spent_s

    def skip(self) -> None:
        """Count the time since the last step as evaluation or other work."""
        self.settle()
        now = clock()
        if self.start_s == self.start_s:
            self.context.eval_s += now - self.start_s
        self.start_s = now

    def forget(self) -> None:
        """Drop the marks' readings so far, because they belong to no step."""
        self.markers.take(self.start_s, clock())

    def called(self) -> None:
        """Note that TensorFlow requests data only now, so earlier time was not a wait for data."""
        self._called_s = clock()

    def end(self, unmarked: Callable[[], Measured] | None = None) -> int:
        """Record the steps since `begin`.

        Args:
            unmarked: Returns the step to record if no mark was passed; by default none.

        Returns:
            How many steps there were.
        """
        end_s = clock()
        start_s = self.start_s if self.start_s == self.start_s else end_s
        steps = self.markers.take(start_s, end_s)
        self._keeps_pace = bool(steps) and not any(step.eager for step in steps)
        if not steps and unmarked is not None:
            steps = [unmarked()]
            self._say_unseen()
        # The first step's wait counts from its start, when the loop may have done other things.
        busy_s = max(0.0, self._called_s - start_s) if self._called_s == self._called_s else 0.0
        self._called_s = NAN
        for step in steps:
            self._record(step, busy_s)
            busy_s = 0.0
        if steps:
            self.set_up(sum(step.set_up_s for step in steps))
            self.context.train_s += end_s - start_s - sum(step.set_up_s for step in steps)
            self.start_s = end_s
        return len(steps)

    def set_up(self, seconds: float) -> None:
        """Note the time in which a step was traced; it belongs to no step."""
        if seconds:
            self._traced_s, self._traces = self._traced_s + seconds, self._traces + 1
            self.context.eval_s += seconds

    def say_set_up(self) -> None:
        """Report to the user how long tracing took."""
        if self._traced_s >= WORTH_SAYING_S and self.context.spec.rank == 0:
            often = "once" if self._traces == 1 else f"{self._traces} times"
            text = (
                f"TensorFlow traced the step {often}: it built a graph from the step's Python "
                f"code. The tracing took {self._traced_s:.1f} s in total. The measured step times "
                "do not include the tracing."
            )
            self.context.emit(events.Noted(rank=0, text=text))

    def unmarked(self, samples: int, loss: float, *, has_loss: bool = False) -> Measured:
        """Return a step with known samples and loss only, shared evenly."""
        held = self.context.spec.held
        parts = len(held) if self.context.entry.data_parallel else 1
        shares = [(r + 1) * samples // parts - r * samples // parts for r in range(parts)]
        shares *= len(held) // parts
        return Measured(
            self.start_s,
            clock(),
            (NAN,) * len(held),
            tuple(StepResult(share, loss, NAN, has_loss=has_loss) for share in shares),
        )

    def _record(self, step: Measured, busy_s: float) -> None:
        context = self.context
        for rank, data_wait_s, one in zip(
            context.spec.held, step.data_wait_s, step.results, strict=True
        ):
            waited_s = data_wait_s - busy_s
            context.recorder.add_step(
                context.trained, one, step.start_s, step.end_s, data_wait_s=waited_s, rank=rank
            )
        samples = [one.samples for one in step.results]
        self.batch = (sum if self.context.entry.data_parallel else max)(samples) or None
        context.step = context.trained
        context.trained += 1

    def _say_unseen(self) -> None:
        if not self._unseen:
            self._unseen = True
            reason = (
                "Workbench cannot measure when the backward pass ends and the all-reduce begins "
                "(a possible reason: jit_compile is on)"
            )
            self.context.emit(events.Unmeasured(columns=dict.fromkeys(UNSEEN, reason)))


def global_loss(results: tuple[StepResult, ...]) -> float:
    """Return the mean loss over all samples of a step."""
    samples = np.array([one.samples for one in results], np.float64)
    losses = np.array([one.loss for one in results], np.float64)
    total = samples.sum()
    return float((losses[samples > 0] * samples[samples > 0]).sum() / total) if total else NAN


class OwnLoop:
    """Watches calls into TensorFlow while it is entered.

    The wrappers have the module name of the originals, so that autograph treats them like the
    originals. The functions that they call are converted as usual.

    Args:
        elsewhere: Whether another object records the steps at the moment (`model.fit`, `wb.fit`).
    """

    def __init__(
        self,
        context: RunContext,
        steps: Steps,
        distribution: Any,
        elsewhere: Callable[[], bool],
    ) -> None:
        self.context, self.steps, self.distribution = context, steps, distribution
        self._elsewhere = elsewhere
        self._inside = False
        self._steps_done = 0  # by the latest call
        self._trains: Any = weakref.WeakSet()
        self._eager = False  # whether a strategy.run outside of any tf.function has trained
        self._patches = Patches()
        self.optimizer: Any = None

    def __enter__(self) -> OwnLoop:
        """Patch `tf.function`'s calls, `strategy.run` and the optimizers' `apply`."""
        function = importlib.import_module(
            "tensorflow.python.eager.polymorphic_function.polymorphic_function"
        ).Function
        self._patches.replace(function, "__call__", self._called)
        self._patches.replace(type(self.distribution), "run", self._ran)
        self._patches.replace(keras.optimizers.Optimizer, "apply", self._applied)
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches."""
        self._patches.undo()

    def _called(self, original: Any) -> Any:
        loop = self

        @functools.wraps(original)
        def call(function: Any, *args: Any, **keywords: Any) -> Any:
            if loop._passive():
                return original(function, *args, **keywords)
            trains = function in loop._trains
            done = loop._watched(lambda: original(function, *args, **keywords), trains)
            if loop._steps_done and not trains:
                loop._trains.add(function)
            return done

        return call

    def _ran(self, original: Any) -> Any:
        loop = self

        @functools.wraps(original)
        def run(strategy: Any, *args: Any, **keywords: Any) -> Any:
            if loop._passive() or strategy is not loop.distribution:
                return original(strategy, *args, **keywords)
            done = loop._watched(lambda: original(strategy, *args, **keywords), loop._eager)
            loop._eager = loop._eager or bool(loop._steps_done)
            return done

        return run

    def _applied(self, original: Any) -> Any:
        loop = self

        @functools.wraps(original)
        def apply(optimizer: Any, *args: Any, **keywords: Any) -> Any:
            loop.optimizer = optimizer
            if loop.context.spec.init_from and not loop._elsewhere():
                loop._start_from(optimizer, *args, **keywords)
            return original(optimizer, *args, **keywords)

        return apply

    def _start_from(self, optimizer: Any, gradients: Any, variables: Any = None) -> None:
        """Give the model the weights of `--init-from`, while its first step is traced.

        Raises:
            FitError: The step is not traced: its gradients are those of the model's own weights.
        """
        if self.context.initial_read:
            return
        if tf.executing_eagerly():
            raise FitError(
                "In your own loop, --init-from works only if the training step is in a "
                "tf.function. The first step of this loop computed its gradients before Workbench "
                "could load the weights of --init-from.",
                seen="--init-from, with a training step that is not in a tf.function",
                allowed="a training step in a tf.function, or training with wb.fit or model.fit",
                next_step="put @tf.function on the function that calls strategy.run",
                code="WB-FIT-080",
            )
        trained = variables or getattr(optimizer, "_trainable_variables", ())
        model = holder({id(variable) for variable in trained})
        if model is not None:
            initialise(self.context, model)

    def _passive(self) -> bool:
        return self._inside or self._elsewhere() or not tf.executing_eagerly()

    def _watched(self, call: Callable[[], Any], trains: bool) -> Any:
        """Make a call from outside TensorFlow; record its steps."""
        steps = self.steps
        if trains:
            check_unsaved(self.context)
            steps.begin()
        elif steps.start_s != steps.start_s:
            steps.skip()  # the loop's first call
        else:
            steps.settle()
        self._inside, self._steps_done = True, 0
        try:
            result = call()
            steps.wait()
        finally:
            self._inside = False
        self._steps_done = steps.end()
        if self._steps_done:
            self._announce()
        else:
            steps.skip()
        return result

    def _announce(self) -> None:
        steps = self.steps
        if steps.announced:
            return
        trained = getattr(self.optimizer, "_trainable_variables", ())
        spec = self.context.spec
        engines = spec.world_size // len(spec.held)  # each takes an equal share
        steps.announce(
            sum(int(np.prod(variable.shape)) for variable in trained),
            batch_size=None if steps.batch is None else steps.batch * engines,
        )


def check_unsaved(context: RunContext) -> None:
    """Refuse checkpoints, because Workbench does not know which objects a user's own loop trains.

    Raises:
        FitError: Checkpoints were requested.
    """
    if context.spec.checkpoint or context.spec.resume:
        raise FitError(
            "--checkpoint cannot be used with your own TensorFlow loop, because Workbench does not "
            "know which variables the loop trains.",
            seen="--checkpoint, and a loop that uses neither model.fit nor wb.fit",
            allowed="--checkpoint with model.fit or wb.fit",
            next_step="remove --checkpoint, and use tf.train.Checkpoint in your loop",
            code="WB-FIT-081",
        )
