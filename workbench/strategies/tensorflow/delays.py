"""Injected delays in closures: calls of Python that the worker carries out.

While a fault is active, a closure's function is traced anew with two such calls in it:

    began | pull, forward, backward . . . | delay | push

Python functions do not travel with a graph. A `PyFunc` finds its function by a token in the
registry of the process that runs it, so the worker's engine registers its own under known tokens
(`servers.WorkerFaults`).

Source: `tensorflow/python/ops/script_ops.py`.
"""

from __future__ import annotations

import weakref
from typing import Any

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.autograph.impl import api as autograph
from tensorflow.python.eager.polymorphic_function import polymorphic_function
from tensorflow.python.ops import gen_script_ops

BEGAN, DELAY = "workbench_began", "workbench_delay"
"""Tokens under which a worker's Python functions are called from the graphs that are sent to it."""


class Delays:
    """Makes variants of functions that have delays in them."""

    def __init__(self) -> None:
        self._began: Any = None  # in a graph that is traced with delays: when it began
        self._variants: Any = weakref.WeakKeyDictionary()

    def variant(self, function: Any) -> Any:
        """Return the function with delays in it; a plain Python function as it is."""
        if not isinstance(function, polymorphic_function.Function):
            return function
        if function not in self._variants:
            self._variants[function] = self._delayed(function)
        return self._variants[function]

    def _delayed(self, function: Any) -> Any:
        inner = function.python_function
        if function._autograph:
            inner = autograph.tf_convert(inner, ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED))

        def delayed(*args: Any, **keywords: Any) -> Any:
            self._began = gen_script_ops.py_func([], BEGAN, [tf.float64])[0]
            try:
                with tf.control_dependencies([self._began]):
                    return inner(*args, **keywords)
            finally:
                self._began = None

        return function._clone(python_function=tf.autograph.experimental.do_not_convert(delayed))

    def hold(self, gradients: Any) -> Any:
        """Hold gradients back for as long as the worker says; none where nothing is delayed."""
        if self._began is None:
            return gradients
        gradients = list(gradients)
        parts = [g.values if isinstance(g, tf.IndexedSlices) else g for g in gradients]
        with tf.control_dependencies([part for part in parts if part is not None]):
            paused = gen_script_ops.py_func([self._began], DELAY, [tf.float64])
        with tf.control_dependencies(paused):
            return [None if g is None else tf.identity(g) for g in gradients]
