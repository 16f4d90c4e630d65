"""The steps of `wb.fit`: a global batch, divided over the replicas of this engine.

    samples 0..7 of 20 --> replica 0: mean loss x 8/20, gradients --+
    samples 8..13      --> replica 1: mean loss x 6/20, gradients --+-- sum --> optimizer
    samples 14..19     --> replica 2: mean loss x 6/20, gradients --+

Each replica's mean is weighted by its samples, so shares can be unequal: the sum of the gradients
is the gradient of the whole batch.

Arguments of `wb.fit` add precision, compilation and a schedule of the learning rate.

    precision="bf16"   layers compute in bfloat16, weights and optimizer stay in float32
    compile=True       XLA compiles a replica's forward and backward, without the communication
    scheduler=f        before each step the learning rate becomes f(step)

Sources: Micikevicius et al., Mixed Precision Training, ICLR 2018; Kalamkar et al., A Study of
BFLOAT16 for Deep Learning Training, 2019; https://www.tensorflow.org/xla.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph

from ....engine.context import current
from ....engine.tensorflow.data import slice_batch
from ....engine.tensorflow.models import foreign
from ....engine.training.shares import share_bounds
from ....errors import FitError
from .models import under

if TYPE_CHECKING:
    from ....engine.contract import Job, Share

SUM = tf.distribute.ReduceOp.SUM


class Trainer:
    """One `wb.fit` on one engine; make it in the strategy's scope.

    Args:
        held: The number of replicas on this engine.
        sample: A batch of one sample, from which a model that is not built gets its shapes.
    """

    def __init__(self, distribution: Any, job: Job, held: int, sample: Any) -> None:
        self.distribution, self.job, self.model = distribution, job, job.model
        self._held = held
        self._takes_training = getattr(job.model, "_call_has_training_arg", True)
        self._objective: Any = objective(job.loss) if job.loss is not None else None
        self._step_fn: Any = None if job.step_fn is None else converted(job.step_fn)
        self.metrics = {name: metric_function(name, m) for name, m in job.metrics.items()}
        self._precision = Precision(job.model, job.precision)
        self._build(sample)
        self.optimizer = build_optimizer(job.optimizer, job.model, distribution)
        self._schedule = Schedule(job.scheduler, self.optimizer)
        if job.clip_norm is not None:
            self.optimizer._all_reduce_sum_gradients = list  # done before clipping
        self._gradients = compiled(self._differentiate, wanted=job.compile)
        self._train = tf.function(self.train_all, autograph=False)
        self._score = tf.function(self.score_all, autograph=False)

    def _build(self, sample: Any) -> None:
        if self.model.built and self.model.weights:
            pass
        elif self._step_fn is not None:
            self._step_fn(self.model, to_tensors(sample))
        else:
            self.model(to_tensors(sample[0]))
        if not self.model.trainable_variables:
            raise FitError(
                "The model has no trainable weights.",
                seen=type(self.model).__name__,
                next_step="set trainable=True on some of the model's layers"
                if self.model.weights
                else "add a layer with weights, for example keras.layers.Dense",
                code="WB-FIT-100",
            )

    def step(self, share: Share) -> tuple[list[int], list[float]]:
        """Take one optimizer step; return samples and mean loss of each replica."""
        batch, samples = self._divide(share)
        weights = self._spread([n / share.global_samples for n in samples])
        self._schedule.begin(share.step)
        losses = self._train(batch, weights)
        values = self.distribution.experimental_local_results(losses)
        return samples, [float(value) for value in values]

    def evaluate(self, shares: Iterable[Share]) -> dict[str, float]:
        """Return loss and metrics over an evaluation set, each a mean over its samples."""
        names = ["loss", *self.metrics]
        sums = np.zeros(len(names) + 1)
        for share in shares:
            batch, samples = self._divide(share)
            sums += self._score(batch, self._spread([float(n) for n in samples])).numpy()
        return dict(zip(names, (sums[:-1] / sums[-1]).tolist(), strict=True))

    def close(self) -> None:
        """Leave the user's optimizer and layers as they were."""
        vars(self.optimizer).pop("_all_reduce_sum_gradients", None)
        self._precision.restore()

    # -- dividing ----------------------------------------------------------------------------------

    def _divide(self, share: Share) -> tuple[Any, list[int]]:
        """Return the share as one value per replica, and how many samples count in each."""
        bounds = [share_bounds(share.samples, i, self._held) for i in range(self._held)]
        # A replica without a sample computes a sample that does not count.
        parts = [slice_batch(share.data, a, b) if b > a else slice_batch(share.data, 0, 1)
                 for a, b in bounds]  # fmt: skip
        return self._spread_parts(parts), [b - a for a, b in bounds]

    def _spread_parts(self, parts: list[Any]) -> Any:
        structure = parts[0]
        leaves = [tf.nest.flatten(part) for part in parts]
        spread = [self._spread(list(same)) for same in zip(*leaves, strict=True)]
        return tf.nest.pack_sequence_as(structure, spread)

    def _spread(self, values: list[Any]) -> Any:
        first = self._first_replica
        return self.distribution.experimental_distribute_values_from_function(
            lambda where: tf.convert_to_tensor(values[where.replica_id_in_sync_group - first])
        )

    @property
    def _first_replica(self) -> int:
        context = self.distribution.extended
        return int(getattr(context, "_id_in_cluster", 0) or 0) * self._held

    # -- in the graph ------------------------------------------------------------------------------

    def train_all(self, batch: Any, weights: Any) -> Any:
        """Train on every replica's share of a batch; in a graph."""
        return self.distribution.run(self._train_replica, args=(batch, weights))

    def _train_replica(self, batch: Any, weight: Any) -> Any:
        parts = micro_batches(batch, self.job.accumulate)
        total, gradients = 0.0, None
        for part, fraction in parts:
            loss, found = self._gradients(part, tf.cast(weight * fraction, tf.float64))
            gradients = found if gradients is None else _add(gradients, found)
            total += loss * fraction
        self._apply(gradients, self.model.trainable_variables)
        return total

    def _differentiate(self, part: Any, weight: Any) -> tuple[Any, list[Any]]:
        """Return the loss of a micro-batch, and the gradients of its part of the global loss."""
        variables = self.model.trainable_variables
        with tf.GradientTape() as tape:
            loss = self._loss(part)
            scaled = loss * tf.cast(weight, loss.dtype)
        return tf.stop_gradient(loss), tape.gradient(scaled, [v.value for v in variables])

    def _loss(self, batch: Any) -> Any:
        if self._step_fn is not None:
            loss = self._precision.widen(self._step_fn(self.model, batch))
        else:
            x, y = batch
            loss = self._objective(self._call(x, True), y)
        if self.model.losses:  # regularisation: the same on every replica
            loss += tf.cast(tf.add_n(self.model.losses), loss.dtype)
        return loss

    def _call(self, x: Any, training: bool) -> Any:
        out = self.model(x, training=training) if self._takes_training else self.model(x)
        return self._precision.widen(out)

    def _apply(self, gradients: Any, variables: Any) -> None:
        norm, optimizer = self.job.clip_norm, self.optimizer
        if norm is None:
            optimizer.apply(gradients, variables)
            return
        # The norm must be that of the whole batch's gradient, so the gradients are added up first.
        add_up = type(optimizer)._all_reduce_sum_gradients
        summed = add_up(optimizer, zip(gradients, variables, strict=True))
        found = [gradient for gradient, _ in summed]
        # If an Embedding's gradient lists a row several times, the sum of these entries counts.
        whole = tf.linalg.global_norm([rows_once(gradient) for gradient in found])
        clipped, _ = tf.clip_by_global_norm(found, norm, use_norm=whole)
        optimizer.apply(clipped, variables)

    def score_all(self, batch: Any, samples: Any) -> Any:
        """Return the sum of all replicas' scores; in a graph."""
        scores = self.distribution.run(self._score_replica, args=(batch, samples))
        return self.distribution.reduce(SUM, scores, axis=None)

    def _score_replica(self, batch: Any, samples: Any) -> Any:
        """Return (metrics + 2,): each score times the samples, and the samples."""
        if self._step_fn is not None:
            values = [self._step_fn(self.model, batch)]
        else:
            x, y = batch
            out = self._call(x, False)
            values = [self._objective(out, y), *(m(out, y) for m in self.metrics.values())]
        scores = tf.stack([tf.reshape(tf.cast(value, tf.float64), ()) for value in values])
        count = tf.cast(samples, tf.float64)
        # The values of a replica without a sample can be anything.
        counted = tf.where(count > 0, scores * count, tf.zeros_like(scores))
        return tf.concat([counted, [count]], 0)


def to_tensors(batch: Any) -> Any:
    """Return a batch of arrays as tensors."""
    return tf.nest.map_structure(tf.convert_to_tensor, batch)


def micro_batches(batch: Any, accumulate: int) -> list[tuple[Any, float]]:
    """Return a replica's batch in parts, with the fraction of the samples in each."""
    held = tf.nest.flatten(batch)[0].shape[0]
    count = min(accumulate, held)
    if count <= 1:
        return [(batch, 1.0)]
    cuts = [i * held // count for i in range(count + 1)]
    return [(slice_batch(batch, a, b), (b - a) / held) for a, b in pairwise(cuts)]


def rows_once(gradient: Any) -> Any:
    """Return a gradient in which rows that were listed several times are added up."""
    if not isinstance(gradient, tf.IndexedSlices):
        return gradient
    rows, places = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, places, tf.size(rows))
    return tf.IndexedSlices(values, rows, gradient.dense_shape)


def _add(some: list[Any], more: list[Any]) -> list[Any]:
    return [a if b is None else b if a is None else _sum(a, b)
            for a, b in zip(some, more, strict=True)]  # fmt: skip


def _sum(a: Any, b: Any) -> Any:
    if isinstance(a, tf.IndexedSlices) and isinstance(b, tf.IndexedSlices):
        values, rows = tf.concat([a.values, b.values], 0), tf.concat([a.indices, b.indices], 0)
        return tf.IndexedSlices(values, rows, a.dense_shape)
    return tf.convert_to_tensor(a) + tf.convert_to_tensor(b)


def converted(function: Any) -> Any:
    """Return a user's function in the form for `tf.function`: it can contain `if tensor:`."""
    enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
    return autograph.tf_convert(function, enabled)


def objective(loss: Any) -> Callable[[Any, Any], Any]:
    """Return a mean over a replica's batch as `loss(output, y)`.

    Keras' own losses take their arguments in the other order, and divide by the number of replicas
    in a replica's context; here it is divided by the share of the samples.

    Raises:
        FitError: It is a Keras loss that adds up instead of averaging.
    """
    if foreign(loss):
        raise FitError(
            "A PyTorch loss cannot be used in a TensorFlow run.",
            seen=type(loss).__name__,
            next_step="pass a Keras loss: "
            "loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)",
            code="WB-FIT-101",
        )
    if isinstance(loss, keras.losses.Loss):
        if loss.reduction in ("sum",):
            raise FitError(
                "The loss must be the mean over the batch, not the sum.",
                seen=f"reduction={loss.reduction!r}",
                allowed="reduction='sum_over_batch_size' (Keras's name for the mean)",
                code="WB-FIT-102",
            )
        return lambda out, y: tf.reduce_mean(loss.call(y, out))
    if str(getattr(loss, "__module__", "")).startswith("keras."):
        return lambda out, y: tf.reduce_mean(loss(y, out))
    mean = converted(loss)
    return lambda out, y: tf.reduce_mean(mean(out, y))


def metric_function(name: str, metric: Any) -> Callable[[Any, Any], Any]:
    """Return a metric as a mean over the batch, `metric(output, y)`.

    Raises:
        FitError: It is a Keras metric that is not a mean over samples.
    """
    if isinstance(metric, keras.metrics.MeanMetricWrapper):
        function, keywords = metric._fn, metric._fn_kwargs
        return lambda out, y: tf.reduce_mean(tf.cast(function(y, out, **keywords), tf.float32))
    if isinstance(metric, keras.metrics.Metric):
        raise FitError(
            f"Metric `{name}` is not a mean over samples, so the replicas' values cannot be "
            "combined.",
            seen=type(metric).__name__,
            allowed="a function of (output, y), or a Keras metric that is a mean over samples",
            next_step="pass the metric to model.compile, and train with model.fit",
            code="WB-FIT-103",
        )
    if str(getattr(metric, "__module__", "")).startswith("keras."):
        return lambda out, y: tf.reduce_mean(tf.cast(metric(y, out), tf.float32))
    score = converted(metric)
    return lambda out, y: tf.reduce_mean(tf.cast(score(out, y), tf.float64))


def build_optimizer(optimizer: Any, model: Any, distribution: Any) -> Any:
    """Return a Keras optimizer, built on the model's variables.

    Raises:
        FitError: A function returned something else, or the optimizer belongs to another model or
            strategy.
    """
    made = optimizer
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        made = optimizer(model.trainable_variables)
        if not isinstance(made, keras.optimizers.Optimizer):
            raise FitError(
                "`optimizer` is a function, but it does not return a Keras optimizer.",
                seen=type(made).__name__,
                next_step="use optimizer=lambda p: keras.optimizers.SGD(0.1)",
                code="WB-FIT-104",
            )
    if made._distribution_strategy is not distribution:
        raise FitError(
            "The optimizer was made outside the scope of this run's strategy, so this run cannot "
            "use it.",
            seen=f"an optimizer made {under(made._distribution_strategy)}",
            allowed=f"an optimizer made in the scope of this run's {type(distribution).__name__}",
            next_step="make the optimizer in the cell that trains, because that cell runs in the "
            "strategy's scope",
            code="WB-FIT-105",
        )
    if not made.built:
        made.build(model.trainable_variables)
    elif {id(v) for v in made._trainable_variables} != {id(v) for v in model.trainable_variables}:
        raise FitError(
            "The optimizer was built for another model's variables.",
            next_step="pass a function: optimizer=lambda p: keras.optimizers.SGD(0.1)",
            code="WB-FIT-106",
        )
    return made


class Precision:
    """A model's layers under another precision, until `restore`.

    Args:
        precision: None or `bf16`.

    Raises:
        FitError: The precision is `fp16`, which needs scaled gradients.
    """

    def __init__(self, model: Any, precision: str | None) -> None:
        if precision == "fp16":
            raise FitError(
                "`precision` must be None or 'bf16'. With 'fp16' the loss must be scaled, but in "
                "TensorFlow wb.fit does not scale the loss.",
                seen="precision='fp16'",
                allowed="None or 'bf16'",
                next_step="use precision='bf16'; or call "
                "keras.config.set_dtype_policy('mixed_float16'), then build the model, and train "
                "it with model.fit, which scales the loss",
                code="WB-FIT-094",
            )
        self.mixed = precision is not None
        self._before: list[tuple[Any, Any]] = []
        for layer in model._flatten_layers() if self.mixed else ():
            if layer.dtype_policy.variable_dtype == "float32":
                self._before.append((layer, layer.dtype_policy))
                layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")

    def widen(self, values: Any) -> Any:
        """Return the model's output in float32: a loss with 8 bits of precision is too coarse."""
        if not self.mixed:
            return values
        return tf.nest.map_structure(
            lambda one: tf.cast(one, tf.float32) if one.dtype == tf.bfloat16 else one, values
        )

    def restore(self) -> None:
        """Give the layers their own precision back."""
        for layer, policy in self._before:
            layer.dtype_policy = policy
        self._before.clear()


def compiled(function: Callable[..., Any], *, wanted: bool) -> Callable[..., Any]:
    """Return the function, compiled by XLA if `wb.fit` asks for it."""
    if not wanted:
        return function
    made: Callable[..., Any] = tf.function(function, autograph=False, jit_compile=True)
    return made


class Schedule:
    """Sets an optimizer's learning rate before each step.

    Args:
        rate: A function of the step, counted from 0; None does not change the learning rate.

    Raises:
        FitError: The optimizer has its own schedule.
    """

    def __init__(self, rate: Callable[[int], Any] | None, optimizer: Any) -> None:
        own = getattr(optimizer, "_learning_rate", None)
        if rate is not None and isinstance(own, keras.optimizers.schedules.LearningRateSchedule):
            raise FitError(
                "`scheduler` cannot be used, because the optimizer already has a learning rate "
                "schedule.",
                seen=f"scheduler=..., and learning_rate={type(own).__name__}",
                next_step="remove scheduler, or make the optimizer with a number as its "
                "learning rate",
                code="WB-FIT-095",
            )
        self._rate, self._optimizer = rate, optimizer

    def begin(self, step: int) -> None:
        """Set the learning rate of a step."""
        if self._rate is not None:
            rate = float(self._rate(step))
            self._optimizer.learning_rate = rate
            if (run := current()) is not None:
                run.log_rate(rate)
