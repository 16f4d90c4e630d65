"""Repairs of Keras 3 under tf.distribute, in force during a run and undone after it.

Each repair names the upstream report, and is made only where a test of the feature shows that the
installed Keras needs it, so a version that has been repaired is left alone. Written against Keras
3.15 and TensorFlow 2.21; where Keras has been rearranged so that a repair cannot be made, the run
ends with an error that says so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.distribute import ps_values

from ...errors import RunError
from .markers import note_loss

OLDEST = (3, 0)
"""Keras versions before this one are built otherwise."""


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

    def initialize(original: Any) -> Any:
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

    def assign(original: Any) -> Any:
        def _direct_assign(self: Any, value: Any) -> None:
            held = self._value
            central = isinstance(held, ps_values.AggregatingVariable)
            if not central or self.aggregation != "sum" or tf.distribute.in_cross_replica_context():
                original(self, value)
            else:
                held.assign_add(tf.cast(value, held.dtype) - held.read_value())

        return _direct_assign

    with (
        _replaced("keras.src.backend.tensorflow.core", "Variable", "_initialize", initialize),
        _replaced("keras.src.backend.tensorflow.core", "Variable", "_direct_assign", assign),
    ):
        yield


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
