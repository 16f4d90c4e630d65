"""Records the steps of a user's own loop, without a change to it.

    @tf.function
    def train_step(batch):                         traced with marks in it (`markers.py`)
        return strategy.run(step, args=(batch,))

    for batch in distributed:
        train_step(batch)                          the call is seen; its steps are recorded

A call that trained is known by the marks it passed. It is known from then on: before the next call
of the same function Pause waits and Stop raises. What other functions take (an evaluation between
epochs) belongs to no step. Without a `tf.function`, `strategy.run` is the call that is seen.
"""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ...engine.context import RunContext
from ...engine.initial import initialise
from ...errors import FitError
from .models import holder
from .patches import Patches
from .steps import Steps


class OwnLoop:
    """Watches calls into TensorFlow while it is entered.

    The wrappers carry their originals' module, so that autograph leaves them alone as it does
    those; what they call is converted as ever.

    Args:
        elsewhere: Whether somebody else records the steps just now (`model.fit`, `wb.fit`).
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
        """Give the model the weights that the line names, while its first step is traced.

        Raises:
            FitError: The step is not traced: its gradients are those of the model's own weights.
        """
        if self.context.initial_read:
            return
        if tf.executing_eagerly():
            raise FitError(
                "The loop's first step was computed already, from the model's own weights.",
                seen="--init-from, and a step without tf.function",
                allowed="a step in a tf.function, wb.fit or model.fit",
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
        """Make a call from outside TensorFlow; record the steps it was made of."""
        steps = self.steps
        if trains:
            check_unsaved(self.context)
            steps.begin()
        elif steps.start_s != steps.start_s:
            steps.skip()  # the loop's first call
        self._inside, self._steps_done = True, 0
        try:
            result = call()
            steps.synchronise()
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
    """Refuse checkpoints: what an own loop trains with is not known.

    Raises:
        FitError: They were asked for.
    """
    if context.spec.checkpoint or context.spec.resume:
        raise FitError(
            "Checkpoints of an own loop under TensorFlow are its own affair: only it knows what it "
            "trains with.",
            seen="--checkpoint with strategy.run",
            allowed="--checkpoint with model.fit or wb.fit",
            next_step="leave --checkpoint out and use tf.train.Checkpoint in the loop",
            code="WB-FIT-081",
        )
