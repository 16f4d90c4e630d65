"""`model.fit`, `evaluate` and `predict` under a coordinator, which Keras 3 cannot do by itself.

    fit:  for each epoch
              one closure per worker and global batch:  forward, loss, backward, apply
                                                        returns loss and what it adds to the metrics
              wait for all of them
              validation: closures that return the same, without gradients
              callbacks' on_epoch_end, History as ever

Closures of one epoch have no order. So there is nothing between two batches where a callback could
be called; epoch-level callbacks are called as Keras does. `keras_closures.py` says what a closure
computes.

Source: `keras/src/backend/tensorflow/trainer.py`, whose `fit` this follows.
"""

from __future__ import annotations

import functools
import importlib
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ... import events
from ...engine import settings
from ...engine.announce import announce
from ...engine.context import RunContext
from ...engine.initial import initialise
from ...engine.tensorflow_models import parameter_count
from ..base import Strategy
from .closures import Closures
from .closures_place import ClosuresPlace
from .coordinated import AHEAD
from .feeds import Fed, dealt
from .keras_closures import Graphs, Sums, logs_of
from .keras_data import Data, Reader
from .keras_fit import check_model
from .mistakes import bound, check_callbacks, check_steps

clock = time.perf_counter


class CoordinatedFit:
    """Carries Keras' calls by closures while it is entered.

    Args:
        trained: Called with each model that `fit` has begun to train.
        strategy: Whose state checkpoints hold.
    """

    def __init__(
        self,
        context: RunContext,
        closures: Closures,
        trained: Callable[[Any], None],
        strategy: Strategy,
    ) -> None:
        self.context, self.closures, self.strategy = context, closures, strategy
        self.workers = context.spec.world_size
        self._trained = trained
        self._owner = importlib.import_module("keras.src.backend.tensorflow.trainer")
        self._reader = Reader(context, closures.coordinator)
        self._originals: dict[str, Any] = {}
        self._graphs = Graphs(closures.coordinator.strategy)

    def __enter__(self) -> CoordinatedFit:
        """Replace Keras' methods."""
        owner = self._owner.TensorFlowTrainer
        for name in ("fit", "evaluate", "predict"):
            self._originals[name] = original = getattr(owner, name)
            setattr(owner, name, self._replaced(original, getattr(self, name)))
        return self

    def __exit__(self, *error: object) -> None:
        """Put them back."""
        for name, original in self._originals.items():
            setattr(self._owner.TensorFlowTrainer, name, original)

    def _replaced(self, original: Any, carry: Callable[[Any, dict[str, Any]], Any]) -> Any:
        @functools.wraps(original)
        def call(model: Any, *args: Any, **keywords: Any) -> Any:
            given = bound(original, model, args, keywords)
            check_model(model, self.closures.coordinator.strategy)
            check_steps(model)
            return carry(model, given.arguments)

        return call

    # -- fit ---------------------------------------------------------------------------------------

    def fit(self, model: Any, call: dict[str, Any]) -> Any:
        """Train; return Keras' History.

        Raises:
            FitError: Something cannot be carried by closures; nothing was trained.
        """
        settings.check_supported(self.context.entry, "keras", ())
        model._assert_compile_called("fit")
        check_callbacks(call["callbacks"])
        data, validation = self._reader.data(call)
        self._build(model, data)
        initialise(self.context, model)
        settings.warn_if_trained(self.context, model)
        self._trained(model)
        total = self._limits(call, data)
        place = ClosuresPlace(self.context, self.closures, self.strategy)
        first = place.find(call, data.steps)
        self._announce(model, call, data, total)
        total = None if total is None else total - place.done
        callbacks = _callbacks(model, call, data)
        train = self._graphs.function(model, data.feed, training=True)
        model.stop_training = False
        callbacks.on_train_begin()
        logs: dict[str, float] = {}
        for epoch in range(call["initial_epoch"], call["epochs"]):
            callbacks.on_epoch_begin(epoch)
            sums, total = self._train(train, data, place, epoch, total, first)
            first = 0
            if not sums.samples:
                break
            logs = logs_of(model, sums)
            step = self.context.step
            self.context.emit(events.EpochBegan(rank=0, epoch=epoch, step=step))
            frequency = call["validation_freq"]
            if validation is not None and model._should_eval(epoch, frequency):
                logs |= self._validate(model, validation, epoch)
            callbacks.on_epoch_end(epoch, logs)
            if model.stop_training or total == 0:
                break
        place.end()
        callbacks.on_train_end(logs=logs)
        return model.history

    def _train(
        self, train: Any, data: Data, place: ClosuresPlace, epoch: int, left: int | None, first: int
    ) -> tuple[Sums, int | None]:
        """Train one epoch, at most `left` global steps; return the sums and what is left then.

        Args:
            first: Global batches of the epoch that were done before.
        """
        sums, strategy = Sums(), self.closures.coordinator.strategy
        self.closures.idle()
        batches = islice(data.batches(epoch, self.workers), first, None)
        for at, pieces in enumerate(dealt(data.feed, batches), first + 1):
            if left == 0:
                break
            for args, samples in pieces:
                self.closures.wait_for_room(AHEAD * self.workers)
                strategy.extended._being_scheduled = True
                self.closures.schedule(
                    train, args,
                    samples=samples,
                    alike=data.feed.kind and (data.feed.kind, samples),
                    told=lambda values, n=samples: sums.add(values, n),  # type: ignore[misc]
                )  # fmt: skip
                strategy.extended._being_scheduled = False
            left = None if left is None else left - 1
            place.step_done(epoch, at)
        self.closures.join()
        return sums, left

    def _validate(self, model: Any, data: Data, epoch: int) -> dict[str, float]:
        began_s = clock()
        values = logs_of(model, self._score(model, data))
        seconds = clock() - began_s
        self.context.eval_s += seconds
        self.context.emit(
            events.Evaluated(step=self.context.step, epoch=epoch, values=values, seconds=seconds)
        )
        self.closures.idle()
        return {f"val_{name}": value for name, value in values.items()}

    def _score(self, model: Any, data: Data) -> Sums:
        score, sums = self._graphs.function(model, data.feed, training=False), Sums()
        waiting = []
        for pieces in dealt(data.feed, data.batches(0, 1)):
            for args, samples in pieces:
                self.closures.wait_for_room(AHEAD * self.workers)
                value = self.closures.coordinator.schedule(score, args=args)
                waiting.append((value, samples))
        self.closures.join()
        for value, samples in waiting:
            sums.add(value.fetch(), samples)
        return sums

    def evaluate(self, model: Any, call: dict[str, Any]) -> Any:
        """As Keras' evaluate, by closures."""
        call.setdefault("validation_data", None)
        call = {**call, "validation_split": 0.0, "class_weight": None, "shuffle": False}
        call["steps_per_epoch"] = call["steps"]
        data, _ = self._reader.data(call)
        self._build(model, data)
        logs = logs_of(model, self._score(model, data))
        self.closures.idle()
        if call["return_dict"]:
            return logs
        values = list(logs.values())
        return values[0] if len(values) == 1 else values

    def predict(self, model: Any, call: dict[str, Any]) -> Any:
        """As Keras' predict, by closures."""
        strategy, feed = self.closures.coordinator.strategy, Fed()
        function = feed.function(lambda batch: strategy.run(model.predict_step, args=((batch,),)))
        waiting = []
        for inputs in self._reader.inputs(call):
            self.closures.wait_for_room(AHEAD * self.workers)
            args = next(feed.args([inputs]))
            waiting.append(self.closures.coordinator.schedule(function, args=args))
        self.closures.join()
        outputs = [value.fetch() for value in waiting]
        self.closures.idle()
        return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *outputs)

    # -- around it ---------------------------------------------------------------------------------

    def _build(self, model: Any, data: Data) -> None:
        """Have model, metrics and optimizer make their variables, here and not in a closure."""
        model._symbolic_build(data_batch=data.sample())
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _limits(self, call: dict[str, Any], data: Data) -> int | None:
        """Apply the line's overrides; return after how many global steps it ends, if it says so."""
        given = self.context.spec.overrides
        if "epochs" in given:
            call["epochs"] = call["initial_epoch"] + given["epochs"]
        if "steps" not in given:
            return None
        steps = int(given["steps"])
        epochs = -(-steps // data.steps) if data.steps else steps
        call["epochs"] = call["initial_epoch"] + epochs
        return steps

    def _announce(self, model: Any, call: dict[str, Any], data: Data, total: int | None) -> None:
        epochs = call["epochs"] - call["initial_epoch"]
        if total is None and data.steps is not None:
            total = data.steps * epochs
        self.closures.announced()
        announce(
            self.context, parameter_count(model), batch_size=data.batch_size, total_steps=total,
            epochs=epochs,
        )  # fmt: skip


def _callbacks(model: Any, call: dict[str, Any], data: Data) -> Any:
    callbacks = call["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks, add_history=True, add_progbar=False, verbose=0, model=model,
        epochs=call["epochs"], steps=data.steps,
    )  # fmt: skip
