"""`model.fit`, `evaluate` and `predict` under a coordinator, which Keras 3 cannot do by itself.

    fit:  for each epoch
              one closure per worker and global batch:  forward, loss, backward, apply
                                                        returns loss and what it adds to the metrics
              wait for all of them
              validation: closures that return the same, without gradients
              callbacks' on_epoch_end, History as usual

Closures of one epoch have no order. So no callback can be called between two batches. Callbacks at
the level of epochs are called as in Keras.

Source: `keras/src/backend/tensorflow/trainer.py`; the code here follows its `fit`.

The computation of a closure in Keras' `fit` or `evaluate`, and the sum of the results:

    closure:      loss, changes of the metrics' state         one vector, fetched at once
    coordinator:  sum of the vectors --> state --> the logs that Keras shows

Metrics are not kept on the servers, because workers would overwrite each other's values. If a
metric counts or averages, the changes that batches make to its initial state can be added up.

Source: `keras/src/backend/tensorflow/trainer.py`.

The data of `model.fit` becomes batches in pieces for closures. Arrays are read in the order of one
device (`engine/training/shares.py`). Keras' own data adapters read all other data:
`keras/src/trainers/data_adapters`.
"""

from __future__ import annotations

import functools
import importlib
import operator
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from ....engine.tensorflow.data import batch_length, slice_batch
from ....engine.tensorflow.models import parameter_count
from ....engine.training import fit_arguments
from ....engine.training.initial import initialise
from ....engine.training.notes import announce
from ....engine.training.shares import make_order, share_bounds
from ....errors import RunStopped
from ....shared import events
from ..coordinator.feeds import Fed, Resident, dealt, fits
from ..coordinator.fit import AHEAD, ClosuresPlace
from .batches import DEFAULT_BATCH, bound, check_callbacks, check_steps
from .fit import check_model

if TYPE_CHECKING:
    from ....engine.context import RunContext
    from ....engine.contract import Strategy
    from ..coordinator.closures import Closures

clock = time.perf_counter


class CoordinatedFit:
    """Runs Keras' calls by closures while it is entered.

    Args:
        trained: Called with each model that `fit` has begun to train.
        strategy: The strategy; checkpoints hold its state.
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
        """Restore them."""
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
            FitError: Closures cannot do this; nothing was trained.
        """
        fit_arguments.check_supported(self.context.entry, "keras", ())
        model._assert_compile_called("fit")
        check_callbacks(call["callbacks"])
        data, validation = self._reader.data(call)
        self._build(model, data)
        initialise(self.context, model)
        fit_arguments.warn_if_trained(self.context, model)
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
        """Train one epoch, at most `left` global steps; return the sums and the remaining steps.

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
        """Do what Keras' evaluate does, by closures."""
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
        """Do what Keras' predict does, by closures."""
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
        """Let model, metrics and optimizer make their variables here, not in a closure."""
        model._symbolic_build(data_batch=data.sample())
        if model.optimizer is not None and not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)

    def _limits(self, call: dict[str, Any], data: Data) -> int | None:
        """Apply the line's overrides; return the number of global steps if the line gives one."""
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
            epochs=epochs, epoch_samples=(data.steps or 0) * (data.batch_size or 0) or None,
        )  # fmt: skip


def _callbacks(model: Any, call: dict[str, Any], data: Data) -> Any:
    callbacks = call["callbacks"]
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return callbacks
    return keras.callbacks.CallbackList(
        callbacks, add_history=True, add_progbar=False, verbose=0, model=model,
        epochs=call["epochs"], steps=data.steps,
    )  # fmt: skip


class Sums:
    """The results of closures, added up: loss, samples, changes of the metrics' state."""

    def __init__(self) -> None:
        self.loss, self.samples = 0.0, 0
        self.changes: Any = 0.0
        self._lock = threading.Lock()

    def add(self, values: Any, samples: int) -> float:
        """Add the result of one closure; return its loss."""
        vector = np.asarray(values, np.float64)
        with self._lock:
            self.loss += float(vector[0]) * samples
            self.samples += samples
            self.changes = self.changes + vector[1:]
        return float(vector[0])


def logs_of(model: Any, sums: Sums) -> dict[str, float]:
    """Return loss and metrics with Keras' names, from the results added up."""
    if sums.samples == 0:
        raise RunStopped
    model.reset_metrics()
    tracker, metrics = model._loss_tracker, model._compile_metrics
    tracker.total.assign(sums.loss)
    tracker.count.assign(sums.samples)
    at = 0
    for variable in metrics.variables if metrics is not None else ():
        size = int(np.prod(variable.shape))
        change = np.reshape(sums.changes[at : at + size], variable.shape)
        variable.assign((np.asarray(variable) + change).astype(variable.dtype))
        at += size
    return {name: float(value) for name, value in model.get_metrics_result().items()}


class Graphs:
    """The functions of closures; a later call with the same compiled model is not traced again.

    Args:
        strategy: The tf.distribute strategy of the run.
    """

    def __init__(self, strategy: Any) -> None:
        tools = importlib.import_module("keras.src.trainers.data_adapters.data_adapter_utils")
        self._strategy, self._unpack = strategy, tools.unpack_x_y_sample_weight
        self._functions: Any = weakref.WeakKeyDictionary()  # by model

    def function(self, model: Any, feed: Any, *, training: bool) -> Any:
        """Return the function of a closure: that of an earlier call if nothing has changed."""
        traced = (
            model.optimizer, model._compile_loss, model._compile_metrics, model._loss_tracker,
            *model.trainable_variables,
        )  # fmt: skip
        functions = self._functions.setdefault(model, {})
        before, function = functions.get((training, feed.kind), ((), None))
        same = len(before) == len(traced) and all(map(operator.is_, before, traced))
        if function is None or not same:
            function = feed.function(self._body(model, training=training))
            functions[training, feed.kind] = traced, function
        return function

    def _body(self, model: Any, *, training: bool) -> Callable[[Any], Any]:
        strategy, unpack = self._strategy, self._unpack

        def replica(batch: Any) -> Any:
            x, y, weight = unpack(batch)
            keywords = {"training": training} if model._call_has_training_arg else {}
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                if training:
                    tape.watch([v.value for v in model.trainable_variables])
                output = model(x, **keywords)
                loss = model._compute_loss(
                    x=x, y=y, y_pred=output, sample_weight=weight, training=training
                )
                scaled = model.optimizer.scale_loss(loss) if training else loss
            if training:
                variables = model.trainable_variables
                gradients = tape.gradient(scaled, [v.value for v in variables])
                model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
            return _vector(loss, _changes(model, y, output, weight))

        return lambda batch: strategy.run(replica, args=(batch,))


def _changes(model: Any, y: Any, output: Any, weight: Any) -> list[Any]:
    """Return how one batch changes the state of the model's metrics, from the initial one."""
    metrics = model._compile_metrics
    if metrics is None:
        return []
    initial = metrics.stateless_reset_state()
    state = metrics.stateless_update_state(initial, y, output, sample_weight=weight)
    pairs = zip(state, initial, strict=True)
    return [tf.cast(after, tf.float64) - tf.cast(before, tf.float64) for after, before in pairs]


def _vector(loss: Any, changes: list[Any]) -> Any:
    """Return everything in one tensor, shape (1 + sizes of the changes,), for one fetch."""
    return tf.concat([tf.reshape(tf.cast(one, tf.float64), [-1]) for one in (loss, *changes)], 0)


class Data(ABC):
    """Batches of one epoch, in pieces for closures.

    Attributes:
        batch_size: Global batch; None if unknown.
        steps: Global batches in an epoch; None if unknown.
        feed: How a piece gets to its worker.
    """

    feed: Any
    batch_size: int | None
    steps: int | None

    @abstractmethod
    def batches(self, epoch: int, pieces: int) -> Iterator[list[tuple[Any, int]]]:
        """Yield each global batch as (arguments of `feed`, samples) of each piece."""

    @abstractmethod
    def sample(self) -> Any:
        """Return a batch, of the right shapes."""


class ArrayData(Data):
    """Arrays, each of shape (samples, ...)."""

    def __init__(
        self, coordinator: Any, arrays: Any, batch_size: int, steps: int | None, seed: int, *,
        shuffle: bool,
    ) -> None:  # fmt: skip
        self._arrays, self.batch_size = arrays, batch_size
        length = batch_length(arrays)
        self._order = make_order(length, batch_size, seed=seed, shuffle=bool(shuffle))
        self.steps = steps or self._order.steps_per_epoch
        self._resident = fits(arrays)
        self.feed = Resident(coordinator, arrays) if self._resident else Fed()

    def batches(self, epoch: int, pieces: int) -> Iterator[list[tuple[Any, int]]]:
        for _, batch in zip(range(self.steps or 0), self._order.batches(epoch), strict=False):
            places = np.asarray(batch, np.int64)
            chosen = [places[a:b] for a, b in _bounds(len(places), pieces)]
            yield [(part if self._resident else self._take(part), len(part)) for part in chosen]

    def _take(self, places: Any) -> Any:
        return tf.nest.map_structure(lambda array: array[places], self._arrays)

    def sample(self) -> Any:
        return self._take(np.zeros(1, np.int64))


class AdapterData(Data):
    """All other data that Keras takes: tf.data sets, PyDatasets, generators."""

    def __init__(self, adapter: Any, steps: int | None) -> None:
        self._adapter, self.feed = adapter, Fed()
        self.steps = steps or adapter.num_batches
        self._limit = steps
        # an endless data set continues in the next epoch
        self._waiting: Iterator[Any] | None = None
        self._first = next(iter(adapter.get_numpy_iterator()))
        self.batch_size = adapter.batch_size or batch_length(self._first)

    def batches(self, epoch: int, pieces: int) -> Iterator[list[tuple[Any, int]]]:
        self._adapter.on_epoch_begin()
        source = self._waiting or iter(self._adapter.get_numpy_iterator())
        self._waiting = source if self._limit else None
        done = 0
        while self._limit is None or done < self._limit:
            batch = next(source, None)
            if batch is None:
                self._waiting = None
                break
            done += 1
            bounds = _bounds(batch_length(batch), pieces)
            yield [(slice_batch(batch, a, b), b - a) for a, b in bounds]
        self._adapter.on_epoch_end()

    def sample(self) -> Any:
        return slice_batch(self._first, 0, 1)


def _bounds(samples: int, pieces: int) -> list[tuple[int, int]]:
    bounds = [share_bounds(samples, index, pieces) for index in range(pieces)]
    return [(a, b) for a, b in bounds if b > a]


def as_arrays(parts: list[Any]) -> list[Any] | None:
    """Return the parts as NumPy; None if one of them is something else."""
    leaves = [leaf for leaf in tf.nest.flatten(parts) if leaf is not None]
    if not all(isinstance(leaf, (np.ndarray, tf.Tensor, tf.Variable)) for leaf in leaves):
        return None
    return [
        tf.nest.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf), part)
        for part in parts
    ]


class Reader:
    """Reads the arguments of `fit`, `evaluate` and `predict`, with the line's overrides."""

    def __init__(self, context: RunContext, coordinator: Any) -> None:
        self._context, self._coordinator = context, coordinator
        self._adapters = importlib.import_module("keras.src.trainers.data_adapters")
        self._tools = importlib.import_module("keras.src.trainers.data_adapters.data_adapter_utils")
        self._slicing = importlib.import_module("keras.src.trainers.data_adapters.array_slicing")

    def data(self, call: dict[str, Any]) -> tuple[Data, Data | None]:
        """Return the data to train on, and to validate with (None without)."""
        given, parts = self._context.spec.overrides, (call["x"], call["y"], call["sample_weight"])
        self._context.options_read = True
        if "batch_size" in given:
            call["batch_size"] = given["batch_size"]
        validation = call["validation_data"]
        if call["validation_split"] and validation is None:
            parts, validation = self._slicing.train_validation_split(
                parts, validation_split=call["validation_split"]
            )
        make = functools.partial(self._make, call["batch_size"])
        weights, steps = call["class_weight"], call["steps_per_epoch"]
        data = make(parts, weights, steps, shuffle=call["shuffle"])
        if validation is None:
            return data, None
        held = self._tools.unpack_x_y_sample_weight(validation)
        make = functools.partial(self._make, call.get("validation_batch_size") or data.batch_size)
        return data, make(held, None, call.get("validation_steps"), shuffle=False)

    def _make(
        self, batch_size: int | None, parts: Any, class_weight: Any, steps: int | None, *,
        shuffle: bool,
    ) -> Data:  # fmt: skip
        x, y, weight = parts
        arrays = as_arrays([x, y, weight])
        if arrays is not None:
            x, y, weight = arrays
            if class_weight is not None:
                weight = np.asarray(
                    self._tools.class_weight_to_sample_weights(y, class_weight), np.float32
                )
            batch = tuple(part for part in (x, y, weight) if part is not None)
            seed = int(self._context.spec.overrides.get("seed", 0))
            return ArrayData(
                self._coordinator, batch, batch_size or DEFAULT_BATCH, steps, seed, shuffle=shuffle
            )
        adapter = self._adapters.get_data_adapter(
            x=x, y=y, sample_weight=weight, batch_size=batch_size or DEFAULT_BATCH,
            steps_per_epoch=steps, shuffle=shuffle, class_weight=class_weight,
        )  # fmt: skip
        return AdapterData(adapter, steps)

    def inputs(self, call: dict[str, Any]) -> Iterator[Any]:
        """Yield the model's inputs of each batch in `predict`."""
        adapter = self._adapters.get_data_adapter(
            x=call["x"], batch_size=call["batch_size"] or DEFAULT_BATCH,
            steps_per_epoch=call["steps"], shuffle=False,
        )  # fmt: skip
        for batch in adapter.get_numpy_iterator():
            yield self._tools.unpack_x_y_sample_weight(batch)[0]
