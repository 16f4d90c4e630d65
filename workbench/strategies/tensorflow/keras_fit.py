"""`model.fit`, unchanged for the user, reports to the run while a cell is under way.

The backend trainer's `fit` is replaced for the time of a cell. It checks what would go wrong
silently, applies the line's overrides, adds one callback after the user's own, and watches the
calls of the function that trains:

    on_train_begin        the run is announced
    on_train_batch_begin
    train_function        one step, or steps_per_execution of them; recorded when it returns, then
                          Pause waits, and Stop makes this batch the last
    on_train_batch_end
    on_epoch_end          validation is reported

A callback for batches would do as well, but would make Keras fetch the logs of every batch.

Source: `keras/src/backend/tensorflow/trainer.py`.
"""

from __future__ import annotations

import functools
import importlib
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import keras

from ... import events
from ...engine import settings
from ...engine.context import RunContext
from ...engine.initial import initialise
from ...engine.tensorflow_models import parameter_count
from ...errors import FitError, RunStopped
from ..base import NAN, Strategy
from .fit_place import FitPlace
from .keras_batches import Batches
from .markers import Measured
from .mistakes import bound, check_call
from .steps import Steps

clock = time.perf_counter


class KerasFit:
    """Replaces `fit` while it is entered.

    Args:
        trained: Called with each model that `fit` has begun to train.
        strategy: Whose state checkpoints hold.

    Attributes:
        under_way: Whether a `fit` is going on.
    """

    def __init__(
        self,
        context: RunContext,
        steps: Steps,
        distribution: Any,
        trained: Callable[[Any], None],
        strategy: Strategy,
    ) -> None:
        self.context, self.steps, self.distribution = context, steps, distribution
        self.strategy = strategy
        self.under_way = False
        self._trained = trained
        self._trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
        self._original: Any = None

    def __enter__(self) -> KerasFit:
        """Replace `fit`."""
        owner = self._trainer.TensorFlowTrainer
        self._original = original = owner.fit
        watch = self

        @functools.wraps(original)
        def fit(model: Any, *args: Any, **keywords: Any) -> Any:
            return watch.fit(model, args, keywords)

        owner.fit = fit
        return self

    def __exit__(self, *error: object) -> None:
        """Put Keras' own `fit` back."""
        self._trainer.TensorFlowTrainer.fit = self._original

    def fit(self, model: Any, args: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """Train as Keras does, recorded.

        Raises:
            FitError: Something would train wrongly; nothing was trained.
            RunStopped: Stop was pressed before the first step.
        """
        if self.under_way:  # a callback of the user's trains another model
            return self._original(model, *args, **keywords)
        given = bound(self._original, model, args, keywords)
        call = given.arguments
        settings.check_supported(self.context.entry, "keras", ())
        check_model(model, self.distribution)
        check_call(model, call, self.distribution)
        batch = Batches(call, self.context, self.distribution.num_replicas_in_sync)
        batch.override()
        settings.warn_if_trained(self.context, model)
        callback = Reports(self, model, call, batch)
        callback.place.find(call)
        if isinstance(call["callbacks"], keras.callbacks.CallbackList):
            call["callbacks"].append(callback)
        else:
            callbacks = call["callbacks"] or []
            several = isinstance(callbacks, (list, tuple))
            call["callbacks"] = [*(callbacks if several else [callbacks]), callback]
        if call["verbose"] == "auto":
            call["verbose"] = 0  # the dashboard says it all
        self.under_way = True
        self._trained(model)
        try:
            history = self._original(*given.args, **given.kwargs)
            callback.place.end()
            return history
        finally:
            self.under_way = False
            callback.let_go()


def check_model(model: Any, distribution: Any) -> None:
    """Raise FitError unless the model was built in the strategy's scope."""
    owner = getattr(model, "_distribute_strategy", None)
    if owner is distribution:
        return
    raise FitError(
        "The model was built outside this run's strategy, so it cannot train under it.",
        seen=f"built under {type(owner).__name__}" if owner else "built under no strategy",
        allowed=f"built under {type(distribution).__name__}",
        next_step="build and compile it in the cell that trains it; that cell runs in the scope",
        code="WB-FIT-074",
    )


class Reports(keras.callbacks.Callback):  # type: ignore[misc]
    """Records the steps of one `fit`, and carries Stop and Pause into it."""

    def __init__(
        self, owner: KerasFit, model: Any, call: Mapping[str, Any], batch: Batches
    ) -> None:
        super().__init__()
        self._owner, self._context, self._steps = owner, owner.context, owner.steps
        self._epochs = call["epochs"] - call["initial_epoch"]
        self._batch = batch
        self.place = FitPlace(self._context, owner.strategy)
        self._base = self._context.trained
        self._done = 0  # batches of the epoch
        self._mean = (0, 0.0)  # samples and summed loss of the epoch, where it comes from the logs
        self._trains = weakref.ref(model)
        self._original: Any = None

    def on_train_begin(self, logs: Any = None) -> None:
        """Announce the run; a Stop that came before the first step ends it here."""
        model: Any = self._trains()
        initialise(self._context, model)
        self.place.begin()
        per_epoch = self._batch.steps_per_epoch
        total = self._batch.total_steps or (per_epoch * self._epochs if per_epoch else None)
        self._steps.announce(
            parameter_count(model),
            batch_size=self._batch.size,
            total_steps=None if total is None else self._base + total,
            epochs=None if self._batch.total_steps else self._epochs,
        )
        self._original, model.train_function = model.train_function, self._train
        self._steps.start_s = NAN
        if not self._steps.enter():
            raise RunStopped

    def let_go(self) -> None:
        """Give the model its own function back."""
        model: Any = self._trains()
        if model is not None and self._original is not None:
            model.train_function, self._original = self._original, None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """What lies between epochs belongs to no step."""
        self._done, self._mean = 0, (0, 0.0)
        self.place.epoch = epoch
        self._steps.skip()

    def _train(self, iterator: Any) -> Any:
        """Train for one batch or several; hold or end `fit` where that was asked for."""
        steps, model = self._steps, self.model
        if passed := self.place.pass_over(iterator, model.steps_per_execution):
            self._done += passed
            return model.get_metrics_result()
        if self._done:  # before an epoch's first batch Keras makes the iterator: a wait for data
            steps.called()
        logs = self._original(iterator)
        steps.synchronise()
        self._done += steps.end(lambda: self._unmarked(logs))
        self.place.batch = self._done
        if self.place.step_done():
            steps.skip()
        limit = self._batch.total_steps
        done = limit is not None and self._context.trained - self._base >= limit
        if done or not steps.enter():
            trainer: Any = model
            trainer.stop_training = True
        return logs

    def _unmarked(self, logs: Mapping[str, Any]) -> Measured:
        """Return a step of which only the logs tell: Keras shows the epoch's running mean."""
        samples, (count, total) = self._batch.samples_of(self._done), self._mean
        loss = NAN
        if "loss" in logs and samples:
            self._mean = (count + samples, float(logs["loss"]) * (count + samples))
            loss = (self._mean[1] - total) / samples
        return self._steps.unmarked(samples, loss, has_loss="loss" in logs and samples > 0)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the epoch, and its validation where there was one."""
        context, step = self._context, self._context.trained - 1
        context.emit(events.EpochBegan(rank=context.spec.rank, epoch=epoch, step=step))
        values = {
            name.removeprefix("val_"): float(value)
            for name, value in (logs or {}).items()
            if name.startswith("val_")
        }
        if values and context.spec.rank == 0:
            seconds = clock() - self._steps.start_s
            context.emit(events.Evaluated(step=step, epoch=epoch, values=values, seconds=seconds))
