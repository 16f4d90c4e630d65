"""Measures when each replica's gradients were ready, and how long the replica then waited.

TensorFlow runs a step as one graph for all replicas. No Python line of the user's code can read a
clock between one replica's backward and the all-reduce. So Workbench puts marks into the graph
while it is traced:

    began | forward, backward . . . | ready | all-reduce . . . . | reduced | optimizer

    compute = (ready - began) + (end - reduced)     exposed = reduced - ready
    sync wait (metrics.derive) = latest ready of all replicas - own ready

`began` follows the replica's inputs. `ready` follows every gradient and is before
`tf.distribute.ReplicaContext.all_reduce`; `reduced` is after this call. Keras' optimizers call
`all_reduce` themselves, so `model.fit` and a loop with `strategy.run` are marked in the same way.
If a step reduces several times (synchronised BatchNorm), a replica's ready time is read from a
clock of its computation, which stops while the replica is blocked.

Each mark is a `tf.timestamp` that is *independent*: otherwise TensorFlow runs all operations with
side effects in one chain over all replicas. Every replica would then read the straggler's time. The
times of a step are kept next to the replicas and read when it has ended (`traced_step.py`). This
costs about 0.05 ms per step; one call into Python from the graph would cost several times that.

Delays injected into a replica are spent before its `ready`, for every phase, because they are on
the same path. The graph contains them only while delays are injected.

Source: tf.distribute guide, https://www.tensorflow.org/guide/distributed_training; the effect of
statefulness: `tensorflow/python/framework/auto_control_deps.py`.

How it is used (one object per run and engine)::

    with Markers(strategy, context.faults.replicas) as markers:    # patches until it is left
        for batch in batches:
            start_s = clock()
            train(batch)                                       # any number of steps
            for step in markers.take(start_s, clock()):        # those steps, oldest first
                for rank, result in enumerate(step.results, first_rank):
                    recorder.add_step(number, result, step.start_s, step.end_s, ...)
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.distribute import (
    distribute_lib,
    mirrored_run,
    one_device_strategy,
    ps_values,
    values,
)
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import control_flow_util, resource_variable_ops

from ....engine.contract import NAN
from ....engine.telemetry.recorder import StepResult
from .traced_step import EACH, MEAN, PART, Run, Stamps, Trace, in_replica, under_way

if TYPE_CHECKING:
    from ....engine.telemetry.step_gate import FaultInjector

clock = time.perf_counter

VARIABLES = (
    values.DistributedVariable,
    ps_values.AggregatingVariable,
    resource_variable_ops.ResourceVariable,
)
"""The variables that a replica can write to."""


@dataclass(frozen=True)
class Measured:
    """One optimizer step, of all replicas that this engine holds.

    Attributes:
        start_s, end_s: When the step began and ended on this engine. If one call takes several
            steps (`steps_per_execution`), a step ends when the first replica begins the next.
        data_wait_s: By replica, from `start_s` until its inputs were there; NaN in a step that was
            also traced, because it may have waited for its inputs or for the tracing.
        results: By replica; `samples` is 0 and `loss` NaN if they could not be seen.
        eager: Whether no tf.function was used: TensorFlow then runs the replicas one after another,
            and the first waits for all others.
        set_up_s: How long the step was traced before it began.
    """

    start_s: float
    end_s: float
    data_wait_s: tuple[float, ...]
    results: tuple[StepResult, ...]
    eager: bool = False
    set_up_s: float = 0.0


class Markers:
    """Marks in every step that is traced inside this context.

    It can be entered again for another run under the same strategy: functions that were traced in
    an earlier one (`model.fit`'s, a `tf.function` of an earlier cell) are marked already.

    Args:
        strategy: The tf.distribute strategy of the run.
        faults: One injector per replica that this engine holds, in the order of their ranks.
    """

    def __init__(self, strategy: Any, faults: Sequence[FaultInjector]) -> None:
        devices = strategy.extended.worker_devices
        self._run = Run(int(strategy.num_replicas_in_sync), devices, faults)
        self._traced = False
        self._undo: list[tuple[Any, str, Any]] = []

    def watch(self, faults: Sequence[FaultInjector]) -> Markers:
        """Serve another run: its injectors replace the earlier ones."""
        self._run.faults = tuple(faults)
        self._run.look_at_faults()
        return self

    def __enter__(self) -> Markers:
        """Patch TensorFlow: functions that are traced from now on are marked."""
        one_device = one_device_strategy.OneDeviceExtended
        self._patch(mirrored_run, "_call_for_each_replica", self._each_replica)
        self._patch(one_device, "_call_for_each_replica", self._one_replica)
        self._patch(distribute_lib.ReplicaContextBase, "all_reduce", _marked_all_reduce)
        self._patch(tf.GradientTape, "gradient", _watched_gradient)
        for owner in VARIABLES:
            for name in ("assign", "assign_add", "assign_sub"):
                self._patch(owner, name, _watched_update)
        scaling = keras.optimizers.LossScaleOptimizer
        self._patch(scaling, "scale_loss", _watched_scaling)
        self._patch(scaling, "check_finite", _agreed)
        self._patch(scaling, "_stateful_handle_non_finite_grads", _passed_over)
        self._run.log.clear()  # functions that were traced in an earlier run may have run since
        self._run.open = True
        return self

    def __exit__(self, *error: object) -> None:
        """Undo the patches; marks in traced functions record nothing until the next run."""
        self._run.open = False
        for owner, name, before in reversed(self._undo):
            setattr(owner, name, before)
        self._undo.clear()
        self._traced = False

    def take(self, start_s: float, end_s: float) -> list[Measured]:
        """Return the steps done since the last call, oldest first.

        Empty if no gradient was reduced by `all_reduce`: then nothing could be measured.

        Args:
            start_s: When the first of them began, before it asked for its data.
            end_s: When the last of them had ended.
        """
        self._run.look_at_faults()
        steps = sorted(self._run.log.take(), key=lambda step: step[0].began_s)
        traced, self._traced = self._traced, False
        bounds = [start_s, *(min(one.began_s for one in step) for step in steps[1:]), end_s]
        return [
            self._measured(step, bounds[i], bounds[i + 1], traced=traced and i == 0)
            for i, step in enumerate(steps)
        ]

    def _measured(
        self, step: list[Stamps], start_s: float, end_s: float, *, traced: bool
    ) -> Measured:
        results, eager = [], step[0].eager
        for one, faults in zip(step, self._run.faults, strict=True):
            compute_s = end_s - one.began_s - one.exposed_s
            faults.compute_s = compute_s - one.injected_s
            results.append(
                StepResult(
                    one.samples,
                    one.loss,
                    compute_s,
                    ready_s=one.ready_s,
                    exposed_s=one.exposed_s,
                    has_loss=one.has_loss and one.samples > 0,
                )
            )
        waits = [NAN if traced else one.began_s - start_s for one in step]
        if eager:  # later replicas waited for the earlier replicas, not for data
            waits = [min(waits)] * len(waits)
        began_s = min(one.began_s for one in step) if traced else start_s
        return Measured(
            began_s, end_s, tuple(waits), tuple(results), eager, set_up_s=began_s - start_s
        )

    def _patch(self, owner: Any, name: str, make: Callable[[Any], Any]) -> None:
        before = getattr(owner, name)
        self._undo.append((owner, name, before))
        setattr(owner, name, make(before))

    def _each_replica(self, original: Any) -> Any:
        """Strategies with several replicas: the innermost function that all of them call."""

        def call(distribution: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(fn, polymorphic_function.Function) or _compiled():
                return original(distribution, fn, args, kwargs)
            return self._marked(original, distribution, fn, args, kwargs)

        return tf.autograph.experimental.do_not_convert(call)

    def _one_replica(self, original: Any) -> Any:
        """OneDeviceStrategy; a tf.function is entered only when it is traced, as in the others."""
        lifted: Any = weakref.WeakKeyDictionary()

        def lift(extended: Any, fn: Any) -> Any:
            enabled = ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED)
            inner = fn.python_function
            inner = autograph.tf_convert(inner, enabled) if fn._autograph else inner

            def marked(*args: Any, **kwargs: Any) -> Any:
                return call(extended, inner, args, kwargs)

            clone = fn._clone(python_function=tf.autograph.experimental.do_not_convert(marked))
            return lifted.setdefault(fn, clone)

        def call(extended: Any, fn: Any, args: Any, kwargs: Any) -> Any:
            if isinstance(fn, polymorphic_function.Function):
                if fn._jit_compile:
                    return original(extended, fn, args, kwargs)
                return (lifted.get(fn) or lift(extended, fn))(*args, **kwargs)
            if _compiled():
                return original(extended, fn, args, kwargs)
            return self._marked(original, extended, fn, args, kwargs)

        return tf.autograph.experimental.do_not_convert(call)

    def _marked(self, original: Any, owner: Any, fn: Any, args: Any, kwargs: Any) -> Any:
        with Trace(self._run, eager=tf.executing_eagerly()) as trace:
            self._traced |= not trace.eager
            outcome = original(owner, trace.wrap(fn), args, kwargs)
        trace.end()
        return outcome


def note_loss(loss: Any) -> None:
    """Note the traced replica's mean loss; outside of tracing this has no effect."""
    replica = in_replica()
    if replica is not None:
        replica.see_loss(loss, MEAN)


def note_written(variable: Any) -> None:
    """Note that the traced replica wrote its copy of a variable without an aggregation rule."""
    replica = in_replica()
    if replica is not None:
        replica.see_written(variable)


def _marked_all_reduce(original: Any) -> Any:
    def all_reduce(self: Any, reduce_op: Any, value: Any, options: Any = None) -> Any:
        replica = in_replica()
        if replica is None:
            return original(self, reduce_op, value, options)
        return replica.reduce(original, self, reduce_op, value, options)

    return tf.autograph.experimental.do_not_convert(all_reduce)


def _watched_gradient(original: Any) -> Any:
    def gradient(self: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
        replica = in_replica()
        if replica is not None and isinstance(target, tf.Tensor):
            learnt = replica.see_sources((args, kwargs))
            if target.shape.rank == 0:
                replica.see_loss(replica.unscaled(target), PART)
            elif learnt:  # except a penalty on the gradient with respect to the inputs
                replica.see_loss(replica.unscaled(target), EACH)
        return original(self, target, *args, **kwargs)

    return tf.autograph.experimental.do_not_convert(gradient)


def _watched_update(original: Any) -> Any:
    @functools.wraps(original)
    def assign(self: Any, *args: Any, **kwargs: Any) -> Any:
        replica = in_replica()
        if replica is not None:
            replica.see_update(self)
        return original(self, *args, **kwargs)

    return tf.autograph.experimental.do_not_convert(assign)


def _watched_scaling(original: Any) -> Any:
    def scale_loss(self: Any, loss: Any) -> Any:
        replica, scaled = in_replica(), original(self, loss)
        if replica is not None:
            replica.see_scaled(loss, scaled)
        return scaled

    return tf.autograph.experimental.do_not_convert(scale_loss)


def _agreed(original: Any) -> Any:
    """Let all replicas skip a step if the gradients of one replica are not finite.

    Keras checks only the first replica of each engine. Infinite gradients of another replica would
    be added to the weights. And if engines decide differently, they would wait for each other
    forever.
    """

    def check_finite(self: Any, gradients: Any) -> Any:
        replica = in_replica()
        if replica is not None:
            replica.see_scaler(self)
        finite, context = original(self, gradients), tf.distribute.get_replica_context()
        if context is None or context.num_replicas_in_sync == 1:
            return finite
        failed = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(context.all_reduce(tf.distribute.ReduceOp.SUM, failed), 0.0)

    return tf.autograph.experimental.do_not_convert(check_finite)


def _passed_over(original: Any) -> Any:
    def handle(self: Any, *args: Any) -> Any:
        result, trace = original(self, *args), under_way()
        if trace is not None:
            trace.passed_over(self)
        return result

    return tf.autograph.experimental.do_not_convert(handle)


def _compiled() -> bool:
    """Whether XLA will compile the traced function, which then cannot call Python."""
    return not tf.executing_eagerly() and control_flow_util.GraphOrParentsInXlaContext(
        tf.compat.v1.get_default_graph()
    )
