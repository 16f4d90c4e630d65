"""Repairs of Keras 3 under tf.distribute, in force during a run and undone after it.

Each repair names the upstream report, and is made only where a test of the feature shows that the
installed Keras needs it, so a version that has been repaired is left alone. Written against Keras
3.15 and TensorFlow 2.21; where Keras has been rearranged so that a repair cannot be made, the run
ends with an error that says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import ps_values

from ...errors import RunError
from .markers import note_loss


@contextlib.contextmanager
def losses_noted() -> Iterator[None]:
    """Read each replica's mean loss of each batch; Keras' logs hold the epoch's running mean.

    `train_step` hands the loss to its tracker as `unscale_loss_for_distribution(loss)`.
    """

    def make(original: Any) -> Any:
        def unscale_loss_for_distribution(value: Any) -> Any:
            loss = original(value)
            note_loss(loss)
            return loss

        return unscale_loss_for_distribution

    with _replaced("keras.src.losses.loss", "", "unscale_loss_for_distribution", make):
        yield


@contextlib.contextmanager
def rows_added_up() -> Iterator[None]:
    """Add up the rows of an embedding's gradient that occur several times, before the update.

    Such a gradient lists rows. Several replicas' lists are joined one behind the other, so a row
    that more than one of them needed is there repeatedly; so is one that a batch holds repeatedly.
    Optimizers that square gradients (Adam, RMSprop, Adagrad) take the squares of the parts, where
    the square of their sum is meant: steps depend on how the batch was divided. What is added up
    already passes unchanged.

    Upstream: Keras has squared them since https://github.com/keras-team/keras/pull/18692; Keras 2
    added them up first. The arithmetic is that of TensorFlow's `_deduplicate_indexed_slices`.
    """

    def make(original: Any) -> Any:
        def _all_reduce_sum_gradients(self: Any, grads_and_vars: Any) -> Any:
            summed = original(self, grads_and_vars)
            return [(_rows_once(gradient), variable) for gradient, variable in summed]

        return _all_reduce_sum_gradients

    module = "keras.src.backend.tensorflow.optimizer"
    with _replaced(module, "TFOptimizer", "_all_reduce_sum_gradients", make):
        yield


def _rows_once(gradient: Any) -> Any:
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


@contextlib.contextmanager
def central_storage() -> Iterator[None]:
    """Let replicas write to variables that lie on one device; enter it in the strategy's scope.

    Keras makes what is not trained (Dropout's seeds, BatchNorm's statistics) without a word on how
    replicas' values are to be joined, which the variables of central storage insist on. What
    metrics add up is joined by a sum, but Keras adds by assigning `old + new`, so the old value is
    counted once per replica and grows until it is NaN. Here floats are averaged, others are
    replica 0's, and sums add up what is new.

    Upstream: https://github.com/keras-team/keras/issues/20568 (what an aggregation stands for),
    https://github.com/keras-team/keras/issues/21061 (sums that grow to NaN).
    """
    variable = keras.Variable(0.0, trainable=False)
    if variable.value.aggregation != tf.VariableAggregation.NONE:
        yield
        return

    with (
        _replaced("keras.src.backend.tensorflow.core", "Variable", "_initialize", _joined_by_kind),
        _replaced(
            "keras.src.backend.tensorflow.core", "Variable", "_direct_assign", _sum_of_what_is_new
        ),
    ):
        yield


def _joined_by_kind(original: Any) -> Any:
    def _initialize(self: Any, value: Any) -> None:
        if not self.trainable and self.aggregation == "none":
            is_float = keras.backend.is_float_dtype(self._dtype)
            self._aggregation = "mean" if is_float else "only_first_replica"
        if not tf.executing_eagerly():
            # A model that is built by its first step: TensorFlow compares each new variable
            # with those in this list, which makes tensors that have no truth value there.
            graph = tf.compat.v1.get_default_graph()
            graph.get_collection_ref(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES).clear()
        original(self, value)

    return _initialize


def _sum_of_what_is_new(original: Any) -> Any:
    def _direct_assign(self: Any, value: Any) -> None:
        held = self._value
        central = isinstance(held, ps_values.AggregatingVariable)
        if not central or self.aggregation != "sum" or tf.distribute.in_cross_replica_context():
            original(self, value)
        else:
            held.assign_add(tf.cast(value, held.dtype) - held.read_value())

    return _direct_assign


@contextlib.contextmanager
def multi_worker(distribution: Any, note: Callable[[str], None]) -> Iterator[None]:
    """Let `model.fit` train over several engines; every worker must enter this.

    Two things go wrong in Keras: the first batch, from which a model gets its shapes, is averaged
    over the workers (and a value of several workers cannot be turned into a tensor); and a step's
    metrics are averaged over the workers along a dimension that a number does not have. Here the
    shapes come from the worker's own part, and all numbers of a step are averaged in one message.

    A third is TensorFlow's: a loop in the graph, as `steps_per_execution` makes, does not feed the
    keys by which workers tell their messages apart ("You must feed a value for placeholder
    tensor"). The steps are taken one by one instead.

    Args:
        note: Tells the user.

    Upstream: https://github.com/keras-team/keras/issues/20585,
    https://github.com/tensorflow/tensorflow/issues/72388.
    """
    trainer = importlib.import_module("keras.src.backend.tensorflow.trainer")
    several = trainer._collective_all_reduce_multi_worker(distribution)
    if not several or not _mean_of_number_fails(trainer, distribution):
        yield
        return

    module = trainer.__name__
    with (
        _replaced("keras.src.trainers.trainer", "Trainer", "compile", _step_by_step(note)),
        _replaced(
            module, "TensorFlowTrainer", "_maybe_symbolic_build", _built_from_own_part(distribution)
        ),
        _replaced(module, "", "reduce_per_replica", _averaged_in_one_message),
    ):
        yield


def _built_from_own_part(distribution: Any) -> Callable[[Any], Any]:
    def own_part(value: Any) -> Any:
        return distribution.experimental_local_results(value)[0]

    def make(original: Any) -> Any:
        def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
            if iterator is not None:
                _, _, batches = next(iter(iterator))
                data_batch = tf.nest.map_structure(own_part, next(batches))
            original(self, data_batch=data_batch)

        return _maybe_symbolic_build

    return make


def _averaged_in_one_message(original: Any) -> Any:
    def reduce_per_replica(values: Any, strategy: Any, reduction: str) -> Any:
        if reduction not in ("auto", "mean"):
            return original(values, strategy, reduction)
        leaves = tf.nest.flatten(values)
        if not leaves:
            return values
        joined = tf.stack([tf.cast(leaf, tf.float64) for leaf in _local(strategy, leaves)])
        means = tf.unstack(strategy.reduce("MEAN", joined, axis=None), num=len(leaves))
        kept = [tf.cast(mean, leaf.dtype) for mean, leaf in zip(means, leaves, strict=True)]
        return tf.nest.pack_sequence_as(values, kept)

    return reduce_per_replica


def _step_by_step(note: Callable[[str], None]) -> Callable[[Any], Any]:
    def make(original: Any) -> Any:
        @functools.wraps(original)
        def compile(self: Any, *args: Any, **keywords: Any) -> Any:
            result = original(self, *args, **keywords)
            if self.steps_per_execution > 1:
                self.steps_per_execution = 1
                note(
                    "Steps are taken one by one: TensorFlow cannot put several into one call over "
                    "several workers (steps_per_execution)."
                )
            return result

        return compile

    return make


def _local(strategy: Any, leaves: list[Any]) -> list[Any]:
    """Return this worker's mean of each number, over its own replicas."""
    held = [strategy.experimental_local_results(leaf) for leaf in leaves]
    return [each[0] if len(each) == 1 else tf.add_n(each) / len(each) for each in held]


def _mean_of_number_fails(trainer: Any, distribution: Any) -> bool:
    try:
        trainer.reduce_per_replica(tf.constant(0.0), distribution, "mean")
    except ValueError:
        return True
    return False


@contextlib.contextmanager
def _replaced(module: str, owner: str, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    """Replace `module.owner.name` by what `make` returns for it.

    Raises:
        RunError: This Keras has no such thing.
    """
    try:
        place: Any = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        original = getattr(place, name)
    except (ImportError, AttributeError) as error:
        raise RunError(
            "This version of Keras is built otherwise, so it cannot be repaired for this strategy.",
            seen=f"keras {keras.__version__}, no {error}",
            allowed="keras 3.15",
            next_step="pip install 'keras==3.15.*', then %cluster restart",
        ) from error
    own = name in vars(place)
    setattr(place, name, make(original))
    try:
        yield
    finally:
        if own:
            setattr(place, name, original)
        else:
            delattr(place, name)
