"""What `wb.fit` may be asked for besides: precision, compilation, a schedule of the learning rate.

    precision="bf16"   layers compute in bfloat16, weights and optimizer stay in float32
    compile=True       XLA compiles a replica's forward and backward; what travels stays outside
    scheduler=f        before each step the learning rate becomes f(step)

Sources: Micikevicius et al., Mixed Precision Training, ICLR 2018; Kalamkar et al., A Study of
BFLOAT16 for Deep Learning Training, 2019; https://www.tensorflow.org/xla.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from ...errors import FitError


class Precision:
    """A model's layers under another precision, until `restore`.

    Args:
        precision: None or `bf16`.

    Raises:
        FitError: It is `fp16`, whose gradients would have to be scaled.
    """

    def __init__(self, model: Any, precision: str | None) -> None:
        if precision == "fp16":
            raise FitError(
                "In TensorFlow wb.fit does not scale the loss, as float16 needs it.",
                seen="precision='fp16'",
                allowed="None or 'bf16'",
                next_step="precision='bf16', or keras.config.set_dtype_policy('mixed_float16') "
                "before the model is built, and model.fit: Keras scales by itself",
                code="WB-FIT-094",
            )
        self.mixed = precision is not None
        self._before: list[tuple[Any, Any]] = []
        for layer in model._flatten_layers() if self.mixed else ():
            if layer.dtype_policy.variable_dtype == "float32":
                self._before.append((layer, layer.dtype_policy))
                layer.dtype_policy = keras.DTypePolicy("mixed_bfloat16")

    def widen(self, values: Any) -> Any:
        """Return what the model gave, in float32: a loss in 8 bits would tell little."""
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
    """Return the function, compiled by XLA where that is wanted."""
    if not wanted:
        return function
    made: Callable[..., Any] = tf.function(function, autograph=False, jit_compile=True)
    return made


class Schedule:
    """Sets an optimizer's learning rate before each step.

    Args:
        rate: A function of the step, counted from 0; None leaves the learning rate alone.

    Raises:
        FitError: The optimizer has a schedule of its own.
    """

    def __init__(self, rate: Callable[[int], Any] | None, optimizer: Any) -> None:
        own = getattr(optimizer, "_learning_rate", None)
        if rate is not None and isinstance(own, keras.optimizers.schedules.LearningRateSchedule):
            raise FitError(
                "The optimizer has a schedule already.",
                seen=f"scheduler=..., and learning_rate={type(own).__name__}",
                next_step="leave scheduler out, or make the optimizer with a number",
                code="WB-FIT-095",
            )
        self._rate, self._optimizer = rate, optimizer

    def begin(self, step: int) -> None:
        """Set the learning rate of a step."""
        if self._rate is not None:
            self._optimizer.learning_rate = float(self._rate(step))
