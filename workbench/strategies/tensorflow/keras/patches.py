"""Repairs of Keras 3 under tf.distribute, in force during a run and undone after it.

Each repair names the upstream report. It is made only if a test of the feature shows that the
installed Keras needs it, so a repaired version is not changed. The repairs are written for Keras
3.15 and TensorFlow 2.21. If Keras has changed so much that a repair cannot be made, the run ends
with an error that says so.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import ps_values

from ....errors import RunError
from ..parts.markers import note_loss, note_written

OF_SAMPLES = "rnn_state"
"""Keras' name for the states of a stateful RNN; they belong to each replica's own samples."""


@contextlib.contextmanager
def losses_noted() -> Iterator[None]:
    """Read each replica's mean loss of each batch: Keras' logs hold the epoch's running mean.

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
def statistics_averaged(distribution: Any) -> Iterator[None]:
    """Keep the mean of the replicas' values when they write to a variable (BatchNorm's statistics).

    Keras makes such variables without a rule for joining the replicas' values. So each replica
    keeps its own copy, and only the first replica's copy is read and saved. Engines that train
    together end with different models. Here the copies are averaged at the end of each step, in one
    message, and stay equal. Under `central_storage` variables have a separate rule.

    Upstream: https://github.com/keras-team/keras/issues/20568.
    """
    if distribution.num_replicas_in_sync == 1:
        yield
        return

    def make(original: Any) -> Any:
        def _direct_assign(self: Any, value: Any) -> None:
            original(self, value)
            free = not self.trainable and self.aggregation == "none" and self.name != OF_SAMPLES
            if free and keras.backend.is_float_dtype(self._dtype):
                note_written(self)

        return _direct_assign

    with _replaced("keras.src.backend.tensorflow.core", "Variable", "_direct_assign", make):
        yield


@contextlib.contextmanager
def shapes_found(distribution: Any) -> Iterator[None]:
    """Let `fit` and `evaluate` build any model that they train without a strategy.

    Under a strategy Keras builds a model before its first step, from the mean of the replicas'
    parts of the first batch. Parts of different size have no mean, so the shapes of one part are
    used here. Keras also calls the model to build it, which fails if only the model's own
    `train_step` can train it (a GAN, a VAE). Then the first step builds it, as without a strategy.

    Upstream: https://github.com/keras-team/keras/issues/20585.
    """

    def own_part(value: Any) -> Any:
        return distribution.experimental_local_results(value)[0]

    def make(original: Any) -> Any:
        def _maybe_symbolic_build(self: Any, iterator: Any = None, data_batch: Any = None) -> None:
            if iterator is not None:
                _, _, batches = next(iter(iterator))
                data_batch = tf.nest.map_structure(own_part, next(batches))
            own = type(self).train_step is not keras.Model.train_step
            if own and type(self).call is keras.Model.call:
                self.built = True
                return
            try:
                original(self, data_batch=data_batch)
            except Exception:
                if not own:
                    raise
                self.built = True

        return _maybe_symbolic_build

    module = "keras.src.backend.tensorflow.trainer"
    with _replaced(module, "TensorFlowTrainer", "_maybe_symbolic_build", make):
        yield


@contextlib.contextmanager
def central_storage() -> Iterator[None]:
    """Let replicas write to variables that are on one device; enter it in the strategy's scope.

    Keras makes untrained variables (Dropout's seeds, BatchNorm's statistics) without a rule for
    joining the replicas' values, which central storage requires. Metrics are joined by a sum, but
    Keras adds by assigning `old + new`. So the old value is counted once per replica, and grows
    until it is NaN. Here floats are averaged, others are replica 0's, and sums add only the new
    part.

    Upstream: https://github.com/keras-team/keras/issues/20568 (the meaning of an aggregation),
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
            # A model that is built by its first step: TensorFlow compares each new variable with
            # those in this list. The comparison gives tensors, which have no truth value there.
            graph = tf.compat.v1.get_default_graph()
            graph.get_collection_ref(tf.compat.v1.GraphKeys.TRAINABLE_VARIABLES).clear()
        original(self, value)

    return _initialize


def _sum_of_what_is_new(original: Any) -> Any:
    def _direct_assign(self: Any, value: Any) -> None:
        held = self._value
        central = isinstance(held, ps_values.AggregatingVariable)
        if not central or tf.distribute.in_cross_replica_context():
            original(self, value)
        # where replicas cannot communicate; the scale of float16's loss, equal in all replicas
        elif _in_branch():
            if tf.distribute.get_replica_context()._replica_id_in_sync_group == 0:
                held._v.assign(tf.cast(value, held.dtype))
        elif self.aggregation != "sum":
            original(self, value)
        else:
            held.assign_add(tf.cast(value, held.dtype) - held.read_value())

    return _direct_assign


def _in_branch() -> bool:
    """Whether a replica is traced within a branch of its graph."""
    graph = getattr(threading.current_thread(), "graph", None)  # TensorFlow's, of a replica
    return graph is not None and graph is not tf.compat.v1.get_default_graph()


@contextlib.contextmanager
def multi_worker(distribution: Any, note: Callable[[str], None]) -> Iterator[None]:
    """Let `model.fit` train over several engines; every worker must enter this.

    Keras averages a step's metrics over the workers along a dimension that a number does not have.
    Here all numbers of a step are averaged in one message.

    Another fault is in TensorFlow: a loop in the graph (`steps_per_execution` makes one) does not
    feed the keys by which workers tell their messages apart ("You must feed a value for placeholder
    tensor"). So the steps are taken one by one.

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
        _replaced(module, "", "reduce_per_replica", _averaged_in_one_message),
    ):
        yield


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
                    "`steps_per_execution` has no effect here: on several workers, TensorFlow "
                    "cannot run several steps in one call."
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
        RunError: This version of Keras does not have it.
    """
    try:
        place: Any = importlib.import_module(module)
        place = getattr(place, owner) if owner else place
        original = getattr(place, name)
    except (ImportError, AttributeError) as error:
        raise RunError(
            "Workbench cannot adapt this version of Keras to this strategy.",
            seen=f"keras {keras.__version__}: {error}",
            allowed="keras 3.15",
            next_step="run pip install 'keras==3.15.*', then %cluster restart",
            code="WB-RUN-098",
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
